"""Resize images and frames to whole tokens, a capped number of them, near to their shape, as Muse Glimmer does."""

from __future__ import annotations

from itertools import product
from math import ceil, floor

from mmjax.config import CappedGrid
from mmjax.data.media.image_transforms import LazyImage, Size


def items(how: CappedGrid, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Resize an image to about its own size, or what the cap leaves of it."""
    size = capped_size(image.size, how.patch * how.merge, how.max_tokens)
    return (image.resized(size, how.filter),)


def capped_size(size: Size, unit: int, max_tokens: int) -> Size:
    """Compute the size in whole tokens of `unit` pixels a side: of those around the ideal one the nearest in shape."""
    height, width = size
    rows, columns = height / unit, width / unit
    ratio = columns / rows
    if rows * columns > max_tokens:
        rows = (max_tokens / ratio) ** 0.5
        columns = rows * ratio
    # A set: where two have the same shape, its order decides, as in transformers.
    around = set(product((floor(rows), ceil(rows)), (floor(columns), ceil(columns))))
    fitting = [grid for grid in around if min(grid) >= 1 and grid[0] * grid[1] <= max_tokens]
    fitting = fitting or [(max(1, round(rows)), max(1, round(columns)))]
    rows, columns = min(fitting, key=lambda grid: abs(grid[0] / grid[1] - height / width))
    return rows * unit, columns * unit
