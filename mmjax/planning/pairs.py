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


def far_pairs(text: TextBatch, window: int) -> np.ndarray:
    """Of the allowed pairs, those that a window of so many tokens forbids, int64 `[R]`; for rows in their order.

    The tokens of a span are of one kind, as all of an item are.
    """
    length = text.sample.shape[1]
    starts = np.diff(text.sample, axis=1, prepend=-2) != 0
    first = np.maximum.accumulate(np.where(starts, np.arange(length), 0), axis=1)
    far = np.maximum(np.arange(length) - window + 1, first)  # keys from the first to this one are beyond the window
    count = np.zeros(len(text.sample), np.int64)
    for bit in np.unique(text.kind):
        seen = np.pad(np.cumsum(text.kind == bit, axis=1), ((0, 0), (1, 0)))
        beyond = np.take_along_axis(seen, far, 1) - np.take_along_axis(seen, first, 1)
        count += np.where((text.sees & bit != 0) & (text.sample >= 0), beyond, 0).sum(1)
    return count - _far_in_spans(text, window)


def _far_in_spans(text: TextBatch, window: int) -> np.ndarray:
    """Pairs of one span that the window does not forbid, though they are as far apart, int64 `[R]`."""
    causal = (text.sees & text.kind != 0) & (text.sample >= 0)
    count = np.zeros(len(text.sample), np.int64)
    for row, (sample, span) in enumerate(zip(text.sample, text.span, strict=True)):
        at = np.flatnonzero(span)
        order = at[np.lexsort((at, span[at], sample[at]))]
        borders = np.flatnonzero(np.diff(sample[order]) | np.diff(span[order])) + 1
        for members in np.split(order, borders):
            beyond = np.searchsorted(members, members - window, side="right")
            count[row] += beyond[causal[row, members]].sum()
    return count


def item_pairs(item: np.ndarray) -> np.ndarray:
    """Pairs of every row of an encoder, int64 `[R]`: the sum of the squares of its items' lengths. `item` `[R, L]`."""
    rows, most = len(item), item.max(initial=0) + 1
    place = item + most * np.arange(rows)[:, None]
    lengths = np.bincount(place[item >= 0], minlength=rows * most)
    return (lengths.reshape(rows, most) ** 2).sum(1)
