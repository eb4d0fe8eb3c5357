"""Sample videos at a rate up to a length, with their seconds behind each temporal patch, as GLM-4.1V does."""

from __future__ import annotations

import numpy as np

from mmjax.config import Glm4Video
from mmjax.data.media.decode import SampledVideo, VideoHeader, filled
from mmjax.data.media.preparations.smart_resize import smart_size_of_frames


def sample(how: Glm4Video, header: VideoHeader, unit: int, token_side: int) -> SampledVideo:
    """Choose frames at a rate, an even number, and their size; of a longer video frames at equal distances."""
    rate = float(header.rate or how.fps)
    length = header.frames / rate
    if length <= how.seconds:
        times = np.arange(max(int(length * how.fps), 1)) * rate / how.fps
    elif (count := int(how.seconds * how.fps)) < header.frames:
        times = np.linspace(0, length, count) * rate
    else:
        times = np.arange(header.frames)
    indices = filled(np.unique(np.minimum(np.ceil(times).astype(np.int64), header.frames - 1)), 2)
    bounds = how.min_pixels, how.max_pixels
    size = smart_size_of_frames(header.size, token_side, bounds, len(indices), unit)
    # Those of every other frame taken, however many frames a temporal patch has.
    seconds = (indices[::2] / rate).astype(int).tolist()
    indices = filled(indices, unit)
    texts = tuple(str(seconds[min(k, len(seconds) - 1)]) for k in range(len(indices) // unit))
    return SampledVideo(indices, size, texts=("", *texts))
