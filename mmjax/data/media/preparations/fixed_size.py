"""Prepare images of a fixed size."""

from __future__ import annotations

from mmjax.config import FixedSize
from mmjax.data.media.image_transforms import LazyImage


def items(how: FixedSize, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Pad an image to a square, resize and crop it, or fit it into its size and pad it."""
    if how.fit:
        scale = how.resize[0] / max(image.size)
        sides = tuple(max(round(side * scale), how.fit) for side in image.size)
        return (image.resized(sides, how.filter).squared(how.square),)
    if how.square:
        image = image.squared(how.square)
    if len(how.resize) == 2:
        image = image.resized(how.resize, how.filter)
    elif how.resize:  # of the shorter edge; int() rounds the longer down, as transformers does
        (edge,) = how.resize
        height, width = image.size
        long_edge = int(edge * max(height, width) / min(height, width))
        image = image.resized(
            (edge, long_edge) if height < width else (long_edge, edge), how.filter
        )
    return (image.cropped(how.crop) if how.crop else image,)
