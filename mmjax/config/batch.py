"""What is in a batch, and how it is grouped and balanced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
    """Samples that fill the rows of every module at once; none waits longer than its chunk."""

    kind: Literal["pack"] = "pack"
    chunk_steps: int = 128  # steps that are planned together and drained; resuming replays one chunk
    pool_steps: int = 4  # the packer chooses among this many steps' worth of waiting samples


@dataclass(frozen=True)
class IsfGrouping:
    """OmniBal's iterative sampling and filtering: one group fills one row of every module."""

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
    """Samples on the ranks to which grouping gives them, items with their sample: what balancing is measured by."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class LlmBalance:
    """Ranks equal in the LLM alone, items with their sample."""

    kind: Literal["llm"] = "llm"


@dataclass(frozen=True)
class PostBalance:
    """Ranks equal in every phase: samples are placed by all their costs at once, items move only where they must."""

    locality: Literal["on", "off"] = "on"  # off: every phase by itself, and most encoder outputs travel (OrchMLLM)
    kind: Literal["post"] = "post"


@dataclass(frozen=True)
class BatchConfig:
    """What one optimizer update sees, in numbers that do not depend on the devices."""

    size: Samples | Tokens = Samples(24)
    rows: dict[str, int] = field(default_factory=lambda: {"llm": 8})  # packed rows of each module per microbatch
    microbatches: int = 1  # parts of an update, whose gradients are accumulated
    grouping: PackGrouping | IsfGrouping | NoGrouping = PackGrouping()
    balance: PostBalance | LlmBalance | NoBalance = (
        PostBalance()
    )  # where samples run; which ones a step has is the same
    alignment: int = 8  # row lengths are multiples of this
    shapes: int = 8  # at most this many compiled shapes
