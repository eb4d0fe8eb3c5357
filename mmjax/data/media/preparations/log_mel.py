"""Compute log-mel frames of clips of any length."""

from __future__ import annotations

import numpy as np

from mmjax.config import AudioConfig, LogMel
from mmjax.data.media.mel_power import FLOOR, RANGE, check_wave, mel_power

# log10 power; a clip whose loudest bin is below this stays quiet instead of being raised to full
# scale
QUIET = -2.0


def split(how: LogMel, samples: int) -> tuple[tuple[int, int], ...]:
    """Make one item of a clip of any length."""
    return ((0, samples),)


def count_frames(
    how: LogMel, encoder: AudioConfig, samples: int, longest: float
) -> tuple[int, int]:
    """Count the frames that become positions of the layers, and those that the convolutions read: the same."""
    frames = frame_count(how, samples)
    return frames, frames


def frame_count(how: LogMel, samples: int) -> int:
    """Count the frames of a clip: the first starts at sample 0, and the last reaches the clip's end (zero-padded)."""
    return 1 + max(0, -(-(samples - how.window) // how.hop))


def compute_frames(how: LogMel, wave: np.ndarray, count: int = 0) -> np.ndarray:
    """Compute frames float32 `[frame_count, mels]` of a clip `[n]`: Hann window, power, Slaney mel filters, log10.

    Clamped to 8 decades below the loudest bin, as Whisper's, but scaled relative to it: the loudest
    bin is 1 and two decades are one unit, so that gain does not matter and a tone stands well off
    the noise around it. A silent clip is -3 everywhere.
    """
    check_wave(wave)
    if wave.size == 0:
        raise ValueError("a clip of 0 samples is empty")
    frames = frame_count(how, wave.size)
    padded = np.zeros((frames - 1) * how.hop + how.window, np.float32)
    padded[: wave.size] = wave
    power = mel_power(padded, how.sample_rate, how.window, how.hop, how.mels, frames)
    decades = np.log10(np.maximum(power, np.float32(FLOOR)))
    loudest = max(float(decades.max()), QUIET)
    return (np.maximum(decades, loudest - RANGE) - loudest) / np.float32(2) + np.float32(1)
