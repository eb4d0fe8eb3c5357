"""Placing samples that cost something in several phases, so that ranks are equal in all of them: the kernels.

Post-balancing (OrchMLLM sections 5 and 6) deals every phase out on its own. Here one assignment
serves all phases: longest first on vectors, then exchanges. Kernels work on plain arrays. `cost` is
float64 `[phases, n]` as a part of what a rank has on average, `size` float64 `[ranks]` how many
shares a rank takes (1, or a node's number of ranks), `weight` float64 `[phases]` how much a phase
matters. A load counts per share, so 1 is the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# of the penalty above the ceiling: an empty rank costs nothing by itself, but others hold its part
_BELOW = 0.15
_LEAST_GAIN = 1e-12  # of an exchange; what rounding can feign is less
_PAIRS = 4096  # tried between two ranks; every few of more
_PARTNERS = 32  # ranks that one rank above its goal tries to exchange with
_TRIES = 64  # exchanges for each rank
_SLACK = 4  # places for samples that a rank may receive without giving any

# Of `even_everywhere`, in which a rank above its goal does one exchange a round.
_ROUNDS = 40
_LOOSE_ROUNDS = 10  # in which the LLM may still be uneven, for the good of encoders
LLM_FIRST = (3.0, 30.0)  # the LLM's weight in these rounds and in the others; an encoder's is 1
ALL_ALIKE = (1.0, 1.0)
_LLM_BELOW = 0.1  # of the penalty above the goal
_ENCODER_BELOW = 0.05
_LLM_TOLERANCE = 0.75  # of an encoder's
# by which an encoder's goal may exceed what it would have if its surplus were spread over all ranks
_SURPLUS = 0.2
_LIGHTER = 16  # ranks that one rank above its goal tries to exchange with, of
_LOOKED_AT = 8 * _LIGHTER
_WINDOW = 64  # samples of a rank that are tried in one exchange; others in the next
_ENOUGH = 0.5  # of a rank's penalty: an exchange that wins as much is done without looking further


class _RankState(NamedTuple):
    """Samples of each rank: cost `[phases, ranks, places]`, sample `[ranks, places]`, count `[ranks]`.

    Behind a rank's samples are empty places of no cost: an exchange with one of them is a move.
    load: `[phases, ranks]`.
    """

    cost: np.ndarray
    sample: np.ndarray
    count: np.ndarray
    load: np.ndarray
    size: np.ndarray


@njit(cache=True)
def balance(cost, order, size, weight, ceiling, goal):
    """Place samples longest first on vectors, then exchange: each one's rank, int64 [n], and load [phases, ranks].

    Text and images of four samples are parts of what each of two ranks has on average. The longest
    text goes first; then each sample goes where squares of loads grow least:

        sample      0    1    2    3          rank 0: 1 and 2     rank 1: 0 and 3
        text        4/6  3/6  3/6  2/6        6/6                 6/6
        images      .    4/4  .    4/4        4/4                 4/4

    >>> cost = np.array([[4, 3, 3, 2], [0, 4, 0, 4]]) / np.array([[6], [4]])
    >>> one = np.ones(2)
    >>> rank, load = balance(cost, np.array([1, 3, 0, 2]), one, one, one, one)
    >>> rank.tolist(), load.tolist()
    ([1, 0, 0, 1], [[1.0, 1.0], [1.0, 1.0]])
    """
    rank = np.zeros(cost.shape[1], np.int64)
    _longest_first(cost, order, size, weight, rank)
    return rank, even(cost, size, weight, ceiling, goal, rank)


@njit(cache=True)
def even(cost, size, weight, ceiling, goal, rank):
    """Exchange samples until no rank is above the goal [phases] in a phase, or those that are found none; writes rank.

    An exchange lowers the sum over phases and ranks of weight * (load - ceiling)^2, loads below the
    ceiling counting little. A rank that has found none is left alone: later tries win little.
    Returns the load [phases, ranks].
    """
    stuck = np.zeros(len(size), np.bool_)
    load = np.zeros((len(cost), len(size)))
    for p in range(len(cost)):
        for s in range(len(rank)):
            load[p, rank[s]] += cost[p, s] / size[rank[s]]
    # Often longest first is good enough, and the state need not be built.
    if _above(load, goal, stuck) < 0:
        return load
    state = _build_state(cost, rank, size)
    scratch = np.empty(state.sample.shape[1])
    for attempt in range(_TRIES * len(size)):
        worst = _above(state.load, goal, stuck)
        if worst < 0:
            break
        # The attempt's number shifts which samples are tried where not all are, so that none is
        # always left out.
        stuck[worst] = not _relieve(state, worst, ceiling, weight, attempt, scratch)
    for r in range(len(size)):
        for i in range(state.count[r]):
            rank[state.sample[r, i]] = r
    return state.load


@njit(cache=True)
def _longest_first(cost, order, size, weight, rank):
    """Assign each sample to the rank where the sum of squared loads grows least; writes rank."""
    phases = len(cost)
    ranks = len(size)
    load = np.zeros((phases, ranks))
    for s in order:
        best = 0
        min_growth = np.inf
        for r in range(ranks):
            # size * sum of weight * ((load + part)^2 - load^2), the growth of the squared load: a
            # node of 8 ranks counts 8 times, and each of them has an eighth of the load.
            growth = 0.0
            for p in range(phases):
                part = cost[p, s] / size[r]
                growth += weight[p] * part * (2 * load[p, r] + part)
            growth *= size[r]
            if growth < min_growth:
                best = r
                min_growth = growth
        rank[s] = best
        for p in range(phases):
            load[p, best] += cost[p, s] / size[best]


@njit(cache=True)
def _build_state(cost, rank, size):
    phases, n = cost.shape
    count = np.zeros(len(size), np.int64)
    for s in range(n):
        count[rank[s]] += 1
    # Fixed beforehand, for Numba's arrays do not grow; a rank without an empty place takes samples
    # only in exchange.
    places = count.max() + _SLACK
    state = _RankState(
        np.zeros((phases, len(size), places)),
        np.full((len(size), places), -1, np.int64),
        np.zeros(len(size), np.int64),
        np.zeros((phases, len(size))),
        size,
    )
    for s in range(n):
        r = rank[s]
        state.sample[r, state.count[r]] = s
        for p in range(phases):
            state.cost[p, r, state.count[r]] = cost[p, s]
            state.load[p, r] += cost[p, s] / size[r]
        state.count[r] += 1
    return state


@njit(cache=True)
def _above(load, goal, stuck):
    """Find the rank that is furthest above its goal in a phase and not stuck; -1 = none."""
    worst = -1
    max_excess = 0.0
    for r in range(load.shape[1]):
        for p in range(len(load)):
            if load[p, r] - goal[p] > max_excess and not stuck[r]:
                worst = r
                max_excess = load[p, r] - goal[p]
    return worst


@njit(cache=True)
def _penalty(above):
    # Squares make the worst rank count most; an idle rank costs something too, as others hold its
    # part.
    return above * above * (1.0 if above > 0 else _BELOW)


@njit(cache=True)
def _relieve(state, heavy, ceiling, weight, attempt, scratch):
    """Do the best exchange of a rank with one of the ranks that promise most; return whether there was any."""
    promise = np.zeros(len(state.size))  # what would be won if the two ranks became equal
    promise[heavy] = -1
    for r in range(len(state.size)):
        if r != heavy:
            for p in range(len(ceiling)):
                a = state.load[p, heavy] - ceiling[p]
                b = state.load[p, r] - ceiling[p]
                # Penalties of both ranks now, less those if both had the mean load of the two.
                promise[r] += weight[p] * (_penalty(a) + _penalty(b) - 2 * _penalty((a + b) / 2))
    max_gain = _LEAST_GAIN
    place = partner = partner_at = -1
    for _ in range(min(_PARTNERS, len(state.size) - 1)):
        r = np.argmax(promise)
        # Promises fall from here on, and equality is the best that two ranks can reach: nobody can
        # win more.
        if promise[r] <= max_gain:
            break
        gain, a, b = _best_exchange(state, heavy, r, ceiling, weight, attempt, scratch)
        if gain > max_gain:
            max_gain = gain
            place = a
            partner = r
            partner_at = b
            # Half of what equality would win is as good as it gets with samples of finite size.
            if gain > promise[r] / 2:
                break
        promise[r] = -1
    if partner >= 0:
        _exchange(state, heavy, place, partner, partner_at)
    return partner >= 0


@njit(cache=True)
def _best_exchange(state, heavy, light, ceiling, weight, attempt, scratch):
    """Find the best exchange of two ranks: its gain and places in both; empty ones take part where there is room."""
    places = state.sample.shape[1]
    # One more than it has: the first empty place, with which an exchange is a move.
    of_heavy = min(state.count[heavy] + 1, places)
    of_light = min(state.count[light] + 1, places)
    # Of more than _PAIRS pairs every step-th sample of the heavy rank, others in the next attempt.
    step = min(max(of_heavy * of_light // _PAIRS, 1), of_heavy)
    old_penalty = 0.0
    for p in range(len(ceiling)):
        old_penalty += weight[p] * _penalty(state.load[p, heavy] - ceiling[p])
        old_penalty += weight[p] * _penalty(state.load[p, light] - ceiling[p])
    min_penalty = old_penalty
    best_a = best_b = -1
    # Products in the inner loop instead of quotients.
    heavy_part = 1 / state.size[heavy]
    light_part = 1 / state.size[light]
    for a in range(attempt % step, of_heavy, step):
        for b in range(of_light):
            scratch[b] = 0.0
        for p in range(len(ceiling)):
            # Both ranks as if sample a had moved already; the inner loop then brings b the other
            # way.
            without = state.load[p, heavy] - ceiling[p] - state.cost[p, heavy, a] * heavy_part
            received = state.load[p, light] - ceiling[p] + state.cost[p, heavy, a] * light_part
            cost = state.cost[p, light]
            for b in range(of_light):  # written so that it becomes SIMD instructions
                u = without + cost[b] * heavy_part
                v = received - cost[b] * light_part
                scratch[b] += weight[p] * (
                    u * u * (1.0 if u > 0 else _BELOW) + v * v * (1.0 if v > 0 else _BELOW)
                )
        for b in range(of_light):
            if scratch[b] < min_penalty:
                min_penalty = scratch[b]
                best_a = a
                best_b = b
    return old_penalty - min_penalty, best_a, best_b


@njit(cache=True)
def _exchange(state, x, a, y, b):
    for p in range(len(state.cost)):
        # By the difference: to sum a rank's samples anew would take longer than the exchange.
        change = state.cost[p, x, a] - state.cost[p, y, b]
        state.load[p, x] -= change / state.size[x]
        state.load[p, y] += change / state.size[y]
        state.cost[p, x, a], state.cost[p, y, b] = state.cost[p, y, b], state.cost[p, x, a]
    state.sample[x, a], state.sample[y, b] = state.sample[y, b], state.sample[x, a]
    _close_gap(state, x, a)
    _close_gap(state, y, b)


@njit(cache=True)
def _close_gap(state, r, place):
    """Count what came to an empty place, or bring the last sample to one that has become empty."""
    if state.sample[r, place] >= 0:
        # It came to the first empty place, which now is the last of its samples; others were
        # occupied before.
        state.count[r] = max(state.count[r], place + 1)
    elif place < state.count[r]:
        state.count[r] -= 1
        # Samples of a rank have no order, so the last one may fill the gap.
        last = state.count[r]
        state.sample[r, place] = state.sample[r, last]
        state.sample[r, last] = -1
        for p in range(len(state.cost)):
            state.cost[p, r, place] = state.cost[p, r, last]
            state.cost[p, r, last] = 0.0


@njit(cache=True)
def longest_first_in_blocks(cost, order, start, size, rank):
    """Place the samples of each block of ranks longest first on vectors; writes rank, numbered through all blocks.

    order: the samples of block k are order[start[k] : start[k + 1]]; size: int64 [blocks], its
    ranks.
    """
    phases = len(cost)
    first = 0
    for k in range(len(size)):
        samples = order[start[k] : start[k + 1]]
        part = np.empty((phases, len(samples)))
        for i in range(len(samples)):
            for p in range(phases):
                part[p, i] = cost[p, samples[i]]
        # Blocks know nothing of each other: each is a problem with ranks from 0 on.
        local_rank = np.zeros(len(samples), np.int64)
        _longest_first(part, np.arange(len(samples)), np.ones(size[k]), np.ones(phases), local_rank)
        for i in range(len(samples)):
            rank[samples[i]] = first + local_rank[i]
        first += size[k]


@njit(cache=True)
def even_everywhere(cost, ceiling, tolerance, ranks, llm_weight, rank):
    """Exchange samples between any ranks until none is above its goal, for a number of rounds; writes rank.

    A long text leaves its rank no room for its part of the encoders. What others then have more of
    is spread over all ranks: an encoder's goal is the mean of what ranks have, where those below
    the mean count as it. A round visits each rank above a goal once, so time is linear in ranks.
    ceiling: [phases], the longest sample. llm_weight: LLM_FIRST or ALL_ALIKE. Returns the load.
    """
    phases = len(cost)
    state = _build_state(cost, rank, np.ones(ranks))
    scratch = np.empty(_WINDOW)
    weight = np.ones(phases)
    below = np.full(phases, _ENCODER_BELOW)
    below[0] = _LLM_BELOW
    goal = np.empty(phases)
    aim = np.empty(phases)
    excess = np.empty(ranks)
    visited = 0
    for turn in range(_ROUNDS):
        # First encoders may become even at the LLM's cost; then it counts so much that exchanges
        # mend it.
        weight[0] = llm_weight[0] if turn < _LOOSE_ROUNDS else llm_weight[1]
        _set_goals(state.load, ceiling, tolerance, goal, aim)
        for r in range(ranks):
            excess[r] = _excess(state.load, goal, weight, r)
        # Exchanges since the start of the round may have mended a rank, so it is looked up again.
        for heavy in np.argsort(-excess):
            if excess[heavy] <= 0:
                break
            if _excess(state.load, goal, weight, heavy) > 0:
                visited += 1
                _relieve_anywhere(state, heavy, goal, aim, weight, below, visited, scratch)
        if excess.max() <= 0:
            break
    for r in range(ranks):
        for i in range(state.count[r]):
            rank[state.sample[r, i]] = r
    return state.load


@njit(cache=True)
def _set_goals(load, ceiling, tolerance, goal, aim):
    """Set the goals of all phases, and what exchanges aim at, to have some distance from the goals."""
    for p in range(len(load)):
        # Level: the mean of max(load, 1) over ranks; 1 for the LLM.
        level = 1.0
        if p > 0:
            level = 0.0
            for r in range(load.shape[1]):
                # A rank below 1 may be full of text, and is not expected to take what others have
                # above 1: it counts as 1.
                level += max(load[p, r], 1.0) / load.shape[1]
        allowed = tolerance * (1.0 if p > 0 else _LLM_TOLERANCE)
        goal[p] = max(ceiling[p], level + _SURPLUS * (level - 1)) + allowed
        # Below the goal, so that a rank is not above it again after the next exchange.
        aim[p] = max(ceiling[p], level) + allowed / 2


@njit(cache=True)
def _excess(load, goal, weight, r):
    total = 0.0
    for p in range(len(load)):
        above = max(load[p, r] - goal[p], 0.0)
        total += weight[p] * above * above
    return total


@njit(cache=True)
def _relieve_anywhere(state, heavy, goal, aim, weight, below, visited, scratch):
    """Do the best exchange of a rank with ranks that have room in the phase in which it is furthest above its goal."""
    phase = 0
    max_excess = 0.0
    ranks = state.load.shape[1]
    for p in range(len(goal)):
        above = max(state.load[p, heavy] - goal[p], 0.0)
        if weight[p] * above * above > max_excess:
            phase = p
            max_excess = weight[p] * above * above
    enough = _ENOUGH * _excess(state.load, aim, weight, heavy)
    gain = _LEAST_GAIN
    place = partner = partner_at = -1
    tried = 0
    for k in range(min(_LOOKED_AT, ranks - 1)):
        # Begins elsewhere each time, else the same ranks would take part in every exchange.
        # heavy + 1 + (0 .. ranks - 2), modulo ranks: every rank but heavy itself.
        r = (heavy + 1 + (visited * _LIGHTER + k) % (ranks - 1)) % ranks
        if state.load[phase, r] < goal[phase]:
            won, a, b = _best_of_window(state, heavy, r, aim, weight, below, visited, scratch)
            if won > gain:
                gain = won
                place = a
                partner = r
                partner_at = b
            tried += 1
            if gain > enough or tried == _LIGHTER:
                break
    if partner >= 0:
        _exchange(state, heavy, place, partner, partner_at)


@njit(cache=True)
def _best_of_window(state, heavy, light, aim, weight, below, visited, scratch):
    """Find the best exchange of two ranks, its gain and places, among the samples in one window of each."""
    places = state.sample.shape[1]
    of_heavy = min(state.count[heavy] + 1, places)
    of_light = min(state.count[light] + 1, places)
    many_heavy = min(of_heavy, _WINDOW)
    many_light = min(of_light, _WINDOW)
    # The window of samples moves along with the visits, so that all take part in time.
    # Where the window holds all, the divisor is 1 and it begins at 0.
    from_heavy = visited * _WINDOW % (of_heavy - many_heavy + 1)
    from_light = visited * _WINDOW % (of_light - many_light + 1)
    old_penalty = 0.0
    for p in range(len(aim)):
        for r in (heavy, light):
            above = state.load[p, r] - aim[p]
            old_penalty += weight[p] * above * above * (1.0 if above > 0 else below[p])
    min_penalty = old_penalty
    best_a = best_b = -1
    for a in range(from_heavy, from_heavy + many_heavy):
        for b in range(many_light):
            scratch[b] = 0.0
        for p in range(len(aim)):
            without = state.load[p, heavy] - aim[p] - state.cost[p, heavy, a]
            received = state.load[p, light] - aim[p] + state.cost[p, heavy, a]
            over = weight[p]
            under = weight[p] * below[p]
            cost = state.cost[p, light, from_light : from_light + many_light]
            for b in range(many_light):  # written so that it becomes SIMD instructions
                u = without + cost[b]
                v = received - cost[b]
                scratch[b] += u * u * (over if u > 0 else under) + v * v * (
                    over if v > 0 else under
                )
        for b in range(many_light):
            if scratch[b] < min_penalty:
                min_penalty = scratch[b]
                best_a = a
                best_b = from_light + b
    return old_penalty - min_penalty, best_a, best_b
