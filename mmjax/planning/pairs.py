"""How many (query, key) pairs the mask spec allows, counted exactly and without a T x T mask.

    allowed = same sample & (same span, not 0 | (pos_k <= pos_q & sees_q & kind_k))

Attention that must be computed, and so MFU, is in proportion to this number.
"""

from __future__ import annotations

import numpy as np

from mmjax.batch import TextBatch


def allowed_pairs(text: TextBatch) -> np.ndarray:
    """Allowed pairs of every row of the LLM, int64 `[R]`, of one head.

    Reads `sample`, `pos` (no two tokens of a row alike), `span`, `kind` and `sees`, each `[R, T]`.
    """
    rows, length = text.sample.shape
    valid = text.sample.ravel() >= 0
    row = np.repeat(np.arange(rows), length)[valid]
    sample, pos, span, kind, sees = (
        x.ravel()[valid].astype(np.int64) for x in (text.sample, text.pos, text.span, text.kind, text.sees)
    )
    samples = row * (sample.max(initial=0) + 1) + sample
    count = _causal(samples, pos, kind, sees)
    spans = span != 0
    if spans.any():
        # Every pair within a span is allowed; those that causality allows as well are in `count` already.
        inside = np.unique(samples[spans] * (span.max() + 1) + span[spans], return_inverse=True)[1]
        count[spans] += np.bincount(inside)[inside] - _causal(inside, pos[spans], kind[spans], sees[spans])
    return np.bincount(row, count, rows).astype(np.int64)


def item_pairs(item: np.ndarray) -> np.ndarray:
    """Pairs of every row of an encoder, int64 `[R]`: the sum of the squares of its items' lengths. `item` `[R, L]`."""
    rows, most = len(item), item.max(initial=0) + 1
    place = item + most * np.arange(rows)[:, None]
    lengths = np.bincount(place[item >= 0], minlength=rows * most)
    return (lengths.reshape(rows, most) ** 2).sum(1)


def _causal(segment: np.ndarray, pos: np.ndarray, kind: np.ndarray, sees: np.ndarray) -> np.ndarray:
    """For every token, the tokens of its segment up to its own `pos` whose kind it sees. All int64 `[n]`."""
    order = np.argsort(segment * (pos.max(initial=0) + 1) + pos, kind="stable")
    segment, kind, sees = segment[order], kind[order], sees[order]
    first = np.searchsorted(segment, segment)
    seen = np.zeros(len(order), np.int64)
    for one in np.unique(kind):
        before = np.concatenate([[0], np.cumsum(kind == one)])
        seen += ((sees & one) != 0) * (before[1:] - before[first])
    count = np.empty_like(seen)
    count[order] = seen
    return count
