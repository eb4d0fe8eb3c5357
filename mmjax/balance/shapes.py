"""Few shapes for many steps: row lengths of all modules, to be compiled ahead, that waste as little as possible."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_MOST_NEEDS = 768  # clustering compares all pairs
_PASSES = 4
_MOST_EXCHANGING = 3  # tuples; the others send nothing


def choose_shapes(
    needs: np.ndarray,
    cost: np.ndarray,
    limit: int = 8,
    alignment: int | np.ndarray = 8,
    worth: float = 0.0,
    widths: int = 0,
) -> np.ndarray:
    """Choose at most `limit` tuples of row lengths, int64 `[k, M]`, cheapest first; the last holds every step seen.

    needs: int `[S, M]`, each step's fullest row per module, or `[S, O, M]` where a step can be
    placed in O ways. cost: float `[M]`, of one more position in each of a module's rows. Minimises
    the cost of all steps, each with the cheapest tuple that holds it: needs are merged in pairs,
    least added cost first, then single lengths are moved while that helps. Lengths are multiples of
    `alignment` (of each one's, where it is `[M]`). worth: as few tuples as cost at most this share
    more. widths: how many of the last columns are widths of exchanges. Where every step has a way
    that sends nothing, no step takes a tuple that would send only padding, and the last tuple sends
    nothing. Raises ValueError without needs.
    """
    needs = np.asarray(needs, np.int64)
    if len(needs) == 0 or limit < 1:
        raise ValueError(
            "shapes need at least one step to be chosen from, and a limit of at least 1"
        )
    # Rounded up to the alignment; a step with one way only gets an axis of one.
    needs = -(-(needs if needs.ndim == 3 else needs[:, None]) // alignment) * alignment
    # Equal steps are merged into one need with a count.
    needs, count = np.unique(needs, axis=0, return_counts=True)
    steps = _Steps(
        needs, count.astype(np.float64), np.asarray(cost, np.float64), _sends_nothing(needs, widths)
    )
    if worth > 0:
        # The smallest number of tuples whose cost is close to that of all: every tuple costs a
        # compilation.
        some = [_choose(steps, k) for k in range(1, limit + 1)]
        total = [_total(*steps, shapes) for shapes in some]
        return next(
            shapes for shapes, t in zip(some, total, strict=True) if t <= (1 + worth) * min(total)
        )
    return _choose(steps, limit)


class _Steps(NamedTuple):
    """Steps to choose shapes for. width_start: where the columns of widths begin, or M where padding may be sent."""

    needs: np.ndarray  # int64 [S, O, M]
    count: np.ndarray  # float64 [S]
    cost: np.ndarray  # float64 [M]
    width_start: int


def _sends_nothing(needs: np.ndarray, widths: int) -> int:
    """Return where the columns of widths begin, or all columns where a step has no way that sends nothing."""
    first = needs.shape[2] - widths
    # Every step must have some way in which all its widths are 0.
    return first if np.all((needs[:, :, first:] == 0).all(2).any(1)) else needs.shape[2]


def _choose(steps: _Steps, limit: int) -> np.ndarray:
    """Choose how many tuples exchange, the others being for steps that send nothing: the cheapest of several tries."""
    price = steps.needs @ steps.cost
    # Ways in which a step sends nothing, and the cheapest way of each kind.
    resting = np.all(steps.needs[:, :, steps.width_start :] == 0, axis=2)
    rest, rest_price = _cheapest(steps.needs, np.where(resting, price, np.inf))
    move, move_price = _cheapest(steps.needs, np.where(resting, np.inf, price))
    # Steps for which sending would be cheaper, if there were a tuple for it.
    moving = np.flatnonzero(move_price < rest_price)
    best = None
    min_total = np.inf
    for exchanging in range(min(limit, _MOST_EXCHANGING + 1) if len(moving) else 1):
        shapes = _merge_resting(rest, steps, limit - exchanging)
        otherwise = _least(*steps._replace(needs=rest[:, None]), shapes)
        some = moving[move_price[moving] < otherwise[moving]]
        if exchanging and len(some):
            other_cost = steps.count[some] * otherwise[some]
            shapes = np.concatenate(
                [_merge(move[some], steps, steps.count[some], other_cost, exchanging), shapes]
            )
        total = _total(*steps, shapes)
        if total < min_total:
            best = shapes
            min_total = total
    assert best is not None
    shapes = np.unique(_refine(steps, best), axis=0)
    # One that costs more than the largest, which holds everything, is never taken.
    largest = best[-1]
    shapes = shapes[
        np.all(shapes == largest, axis=1) | (shapes @ steps.cost < largest @ steps.cost)
    ]
    return shapes[np.lexsort((*shapes.T, shapes @ steps.cost))]


def _cheapest(needs: np.ndarray, price: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each step's cheapest need, int64 `[S, M]`, and its price `[S]`. needs: `[S, O, M]`, price: `[S, O]`."""
    way = price.argmin(1)
    steps = np.arange(len(needs))
    return needs[steps, way], price[steps, way]


def _merge_resting(needs: np.ndarray, steps: _Steps, limit: int) -> np.ndarray:
    """Merge needs `[S, M]` into at most `limit` tuples, int64 `[k, M]`; the last is as long as the largest of each."""
    largest = needs.max(0)
    chosen, weight = _spread(needs, steps)
    # A need as large as the largest tuple is no cluster of its own: the last tuple is there in any
    # case.
    inner = np.any(chosen < largest, axis=1)
    other_cost = weight[inner] * (largest @ steps.cost)
    return np.concatenate(
        [_merge(chosen[inner], steps, weight[inner], other_cost, limit - 1), largest[None]]
    )


def assign(need: np.ndarray, shapes: np.ndarray) -> int:
    """Return the first, thus cheapest, of the shapes `[k, M]` that holds the need `[M]`, or -1."""
    holds = np.all(np.asarray(need) <= shapes, axis=1)
    return int(np.argmax(holds)) if holds.any() else -1


def _spread(needs: np.ndarray, steps: _Steps) -> tuple[np.ndarray, np.ndarray]:
    """Pick as many needs as can be compared in pairs, evenly over their costs, with the steps each stands for."""
    if len(needs) <= _MOST_NEEDS:
        return needs, steps.count
    by_cost = np.argsort(needs @ steps.cost, kind="stable")
    # Neighbours in cost are alike; the most expensive of each group stands for it.
    groups = np.array_split(by_cost, _MOST_NEEDS)
    return needs[[g[-1] for g in groups]], np.array([steps.count[g].sum() for g in groups])


def _merge(
    needs: np.ndarray, steps: _Steps, weight: np.ndarray, other_cost: np.ndarray, limit: int
) -> np.ndarray:
    """Merge needs, or leave them to other tuples, until `limit` remain: int64 `[<= limit, M]`.

    other_cost: float64 `[n]`, what a need's steps cost in other tuples.
    """
    shapes = needs.copy()
    alive = np.ones(len(needs), bool)
    _merge_pairs(
        shapes, weight.copy(), other_cost.copy(), alive, steps.cost, steps.width_start, limit
    )
    return shapes[alive]


@njit(cache=True)
def _added(shapes, weight, cost, width_start, i, j):
    """Compute the added cost of running the steps of shapes i and j in one shape that holds both."""
    added = 0.0
    for k in range(len(cost)):
        # One would then send padding in the other's steps: never merged.
        if k >= width_start and (shapes[i, k] == 0) != (shapes[j, k] == 0):
            return np.inf
        both = max(shapes[i, k], shapes[j, k])
        added += cost[k] * (weight[i] * (both - shapes[i, k]) + weight[j] * (both - shapes[j, k]))
    return added


@njit(cache=True)
def _nearest(shapes, weight, alive, cost, width_start, i):
    """Find the shape that is cheapest to merge with shape i, and what that adds."""
    best = -1
    min_added = np.inf
    for j in range(len(shapes)):
        if alive[j] and j != i:
            added = _added(shapes, weight, cost, width_start, i, j)
            if added < min_added:
                best = j
                min_added = added
    return best, min_added


@njit(cache=True)
def _merge_pairs(shapes, weight, other_cost, alive, cost, width_start, limit):
    """Merge the cheapest pair, or leave one shape's steps to other shapes, until `limit` are alive; in place."""
    n = len(shapes)
    # Nearest neighbours are remembered, so that a turn costs n comparisons and not n^2.
    near = np.full(n, -1)
    added = np.full(n, np.inf)
    for i in range(n):
        near[i], added[i] = _nearest(shapes, weight, alive, cost, width_start, i)
    # Each turn removes one shape: merged into another, or left to other tuples.
    for _ in range(n - limit):
        best = -1
        min_cost = np.inf
        leave = False
        for i in range(n):
            if not alive[i]:
                continue
            if added[i] < min_cost:
                best = i
                min_cost = added[i]
                leave = False
            # What its steps would cost more in other tuples than in their own.
            elsewhere = other_cost[i]
            for k in range(len(cost)):
                elsewhere -= weight[i] * cost[k] * shapes[i, k]
            if elsewhere < min_cost:
                best = i
                min_cost = elsewhere
                leave = True
        removed = best
        merged = -1
        if not leave:
            merged = best
            removed = near[best]
            weight[merged] += weight[removed]
            other_cost[merged] += other_cost[removed]
            for k in range(len(cost)):
                shapes[merged, k] = max(shapes[merged, k], shapes[removed, k])
        alive[removed] = False
        for i in range(n):
            if alive[i] and (i == merged or near[i] == removed or near[i] == merged):
                near[i], added[i] = _nearest(shapes, weight, alive, cost, width_start, i)
            # Only distances to the merged shape have changed: all others stand.
            elif (
                alive[i]
                and merged >= 0
                and _added(shapes, weight, cost, width_start, i, merged) < added[i]
            ):
                near[i] = merged
                added[i] = _added(shapes, weight, cost, width_start, i, merged)


def _refine(steps: _Steps, shapes: np.ndarray) -> np.ndarray:
    """Move one length of one tuple at a time, not of the last, to the value of some need while that is cheaper."""
    shapes = shapes.copy()
    min_total = _total(*steps, shapes)
    values = [np.unique(column) for column in steps.needs.reshape(-1, shapes.shape[1]).T]
    for _ in range(_PASSES):
        previous = min_total
        # The last tuple must go on holding every step.
        for j in range(len(shapes) - 1):
            for k in range(shapes.shape[1]):
                best_value = shapes[j, k]
                for value in values[k]:
                    shapes[j, k] = value
                    total = _total(*steps, shapes)
                    if total < min_total:
                        best_value = value
                        min_total = total
                shapes[j, k] = best_value
        if min_total == previous:
            break
    return shapes


@njit(cache=True)
def _total(needs, count, cost, width_start, shapes):
    """Sum the cost of all steps, each with the cheapest shape that holds it."""
    return (count * _least(needs, count, cost, width_start, shapes)).sum()


@njit(cache=True)
def _least(needs, count, cost, width_start, shapes):
    """Price each step with the cheapest shape that holds it in one of its ways and sends no mere padding."""
    price = np.zeros(len(shapes))
    for j in range(len(shapes)):
        for k in range(len(cost)):
            price[j] += shapes[j, k] * cost[k]
    min_price = np.full(len(needs), np.inf)
    for i in range(len(needs)):
        for o in range(needs.shape[1]):
            for j in range(len(shapes)):
                # Whether the shape holds the step is checked only where it would be cheaper.
                if price[j] < min_price[i]:
                    holds = True
                    for k in range(len(cost)):
                        holds = holds and needs[i, o, k] <= shapes[j, k]
                        # A width that this step does not need must be 0, or mere padding would
                        # travel.
                        holds = holds and (
                            k < width_start or needs[i, o, k] > 0 or shapes[j, k] == 0
                        )
                    if holds:
                        min_price[i] = price[j]
    return min_price
