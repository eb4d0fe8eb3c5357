"""Count the (query, key) pairs that the mask spec allows, exactly and without a T x T mask.

Needed attention FLOPs, and so MFU, are in proportion to this number.
"""

from __future__ import annotations

import numpy as np

from mmjax.balance.mask_work import Mask, block_work
from mmjax.batch import TextBatch


def allowed_pairs(text: TextBatch) -> np.ndarray:
    """Count the allowed pairs of every row of the LLM for one head, int64 `[R]`.

    Reads `sample`, `pos` (no two tokens of a row alike), `span`, `kind` and `sees`, each `[R, T]`. Raises ValueError
    for two tokens of a sample with one `pos`.
    """
    arrays = [np.asarray(getattr(text, field)) for field in Mask._fields]
    length = max(text.sample.shape[1], 1)
    return np.array([block_work(Mask._make(row), length).sum() for row in zip(*arrays, strict=True)], np.int64)


def pairs_beyond_window(text: TextBatch, window: int) -> np.ndarray:
    """Count the allowed pairs that a sliding window excludes, int64 `[R]`; for rows whose `pos` is the column.

    Assumes that the tokens of a span are of one kind, as those of an item are.
    """
    length = text.sample.shape[1]
    # Of every token, the first column of its sample: samples 0 0 0 1 1 give 0 0 0 3 3.
    starts = np.diff(text.sample, axis=1, prepend=-2) != 0
    first = np.maximum.accumulate(np.where(starts, np.arange(length), 0), axis=1)
    # Keys in columns first to far (exclusive) are beyond the window: with window 2, token 2 of a sample misses key 0.
    far = np.maximum(np.arange(length) - window + 1, first)
    count = np.zeros(len(text.sample), np.int64)
    for bit in np.unique(text.kind):
        # before_column[:, t] counts the row's tokens of this kind in columns 0 to t (exclusive).
        before_column = np.pad(np.cumsum(text.kind == bit, axis=1), ((0, 0), (1, 0)))
        beyond = np.take_along_axis(before_column, far, 1) - np.take_along_axis(before_column, first, 1)
        count += np.where((text.sees & bit != 0) & (text.sample >= 0), beyond, 0).sum(1)
    return count - _far_in_spans(text, window)


def _far_in_spans(text: TextBatch, window: int) -> np.ndarray:
    """Count the pairs beyond the window that are allowed all the same because they share a span, int64 `[R]`."""
    causal = (text.sees & text.kind != 0) & (text.sample >= 0)
    count = np.zeros(len(text.sample), np.int64)
    for row, (sample, span) in enumerate(zip(text.sample, text.span, strict=True)):
        columns = np.flatnonzero(span)
        order = columns[np.lexsort((columns, span[columns], sample[columns]))]
        borders = np.flatnonzero(np.diff(sample[order]) | np.diff(span[order])) + 1
        for members in np.split(order, borders):
            # Of every member, the number of members at least `window` columns before it.
            beyond = np.searchsorted(members, members - window, side="right")
            count[row] += beyond[causal[row, members]].sum()
    return count


def item_pairs(item: np.ndarray) -> np.ndarray:
    """Sum the squared lengths of the items of every row of an encoder, int64 `[R]`. `item` `[R, L]`, -1 = padding."""
    rows = len(item)
    items = item.max(initial=0) + 1
    # A number for each item of each row: with 3 items, item 1 of row 2 is 2 * 3 + 1 = 7.
    number = item + items * np.arange(rows)[:, None]
    lengths = np.bincount(number[item >= 0], minlength=rows * items)
    return (lengths.reshape(rows, items) ** 2).sum(1)
