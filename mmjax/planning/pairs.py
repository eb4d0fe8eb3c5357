"""How many (query, key) pairs the mask spec allows, counted exactly and without a T x T mask.

Attention that must be computed, and so MFU, is in proportion to this number.
"""

from __future__ import annotations

import numpy as np

from mmjax.balance.mask_work import Mask, block_work
from mmjax.batch import TextBatch


def allowed_pairs(text: TextBatch) -> np.ndarray:
    """Allowed pairs of every row of the LLM, int64 `[R]`, of one head.

    Reads `sample`, `pos` (no two tokens of a row alike), `span`, `kind` and `sees`, each `[R, T]`. Raises ValueError
    for two tokens of a sample with one `pos`.
    """
    arrays = [np.asarray(getattr(text, field)) for field in Mask._fields]
    length = max(text.sample.shape[1], 1)
    return np.array([block_work(Mask(*row), length).sum() for row in zip(*arrays, strict=True)], np.int64)


def item_pairs(item: np.ndarray) -> np.ndarray:
    """Pairs of every row of an encoder, int64 `[R]`: the sum of the squares of its items' lengths. `item` `[R, L]`."""
    rows, most = len(item), item.max(initial=0) + 1
    place = item + most * np.arange(rows)[:, None]
    lengths = np.bincount(place[item >= 0], minlength=rows * most)
    return (lengths.reshape(rows, most) ** 2).sum(1)
