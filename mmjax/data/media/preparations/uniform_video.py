"""Sample as many frames of every video, as InternVL and LLaVA-OneVision do, which shrinks them (`apply_pooling`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmjax.config import UniformVideo
from mmjax.data.media.decode import SampledVideo, VideoHeader, filled
from mmjax.data.media.image_transforms import Size
from mmjax.data.media.token_layout import concatenated, interpolate_tokens, layout_in_order
from mmjax.data.sample import NEWLINE, TokenLayout


def sample(how: UniformVideo, header: VideoHeader, unit: int, token_side: int) -> SampledVideo:
    """Choose a frame of each of so many equal parts of a video."""
    if how.taken == "first":
        # 4 of 10 frames: 0 2 5 7.
        count = min(how.frames, header.frames)
        indices = np.arange(count) * header.frames // count
    else:
        # Of equal parts, rounded to float32 as torch.arange does.
        middles = (np.arange(how.frames) + 0.5) * (header.frames / how.frames)
        indices = np.minimum(middles.astype(np.float32).astype(np.int64), header.frames - 1)
    indices = filled(indices, unit)
    labels = (
        [how.label.replace("{}", str(k + 1)) for k in range(len(indices) // unit)]
        if how.label
        else []
    )
    texts = (*(label.lstrip("\n") for label in labels[:1]), *labels[1:], "") if labels else ()
    return SampledVideo(indices, how.size or header.size, texts=texts)


def layout(how: UniformVideo, newline: bool, grids: Sequence[Size]) -> TokenLayout:
    """Arrange the tokens of a video's frames, interpolated to sides `shrink` times shorter, and at the end a newline.

    grids: rows and columns of the tokens of each frame.
    """
    tokens = layout_in_order(np.zeros(0, np.int32))
    first = 0
    for rows, columns in grids:
        table = first + np.arange(rows * columns).reshape(rows, columns)
        shrunk = interpolate_tokens(table, (-(-rows // how.shrink), -(-columns // how.shrink)))
        tokens = concatenated(tokens, shrunk)
        first += rows * columns
    return concatenated(tokens, layout_in_order(np.full(int(newline), NEWLINE)))
