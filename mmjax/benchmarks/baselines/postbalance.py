"""For comparison only: post-balancing (OrchMLLM section 5.1, appendix A), improved, and as the paper has it.

The improved functions are never worse than the paper's (`paper_*`), in which only what would crash
or lose items is mended. Lengths: int `[n]`, tokens, none negative; results: int32 `[n]`; ValueError
for less than one rank.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numba import njit

from mmjax.balance.lpt import longest_first, lpt, polish
from mmjax.benchmarks.baselines.bounds import MOST_ITEMS, search

Kind = Literal["packed", "padded", "quadratic", "conv"]

_TOLERANCE = 2e-4  # of the mean, above which exchanges still go on where costs are real numbers


def balance_packed(length: np.ndarray, ranks: int, equal_counts: bool = False) -> np.ndarray:
    """Choose the rank of each item by the sum of lengths; with many items a rank mostly at `least_largest_load`.

    length: int `[n]`, tokens, none negative. equal_counts: the ranks' counts of items differ by at
    most one. Returns int32 `[n]`. Raises ValueError. OrchMLLM section 5.1, algorithm 1, then
    exchanges.
    """
    length = _checked(length, ranks)
    # Whole numbers: exchanges stop where the largest load is proven to be the least.
    bound = least_largest_load(length, ranks)
    return _balance_sums(length, longest_first(length), ranks, bound, bound, equal_counts)


def balance_quadratic(
    length: np.ndarray, ranks: int, lam: float, equal_counts: bool = False
) -> np.ndarray:
    """Choose the rank of each item by the sum of f(l) = l + lam * l^2: as packed, on f(l).

    length: int `[n]`, tokens; lam: per token. Returns int32 `[n]`. Raises ValueError. OrchMLLM
    appendix A, objective of algorithm 4.
    """
    length = _checked(length, ranks, lam)
    cost = _item_cost("quadratic", length, lam)
    longest = cost.max(initial=0.0)
    mean = cost.sum() / ranks
    # Real costs hardly ever add up to the mean exactly, so a little above it is good enough.
    target = max(longest, mean * (1 + _TOLERANCE))
    return _balance_sums(
        cost, longest_first(length), ranks, target, max(longest, mean), equal_counts
    )


def balance_padded(length: np.ndarray, ranks: int, equal_counts: bool = False) -> np.ndarray:
    """Choose the rank of each item by count times longest; no assignment has a smaller largest cost.

    length: int `[n]`, tokens. Returns int32 `[n]`. Raises ValueError. OrchMLLM section 5.1,
    objective of algorithm 2.
    """
    return balance_conv(length, ranks, 0.0, equal_counts)


def balance_conv(
    length: np.ndarray, ranks: int, lam: float, equal_counts: bool = False
) -> np.ndarray:
    """Choose the rank of each item by count times f(longest); no assignment has a smaller largest cost.

    Contiguous runs of the sorted items suffice. Give the rank with the longest item all of the
    longest items, as many as it holds, in exchange for its own: its cost stays, the others get
    shorter items for longer ones at the same counts, and so on with the next rank. Within a bound
    the longest run from the longest item on leaves the fewest and shortest items to the other
    ranks; the least bound that works is found by bisection.

    length: int `[n]`, tokens; lam: per token. Returns int32 `[n]`. Raises ValueError. OrchMLLM
    appendix A, objective of algorithm 5.
    """
    length = _checked(length, ranks, lam)
    order = longest_first(length)
    min_count, max_count = (
        (len(length) // ranks, -(-len(length) // ranks)) if equal_counts else (0, len(length))
    )
    count = _least_split(_item_cost("conv", length, lam)[order], ranks, min_count, max_count)
    rank = np.empty(len(length), np.int32)
    # Runs of the sorted items: the first count[0] go to rank 0, and so on.
    rank[order] = np.repeat(np.arange(ranks), count)
    return rank


def rank_costs(
    kind: Kind, length: np.ndarray, rank: np.ndarray, ranks: int, lam: float = 0.0
) -> np.ndarray:
    """Compute each rank's cost, float64 `[ranks]`, tokens: those of OrchMLLM section 5.1 and appendix A, alpha = 1.

    length: int `[n]`; rank: int `[n]`; lam: per token, read by quadratic and conv.
    """
    cost = _item_cost(kind, np.asarray(length, np.int64), lam)
    if kind in ("packed", "quadratic"):
        return np.bincount(rank, cost, ranks)
    longest = np.zeros(ranks)
    np.maximum.at(longest, rank, cost)
    return np.bincount(rank, minlength=ranks) * longest


def lower_bound(kind: Kind, length: np.ndarray, ranks: int, lam: float = 0.0) -> float:
    """Bound every assignment's largest cost from below, tokens: the costliest item's cost, and the mean over ranks.

    For packed the mean is rounded up. length: int `[n]`; lam: per token. Raises ValueError.
    """
    cost = _item_cost(kind, _checked(length, ranks, lam), lam)
    mean = cost.sum() / ranks
    return float(max(cost.max(initial=0.0), np.ceil(mean) if kind == "packed" else mean))


def _checked(length: np.ndarray, ranks: int, lam: float = 0.0) -> np.ndarray:
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: at least one is needed")
    if not 0 <= lam < np.inf:
        raise ValueError(f"lam of {lam}: it must be 0 or above, and finite")
    length = np.ascontiguousarray(length, np.int64)
    if length.min(initial=0) < 0:
        raise ValueError("a length is negative")
    return length


def _item_cost(kind: Kind, length: np.ndarray, lam: float) -> np.ndarray:
    """Compute what each item would cost alone, float64 `[n]`."""
    cost = length.astype(np.float64)
    return cost + lam * cost * cost if kind in ("quadratic", "conv") else cost


def _balance_sums(
    weight: np.ndarray,
    order: np.ndarray,
    ranks: int,
    target: float,
    bound: float,
    equal_counts: bool,
) -> np.ndarray:
    n = len(weight)
    rank = np.zeros(n, np.int32)
    load = np.zeros(ranks, weight.dtype)
    place = deal if equal_counts else lpt
    place(weight, order, rank, load)
    polish(weight, order, rank, load, target)
    # Few items leave gaps that exchanges cannot close; so few can be searched through.
    if n <= MOST_ITEMS and load.max() > bound:
        search(
            weight, order, rank, load, *((n // ranks, n % ranks) if equal_counts else (n, 0)), bound
        )
    return rank


@njit(cache=True)
def _least_split(cost, ranks, min_count, max_count):
    """Count the items that each rank takes in turn, int64 [ranks], so that the largest cost is least.

    cost: float64 [n], falling. Bisection between the bound below and the largest cost found so far.
    A bound that fails rules out all up to the next one at which a rank would take an item more, so
    that it ends at the optimum itself.
    """
    count = np.zeros(ranks, np.int64)
    if len(cost) == 0:
        return count
    # Count times longest is at least the sum of a rank's items, so the mean over ranks bounds the
    # largest cost.
    low = max(cost[0], cost.sum() / ranks)
    # Runs of ceil(n / ranks) items, each at the price of the longest, always work.
    high, _ = _split(cost, min_count, max_count, cost[0] * -(-len(cost) // ranks), count)
    while low < high:
        bound = low + (high - low) / 2
        if bound >= high:  # neighbours as floating-point numbers
            bound = low
        # A bound that works is replaced by the cost it reached, one that fails by the next that
        # changes a count: so bisection ends at a cost that occurs.
        largest, following = _split(cost, min_count, max_count, bound, count)
        if largest < np.inf:
            high = largest
        else:
            low = following
    _split(cost, min_count, max_count, high, count)
    return count


@njit(cache=True)
def _split(cost, min_count, max_count, bound, count):
    """Give each rank in turn as many items, longest first, as `bound` and `max_count` allow; writes count.

    Returns the largest cost, infinite where items remain or a rank would get fewer than
    `min_count`; and the next bound above this one that can change a count.
    """
    n = len(cost)
    ranks = len(count)
    begin = 0
    largest = 0.0
    following = np.inf
    for r in range(ranks):
        # The ranks behind this one must get their least, too.
        available = n - begin - (ranks - 1 - r) * min_count
        count[r] = 0
        if available == 0:
            continue
        item_cost = cost[begin]
        fitting = max_count if max_count * item_cost <= bound else int(bound / item_cost)
        while fitting < max_count and (fitting + 1) * item_cost <= bound:  # the division rounds
            fitting += 1
        while fitting * item_cost > bound:
            fitting -= 1
        if fitting < max_count:
            # With this bound the rank would take one item more.
            following = min(following, (fitting + 1) * item_cost)
        count[r] = min(fitting, available)
        if count[r] < min_count:
            return np.inf, following
        begin += count[r]
        largest = max(largest, count[r] * item_cost)
    return (largest if begin == n else np.inf), following


def paper_packed(length: np.ndarray, ranks: int) -> np.ndarray:
    """Give each item, longest first, to the rank with the least sum of lengths: algorithm 1."""
    length = _checked_costs(length, ranks)
    rank = np.zeros(len(length), np.int32)
    lpt(length, longest_first(length), rank, np.zeros(ranks, np.int64))
    return rank


def paper_padded(length: np.ndarray, ranks: int) -> np.ndarray:
    """Cut ascending items into batches within a bound on count times longest, by binary search: algorithm 2.

    As printed, the search runs from the shortest item to (n / d + 1) times it, which may all be too
    little, and the batches are those of the last bound tried, which may be more than d. Mended:
    batch d + i joins batch i, and where the search tries no bound, its upper end is tried.
    """
    length = _checked_costs(length, ranks)
    rank = np.zeros(len(length), np.int32)
    if len(length):
        ascending = longest_first(length)[::-1]
        rank[ascending] = _search_batches(length[ascending], ranks) % ranks
    return rank


def paper_quadratic(length: np.ndarray, ranks: int, tolerance: float) -> np.ndarray:
    """Follow algorithm 4: as 1, but of two sums that differ by less than `tolerance` the lesser sum of squares wins.

    tolerance: v of the paper, tokens. That order is not transitive, so which rank is on top of the
    heap depends on how the heap came about.
    """
    length = _checked_costs(length, ranks)
    rank = np.zeros(len(length), np.int32)
    _lpt_with_tolerance(length, longest_first(length), rank, ranks, float(tolerance))
    return rank


def paper_conv(length: np.ndarray, ranks: int) -> np.ndarray:
    """Batch descending items within algorithm 1's largest sum; what remains goes to the least sums: algorithm 5.

    The paper leaves `b` and `len` undefined. Here b is the bound of its line 2, algorithm 1's
    largest sum, and len the number of batches. Mended: it stops at d batches, not above. As
    printed, an item that joins is compared by its own length, though the batch's first is the
    longest.
    """
    length = _checked_costs(length, ranks)
    order = longest_first(length)
    rank = np.zeros(len(length), np.int32)
    load = np.zeros(ranks, np.int64)
    lpt(length, order, rank, load)
    bound = load.max()
    load = np.zeros(ranks, np.int64)
    batched = _fill_batches(length, order, rank, load, bound)
    lpt(length, order[batched:], rank, load)
    return rank


def _checked_costs(length: np.ndarray, ranks: int) -> np.ndarray:
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: at least one is needed")
    return np.ascontiguousarray(length, np.int64)


@njit(cache=True)
def _search_batches(length, ranks):
    """Return the batch of each item in the last trial, int64 [n]. length: int64 [n], ascending."""
    low = length[0]
    high = int(length[0] * (len(length) / ranks + 1))
    # As printed the search would try no bound at all.
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
    # All sums are 0, so any order is a heap; which one it is decides ties.
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


@njit(cache=True)
def deal(weight, order, rank, load):
    """Deal one item to every rank in each round, the longest to the least loaded: counts differ by at most one."""
    ranks = len(load)
    for begin in range(0, len(order), ranks):
        # Loads change within a round, but each rank gets one item of it, so the order of its start
        # holds.
        lightest = np.argsort(load)
        for i in range(min(ranks, len(order) - begin)):
            item = order[begin + i]
            to = lightest[i]
            rank[item] = to
            load[to] += weight[item]


@njit(cache=True)
def least_largest_load(length, ranks):
    """Bound the fullest rank's least load, int64, as far as sums and divisibility tell. length: int64 [n].

    No less than the longest item and the mean. Where only m items are no multiples of q, at least
    ranks - m ranks hold a multiple of q, and so no more than the multiple at or below the largest
    load. Tried for the greatest common divisor, and that times 2, 4, 8 and so on.
    """
    longest = total = unit = 0
    for value in length:
        longest = max(longest, value)
        total += value
        # Euclid's algorithm: unit becomes gcd(unit, value).
        while value:
            unit, value = value, unit % value
    bound = max(longest, -(-total // ranks))
    # For gcd 64 and bound 1000: ranks that hold only multiples of 64 hold at most 960.
    while 0 < unit <= longest:
        not_multiples = 0
        for value in length:
            not_multiples += value % unit != 0
            if not_multiples >= ranks:
                return bound
        # At most `not_multiples` ranks can hold the bound itself, the others only the multiple of
        # unit below it.
        while (ranks - not_multiples) * (bound // unit * unit) + not_multiples * bound < total:
            # Not all of the total would fit below the bound, so it must be higher.
            bound += 1
        unit *= 2
    return bound
