"""An image on its way to an encoder: with its pixels, or its size alone."""

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
class Picture:
    """An image, or as much of it as its size says: then what is made of it has no pixels either.

    BadMedia where something larger than `most` pixels would be made.
    """

    size: Size
    pixels: np.ndarray | None = None  # uint8 [height, width, 3], read only
    most: int = MediaLimits.pixels

    def resized(self, size: Size, filter: Filter = "bicubic") -> Picture:
        """All of it, in another size."""
        if self.pixels is None or size == self.size:
            return self._with(size, self.pixels)
        self._check(size)
        image = Image.fromarray(self.pixels).resize((size[1], size[0]), FILTERS[filter])
        return self._with(size, np.asarray(image))

    def squared(self, color: tuple[int, ...] = (0, 0, 0)) -> Picture:
        """In the middle of a square of its longer side; an odd row or column goes after it."""
        side = max(self.size)
        return self._on((side, side), color)

    def fitted(self, canvas: Size, filter: Filter = "bicubic") -> Picture:
        """As large as it fits into a canvas, in its middle on black."""
        (height, width), (most_rows, most_columns) = self.size, canvas
        across, down = most_columns / width, most_rows / height
        if across < down:
            size = (min(math.ceil(height * across), most_rows), most_columns)
        else:
            size = (most_rows, min(math.ceil(width * down), most_columns))
        self._check(canvas)
        return self.resized(size, filter)._on(canvas, (0, 0, 0))

    def cropped(self, size: Size) -> Picture:
        """The middle of it, on black where it is smaller than that."""
        if self.pixels is None:
            return self._with(size, None)
        (top, above, height), (left, before, width) = map(_middle, self.size, size)
        inner = self.pixels[top : top + height, left : left + width]
        if inner.shape[:2] == size:
            return self._with(size, inner)
        canvas = np.zeros((*size, 3), np.uint8)
        canvas[above : above + height, before : before + width] = inner
        return self._with(size, canvas)

    def cut(self, rows: int, columns: int) -> tuple[Picture, ...]:
        """The tiles of a grid, row by row."""
        tile = self.size[0] // rows, self.size[1] // columns
        if self.pixels is None:
            return (self._with(tile, None),) * (rows * columns)
        parts = [part for row in np.split(self.pixels, rows) for part in np.split(row, columns, axis=1)]
        return tuple(self._with(tile, part) for part in parts)

    def _on(self, canvas: Size, color: tuple[int, ...]) -> Picture:
        self._check(canvas)
        if self.pixels is None:
            return self._with(canvas, None)
        (height, width), pixels = self.size, np.full((*canvas, 3), color, np.uint8)
        top, left = (canvas[0] - height) // 2, (canvas[1] - width) // 2
        pixels[top : top + height, left : left + width] = self.pixels
        return self._with(canvas, pixels)

    def _with(self, size: Size, pixels: np.ndarray | None) -> Picture:
        self._check(size)
        return replace(self, size=size, pixels=pixels)

    def _check(self, size: Size) -> None:
        if size[0] * size[1] > self.most:
            raise BadMedia(f"preparing it would need {size[0]} x {size[1]} pixels, which is more than {self.most}")


def _middle(have: int, want: int) -> tuple[int, int, int]:
    """Where the middle `want` of `have` starts, where it goes, and how much of it there is."""
    if have >= want:
        return (have - want) // 2, 0, want
    return 0, (want - have + 1) // 2, have
