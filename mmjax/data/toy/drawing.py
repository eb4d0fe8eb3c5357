"""Prompts to draw digits, with pictures of them: a small text-to-image data set from the embedded digits."""

from __future__ import annotations

import functools
import hashlib
import itertools

import numpy as np

from mmjax.data.sample import Item, Sample, SampleLengths, Split, Text
from mmjax.data.toy import digits
from mmjax.data.toy.dataset import encode_characters
from mmjax.data.toy.digits import SIDE, Strip

HELD_OUT = 1000  # prompts of each held-out split
NEIGHBOURS = 3  # that name a digit
_SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class DrawnDigits:
    """A `Source` of samples "draw 407" and a picture of these digits side by side, made by `generator`.

    Splits share no digit image. A sample depends on seed, split and its index alone.
    """

    def __init__(
        self,
        split: Split,
        samples: int,
        max_digits: int,
        generator: str,
        seed: int,
        held_out: int = HELD_OUT,
    ) -> None:
        self.split = split
        self.samples = samples
        self.max_digits = max_digits
        self.generator = generator
        self.seed = seed
        self.held_out = held_out

    def __len__(self) -> int:
        return self.samples if self.split == "train" else self.held_out

    def fingerprint(self) -> str:
        made_by = (
            "drawing-1",
            self.split,
            self.samples,
            self.max_digits,
            self.generator,
            self.seed,
        )
        return hashlib.sha256(
            repr(made_by).encode() + digits.digit_table()[0].tobytes()
        ).hexdigest()[:16]

    def facts(self, index: int) -> SampleLengths:
        strip = self.strip(index)
        return SampleLengths(
            len(self.prompt(index)), ((self.generator, (strip.height, strip.width)),)
        )

    def prompt(self, index: int) -> str:
        """Return the text of a sample."""
        return f"draw {self.strip(index).text}"

    def sample(self, index: int) -> Sample:
        tokens = encode_characters(self.prompt(index))
        return Sample((Text(tokens, np.zeros(len(tokens), np.float32)), Item(self.generator, 0)))

    def item(self, index: int, number: int) -> np.ndarray:
        """Render the picture, uint8 `[8, 8 * digits, 1]`."""
        return digits.render_strip(
            self.strip(index), self._rng(index, 1) if self.split == "train" else None
        )

    def judge(self, index: int, picture: np.ndarray) -> float:
        """Return the share of a sample's digits that a picture shows in their places."""
        return float(
            np.mean(
                [a == b for a, b in zip(name_digits(picture), self.strip(index).text, strict=True)]
            )
        )

    def partner(self, index: int) -> int:
        """Find another sample with as many digits; it may lie beyond the end of the split."""
        count = len(self.strip(index).text)
        return next(k for k in itertools.count(index + 1) if len(self.strip(k).text) == count)

    def strip(self, index: int) -> Strip:
        """Draw the digits of a sample."""
        rng = self._rng(index, 0)
        labels = rng.integers(10, size=rng.integers(1, self.max_digits + 1)).tolist()
        pool = digits.digits_by_label(self.split)
        chosen = tuple(pool[label][rng.integers(len(pool[label]))] for label in labels)
        text = "".join(map(str, labels))
        return Strip(
            chosen, text, len(labels), left=0, top=0, height=SIDE, width=SIDE * len(labels)
        )

    def _rng(self, index: int, stream: int) -> np.random.Generator:
        key = np.array([self.seed, _SPLITS.index(self.split)], np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, stream, index, 0]))


def drawings(
    split: Split,
    samples: int = 100_000,
    max_digits: int = 3,
    generator: str = "picture",
    seed: int = 0,
    held_out: int = HELD_OUT,
) -> DrawnDigits:
    """Open the source, as a `FunctionSource` names it."""
    return DrawnDigits(
        split=split,
        samples=samples,
        max_digits=max_digits,
        generator=generator,
        seed=seed,
        held_out=held_out,
    )


def name_digits(picture: np.ndarray) -> str:
    """Name the digits of a picture, uint8 `[8, 8 * digits, 1]`, by the real ones that are nearest to each."""
    images, labels = _references()
    cells = (
        picture[..., 0]
        .reshape(SIDE, -1, SIDE)
        .swapaxes(0, 1)
        .reshape(-1, SIDE * SIDE)
        .astype(np.float32)
    )
    distances = np.square(cells[:, None] - images[None]).sum(-1)
    nearest = labels[np.argsort(distances, axis=1)[:, :NEIGHBOURS]]
    return "".join(str(np.bincount(row, minlength=10).argmax()) for row in nearest)


@functools.cache
def _references() -> tuple[np.ndarray, np.ndarray]:
    """Return the training split's digits, float32 `[n, 64]`, and their labels `[n]`."""
    images, labels = digits.digit_table()
    train = np.concatenate([np.array(indices) for indices in digits.digits_by_label("train")])
    return images[train].reshape(len(train), -1).astype(np.float32), labels[train]
