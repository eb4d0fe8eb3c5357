"""Handwritten digits on canvases of many sizes (`DIGITS.md` names their source)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmjax.data.sample import Split

SIDE = 8  # pixels of a digit
# of 1..8 digits on an image
COUNT_CDF = tuple(accumulate((0.32, 0.25, 0.17, 0.10, 0.06, 0.045, 0.03, 0.025)))
# of 1..4 digits, where a sample has more items than one
FEW = tuple(accumulate((0.48, 0.28, 0.15, 0.09)))
AFFINES = 512


class Strip(NamedTuple):
    """One image: digits in one or two rows, in reading order, on a canvas with margins."""

    digits: tuple[int, ...]  # indices into the digit table
    text: str  # their labels
    columns: int  # digits in the first row
    # margins in pixels; multiples of a digit, so that each digit is one merged token of the tiny
    # encoder
    left: int
    top: int
    height: int
    width: int


@functools.cache
def digit_table() -> tuple[np.ndarray, np.ndarray]:
    """Load the images uint8 `[1797, 8, 8]` of 0..255, white on black, and their labels `[1797]`."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return np.round(file["images"] * (255 / 16)).astype(np.uint8), file["labels"]


@functools.cache
def digits_by_label(split: Split) -> tuple[tuple[int, ...], ...]:
    """List for each label the indices into the digit table that this split may use.

    Training, validation and test have 80, 5 and 15 % of each label, the same ones in every run.
    """
    # Of every 20 digits of a label, in the table's order, these go to validation and test.
    slots = {"validation": (5,), "test": (2, 9, 15)}
    held_out = {slot for split_slots in slots.values() for slot in split_slots}
    chosen = (
        slots[split]
        if split in slots
        else tuple(slot for slot in range(20) if slot not in held_out)
    )
    labels = digit_table()[1]
    by_label = (np.flatnonzero(labels == label) for label in range(10))
    return tuple(
        tuple(indices[np.isin(np.arange(len(indices)) % 20, chosen)].tolist())
        for indices in by_label
    )


def draw_strip(
    u: Iterator[float], counts: Sequence[float], digits: tuple[tuple[int, ...], ...]
) -> Strip:
    """Draw an image's digits and layout; `u` yields uniform draws, `counts` is the CDF of 1, 2, ... digits."""
    draw = next(u)
    count = 1 + sum(draw >= bound for bound in counts[:-1])
    # The order of draws is part of the data set: another would make other samples of the same seed.
    labels = [int(10 * next(u)) for _ in range(count)]
    drawn = tuple([digits[label][int(next(u) * len(digits[label]))] for label in labels])
    lines = 2 if count >= 4 and next(u) < 0.3 else 1
    columns = -(-count // lines)
    left_margin = SIDE * (next(u) < 0.1)
    top_margin = SIDE * (next(u) < 0.05)
    right_margin = _remainder(u, 0.25)
    bottom_margin = _remainder(u, 0.1)
    return Strip(
        digits=drawn,
        text="".join(map(str, labels)),
        columns=columns,
        left=left_margin,
        top=top_margin,
        height=top_margin + SIDE * lines + bottom_margin,
        width=left_margin + SIDE * columns + right_margin,
    )


def _remainder(u: Iterator[float], chance: float) -> int:
    """Draw a margin of 1..7 pixels with this chance, else 0: no whole digit, and mostly no whole patch."""
    draw = next(u)
    return 1 + int(draw / chance * (SIDE - 1)) if draw < chance else 0


def render_strip(strip: Strip, augment: np.random.Generator | None) -> np.ndarray:
    """Render the image, uint8 `[height, width, 1]`; a generator rotates, shears, shifts and dims its digits."""
    digits = digit_table()[0][list(strip.digits)]
    if augment is not None:
        flat = digits.reshape(-1, SIDE * SIDE, 1).astype(np.float32)
        flat *= augment.uniform(0.6, 1, (len(flat), 1, 1)).astype(np.float32)
        digits = (affine_bank()[augment.integers(AFFINES, size=len(flat))] @ flat).reshape(
            -1, SIDE, SIDE
        )
    canvas = np.zeros((strip.height, strip.width, 1), np.uint8)
    for number, digit in enumerate(digits):
        line, column = divmod(number, strip.columns)
        y = strip.top + SIDE * line
        x = strip.left + SIDE * column
        canvas[y : y + SIDE, x : x + SIDE, 0] = digit
    return canvas


@functools.cache
def affine_bank() -> np.ndarray:
    """Compute small fixed affine maps of a digit as bilinear resampling matrices, float32 `[512, 64, 64]`.

    A product with a few matrices is five times faster than resampling each digit anew.
    """
    rng = np.random.Generator(np.random.Philox(key=[0, 0]))
    angle = rng.uniform(-0.25, 0.25, AFFINES)
    shear = rng.uniform(-0.25, 0.25, AFFINES)
    scale = np.exp(rng.uniform(-0.16, 0.16, (AFFINES, 2, 1)))
    shift = rng.uniform(-0.7, 0.7, (AFFINES, 1, 2))
    rotation = np.array(
        [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    ).transpose(2, 0, 1)
    rotation[:, :, 1] += shear[:, None] * rotation[:, :, 0]
    # A quarter stay sharp: held-out digits are not resampled, and resampling blurs.
    sharp = AFFINES // 4
    rotation[:sharp] = np.eye(2)
    scale[:sharp] = 1
    shift[:sharp] = 0
    centre = (SIDE - 1) / 2
    pixel = (
        np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"), -1).reshape(-1, 2)
        - centre
    )
    source = pixel @ (rotation * scale).transpose(0, 2, 1) + shift + centre
    # The bilinear hat, [512, 64, 2, 8]: weight of each source row and of each source column for
    # each pixel.
    near = np.maximum(0, 1 - np.abs(source[..., None] - np.arange(SIDE)))
    return (
        (near[:, :, 0, :, None] * near[:, :, 1, None, :])
        .reshape(AFFINES, SIDE**2, SIDE**2)
        .astype(np.float32)
    )
