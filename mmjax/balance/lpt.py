"""Longest processing time first, and what brings it to its bound: the kernels of post-balancing (OrchMLLM section 5.1).

Kernels work on plain arrays and write their result into `rank` and `load`. `weight` `[n]` is what
each item costs, int64 or float64; `order` says which items to place, longest first; `load`
`[ranks]`, of weight's type, is what each rank holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit


def split(totals: np.ndarray, microbatches: int) -> np.ndarray:
    """Assign each sample a microbatch, int64 `[n]`, by greedy vector balancing. totals: int `[n, M]`, positions.

    The sample with the largest load in any module, relative to that module's mean over
    microbatches, goes first, to the microbatch whose largest relative load stays least.
    """
    # 1 is what a microbatch has of the module on average; a module that nobody uses is 0
    # everywhere.
    share = totals * microbatches / np.maximum(totals.sum(0), 1)
    return _balance(share, np.argsort(-share.max(1, initial=0), kind="stable"), microbatches)


def to_rows(
    module: np.ndarray, length: np.ndarray, group: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Assign each part a row, longest first to the emptiest of its group and module; return each module's fullest too.

    module, length, group: int `[p]`; a group is a microbatch or a rank. rows: int64 `[M]`, of each
    group. Returns int32 `[p]`, group * rows + row within the group, and int64 `[M]`, positions, not
    aligned.
    """
    groups = int(group.max(initial=0)) + 1
    # One line for each module, as long as that of the module with the most rows; the ends of others
    # stay 0.
    load = np.zeros((len(rows), groups * int(rows.max())), np.int64)
    row = np.zeros(len(module), np.int32)
    need = np.zeros(len(rows), np.int64)
    longest_first = np.argsort(-length, kind="stable")
    _longest_first(
        module, length, np.asarray(group, np.int64), longest_first, rows, load, row, need
    )
    return row, need


@njit(cache=True)
def _balance(share, heaviest_first, microbatches):
    """Assign each sample a microbatch, int64 [n]; of equal choices the one with the least load in all."""
    n, modules = share.shape
    load = np.zeros((microbatches, modules))
    microbatch = np.zeros(n, np.int64)
    for sample in heaviest_first:
        best = -1
        min_largest = min_sum = np.inf
        for m in range(microbatches):
            # The fullest module decides, so a sample goes where that stays lowest.
            largest = load_sum = 0.0
            for k in range(modules):
                new_load = load[m, k] + share[sample, k]
                largest = max(largest, new_load)
                load_sum += new_load
            if largest < min_largest or (largest == min_largest and load_sum < min_sum):
                best = m
                min_largest = largest
                min_sum = load_sum
        microbatch[sample] = best
        for k in range(modules):
            load[best, k] += share[sample, k]
    return microbatch


@njit(cache=True)
def _longest_first(module, length, group, longest_first, rows, load, row, need):
    """Assign each part, longest first, to the emptiest row of its module and group; writes load, row and need.

    The rows of a module and group are a binary heap; of equally empty ones the first goes first.
    The heap is an array: Numba's `heapq`, of tuples, takes up to four times as long here and in
    `lpt`.
    """
    heap = np.empty(load.shape, np.int64)  # rows within their group
    for k in range(len(rows)):
        # All rows are empty, so any order is a heap: with 3 rows a group, 0 1 2, 0 1 2, ...
        heap[k] = np.arange(load.shape[1]) % rows[k]
    for part in longest_first:
        k = module[part]
        first = group[part] * rows[k]
        count = rows[k]
        # The root of this group's heap, which lies in the `count` slots from `first` on.
        emptiest = heap[k, first]
        new_load = load[k, first + emptiest] + length[part]
        load[k, first + emptiest] = new_load
        row[part] = first + emptiest
        need[k] = max(need[k], new_load)
        slot = 0
        # The emptiest row has been filled: sift it down the heap, whose node h has children 2 h + 1
        # and 2 h + 2.
        while 2 * slot + 1 < count:
            child = 2 * slot + 1
            if child + 1 < count:
                left_row = heap[k, first + child]
                right_row = heap[k, first + child + 1]
                a = load[k, first + left_row]
                b = load[k, first + right_row]
                # Ties go to the lower row, so that the result does not depend on the heap's
                # history.
                child += b < a or (b == a and right_row < left_row)
            lower = heap[k, first + child]
            child_load = load[k, first + lower]
            if new_load < child_load or (new_load == child_load and emptiest < lower):
                break
            heap[k, first + slot] = lower
            slot = child
        heap[k, first + slot] = emptiest


_ROUNDS = 16  # of exchanges; up to 2560 ranks reach their bound in about eight
_PARTNERS = 32  # ranks that one rank above the target tries to exchange with in a round
_STUCK = 64  # ranks of a round that may find no partner, before the round ends
_WINDOW = 16  # the shortest items of a rank, that lead an exchange of two for two


class _RankItems(NamedTuple):
    """Items of each rank, one rank after another, longest first: rank r has `begin[r] .. begin[r + 1]`."""

    begin: np.ndarray
    item: np.ndarray
    weight: np.ndarray


def longest_first(length: np.ndarray) -> np.ndarray:
    """Sort items by falling length, equal ones in their order: int64 `[n]`. length: int64 `[n]`, none negative."""
    n = len(length)
    if n == 0:
        return np.zeros(0, np.int64)
    longest = int(length.max())
    # Length and index share one int64 key, (longest - length) * n + index, so that one plain sort
    # orders both.
    if (longest + 1) * n >= 2**63:
        return np.argsort(-length, kind="stable")
    # unlike a stable argsort, NumPy sorts these with SIMD
    return np.sort((longest - length) * n + np.arange(n)) % n


@njit(cache=True)
def lpt(weight, order, rank, load):
    """Assign each item of `order` to the rank with the least load so far, from a heap; writes rank and load."""
    ranks = len(load)
    # Sorted by load is a heap already.
    heap = np.argsort(load)
    key = np.empty_like(load)
    for i in range(ranks):
        key[i] = load[heap[i]]
    for item in order:
        top = heap[0]
        rank[item] = top
        new_load = key[0] + weight[item]
        hole = 0
        child = 1
        # Sift the new load down from the root; the children of node h are 2 h + 1 and 2 h + 2.
        while child < ranks:
            if child + 1 < ranks and key[child + 1] < key[child]:
                child += 1
            if key[child] >= new_load:
                break
            heap[hole] = heap[child]
            key[hole] = key[child]
            hole = child
            child = 2 * child + 1
        heap[hole] = top
        key[hole] = new_load
    for i in range(ranks):
        load[heap[i]] = key[i]


@njit(cache=True)
def polish(weight, order, rank, load, target):
    """Exchange items between ranks until none holds more than `target`, or none above it finds a partner.

    Counts stay. An exchange makes a rank above the target lighter and one below it no heavier than
    the other was: one item for one where a difference near half the gap between the two exists,
    else two for two.
    """
    items = _group_by_rank(weight, order, rank, len(load))
    for _ in range(_ROUNDS):
        # Sorted once a round and not after every exchange: ranks that were relieved are met again
        # in the next.
        lightest = np.argsort(load)
        if not _round(items, lightest, rank, load, target):
            return


@njit(cache=True)
def _group_by_rank(weight, order, rank, ranks):
    begin = np.zeros(ranks + 1, np.int64)
    for item in order:
        # Counting sort, which keeps the order within a rank: `order` is longest first.
        begin[rank[item] + 1] += 1
    for r in range(ranks):
        begin[r + 1] += begin[r]
    free = begin.copy()
    items = np.empty(len(order), np.int64)
    weights = np.empty_like(weight)
    for item in order:
        place = free[rank[item]]
        items[place] = item
        weights[place] = weight[item]
        free[rank[item]] += 1
    return _RankItems(begin, items, weights)


@njit(cache=True)
def _round(items, lightest, rank, load, target):
    """Relieve each rank above the target once, heaviest first; return whether anything changed."""
    low = stuck = 0
    changed = False
    for i in range(len(lightest) - 1, 0, -1):
        # Partners are taken from the light end, ranks to relieve from the heavy end, until both
        # meet.
        while low < i and load[lightest[low]] >= target:
            low += 1
        if low == i or load[lightest[i]] <= target or stuck == _STUCK:
            break
        if _relieve(
            items, lightest[i], lightest[low : min(low + _PARTNERS, i)], rank, load, target
        ):
            changed = True
        else:
            stuck += 1
    return changed


@njit(cache=True)
def _relieve(items, heavy, partners, rank, load, target):
    for light in partners:
        if load[light] < target:
            # Moving half of the gap would make the two equal; any change below the whole gap helps.
            half = (load[heavy] - load[light]) / 2
            # no literals: see pack_kernels
            a, b, off = _nearest(items, heavy, light, half, np.int64(-1), np.int64(-1))
            # A difference d lies between 0 and the whole gap exactly where |d - half| < half; then
            # the larger load falls.
            if off < half:
                _exchange(items, a, b, heavy, light, rank, load)
                _sort(items, heavy)
                _sort(items, light)
                return True
    # No single pair was near enough. Two pairs are sought with the lightest partner alone, as that
    # takes longer.
    light = partners[0]
    half = (load[heavy] - load[light]) / 2
    a, b, c, d = _nearest_two(items, heavy, light, half, max(target - load[heavy] + half, half / 8))
    if a < 0:
        return False
    _exchange(items, a, b, heavy, light, rank, load)
    _exchange(items, c, d, heavy, light, rank, load)
    _sort(items, heavy)
    _sort(items, light)
    return True


@njit(cache=True)
def _nearest(items, heavy, light, difference, not_a, not_b):
    """Find places a of heavy, b of light whose weights differ by nearest to `difference`, and how far off that is."""
    weight = items.weight
    first = items.begin[light]
    last = items.begin[light + 1]
    best = (-1, -1)
    min_error = np.inf
    j = first
    for a in range(items.begin[heavy], items.begin[heavy + 1]):
        if a == not_a:
            continue
        ideal = weight[a] - difference
        # Both ranks' weights fall, so j only moves on: one pass over both.
        while j < last and weight[j] > ideal:
            j += 1
        below = j  # weights fall: this one is at or below the ideal, the one before it above
        above = j - 1
        # Each of the two items may be exchanged once: step past the one already chosen.
        if below == not_b:
            below += 1
        elif above == not_b:
            above -= 1
        if below < last and ideal - weight[below] < min_error:
            best = (a, below)
            min_error = ideal - weight[below]
        if above >= first and weight[above] - ideal < min_error:
            best = (a, above)
            min_error = weight[above] - ideal
    return best[0], best[1], min_error


@njit(cache=True)
def _nearest_two(items, heavy, light, difference, enough):
    """Find places a, c of heavy and b, d of light whose differences add up nearest to `difference`, -1 if not above 0.

    The first that is no further off than `enough` will do.
    """
    best = (-1, -1, -1, -1)
    min_error = difference
    # The shortest items make the finest differences, which a second pair then complements.
    for a in range(
        max(items.begin[heavy], items.begin[heavy + 1] - _WINDOW), items.begin[heavy + 1]
    ):
        for b in range(
            max(items.begin[light], items.begin[light + 1] - _WINDOW), items.begin[light + 1]
        ):
            rest = difference - (items.weight[a] - items.weight[b])
            c, d, off = _nearest(items, heavy, light, rest, a, b)
            if off < min_error:
                best = (a, b, c, d)
                min_error = off
                if off <= enough:
                    return best
    return best


@njit(cache=True)
def _exchange(items, a, b, heavy, light, rank, load):
    difference = items.weight[a] - items.weight[b]
    load[heavy] -= difference
    load[light] += difference
    rank[items.item[a]] = light
    rank[items.item[b]] = heavy
    # Places a and b keep their rank: it is the items in them that change.
    items.item[a], items.item[b] = items.item[b], items.item[a]
    items.weight[a], items.weight[b] = items.weight[b], items.weight[a]


@njit(cache=True)
def _sort(items, rank):
    """Sort a rank's items by insertion: at most two are out of place."""
    begin = items.begin[rank]
    for i in range(begin + 1, items.begin[rank + 1]):
        item = items.item[i]
        weight = items.weight[i]
        place = i
        while place > begin and items.weight[place - 1] < weight:
            items.item[place], items.weight[place] = items.item[place - 1], items.weight[place - 1]
            place -= 1
        items.item[place] = item
        items.weight[place] = weight
