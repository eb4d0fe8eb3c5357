"""Placing samples that cost something in several phases, so that ranks are equal in all of them: the kernels.

Post-balancing (OrchMLLM sections 5 and 6) deals every phase out on its own. Here one assignment serves all phases:
longest first on vectors, then exchanges. Kernels work on plain arrays. `cost` is float64 `[phases, n]` as a part of
what a rank has on average, `size` float64 `[ranks]` how many shares a rank takes (1, or a node's number of ranks),
`weight` float64 `[phases]` how much a phase matters. A load counts per share, so 1 is the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_BELOW = 0.15  # of the penalty above the ceiling: an empty rank costs nothing by itself, but others hold its part
_LEAST_GAIN = 1e-12  # of an exchange; what rounding can feign is less
_LEAST_RELIEF = 1e-9  # of the fullest rank, by moving an item
_PAIRS = 4096  # tried between two ranks; every few of more
_PARTNERS = 32  # ranks that one rank above its goal tries to exchange with
_TRIES = 64  # exchanges for each rank
_SLACK = 4  # places for samples that a rank may receive without giving any


class _Held(NamedTuple):
    """What each rank holds: cost `[phases, ranks, places]`, sample `[ranks, places]`, count `[ranks]`.

    Behind a rank's samples are empty places of no cost: an exchange with one of them is a move.
    load: `[phases, ranks]`.
    """

    cost: np.ndarray
    sample: np.ndarray
    count: np.ndarray
    load: np.ndarray
    size: np.ndarray


@njit(cache=True)
def balance_nodes(cost, order, start, size, mean, ceiling, tolerance, rank):
    """The rank within its node of each sample, longest first and exchanges; whether each node reached its goal.

    cost: float64 [n, phases], not relative; order: the samples of node k are order[start[k] : start[k + 1]]; writes
    rank. The goal is (1 + tolerance) * ceiling [nodes, phases].
    """
    phases = cost.shape[1]
    reached = np.ones(len(size), np.bool_)
    weight = np.ones(phases)
    for k in range(len(size)):
        samples = order[start[k] : start[k + 1]]
        relative = np.empty((phases, len(samples)))
        for i in range(len(samples)):
            for p in range(phases):
                relative[p, i] = cost[samples[i], p] / mean[k, p]
        goal = ceiling[k] * (1 + tolerance)
        at, load = balance(relative, np.arange(len(samples)), np.ones(size[k]), weight, ceiling[k], goal)
        for i in range(len(samples)):
            rank[samples[i]] = at[i]
        for r in range(size[k]):
            for p in range(phases):
                reached[k] &= load[p, r] <= goal[p]
    return reached


@njit(cache=True)
def balance(cost, order, size, weight, ceiling, goal):
    """The rank of each sample, int64 [n], and the load [phases, ranks]: longest first on vectors, then exchanges."""
    rank = np.zeros(cost.shape[1], np.int64)
    _longest_first(cost, order, size, weight, rank)
    return rank, even(cost, size, weight, ceiling, goal, rank)


@njit(cache=True)
def even(cost, size, weight, ceiling, goal, rank):
    """Exchange samples until no rank is above the goal [phases] in a phase, or those that are found none; writes rank.

    An exchange lowers the sum over phases and ranks of weight * (load - ceiling)^2, loads below the ceiling counting
    little. A rank that has found none is left alone: later tries win little. Returns the load [phases, ranks].
    """
    stuck = np.zeros(len(size), np.bool_)
    load = np.zeros((len(cost), len(size)))
    for p in range(len(cost)):
        for s in range(len(rank)):
            load[p, rank[s]] += cost[p, s] / size[rank[s]]
    if _above(load, goal, stuck) < 0:
        return load
    held = _hold(cost, rank, size)
    scratch = np.empty(held.sample.shape[1])
    for attempt in range(_TRIES * len(size)):
        worst = _above(held.load, goal, stuck)
        if worst < 0:
            break
        stuck[worst] = not _relieve(held, worst, ceiling, weight, attempt, scratch)
    for r in range(len(size)):
        for i in range(held.count[r]):
            rank[held.sample[r, i]] = r
    return held.load


@njit(cache=True)
def _longest_first(cost, order, size, weight, rank):
    """Each sample to the rank where the sum of squared loads grows least; writes rank."""
    phases, ranks = len(cost), len(size)
    load = np.zeros((phases, ranks))
    for s in order:
        best, least = 0, np.inf
        for r in range(ranks):
            growth = 0.0
            for p in range(phases):
                part = cost[p, s] / size[r]
                growth += weight[p] * part * (2 * load[p, r] + part)
            growth *= size[r]
            if growth < least:
                best, least = r, growth
        rank[s] = best
        for p in range(phases):
            load[p, best] += cost[p, s] / size[best]


@njit(cache=True)
def _hold(cost, rank, size):
    phases, n = cost.shape
    count = np.zeros(len(size), np.int64)
    for s in range(n):
        count[rank[s]] += 1
    places = count.max() + _SLACK
    held = _Held(
        np.zeros((phases, len(size), places)),
        np.full((len(size), places), -1, np.int64),
        np.zeros(len(size), np.int64),
        np.zeros((phases, len(size))),
        size,
    )
    for s in range(n):
        r = rank[s]
        held.sample[r, held.count[r]] = s
        for p in range(phases):
            held.cost[p, r, held.count[r]] = cost[p, s]
            held.load[p, r] += cost[p, s] / size[r]
        held.count[r] += 1
    return held


@njit(cache=True)
def _above(load, goal, stuck):
    """The rank that is furthest above its goal in a phase and not stuck; -1 = none."""
    worst, most = -1, 0.0
    for r in range(load.shape[1]):
        for p in range(len(load)):
            if load[p, r] - goal[p] > most and not stuck[r]:
                worst, most = r, load[p, r] - goal[p]
    return worst


@njit(cache=True)
def _penalty(above):
    return above * above * (1.0 if above > 0 else _BELOW)


@njit(cache=True)
def _relieve(held, heavy, ceiling, weight, attempt, scratch):
    """Do the best exchange of a rank with one of the ranks that promise most; whether there was any."""
    promise = np.zeros(len(held.size))  # what would be won if the two ranks became equal
    promise[heavy] = -1
    for r in range(len(held.size)):
        if r != heavy:
            for p in range(len(ceiling)):
                a, b = held.load[p, heavy] - ceiling[p], held.load[p, r] - ceiling[p]
                promise[r] += weight[p] * (_penalty(a) + _penalty(b) - 2 * _penalty((a + b) / 2))
    most, at, partner, partner_at = _LEAST_GAIN, -1, -1, -1
    for _ in range(min(_PARTNERS, len(held.size) - 1)):
        r = np.argmax(promise)
        if promise[r] <= most:
            break
        gain, a, b = _best_exchange(held, heavy, r, ceiling, weight, attempt, scratch)
        if gain > most:
            most, at, partner, partner_at = gain, a, r, b
            if gain > promise[r] / 2:
                break
        promise[r] = -1
    if partner >= 0:
        _exchange(held, heavy, at, partner, partner_at)
    return partner >= 0


@njit(cache=True)
def _best_exchange(held, heavy, light, ceiling, weight, attempt, scratch):
    """What the best exchange of two ranks wins, and the places in both; empty ones take part where there is room."""
    places = held.sample.shape[1]
    of_heavy, of_light = min(held.count[heavy] + 1, places), min(held.count[light] + 1, places)
    step = min(max(of_heavy * of_light // _PAIRS, 1), of_heavy)
    before = 0.0
    for p in range(len(ceiling)):
        before += weight[p] * _penalty(held.load[p, heavy] - ceiling[p])
        before += weight[p] * _penalty(held.load[p, light] - ceiling[p])
    least, best_a, best_b = before, -1, -1
    heavy_part, light_part = 1 / held.size[heavy], 1 / held.size[light]
    for a in range(attempt % step, of_heavy, step):
        for b in range(of_light):
            scratch[b] = 0.0
        for p in range(len(ceiling)):
            without = held.load[p, heavy] - ceiling[p] - held.cost[p, heavy, a] * heavy_part
            more = held.load[p, light] - ceiling[p] + held.cost[p, heavy, a] * light_part
            cost = held.cost[p, light]
            for b in range(of_light):  # written so that it becomes SIMD instructions
                u, v = without + cost[b] * heavy_part, more - cost[b] * light_part
                scratch[b] += weight[p] * (u * u * (1.0 if u > 0 else _BELOW) + v * v * (1.0 if v > 0 else _BELOW))
        for b in range(of_light):
            if scratch[b] < least:
                least, best_a, best_b = scratch[b], a, b
    return before - least, best_a, best_b


@njit(cache=True)
def _exchange(held, x, a, y, b):
    for p in range(len(held.cost)):
        change = held.cost[p, x, a] - held.cost[p, y, b]
        held.load[p, x] -= change / held.size[x]
        held.load[p, y] += change / held.size[y]
        held.cost[p, x, a], held.cost[p, y, b] = held.cost[p, y, b], held.cost[p, x, a]
    held.sample[x, a], held.sample[y, b] = held.sample[y, b], held.sample[x, a]
    _close_gap(held, x, a)
    _close_gap(held, y, b)


@njit(cache=True)
def _close_gap(held, r, at):
    """Count what came to an empty place, or bring the last sample to one that has become empty."""
    if held.sample[r, at] >= 0:
        held.count[r] = max(held.count[r], at + 1)
    elif at < held.count[r]:
        held.count[r] -= 1
        last = held.count[r]
        held.sample[r, at], held.sample[r, last] = held.sample[r, last], -1
        for p in range(len(held.cost)):
            held.cost[p, r, at], held.cost[p, r, last] = held.cost[p, r, last], 0.0


@njit(cache=True)
def spread_items(home, cost, tokens, width, goal, at, load):
    """Move or swap items off the fullest rank until it is at the goal, or nothing helps; writes at and load [ranks].

    home: the rank of each item's sample [m]; at: where it is encoded. From no rank to another one travel more than
    `width` tokens.
    """
    ranks = len(load)
    sent = np.zeros((ranks, ranks), np.int64)
    while True:
        full = np.argmax(load)
        if load[full] <= goal:
            return
        j, k, to = _best_item(home, cost, tokens, width, at, load, sent, full)
        if j < 0:
            return
        change = cost[j] - (cost[k] if k >= 0 else 0.0)
        _send(home, tokens, at, sent, j, to)
        if k >= 0:
            _send(home, tokens, at, sent, k, full)
        load[full] -= change
        load[to] += change


@njit(cache=True)
def _best_item(home, cost, tokens, width, at, load, sent, full):
    """The item of the fullest rank that goes, the one that comes for it or -1, and the other rank."""
    least, best_j, best_k, best_to = load[full] - _LEAST_RELIEF, -1, -1, -1
    for j in range(len(home)):
        if at[j] != full:
            continue
        for to in range(len(load)):
            after = max(load[full] - cost[j], load[to] + cost[j])
            if to != full and after < least and (home[j] == to or sent[home[j], to] + tokens[j] <= width):
                least, best_j, best_k, best_to = after, j, -1, to
        for k in range(len(home)):
            to, change = at[k], cost[j] - cost[k]
            after = max(load[full] - change, load[to] + change)
            if to != full and after < least and _may_swap(home, tokens, width, sent, j, k, full, to):
                least, best_j, best_k, best_to = after, j, k, to
    return best_j, best_k, best_to


@njit(cache=True)
def _may_swap(home, tokens, width, sent, j, k, full, to):
    """Whether pairs of ranks stay within the width; what the other item frees of a pair counts."""
    same = home[j] == home[k]
    outward = sent[home[j], to] + tokens[j] - (tokens[k] if same else 0)
    inward = sent[home[k], full] + tokens[k] - (tokens[j] if same else 0)
    return (home[j] == to or outward <= width) and (home[k] == full or inward <= width)


@njit(cache=True)
def _send(home, tokens, at, sent, item, to):
    if at[item] != home[item]:
        sent[home[item], at[item]] -= tokens[item]
    if to != home[item]:
        sent[home[item], to] += tokens[item]
    at[item] = to
