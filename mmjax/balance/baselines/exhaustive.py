"""Find the optimum of a few items by depth-first search, where longest-first leaves a gap (OrchMLLM section 5.1)."""

from __future__ import annotations

import numpy as np
from numba import njit

MOST_ITEMS = 12  # of any lengths, on any number of ranks, the search takes well below a millisecond


@njit(cache=True)
def search(weight, order, rank, load, capacity, extra, bound):
    """Replace the assignment in rank and load by the first better one found, again and again until none is better.

    weight: [n], int64 or float64; order: int64 [n], longest first; rank: int32 [n]; load: [ranks] of weight's type.
    A rank holds up to `capacity` items, and `extra` ranks one more. Ends early at a largest load of `bound`.
    """
    last = len(order) - 1
    largest = load.max()
    trial = np.zeros_like(load)
    count = np.zeros(len(load), np.int64)
    # By depth of the search: the rank that the item is on, -1 = on none yet, and that rank's load without it.
    trial_rank = np.full(len(order), -1)
    load_before = np.zeros_like(weight)
    depth = 0
    while depth >= 0 and largest > bound:
        item_weight = weight[order[depth]]
        r = trial_rank[depth]
        if r >= 0:  # the search is back at this item: take it off its rank before trying the next one
            trial[r] = load_before[depth]
            count[r] -= 1
            extra += count[r] == capacity
        r = _next(r + 1, item_weight, trial, count, capacity, extra, largest)
        trial_rank[depth] = r
        if r < 0:  # no rank improves on the best assignment
            depth -= 1
            continue
        load_before[depth] = trial[r]
        trial[r] += item_weight
        extra -= count[r] == capacity
        count[r] += 1
        if depth < last:
            depth += 1
            continue
        rank[order] = trial_rank
        load[:] = trial
        largest = trial.max()


@njit(cache=True)
def _next(first, item_weight, trial, count, capacity, extra, largest):
    """Find the next rank from `first` on that stays below `largest` and differs from all ranks before it, or -1."""
    for r in range(first, len(trial)):
        if trial[r] + item_weight >= largest or count[r] >= capacity + (extra > 0):
            continue
        distinct = True  # an equal earlier rank was tried with the same outcome
        for earlier in range(r):
            distinct = distinct and not (trial[earlier] == trial[r] and count[earlier] == count[r])
        if distinct:
            return r
    return -1
