"""Kernels that even bins by moving little: take what a bin has too much of, fill others with it, swap what is left.

They serve node-wise rearrangement (OrchMLLM section 5.2), where bins are nodes or ranks of a node. Arrays: `length`
int64 `[n]`; `over` int64 `[b]`, what a bin holds above what it may; `first` int64 `[groups + 1]`, the bins of each
group, between which items move; `bin_of` int64 `[n]`, written; `items` and `start` as `by_key` returns them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mmjax.balance.lpt import lpt, polish

ENDLESS = np.iinfo(np.int64).max // 4  # twice it is a number still


@njit(cache=True)
def by_key(order, key, keys):
    """The items of `order` grouped by key, each group in the same order; group k is items[start[k] : start[k + 1]]."""
    start = np.zeros(keys + 1, np.int64)
    for item in order:
        start[key[item] + 1] += 1
    for k in range(keys):
        start[k + 1] += start[k]
    at = start[:-1].copy()
    items = np.empty(len(order), np.int64)
    for item in order:
        items[at[key[item]]] = item
        at[key[item]] += 1
    return items, start


@njit(cache=True)
def shed(items, start, first_unit, length, over, limit, away):
    """Mark items to take from every bin that is over, about equally from its units; lowers over to 0 or just below."""
    for b in range(len(over)):
        if over[b] > 0:
            over[b] -= _shed_bin(items, start, first_unit[b], first_unit[b + 1], length, over[b], limit, away)


@njit(cache=True)
def _shed_bin(items, start, first, last, length, quota, limit, away):
    """The total length marked: at least quota, if there is that much. The limit gives way where nothing else helps."""
    gone = 0
    for u in range(first, last):
        left = quota * (u - first + 1) // (last - first) - gone  # what units before could not split is made up for
        for item in items[start[u] : start[u + 1]]:
            if length[item] <= min(left, limit):
                away[item] = True
                left -= length[item]
                gone += length[item]
        change, add, drop = _exchange(items, start, u, u + 1, length, away, left, limit)
        if abs(left - change) < left:
            gone += _apply(away, change, add, drop)
    while True:
        change, add, drop = _exchange(items, start, first, last, length, away, quota - gone, limit)
        gone += _apply(away, change, add, drop)
        if change == 0 and (gone >= quota or limit >= ENDLESS):
            return gone
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
    """One more item away, one less, or one for another of its unit: the least change >= need, or the most below it.

    Returns the change, never on the other side of 0 than need, and the items to mark and to unmark, -1 = none.
    """
    least, add, drop = ENDLESS if need > 0 else 0, -1, -1
    most, most_add, most_drop = 0, -1, -1
    for u in range(first, last):
        begin, end = start[u], start[u + 1]
        q, passed = end, -1  # q: the shortest that makes up for what comes back; at `end` stands nothing, of length 0
        for p in range(end, begin - 1, -1):
            drop_p = items[p] if p < end else -1
            if drop_p >= 0 and not away[drop_p]:
                continue
            without = length[drop_p] if drop_p >= 0 else 0
            while q >= begin:
                free = q == end or not (away[items[q]] or length[items[q]] > limit)
                if free and (length[items[q]] if q < end else 0) - without >= need:
                    break
                if free:
                    passed = q
                q -= 1
            if q >= begin and (length[items[q]] if q < end else 0) - without < least:
                least, drop = (length[items[q]] if q < end else 0) - without, drop_p
                add = items[q] if q < end else -1
            if begin <= passed < end and length[items[passed]] - without > most:
                most, most_add, most_drop = length[items[passed]] - without, items[passed], drop_p
    if least < ENDLESS:
        return least, add, drop
    return most, most_add, most_drop


@njit(cache=True)
def fill(items, start, length, over, first, bin_of):
    """Each item of a group, longest first, to the group's bin that is least over; raises over."""
    for g in range(len(first) - 1):
        pool, a, b = items[start[g] : start[g + 1]], first[g], first[g + 1]
        to = np.zeros(len(pool), np.int64)
        lpt(length[pool], np.arange(len(pool)), to, over[a:b])
        bin_of[pool] = a + to


@njit(cache=True)
def polish_bins(items, start, length, over, first, bin_of):
    """Exchange any items, two for two as well, between bins of a group, until none is over or nothing helps.

    items: by bin, longest first.
    """
    for g in range(len(first) - 1):
        a, b = first[g], first[g + 1]
        if over[a:b].max() > 0:
            members = items[start[a] : start[b]]
            to = bin_of[members] - a
            polish(length[members], np.arange(len(members)), to, over[a:b], 0)
            bin_of[members] = a + to


@njit(cache=True)
def even(items, start, length, over, first, goal, bin_of):
    """Swap items with the worst bin of a group until it is over by no more than the goal `[groups]`, or no swap helps.

    items: by bin, longest first, and kept so.
    """
    for g in range(len(first) - 1):
        while first[g] < first[g + 1]:
            worst = first[g] + np.argmax(over[first[g] : first[g + 1]])
            if over[worst] <= goal[g]:
                break
            other, p, q = _best_swap(items, start, length, over, first[g], first[g + 1], worst, goal[g])
            if other < 0:
                break
            change = length[items[p]] - length[items[q]]
            over[worst] -= change
            over[other] += change
            bin_of[items[p]], bin_of[items[q]] = other, worst
            items[p], items[q] = items[q], items[p]
            _resort(items, start[worst], start[worst + 1], p, length)
            _resort(items, start[other], start[other + 1], q, length)


@njit(cache=True)
def _best_swap(items, start, length, over, first, last, worst, goal):
    """The bin and the positions in worst and in it whose swap leaves the two least over, shortest items first.

    The next bin where both reach the goal will do; it is -1 where no swap leaves both less over than worst is now.
    """
    least, shortest = over[worst], ENDLESS
    other, worst_at, other_at = -1, -1, -1
    for step in range(1, last - first):
        b = first + (worst - first + step) % (last - first)  # else the first bins would take part in every swap
        if over[b] >= over[worst] - 1:
            continue
        # Halving the difference is best, but what more than reaches the goal is of no use.
        wanted = min((over[worst] - over[b]) // 2, over[worst] - goal)
        q = start[b]
        for p in range(start[worst], start[worst + 1]):
            while q < start[b + 1] and length[items[q]] > length[items[p]] - wanted:
                q += 1
            for at in (q - 1, q):
                if start[b] <= at < start[b + 1]:
                    change = length[items[p]] - length[items[at]]
                    after = max(over[worst] - change, over[b] + change, goal)
                    together = length[items[p]] + length[items[at]]
                    if after < least or (after == least and together < shortest and other >= 0):
                        least, shortest, other, worst_at, other_at = after, together, b, p, at
        if least <= goal:
            break
    return other, worst_at, other_at


@njit(cache=True)
def _resort(items, begin, end, at, length):
    """Move the item at this position to where its length belongs between begin and end."""
    item = items[at]
    while at > begin and length[items[at - 1]] < length[item]:
        items[at] = items[at - 1]
        at -= 1
    while at + 1 < end and length[items[at + 1]] > length[item]:
        items[at] = items[at + 1]
        at += 1
    items[at] = item
