"""What a source yields: the text of a sample with places for its items, and the items themselves when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmjax.data.arrangement import Arrangement


@dataclass(frozen=True)
class Text:
    """Tokens of one stretch of text. `branch` 0 is seen by everything after it in the sample; branches 1, 2, ... see
    branch 0, the items and themselves, never each other (several questions about the same image)."""

    tokens: np.ndarray  # int32 [n]
    weights: np.ndarray  # float32 [n]: of the loss on predicting this token from the one before it in its branch
    branch: int = 0
    start: int | None = None  # RoPE position of the first token; None = go on where the branch is


@dataclass(frozen=True)
class Item:
    """A place where the tokens of the sample's item `number` (its n-th image or clip, in order) go."""

    encoder: str
    number: int
    start: int | None = None  # RoPE position of the first token; None = go on


@dataclass(frozen=True)
class Arranged:
    """A place where tokens of several items go together, in an order of their own: the tiles of one image."""

    encoder: str
    number: int  # of the first item
    items: int
    tokens: Arrangement
    start: int | None = None  # RoPE position of the first token; None = go on


@dataclass(frozen=True)
class Sample:
    """One training example, interleaved as it is read; items are not decoded yet."""

    segments: tuple[Text | Item | Arranged, ...]


@dataclass(frozen=True)
class Question:
    """One question of a sample, for evaluation."""

    family: str
    task: str  # family.name
    prompt: Sample  # its last text ends right before the answer
    answer: str
    needs: tuple[str, ...]  # encoders of the items that the answer depends on; none for text
    answers: tuple[str, ...] = ()  # all that are right, where there are several


@dataclass(frozen=True)
class Facts:
    """What is known of a sample from headers alone, without decoding anything."""

    text_tokens: int
    items: tuple[tuple[str, tuple[int, ...]], ...]  # (encoder, size): (height, width) in pixels, (samples,) of a clip
    item_tokens: int | None = None  # of the LLM, for all items; None = all that their encoders make (no `Arranged`)


class Source(Protocol):
    """Random access to samples. `facts` and `sample` decode no media; `item` opens and decodes one item."""

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Changes when any sample changes."""

    def facts(self, index: int) -> Facts: ...

    def sample(self, index: int) -> Sample: ...

    def item(self, index: int, number: int) -> np.ndarray:
        """uint8 `[height, width, channels]` of an image, float32 `[samples]` in -1..1 of a clip."""
