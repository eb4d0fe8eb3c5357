"""Mel power of frames of a wave: Hann window, power spectrum, Slaney's filters."""

from __future__ import annotations

import functools

import numpy as np

RANGE = 8.0  # decades below the loudest bin at which power is clamped, as in Whisper
FLOOR = 1e-10  # of mel power, against log10(0)


def check_wave(wave: np.ndarray) -> None:
    """Raise ValueError for an array that is no clip, floats `[n]`."""
    if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
        raise ValueError(f"a clip must be floats [samples], not {wave.dtype} {list(wave.shape)}")


def mel_power(
    wave: np.ndarray, sample_rate: int, window: int, hop: int, mels: int, count: int
) -> np.ndarray:
    """Compute the mel power `[count, mels]` of the first frames of a float32 wave: one every `hop` samples."""
    # A view: row k is samples k * hop to k * hop + window - 1.
    frames = np.lib.stride_tricks.as_strided(
        wave, (count, window), (wave.strides[0] * hop, wave.strides[0])
    )
    spectrum = np.fft.rfft(frames * hann(window))
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    return power @ mel_filters(sample_rate, window, mels)


@functools.cache
def hann(window: int) -> np.ndarray:
    """Return the periodic Hann window float32 `[window]`."""
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32)


@functools.cache
def mel_filters(sample_rate: int, window: int, mels: int) -> np.ndarray:
    """Return triangular filters float32 `[window // 2 + 1, mels]`, evenly spaced in Slaney's mel, equal in area."""
    # Slaney's mel is linear up to 1 kHz = 15 mel (200/3 Hz each), then logarithmic: 27 mel for a
    # factor of 6.4.
    step = np.log(6.4) / 27
    nyquist = sample_rate / 2
    top = nyquist * 3 / 200 if nyquist < 1000 else 15.0 + np.log(nyquist / 1000) / step
    mel = np.linspace(0, top, mels + 2)
    edges = np.where(mel < 15.0, mel * 200 / 3, 1000 * np.exp(step * (mel - 15.0)))
    bins = np.arange(window // 2 + 1) * sample_rate / window
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])).astype(
        np.float32
    )
