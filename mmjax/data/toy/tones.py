"""Telephone keypad tones (DTMF) with jitter and noise: clips of very different lengths with a text to transcribe."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

SAMPLE_RATE = 4000  # Hz; the highest tone is 1477 Hz
DIGITS = "0123456789"
KEYS = DIGITS + "*#"
# Hz: keys in one row of the keypad share the low tone, those in one column the high one.
LOW = {
    key: low
    for low, row in zip((697, 770, 852, 941), ("123", "456", "789", "*0#"), strict=True)
    for key in row
}
HIGH = {
    key: high
    for high, row in zip((1209, 1336, 1477), ("147*", "2580", "369#"), strict=True)
    for key in row
}
# Long clips are more frequent in training, since keeping count needs practice. Held-out clips keep
# their long tail. of 1..8 keys in a clip
PRACTICE = tuple(accumulate((0.33, 0.19, 0.12, 0.09, 0.08, 0.07, 0.06, 0.06)))
# of 1..4 keys, where a sample has more items than one
PRACTICE_FEW = tuple(accumulate((0.40, 0.26, 0.18, 0.16)))
COUNTS = tuple(accumulate((0.37, 0.25, 0.14, 0.08, 0.06, 0.04, 0.035, 0.025)))  # the same, held out
FEW = tuple(accumulate((0.45, 0.27, 0.16, 0.12)))

_LONGEST = 700  # samples of a tone: 140 ms at the slowest speed
_PHASES = 100  # offsets in samples at which a tone may start in its table


class Clip(NamedTuple):
    """One clip: each key's tone and the silence after it; the rest of `samples` is silence at the end."""

    text: str  # its keys
    lead: int  # silence before the first tone, in samples
    tones: tuple[int, ...]  # samples
    gaps: tuple[int, ...]
    samples: int


def draw_clip(u: Iterator[float], counts: Sequence[float], keys: str) -> Clip:
    """Draw a clip's keys and timing; `u` yields uniform draws, `counts` is the CDF of 1, 2, ... keys."""
    draw = next(u)
    count = 1 + sum(draw >= bound for bound in counts[:-1])
    text = "".join([keys[int(next(u) * len(keys))] for _ in range(count)])
    # samples per millisecond at this clip's speed
    unit = SAMPLE_RATE / 1000 / (0.8 + 0.45 * next(u))
    lead = int(60 * next(u) * unit)
    tones = tuple([int((80 + 60 * next(u)) * unit) for _ in range(count)])
    gaps = tuple([int((60 + 45 * next(u)) * unit) for _ in range(count)])
    # up to half a second in a quarter of the clips
    trail = int(max(0.0, next(u) - 0.75) * 2000 * SAMPLE_RATE / 1000)
    return Clip(text, lead, tones, gaps, lead + sum(tones) + sum(gaps) + trail)


def render_clip(clip: Clip, rng: np.random.Generator) -> np.ndarray:
    """Synthesise the clip, float32 `[samples]` in -1..1, with loudness, phases and noise from `rng`."""
    # The order of draws is part of the data set: noise, its loudness, phases, gains.
    table = _tones()
    wave = rng.standard_normal(clip.samples, np.float32)
    wave *= np.float32(rng.uniform(0.02, 0.12))
    phases = rng.integers(_PHASES, size=len(clip.text)).tolist()
    gains = rng.uniform(0.25, 0.45, (len(clip.text), 2, 1)).astype(np.float32)
    start = clip.lead
    for key, length, gap, phase, gain in zip(
        clip.text, clip.tones, clip.gaps, phases, gains, strict=True
    ):
        wave[start : start + length] += (
            table[KEYS.index(key), :, phase : phase + length] * gain
        ).sum(0)
        start += length + gap
    return np.clip(wave, -1, 1)


@functools.cache
def _tones() -> np.ndarray:
    """Compute the low and the high sine of each key, float32 `[12, 2, samples]`."""
    hertz = np.array([(LOW[key], HIGH[key]) for key in KEYS])
    return np.sin(
        2 * np.pi / SAMPLE_RATE * hertz[..., None] * np.arange(_LONGEST + _PHASES)
    ).astype(np.float32)
