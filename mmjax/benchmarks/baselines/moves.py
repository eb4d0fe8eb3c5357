"""Even bins by moving little: take what a bin has too much of, fill others with it, swap what is left.

They serve node-wise rearrangement (OrchMLLM section 5.2), where bins are nodes or ranks of a node.
Arrays: `length` int64 `[n]`; `excess` int64 `[b]`, what a bin holds above what it may; `first`
int64 `[groups + 1]`, the bins of each group, between which items move; `bin_of` int64 `[n]`,
written; `items` and `start` as `by_key` returns them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mmjax.balance.item_moves import larger_load
from mmjax.balance.lpt import lpt, polish

ENDLESS = np.iinfo(np.int64).max // 4  # twice it is a number still


def sum_by_key(key: np.ndarray, length: np.ndarray, keys: int) -> np.ndarray:
    """Sum the lengths that have each key, int64 `[keys]`."""
    # Float sums of whole numbers are exact up to 2^53.
    return np.bincount(key, length, keys).astype(np.int64)


@njit(cache=True)
def by_key(order, key, keys):
    """Group the items of `order` by key, each in the same order; group k is items[start[k] : start[k + 1]]."""
    start = np.zeros(keys + 1, np.int64)
    for item in order:
        # Counting sort: sizes one place further on, so that their running sum is where each group
        # begins.
        start[key[item] + 1] += 1
    for k in range(keys):
        start[k + 1] += start[k]
    # The next free place of every group.
    cursor = start[:-1].copy()
    items = np.empty(len(order), np.int64)
    for item in order:
        items[cursor[key[item]]] = item
        cursor[key[item]] += 1
    return items, start


@njit(cache=True)
def shed(items, start, first_unit, length, excess, limit, away):
    """Mark items to take from every bin with an excess, about equally from its units; lowers it to 0 or just below."""
    for b in range(len(excess)):
        if excess[b] > 0:
            excess[b] -= _shed_bin(
                items, start, first_unit[b], first_unit[b + 1], length, excess[b], limit, away
            )


@njit(cache=True)
def _shed_bin(items, start, first, last, length, quota, limit, away):
    """Mark at least quota, if there is as much; return the length marked. The limit gives way if nothing else helps."""
    taken = 0
    for u in range(first, last):
        # A quota of 10 over 3 units: 3, then 6 in all, then 10; what units before could not split
        # is made up for.
        remaining = quota * (u - first + 1) // (last - first) - taken
        for item in items[start[u] : start[u + 1]]:
            if length[item] <= min(remaining, limit):
                away[item] = True
                remaining -= length[item]
                taken += length[item]
        change, add, drop = _exchange(items, start, u, u + 1, length, away, remaining, limit)
        if abs(remaining - change) < remaining:
            taken += _apply(away, change, add, drop)
    while True:
        change, add, drop = _exchange(items, start, first, last, length, away, quota - taken, limit)
        taken += _apply(away, change, add, drop)
        if change == 0 and (taken >= quota or limit >= ENDLESS):
            return taken
        if change == 0:
            limit *= 2


@njit(cache=True)
def _apply(away, change, add, drop):
    if add >= 0:
        away[add] = True
    if drop >= 0:
        away[drop] = False
    return change


@njit(cache=True)
def _exchange(items, start, first, last, length, away, need, limit):
    """Find one item more, one less, or one for another of its unit: the least change >= need, or the most below it.

    Returns the change, never on the other side of 0 than need, and the items to mark and to unmark,
    -1 = none.
    """
    # If nothing is needed, changing nothing is the least change that is enough.
    over_change = ENDLESS if need > 0 else 0  # the least change >= need
    over_add = over_drop = under_add = under_drop = -1
    under_change = 0  # the most below it
    for u in range(first, last):
        begin = start[u]
        end = start[u + 1]
        # Items are longest first, so walking both i and j backwards goes from short to long: j
        # never turns round. the shortest that makes up for what comes back; at `end` stands
        # nothing, of length 0
        j = end
        last_short = -1
        for i in range(end, begin - 1, -1):
            dropped = items[i] if i < end else -1
            if dropped >= 0 and not away[dropped]:
                continue
            dropped_length = length[dropped] if dropped >= 0 else 0
            while j >= begin:
                movable = j == end or not (away[items[j]] or length[items[j]] > limit)
                if movable and (length[items[j]] if j < end else 0) - dropped_length >= need:
                    break
                if movable:
                    last_short = j
                j -= 1
            if j >= begin and (length[items[j]] if j < end else 0) - dropped_length < over_change:
                over_change = (length[items[j]] if j < end else 0) - dropped_length
                over_drop = dropped
                over_add = items[j] if j < end else -1
            if (
                begin <= last_short < end
                and length[items[last_short]] - dropped_length > under_change
            ):
                under_change = length[items[last_short]] - dropped_length
                under_add = items[last_short]
                under_drop = dropped
    # Enough is better than too little, however much it is.
    if over_change < ENDLESS:
        return over_change, over_add, over_drop
    return under_change, under_add, under_drop


@njit(cache=True)
def fill(items, start, length, excess, first, bin_of):
    """Put each item of a group, longest first, into the group's bin with the least excess; raises it."""
    for g in range(len(first) - 1):
        pool = items[start[g] : start[g + 1]]
        first_bin = first[g]
        chosen = np.zeros(len(pool), np.int64)
        lpt(length[pool], np.arange(len(pool)), chosen, excess[first_bin : first[g + 1]])
        bin_of[pool] = first_bin + chosen


@njit(cache=True)
def polish_bins(items, start, length, excess, first, bin_of):
    """Exchange any items, two for two as well, between bins of a group, until none is over or nothing helps.

    items: by bin, longest first.
    """
    for g in range(len(first) - 1):
        first_bin = first[g]
        end_bin = first[g + 1]
        if excess[first_bin:end_bin].max() > 0:
            members = items[start[first_bin] : start[end_bin]]
            chosen = bin_of[members] - first_bin
            polish(length[members], np.arange(len(members)), chosen, excess[first_bin:end_bin], 0)
            bin_of[members] = first_bin + chosen


@njit(cache=True)
def even(items, start, length, excess, first, goal, bin_of):
    """Swap items with the worst bin of a group until it is over by no more than the goal `[groups]`, or no swap helps.

    items: by bin, longest first, and kept so.
    """
    for g in range(len(first) - 1):
        while first[g] < first[g + 1]:
            worst = first[g] + np.argmax(excess[first[g] : first[g + 1]])
            if excess[worst] <= goal[g]:
                break
            partner, p, q = _best_swap(
                items, start, length, excess, first[g], first[g + 1], worst, goal[g]
            )
            if partner < 0:
                break
            change = length[items[p]] - length[items[q]]
            excess[worst] -= change
            excess[partner] += change
            bin_of[items[p]] = partner
            bin_of[items[q]] = worst
            items[p], items[q] = items[q], items[p]
            _resort(items, start[worst], start[worst + 1], p, length)
            _resort(items, start[partner], start[partner + 1], q, length)


@njit(cache=True)
def _best_swap(items, start, length, excess, first, last, worst, goal):
    """Find the bin and the positions in worst and in it whose swap leaves both the least excess, shortest items first.

    The next bin where both reach the goal will do; it is -1 where no swap leaves both less over
    than worst is now.
    """
    lowest = excess[worst]
    shortest = ENDLESS
    partner = worst_position = partner_position = -1
    for step in range(1, last - first):
        # else the first bins would take part in every swap
        b = first + (worst - first + step) % (last - first)
        if excess[b] >= excess[worst] - 1:
            continue
        # Halving the difference is best, but what more than reaches the goal is of no use.
        difference = min((excess[worst] - excess[b]) // 2, excess[worst] - goal)
        q = start[b]
        for p in range(start[worst], start[worst + 1]):
            while q < start[b + 1] and length[items[q]] > length[items[p]] - difference:
                q += 1
            # Items of the other bin fall in length: q - 1 and q are the two closest to the
            # difference that is sought.
            for candidate in (q - 1, q):
                if start[b] <= candidate < start[b + 1]:
                    change = length[items[p]] - length[items[candidate]]
                    highest = larger_load(excess[worst], excess[b], change, goal)
                    pair_length = length[items[p]] + length[items[candidate]]
                    if highest < lowest or (
                        highest == lowest and pair_length < shortest and partner >= 0
                    ):
                        lowest = highest
                        shortest = pair_length
                        partner = b
                        worst_position = p
                        partner_position = candidate
        if lowest <= goal:
            break
    return partner, worst_position, partner_position


@njit(cache=True)
def _resort(items, begin, end, position, length):
    """Move the item at this position to where its length belongs between begin and end."""
    item = items[position]
    while position > begin and length[items[position - 1]] < length[item]:
        items[position] = items[position - 1]
        position -= 1
    while position + 1 < end and length[items[position + 1]] > length[item]:
        items[position] = items[position + 1]
        position += 1
    items[position] = item
