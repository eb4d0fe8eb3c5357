"""Log-mel features of clips as each audio encoder takes them, and their sizes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from mmjax.config import AudioConfig, LogMel, StoredTable, WhisperMel
from mmjax.errors import BadMedia

RANGE = 8.0  # decades below the loudest bin at which power is clamped, as in Whisper
QUIET = -2.0  # log10 power; a clip whose loudest bin is below this stays quiet instead of being raised to full scale


def frame_count(samples: int, window: int, hop: int) -> int:
    """Count the frames of a clip: the first starts at sample 0, and the last reaches the clip's end (zero-padded)."""
    return 1 + max(0, -(-(samples - window) // hop))


def log_mel(wave: np.ndarray, sample_rate: int, window: int, hop: int, mels: int) -> np.ndarray:
    """Compute log-mel frames float32 `[frame_count, mels]` of a clip `[n]`: Hann window, power, Slaney mel filters,
    log10.

    Clamped to 8 decades below the loudest bin, as Whisper's, but scaled relative to it: the loudest bin is 1 and two
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
    power = mel_power(padded, sample_rate, window, hop, mels, count)
    decades = np.log10(np.maximum(power, np.float32(FLOOR)))
    loudest = max(float(decades.max()), QUIET)
    return (np.maximum(decades, loudest - RANGE) - loudest) / np.float32(2) + np.float32(1)


def mel_power(wave: np.ndarray, sample_rate: int, window: int, hop: int, mels: int, count: int) -> np.ndarray:
    """Compute the mel power `[count, mels]` of the first frames of a float32 wave: one every `hop` samples."""
    # A view: row k is samples k * hop to k * hop + window - 1.
    frames = np.lib.stride_tricks.as_strided(wave, (count, window), (wave.strides[0] * hop, wave.strides[0]))
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
    # Slaney's mel is linear up to 1 kHz = 15 mel (200/3 Hz each), then logarithmic: 27 mel for a factor of 6.4.
    step = np.log(6.4) / 27
    nyquist = sample_rate / 2
    top = nyquist * 3 / 200 if nyquist < 1000 else 15.0 + np.log(nyquist / 1000) / step
    mel = np.linspace(0, top, mels + 2)
    edges = np.where(mel < 15.0, mel * 200 / 3, 1000 * np.exp(step * (mel - 15.0)))
    bins = np.arange(window // 2 + 1) * sample_rate / window
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])).astype(np.float32)


FLOOR = 1e-10  # of mel power, against log10(0)


def window_frames(config: WhisperMel) -> int:
    """Count the frames of a whole window."""
    return config.seconds * config.sample_rate // config.hop


def valid_frames(config: WhisperMel, samples: int) -> int:
    """Count the frames centred inside a clip of that many samples: those that the extractor's attention mask counts."""
    if config.end == "mirror":
        return samples // config.hop
    return min(-(-samples // config.hop), window_frames(config))


def split_into_windows(config: WhisperMel, samples: int) -> tuple[tuple[int, int], ...]:
    """Cut a clip, (start, stop) in samples: one piece where it fits the window, else as `config.longer` says.

    Pieces fill the window but for the last. Raises BadMedia for an empty clip, and for a longer one that is to be
    refused (Qwen2-Audio's processor would truncate it).
    """
    if samples < 1:
        raise BadMedia("a clip of 0 samples is empty")
    if config.end == "mirror" and samples <= config.window // 2:
        raise BadMedia(f"a clip of {samples} samples is too short to be mirrored over half a window of {config.window}")
    window = config.seconds * config.sample_rate
    if samples > window and config.longer == "refuse":
        seconds = f"{samples / config.sample_rate:.1f} s"
        raise BadMedia(
            f"a clip of {seconds} is longer than the encoder's {config.seconds} s, and longer clips are refused"
        )
    return tuple((start, min(start + window, samples)) for start in range(0, samples, window))


def check_one_piece(config: WhisperMel, samples: int) -> None:
    """Raise BadMedia for an empty clip, or one longer than the window, which `split_into_windows` would cut."""
    if len(split_into_windows(config, samples)) > 1:
        raise BadMedia(f"a piece of {samples} samples is longer than the encoder's {config.seconds} s")


def whisper_log_mel(config: WhisperMel, wave: np.ndarray, extra_frames: int = 0) -> np.ndarray:
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
    mirrored = config.end == "mirror"
    overlapping = valid if mirrored else min(-(-(wave.size + config.window // 2) // config.hop), window_frames(config))
    decades = np.full((max(frames, overlapping), config.mels), np.log10(np.float32(FLOOR)))
    decades[:overlapping] = np.log10(np.maximum(_centred_power(config, wave, overlapping), FLOOR))
    return ((np.maximum(decades, decades.max() - RANGE) + 4) / 4)[:frames].astype(np.float32)


def _centred_power(config: WhisperMel, wave: np.ndarray, count: int) -> np.ndarray:
    """Compute mel power `[count, mels]` of the first frames, as torch.stft(center=True, pad_mode="reflect")."""
    # Frame k is centred on sample k * hop of the window, whose samples are mirrored about its first and its last.
    half = config.window // 2
    window_end = half + (wave.size if config.end == "mirror" else config.seconds * config.sample_rate)
    padded = np.zeros(half + max(wave.size, half + 1, (count - 1) * config.hop + half), np.float32)
    padded[half : half + wave.size] = wave
    # With half 2 and samples a b c d: c b | a b c d | c b, without repeating a and d.
    padded[:half] = padded[2 * half : half : -1]
    if (beyond := padded.size - window_end) > 0:
        padded[window_end:] = padded[window_end - 2 : window_end - 2 - beyond : -1]
    return mel_power(padded, config.sample_rate, config.window, config.hop, config.mels, count)


class ClipSize(NamedTuple):
    """Frame counts of one clip, computed from its number of samples."""

    frames: int  # that become positions of the layers
    input_frames: int  # frames and, behind them, those of the padding silence that only the convolutions read
    positions: int  # in the encoder's layers


def clip_size(encoder: AudioConfig, samples: int) -> ClipSize:
    """Compute the frame counts of a clip of so many samples.

    Raises BadMedia for a clip that is longer than the window of `clips` or the encoder's table of positions.
    """
    clips = encoder.clips
    table = encoder.positions
    stride = encoder.stride
    max_frames = table.positions * stride if isinstance(table, StoredTable) else None
    if isinstance(clips, LogMel):
        frames = conv_frames = frame_count(samples, clips.window, clips.hop)
    else:
        check_one_piece(clips, samples)
        window = window_frames(clips)
        frames = window if clips.attended == "window" else valid_frames(clips, samples)
        # Position p reads frames 2p - 2 to 2p + 2: 5 frames make positions 0, 1, 2, and position 2 reads up to frame
        # 6, so 5 + 5 % 2 + 1 = 7 frames are needed; 4 frames make 0 and 1, which read up to frame 4: 5 frames.
        conv_frames = min(frames + frames % stride + 1, window, *(() if max_frames is None else (max_frames,)))
        if encoder.chunk:  # whose convolutions read no silence
            conv_frames = frames
        if encoder.stem_width and frames > encoder.chunk:  # but zeros behind a clip, up to the size of its other chunks
            chunks, rest = divmod(frames, encoder.chunk)
            conv_frames = chunks * encoder.chunk + min(-(-rest // stride) * stride, encoder.chunk)
    if max_frames is not None and frames > max_frames:
        raise BadMedia(f"a clip of {frames} frames is longer than the {max_frames} of which the encoder has positions")
    return ClipSize(frames, conv_frames, encoder.count_positions(frames))


def frame_columns(encoder: AudioConfig, frames: int) -> np.ndarray:
    """Return where the frames of a clip stand in its part of a row, int `[frames]`: chunks begin with a position."""
    if not encoder.chunk:
        return np.arange(frames)
    chunk, index = np.divmod(np.arange(frames), encoder.chunk)
    return chunk * encoder.chunk_positions * encoder.stride + index


def split_clip(encoder: AudioConfig, samples: int) -> tuple[tuple[int, int], ...]:
    """Cut a clip of so many samples into items, (start, stop). Raises BadMedia for one that is too long, or empty."""
    if isinstance(encoder.clips, WhisperMel):
        return split_into_windows(encoder.clips, samples)
    return ((0, samples),)


def log_mel_frames(encoder: AudioConfig, wave: np.ndarray) -> np.ndarray:
    """Compute frames float32 `[n, mels]` of a clip float `[samples]`: the first of `clip_size`'s input frames.

    The others are zeros.
    """
    clips = encoder.clips
    if isinstance(clips, LogMel):
        return log_mel(wave, clips.sample_rate, clips.window, clips.hop, clips.mels)
    extra_frames = clip_size(encoder, len(wave)).input_frames - valid_frames(clips, len(wave))
    return whisper_log_mel(clips, wave, 0 if encoder.chunk else extra_frames)
