"""From one image to the encoder items that it becomes: resized, cropped or cut into tiles, as `config` says how.

Pixels are those of transformers' processors with Pillow behind them, bit for bit, before they are rescaled and
normalised. (With torchvision behind them, which transformers prefers where it is installed, the same processors round
resized pixels a little differently.) Every preparation is one function of a `Picture`, and so may be your own: of a
picture without pixels it says the sizes, which need nothing but the image's header.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mmjax.config import AnyRes, AsIs, DynamicTiles, FixedSize, ImagePreparation, MediaLimits, SmartResize
from mmjax.data.picture import Picture, Size
from mmjax.errors import BadMedia

BeforeEncoder = Callable[[Picture, int], Sequence[Picture]]  # of an image, one of so many of its sample: its items

STEEPEST = 200  # the longer side over the shorter, in Qwen-VL's resizing


def before_encoder(how: ImagePreparation) -> BeforeEncoder:
    """The function that a preparation is."""
    match how:
        case AsIs():
            return lambda picture, images: (picture,)
        case FixedSize():
            return partial(fixed_size, how)
        case SmartResize():
            return partial(smart_resize, how)
        case DynamicTiles():
            return partial(dynamic_tiles, how)
        case AnyRes():
            return partial(any_res, how)


def sizes_of_items(
    prepare: BeforeEncoder, size: Size, images: int = 1, limits: MediaLimits | None = None
) -> tuple[Size, ...]:
    """Sizes of the items of an image of (height, width); `images` is how many its sample has.

    BadMedia for a size that cannot be prepared so, or that would need more than `limits.pixels` on the way.
    """
    if min(size) < 1:
        raise BadMedia(f"an image of {size[0]} x {size[1]} pixels is empty")
    picture = Picture(size, None, (limits or MediaLimits()).pixels)
    return tuple(item.size for item in prepare(picture, images))


def items_of_image(
    prepare: BeforeEncoder, image: np.ndarray, images: int = 1, limits: MediaLimits | None = None
) -> tuple[np.ndarray, ...]:
    """The items uint8 `[h, w, 3]` of an image uint8 `[H, W, 3]`, of the sizes that `sizes_of_items` says. Read only.

    ValueError for an array that is no such image, BadMedia as `sizes_of_items`.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"an image must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
    if not image.size:
        raise BadMedia(f"an image of {image.shape[0]} x {image.shape[1]} pixels is empty")
    picture = Picture(image.shape[:2], image, (limits or MediaLimits()).pixels)
    return tuple(item.pixels for item in prepare(picture, images))


# ----------------------------------------------------------------------------------------------------- preparations


def fixed_size(how: FixedSize, picture: Picture, images: int) -> tuple[Picture, ...]:
    """One item of one size."""
    if how.square:
        picture = picture.squared(how.square)
    if len(how.resize) == 2:
        picture = picture.resized((how.resize[0], how.resize[1]), how.filter)
    elif how.resize:
        (edge,) = how.resize
        height, width = picture.size
        long = int(edge * max(height, width) / min(height, width))
        picture = picture.resized((edge, long) if height < width else (long, edge), how.filter)
    return (picture.cropped((how.crop[0], how.crop[1])) if how.crop else picture,)


def smart_resize(how: SmartResize, picture: Picture, images: int) -> tuple[Picture, ...]:
    """One item near the image's own size."""
    return (picture.resized(smart_size(how, picture.size), how.filter),)


def dynamic_tiles(how: DynamicTiles, picture: Picture, images: int) -> tuple[Picture, ...]:
    """Tiles, then the thumbnail."""
    rows, columns = tile_grid(how, picture.size)
    height, width = how.tile
    tiles = picture.resized((rows * height, columns * width), how.filter).cut(rows, columns)
    if how.thumbnail and len(tiles) > 1:
        return (*tiles, picture.resized((height, width), how.filter))
    return tiles


def any_res(how: AnyRes, picture: Picture, images: int) -> tuple[Picture, ...]:
    """The whole image, then its tiles."""
    tile = how.tile, how.tile
    if images > 1 and how.several == "square":
        return (picture.squared(how.background).resized(tile, how.filter),)
    canvas = best_pinpoint(how, picture.size)
    tiles = picture.fitted(canvas, how.filter).cut(canvas[0] // how.tile, canvas[1] // how.tile)
    return (picture.resized(tile, how.filter), *tiles)


# ------------------------------------------------------------------------------------------------------------ sizes


def smart_size(how: SmartResize, size: Size) -> Size:
    """The size that Qwen-VL gives an image: whole merge windows, about its own shape, within the bounds on pixels.

    BadMedia where one side is more than 200 times the other.
    """
    height, width = size
    if max(size) / min(size) > STEEPEST:
        raise BadMedia(f"an image of {height} x {width} pixels: one side is more than {STEEPEST} times the other")
    unit = how.patch * how.merge
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit * unit > how.max_pixels:
        shrink = math.sqrt(height * width / how.max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in size)
    elif rows * columns * unit * unit < how.min_pixels:
        grow = math.sqrt(how.min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in size)
    return max(1, rows) * unit, max(1, columns) * unit


def tile_grid(how: DynamicTiles, size: Size) -> tuple[int, int]:
    """Rows and columns of the tiles of an image: of all grids with a permitted count, the nearest to its shape.

    Of equally near ones the larger, as long as it has less than twice the image's pixels. OpenGVLab's own code
    (`dynamic_preprocess`) chooses the same where one tile is permitted, as it is for all their models. From
    `min_tiles=2` up, grids of the same count can be equally near and nearest of all (1 x 2 and 2 x 1 tiles for 4 x 5
    pixels); which one that code takes then depends on the order of a Python set, and here it is as in transformers.
    """
    height, width = size
    shape = width / height
    nearest, best = math.inf, (1, 1)
    for rows, columns in _grids(how.min_tiles, how.max_tiles):
        distance = abs(shape - columns / rows)
        filled = height * width > 0.5 * how.tile[0] * how.tile[1] * rows * columns
        if distance < nearest or (distance == nearest and filled):
            nearest, best = distance, (rows, columns)
    return best


@functools.lru_cache(maxsize=64)
def _grids(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """(rows, columns) with `fewest` to `most` tiles; few tiles first, and of equal counts the narrow ones first."""
    sides = range(1, most + 1)
    grids = [(rows, columns) for columns in sides for rows in sides if fewest <= rows * columns <= most]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def best_pinpoint(how: AnyRes, size: Size) -> Size:
    """The resolution that shows most of an image's pixels, and of several such the one that wastes least."""
    height, width = size

    def shown_and_wasted(pinpoint: Size) -> tuple[int, int]:
        scale = min(pinpoint[1] / width, pinpoint[0] / height)
        shown = min(int(width * scale) * int(height * scale), height * width)
        return shown, shown - pinpoint[0] * pinpoint[1]

    return max(pinpoint_sizes(how.pinpoints), key=shown_and_wasted)


@functools.lru_cache(maxsize=64)
def pinpoint_sizes(pinpoints: tuple[str, ...]) -> tuple[Size, ...]:
    """(height, width) of each `"336x672"`."""
    return tuple((int(height), int(width)) for height, width in (pinpoint.split("x") for pinpoint in pinpoints))
