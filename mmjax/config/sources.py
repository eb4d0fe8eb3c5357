"""Config of data sources: the fields of each kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from mmjax.config.checks import check
from mmjax.config.losses import Answers
from mmjax.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, at_least, at_most

MAX_EMBEDDED = 10_000_000  # samples; each is generated once before training, to compute its length
# encoders of the embedded samples' media
EMBEDDED_NEEDS = {
    "image": ("vision",),
    "audio": ("audio",),
    "mixed": ("vision", "audio"),
    "text": (),
}
Outside = Literal["refuse", "allow"]  # media references that lead out of a source's folder


@dataclass(frozen=True)
class EmbeddedSource:
    """Handwritten digits and keypad tones with questions about them, generated from a seed; nothing to download."""

    kind: Literal["embedded"] = "embedded"
    # kinds of samples
    modalities: tuple[Literal["image", "audio", "mixed", "text"], ...] = (
        "image",
        "audio",
        "mixed",
        "text",
    )
    samples: Annotated[int, at_least(1), at_most(MAX_EMBEDDED)] = 24_000  # of the train split
    questions: PositiveInt = 4  # at most, about one sample's media, in training
    weight: NonNegativeFloat = 1.0  # share of the samples

    @property
    def has_branches(self) -> bool:
        """Tell whether samples may have branches, whatever the loss."""
        return self.questions > 1

    def check(self, where: str) -> None:
        check(
            bool(self.modalities),
            f"{where}.modalities is empty; name some of {', '.join(EMBEDDED_NEEDS)}",
        )
        check(
            len(set(self.modalities)) == len(self.modalities),
            f"{where}.modalities names one twice; name each once",
        )


@dataclass(frozen=True)
class FunctionSource:
    """A source built by your own function, ``module:qualname``, in mmjax or in the config file itself."""

    function: str  # `config:name` of the config file's own, or mmjax's `module:name`
    # passed to it beside `split`
    arguments: dict[str, int | float | str | bool] = field(default_factory=dict)
    kind: Literal["function"] = "function"
    has_branches: ClassVar[bool] = True  # for all that is known
    weight: NonNegativeFloat = 1.0  # share of the samples


# Sources of files: local paths, or URLs that fsspec opens. `path` is the training split, with `*`
# for several files; `validation` and `test` are optional files of the same format. Paths in records
# are relative to `images`, `audio` and `videos`: a folder, URL, .zip or .tar; if empty, the folder
# of the file itself. References that lead out of them (absolute paths, URLs, `..`, links) are
# refused unless outside="allow".


@dataclass(frozen=True)
class ConversationFiles:
    """Fields that all sources of JSON or JSON lines share."""

    # Fields that mean the same in other kinds of sources, which take them over where a config is
    # given another kind.
    carried: ClassVar[tuple[str, ...]] = (
        "path",
        "images",
        "audio",
        "videos",
        "validation",
        "test",
        "outside",
        "ignore",
        "weight",
    )
    path: str  # of the training split; `*` for several files, or a URL
    images: str = ""  # folder, URL, .zip or .tar of the images; empty: the file's folder
    audio: str = ""  # the same for the clips
    videos: str = ""  # the same for the videos
    validation: str = ""  # files of that split
    test: str = ""  # files of that split
    outside: Outside = "refuse"  # references that lead out of its folders
    weight: NonNegativeFloat = 1.0  # share of the samples
    ignore: tuple[str, ...] = ()  # patterns of files that are left out: *.bak, drafts/*


@dataclass(frozen=True)
class LlavaSource(ConversationFiles):
    """LLaVA's: {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>..."}]}."""

    kind: Literal["llava"] = "llava"


@dataclass(frozen=True)
class ShareGptSource(ConversationFiles):
    """ShareGPT's: {"conversations": [{"from": "human", "value": "..."}]}, "images", "audios", "videos"."""

    kind: Literal["sharegpt"] = "sharegpt"


@dataclass(frozen=True)
class MessagesSource(ConversationFiles):
    """OpenAI's: {"messages": [{"role": "user", "content": "..." or typed parts}]}."""

    kind: Literal["messages"] = "messages"


@dataclass(frozen=True)
class QuestionsSource(ConversationFiles):
    """One question a record: {"image": "a.jpg", "question": "What?", "answer": "a cat"}, or "answers": [...]."""

    question: str = "question"  # key of the question
    answer: str = "answer"  # key of the answer, or with an s behind it, of a list of answers
    kind: Literal["questions"] = "questions"


@dataclass(frozen=True)
class ManifestSource:
    """NeMo's audio manifests, JSON lines: {"audio_filepath": "a.wav", "text": "...", "offset": 0, "duration": 2.5}."""

    carried: ClassVar[tuple[str, ...]] = (
        "path",
        "audio",
        "validation",
        "test",
        "outside",
        "ignore",
        "weight",
    )
    path: str  # of the training split; `*` for several files, or a URL
    audio: str = ""  # folder, URL, .zip or .tar of the clips; empty: the file's folder
    # follows the clip, unless the line has a prompt of its own
    prompt: str = "Transcribe the audio."
    validation: str = ""  # files of that split
    test: str = ""  # files of that split
    outside: Outside = "refuse"  # references that lead out of its folders
    kind: Literal["manifest"] = "manifest"
    weight: NonNegativeFloat = 1.0  # share of the samples
    ignore: tuple[str, ...] = ()  # patterns of files that are left out: *.bak, drafts/*


@dataclass(frozen=True)
class PreferenceSource(ConversationFiles):
    """TRL's preferences: {"prompt", "chosen", "rejected"}, or for loss=kto {"prompt", "completion", "label"}."""

    kind: Literal["preference"] = "preference"


@dataclass(frozen=True)
class RolloutsSource(ConversationFiles):
    """Answers that a model has drawn, for loss=grpo: {"prompt", "completion_ids", "logprobs", "advantages"}."""

    kind: Literal["rollouts"] = "rollouts"


@dataclass(frozen=True)
class ParquetSource:
    """Parquet as in Hugging Face's data sets: media are {"bytes", "path"} or bytes, or lists of them.

    The text is in a column of messages, or in two columns of questions and answers, or in one of
    answers to `prompt`.
    """

    carried: ClassVar[tuple[str, ...]] = (
        "path",
        "validation",
        "test",
        "outside",
        "ignore",
        "weight",
    )
    path: str  # of the training split; `*` for several files, or a URL
    messages: str = ""  # column of messages; empty: none
    question: str = ""  # column of questions
    answer: str = ""  # column of answers
    images: str = ""  # column of images
    audio: str = ""  # column of clips
    videos: str = ""  # column of videos
    validation: str = ""  # files of that split
    test: str = ""  # files of that split
    outside: Outside = "refuse"  # references that lead out of its folder
    kind: Literal["parquet"] = "parquet"
    weight: NonNegativeFloat = 1.0  # share of the samples
    ignore: tuple[str, ...] = ()  # patterns of files that are left out: *.bak, drafts/*
    # so many neighbouring samples are shuffled, of files in random order; 0: all of them
    window: NonNegativeInt = 0
    # pair: columns prompt, chosen and rejected; rollouts: prompt, completion_ids, logprobs and
    # advantages
    answers: Answers = "one"
    # the question of every row, where there is no column of questions; empty: none
    prompt: str = ""
    media: str = (
        # folder, URL, .zip or .tar that paths in columns of media are relative to; empty: the
        # file's folder
        ""
    )

    def check(self, where: str) -> None:
        if self.answers != "one":
            named = [
                key for key in ("messages", "question", "answer", "prompt") if getattr(self, key)
            ]
            check(
                not named,
                f"{where}.{(named or [''])[0]}: the columns of answers={self.answers} have TRL's names; leave it empty",
            )
            return
        questions = [key for key in ("question", "prompt") if getattr(self, key)]
        named = (bool(self.messages), len(questions), bool(self.answer))
        check(
            named in ((True, 0, False), (False, 1, True)),
            f"{where}: name the columns that hold the text, either {where}.messages=messages or both "
            f"{where}.question=question and {where}.answer=answer; in place of a column of questions all rows may have "
            f'one: "{where}.prompt=Describe the image."',
        )


@dataclass(frozen=True)
class CsvSource(ParquetSource):
    """CSV or TSV, whose first line names the columns; images, clips and videos are paths, or URLs of data."""

    kind: Literal["csv"] = "csv"


@dataclass(frozen=True)
class DatasetInfoSource:
    """A data set that LLaMA-Factory's dataset_info.json describes, in alpaca's or ShareGPT's form."""

    carried: ClassVar[tuple[str, ...]] = ("path", "outside", "weight")
    path: str  # the dataset_info.json, or its folder
    entry: str  # name of the training split's data set in it
    validation: str = ""  # name of that split's data set
    test: str = ""  # name of that split's data set
    outside: Outside = "refuse"  # references that lead out of its folder
    kind: Literal["dataset_info"] = "dataset_info"
    weight: NonNegativeFloat = 1.0  # share of the samples


@dataclass(frozen=True)
class WebDatasetSource:
    """WebDataset's shards, or a folder that Megatron Energon has prepared: members of one name are a sample.

    Its text is its .json (messages, conversations, or a question and an answer) or its .txt, an
    answer to `prompt`.
    """

    carried: ClassVar[tuple[str, ...]] = ("path", "validation", "test", "ignore", "weight")
    # shards of the training split: `*`, {000..127}, a URL or pipe:COMMAND; or a folder of
    # Energon's, with all splits
    path: str
    question: str = "question"  # key of the question in a .json
    answer: str = "answer"  # key of the answer
    prompt: str = "Describe the image."  # the question where a sample has none
    validation: str = ""  # shards of that split
    test: str = ""  # shards of that split
    kind: Literal["webdataset"] = "webdataset"
    weight: NonNegativeFloat = 1.0  # share of the samples
    ignore: tuple[str, ...] = ()  # patterns of files that are left out: *.bak, drafts/*
    # so many neighbouring samples are shuffled, of shards in random order; 0: all of them
    window: NonNegativeInt = 0


@dataclass(frozen=True)
class ArrayRecordSource:
    """A folder written by `python -m mmjax.index --to arrayrecord`: the format to train on at scale."""

    carried: ClassVar[tuple[str, ...]] = ("path", "validation", "test", "weight")
    path: str  # the folder
    validation: str = ""  # a folder of that split
    test: str = ""  # a folder of that split
    kind: Literal["arrayrecord"] = "arrayrecord"
    weight: NonNegativeFloat = 1.0  # share of the samples


FileSource = (
    LlavaSource
    | ShareGptSource
    | MessagesSource
    | QuestionsSource
    | PreferenceSource
    | RolloutsSource
    | ManifestSource
    | ParquetSource
    | CsvSource
    | WebDatasetSource
    | DatasetInfoSource
    | ArrayRecordSource
)
