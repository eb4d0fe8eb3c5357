"""Prepare the whole image, then crops along its longer side, with text before each, as Gemma 3 does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmjax.config import PanAndScan
from mmjax.data.media.image_transforms import LazyImage, Size


def items(how: PanAndScan, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Prepare the whole image, then its crops along the longer side."""
    crops = crop_count(how, image.size)
    landscape = image.size[1] >= image.size[0]
    parts = image.cut(1 if landscape else crops, crops if landscape else 1) if crops else ()
    return tuple(part.resized(how.resize, how.filter) for part in (image, *parts))


def texts(how: PanAndScan, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """Return what Gemma 3's processor writes around the whole image and its crops; without crops nothing."""
    if len(grids) == 1:
        return ()
    first_crop = " and here are some crops to help you see better "
    return ("Here is the original image ", first_crop, *(" ",) * (len(grids) - 2), "")


def crop_count(config: PanAndScan, size: Size) -> int:
    """Choose how many crops an image has: as many squares as its longer side holds, at least 2; 0: none at all.

    With max_crops=4, 300 x 1000 pixels have 3 crops of 300 x 334 pixels.
    """
    short, long = sorted(size)
    if long / short < config.min_ratio:
        return 0
    # As many as the aspect ratio, rounded, but none narrower than `min_crop`.
    crops = min(math.floor(long / short + 0.5), long // config.min_crop)
    crops = min(max(crops, 2), config.max_crops)
    return crops if min(short, -(-long // crops)) >= config.min_crop else 0
