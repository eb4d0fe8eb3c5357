"""Leave images as they are."""

from __future__ import annotations

from mmjax.config import AsIs
from mmjax.data.media.image_transforms import LazyImage


def items(how: AsIs, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Return the image as one item."""
    return (image,)
