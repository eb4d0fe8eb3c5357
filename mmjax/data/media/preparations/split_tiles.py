"""Cut images into tiles with labels, as Idefics3 and SmolVLM do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmjax.config import SplitTiles
from mmjax.data.media.image_transforms import LazyImage, Size

MAX_SIDE = 4096  # pixels that Idefics3's resizing makes at most


def items(how: SplitTiles, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Cut an image, resized to whole tiles, followed by the whole of it; one that is a single tile is that alone."""
    side = how.tile
    filter = how.filter
    if how.resize:
        image = image.resized(enlarged_size(how, image.size), filter)
    if not how.split:
        return (image.resized((side, side), filter),)
    rows, columns = _whole_tiles(image.size, side)
    image = image.resized((rows * side, columns * side), filter)
    if rows * columns == 1:
        return (image,)
    return (*image.cut(rows, columns), image.resized((side, side), filter))


def texts(how: SplitTiles, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """Label every tile, and the whole image."""
    rows, columns = _whole_tiles(enlarged_size(how, size), how.tile) if how.split else (1, 1)
    if rows * columns == 1:
        return (how.marker + how.whole, how.marker)
    labels = [
        # Every row but the first begins behind the line break that ends the one before it.
        "\n" * (column == 0 < row) + how.marker + how.label.format(row=row + 1, column=column + 1)
        for row in range(rows)
        for column in range(columns)
    ]
    # The last row's line break, and one more.
    return (*labels, "\n\n" + how.marker + how.whole, how.marker)


def enlarged_size(how: SplitTiles, size: Size) -> Size:
    """Compute the size of an image before it is cut.

    Of one whose longest edge becomes that of `resize`, the other is even, as in transformers.
    """
    if len(how.resize) != 1:
        return how.resize or size
    (edge,) = how.resize
    height, width = size
    ratio = width / height
    if width >= height:
        short = int(edge / ratio)
        height, width = max(short + short % 2, 1), edge
    else:
        short = int(edge * ratio)
        height, width = edge, max(short + short % 2, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        height, width = int(MAX_SIDE / ratio), MAX_SIDE
    elif height > width and height > MAX_SIDE:
        height, width = MAX_SIDE, int(MAX_SIDE * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(size: Size, tile: int) -> tuple[int, int]:
    """Return rows and columns of the tiles that cover an image when its longer side is enlarged to whole ones."""
    # In tiles of 512, 700 x 1000 pixels have 2 columns, 1024 pixels, and at that width int(1024 /
    # 1.4286) = 716 rows of pixels: 2 rows of tiles.
    height, width = size
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)
