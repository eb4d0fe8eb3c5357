"""For comparison only: the post-balancing algorithms of OrchMLLM (section 5.1, appendix A) as the paper has them.

`mmjax.balance.baselines.postbalance` is never worse. Only what would crash, or lose items, is mended; each function
says what. Lengths: int `[n]`, tokens, none negative; results: int32 `[n]`; ValueError for less than one rank.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mmjax.balance.lpt import longest_first, lpt


def paper_packed(length: np.ndarray, ranks: int) -> np.ndarray:
    """Give each item, longest first, to the rank with the least sum of lengths: algorithm 1."""
    length = _checked(length, ranks)
    rank = np.zeros(len(length), np.int32)
    lpt(length, longest_first(length), rank, np.zeros(ranks, np.int64))
    return rank


def paper_padded(length: np.ndarray, ranks: int) -> np.ndarray:
    """Cut ascending items into batches within a bound on count times longest, by binary search: algorithm 2.

    As printed, the search runs from the shortest item to (n / d + 1) times it, which may all be too little, and the
    batches are those of the last bound tried, which may be more than d. Mended: batch d + i joins batch i, and where
    the search tries no bound, its upper end is tried.
    """
    length = _checked(length, ranks)
    rank = np.zeros(len(length), np.int32)
    if len(length):
        ascending = longest_first(length)[::-1]
        rank[ascending] = _search_batches(length[ascending], ranks) % ranks
    return rank


def paper_quadratic(length: np.ndarray, ranks: int, tolerance: float) -> np.ndarray:
    """Follow algorithm 4: as 1, but of two sums that differ by less than `tolerance` the lesser sum of squares wins.

    tolerance: v of the paper, tokens. That order is not transitive, so which rank is on top of the heap depends on how
    the heap came about.
    """
    length = _checked(length, ranks)
    rank = np.zeros(len(length), np.int32)
    _lpt_with_tolerance(length, longest_first(length), rank, ranks, float(tolerance))
    return rank


def paper_conv(length: np.ndarray, ranks: int) -> np.ndarray:
    """Batch descending items within algorithm 1's largest sum; what remains goes to the least sums: algorithm 5.

    The paper leaves `b` and `len` undefined. Here b is the bound of its line 2, algorithm 1's largest sum, and len the
    number of batches. Mended: it stops at d batches, not above. As printed, an item that joins is compared by its own
    length, though the batch's first is the longest.
    """
    length = _checked(length, ranks)
    order = longest_first(length)
    rank = np.zeros(len(length), np.int32)
    load = np.zeros(ranks, np.int64)
    lpt(length, order, rank, load)
    bound = load.max()
    load = np.zeros(ranks, np.int64)
    batched = _fill_batches(length, order, rank, load, bound)
    lpt(length, order[batched:], rank, load)
    return rank


def _checked(length: np.ndarray, ranks: int) -> np.ndarray:
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: at least one is needed")
    return np.ascontiguousarray(length, np.int64)


@njit(cache=True)
def _search_batches(length, ranks):
    """Return the batch of each item in the last trial, int64 [n]. length: int64 [n], ascending."""
    low = length[0]
    high = int(length[0] * (len(length) / ranks + 1))
    if low >= high:
        return _batches(length, high)
    batch = np.zeros(len(length), np.int64)
    while low < high:
        middle = (low + high) // 2
        batch = _batches(length, middle)
        if batch[-1] + 1 <= ranks:
            high = middle
        else:
            low = middle + 1
    return batch


@njit(cache=True)
def _batches(length, bound):
    """Return the batch of each item, int64 [n] (GetLeastBatches); a first item above the bound leaves batch 0 empty."""
    batch = np.zeros(len(length), np.int64)
    current = count = 0
    for i in range(len(length)):
        if (count + 1) * length[i] > bound:
            current += 1
            count = 0
        batch[i] = current
        count += 1
    return batch


@njit(cache=True)
def _lpt_with_tolerance(length, order, rank, ranks, tolerance):
    heap = np.arange(ranks)
    total = np.zeros(ranks, np.int64)
    squares = np.zeros(ranks, np.int64)
    for item in order:
        top = heap[0]
        rank[item] = top
        total[top] += length[item]
        squares[top] += length[item] * length[item]
        # Sift down: the children of place k of the heap are 2 k + 1 and 2 k + 2.
        hole = 0
        child = 1
        while child < ranks:
            if child + 1 < ranks and _less(heap[child + 1], heap[child], total, squares, tolerance):
                child += 1
            if not _less(heap[child], top, total, squares, tolerance):
                break
            heap[hole] = heap[child]
            hole, child = child, 2 * child + 1
        heap[hole] = top


@njit(cache=True)
def _less(a, b, total, squares, tolerance):
    if abs(total[a] - total[b]) < tolerance:
        return squares[a] < squares[b]
    return total[a] < total[b]


@njit(cache=True)
def _fill_batches(length, order, rank, load, bound):
    """Place items of `order` until the ranks run out (lines 4 to 10); write rank and load, return their number."""
    batch = count = 0
    for i in range(len(order)):
        if (count + 1) * length[order[i]] > bound:
            if batch + 1 == len(load):
                return i
            batch += 1
            count = 0
        rank[order[i]] = batch
        load[batch] += length[order[i]]
        count += 1
    return len(order)
