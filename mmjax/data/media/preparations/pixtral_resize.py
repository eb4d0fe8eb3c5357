"""Resize images into a box, with text behind every row of tokens, as Pixtral does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmjax.config import PixtralResize
from mmjax.data.media.image_transforms import LazyImage, Size
from mmjax.errors import BadMedia


def items(how: PixtralResize, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Make one item that fits the box, each side rounded up to whole tokens.

    Raises BadMedia for an image so narrow that nothing is left of a side.
    """
    unit = how.unit
    box = how.box
    # The side that is furthest above its limit decides; images inside the box are not enlarged.
    ratio = max(side / limit for side, limit in zip(image.size, box, strict=True))
    size = tuple(math.floor(side / ratio) for side in image.size) if ratio > 1 else image.size
    if not min(size):
        raise BadMedia(
            f"an image of {image.size[0]} x {image.size[1]} pixels is too narrow to fit {box}"
        )
    rows, columns = (-(-side // unit) for side in size)
    return (image.resized((rows * unit, columns * unit), how.filter),)


def texts(how: PixtralResize, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """End every row of tokens."""
    ((rows, _),) = grids
    return ("", *[how.row_end] * (rows - 1), how.end)
