"""Cut an image, padded to whole tiles, into these, and show the whole of it behind them, as Llama 4 does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmjax.config import CanvasTiles
from mmjax.data.media.image_transforms import LazyImage, Size
from mmjax.data.media.preparations.dynamic_tiles import grid_by_scale


def items(how: CanvasTiles, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Cut an image into tiles, row by row; the whole of it, as one more, follows several."""
    side = how.tile
    rows, columns = tile_grid(how, image.size)
    canvas = rows * side, columns * side
    # PyTorch's division of a canvas's side is in float32, Python's of a number in float64.
    room = tuple(
        np.float32(limit) if how.enlarged or limit < own else max(own, side)
        for own, limit in zip(image.size, canvas, strict=True)
    )
    fitted = image.resized(fitted_size(image.size, room), how.filter).padded(canvas)
    tiles = fitted.cut(rows, columns)
    return (*tiles, image.resized((side, side), how.filter)) if len(tiles) > 1 else tiles


def texts(how: CanvasTiles, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """Begin and end an image, and separate its tiles and their rows."""
    rows, columns = tile_grid(how, size)
    if rows * columns == 1:
        return (how.begin + how.whole, how.end)
    *between, last = ([how.tile_end] * (columns - 1) + [how.row_end]) * rows
    return (how.begin, *between, last + how.whole, how.end)


def tile_grid(how: CanvasTiles, size: Size) -> tuple[int, int]:
    """Choose rows and columns of an image's tiles."""
    return grid_by_scale(size, how.tile, 1, how.max_tiles, how.enlarged)


def fitted_size(size: Size, room: tuple[Any, Any]) -> Size:
    """Compute the largest size in an image's own shape that there is room for, rounded down in the room's precision."""
    height, width = size
    by_height, by_width = (limit / side for limit, side in zip(room, size, strict=True))
    if by_width < by_height:
        return max(min(math.floor(height * by_width), int(room[0])), 1), int(room[1])
    return int(room[0]), max(min(math.floor(width * by_height), int(room[1])), 1)
