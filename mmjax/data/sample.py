"""The interface of data sources: a sample's text with places for its items, and the items themselves, decoded on
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmjax.data.media.anyres_layout import TokenLayout

Files = Sequence[tuple[str, int]]  # the names of a source's files and how many samples each has, in order


@dataclass(frozen=True)
class Text:
    """Tokens of one stretch of text.

    Everything after it attends to branch 0. Branches 1, 2, ... attend to branch 0, the items and themselves, but not to
    each other: several questions about the same image.
    """

    tokens: np.ndarray  # int32 [n]
    weights: np.ndarray  # float32 [n]: of the loss on predicting this token from the one before it in its branch
    branch: int = 0
    start: int | None = None  # RoPE position of the first token; None = continue the branch


@dataclass(frozen=True)
class Item:
    """The place of the tokens of one item: the sample's item `number`, counting images and clips in order from 0."""

    encoder: str
    number: int
    start: int | None = None  # RoPE position of the first token; None = continue the branch


@dataclass(frozen=True)
class ArrangedItems:
    """The place of the tokens of several items, interleaved or interpolated: the tiles of one image."""

    encoder: str
    number: int  # of the first item
    items: int  # how many
    tokens: TokenLayout
    start: int | None = None  # RoPE position of the first token; None = continue the branch


@dataclass(frozen=True)
class Sample:
    """One training example, with text and items interleaved; items are not decoded yet."""

    segments: tuple[Text | Item | ArrangedItems, ...]


@dataclass(frozen=True)
class Question:
    """One question of a sample, for evaluation."""

    family: str
    task: str  # family.name
    prompt: Sample  # its last text ends right before the answer
    answer: str
    needs: tuple[str, ...]  # encoders of the items that the answer depends on; empty for text
    answers: tuple[str, ...] = ()  # all right answers, where there are several


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of a sample, computed from headers without decoding anything."""

    text_tokens: int
    items: tuple[tuple[str, tuple[int, ...]], ...]  # (encoder, size): (height, width) in pixels, (samples,) of a clip
    item_tokens: int | None = None  # LLM tokens of all items; None = all that their encoders make (no `ArrangedItems`)


class Source(Protocol):
    """Random access to samples. `facts` and `sample` decode no media; `item` opens and decodes one item.

    Samples that cannot be used raise BadSample from the first two, media that cannot be decoded BadMedia from `item`.
    """

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a hash that changes when any sample changes."""

    def facts(self, index: int) -> SampleLengths: ...

    def sample(self, index: int) -> Sample: ...

    def item(self, index: int, number: int) -> np.ndarray:
        """Decode an image, uint8 `[height, width, channels]`, or a clip, float32 `[samples]` in -1..1."""
