"""From a clip to an audio encoder's frames: those that its layers see, and the few more that its convolutions reach."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmjax.config import AudioConfig, LogMel, StoredTable, WhisperMel
from mmjax.data import log_mel, whisper_mel
from mmjax.errors import BadMedia

CONV_STRIDE = 2  # of the audio encoder's second convolution


class ClipSize(NamedTuple):
    """Frames of one clip, known from its samples alone."""

    frames: int  # that become positions of the layers
    held: int  # with those after them, out of the silence that pads the clip, which only the convolutions see

    @property
    def positions(self) -> int:
        """Of the layers."""
        return -(-self.frames // CONV_STRIDE)


def clip_size(encoder: AudioConfig, samples: int) -> ClipSize:
    """The frames of a clip of so many samples.

    BadMedia for a clip that is longer than the window of `clips` or the encoder's table of positions.
    """
    how, table = encoder.clips, encoder.positions
    most = table.positions * CONV_STRIDE if isinstance(table, StoredTable) else None
    if isinstance(how, LogMel):
        frames = held = log_mel.frame_count(samples, how.window, how.hop)
    else:
        whisper_mel.one_piece(how, samples)
        window = whisper_mel.most_frames(how)
        frames = window if how.attended == "window" else whisper_mel.valid_frames(how, samples)
        # Position p is made of the frames from 2p - 2 to 2p + 2.
        held = min(frames + frames % CONV_STRIDE + 1, window if most is None else min(window, most))
    if most is not None and frames > most:
        raise BadMedia(f"a clip of {frames} frames is longer than the {most} of which the encoder has positions")
    return ClipSize(frames, held)


def pieces(encoder: AudioConfig, samples: int) -> tuple[tuple[int, int], ...]:
    """Where a clip of so many samples is cut into items, (start, stop). BadMedia for one that is too long, or empty."""
    if isinstance(encoder.clips, WhisperMel):
        return whisper_mel.pieces(encoder.clips, samples)
    return ((0, samples),)


def clip_frames(encoder: AudioConfig, wave: np.ndarray) -> np.ndarray:
    """Frames float32 `[held, mels]` of a clip float `[samples]`, as many as `clip_size` says. Errors as there."""
    how = encoder.clips
    if isinstance(how, LogMel):
        return log_mel.log_mel(wave, how.sample_rate, how.window, how.hop, how.mels)
    held = clip_size(encoder, len(wave)).held
    return whisper_mel.log_mel(how, wave, held - whisper_mel.valid_frames(how, len(wave)))
