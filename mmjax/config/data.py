"""Config of how sources are loaded, and how their samples are grouped, balanced and packed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from mmjax.config.checks import check, ordered
from mmjax.config.ranges import (
    Gigabytes,
    Limit,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
)
from mmjax.config.sources import EmbeddedSource, FileSource, FunctionSource


@dataclass(frozen=True)
class Samples:
    """A batch of a fixed mean number of samples per update."""

    count: PositiveInt  # samples
    kind: Literal["samples"] = "samples"


@dataclass(frozen=True)
class Tokens:
    """A batch of a fixed mean number of LLM tokens per update."""

    count: PositiveInt  # LLM tokens, images and clips included
    kind: Literal["tokens"] = "tokens"


@dataclass(frozen=True)
class PackGrouping:
    """Pack samples so that the rows of every module are full; no sample waits longer than its chunk."""

    kind: Literal["pack"] = "pack"
    # steps that are planned together and drained; resuming replays one chunk
    chunk_steps: PositiveInt = 128
    # the packer chooses among this many steps' worth of waiting samples
    pool_steps: PositiveInt = 4


@dataclass(frozen=True)
class IsfGrouping:
    """OmniBal's iterative sampling and filtering: one group of samples fills one row of every module."""

    kind: Literal["isf"] = "isf"
    iterations: PositiveInt = 10  # of sampling and filtering
    chunk_steps: PositiveInt = 128  # steps that are planned together and drained


@dataclass(frozen=True)
class NoGrouping:
    """A fixed number of samples per step, in the order of the shuffle."""

    kind: Literal["none"] = "none"
    chunk_steps: PositiveInt = 128  # steps that are planned together


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
    rows: dict[str, PositiveInt] = field(default_factory=lambda: {"llm": 8})
    microbatches: PositiveInt = 1  # per update; their gradients are accumulated
    grouping: PackGrouping | IsfGrouping | NoGrouping = PackGrouping()
    # where samples run; which ones a step has is the same
    balance: PostBalance | LlmBalance | NoBalance = PostBalance()
    alignment: PositiveInt = 8  # row lengths are multiples of this
    shapes: PositiveInt = 8  # at most this many compiled shapes


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

    pixels: PositiveInt = 100_000_000  # of an image or a frame, also while it is preprocessed
    min_side: PositiveInt = 1  # pixels
    max_side: int = 65_535  # pixels
    aspect: Annotated[float, at_least(1)] = 200.0  # the longer side over the shorter one
    seconds: PositiveFloat = 3600.0  # of a clip's or a video's file

    def check(self, where: str) -> None:
        ordered(where, self, "min_side", "max_side")


@dataclass(frozen=True)
class DataConfig:
    """The sources of samples, and how they are loaded."""

    # training data, by a name of your own
    sources: dict[str, EmbeddedSource | FunctionSource | FileSource] = field(default_factory=dict)
    # a folder for headers and lengths of the sources' files; empty: ~/.cache/mmjax/data
    cache: str = ""
    # an unreadable sample: listed, then skipped or fatal
    on_bad_sample: Literal["skip", "raise"] = "skip"
    # of the samples; more unreadable ones are fatal even if skipped
    max_bad_share: Annotated[
        float, Limit(lambda share: 0 <= share <= 1, "it is a part of the samples; choose 0 to 1")
    ] = 0.01
    # samples; the same as a count, instead of max_bad_share
    max_bad: Annotated[int, at_least(0, "it counts samples; give 0 or more")] | None = None
    # LLM tokens, media included: longer samples are left out of training, and listed
    max_tokens: Annotated[int, at_least(1, "give 1 token or more")] | None = None
    limits: MediaLimits = MediaLimits()  # of images, clips and videos in sources of files
    chat: ChatFormat | None = None  # of the conversations in sources of files
    alphabet: str = ""  # one token per character; token 0 is padding, 1 ends an answer
    # processes that load, decode and pack; 0 does it in the training process
    workers: NonNegativeInt = 2
    prefetch: PositiveInt = 4  # steps that each worker loads ahead
    # a sample too long for any row: listed, then skipped or fatal
    on_oversize: Literal["skip", "raise"] = "skip"
    # local: `workers` processes of this host; or a Ray cluster that loads: auto, host:port,
    # ray://host:port
    pool: str = "local"
    pool_steps: PositiveInt = 64  # steps of a training process that the pool loads ahead at most
    pool_memory: Gigabytes = 4.0  # GB of these
    # A source's share of the samples is its weight times (its number of samples) ** (1 /
    # temperature): with 1 weights are epochs, with more, small sources come more often; 0: the
    # weight alone
    temperature: float = 0.0
    window_space: Gigabytes = 32.0  # GB in `cache` for copies of what sources with a `window` read
    # GB in `cache` for outputs of encoders that encode each item once (`encode=once`)
    encoded_space: Gigabytes = 100.0

    @property
    def has_branches(self) -> bool:
        """Tell whether samples of a source may have branches, whatever the loss."""
        return any(getattr(source, "has_branches", False) for source in self.sources.values())

    def check(self, where: str) -> None:
        for name, source in self.sources.items():
            check(
                not isinstance(source, FileSource) or bool(source.path),
                f"{where}.sources.{name}.path is empty; name a file, a folder or a URL",
            )
        weights = {f"{where}.sources.{name}.weight": s.weight for name, s in self.sources.items()}
        check(
            not weights or sum(weights.values()) > 0,
            f"{', '.join(weights)} sum to zero: nothing could be drawn; give one a weight above 0",
        )
        check(
            self.temperature == 0 or self.temperature >= 0.1,
            f"{where}.temperature={self.temperature}: choose 0 (weights alone), 1 (weights are epochs) or more",
        )
        repeated = sorted({repr(c) for c in self.alphabet if self.alphabet.count(c) > 1})
        check(
            not repeated,
            f"{where}.alphabet holds {', '.join(repeated)} more than once; each character is one token",
        )
        check(
            self.pool in ("local", "auto")
            or bool(re.fullmatch(r"(ray://)?[\w.-]+:\d+", self.pool)),
            f"{where}.pool={self.pool}: give local, auto, or a Ray cluster's host:port or ray://host:port",
        )
