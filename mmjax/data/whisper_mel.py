"""Log-mel frames as Whisper's feature extractor makes them, of the clip alone instead of a whole window.

The extractor pads a clip with silence to `WhisperMel.seconds`. Frames far beyond the clip's end hold nothing but that
silence, so only those are made that are asked for; what they hold is the same.
"""

from __future__ import annotations

import numpy as np

from mmjax.config import WhisperMel
from mmjax.data.log_mel import hann, mel_filters
from mmjax.errors import BadMedia

FLOOR = 1e-10  # of power
RANGE = 8.0  # decades kept below the window's loudest bin


def most_frames(how: WhisperMel) -> int:
    """Frames of a whole window."""
    return how.seconds * how.sample_rate // how.hop


def valid_frames(how: WhisperMel, samples: int) -> int:
    """Frames whose middle lies in a clip of that many samples: what the extractor's attention mask counts."""
    return min(-(-samples // how.hop), most_frames(how))


def pieces(how: WhisperMel, samples: int) -> tuple[tuple[int, int], ...]:
    """Where to cut a clip, (start, stop) in samples: one piece where it fits the window, else as `longer` says.

    Pieces fill the window but for the last. BadMedia for an empty clip, and for a longer one that is to be refused
    (Qwen2-Audio's processor would cut it off there).
    """
    if samples < 1:
        raise BadMedia("a clip of 0 samples is empty")
    window = how.seconds * how.sample_rate
    if samples > window and how.longer == "refuse":
        given = f"{samples / how.sample_rate:.1f} s"
        raise BadMedia(f"a clip of {given} is longer than the encoder's {how.seconds} s, and longer clips are refused")
    return tuple((start, min(start + window, samples)) for start in range(0, samples, window))


def one_piece(how: WhisperMel, samples: int) -> None:
    """BadMedia for an empty clip, or one that is longer than the window: cut it as `pieces` says."""
    if len(pieces(how, samples)) > 1:
        raise BadMedia(f"a piece of {samples} samples is longer than the encoder's {how.seconds} s")


def log_mel(how: WhisperMel, wave: np.ndarray, extra_frames: int = 0) -> np.ndarray:
    """Frames float32 `[valid_frames + extra_frames, mels]` of a clip float32 `[n]` at `how.sample_rate`.

    extra_frames: frames after the valid ones, out of the silence that pads the clip (no more than the window has).
    BadMedia as `one_piece`.
    """
    if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
        raise ValueError(f"a clip must be floats [samples], not {wave.dtype} {list(wave.shape)}")
    one_piece(how, wave.size)
    valid = valid_frames(how, wave.size)
    frames = min(valid + extra_frames, most_frames(how))
    # The frames that reach into the clip, which may be some after the last valid one; all others are silent.
    heard = min(-(-(wave.size + how.window // 2) // how.hop), most_frames(how))
    decades = np.full((max(frames, heard), how.mels), np.log10(np.float32(FLOOR)))
    decades[:heard] = np.log10(np.maximum(_mel_power(how, wave, heard), FLOOR))
    return ((np.maximum(decades, decades.max() - RANGE) + 4) / 4)[:frames].astype(np.float32)


def _mel_power(how: WhisperMel, wave: np.ndarray, count: int) -> np.ndarray:
    """Power `[count, mels]` of the first frames, each about its own middle, the window mirrored beyond its ends."""
    half, window = how.window // 2, how.seconds * how.sample_rate
    padded = np.zeros(half + max(wave.size, half + 1, (count - 1) * how.hop + half), np.float32)
    padded[half : half + wave.size] = wave
    padded[:half] = padded[2 * half : half : -1]
    if (beyond := padded.size - half - window) > 0:
        padded[half + window :] = padded[half + window - 2 : half + window - 2 - beyond : -1]
    stride = padded.strides[0]
    frames = np.lib.stride_tricks.as_strided(padded, (count, how.window), (stride * how.hop, stride))
    spectrum = np.fft.rfft(frames * hann(how.window))
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    return power @ mel_filters(how.sample_rate, how.window, how.mels)
