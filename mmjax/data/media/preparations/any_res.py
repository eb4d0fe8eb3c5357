"""Cut images into tiles, and arrange their tokens by the rows of the image.

As LLaVA-NeXT (`pack_image_features`) and LLaVA-OneVision do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from mmjax.config import AnyRes
from mmjax.data.media.image_transforms import LazyImage, Size
from mmjax.data.media.token_layout import (
    concatenated,
    interpolate_tokens,
    layout_in_order,
    unpad_tokens,
)
from mmjax.data.sample import NEWLINE, TokenLayout
from mmjax.errors import BadMedia

MIN_SHRINK = 1.1  # of each side: images that would shrink by less are not interpolated


def items(how: AnyRes, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Prepare the whole image, then its tiles."""
    tile = how.tile, how.tile
    if images > 1 and how.several == "square":
        return (image.squared(how.background).resized(tile, how.filter),)
    # The canvas has the pinpoint's size, with the image centred on black padding.
    canvas = select_best_resolution(how, image.size)
    tiles = image.fitted(canvas, how.filter).cut(canvas[0] // how.tile, canvas[1] // how.tile)
    return (image.resized(tile, how.filter), *tiles)


def layout(how: AnyRes, newline: bool, size: Size, grids: Sequence[Size]) -> TokenLayout:
    """Arrange the whole image's tokens, then the rows of the image that its tiles make up, a newline after each if any.

    size: (height, width) of the image in pixels. grids: rows and columns of the tokens of each
    item. Raises BadMedia for an image that would be interpolated to nothing.
    """
    base = grids[0][0] * grids[0][1]
    overview = layout_in_order(np.arange(base))
    newlines = layout_in_order(np.full(int(newline), NEWLINE))
    if len(grids) == 1:
        return concatenated(overview, newlines)
    rows, columns = (side // how.tile for side in select_best_resolution(how, size))
    height, width = grids[1]
    # Tokens are numbered tile by tile; the table has them as they lie in the image: for 1 x 2 tiles
    # of 2 x 2 tokens, after base, 0 1 4 5 in its first row and 2 3 6 7 in its second.
    table = base + np.arange(rows * columns * height * width).reshape(rows, columns, height, width)
    table = unpad_tokens(table.transpose(0, 2, 1, 3).reshape(rows * height, columns * width), size)
    shape = table.shape
    lines = layout_in_order(table)
    shrink = math.sqrt(table.size / (how.most_tiles * height * width)) if how.most_tiles else 1.0
    if shrink > MIN_SHRINK:
        shape = int(table.shape[0] // shrink), int(table.shape[1] // shrink)
        if not min(shape):
            raise BadMedia(
                f"of an image of {size[0]} x {size[1]} pixels nothing is left when it is interpolated"
            )
        lines = interpolate_tokens(table, shape)
    if newline:
        line_ends = np.arange(1, shape[0] + 1) * shape[1]
        lines = TokenLayout(
            token=np.insert(lines.token, line_ends, newlines.token, axis=0),
            share=np.insert(lines.share, line_ends, newlines.share, axis=0),
        )
    return concatenated(overview, lines)


def select_best_resolution(config: AnyRes, size: Size) -> Size:
    """Choose the resolution that shows most of an image's pixels, and of several such the one that wastes least."""
    height, width = size

    # Compared first by pixels shown, at most the image's own, then by the negative of pixels
    # wasted.
    def shown_and_wasted(pinpoint: Size) -> tuple[int, int]:
        scale = min(pinpoint[1] / width, pinpoint[0] / height)
        shown = min(int(width * scale) * int(height * scale), height * width)
        return shown, shown - pinpoint[0] * pinpoint[1]

    return max(pinpoint_sizes(config.pinpoints), key=shown_and_wasted)


@functools.lru_cache(maxsize=64)
def pinpoint_sizes(pinpoints: tuple[str, ...]) -> tuple[Size, ...]:
    """Parse pinpoints such as `"336x672"` to (height, width)."""
    return tuple(
        (int(height), int(width))
        for height, width in (pinpoint.split("x") for pinpoint in pinpoints)
    )
