"""Show an image whole, and in slices of an enlarged one where it is large, as MiniCPM-V does, with text between."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmjax.config import Slices
from mmjax.data.media.image_transforms import LazyImage, Size


def items(how: Slices, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Resize an image to whole tokens; a large one is followed by its slices, row by row."""
    grid = slice_grid(how, image.size)
    is_large = image.size[0] * image.size[1] > how.side**2
    enlarge = is_large or (grid is None and how.enlarged)
    whole = image.resized(_whole_tokens(how, image.size, enlarge), how.filter)
    if grid is None:
        return (whole,)
    # Sides are made multiples of the slices' number before they are divided by it.
    sides = (_multiple(side, count) / count for side, count in zip(image.size, grid, strict=True))
    height, width = _whole_tokens(how, tuple(sides), enlarge=True)
    rows, columns = grid
    return (whole, *image.resized((height * rows, width * columns), how.filter).cut(rows, columns))


def texts(how: Slices, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """Begin and end the whole image, and every slice; rows of slices but the last end with a line break."""
    _, columns = slice_grid(how, size) or (0, 1)
    begins = ["\n" * (n > 0 and n % columns == 0) + how.slice_begin for n in range(len(grids) - 1)]
    ends = [how.end, *[how.slice_end] * len(begins)]
    between = [end + begin for end, begin in zip(ends, begins, strict=False)]
    return (how.begin, *between, ends[-1])


def slice_grid(how: Slices, size: Size) -> tuple[int, int] | None:
    """Choose rows and columns of slices: about as many as the image has squares of `side`, nearest to its shape."""
    height, width = size
    count = min(math.ceil(width * height / how.side**2), how.max_slices)
    if count <= 1:
        return None
    grids = [
        (rows, slices // rows)
        for slices in (count - 1, count, count + 1)
        if 1 < slices <= how.max_slices
        for rows in range(1, slices + 1)
        if slices % rows == 0
    ]
    shape = math.log(width / height)
    # Of grids as near as each other, that of most rows.
    return min(grids, key=lambda grid: (abs(shape - math.log(grid[1] / grid[0])), -grid[0]))


def _whole_tokens(how: Slices, size: tuple[float, ...], enlarge: bool) -> Size:
    """Compute a size in whole tokens of about an image's shape. enlarge: of about as many pixels as `side` squared."""
    height, width = size
    if enlarge:
        ratio = width / height
        height = int(how.side / math.sqrt(ratio))
        width = int(height * ratio)
    return _multiple(height, how.unit), _multiple(width, how.unit)


def _multiple(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)
