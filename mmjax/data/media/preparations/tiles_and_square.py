"""Cut a large image into tiles, and show the whole of it behind them in a larger square, as DeepSeek-OCR 2 does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmjax.config import TilesAndSquare
from mmjax.data.media.image_transforms import LazyImage, Size
from mmjax.data.media.preparations.dynamic_tiles import nearest_grid
from mmjax.data.media.token_layout import layout_in_order
from mmjax.data.sample import NEWLINE, TokenLayout


def items(how: TilesAndSquare, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Cut an image into tiles where it is larger than one; the whole of it follows, padded to a square."""
    longest = max(image.size)
    sides = tuple(max(round(side * (how.square / longest)), 1) for side in image.size)
    whole = image.resized(sides, how.filter).squared(how.background)
    if longest <= how.tile:
        return (whole,)
    rows, columns = nearest_grid(image.size, (how.tile, how.tile), how.min_tiles, how.max_tiles)
    enlarged = image.resized((rows * how.tile, columns * how.tile), how.filter)
    return (*enlarged.cut(rows, columns), whole)


def layout(how: TilesAndSquare, newline: bool, size: Size, grids: Sequence[Size]) -> TokenLayout:
    """Arrange the tokens of the tiles, of the whole image, and a newline."""
    tokens = np.arange(sum(rows * columns for rows, columns in grids))
    return layout_in_order(np.concatenate([tokens, np.full(int(newline), NEWLINE)]))
