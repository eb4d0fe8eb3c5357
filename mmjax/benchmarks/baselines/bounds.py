"""Lower bounds and exhaustive searches of small placements."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numba import njit
from scipy.optimize import linprog
from scipy.sparse import coo_array

MOST_ITEMS = 12  # of any lengths, on any number of ranks, the search takes well below a millisecond


@njit(cache=True)
def search(weight, order, rank, load, capacity, extra, bound):
    """Replace the assignment in rank and load by the first better one found, again and again until none is better.

    weight: [n], int64 or float64; order: int64 [n], longest first; rank: int32 [n]; load: [ranks]
    of weight's type. A rank holds up to `capacity` items, and `extra` ranks one more. Ends early at
    a largest load of `bound`.
    """
    last = len(order) - 1
    largest = load.max()
    trial = np.zeros_like(load)
    count = np.zeros(len(load), np.int64)
    # By depth of the search: the rank that the item is on, -1 = on none yet, and that rank's load
    # without it.
    trial_rank = np.full(len(order), -1)
    load_before = np.zeros_like(weight)
    depth = 0
    while depth >= 0 and largest > bound:
        item_weight = weight[order[depth]]
        r = trial_rank[depth]
        # the search is back at this item: take it off its rank before trying the next one
        if r >= 0:
            trial[r] = load_before[depth]
            count[r] -= 1
            extra += count[r] == capacity
        r = _next(r + 1, item_weight, trial, count, capacity, extra, largest)
        trial_rank[depth] = r
        if r < 0:  # no rank improves on the best assignment
            depth -= 1
            continue
        load_before[depth] = trial[r]
        trial[r] += item_weight
        extra -= count[r] == capacity
        count[r] += 1
        if depth < last:
            depth += 1
            continue
        rank[order] = trial_rank
        load[:] = trial
        largest = trial.max()


@njit(cache=True)
def _next(first, item_weight, trial, count, capacity, extra, largest):
    """Find the next rank from `first` on that stays below `largest` and differs from all ranks before it, or -1."""
    for r in range(first, len(trial)):
        if trial[r] + item_weight >= largest or count[r] >= capacity + (extra > 0):
            continue
        distinct = True  # an equal earlier rank was tried with the same outcome
        for earlier in range(r):
            distinct = distinct and not (trial[earlier] == trial[r] and count[earlier] == count[r])
        if distinct:
            return r
    return -1


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
    columns = [_single_type_columns(types, capacity)]
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
        new_columns = [row_counts]
        for _ in range(_PRICINGS - 1):
            row_counts = _dearest_row(types, prices * rng.uniform(0.8, 1.2, len(types)), capacity)[
                1
            ]
            if prices @ row_counts > 1 + 1e-6:
                new_columns.append(row_counts)
        columns.append(np.unique(new_columns, axis=0).T)
    return int(np.ceil(best * (1 - 1e-9) - 1e-6))


def _single_type_columns(types: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Return one column for each type: as many of it as a row holds, int64 `[types, types]`."""
    fitting = np.where(types > 0, capacity // np.maximum(types, 1), np.iinfo(np.int32).max).min(1)
    return np.diag(fitting)


@njit(cache=True)
def _dearest_row(types, prices, capacity):
    """Find the dearest multiset of types in a row: its price, and how many of each. Exact 2-D knapsack."""
    # Best price of each smaller row [a, b] and its last step: a type; -2: as [a - 1, b]; -3: as [a,
    # b - 1]; -1: none.
    rows = capacity[0] + 1
    columns = capacity[1] + 1
    price = np.zeros((rows, columns))
    last = np.full((rows, columns), -1)
    for a in range(rows):
        for b in range(columns):
            best, chosen = 0.0, -1
            if a > 0:
                best, chosen = price[a - 1, b], -2
            if b > 0 and price[a, b - 1] > best:
                best, chosen = price[a, b - 1], -3
            for t in range(len(types)):
                rest_a, rest_b = a - types[t, 0], b - types[t, 1]
                if (
                    rest_a >= 0
                    and rest_b >= 0
                    and (rest_a < a or rest_b < b)
                    and price[rest_a, rest_b] + prices[t] > best
                ):
                    best, chosen = price[rest_a, rest_b] + prices[t], t
            price[a, b] = best
            last[a, b] = chosen
    row_counts = np.zeros(len(types), np.int64)
    a, b = rows - 1, columns - 1
    while last[a, b] != -1:
        t = last[a, b]
        if t == -2:
            a -= 1
        elif t == -3:
            b -= 1
        else:
            row_counts[t] += 1
            a -= types[t, 0]
            b -= types[t, 1]
    return price[rows - 1, columns - 1], row_counts
