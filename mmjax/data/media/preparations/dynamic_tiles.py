"""Cut images into tiles, as InternVL, Aya Vision and Command A Vision do, with text between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from mmjax.config import DynamicTiles
from mmjax.data.media.image_transforms import LazyImage, Size


def items(how: DynamicTiles, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Cut an image into tiles, followed by its thumbnail."""
    rows, columns = tile_grid(how, image.size)
    height, width = how.tile
    tiles = image.resized((rows * height, columns * width), how.filter).cut(rows, columns)
    if how.thumbnail and len(tiles) > 1:
        return (*tiles, image.resized((height, width), how.filter))
    return tiles


def texts(how: DynamicTiles, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """Begin and end an image, and label and end its tiles and the whole of it."""
    tiles = len(grids) - (how.thumbnail or len(grids) == 1)
    labels = [how.label.format(tile=number + 1) for number in range(tiles)]
    first, *others = (*labels, *[how.whole] * (len(grids) - tiles))
    between = (how.tile_end + label for label in others)
    return (how.begin + first, *between, how.tile_end + how.end)


def tile_grid(config: DynamicTiles, size: Size) -> tuple[int, int]:
    """Choose rows and columns of an image's tiles, of the grids of a permitted count.

    By scale, the grid that an image is enlarged least to fill, or else shrunk least to fit, the
    first of equal ones.
    """
    if config.grid_by == "scale":
        # of tiles that are no squares, too, as in transformers
        return grid_by_scale(size, config.tile[0], config.min_tiles, config.max_tiles)
    return nearest_grid(size, config.tile, config.min_tiles, config.max_tiles)


def nearest_grid(size: Size, tile: Size, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Choose the rows and columns of tiles that are nearest to an image's aspect ratio.

    Of equally near ones the larger, as long as it has less than twice the image's pixels.
    OpenGVLab's own code (`dynamic_preprocess`) chooses the same where one tile is permitted, as it
    is for all their models. From `min_tiles=2` up, grids of the same count can be equally near and nearest of all
    (1 x 2 and 2 x 1 tiles for 4 x 5 pixels); which one that code takes then depends on the order of
    a Python set, and here it is as in transformers.
    """
    height, width = size
    best_distance = math.inf
    best = (1, 1)
    for rows, columns in _grids(min_tiles, max_tiles):
        # Grids come with few tiles first, so a tie goes to the larger grid only if the image can
        # fill half of it.
        distance = abs(width / height - columns / rows)
        filled = height * width > 0.5 * tile[0] * tile[1] * rows * columns
        if distance < best_distance or (distance == best_distance and filled):
            best_distance = distance
            best = (rows, columns)
    return best


def grid_by_scale(
    size: Size, side: int, min_tiles: int, max_tiles: int, enlarged: bool = False
) -> tuple[int, int]:
    """Choose the rows and columns of square tiles to which an image is enlarged least, or else shrunk least.

    enlarged: enlarged most. Of equal ones the smallest.
    """
    grids = _grids(min_tiles, max_tiles)
    scales = [min(grid[axis] * side / size[axis] for axis in (0, 1)) for grid in grids]
    enlarging = [scale for scale in scales if scale >= 1]
    least = enlarging and not enlarged
    return grids[scales.index(min(enlarging) if least else max(scales))]


@functools.lru_cache(maxsize=64)
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """List (rows, columns) of all grids, few tiles first, and of equal counts the narrow ones first."""
    sides = range(1, max_tiles + 1)
    grids = [
        (rows, columns)
        for columns in sides
        for rows in sides
        if min_tiles <= rows * columns <= max_tiles
    ]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))
