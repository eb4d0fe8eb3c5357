"""Log-mel frames of a clip alone, of any length."""

from __future__ import annotations

import functools

import numpy as np

RANGE = 8.0  # decades of power kept below the clip's loudest bin, as Whisper
QUIET = -2.0  # log10 power; a clip whose loudest bin is below this stays quiet instead of being raised to full scale


def frame_count(samples: int, window: int, hop: int) -> int:
    """Frames of a clip: the first starts at sample 0, and the last reaches the clip's end (zeros fill it up)."""
    return 1 + max(0, -(-(samples - window) // hop))


def log_mel(wave: np.ndarray, sample_rate: int, window: int, hop: int, mels: int) -> np.ndarray:
    """Log-mel frames float32 `[frame_count, mels]` of a clip `[n]`: Hann window, power, Slaney mel filters, log10.

    As Whisper's, clamped to 8 decades below the loudest bin, but laid out from there: the loudest bin is 1, and two
    decades are one unit, so that gain does not matter and a tone stands well off the noise around it. A silent clip is
    -3 everywhere.
    """
    if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
        raise ValueError(f"a clip must be floats [samples], not {wave.dtype} {list(wave.shape)}")
    if wave.size == 0:
        raise ValueError("a clip of 0 samples is empty")
    count = frame_count(wave.size, window, hop)
    padded = np.zeros((count - 1) * hop + window, np.float32)
    padded[: wave.size] = wave
    taper, filters = hann(window), mel_filters(sample_rate, window, mels)
    frames = np.lib.stride_tricks.as_strided(padded, (count, window), (padded.strides[0] * hop, padded.strides[0]))
    spectrum = np.fft.rfft(frames * taper)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    decades = np.log10(np.maximum(power @ filters, np.float32(1e-10)))
    loudest = max(float(decades.max()), QUIET)
    return (np.maximum(decades, loudest - RANGE) - loudest) / np.float32(2) + np.float32(1)


@functools.cache
def hann(window: int) -> np.ndarray:
    """The periodic Hann window float32 `[window]`."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)


@functools.cache
def mel_filters(sample_rate: int, window: int, mels: int) -> np.ndarray:
    """Triangular filters float32 `[window // 2 + 1, mels]`, evenly spaced in Slaney's mel, of equal area in Hz."""
    logarithmic, step = 15.0, np.log(6.4) / 27  # linear up to 1 kHz (15 mel), then 27 mel for a factor of 6.4
    nyquist = sample_rate / 2
    top = nyquist * 3 / 200 if nyquist < 1000 else logarithmic + np.log(nyquist / 1000) / step
    mel = np.linspace(0, top, mels + 2)
    edges = np.where(mel < logarithmic, mel * 200 / 3, 1000 * np.exp(step * (mel - logarithmic)))
    bins = np.arange(window // 2 + 1) * sample_rate / window
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])).astype(np.float32)
