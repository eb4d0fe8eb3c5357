"""Image operations that also run without pixels, to compute the sizes of what they would produce."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from mmjax.config import Filter, MediaLimits
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
            return self._with(size, self.pixels)
        self._check(size)
        image = Image.fromarray(self.pixels).resize((size[1], size[0]), FILTERS[filter])
        return self._with(size, np.asarray(image))

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
            return self._with(size, None)
        y, x = (max(0, have - want) // 2 for have, want in zip(self.size, size, strict=True))
        inner = self.pixels[y : y + size[0], x : x + size[1]]
        # An odd row or column of padding goes before the image, as in transformers' center_crop.
        padding = [((want - have + 1) // 2, (want - have) // 2) for have, want in zip(inner.shape, size, strict=False)]
        return self._with(size, np.pad(inner, (*padding, (0, 0))))

    def cut(self, rows: int, columns: int) -> tuple[LazyImage, ...]:
        """Cut into the tiles of a grid, row by row."""
        tile = self.size[0] // rows, self.size[1] // columns
        if self.pixels is None:
            return (self._with(tile, None),) * (rows * columns)
        parts = [part for row in np.split(self.pixels, rows) for part in np.split(row, columns, axis=1)]
        return tuple(self._with(tile, part) for part in parts)

    def _centred(self, canvas: Size, color: tuple[int, ...]) -> LazyImage:
        self._check(canvas)
        if self.pixels is None:
            return self._with(canvas, None)
        pixels = np.full((*canvas, 3), color, np.uint8)
        y, x = ((outer - inner) // 2 for outer, inner in zip(canvas, self.size, strict=True))
        pixels[y : y + self.size[0], x : x + self.size[1]] = self.pixels
        return self._with(canvas, pixels)

    def _with(self, size: Size, pixels: np.ndarray | None) -> LazyImage:
        self._check(size)
        return replace(self, size=size, pixels=pixels)

    def _check(self, size: Size) -> None:
        height, width = size
        if height * width > self.max_pixels:
            raise BadMedia(f"preparing it would need {height} x {width} pixels, which is more than {self.max_pixels}")
