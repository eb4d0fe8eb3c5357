"""Configs of the batch: its size, grouping and balancing."""

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
    """Pack samples so that the rows of every module are full; no sample waits longer than its chunk."""

    kind: Literal["pack"] = "pack"
    chunk_steps: int = 128  # steps that are planned together and drained; resuming replays one chunk
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

    kind: Literal["none"] = "none"


@dataclass(frozen=True)
class LlmBalance:
    """Balance the LLM's work across ranks; items stay on their sample's rank."""

    kind: Literal["llm"] = "llm"


@dataclass(frozen=True)
class PostBalance:
    """Balance every phase: place samples by all their costs at once, and move items only where they must."""

    locality: Literal["on", "off"] = "on"  # off: each phase on its own, and most encoder outputs travel (OrchMLLM)
    kind: Literal["post"] = "post"


@dataclass(frozen=True)
class BatchConfig:
    """The batch of one optimizer update, independent of the number of devices."""

    size: Samples | Tokens = Samples(24)
    rows: dict[str, int] = field(default_factory=lambda: {"llm": 8})  # packed rows of each module per microbatch
    microbatches: int = 1  # per update; their gradients are accumulated
    grouping: PackGrouping | IsfGrouping | NoGrouping = PackGrouping()
    # where samples run; which ones a step has is the same
    balance: PostBalance | LlmBalance | NoBalance = PostBalance()
    alignment: int = 8  # row lengths are multiples of this
    shapes: int = 8  # at most this many compiled shapes
