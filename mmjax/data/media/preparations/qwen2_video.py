"""Sample videos at a rate, with times as rotary positions, as Qwen2-VL, Qwen2.5-VL and the Omni models do."""

from __future__ import annotations

import numpy as np

from mmjax.config import Qwen2Video
from mmjax.data.media.decode import SampledVideo, VideoHeader, filled
from mmjax.data.media.preparations.smart_resize import smart_size


def sample(how: Qwen2Video, header: VideoHeader, unit: int, token_side: int) -> SampledVideo:
    """Choose the frames of a video and their size."""
    indices = _every_nth(how, header, unit)
    max_pixels = how.max_pixels
    if how.total_pixels:
        max_pixels = max(
            min(max_pixels, how.total_pixels * unit // len(indices)), int(how.min_pixels * 1.05)
        )
    size = smart_size(header.size, token_side, (how.min_pixels, max_pixels))
    seconds_per_frame = header.frames / float(header.rate or how.fps) / len(indices)
    indices = filled(indices, unit)
    times = _rotary_times(how, len(indices) // unit, unit * seconds_per_frame, unit)
    return SampledVideo(indices, size, times=tuple(times.tolist()))


def _rotary_times(how: Qwen2Video, count: int, sampled: float, unit: int) -> np.ndarray:
    """Compute the times of so many temporal patches, whole positions, as transformers does for each family.

    In float32, and cut off; where parts of positions count there are none.

    sampled: seconds between the frames taken that begin two of them.
    """
    patches = np.arange(count, dtype=np.float32)
    per_second = np.float32(how.tokens_per_second)
    if how.seconds == "nominal":
        times = patches * np.float32(unit / how.fps) * per_second
        return (np.rint(times) if how.turns == "patches" else times).astype(int)
    return (
        patches * (per_second * np.float32(sampled) if how.tokens_per_second else np.float32(1))
    ).astype(int)


def _every_nth(how: Qwen2Video, header: VideoHeader, unit: int) -> np.ndarray:
    """Choose frames at equal distances from the first on, a multiple of `unit` of them where there are so many."""
    total = header.frames
    max_frames = min(how.max_frames, total) // unit * unit
    count = total / float(header.rate or how.fps) * how.fps
    count = int(min(max(count, how.min_frames), max_frames, total) // unit * unit) or min(
        unit, total
    )
    step = total / count
    # Rounded to float32, as torch.arange does: 2.9999999999 is frame 3. (Where rounding makes that
    # one frame longer, it ends with a frame that is not there; here it does not.)
    return np.minimum((np.arange(count) * step).astype(np.float32).astype(np.int64), total - 1)
