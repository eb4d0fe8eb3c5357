"""Config of data sources, and of how their samples are grouped, balanced and packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mmjax.config.losses import Answers


@dataclass(frozen=True)
class Samples:
    """A batch of a fixed mean number of samples per update."""

    count: int  # samples
    kind: Literal["samples"] = "samples"


@dataclass(frozen=True)
class Tokens:
    """A batch of a fixed mean number of LLM tokens per update."""

    count: int  # LLM tokens, images and clips included
    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class PackGrouping:
    """Pack samples so that the rows of every module are full; no sample waits longer than its chunk."""

    kind: Literal["pack"] = "pack"
    # steps that are planned together and drained; resuming replays one chunk
    chunk_steps: int = 128
    pool_steps: int = 4  # the packer chooses among this many steps' worth of waiting samples


@dataclass(frozen=True)
class IsfGrouping:
    """OmniBal's iterative sampling and filtering: one group of samples fills one row of every module."""

    kind: Literal["isf"] = "isf"
    iterations: int = 10  # of sampling and filtering
    chunk_steps: int = 128  # steps that are planned together and drained


@dataclass(frozen=True)
class NoGrouping:
    """A fixed number of samples per step, in the order of the shuffle."""

    kind: Literal["none"] = "none"
    chunk_steps: int = 128  # steps that are planned together


@dataclass(frozen=True)
class NoBalance:
    """The baseline: samples on the ranks that grouping assigns, items on their sample's rank."""

    moves_samples: ClassVar[bool] = False
    phases_apart: ClassVar[bool] = False
    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class LlmBalance:
    """Balance the LLM's work across ranks; items stay on their sample's rank."""

    moves_samples: ClassVar[bool] = True
    phases_apart: ClassVar[bool] = False
    kind: Literal["llm"] = "llm"


@dataclass(frozen=True)
class PostBalance:
    """Balance every phase: place samples by all their costs at once, and move items only where they must."""

    # off: each phase on its own, and most encoder outputs travel (OrchMLLM)
    locality: Literal["on", "off"] = "on"
    kind: Literal["post"] = "post"

    moves_samples: ClassVar[bool] = True

    @property
    def phases_apart(self) -> bool:
        """Return whether every phase is placed by itself, on any rank."""
        return self.locality == "off"


@dataclass(frozen=True)
class BatchConfig:
    """The batch of one optimizer update, independent of the number of devices."""

    size: Samples | Tokens = Samples(24)
    # packed rows of each module per microbatch
    rows: dict[str, int] = field(default_factory=lambda: {"llm": 8})
    microbatches: int = 1  # per update; their gradients are accumulated
    grouping: PackGrouping | IsfGrouping | NoGrouping = PackGrouping()
    # where samples run; which ones a step has is the same
    balance: PostBalance | LlmBalance | NoBalance = PostBalance()
    alignment: int = 8  # row lengths are multiples of this
    shapes: int = 8  # at most this many compiled shapes


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
    samples: int = 24_000  # of the train split
    questions: int = 4  # at most, about one sample's media, in training
    weight: float = 1.0  # share of the samples


@dataclass(frozen=True)
class FunctionSource:
    """A source built by your own function, ``module:qualname``, in mmjax or in the config file itself."""

    function: str  # `config:name` of the config file's own, or mmjax's `module:name`
    # passed to it beside `split`
    arguments: dict[str, int | float | str | bool] = field(default_factory=dict)
    kind: Literal["function"] = "function"
    weight: float = 1.0  # share of the samples


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
        "weight",
    )
    path: str  # of the training split; `*` for several files, or a URL
    images: str = ""  # folder, URL, .zip or .tar of the images; empty: the file's folder
    audio: str = ""  # the same for the clips
    videos: str = ""  # the same for the videos
    validation: str = ""  # files of that split
    test: str = ""  # files of that split
    outside: Outside = "refuse"  # references that lead out of its folders
    weight: float = 1.0  # share of the samples


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
    weight: float = 1.0  # share of the samples


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

    carried: ClassVar[tuple[str, ...]] = ("path", "validation", "test", "outside", "weight")
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
    weight: float = 1.0  # share of the samples
    # so many neighbouring samples are shuffled, of files in random order; 0: all of them
    window: int = 0
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
    weight: float = 1.0  # share of the samples


@dataclass(frozen=True)
class WebDatasetSource:
    """WebDataset's shards, or a folder that Megatron Energon has prepared: members of one name are a sample.

    Its text is its .json (messages, conversations, or a question and an answer) or its .txt, an
    answer to `prompt`.
    """

    carried: ClassVar[tuple[str, ...]] = ("path", "validation", "test", "weight")
    # shards of the training split: `*`, {000..127}, a URL or pipe:COMMAND; or a folder of
    # Energon's, with all splits
    path: str
    question: str = "question"  # key of the question in a .json
    answer: str = "answer"  # key of the answer
    prompt: str = "Describe the image."  # the question where a sample has none
    validation: str = ""  # shards of that split
    test: str = ""  # shards of that split
    kind: Literal["webdataset"] = "webdataset"
    weight: float = 1.0  # share of the samples
    # so many neighbouring samples are shuffled, of shards in random order; 0: all of them
    window: int = 0


@dataclass(frozen=True)
class ArrayRecordSource:
    """A folder written by `python -m mmjax.index --to arrayrecord`: the format to train on at scale."""

    carried: ClassVar[tuple[str, ...]] = ("path", "validation", "test", "weight")
    path: str  # the folder
    validation: str = ""  # a folder of that split
    test: str = ""  # a folder of that split
    kind: Literal["arrayrecord"] = "arrayrecord"
    weight: float = 1.0  # share of the samples


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


@dataclass(frozen=True)
class Placeholder:
    """The text of an image or clip: `written` is replaced by `before`, its items' tokens and `after`."""

    # by the chat template, or into messages whose content a template takes as a string only
    written: str
    token: str = ""  # the tokenizer's token for each position of an item; empty: `written`
    before: str = ""  # text before the items' tokens
    after: str = ""  # text behind them
    sound_before: str = ""  # before the tokens of a video with its sound, instead of `before`
    sound_after: str = ""  # behind them, instead of `after`


@dataclass(frozen=True)
class ChatFormat:
    """Tokenize conversations with the tokenizer and the chat template of a Hugging Face folder."""

    folder: str  # with a tokenizer.json and a chat template
    template: str = ""  # a Jinja file to use instead of the folder's template
    # of the template: enable_thinking
    variables: dict[str, int | float | str | bool] = field(default_factory=dict)
    # of image, audio, video; empty: the folder's
    placeholders: dict[str, Placeholder] = field(default_factory=dict)
    # every answer, or each conversation's last
    train_on: Literal["assistant", "last_assistant"] = "assistant"
    # a sample of n tokens weighs n, 1 or sqrt(n)
    loss_reduction: Literal["token", "sample", "square"] = "token"
    # beside <image>, <audio> and <video>: part of the marker, so that templates write their own; or
    # text as it stands, as for LLaMA-Factory and transformers
    line_breaks: Literal["marker", "text"] = field(default="marker", repr=False)
    # today's date for templates that write it; fixed, so that samples never change
    date: str = "2025-01-01"


@dataclass(frozen=True)
class MediaLimits:
    """Size limits of images, clips and videos. Those beyond are bad samples, rejected before anything is decoded."""

    pixels: int = 100_000_000  # of an image or a frame, also while it is preprocessed
    min_side: int = 1  # pixels
    max_side: int = 65_535  # pixels
    aspect: float = 200.0  # the longer side over the shorter one
    seconds: float = 3600.0  # of a clip's or a video's file


@dataclass(frozen=True)
class DataConfig:
    """The sources of samples, and how they are loaded."""

    # training data, by a name of your own
    sources: dict[str, EmbeddedSource | FunctionSource | FileSource] = field(default_factory=dict)
    # a folder for headers and lengths of the sources' files; empty: ~/.cache/mmjax/data
    cache: str = ""
    # an unreadable sample: listed, then skipped or fatal
    on_bad_sample: Literal["skip", "raise"] = "skip"
    max_bad_share: float = 0.01  # of the samples; more unreadable ones are fatal even if skipped
    max_bad: int | None = None  # samples; the same as a count, instead of max_bad_share
    # LLM tokens, media included: longer samples are left out of training, and listed
    max_tokens: int | None = None
    limits: MediaLimits = MediaLimits()  # of images, clips and videos in sources of files
    chat: ChatFormat | None = None  # of the conversations in sources of files
    alphabet: str = ""  # one token per character; token 0 is padding, 1 ends an answer
    workers: int = 2  # processes that load, decode and pack; 0 does it in the training process
    prefetch: int = 4  # steps that each worker loads ahead
    # a sample too long for any row: listed, then skipped or fatal
    on_oversize: Literal["skip", "raise"] = "skip"
    # local: `workers` processes of this host; or a Ray cluster that loads: auto, host:port,
    # ray://host:port
    pool: str = "local"
    pool_steps: int = 64  # steps of a training process that the pool loads ahead at most
    pool_memory: float = 4.0  # GB of these
    # A source's share of the samples is its weight times (its number of samples) ** (1 /
    # temperature): with 1 weights are epochs, with more, small sources come more often; 0: the
    # weight alone
    temperature: float = 0.0
    window_space: float = 32.0  # GB in `cache` for copies of what sources with a `window` read
