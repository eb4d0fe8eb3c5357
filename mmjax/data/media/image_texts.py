"""Text that is written between the tokens of an image: Pixtral's row ends, labels of Idefics3's tiles, Gemma 3's."""

from __future__ import annotations

from collections.abc import Sequence

from mmjax.config import PanAndScan, PixtralResize, SplitTiles, VisionConfig
from mmjax.data.media.image_transforms import Size, split_grid


def image_texts(encoder: VisionConfig, size: Size, grids: Sequence[Size]) -> tuple[str, ...]:
    """Return what is written before each part of an image's tokens, and behind the last; (): nothing is.

    size: (height, width) of the image in pixels. grids: rows and columns of the tokens of each of its items.
    """
    if not writes_texts(encoder):
        return ()
    if isinstance(encoder.images, SplitTiles):
        return _tile_texts(encoder.images, size)
    how = encoder.images
    if isinstance(how, PanAndScan):
        return _crop_texts(len(grids))
    ((rows, _),) = grids
    return ("", *[how.row_end] * (rows - 1), how.end)


def writes_texts(encoder: VisionConfig) -> bool:
    """Tell whether text is written between the tokens of an encoder's images."""
    if encoder.callbacks.before_encoder:
        return False
    match encoder.images:
        case PixtralResize(row_end=row_end, end=end):
            return bool(row_end or end)
        case SplitTiles(marker=marker, label=label, whole=whole):
            return bool(marker or label or whole)
        case PanAndScan():
            return True
    return False


def _tile_texts(how: SplitTiles, size: Size) -> tuple[str, ...]:
    rows, columns = split_grid(how, size)
    labels = [
        # Every row but the first begins behind the line break that ends the one before it.
        "\n" * (column == 0 < row) + how.marker + how.label.format(row=row + 1, column=column + 1)
        for row in range(rows)
        for column in range(columns)
    ]
    # The last row's line break, and one more.
    return (*labels, "\n\n" * (rows > 0) + how.marker + how.whole, how.marker)


def _crop_texts(items: int) -> tuple[str, ...]:
    """Return what Gemma 3's processor writes around the whole image and its crops; an image without crops has none."""
    if items == 1:
        return ()
    first_crop = " and here are some crops to help you see better "
    return ("Here is the original image ", first_crop, *(" ",) * (items - 2), "")
