"""Text that is written between the tokens of an image: Pixtral's row ends."""

from __future__ import annotations

from collections.abc import Sequence

from mmjax.config import PixtralResize, VisionConfig
from mmjax.data.media.image_transforms import Size


def image_texts(encoder: VisionConfig, grids: Sequence[Size]) -> tuple[str, ...]:
    """Return what is written before each part of an image's tokens, and behind the last; (): nothing is.

    grids: rows and columns of the tokens of each of its items.
    """
    how = encoder.images
    if not writes_texts(encoder):
        return ()
    ((rows, _),) = grids
    return ("", *[how.row_end] * (rows - 1), how.end)


def writes_texts(encoder: VisionConfig) -> bool:
    """Tell whether text is written between the tokens of an encoder's images."""
    how = encoder.images
    return not encoder.callbacks.before_encoder and isinstance(how, PixtralResize) and bool(how.row_end or how.end)
