"""Cut clips of any length into frames of their samples, as Gemma 4 Unified's feature extractor does."""

from __future__ import annotations

import numpy as np

from mmjax.config import AudioConfig, Waveform
from mmjax.data.media.mel_power import check_wave
from mmjax.errors import BadMedia


def split(how: Waveform, samples: int) -> tuple[tuple[int, int], ...]:
    """Make one item of a clip of any length. Raises BadMedia for an empty one."""
    if samples < 1:
        raise BadMedia("a clip of 0 samples is empty")
    return ((0, samples),)


def count_frames(
    how: Waveform, encoder: AudioConfig, samples: int, longest: float
) -> tuple[int, int]:
    """Count the frames that become positions of the layers, and those that are read: the same."""
    frames = -(-samples // how.samples)
    return frames, frames


def compute_frames(how: Waveform, wave: np.ndarray, count: int) -> np.ndarray:
    """Return `count` frames float32 `[count, samples]` of a clip `[n]`."""
    check_wave(wave)
    padded = np.zeros(count * how.samples, np.float32)
    padded[: wave.size] = wave
    return padded.reshape(count, how.samples)
