"""Sample videos at a rate, with their seconds before each temporal patch, as Qwen3-VL and Qwen3.5 do."""

from __future__ import annotations

import numpy as np

from mmjax.config import Qwen3Video
from mmjax.data.media.decode import SampledVideo, VideoHeader, filled
from mmjax.data.media.preparations.smart_resize import smart_size_of_frames


def sample(how: Qwen3Video, header: VideoHeader, unit: int, token_side: int) -> SampledVideo:
    """Choose frames at equal distances, the first and the last among them, and their size."""
    rate = float(header.rate or how.fps)
    count = int(header.frames / rate * how.fps)
    count = min(max(count, how.min_frames), how.max_frames, header.frames)
    max_pixels = how.max_pixels
    if how.frame_pixels:
        max_pixels = (
            max(min(how.frame_pixels, max_pixels // count), int(how.min_pixels * 1.05)) * count
        )
    bounds = how.min_pixels, max_pixels
    size = smart_size_of_frames(header.size, token_side, bounds, count, unit)
    indices = filled(np.linspace(0, header.frames - 1, count).round().astype(np.int64), unit)
    # [temporal patches, frames of one]
    seconds = (indices / rate).reshape(-1, unit)
    # The mean of a temporal patch's first and last frame.
    texts = tuple(
        f"<{(first + last) / 2:.1f} seconds>" for first, last in seconds[:, [0, -1]].tolist()
    )
    return SampledVideo(indices, size, texts=(*texts, ""))
