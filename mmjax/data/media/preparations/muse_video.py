"""Sample videos at a rate up to a number of frames, with seconds before each temporal patch, as Muse Glimmer does."""

from __future__ import annotations

import numpy as np

from mmjax.config import MuseVideo
from mmjax.data.media.decode import SampledVideo, VideoHeader, filled
from mmjax.data.media.preparations.capped_grid import capped_size


def sample(how: MuseVideo, header: VideoHeader, unit: int, token_side: int) -> SampledVideo:
    """Choose frames at equal distances, the first and the last among them, and their size."""
    rate = float(header.rate or how.fps)
    count = min(int(header.frames * how.fps / rate), how.max_frames, header.frames)
    count = min(max(unit, count // unit * unit), header.frames)
    indices = filled(_evenly_spaced(header.frames - 1, count), unit)
    times = [f"Time: {second:.1f}s" for second in (indices[::unit] / rate).tolist()]
    texts = [f"{how.between if k else how.begin}{time}" for k, time in enumerate(times)]
    size = capped_size(header.size, token_side, how.max_tokens)
    return SampledVideo(indices, size, texts=(*texts, how.end))


def _evenly_spaced(last: int, count: int) -> np.ndarray:
    """Compute `torch.linspace(0, last, count).long()`: from both ends to the middle, rounded to float32 once each."""
    step = float(np.float32(last) / np.float32(max(count - 1, 1)))
    k = np.arange(count)
    spaced = np.where(k < max(count // 2, 1), k * step, last - k[::-1] * step)
    return spaced.astype(np.float32).astype(np.int64)
