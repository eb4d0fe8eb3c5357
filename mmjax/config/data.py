"""Where samples come from, and how conversations become tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Outside = Literal["refuse", "allow"]  # of references that lead out of a source's folder


@dataclass(frozen=True)
class EmbeddedSource:
    """Handwritten digits and keypad tones with questions about them, made from a seed; nothing to download."""

    kind: Literal["embedded"] = "embedded"
    # kinds of samples
    modalities: tuple[Literal["image", "audio", "mixed", "text"], ...] = ("image", "audio", "mixed", "text")
    samples: int = 24_000  # of the train split
    questions: int = 4  # at most this many questions about one sample's media, in training
    weight: float = 1.0  # share of the samples


@dataclass(frozen=True)
class FunctionSource:
    """A source made by your own function, ``module:qualname``, in mmjax or in the config file itself."""

    function: str  # `config:name` of the config file's own, or mmjax's `module:name`
    arguments: dict[str, int | float | str | bool] = field(default_factory=dict)  # beside `split`
    kind: Literal["function"] = "function"
    weight: float = 1.0  # share of the samples


# Of files: paths of this machine, or URLs that fsspec opens. `path` is what is trained on, with `*` for several files;
# `validation` and `test`, where given, are files of the same format. `images` and `audio` are the folder, URL, .zip or
# .tar that the records' paths are relative to; empty: the folder of the file itself. What leads out of them (absolute
# paths, URLs, `..`, links) is refused unless outside="allow".


@dataclass(frozen=True)
class ConversationFiles:
    """What sources of JSON or JSON lines say alike."""

    path: str  # of what is trained on; `*` for several files, or a URL
    images: str = ""  # folder, URL, .zip or .tar of the images; empty: the file's folder
    audio: str = ""  # the same of the clips
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
    """ShareGPT's: {"conversations": [{"from": "human", "value": "..."}]}, "images", "audios"."""

    kind: Literal["sharegpt"] = "sharegpt"


@dataclass(frozen=True)
class MessagesSource(ConversationFiles):
    """OpenAI's: {"messages": [{"role": "user", "content": "..." or typed parts}]}."""

    kind: Literal["messages"] = "messages"


@dataclass(frozen=True)
class QuestionsSource(ConversationFiles):
    """One question a record: {"image": "a.jpg", "question": "What?", "answer": "a cat"}, or "answers": [...]."""

    question: str = "question"  # the keys of both; `answer` with an s behind it does as well
    answer: str = "answer"  # key of the answer
    kind: Literal["questions"] = "questions"


@dataclass(frozen=True)
class ManifestSource:
    """NeMo's audio manifests, JSON lines: {"audio_filepath": "a.wav", "text": "...", "offset": 0, "duration": 2.5}."""

    path: str  # of what is trained on; `*` for several files, or a URL
    audio: str = ""  # folder, URL, .zip or .tar of the clips; empty: the file's folder
    prompt: str = "Transcribe the audio."  # after the clip, where a line has no prompt of its own
    validation: str = ""  # files of that split
    test: str = ""  # files of that split
    outside: Outside = "refuse"  # references that lead out of its folders
    kind: Literal["manifest"] = "manifest"
    weight: float = 1.0  # share of the samples


@dataclass(frozen=True)
class ParquetSource:
    """Parquet as Hugging Face's data sets have it: media are {"bytes", "path"} or bytes, or lists of them.

    The text is in one column of messages, or in two of questions and answers.
    """

    path: str  # of what is trained on; `*` for several files, or a URL
    messages: str = ""  # columns by name; empty: there is none
    question: str = ""  # column of questions
    answer: str = ""  # column of answers
    images: str = ""  # column of images
    audio: str = ""  # column of clips
    validation: str = ""  # files of that split
    test: str = ""  # files of that split
    outside: Outside = "refuse"  # references that lead out of its folder
    kind: Literal["parquet"] = "parquet"
    weight: float = 1.0  # share of the samples


@dataclass(frozen=True)
class ArrayRecordSource:
    """A folder that `python -m mmjax.index --to arrayrecord` wrote: the format to train on at scale."""

    path: str  # the folder
    validation: str = ""  # a folder of that split
    test: str = ""  # a folder of that split
    kind: Literal["arrayrecord"] = "arrayrecord"
    weight: float = 1.0  # share of the samples


FileSource = (
    LlavaSource | ShareGptSource | MessagesSource | QuestionsSource | ManifestSource | ParquetSource | ArrayRecordSource
)


@dataclass(frozen=True)
class Placeholder:
    """How a medium stands in the text: what is written for it becomes `before`, its items' tokens and `after`."""

    written: str  # by the template, or for it where it takes nothing but strings
    token: str = ""  # one of the tokenizer's that stands for one position of an item; empty = what is written
    before: str = ""  # text before the items' tokens
    after: str = ""  # text behind them


@dataclass(frozen=True)
class ChatFormat:
    """How conversations become tokens: by the tokenizer and the chat template of a Hugging Face folder."""

    folder: str  # with a tokenizer.json and a chat template
    template: str = ""  # a Jinja file to use instead of the folder's template
    variables: dict[str, int | float | str | bool] = field(default_factory=dict)  # for the template: enable_thinking
    placeholders: dict[str, Placeholder] = field(default_factory=dict)  # of image, audio; empty = as the folder says
    train_on: Literal["assistant", "last_assistant"] = "assistant"  # every answer, or each conversation's last
    loss_reduction: Literal["token", "sample", "square"] = "token"  # n tokens of a sample weigh n, 1, sqrt(n)
    date: str = "2025-01-01"  # today, for templates that write it: a sample stays the same every day


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from, and how they are brought to the step."""

    # what is trained on, by a name of your own
    sources: dict[str, EmbeddedSource | FunctionSource | FileSource] = field(default_factory=dict)
    cache: str = ""  # a folder for what is learned of the sources' files; empty: ~/.cache/mmjax/data
    on_bad_sample: Literal["skip", "raise"] = "skip"  # one that cannot be read: listed, then skipped or fatal
    max_bad_share: float = 0.01  # of the samples: more are fatal also where they are skipped
    chat: ChatFormat | None = None  # of the conversations in sources of files
    alphabet: str = ""  # one token per character; token 0 is padding, 1 ends an answer
    workers: int = 2  # processes that load, decode and pack; 0 does it in the training process
    prefetch: int = 4  # steps that each worker keeps ready
    on_oversize: Literal["skip", "raise"] = "skip"  # a sample that fits no budget: listed, then skipped or fatal
