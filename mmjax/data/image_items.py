"""From one image to the encoder items that it becomes: resized, cropped or cut into tiles, as `config` says how.

Pixels are those of transformers' processors with Pillow behind them, bit for bit, before they are rescaled and
normalised. (With torchvision behind them, which transformers prefers where it is installed, the same processors round
resized pixels a little differently.) What is known from an image's size alone needs no pixels.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from mmjax.config import AnyRes, AsIs, DynamicTiles, Filter, FixedSize, ImagePreparation, MediaLimits, SmartResize
from mmjax.errors import BadMedia

Size = tuple[int, int]  # height, width

STEEPEST = 200  # the longer side over the shorter, in Qwen-VL's resizing
FILTERS: dict[Filter, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


class ImageItems(NamedTuple):
    """What an image becomes, known from its size alone."""

    sizes: tuple[Size, ...]  # of each item, in order
    grid: tuple[int, int]  # rows and columns of the tiles among them, row by row; (0, 0) where none is a tile
    original: Size  # of the image itself, which unpadding needs


def items_of_size(how: ImagePreparation, size: Size, images: int = 1, limits: MediaLimits | None = None) -> ImageItems:
    """The items of an image of (height, width); `images` is how many its sample has.

    The tiles of `DynamicTiles` come before the thumbnail, those of `AnyRes` after the whole image. BadMedia for a size
    that cannot be prepared so, or that would need more than `limits.pixels` on the way.
    """
    if min(size) < 1:
        raise BadMedia(f"an image of {size[0]} x {size[1]} pixels is empty")
    most = (limits or MediaLimits()).pixels
    match how:
        case AsIs():
            return ImageItems((size,), (0, 0), size)
        case FixedSize():
            squared, resized, cropped = _fixed_sizes(how, size)
            _check_canvas(squared, most)
            _check_canvas(resized, most)
            return ImageItems((cropped,), (0, 0), size)
        case SmartResize():
            resized = smart_size(how, size)
            _check_canvas(resized, most)
            return ImageItems((resized,), (0, 0), size)
        case DynamicTiles():
            rows, columns = tile_grid(how, size)
            tiles = rows * columns
            height, width = how.tile
            _check_canvas((rows * height, columns * width), most)
            return ImageItems(((height, width),) * (tiles + (how.thumbnail and tiles > 1)), (rows, columns), size)
        case AnyRes():
            if _is_squared(how, images):
                _check_canvas((max(size), max(size)), most)
                return ImageItems(((how.tile, how.tile),), (0, 0), size)
            height, width = best_pinpoint(how, size)
            _check_canvas((height, width), most)
            rows, columns = height // how.tile, width // how.tile
            return ImageItems(((how.tile, how.tile),) * (1 + rows * columns), (rows, columns), size)


def items_of_image(
    how: ImagePreparation, image: np.ndarray, images: int = 1, limits: MediaLimits | None = None
) -> tuple[np.ndarray, ...]:
    """The items uint8 `[h, w, 3]` of an image uint8 `[H, W, 3]`, of the sizes that `items_of_size` says. Read only.

    ValueError for an array that is no such image, BadMedia as `items_of_size`.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"an image must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
    size = image.shape[:2]
    items = items_of_size(how, size, images, limits)
    match how:
        case AsIs():
            return (image,)
        case FixedSize():
            if how.square:
                image = _on_square(image, how.square)
            resized = _resize(image, _fixed_sizes(how, size)[1], how.filter)
            return (_centre_crop(resized, items.sizes[0]),)
        case SmartResize():
            return (_resize(image, items.sizes[0], how.filter),)
        case DynamicTiles():
            rows, columns = items.grid
            tiles = _cut(_resize(image, (rows * how.tile[0], columns * how.tile[1]), how.filter), items.grid)
            if len(items.sizes) > len(tiles):
                tiles.append(_resize(image, items.sizes[-1], how.filter))
            return tuple(tiles)
        case AnyRes():
            if _is_squared(how, images):
                image = _on_square(image, how.background)
            whole = _resize(image, items.sizes[0], how.filter)
            if items.grid == (0, 0):
                return (whole,)
            canvas = (items.grid[0] * how.tile, items.grid[1] * how.tile)
            return (whole, *_cut(_fitted(image, canvas, how.filter), items.grid))


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


def _is_squared(how: AnyRes, images: int) -> bool:
    return images > 1 and how.several == "square"


def _fixed_sizes(how: FixedSize, size: Size) -> tuple[Size, Size, Size]:
    """Sizes after padding to a square, after resizing and after cropping."""
    squared = (max(size), max(size)) if how.square else size
    resized = squared
    if len(how.resize) == 2:
        resized = (how.resize[0], how.resize[1])
    elif how.resize:
        (edge,) = how.resize
        long = int(edge * max(squared) / min(squared))
        resized = (edge, long) if squared[0] < squared[1] else (long, edge)
    return squared, resized, (how.crop[0], how.crop[1]) if how.crop else resized


def _check_canvas(size: Size, most: int) -> None:
    if size[0] * size[1] > most:
        raise BadMedia(f"preparing it would need {size[0]} x {size[1]} pixels, which is more than {most}")


# ----------------------------------------------------------------------------------------------------------- pixels


def _resize(image: np.ndarray, size: Size, filter: Filter) -> np.ndarray:
    if image.shape[:2] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), FILTERS[filter]))


def _on_square(image: np.ndarray, color: tuple[int, ...]) -> np.ndarray:
    """The image in the middle of a square of its longer side; an odd row or column goes after it."""
    height, width, _ = image.shape
    side = max(height, width)
    canvas = np.full((side, side, 3), color, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    canvas[top : top + height, left : left + width] = image
    return canvas


def _centre_crop(image: np.ndarray, size: Size) -> np.ndarray:
    """The middle of the image, on black where it is smaller than that."""
    (top, above, height), (left, before, width) = (
        _middle(have, want) for have, want in zip(image.shape, size, strict=False)
    )
    inner = image[top : top + height, left : left + width]
    if inner.shape[:2] == size:
        return inner
    canvas = np.zeros((*size, 3), np.uint8)
    canvas[above : above + height, before : before + width] = inner
    return canvas


def _middle(have: int, want: int) -> tuple[int, int, int]:
    """Where the middle `want` of `have` starts, where it goes, and how much of it there is."""
    if have >= want:
        return (have - want) // 2, 0, want
    return 0, (want - have + 1) // 2, have


def _fitted(image: np.ndarray, canvas: Size, filter: Filter) -> np.ndarray:
    """The image as large as fits into `canvas`, in its middle on black."""
    height, width, _ = image.shape
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        size = (min(math.ceil(height * across), canvas[0]), canvas[1])
    else:
        size = (canvas[0], min(math.ceil(width * down), canvas[1]))
    fitted = np.zeros((*canvas, 3), np.uint8)
    top, left = (canvas[0] - size[0]) // 2, (canvas[1] - size[1]) // 2
    fitted[top : top + size[0], left : left + size[1]] = _resize(image, size, filter)
    return fitted


def _cut(canvas: np.ndarray, grid: tuple[int, int]) -> list[np.ndarray]:
    """The tiles of a grid, row by row."""
    return [tile for row in np.split(canvas, grid[0]) for tile in np.split(row, grid[1], axis=1)]
