"""Compute an audio encoder's input frames: those that its layers see, and the few more that only convolutions read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmjax.config import AudioConfig, LogMel, StoredTable, WhisperMel
from mmjax.data.media import log_mel, whisper_mel
from mmjax.errors import BadMedia

CONV_STRIDE = 2  # of the audio encoder's second convolution


class ClipSize(NamedTuple):
    """Frame counts of one clip, computed from its number of samples."""

    frames: int  # that become positions of the layers
    held: int  # frames and, behind them, those of the padding silence that only the convolutions read

    @property
    def positions(self) -> int:
        """Positions in the encoder's layers."""
        return -(-self.frames // CONV_STRIDE)


def clip_size(encoder: AudioConfig, samples: int) -> ClipSize:
    """Compute the frame counts of a clip of so many samples.

    Raises BadMedia for a clip that is longer than the window of `clips` or the encoder's table of positions.
    """
    clips = encoder.clips
    table = encoder.positions
    max_frames = table.positions * CONV_STRIDE if isinstance(table, StoredTable) else None
    if isinstance(clips, LogMel):
        frames = conv_frames = log_mel.frame_count(samples, clips.window, clips.hop)
    else:
        whisper_mel.check_one_piece(clips, samples)
        window = whisper_mel.window_frames(clips)
        frames = window if clips.attended == "window" else whisper_mel.valid_frames(clips, samples)
        # Position p reads frames 2p - 2 to 2p + 2: 5 frames make positions 0, 1, 2, and position 2 reads up to frame
        # 6, so 5 + 5 % 2 + 1 = 7 frames are needed; 4 frames make 0 and 1, which read up to frame 4: 5 frames.
        conv_frames = min(frames + frames % CONV_STRIDE + 1, window, *(() if max_frames is None else (max_frames,)))
    if max_frames is not None and frames > max_frames:
        raise BadMedia(f"a clip of {frames} frames is longer than the {max_frames} of which the encoder has positions")
    return ClipSize(frames, conv_frames)


def split_clip(encoder: AudioConfig, samples: int) -> tuple[tuple[int, int], ...]:
    """Cut a clip of so many samples into items, (start, stop). Raises BadMedia for one that is too long, or empty."""
    if isinstance(encoder.clips, WhisperMel):
        return whisper_mel.split_clip(encoder.clips, samples)
    return ((0, samples),)


def log_mel_frames(encoder: AudioConfig, wave: np.ndarray) -> np.ndarray:
    """Compute frames float32 `[held, mels]` of a clip float `[samples]`; lengths and errors are `clip_size`'s."""
    clips = encoder.clips
    if isinstance(clips, LogMel):
        return log_mel.log_mel(wave, clips.sample_rate, clips.window, clips.hop, clips.mels)
    extra_frames = clip_size(encoder, len(wave)).held - whisper_mel.valid_frames(clips, len(wave))
    return whisper_mel.log_mel(clips, wave, extra_frames)
