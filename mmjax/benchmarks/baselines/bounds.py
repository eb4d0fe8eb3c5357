"""Lower bounds of how many rows any grouping needs."""

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
    """Bound from below the rows that any grouping needs for samples `[n, D]` and row budgets `[D]`.

    The largest of the bounds of all single dimensions and all pairs of dimensions. Raises
    ValueError for a sample above its budget.
    """
    lengths = np.asarray(lengths, np.int64)
    budget = np.asarray(budget, np.int64)
    if np.any(above := np.any(lengths > budget, axis=1)):
        raise ValueError(f"sample {int(np.argmax(above))} is longer than its row's budget")
    if len(lengths) == 0:
        return 0
    single = max(martello_toth(column, int(b)) for column, b in zip(lengths.T, budget, strict=True))
    pairs = [list(pair) for pair in combinations(range(len(budget)), 2)]
    return max([single, *(configuration_bound(lengths[:, pair], budget[pair]) for pair in pairs)])


def martello_toth(length: np.ndarray, budget: int) -> int:
    """Compute L2 in one dimension, for lengths `[n]` up to the budget.

    For any a <= budget / 2, samples over budget - a have a row alone, those over budget / 2 a row
    each, and those of a .. budget / 2 must go to what these leave or to new rows: L2 = max_a n1 +
    n2 + max(0, ceil((sum_3 - (n2 * budget - sum_2)) / budget)). At a = 0 that is no less than
    ceil(total / budget).
    """
    length = np.sort(length)
    total = np.concatenate([[0], np.cumsum(length)])
    # the first that is over budget / 2
    first_large = np.searchsorted(length, budget // 2, side="right")
    threshold = np.unique(np.concatenate([[0], length[:first_large]]))
    # the first that is over budget - a
    first_alone = np.searchsorted(length, budget - threshold, side="right")
    single = first_alone - first_large
    free = single * budget - (total[first_alone] - total[first_large])
    small = total[first_large] - total[np.searchsorted(length, threshold)]
    return int((len(length) - first_large + np.maximum(0, -(-(small - free) // budget))).max())


def configuration_bound(lengths: np.ndarray, budget: np.ndarray) -> int:
    """Compute the configuration linear program's bound for two dimensions: samples `[n, 2]`, row budgets `[2]`.

    Lengths are rounded down to at most 128 levels of each budget, so whatever fits a row still
    does.
    """
    unit = np.maximum(-(-budget // _LEVELS), 1)
    capacity = budget // unit
    types, count = np.unique(lengths // unit, axis=0, return_counts=True)
    count = count[types.any(1)]  # samples of type 0, 0 take no room
    types = types[types.any(1)]
    if len(types) == 0:
        return 0
    # One column for each type: as many of it as a row holds.
    fitting = np.where(types > 0, capacity // np.maximum(types, 1), np.iinfo(np.int32).max).min(1)
    columns = [np.diag(fitting)]
    rng = np.random.default_rng(0)
    best = 0.0
    for _ in range(_ROUNDS):
        matrix = coo_array(np.concatenate(columns, axis=1))
        solution = linprog(np.ones(matrix.shape[1]), A_ub=-matrix, b_ub=-count, method="highs")
        prices = np.maximum(-solution.ineqlin.marginals, 0)
        row_price, row_counts = _dearest_row(types, prices, capacity)
        best = max(best, float(prices @ count) / max(row_price, 1.0))
        if row_price <= 1 + _CONVERGED:
            break
        shaken = prices * rng.uniform(0.8, 1.2, (_PRICINGS - 1, len(types)))
        others = [_dearest_row(types, p, capacity)[1] for p in shaken]
        new_columns = [row_counts, *(c for c in others if prices @ c > 1 + 1e-6)]
        columns.append(np.unique(new_columns, axis=0).T)
    return int(np.ceil(best * (1 - 1e-9) - 1e-6))


@njit(cache=True)
def _dearest_row(types, prices, capacity):
    """Find the dearest multiset of types in a row: its price, and how many of each. Exact 2-D knapsack."""
    # Best price of a row of each smaller capacity [a, b], and the type that was added last, -1: none.
    rows = capacity[0] + 1
    columns = capacity[1] + 1
    price = np.zeros((rows, columns))
    last = np.full((rows, columns), -1)
    for a in range(rows):
        for b in range(columns):
            for t in range(len(types)):
                rest_a, rest_b = a - types[t, 0], b - types[t, 1]
                if rest_a >= 0 and rest_b >= 0 and price[rest_a, rest_b] + prices[t] > price[a, b]:
                    price[a, b], last[a, b] = price[rest_a, rest_b] + prices[t], t
    row_counts = np.zeros(len(types), np.int64)
    a, b = rows - 1, columns - 1
    while last[a, b] >= 0:
        t = last[a, b]
        row_counts[t] += 1
        a -= types[t, 0]
        b -= types[t, 1]
    return price[rows - 1, columns - 1], row_counts
