"""Resize images to as many whole tokens as a budget allows, in about their own shape, as Gemma 4 does."""

from __future__ import annotations

import math

from mmjax.config import PatchBudget
from mmjax.data.media.image_transforms import LazyImage, Size
from mmjax.errors import BadMedia


def items(how: PatchBudget, image: LazyImage, images: int) -> tuple[LazyImage, ...]:
    """Resize an image within the budget."""
    return (image.resized(budget_size(how, image.size), how.filter),)


def budget_size(how: PatchBudget, size: Size) -> Size:
    """Compute the largest size in whole tokens within the budget; an image of less than one row has one row.

    Raises BadMedia for an image whose both sides are less than a token.
    """
    height, width = size
    factor = math.sqrt(how.max_tokens * how.unit**2 / (height * width))
    rows, columns = (math.floor(factor * side / how.unit) for side in size)
    if not rows and not columns:
        raise BadMedia(f"an image of {height} x {width} pixels cannot be resized to whole tokens")
    if not rows:
        rows, columns = 1, min(width // height, how.max_tokens)
    elif not columns:
        rows, columns = min(height // width, how.max_tokens), 1
    return rows * how.unit, columns * how.unit
