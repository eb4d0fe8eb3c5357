"""Handwritten digits on canvases of many sizes (`DIGITS.md` says whose)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

Split = Literal["train", "validation", "test"]

SIDE = 8  # pixels of a digit
COUNTS = tuple(accumulate((0.32, 0.25, 0.17, 0.10, 0.06, 0.045, 0.03, 0.025)))  # of 1..8 digits on an image
FEW = tuple(accumulate((0.48, 0.28, 0.15, 0.09)))  # of 1..4 digits, where a sample has more items than one
AFFINES = 512


class Strip(NamedTuple):
    """One image: digits in one or two rows, read like text, on a canvas with margins."""

    digits: tuple[int, ...]  # rows of the digit table
    text: str  # their labels
    columns: int  # digits in the first row
    left: int  # margins in pixels; multiples of a digit, so that each digit is one merged token of the tiny encoder
    top: int
    height: int
    width: int


@functools.cache
def digit_table() -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 `[1797, 8, 8]` of 0..255, white on black, and their labels `[1797]`."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return np.round(file["images"] * (255 / 16)).astype(np.uint8), file["labels"]


@functools.cache
def digits_of(split: Split) -> tuple[tuple[int, ...], ...]:
    """For each label the rows of the digit table that this split may use.

    Training, validation and test have 80, 5 and 15 % of each label, the same ones in every run.
    """
    slots = {"validation": (5,), "test": (2, 9, 15)}
    held_out = {slot for of in slots.values() for slot in of}
    chosen = slots[split] if split in slots else tuple(slot for slot in range(20) if slot not in held_out)
    labels = digit_table()[1]
    rows = (np.flatnonzero(labels == label) for label in range(10))
    return tuple(tuple(int(row) for row in of[np.isin(np.arange(len(of)) % 20, chosen)]) for of in rows)


def draw_strip(u: Iterator[float], counts: Sequence[float], digits: tuple[tuple[int, ...], ...]) -> Strip:
    """An image's digits and layout from uniform draws; `counts` is the cumulative distribution of 1, 2, ... digits."""
    draw = next(u)
    count = 1 + sum(draw >= bound for bound in counts[:-1])
    labels = [int(10 * next(u)) for _ in range(count)]
    rows = tuple([digits[label][int(next(u) * len(digits[label]))] for label in labels])
    lines = 2 if count >= 4 and next(u) < 0.3 else 1
    columns = -(-count // lines)
    left, top = SIDE * (next(u) < 0.1), SIDE * (next(u) < 0.05)
    right = _remainder(u, 0.25)
    bottom = _remainder(u, 0.1)
    height, width = top + SIDE * lines + bottom, left + SIDE * columns + right
    return Strip(rows, "".join(map(str, labels)), columns, left, top, height, width)


def _remainder(u: Iterator[float], chance: float) -> int:
    """A margin of 1..7 pixels, no whole digit and mostly no whole patch, in this share of the draws; else 0."""
    draw = next(u)
    return 1 + int(draw / chance * (SIDE - 1)) if draw < chance else 0


def render_strip(strip: Strip, augment: np.random.Generator | None) -> np.ndarray:
    """The image, uint8 `[height, width, 1]`; with a generator its digits are turned, sheared, shifted and shaded."""
    digits = digit_table()[0][list(strip.digits)]
    if augment is not None:
        flat = digits.reshape(-1, SIDE * SIDE, 1).astype(np.float32)
        flat *= augment.uniform(0.6, 1, (len(flat), 1, 1)).astype(np.float32)
        digits = (affine_bank()[augment.integers(AFFINES, size=len(flat))] @ flat).reshape(-1, SIDE, SIDE)
    canvas = np.zeros((strip.height, strip.width, 1), np.uint8)
    for number, digit in enumerate(digits):
        line, column = divmod(number, strip.columns)
        y, x = strip.top + SIDE * line, strip.left + SIDE * column
        canvas[y : y + SIDE, x : x + SIDE, 0] = digit
    return canvas


@functools.cache
def affine_bank() -> np.ndarray:
    """Small fixed affine maps of a digit as bilinear resampling matrices, float32 `[512, 64, 64]`.

    A product with a few matrices is five times faster than resampling each digit anew.
    """
    rng = np.random.Generator(np.random.Philox(key=[0, 0]))
    turn, shear = rng.uniform(-0.25, 0.25, AFFINES), rng.uniform(-0.25, 0.25, AFFINES)
    scale, shift = np.exp(rng.uniform(-0.16, 0.16, (AFFINES, 2, 1))), rng.uniform(-0.7, 0.7, (AFFINES, 1, 2))
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]).transpose(2, 0, 1)
    rotation[:, :, 1] += shear[:, None] * rotation[:, :, 0]
    # A quarter stay sharp: held-out digits are not resampled, and resampling blurs.
    sharp = AFFINES // 4
    rotation[:sharp], scale[:sharp], shift[:sharp] = np.eye(2), 1, 0
    middle = (SIDE - 1) / 2
    pixel = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"), -1).reshape(-1, 2) - middle
    source = pixel @ (rotation * scale).transpose(0, 2, 1) + shift + middle
    near = np.maximum(0, 1 - np.abs(source[..., None] - np.arange(SIDE)))  # [512, 64, 2, 8]: the bilinear hat
    return (near[:, :, 0, :, None] * near[:, :, 1, None, :]).reshape(AFFINES, SIDE**2, SIDE**2).astype(np.float32)
