"""How few rows can hold all samples: proven lower bounds for bin packing in one and more dimensions.

In one dimension Martello and Toth's L2. In two, the configuration linear program: samples are rounded down to types, a
row may hold any multiset of types that fits, and the least (fractional) number of rows that holds all is found by
column generation. Its dual prices prove the bound, whether or not the search has ended.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numba import njit
from scipy.optimize import linprog
from scipy.sparse import coo_array

_LEVELS = 128  # lengths of a dimension that are told apart, for budgets above it
_PRICINGS = 8  # columns sought in a round, one with the true prices and the others with shaken ones
_ROUNDS = 200
_CONVERGED = 1e-4


def rows_lower_bound(lengths: np.ndarray, budget: np.ndarray) -> int:
    """How many rows any grouping needs at least for samples `[n, D]` and row budgets `[D]`.

    The largest of the bounds of all single dimensions and all pairs of dimensions. Raises ValueError for a sample
    above its budget.
    """
    lengths, budget = np.asarray(lengths, np.int64), np.asarray(budget, np.int64)
    if np.any(above := np.any(lengths > budget, axis=1)):
        raise ValueError(f"sample {int(np.argmax(above))} is longer than its row's budget")
    if len(lengths) == 0:
        return 0
    single = max(martello_toth(column, int(b)) for column, b in zip(lengths.T, budget, strict=True))
    pairs = [list(pair) for pair in combinations(range(len(budget)), 2)]
    return max([single, *(configuration_bound(lengths[:, pair], budget[pair]) for pair in pairs)])


def martello_toth(length: np.ndarray, budget: int) -> int:
    """L2 in one dimension, for lengths `[n]` up to the budget.

    For any a <= budget / 2, samples over budget - a have a row alone, those over budget / 2 a row each, and those of
    a .. budget / 2 must go to what these leave or to new rows:
    L2 = max_a n1 + n2 + max(0, ceil((sum_3 - (n2 * budget - sum_2)) / budget)). At a = 0 that is no less than
    ceil(total / budget).
    """
    length = np.sort(length)
    total = np.concatenate([[0], np.cumsum(length)])
    half = np.searchsorted(length, budget // 2, side="right")  # the first that is over budget / 2
    least = np.unique(np.concatenate([[0], length[:half]]))
    alone = np.searchsorted(length, budget - least, side="right")  # the first that is over budget - a
    single = alone - half
    room = single * budget - (total[alone] - total[half])
    small = total[half] - total[np.searchsorted(length, least)]
    return int((len(length) - half + np.maximum(0, -(-(small - room) // budget))).max())


def configuration_bound(lengths: np.ndarray, budget: np.ndarray) -> int:
    """The configuration linear program's bound for two dimensions: samples `[n, 2]`, row budgets `[2]`.

    Lengths are rounded down to at most 128 levels of each budget, so whatever fits a row still does.
    """
    unit = np.maximum(-(-budget // _LEVELS), 1)
    room = budget // unit
    types, count = np.unique(lengths // unit, axis=0, return_counts=True)
    types, count = types[types.any(1)], count[types.any(1)]  # the others take no room
    if len(types) == 0:
        return 0
    columns = [_alone(types, room)]
    rng = np.random.default_rng(0)
    best = 0.0
    for _ in range(_ROUNDS):
        matrix = coo_array(np.concatenate(columns, axis=1))
        solved = linprog(np.ones(matrix.shape[1]), A_ub=-matrix, b_ub=-count, method="highs")
        prices = np.maximum(-solved.ineqlin.marginals, 0)
        worth, held = _dearest_row(types, prices, room)
        best = max(best, float(prices @ count) / max(worth, 1.0))
        if worth <= 1 + _CONVERGED:
            break
        found = [held]
        for _ in range(_PRICINGS - 1):
            held = _dearest_row(types, prices * rng.uniform(0.8, 1.2, len(types)), room)[1]
            if prices @ held > 1 + 1e-6:
                found.append(held)
        columns.append(np.unique(found, axis=0).T)
    return int(np.ceil(best * (1 - 1e-9) - 1e-6))


def _alone(types: np.ndarray, room: np.ndarray) -> np.ndarray:
    """One column for each type: as many of it as a row holds, int64 `[types, types]`."""
    fitting = np.where(types > 0, room // np.maximum(types, 1), np.iinfo(np.int32).max).min(1)
    return np.diag(fitting)


@njit(cache=True)
def _dearest_row(types, prices, room):
    """The dearest multiset of types in a row, and how many of each: knapsack in two dimensions, exact."""
    first, second = room[0] + 1, room[1] + 1
    worth = np.zeros((first, second))
    last = np.full((first, second), -1)
    for a in range(first):
        for b in range(second):
            best, chosen = 0.0, -1
            if a > 0:
                best, chosen = worth[a - 1, b], -2
            if b > 0 and worth[a, b - 1] > best:
                best, chosen = worth[a, b - 1], -3
            for t in range(len(types)):
                x, y = a - types[t, 0], b - types[t, 1]
                if x >= 0 and y >= 0 and (x < a or y < b) and worth[x, y] + prices[t] > best:
                    best, chosen = worth[x, y] + prices[t], t
            worth[a, b], last[a, b] = best, chosen
    held = np.zeros(len(types), np.int64)
    a, b = first - 1, second - 1
    while last[a, b] != -1:
        t = last[a, b]
        if t == -2:
            a -= 1
        elif t == -3:
            b -= 1
        else:
            held[t] += 1
            a -= types[t, 0]
            b -= types[t, 1]
    return worth[first - 1, second - 1], held
