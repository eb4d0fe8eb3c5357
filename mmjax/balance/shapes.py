"""Few shapes for many steps: row lengths of all modules, to be compiled ahead, that waste as little as possible."""

from __future__ import annotations

import numpy as np
from numba import njit

_MOST_NEEDS = 768  # clustering compares all pairs
_PASSES = 4


def choose_shapes(
    needs: np.ndarray, cost: np.ndarray, limit: int = 8, alignment: int | np.ndarray = 8, worth: float = 0.0
) -> np.ndarray:
    """At most `limit` tuples of row lengths, int64 `[k, M]`, cheapest first; the last holds every need seen.

    needs: int `[S, M]`, each step's fullest row per module. cost: float `[M]`, of one more position in each of a
    module's rows. Minimises the cost of all steps, each with the cheapest tuple that holds it: needs are merged in
    pairs, least added cost first, then single lengths are moved while that helps. Lengths are multiples of `alignment`
    (of each one's, where it is `[M]`). worth: as few tuples as cost at most this share more. Raises ValueError without
    needs.
    """
    needs = np.asarray(needs, np.int64)
    if len(needs) == 0 or limit < 1:
        raise ValueError("shapes need at least one step to be chosen from, and a limit of at least 1")
    cost = np.asarray(cost, np.float64)
    needs, count = np.unique(-(-needs // alignment) * alignment, axis=0, return_counts=True)
    if worth > 0:
        some = [_choose(needs, count, cost, k) for k in range(1, limit + 1)]
        total = [_total(needs, count.astype(np.float64), shapes, cost) for shapes in some]
        return next(shapes for shapes, t in zip(some, total, strict=True) if t <= (1 + worth) * min(total))
    return _choose(needs, count, cost, limit)


def _choose(needs: np.ndarray, count: np.ndarray, cost: np.ndarray, limit: int) -> np.ndarray:
    largest = needs.max(0)
    chosen, weight = _spread(needs, count, cost)
    # A need as large as the largest tuple is no cluster of its own: the last tuple is there in any case.
    inner = np.any(chosen < largest, axis=1)
    shapes = _merge(chosen[inner], weight[inner].astype(np.float64), cost, largest, limit - 1)
    shapes = _refine(needs, count.astype(np.float64), np.concatenate([shapes, largest[None]]), cost)
    shapes = np.unique(shapes, axis=0)
    return shapes[np.lexsort((*shapes.T, shapes @ cost))]


def assign(need: np.ndarray, shapes: np.ndarray) -> int:
    """The first, thus cheapest, of the shapes `[k, M]` that holds the need `[M]`, or -1."""
    holds = np.all(np.asarray(need) <= shapes, axis=1)
    return int(np.argmax(holds)) if holds.any() else -1


def _spread(needs: np.ndarray, count: np.ndarray, cost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most so many needs as can be compared in pairs, evenly over their costs, with the steps each stands for."""
    if len(needs) <= _MOST_NEEDS:
        return needs, count
    by_cost = np.argsort(needs @ cost, kind="stable")
    groups = np.array_split(by_cost, _MOST_NEEDS)
    return needs[[g[-1] for g in groups]], np.array([count[g].sum() for g in groups])


def _merge(needs: np.ndarray, weight: np.ndarray, cost: np.ndarray, largest: np.ndarray, limit: int) -> np.ndarray:
    """Merge needs, or leave them to the largest tuple, until `limit` are left: int64 `[<= limit, M]`."""
    shapes, alive = needs.copy(), np.ones(len(needs), bool)
    _merge_pairs(shapes, weight.copy(), alive, cost, largest, limit)
    return shapes[alive]


@njit(cache=True)
def _added(shapes, weight, cost, i, j):
    """What it costs to run the steps of shapes i and j in one shape that holds both."""
    added = 0.0
    for k in range(len(cost)):
        both = max(shapes[i, k], shapes[j, k])
        added += cost[k] * (weight[i] * (both - shapes[i, k]) + weight[j] * (both - shapes[j, k]))
    return added


@njit(cache=True)
def _nearest(shapes, weight, alive, cost, i):
    """The shape that is cheapest to merge with shape i, and what that adds."""
    best, least = -1, np.inf
    for j in range(len(shapes)):
        if alive[j] and j != i:
            added = _added(shapes, weight, cost, i, j)
            if added < least:
                best, least = j, added
    return best, least


@njit(cache=True)
def _merge_pairs(shapes, weight, alive, cost, largest, limit):
    """Merge the cheapest pair, or leave one shape's steps to the largest, until `limit` are alive; in place."""
    n = len(shapes)
    near, added = np.full(n, -1), np.full(n, np.inf)
    for i in range(n):
        near[i], added[i] = _nearest(shapes, weight, alive, cost, i)
    for _ in range(n - limit):
        best, least, into_largest = -1, np.inf, False
        for i in range(n):
            if not alive[i]:
                continue
            if added[i] < least:
                best, least, into_largest = i, added[i], False
            to_largest = 0.0
            for k in range(len(cost)):
                to_largest += weight[i] * cost[k] * (largest[k] - shapes[i, k])
            if to_largest < least:
                best, least, into_largest = i, to_largest, True
        gone = best
        merged = -1
        if not into_largest:
            merged, gone = best, near[best]
            weight[merged] += weight[gone]
            for k in range(len(cost)):
                shapes[merged, k] = max(shapes[merged, k], shapes[gone, k])
        alive[gone] = False
        for i in range(n):
            if alive[i] and (i == merged or near[i] == gone or near[i] == merged):
                near[i], added[i] = _nearest(shapes, weight, alive, cost, i)
            elif alive[i] and merged >= 0 and _added(shapes, weight, cost, i, merged) < added[i]:
                near[i], added[i] = merged, _added(shapes, weight, cost, i, merged)


def _refine(needs: np.ndarray, count: np.ndarray, shapes: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Move one length of one tuple at a time, not of the last, to the value of some need while that is cheaper."""
    shapes = shapes.copy()
    least = _total(needs, count, shapes, cost)
    values = [np.unique(column) for column in needs.T]
    for _ in range(_PASSES):
        before = least
        for j in range(len(shapes) - 1):
            for k in range(needs.shape[1]):
                kept = shapes[j, k]
                for value in values[k]:
                    shapes[j, k] = value
                    total = _total(needs, count, shapes, cost)
                    if total < least:
                        kept, least = value, total
                shapes[j, k] = kept
        if least == before:
            break
    return shapes


@njit(cache=True)
def _total(needs, count, shapes, cost):
    """What all steps cost, each with the cheapest shape that holds it."""
    price = np.zeros(len(shapes))
    for j in range(len(shapes)):
        for k in range(len(cost)):
            price[j] += shapes[j, k] * cost[k]
    total = 0.0
    for i in range(len(needs)):
        least = np.inf
        for j in range(len(shapes)):
            if price[j] < least:
                holds = True
                for k in range(len(cost)):
                    holds = holds and needs[i, k] <= shapes[j, k]
                if holds:
                    least = price[j]
        total += count[i] * least
    return total
