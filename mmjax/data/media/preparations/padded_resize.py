"""Shrink images to a number of patches and pad them with black to whole merge windows, as Kimi K2.5 does."""

from __future__ import annotations

import math

from mmjax.config import PaddedResize
from mmjax.data.media.image_transforms import LazyImage


def items(how: PaddedResize, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Shrink an image in its own shape, and pad it below and on the right."""
    patch, limit = how.patch, how.max_side * how.patch
    patches = math.prod(max(1, side // patch) for side in image.size)
    scale = min(1.0, math.sqrt(how.max_patches / patches), *(limit / side for side in image.size))
    height, width = (min(max(1, int(side * scale)), limit) for side in image.size)
    unit = patch * how.merge
    padded = -(-height // unit) * unit, -(-width // unit) * unit
    return (image.resized((height, width), how.filter).padded(padded),)
