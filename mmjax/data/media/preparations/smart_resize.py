"""Resize images and frames to about their own size, in whole merge windows."""

from __future__ import annotations

import math

from mmjax.config import SmartResize
from mmjax.data.media.image_transforms import LazyImage, Size
from mmjax.errors import BadMedia

MAX_ASPECT = 200  # longer side / shorter side, in Qwen-VL's resizing


def items(how: SmartResize, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Resize an image to about its own size."""
    unit = how.patch * how.merge
    bounds = how.min_pixels, how.max_pixels
    if how.frames:
        size = smart_size_of_frames(image.size, unit, bounds, how.frames, how.frames)
    else:
        size = smart_size(_widened(image.size, unit) if how.widened else image.size, unit, bounds)
    return (image.resized(size, how.filter),)


def _widened(size: Size, unit: int) -> Size:
    """Enlarge the height to a unit, then the width, with the other side."""
    height, width = size
    if height < unit:
        height, width = unit, round(width * unit / height)
    if width < unit:
        height, width = round(height * unit / width), unit
    return height, width


def smart_size(size: Size, unit: int, bounds: tuple[int, int]) -> Size:
    """Compute Qwen-VL's size of an image: whole merge windows, about its own shape, within the bounds on pixels.

    Raises BadMedia where one side is more than 200 times the other.
    """
    if max(size) / min(size) > MAX_ASPECT:
        raise BadMedia(
            f"an image of {size[0]} x {size[1]} pixels: one side is more than {MAX_ASPECT} times the other"
        )
    return whole_units(size, unit, bounds)


def smart_size_of_frames(
    size: Size, unit: int, bounds: tuple[int, int], frames: int, group: int
) -> Size:
    """Compute the size of each frame of a video, or of a still image that counts as some, as for Qwen3-VL and GLM-4.1V.

    Whole tokens of `unit` pixels a side, about its own shape, within the bounds on the pixels of
    all frames; these are compared for whole groups of frames. Raises BadMedia where one side is
    more than 200 times the other.
    """
    height, width = size
    if min(size) < unit:
        grow = max(unit / height, unit / width)
        height = int(height * grow)
        width = int(width * grow)
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise BadMedia(
            f"{size[0]} x {size[1]} pixels: one side is more than {MAX_ASPECT} times the other"
        )
    return whole_units((height, width), unit, bounds, frames, group)


def whole_units(
    size: Size,
    unit: int,
    bounds: tuple[int, int],
    frames: int = 1,
    group: int = 1,
    least: int = 0,
) -> Size:
    """Compute the size in whole units of about an image's own shape, within the bounds on pixels of all frames.

    least: units of a side before the bounds are looked at.
    """
    min_pixels, max_pixels = bounds
    height, width = size
    rows = max(round(height / unit), least)
    columns = max(round(width / unit), least)
    # Compared for whole groups, and scaled for the frames themselves. Rounding down after shrinking
    # and up after growing keeps the area within the bounds. In units of 28, 1000 x 700 pixels are
    # 36 x 25; with at most 500,000 they shrink by sqrt(1.4) = 1.183 to 30 x 21, 493,920 pixels.
    pixels = max(round(frames / group), 1) * group * rows * columns * unit * unit
    if pixels > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
    return rows * unit, columns * unit
