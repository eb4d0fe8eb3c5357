"""Turn one image into encoder items: resize, crop or tile it as its preparation config says.

Before rescaling and normalisation, pixels equal those of transformers' processors with the Pillow backend bit for bit.
(The torchvision backend, which transformers prefers where it is installed, rounds resized pixels a little differently.)
Every preparation is one function of a `LazyImage`, and so is a user's own. Given a picture without pixels it computes
the item sizes, for which the image's header is enough.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import numpy as np
from PIL import Image

from mmjax.config import (
    AnyRes,
    AsIs,
    DynamicTiles,
    Filter,
    FixedSize,
    ImagePreparation,
    MediaLimits,
    PanAndScan,
    PixtralResize,
    SmartResize,
    SplitTiles,
)
from mmjax.errors import BadMedia

Size = tuple[int, int]  # height, width

FILTERS: dict[Filter, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}


@dataclass(frozen=True, eq=False)
class LazyImage:
    """An image, or its size alone: what is made of a picture without pixels has none either.

    Operations raise BadMedia where the result would exceed `max_pixels`.
    """

    size: Size
    pixels: np.ndarray | None = None  # uint8 [height, width, 3], read only
    max_pixels: int = MediaLimits.pixels

    def resized(self, size: Size, filter: Filter = "bicubic") -> LazyImage:
        """Resize to (height, width)."""
        if self.pixels is None or size == self.size:
            return self._replaced(size, self.pixels)
        self._check(size)
        image = Image.fromarray(self.pixels).resize((size[1], size[0]), FILTERS[filter])
        return self._replaced(size, np.asarray(image))

    def squared(self, color: tuple[int, ...] = (0, 0, 0)) -> LazyImage:
        """Pad to a square of the longer side, centred; an odd row or column of padding goes after the image."""
        side = max(self.size)
        return self._centred((side, side), color)

    def fitted(self, canvas: Size, filter: Filter = "bicubic") -> LazyImage:
        """Resize to fit a canvas, keeping the aspect ratio, and centre it there on black."""
        height, width = self.size
        max_height, max_width = canvas
        # The side that limits gets its full size; the other is rounded up, as in transformers' get_patch_output_size.
        scale = min(max_width / width, max_height / height)
        if max_width / width < max_height / height:
            size = (min(math.ceil(height * scale), max_height), max_width)
        else:
            size = (max_height, min(math.ceil(width * scale), max_width))
        self._check(canvas)
        return self.resized(size, filter)._centred(canvas, (0, 0, 0))

    def cropped(self, size: Size) -> LazyImage:
        """Crop to the centre, padding with black where the picture is smaller."""
        if self.pixels is None:
            return self._replaced(size, None)
        y, x = (max(0, have - want) // 2 for have, want in zip(self.size, size, strict=True))
        inner = self.pixels[y : y + size[0], x : x + size[1]]
        # An odd row or column of padding goes before the image, as in transformers' center_crop.
        padding = [((want - have + 1) // 2, (want - have) // 2) for have, want in zip(inner.shape, size, strict=False)]
        return self._replaced(size, np.pad(inner, (*padding, (0, 0))))

    def cut(self, rows: int, columns: int) -> tuple[LazyImage, ...]:
        """Cut into the tiles of a grid, row by row."""
        tile = self.size[0] // rows, self.size[1] // columns
        if self.pixels is None:
            return (self._replaced(tile, None),) * (rows * columns)
        parts = [part for row in np.split(self.pixels, rows) for part in np.split(row, columns, axis=1)]
        return tuple(self._replaced(tile, part) for part in parts)

    def slices(self, rows: int, columns: int) -> tuple[LazyImage, ...]:
        """Cut into a grid of parts, row by row, whose last ones are smaller where the sides do not divide."""
        height, width = (-(-side // count) for side, count in zip(self.size, (rows, columns), strict=True))
        parts = []
        for y, x in product(range(0, self.size[0], height), range(0, self.size[1], width)):
            size = min(height, self.size[0] - y), min(width, self.size[1] - x)
            pixels = None if self.pixels is None else self.pixels[y : y + height, x : x + width]
            parts.append(self._replaced(size, pixels))
        return tuple(parts)

    def _centred(self, canvas: Size, color: tuple[int, ...]) -> LazyImage:
        self._check(canvas)
        if self.pixels is None:
            return self._replaced(canvas, None)
        pixels = np.full((*canvas, 3), color, np.uint8)
        y, x = ((outer - inner) // 2 for outer, inner in zip(canvas, self.size, strict=True))
        pixels[y : y + self.size[0], x : x + self.size[1]] = self.pixels
        return self._replaced(canvas, pixels)

    def _replaced(self, size: Size, pixels: np.ndarray | None) -> LazyImage:
        self._check(size)
        return replace(self, size=size, pixels=pixels)

    def _check(self, size: Size) -> None:
        height, width = size
        if height * width > self.max_pixels:
            raise BadMedia(f"preparing it would need {height} x {width} pixels, which is more than {self.max_pixels}")


BeforeEncoder = Callable[[LazyImage, int], Sequence[LazyImage]]  # (image, images in its sample) -> items

MAX_SIDE = 4096  # pixels that Idefics3's resizing makes at most
SLACK = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)  # by which a smaller image may be larger than what it becomes
MAX_ASPECT = 200  # longer side / shorter side, in Qwen-VL's resizing


def before_encoder(config: ImagePreparation) -> BeforeEncoder:
    """Return the preparation function of a config."""
    match config:
        case AsIs():
            return lambda picture, images: (picture,)
        case FixedSize():
            return partial(fixed_size, config)
        case SmartResize():
            return partial(smart_resize, config)
        case DynamicTiles():
            return partial(dynamic_tiles, config)
        case AnyRes():
            return partial(anyres_tiles, config)
        case SplitTiles():
            return partial(split_tiles, config)
        case PixtralResize():
            return partial(pixtral_resize, config)
        case PanAndScan():
            return partial(pan_and_scan, config)


def prepared_sizes(
    prepare: BeforeEncoder, size: Size, images: int = 1, limits: MediaLimits = MediaLimits()
) -> tuple[Size, ...]:
    """Compute the sizes of the items of an image of (height, width); `images` is how many images its sample has.

    Raises BadMedia for a size that cannot be prepared so, or that would need more than `limits.pixels` on the way.
    """
    if min(size) < 1:
        raise BadMedia(f"an image of {size[0]} x {size[1]} pixels is empty")
    # Without pixels: the preparation computes sizes alone.
    picture = LazyImage(size, None, limits.pixels)
    return tuple(item.size for item in prepare(picture, images))


def encode_image(pixels: np.ndarray, lossless: bool) -> bytes:
    """Encode pixels uint8 `[h, w, 3]`: as PNG, or as JPEG of quality 95 with all of its colours."""
    file = io.BytesIO()
    if lossless:
        Image.fromarray(pixels).save(file, "PNG")
    else:
        Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()


def prepare_image(
    prepare: BeforeEncoder, image: np.ndarray, images: int = 1, limits: MediaLimits = MediaLimits()
) -> tuple[np.ndarray, ...]:
    """Prepare the items uint8 `[h, w, 3]` (read only) of an image uint8 `[H, W, 3]`, in the sizes of `prepared_sizes`.

    Raises ValueError for another shape or type, BadMedia as `prepared_sizes`.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"an image must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
    if not image.size:
        raise BadMedia(f"an image of {image.shape[0]} x {image.shape[1]} pixels is empty")
    picture = LazyImage(image.shape[:2], image, limits.pixels)
    return tuple(item.pixels for item in prepare(picture, images))


@dataclass(frozen=True, eq=False)
class _Traced(LazyImage):
    """A size that notes what a preparation resizes it to, before anything else has resized it."""

    targets: list[tuple[Size, Size]] = field(default_factory=list)  # (size before, size after)
    original: bool = True

    def resized(self, size: Size, filter: Filter = "bicubic") -> LazyImage:
        if self.original:
            self.targets.append((self.size, size))
        return replace(super().resized(size, filter), original=False)


def smaller_size(prepare: BeforeEncoder, size: Size, images: int = 1, limits: MediaLimits = MediaLimits()) -> Size:
    """Compute the size of a smaller image of which a preparation makes items of the same sizes, with as many details.

    That is the size to which it resizes, or the smallest of the image's own shape that is as large; the image's own
    where it resizes nothing, or something to more than there is. Raises BadMedia as `prepared_sizes`.
    """
    traced = _Traced(size, None, limits.pixels)
    sizes = tuple(item.size for item in prepare(traced, images))
    scales = [max(after[0] / before[0], after[1] / before[1]) for before, after in traced.targets]
    scale = max(scales, default=1.0)
    candidates = [after for before, after in traced.targets if before == size]
    candidates += [(math.ceil(size[0] * scale * more), math.ceil(size[1] * scale * more)) for more in SLACK]
    for candidate in candidates:
        covers = all(c >= math.floor(scale * s) for c, s in zip(candidate, size, strict=True))
        smaller = (
            candidate[0] * candidate[1] < size[0] * size[1] and candidate[0] <= size[0] and candidate[1] <= size[1]
        )
        if scale < 1 and covers and smaller and prepared_sizes(prepare, candidate, images, limits) == sizes:
            return candidate
    return size


def fixed_size(config: FixedSize, picture: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Prepare one item of a fixed size."""
    if config.square:
        picture = picture.squared(config.square)
    if len(config.resize) == 2:
        picture = picture.resized((config.resize[0], config.resize[1]), config.filter)
    elif config.resize:  # of the shorter edge; int() rounds the longer down, as transformers does
        (edge,) = config.resize
        height, width = picture.size
        long_edge = int(edge * max(height, width) / min(height, width))
        picture = picture.resized((edge, long_edge) if height < width else (long_edge, edge), config.filter)
    return (picture.cropped((config.crop[0], config.crop[1])) if config.crop else picture,)


def smart_resize(config: SmartResize, picture: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Prepare one item near the image's own size."""
    return (picture.resized(smart_size(config, picture.size), config.filter),)


def dynamic_tiles(config: DynamicTiles, picture: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Cut an image into tiles, followed by its thumbnail."""
    rows, columns = tile_grid(config, picture.size)
    height, width = config.tile
    tiles = picture.resized((rows * height, columns * width), config.filter).cut(rows, columns)
    if config.thumbnail and len(tiles) > 1:
        return (*tiles, picture.resized((height, width), config.filter))
    return tiles


def anyres_tiles(config: AnyRes, picture: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Prepare the whole image, then its tiles."""
    tile = config.tile, config.tile
    if images > 1 and config.several == "square":
        return (picture.squared(config.background).resized(tile, config.filter),)
    # The canvas has the pinpoint's size, with the image centred on black padding.
    canvas = select_best_resolution(config, picture.size)
    tiles = picture.fitted(canvas, config.filter).cut(canvas[0] // config.tile, canvas[1] // config.tile)
    return (picture.resized(tile, config.filter), *tiles)


def pixtral_resize(config: PixtralResize, picture: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Prepare one item that fits the box, each side rounded up to whole tokens.

    Raises BadMedia for an image so narrow that nothing is left of a side.
    """
    ratio = max(side / limit for side, limit in zip(picture.size, config.box, strict=True))
    size = tuple(math.floor(side / ratio) for side in picture.size) if ratio > 1 else picture.size
    if not min(size):
        raise BadMedia(f"an image of {picture.size[0]} x {picture.size[1]} pixels is too narrow to fit {config.box}")
    rows, columns = (-(-side // config.unit) for side in size)
    return (picture.resized((rows * config.unit, columns * config.unit), config.filter),)


def split_tiles(config: SplitTiles, picture: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Cut an image, resized to whole tiles, followed by the whole of it; one that is a single tile is that alone."""
    tile = config.tile, config.tile
    if len(config.resize) == 2:
        picture = picture.resized((config.resize[0], config.resize[1]), config.filter)
    elif config.resize:
        picture = picture.resized(_long_edge_size(picture.size, config.resize[0]), config.filter)
    if not config.split:
        return (picture.resized(tile, config.filter),)
    rows, columns = _whole_tiles(picture.size, config.tile)
    picture = picture.resized((rows * config.tile, columns * config.tile), config.filter)
    if rows * columns == 1:
        return (picture,)
    return (*picture.cut(rows, columns), picture.resized(tile, config.filter))


def split_grid(config: SplitTiles, size: Size) -> tuple[int, int]:
    """Return rows and columns of an image's tiles; (0, 0) where it is one alone."""
    if not config.split:
        return 0, 0
    resize = config.resize
    if resize:
        size = (resize[0], resize[1]) if len(resize) == 2 else _long_edge_size(size, resize[0])
    grid = _whole_tiles(size, config.tile)
    return (0, 0) if grid == (1, 1) else grid


def _long_edge_size(size: Size, edge: int) -> Size:
    """Compute the size of an image whose longest edge becomes `edge`; the other is even, as in transformers."""
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
    height, width = size
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)


def pan_and_scan(config: PanAndScan, picture: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Prepare the whole image, then its crops along the longer side."""
    crops = crop_count(config, picture.size)
    landscape = picture.size[1] >= picture.size[0]
    parts = picture.slices(1 if landscape else crops, crops if landscape else 1) if crops else ()
    size = config.resize[0], config.resize[1]
    return tuple(part.resized(size, config.filter) for part in (picture, *parts))


def crop_count(config: PanAndScan, size: Size) -> int:
    """Choose how many crops an image has: as many squares as its longer side holds, at least 2; 0: none at all.

    With max_crops=4, 300 x 1000 pixels have 3 crops of 300 x 334 pixels.
    """
    short, long = sorted(size)
    if long / short < config.min_ratio:
        return 0
    crops = min(math.floor(long / short + 0.5), long // config.min_crop)
    crops = min(max(crops, 2), config.max_crops)
    return crops if min(short, -(-long // crops)) >= config.min_crop else 0


def smart_size(config: SmartResize, size: Size) -> Size:
    """Compute Qwen-VL's size of an image: whole merge windows, about its own shape, within the bounds on pixels.

    Raises BadMedia where one side is more than 200 times the other.
    """
    if config.frames:
        bounds = config.min_pixels, config.max_pixels
        return smart_size_of_frames(size, config.patch * config.merge, bounds, config.frames, config.frames)
    height, width = size
    if max(size) / min(size) > MAX_ASPECT:
        raise BadMedia(f"an image of {height} x {width} pixels: one side is more than {MAX_ASPECT} times the other")
    unit = config.patch * config.merge
    rows, columns = (round(side / unit) for side in size)
    # Rounding down after shrinking and up after growing keeps the area within the bounds.
    if rows * columns * unit * unit > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in size)
    elif rows * columns * unit * unit < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in size)
    return max(1, rows) * unit, max(1, columns) * unit


def tile_grid(config: DynamicTiles, size: Size) -> tuple[int, int]:
    """Choose rows and columns of an image's tiles: of all grids with a permitted count, the nearest to its aspect
    ratio.

    Of equally near ones the larger, as long as it has less than twice the image's pixels. OpenGVLab's own code
    (`dynamic_preprocess`) chooses the same where one tile is permitted, as it is for all their models. From
    `min_tiles=2` up, grids of the same count can be equally near and nearest of all (1 x 2 and 2 x 1 tiles for 4 x 5
    pixels); which one that code takes then depends on the order of a Python set, and here it is as in transformers.
    """
    height, width = size
    best_distance = math.inf
    best = (1, 1)
    for rows, columns in _grids(config.min_tiles, config.max_tiles):
        # Grids come with few tiles first, so a tie goes to the larger grid only if the image can fill half of it.
        distance = abs(width / height - columns / rows)
        filled = height * width > 0.5 * config.tile[0] * config.tile[1] * rows * columns
        if distance < best_distance or (distance == best_distance and filled):
            best_distance = distance
            best = (rows, columns)
    return best


def smart_size_of_frames(size: Size, unit: int, bounds: tuple[int, int], frames: int, group: int) -> Size:
    """Compute the size of each frame of a video, or of a still image that counts as some, as for Qwen3-VL and GLM-4.1V.

    Whole tokens of `unit` pixels a side, about its own shape, within the bounds on the pixels of all frames; these are
    compared for whole groups of frames. Raises BadMedia where one side is more than 200 times the other.
    """
    min_pixels, max_pixels = bounds
    height, width = size
    if min(size) < unit:
        grow = max(unit / height, unit / width)
        height = int(height * grow)
        width = int(width * grow)
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise BadMedia(f"{size[0]} x {size[1]} pixels: one side is more than {MAX_ASPECT} times the other")
    rows = round(height / unit)
    columns = round(width / unit)
    # Compared for whole groups, and scaled for the frames themselves.
    pixels = max(round(frames / group), 1) * group * rows * columns * unit * unit
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    return rows * unit, columns * unit


@functools.lru_cache(maxsize=64)
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """List (rows, columns) of all grids, few tiles first, and of equal counts the narrow ones first."""
    sides = range(1, max_tiles + 1)
    grids = [(rows, columns) for columns in sides for rows in sides if min_tiles <= rows * columns <= max_tiles]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def select_best_resolution(config: AnyRes, size: Size) -> Size:
    """Choose the resolution that shows most of an image's pixels, and of several such the one that wastes least."""
    height, width = size

    # Compared first by pixels shown, at most the image's own, then by the negative of pixels wasted.
    def shown_and_wasted(pinpoint: Size) -> tuple[int, int]:
        scale = min(pinpoint[1] / width, pinpoint[0] / height)
        shown = min(int(width * scale) * int(height * scale), height * width)
        return shown, shown - pinpoint[0] * pinpoint[1]

    return max(pinpoint_sizes(config.pinpoints), key=shown_and_wasted)


@functools.lru_cache(maxsize=64)
def pinpoint_sizes(pinpoints: tuple[str, ...]) -> tuple[Size, ...]:
    """Parse pinpoints such as `"336x672"` to (height, width)."""
    return tuple((int(height), int(width)) for height, width in (pinpoint.split("x") for pinpoint in pinpoints))
