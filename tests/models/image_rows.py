"""Rows of images of given sizes for a generator, one after the other, as the contract of mmjax.batch has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmjax.batch import PADDING, ItemBatch

Size = tuple[int, int]  # rows and columns of patches


def rows_of_images(rows: Sequence[Sequence[Size]], length: int) -> ItemBatch:
    """Pack images into rows of this length; values are empty, for a generator is given noised ones."""
    item = np.full((len(rows), length), PADDING, np.int32)
    coordinates = np.zeros((*item.shape, 3), np.int32)
    for row, sizes in enumerate(rows):
        at = 0
        for number, (height, width) in enumerate(sizes):
            here = slice(at, at + height * width)
            item[row, here] = number
            coordinates[row, here, 1:] = np.stack(np.indices((height, width)), axis=-1).reshape(
                -1, 2
            )
            at += height * width
    return ItemBatch(
        np.zeros((*item.shape, 0), np.float32), item, coordinates, item, np.zeros_like(item)
    )
