"""Compute frames of clips in windows, as Whisper's feature extractor does."""

from __future__ import annotations

import numpy as np

from mmjax.config import AudioConfig, WhisperMel
from mmjax.data.media.mel_power import FLOOR, RANGE, check_wave, mel_power
from mmjax.errors import BadMedia


def split(how: WhisperMel, samples: int) -> tuple[tuple[int, int], ...]:
    """Cut a clip, (start, stop) in samples: one piece where it fits the window, else as `how.longer` says.

    Pieces fill the window but for the last. Raises BadMedia for an empty clip, and for a longer one
    that is to be refused (Qwen2-Audio's processor would truncate it).
    """
    if samples < 1:
        raise BadMedia("a clip of 0 samples is empty")
    if how.mirrored and max(samples, how.shortest) <= how.window // 2:
        raise BadMedia(
            f"a clip of {samples} samples is too short to be mirrored over half a window of {how.window}"
        )
    if how.longer == "whole":
        return ((0, samples),)
    window = how.seconds * how.sample_rate
    if samples > window and how.longer == "refuse":
        seconds = f"{samples / how.sample_rate:.1f} s"
        raise BadMedia(
            f"a clip of {seconds} is longer than the encoder's {how.seconds} s, and longer clips are refused"
        )
    return tuple((start, min(start + window, samples)) for start in range(0, samples, window))


def count_frames(
    how: WhisperMel, encoder: AudioConfig, samples: int, longest: float
) -> tuple[int, int]:
    """Count the frames that become positions of the layers, and with silence behind them those that convolutions read.

    longest: frames of which the encoder has positions. Raises BadMedia for a clip that is too long.
    """
    check_one_piece(how, samples)
    window = padded_samples(how, samples) // how.hop
    frames = window if how.attended == "window" else valid_frames(how, samples)
    # Position p reads frames 2p - 2 to 2p + 2: 5 frames make positions 0, 1, 2, and position 2
    # reads up to frame 6, so 5 + 5 % 2 + 1 = 7 frames are needed; 4 frames make 0 and 1, which read
    # up to frame 4: 5 frames.
    stride = encoder.stride
    read = min(frames + frames % stride + 1, window, longest)
    if encoder.chunk:  # whose convolutions read no silence
        read = frames
    # but zeros behind a clip, up to the size of its other chunks, or of any
    if encoder.padded_chunks or (encoder.stem_width and frames > encoder.chunk):
        chunks, rest = divmod(frames, encoder.chunk)
        read = chunks * encoder.chunk + min(-(-rest // stride) * stride, encoder.chunk)
    return frames, read


def check_one_piece(how: WhisperMel, samples: int) -> None:
    """Raise BadMedia for an empty clip, or one longer than the window, which `split` would cut."""
    if len(split(how, samples)) > 1:
        raise BadMedia(f"a piece of {samples} samples is longer than the encoder's {how.seconds} s")


def compute_frames(how: WhisperMel, wave: np.ndarray, count: int = 0) -> np.ndarray:
    """Compute the valid frames of a clip float32 `[n]` at `how.sample_rate`, float32 `[frames, mels]`.

    count: with frames behind them, of the silence that pads the clip, up to so many and no more
    than the window has. Raises BadMedia as `check_one_piece`.
    """
    check_wave(wave)
    check_one_piece(how, wave.size)
    valid = valid_frames(how, wave.size)
    window = padded_samples(how, wave.size) // how.hop
    frames = min(max(valid, count), window)
    # Frames that overlap the clip, which may be some after the last valid one; all others are
    # silent. They are computed even if not returned, since power is clamped relative to the
    # window's maximum.
    overlapping = (
        valid if how.mirrored else min(-(-(wave.size + how.window // 2) // how.hop), window)
    )
    decades = np.full((max(frames, overlapping), how.mels), np.log10(np.float32(FLOOR)))
    decades[:overlapping] = np.log10(np.maximum(_centred_power(how, wave, overlapping), FLOOR))
    return ((np.maximum(decades, decades.max() - RANGE) + 4) / 4)[:frames].astype(np.float32)


def _centred_power(how: WhisperMel, wave: np.ndarray, count: int) -> np.ndarray:
    """Compute mel power `[count, mels]` of the first frames, as torch.stft(center=True, pad_mode="reflect")."""
    # Frame k is centred on sample k * hop of the window, whose samples are mirrored about its first
    # and its last.
    half = how.window // 2
    window_end = half + padded_samples(how, wave.size)
    padded = np.zeros(half + max(wave.size, half + 1, (count - 1) * how.hop + half), np.float32)
    padded[half : half + wave.size] = wave
    # With half 2 and samples a b c d: c b | a b c d | c b, without repeating a and d.
    padded[:half] = padded[2 * half : half : -1]
    if (beyond := padded.size - window_end) > 0:
        padded[window_end:] = padded[window_end - 2 : window_end - 2 - beyond : -1]
    return mel_power(padded, how.sample_rate, how.window, how.hop, how.mels, count)


def valid_frames(how: WhisperMel, samples: int) -> int:
    """Count the frames centred inside a clip of that many samples: those that the extractor's attention mask counts."""
    samples = max(samples, how.shortest)
    if how.mirrored:
        return samples // how.hop
    return min(-(-samples // how.hop), padded_samples(how, samples) // how.hop)


def padded_samples(how: WhisperMel, samples: int) -> int:
    """Count the samples of a clip with the silence behind it, of whole windows unless it ends with its mirror image."""
    samples = max(samples, how.shortest)
    if how.mirrored:
        return samples
    window = how.seconds * how.sample_rate
    return window * max(1, -(-samples // window)) if how.longer == "whole" else window
