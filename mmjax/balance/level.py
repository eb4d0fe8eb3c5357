"""Level attention between columns whose rows are filled: exchanges of samples that leave every row within its length.

Rows are computed with their padding, so that equally long rows take equally long however full they
are, but for attention: its pairs grow with the square of a sample's length. One long sample is
exchanged for several short ones of about as many positions. Positions are a limit here, and pairs
are what is made equal: to add both up as one cost would fill rows unevenly, and the fullest one
decides how long all are.

A column is what one rank computes at a time: rows of every module of a microbatch, with all parts
of its samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.balance.parts import Parts
from mmjax.balance.waits import Prices, least_fullest

_WASTE = 0.003  # of a step's time, that ranks may wait
_EVEN = 1e-4  # above the mean: a phase whose fullest column has no more is equal by itself
_ROUNDS = 16
_PARTNERS = 12  # columns that a column above its goal tries to exchange with
_WORST = 4  # columns of a round that try many, since all others wait for the worst
_WORST_PARTNERS = 256
_HEAVIEST = 4  # samples of a column that are tried
_SHORTER = (1.0, 0.4, 0.15)  # of the sample, that those in exchange for it have at most
_MOST = 96  # samples in exchange for one
_SPARE_PLACES = 32
_LEAST_GAIN = 0.02  # of a column's excess
_ENOUGH = 0.5  # of a column's excess: an exchange that wins as much is done without looking further
_STUCK = 2  # rounds without an exchange, after which a column is left alone
# of the excess of a worst column that cannot be relieved: others need not be better
_NEARLY_WORST = 0.97


def level(
    parts: Parts,
    column: np.ndarray,
    columns: int,
    rows: np.ndarray,
    length: np.ndarray,
    prices: Prices,
) -> np.ndarray:
    """Exchange samples between columns so that the fullest has least attention: the column of each part, int64 `[p]`.

    column: int `[p]`, in whose rows the parts are; a sample with parts in several stays where it
    is. rows: int64 `[M]`, of a column. length: int64 `[M]`, of a row. Where a column has several
    rows, its parts fit them longest first to the emptiest. Deterministic; `column` itself is
    returned where nothing is gained.

    One sample of 8 tokens, with 64 pairs, is exchanged for four of 2, with 4 pairs each:

        column 0   8 8               128 pairs   becomes   8 2 2 2 2    80 pairs
        column 1   2 2 2 2 2 2 2 2    32 pairs             8 2 2 2 2    80 pairs

    >>> length = np.array([8, 8, 2, 2, 2, 2, 2, 2, 2, 2])
    >>> parts = Parts(np.arange(11), np.zeros(10, np.int32), length, length**2)
    >>> one_row, of_16, price = np.array([1]), np.array([16]), Prices(np.ones(1), np.ones(1))
    >>> level(parts, np.array([0, 0] + [1] * 8), 2, one_row, of_16, price).tolist()
    [1, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    """
    modules = len(rows)
    if columns < 2 or len(column) == 0 or not prices.pair.any():
        return column
    start, fixed = _units(parts.sample_start, column)
    unit = np.repeat(np.arange(len(fixed)), np.diff(start))
    flat = unit * modules + parts.module
    seconds = (
        np.bincount(flat, parts.pairs, len(fixed) * modules).reshape(-1, modules) * prices.pair
    )
    unit_column = column[start[:-1]].astype(np.int64)
    phases, goal, enough = _goals(
        seconds, unit_column, columns, float(prices.position @ (rows * length))
    )
    if not len(phases):
        return column
    total = np.rint(np.bincount(flat, parts.length, len(fixed) * modules)).astype(np.int64)
    levelled = unit_column.copy()
    units = _Units(
        total=total.reshape(-1, modules),
        seconds=np.ascontiguousarray(seconds[:, phases]),
        fixed=fixed,
        start=start,
        module=parts.module,
        length=parts.length,
    )
    _exchange_all(units, rows, length, goal, enough, columns, levelled)
    before, after = (_loads(units.seconds, c, columns).max(0) for c in (unit_column, levelled))
    return levelled[unit] if after.sum() < before.sum() else column


def _units(start: np.ndarray, column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what is exchanged as a whole: its first part, int64 `[u + 1]`, and what stays, bool `[u]`.

    Those are samples, and of samples with parts in several columns each part, which stays.
    """
    count = np.diff(start)
    away = column != np.repeat(column[start[:-1]], count)
    if not away.any():
        return start, np.zeros(len(count), bool)
    divided = np.repeat(np.logical_or.reduceat(away, start[:-1]), count)
    first = divided.copy()
    first[start[:-1]] = True
    begin = np.flatnonzero(first)
    return np.append(begin, len(column)), divided[begin]


def _loads(seconds: np.ndarray, column: np.ndarray, columns: int) -> np.ndarray:
    """Sum the seconds of each column, float64 `[columns, M]`."""
    return np.stack([np.bincount(column, phase, columns) for phase in seconds.T], axis=1)


def _goals(
    seconds: np.ndarray, column: np.ndarray, columns: int, of_rows: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Choose the phases to level, none where all are even enough; what their columns may have; what is good enough.

    of_rows: seconds that a column takes beside its attention. The last of the three is a squared
    excess.
    """
    load = _loads(seconds, column, columns)
    fullest = load.max(0)
    mean = load.mean(0)
    step = of_rows + mean.sum()
    bound = least_fullest(seconds, columns)
    high = fullest - bound > _WASTE * step / len(mean)
    if not high.any():
        return np.zeros(0, np.int64), mean, 0.0
    # A phase that is even by itself, as of tiles, stays so whatever is exchanged; one that is even
    # enough may not get worse than it is, or it would take what the others lose.
    phases = np.flatnonzero(high | (fullest > mean * (1 + _EVEN)))
    goal = np.where(high, bound + _WASTE * step / (2 * high.sum()), fullest)
    return phases, goal[phases], (_WASTE * step / 4) ** 2


class _Units(NamedTuple):
    """Samples, which are exchanged as a whole; or parts of one that lies in several columns, which stay."""

    total: np.ndarray  # int64 [u, M] positions
    seconds: np.ndarray  # float64 [u, phases]
    fixed: np.ndarray  # bool [u], those that stay
    start: np.ndarray  # int64 [u + 1], first part of each
    module: np.ndarray  # int [p]
    length: np.ndarray  # int64 [p]


class _State(NamedTuple):
    """Samples of every column, what is free in it, and the seconds of its phases."""

    sample: np.ndarray  # int64 [columns, places]
    count: np.ndarray  # int64 [columns]
    free: np.ndarray  # int64 [columns, M] positions
    load: np.ndarray  # float64 [columns, phases]
    total: np.ndarray  # as in _Units
    seconds: np.ndarray
    fixed: np.ndarray
    weight: np.ndarray  # float64 [M], of a squared difference of positions


class _Exchange(NamedTuple):
    """One sample for several, by their places in their columns."""

    place: int  # -1: none
    partner: int
    in_return: np.ndarray  # int64 [k]


@njit(cache=True)
def _exchange_all(units, rows, length, goal, enough, columns, column):
    """Exchange until no column is above the goals [phases] by more than `enough`, for a number of rounds.

    Writes column.
    """
    state = _build(units, rows * length, columns, column)
    phases = len(goal)
    excess = np.empty(columns)
    for c in range(columns):
        excess[c] = _excess(state.load[c], goal)
    stuck = np.zeros(columns, np.int64)
    lightest = np.empty((phases, columns), np.int64)
    for _ in range(_ROUNDS):
        order = np.argsort(-excess, kind="mergesort")
        if excess[order[0]] <= enough:
            break
        for p in range(phases):
            lightest[p] = np.argsort(state.load[:, p], kind="mergesort")
        changed = False
        visited = 0
        for heavy in order:
            if excess[heavy] <= enough:
                break
            if stuck[heavy] >= _STUCK:
                if visited == 0:  # all wait for this one
                    enough = max(enough, excess[heavy] * _NEARLY_WORST)
                continue
            phase = np.argmax(state.load[heavy] - goal)
            exchange = _best_exchange(state, heavy, phase, lightest[phase], goal, visited)
            visited += 1
            if exchange.place < 0 or not _do(state, heavy, exchange, units, rows, length, column):
                stuck[heavy] += 1
                continue
            stuck[heavy] = 0
            changed = True
            for c in (heavy, exchange.partner):
                excess[c] = _excess(state.load[c], goal)
        if not changed:
            break


@njit(cache=True)
def _build(units, room, columns, column):
    count = np.zeros(columns, np.int64)
    for c in column:
        count[c] += 1
    sample = np.empty((columns, 2 * count.max() + _SPARE_PLACES), np.int64)
    state = _State(
        sample,
        np.zeros(columns, np.int64),
        np.zeros((columns, units.total.shape[1]), np.int64),
        np.zeros((columns, units.seconds.shape[1])),
        units.total,
        units.seconds,
        units.fixed,
        1.0 / np.maximum(room, 1) ** 2.0,
    )
    for c in range(columns):
        state.free[c] = room
    for s in range(len(column)):
        _put(state, s, column[s])
    return state


@njit(cache=True)
def _put(state, s, c):
    state.sample[c, state.count[c]] = s
    state.count[c] += 1
    state.free[c] -= state.total[s]
    state.load[c] += state.seconds[s]


@njit(cache=True)
def _take(state, s, c):
    """Take a sample out of its column; the last one comes to its place."""
    place = 0
    while state.sample[c, place] != s:
        place += 1
    state.count[c] -= 1
    state.sample[c, place] = state.sample[c, state.count[c]]
    state.free[c] += state.total[s]
    state.load[c] -= state.seconds[s]


@njit(cache=True)
def _excess(load, goal):
    total = 0.0
    for p in range(len(goal)):
        above = max(load[p] - goal[p], 0.0)
        total += above * above
    return total


@njit(cache=True)
def _best_exchange(state, heavy, phase, lightest, goal, visited):
    """Find the exchange of a column that lowers its excess and its partner's most."""
    columns, places = state.sample.shape
    excess = _excess(state.load[heavy], goal)
    max_gain = excess * _LEAST_GAIN
    best = _Exchange(-1, -1, np.empty(0, np.int64))
    chosen = np.empty(_MOST, np.int64)
    used = np.empty(places, np.bool_)
    missing = np.empty(state.total.shape[1], np.int64)
    size = np.empty((places, state.total.shape[1]), np.int64)
    partners = min(_WORST_PARTNERS if visited < _WORST else _PARTNERS, columns)
    begin = 0 if visited < _WORST or columns <= partners else 3 * visited  # not all the same few
    heaviest = np.empty(_HEAVIEST, np.int64)
    for t in range(partners):
        light = lightest[(begin + t) % columns]
        gap = state.load[heavy, phase] - state.load[light, phase]
        if light == heavy or gap <= 0:
            continue
        both = excess + _excess(state.load[light], goal)
        # Of two columns that became equal in all phases, the best that there is.
        if both - _equal_excess(state.load[heavy], state.load[light], goal) <= max_gain:
            continue
        for i in range(state.count[light]):
            for m in range(len(missing)):
                size[i, m] = state.total[state.sample[light, i], m]
        for place in heaviest[: _list_heaviest(state, heavy, phase, gap, heaviest)]:
            s = state.sample[heavy, place]
            remaining = max(state.load[heavy, phase] - state.seconds[s, phase] - goal[phase], 0.0)
            if both - remaining * remaining <= max_gain:
                break  # were it exchanged for nothing, and those after it have less
            for share in _SHORTER:
                k = _substitute(state, s, heavy, light, share, size, used, chosen, missing)
                if k < 0 or max(state.count[heavy] + k, state.count[light] + 1) > places:
                    continue
                gain = both - _excess_after(state, s, heavy, chosen[:k], light, goal)
                if gain > max_gain:
                    max_gain = gain
                    best = _Exchange(place, light, chosen[:k].copy())
        if max_gain >= excess * _ENOUGH:
            break
    return best


@njit(cache=True)
def _equal_excess(load, partner_load, goal):
    """Return the excess of two columns if they were equal."""
    total = 0.0
    for p in range(len(goal)):
        above = max((load[p] + partner_load[p]) / 2 - goal[p], 0.0)
        total += 2 * above * above
    return total


@njit(cache=True)
def _excess_after(state, s, heavy, in_return, light, goal):
    """Return the excess of both columns after an exchange of sample s for those in these places."""
    total = 0.0
    for p in range(len(goal)):
        change = state.seconds[s, p]
        for i in in_return:
            change -= state.seconds[state.sample[light, i], p]
        above = max(state.load[heavy, p] - change - goal[p], 0.0)
        below = max(state.load[light, p] + change - goal[p], 0.0)
        total += above * above + below * below
    return total


@njit(cache=True)
def _list_heaviest(state, column, phase, limit, places):
    """Write the places of a column's heaviest samples of a phase, up to the limit, heaviest first; return how many."""
    count = 0
    for i in range(state.count[column]):
        weight = state.seconds[state.sample[column, i], phase]
        if weight <= 0 or weight > limit or state.fixed[state.sample[column, i]]:
            continue
        j = count
        while j > 0 and state.seconds[state.sample[column, places[j - 1]], phase] < weight:
            if j < _HEAVIEST:
                places[j] = places[j - 1]
            j -= 1
        if j < _HEAVIEST:
            places[j] = i
            count = min(count + 1, _HEAVIEST)
    return count


@njit(cache=True)
def _substitute(state, s, heavy, light, share, size, used, chosen, missing):
    """Choose samples of `light` to exchange for sample s of `heavy`: write their places, return how many; -1 = none do.

    None has more of the LLM than `share` of s. Each is the one that brings the positions of all
    together nearest to those of s, relative to what rows hold; no more than are needed for both
    columns to hold theirs.
    """
    count = state.count[light]
    modules = len(missing)
    limit = share * state.total[s, 0]
    for i in range(count):
        used[i] = size[i, 0] > limit or state.fixed[state.sample[light, i]]
    for m in range(modules):
        missing[m] = state.total[s, m]
    k = 0
    while True:
        fits = True
        for m in range(modules):
            fits &= missing[m] <= state.free[light, m]
        if fits:
            return k
        if k == len(chosen):
            return -1
        best = -1
        max_gain = 0.0
        for i in range(count):
            if used[i]:
                continue
            gain = 0.0
            for m in range(modules):
                if size[i, m] - missing[m] > state.free[heavy, m]:
                    gain = -1.0
                    break
                # missing^2 - (missing - size)^2
                gain += size[i, m] * (2.0 * missing[m] - size[i, m]) * state.weight[m]
            if gain > max_gain:
                max_gain = gain
                best = i
        if best < 0:
            return -1
        used[best] = True
        chosen[k] = best
        k += 1
        for m in range(modules):
            missing[m] -= size[best, m]


@njit(cache=True)
def _do(state, heavy, exchange, units, rows, length, column):
    """Do an exchange, unless parts of several rows then do not fit; return whether it was done."""
    light = exchange.partner
    s = state.sample[heavy, exchange.place]
    in_return = state.sample[light][exchange.in_return]
    _take(state, s, heavy)
    for y in in_return:
        _take(state, y, light)
        _put(state, y, heavy)
        column[y] = heavy
    _put(state, s, light)
    column[s] = light
    if rows.max() == 1 or (
        _rows_hold(state.sample[heavy, : state.count[heavy]], units, rows, length)
        and _rows_hold(state.sample[light, : state.count[light]], units, rows, length)
    ):
        return True
    _take(state, s, light)
    _put(state, s, heavy)
    column[s] = heavy
    for y in in_return:
        _take(state, y, heavy)
        _put(state, y, light)
        column[y] = light
    return False


@njit(cache=True)
def _rows_hold(samples, units, rows, length):
    """Tell whether rows hold these samples' parts, longest first to the emptiest."""
    for m in range(len(rows)):
        count = 0
        for s in samples:
            count += units.start[s + 1] - units.start[s]
        sizes = np.empty(count, np.int64)
        count = 0
        for s in samples:
            for j in range(units.start[s], units.start[s + 1]):
                if units.module[j] == m:
                    sizes[count] = units.length[j]
                    count += 1
        used = np.zeros(rows[m], np.int64)
        for size in -np.sort(-sizes[:count]):
            emptiest = np.argmin(used)
            used[emptiest] += size
            if used[emptiest] > length[m]:
                return False
    return True
