"""Longest processing time first, and what brings it to its bound: the kernels of post-balancing (OrchMLLM section 5.1).

Kernels work on plain arrays and write their result into `rank` and `load`. `weight` `[n]` is what each item costs,
int64 or float64; `order` says which items to place, longest first; `load` `[ranks]`, of weight's type, is what each
rank holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_ROUNDS = 16  # of exchanges; up to 2560 ranks reach their bound in about eight
_PARTNERS = 32  # ranks that one rank above the target tries to exchange with in a round
_STUCK = 64  # ranks of a round that may find no partner, before the round ends
_WINDOW = 16  # the shortest items of a rank, that lead an exchange of two for two


class _Held(NamedTuple):
    """The items of each rank, one rank after another, longest first: rank r holds `begin[r] .. begin[r + 1]`."""

    begin: np.ndarray
    item: np.ndarray
    weight: np.ndarray


def longest_first(length: np.ndarray) -> np.ndarray:
    """The items by falling length, equal ones in their order: int64 `[n]`. length: int64 `[n]`, none negative."""
    n = len(length)
    if n == 0:
        return np.zeros(0, np.int64)
    longest = int(length.max())
    if (longest + 1) * n >= 2**63:
        return np.argsort(-length, kind="stable")
    return np.sort((longest - length) * n + np.arange(n)) % n  # unlike a stable argsort, NumPy sorts these with SIMD


@njit(cache=True)
def lpt(weight, order, rank, load):
    """Each item of `order` to the rank with the least load so far, from a heap; writes rank and load."""
    ranks = len(load)
    heap = np.argsort(load)
    key = load[heap]
    for item in order:
        top = heap[0]
        rank[item] = top
        after = key[0] + weight[item]
        hole, child = 0, 1
        while child < ranks:
            if child + 1 < ranks and key[child + 1] < key[child]:
                child += 1
            if key[child] >= after:
                break
            heap[hole], key[hole] = heap[child], key[child]
            hole, child = child, 2 * child + 1
        heap[hole], key[hole] = top, after
    for i in range(ranks):
        load[heap[i]] = key[i]


@njit(cache=True)
def deal(weight, order, rank, load):
    """One item to every rank in each round, the longest to the least loaded: counts differ by at most one."""
    ranks = len(load)
    for begin in range(0, len(order), ranks):
        lightest = np.argsort(load)
        for i in range(min(ranks, len(order) - begin)):
            item, to = order[begin + i], lightest[i]
            rank[item] = to
            load[to] += weight[item]


@njit(cache=True)
def polish(weight, order, rank, load, target):
    """Exchange items between ranks until none holds more than `target`, or none above it finds a partner.

    Counts stay. An exchange makes a rank above the target lighter and one below it no heavier than the other was: one
    item for one where a difference near half the gap between the two exists, else two for two.
    """
    held = _hold(weight, order, rank, len(load))
    for _ in range(_ROUNDS):
        lightest = np.argsort(load)
        if not _round(held, lightest, rank, load, target):
            return


@njit(cache=True)
def least_largest_load(length, ranks):
    """The least load, int64, that the fullest rank can have as far as sums and divisibility tell. length: int64 [n].

    No less than the longest item and the mean. Where only m items are no multiples of q, at least ranks - m ranks hold
    a multiple of q, and so no more than the multiple at or below the largest load. Tried for the greatest common
    divisor, and that times 2, 4, 8 and so on.
    """
    longest, total, unit = 0, 0, 0
    for value in length:
        longest, total = max(longest, value), total + value
        while value:
            unit, value = value, unit % value
    least = max(longest, -(-total // ranks))
    while 0 < unit <= longest:
        others = 0
        for value in length:
            others += value % unit != 0
            if others >= ranks:
                return least
        while (ranks - others) * (least // unit * unit) + others * least < total:
            least += 1
        unit *= 2
    return least


@njit(cache=True)
def _hold(weight, order, rank, ranks):
    begin = np.zeros(ranks + 1, np.int64)
    for item in order:
        begin[rank[item] + 1] += 1
    begin = np.cumsum(begin)
    free = begin.copy()
    held = np.empty(len(order), np.int64)
    for item in order:
        held[free[rank[item]]] = item
        free[rank[item]] += 1
    return _Held(begin, held, weight[held])


@njit(cache=True)
def _round(held, lightest, rank, load, target):
    """Relieve each rank above the target once, heaviest first; whether anything changed."""
    low, stuck, changed = 0, 0, False
    for i in range(len(lightest) - 1, 0, -1):
        while low < i and load[lightest[low]] >= target:
            low += 1
        if low == i or load[lightest[i]] <= target or stuck == _STUCK:
            break
        if _relieve(held, lightest[i], lightest[low : min(low + _PARTNERS, i)], rank, load, target):
            changed = True
        else:
            stuck += 1
    return changed


@njit(cache=True)
def _relieve(held, heavy, partners, rank, load, target):
    for light in partners:
        if load[light] < target:
            half = (load[heavy] - load[light]) / 2
            a, b, off = _nearest(held, heavy, light, half, -1, -1)
            if off < half:
                _exchange(held, a, b, heavy, light, rank, load)
                _sort(held, heavy)
                _sort(held, light)
                return True
    light = partners[0]
    half = (load[heavy] - load[light]) / 2
    a, b, c, d = _nearest_two(held, heavy, light, half, max(target - load[heavy] + half, half / 8))
    if a < 0:
        return False
    _exchange(held, a, b, heavy, light, rank, load)
    _exchange(held, c, d, heavy, light, rank, load)
    _sort(held, heavy)
    _sort(held, light)
    return True


@njit(cache=True)
def _nearest(held, heavy, light, difference, not_a, not_b):
    """The places a of heavy, b of light whose weights differ by nearest to `difference`, and how far off that is."""
    weight, first, last = held.weight, held.begin[light], held.begin[light + 1]
    best, least, j = (-1, -1), np.inf, first
    for a in range(held.begin[heavy], held.begin[heavy + 1]):
        if a == not_a:
            continue
        wanted = weight[a] - difference
        while j < last and weight[j] > wanted:
            j += 1
        after, before = j, j - 1  # both sides of the wanted weight
        if after == not_b:
            after += 1
        elif before == not_b:
            before -= 1
        if after < last and wanted - weight[after] < least:
            best, least = (a, after), wanted - weight[after]
        if before >= first and weight[before] - wanted < least:
            best, least = (a, before), weight[before] - wanted
    return best[0], best[1], least


@njit(cache=True)
def _nearest_two(held, heavy, light, difference, enough):
    """Places a, c of heavy and b, d of light whose differences add up nearest to `difference`, -1 if not above 0.

    The first that is no further off than `enough` will do.
    """
    best, least = (-1, -1, -1, -1), difference
    for a in range(max(held.begin[heavy], held.begin[heavy + 1] - _WINDOW), held.begin[heavy + 1]):
        for b in range(max(held.begin[light], held.begin[light + 1] - _WINDOW), held.begin[light + 1]):
            rest = difference - (held.weight[a] - held.weight[b])
            c, d, off = _nearest(held, heavy, light, rest, a, b)
            if off < least:
                best, least = (a, b, c, d), off
                if off <= enough:
                    return best
    return best


@njit(cache=True)
def _exchange(held, a, b, heavy, light, rank, load):
    difference = held.weight[a] - held.weight[b]
    load[heavy] -= difference
    load[light] += difference
    rank[held.item[a]], rank[held.item[b]] = light, heavy
    held.item[a], held.item[b] = held.item[b], held.item[a]
    held.weight[a], held.weight[b] = held.weight[b], held.weight[a]


@njit(cache=True)
def _sort(held, rank):
    """By insertion: at most two items are out of place."""
    begin = held.begin[rank]
    for i in range(begin + 1, held.begin[rank + 1]):
        item, weight, at = held.item[i], held.weight[i], i
        while at > begin and held.weight[at - 1] < weight:
            held.item[at], held.weight[at] = held.item[at - 1], held.weight[at - 1]
            at -= 1
        held.item[at], held.weight[at] = item, weight
