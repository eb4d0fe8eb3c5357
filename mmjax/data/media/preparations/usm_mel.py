"""Compute log-mel frames of magnitudes, as Gemma 4's feature extractor does."""

from __future__ import annotations

import functools

import numpy as np

from mmjax.config import AudioConfig, UsmMel
from mmjax.data.media.mel_power import check_wave, hann
from mmjax.errors import BadMedia


def split(how: UsmMel, samples: int) -> tuple[tuple[int, int], ...]:
    """Make one item of a clip. Raises BadMedia for one that is too long, which transformers would truncate."""
    if samples > how.seconds * how.sample_rate:
        raise BadMedia(
            f"a clip of {samples / how.sample_rate:.1f} s is longer than the encoder's {how.seconds} s, and longer "
            "clips are refused"
        )
    return ((0, samples),)


def count_frames(
    how: UsmMel, encoder: AudioConfig, samples: int, longest: float
) -> tuple[int, int]:
    """Count the frames that become positions of the layers, and those that the convolutions read: the same.

    Frame k ends with sample k * hop + ceil(window / 2), which the clip must have. Raises BadMedia
    for a clip that is too short for any, or too long.
    """
    split(how, samples)
    frames = (samples - 1 - (how.window - how.window // 2)) // how.hop + 1
    if frames < 1:
        raise BadMedia(f"a clip of {samples} samples is too short: no frame fits into it")
    return frames, frames


def compute_frames(how: UsmMel, wave: np.ndarray, count: int = 0) -> np.ndarray:
    """Compute `count` frames float32 `[count, mels]` of a clip `[n]`, whose first is centred on its first sample."""
    check_wave(wave)
    half = how.window // 2
    padded = np.concatenate([np.zeros(half, np.float32), wave.astype(np.float32)])
    frames = np.lib.stride_tricks.sliding_window_view(padded, how.window)[:: how.hop][:count]
    magnitude = np.abs(np.fft.rfft(frames * hann(how.window), n=how.fft))
    filters = mel_filters(how.sample_rate, how.fft, how.mels, how.low, how.high)
    return np.log(magnitude @ filters + how.floor).astype(np.float32)


@functools.cache
def mel_filters(rate: int, fft: int, mels: int, low: float, high: float) -> np.ndarray:
    """Return triangular filters `[fft // 2 + 1, mels]`, evenly spaced in HTK's mel, with 1 at their peaks."""
    bottom, top = (2595 * np.log10(1 + hertz / 700) for hertz in (low, high))
    edges = 700 * (10 ** (np.linspace(bottom, top, mels + 2) / 2595) - 1)
    bins = np.linspace(0, rate // 2, fft // 2 + 1)
    rising = (bins[:, None] - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - bins[:, None]) / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling))
