"""The optimum of a few items by depth-first search, where longest processing time first leaves a gap (OrchMLLM 5.1)."""

from __future__ import annotations

import numpy as np
from numba import njit

MOST_ITEMS = 12  # of any lengths, on any number of ranks, the search takes well below a millisecond


@njit(cache=True)
def search(weight, order, rank, load, most, extra, bound):
    """Replace the assignment in rank and load by the first better one found, again and again until none is better.

    weight: [n], int64 or float64; order: int64 [n], longest first; rank: int32 [n]; load: [ranks] of weight's type.
    A rank holds up to `most` items, and `extra` ranks one more. Ends early at a largest load of `bound`.
    """
    last = len(order) - 1
    largest = load.max()
    trial, count = np.zeros_like(load), np.zeros(len(load), np.int64)
    at, before = np.full(len(order), -1), np.zeros_like(weight)
    i = 0
    while i >= 0 and largest > bound:
        added, r = weight[order[i]], at[i]
        if r >= 0:
            trial[r] = before[i]
            count[r] -= 1
            extra += count[r] == most
        r = _next(r + 1, added, trial, count, most, extra, largest)
        at[i] = r
        if r < 0:
            i -= 1
            continue
        before[i] = trial[r]
        trial[r] += added
        extra -= count[r] == most
        count[r] += 1
        if i < last:
            i += 1
            continue
        rank[order] = at
        load[:] = trial
        largest = trial.max()


@njit(cache=True)
def _next(first, added, trial, count, most, extra, largest):
    """The next rank from `first` on that stays below `largest` and differs from all ranks before it, or -1."""
    for r in range(first, len(trial)):
        if trial[r] + added >= largest or count[r] >= most + (extra > 0):
            continue
        new = True
        for q in range(r):
            new = new and not (trial[q] == trial[r] and count[q] == count[r])
        if new:
            return r
    return -1
