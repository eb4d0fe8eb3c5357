"""Resize an image to about its own size; show tiles of a large one before that, as LFM2-VL does."""

from __future__ import annotations

from collections.abc import Sequence

from mmjax.config import ResizeOrTiles
from mmjax.data.media.image_transforms import LazyImage, Size
from mmjax.data.media.preparations.dynamic_tiles import nearest_grid
from mmjax.data.media.preparations.smart_resize import whole_units


def items(how: ResizeOrTiles, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Cut a large image into tiles, row by row; the whole of it, resized, comes last."""
    unit = how.patch * how.merge
    bounds = how.min_tokens * unit**2, how.max_tokens * unit**2
    whole = image.resized(whole_units(image.size, unit, bounds, least=1), how.filter)
    if (grid := tile_grid(how, image.size)) is None:
        return (whole,)
    rows, columns = grid
    tiles = image.resized((rows * how.tile, columns * how.tile), how.filter).cut(rows, columns)
    return (*tiles, whole) if how.thumbnail else tiles


def texts(how: ResizeOrTiles, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """Begin and end an image, and label its tiles and the whole of it; an image of one item has no label."""
    if (grid := tile_grid(how, size)) is None:
        return (how.begin, how.end)
    rows, columns = grid
    first, *others = [
        how.label.format(row=row + 1, column=column + 1)
        for row in range(rows)
        for column in range(columns)
    ]
    return (how.begin + first, *others, *[how.whole] * how.thumbnail, how.end)


def tile_grid(how: ResizeOrTiles, size: Size) -> tuple[int, int] | None:
    """Choose rows and columns of a large image's tiles; None: it is not cut."""
    unit = how.patch * how.merge
    height, width = (max(how.patch, round(side / unit) * unit) for side in size)
    if how.max_tiles == 1 or height * width <= how.max_tokens * unit**2 * how.tolerance:
        return None
    return nearest_grid(size, (how.tile, how.tile), how.min_tiles, how.max_tiles)
