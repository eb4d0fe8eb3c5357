"""Log-mel frames of Whisper's feature extractor, computed for the clip alone instead of a whole window.

The extractor pads a clip with silence to `WhisperMel.seconds`. Frames far behind the clip's end depend on that silence
only, so just the requested frames are computed; their values are the extractor's.
"""

from __future__ import annotations

import numpy as np

from mmjax.config import WhisperMel
from mmjax.data.media.log_mel import mel_power
from mmjax.errors import BadMedia

FLOOR = 1e-10  # of power
RANGE = 8.0  # decades below the window's loudest bin at which power is clamped


def window_frames(config: WhisperMel) -> int:
    """Count the frames of a whole window."""
    return config.seconds * config.sample_rate // config.hop


def valid_frames(config: WhisperMel, samples: int) -> int:
    """Count the frames centred inside a clip of that many samples: those that the extractor's attention mask counts."""
    return min(-(-samples // config.hop), window_frames(config))


def split_clip(config: WhisperMel, samples: int) -> tuple[tuple[int, int], ...]:
    """Cut a clip, (start, stop) in samples: one piece where it fits the window, else as `config.longer` says.

    Pieces fill the window but for the last. Raises BadMedia for an empty clip, and for a longer one that is to be
    refused (Qwen2-Audio's processor would truncate it).
    """
    if samples < 1:
        raise BadMedia("a clip of 0 samples is empty")
    window = config.seconds * config.sample_rate
    if samples > window and config.longer == "refuse":
        seconds = f"{samples / config.sample_rate:.1f} s"
        raise BadMedia(
            f"a clip of {seconds} is longer than the encoder's {config.seconds} s, and longer clips are refused"
        )
    return tuple((start, min(start + window, samples)) for start in range(0, samples, window))


def check_one_piece(config: WhisperMel, samples: int) -> None:
    """Raise BadMedia for an empty clip, or one longer than the window, which `split_clip` would cut."""
    if len(split_clip(config, samples)) > 1:
        raise BadMedia(f"a piece of {samples} samples is longer than the encoder's {config.seconds} s")


def log_mel(config: WhisperMel, wave: np.ndarray, extra_frames: int = 0) -> np.ndarray:
    """Compute frames float32 `[valid_frames + extra_frames, mels]` of a clip float32 `[n]` at `config.sample_rate`.

    extra_frames: frames after the valid ones, out of the silence that pads the clip (no more than the window has).
    Raises BadMedia as `check_one_piece`.
    """
    if wave.ndim != 1 or not np.issubdtype(wave.dtype, np.floating):
        raise ValueError(f"a clip must be floats [samples], not {wave.dtype} {list(wave.shape)}")
    check_one_piece(config, wave.size)
    valid = valid_frames(config, wave.size)
    frames = min(valid + extra_frames, window_frames(config))
    # Frames that overlap the clip, which may be some after the last valid one; all others are silent. They are computed
    # even if not returned, since power is clamped relative to the window's maximum.
    overlapping = min(-(-(wave.size + config.window // 2) // config.hop), window_frames(config))
    decades = np.full((max(frames, overlapping), config.mels), np.log10(np.float32(FLOOR)))
    decades[:overlapping] = np.log10(np.maximum(_centred_power(config, wave, overlapping), FLOOR))
    return ((np.maximum(decades, decades.max() - RANGE) + 4) / 4)[:frames].astype(np.float32)


def _centred_power(config: WhisperMel, wave: np.ndarray, count: int) -> np.ndarray:
    """Compute mel power `[count, mels]` of the first frames, as torch.stft(center=True, pad_mode="reflect")."""
    # Frame k is centred on sample k * hop of the window, whose samples are mirrored about its first and its last.
    half = config.window // 2
    window_end = half + config.seconds * config.sample_rate
    padded = np.zeros(half + max(wave.size, half + 1, (count - 1) * config.hop + half), np.float32)
    padded[half : half + wave.size] = wave
    # With half 2 and samples a b c d: c b | a b c d | c b, without repeating a and d.
    padded[:half] = padded[2 * half : half : -1]
    if (beyond := padded.size - window_end) > 0:
        padded[window_end:] = padded[window_end - 2 : window_end - 2 - beyond : -1]
    return mel_power(padded, config.sample_rate, config.window, config.hop, config.mels, count)
