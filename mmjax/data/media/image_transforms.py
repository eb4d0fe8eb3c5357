"""Turn one image into encoder items: what every preparation resizes, pads, crops and cuts it with.

Before rescaling and normalisation, pixels equal those of transformers' processors with the Pillow
backend bit for bit. (The torchvision backend, which transformers prefers where it is installed,
rounds resized pixels a little differently.) Every preparation is one function of a `LazyImage`
(`mmjax/data/media/preparations`), and so is a user's own. Given a picture without pixels it
computes the item sizes, for which the image's header is enough.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from PIL import Image

from mmjax.config import Filter, MediaLimits
from mmjax.errors import BadMedia

Size = tuple[int, int]  # height, width


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
        image = Image.fromarray(self.pixels).resize(
            (size[1], size[0]), Image.Resampling[filter.upper()]
        )
        return self._replaced(size, np.asarray(image))

    def squared(self, color: tuple[int, ...] = (0, 0, 0)) -> LazyImage:
        """Pad to a square of the longer side, centred; an odd row or column of padding goes after the image."""
        side = max(self.size)
        return self._centred((side, side), color)

    def fitted(self, canvas: Size, filter: Filter = "bicubic") -> LazyImage:
        """Resize to fit a canvas, keeping the aspect ratio, and centre it there on black."""
        height, width = self.size
        max_height, max_width = canvas
        # The side that limits gets its full size; the other is rounded up, as in transformers'
        # get_patch_output_size.
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
        padding = [
            ((want - have + 1) // 2, (want - have) // 2)
            for have, want in zip(inner.shape, size, strict=False)
        ]
        return self._replaced(size, np.pad(inner, (*padding, (0, 0))))

    def padded(self, size: Size) -> LazyImage:
        """Pad with black below and on the right."""
        self._check(size)
        if self.pixels is None:
            return self._replaced(size, None)
        extra = [(0, want - have) for have, want in zip(self.size, size, strict=True)]
        return self._replaced(size, np.pad(self.pixels, (*extra, (0, 0))))

    def cut(self, rows: int, columns: int) -> tuple[LazyImage, ...]:
        """Cut into the tiles of a grid, row by row, whose last ones are smaller where the sides do not divide."""
        height, width = (
            -(-side // count) for side, count in zip(self.size, (rows, columns), strict=True)
        )
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
            raise BadMedia(
                f"preparing it would need {height} x {width} pixels, which is more than {self.max_pixels}"
            )


# (image, images in its sample) -> items
BeforeEncoder = Callable[[LazyImage, int], Sequence[LazyImage]]

# Factors by which a smaller image may be larger than what it becomes, tried from the least on.
SLACK = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)


def prepared_sizes(
    prepare: BeforeEncoder, size: Size, images: int = 1, limits: MediaLimits = MediaLimits()
) -> tuple[Size, ...]:
    """Compute the sizes of the items of an image of (height, width); `images` is how many images its sample has.

    Raises BadMedia for a size that cannot be prepared so, or that would need more than
    `limits.pixels` on the way.
    """
    # Without pixels: the preparation computes sizes alone.
    return tuple(item.size for item in _items(prepare, size, None, images, limits))


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
        raise ValueError(
            f"an image must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}"
        )
    return tuple(item.pixels for item in _items(prepare, image.shape[:2], image, images, limits))


def _items(
    prepare: BeforeEncoder, size: Size, pixels: np.ndarray | None, images: int, limits: MediaLimits
) -> Sequence[LazyImage]:
    if min(size) < 1:
        raise BadMedia(f"an image of {size[0]} x {size[1]} pixels is empty")
    return prepare(LazyImage(size, pixels, limits.pixels), images)


@dataclass(frozen=True, eq=False)
class _Traced(LazyImage):
    """A picture without pixels that notes the sizes to which a preparation resizes the original, or parts of it."""

    targets: list[tuple[Size, Size]] = field(default_factory=list)  # (size, size resized to)
    original: bool = True  # nothing has resized it yet; what is cut out of it is still original

    def resized(self, size: Size, filter: Filter = "bicubic") -> LazyImage:
        if self.original:
            self.targets.append((self.size, size))
        return replace(super().resized(size, filter), original=False)


def smaller_size(
    prepare: BeforeEncoder, size: Size, images: int = 1, limits: MediaLimits = MediaLimits()
) -> Size:
    """Compute the size of a smaller image of which a preparation makes items of the same sizes, with as many details.

    That is the size to which it resizes, or the smallest of the image's own shape that is as large;
    the image's own where it resizes nothing, or something to more than there is. Raises BadMedia as
    `prepared_sizes`.
    """
    # 3000 x 4000 pixels that become an overview of 336 x 448 and tiles of 672 x 896 in all need the
    # larger of both scales, 672 / 3000. Sizes of tiles depend on the aspect ratio, which rounding
    # changes: so candidates are tried until one gives the same items.
    traced = _Traced(size, None, limits.pixels)
    sizes = tuple(item.size for item in prepare(traced, images))
    scales = [
        max(target[0] / source[0], target[1] / source[1]) for source, target in traced.targets
    ]
    scale = max(scales, default=1.0)
    candidates = [target for source, target in traced.targets if source == size]
    candidates += [
        (math.ceil(size[0] * scale * slack), math.ceil(size[1] * scale * slack)) for slack in SLACK
    ]
    for candidate in candidates:
        covers = all(c >= math.floor(scale * s) for c, s in zip(candidate, size, strict=True))
        smaller = (
            candidate[0] * candidate[1] < size[0] * size[1]
            and candidate[0] <= size[0]
            and candidate[1] <= size[1]
        )
        if (
            scale < 1
            and covers
            and smaller
            and prepared_sizes(prepare, candidate, images, limits) == sizes
        ):
            return candidate
    return size
