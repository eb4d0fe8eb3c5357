"""Filling one step from a window of waiting samples: the inner loops of grouping `pack`.

The oldest samples come first, so that order stays as random as the shuffle. Then come those that bring the step nearest
to its target, then exchanges with waiting samples: one for one, and, while the step is still off its target, none, one
or two for two. The distance from the target is J = sum over modules of (target - use)^2, in shares of the budget.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

# All of it is in one file: Numba's cache of a function does not see that a callee in another file has changed.
_IN_PROPORTION = 0.95  # need of a module, relative to the fullest one's, from which it is simply filled
_FIRST_FILL = 0.98  # of the fullest module, before any step is filled
_MEMORY = 0.999  # of that mean, from step to step
_NONE = np.int64(-1)  # typed: Numba compiles every callee once more for a literal
_EXCHANGE_ROUNDS = 2  # more gained nothing
_PLACE_TRIALS = 100  # waiting samples, best first, that rows are sought for in the place of one
_CLOSE = 3e-4  # J at which a step is full: 1.7% of one module
_PAIR_TRIALS = 20_000  # what one search for two samples may look at
_PAIR_POOL = 100  # waiting samples that it may use
_PAIR_ROUNDS = 3


class Load(NamedTuple):
    """The needs of samples: `Parts`, with `by_size`, totals `[n, M]` and these as shares of a microbatch's cap."""

    start: np.ndarray
    module: np.ndarray
    length: np.ndarray
    by_size: np.ndarray
    totals: np.ndarray
    share: np.ndarray


class Room(NamedTuple):
    """The step being filled. The rows of all modules are numbered in one go within a microbatch."""

    row_start: np.ndarray  # [M + 1]
    row_length: np.ndarray  # [M] positions
    cap: np.ndarray  # [M] positions in a microbatch; at most what its rows hold
    left: np.ndarray  # [microbatch, row] positions
    free: np.ndarray  # [microbatch, M] positions under the cap
    slack: np.ndarray  # [M] free positions of the step, as shares of a microbatch's cap
    aim: np.ndarray  # [M] the same up to the target; below 0 where use is over it
    place: np.ndarray  # [p] row
    microbatch: np.ndarray  # [n], -1 = not in a step
    refused: np.ndarray  # [n] did not fit the step as it is


@njit(cache=True)
def fill_steps(load, room, pool_steps, oldest_first, urgent_after, first, entered, step):
    """Slide the window over all samples, fill one step after the other; the number after the last one."""
    n, microbatches, modules = len(step), len(room.free), len(room.cap)
    pool = np.zeros(n, np.int64)
    waiting, following, now = 0, 0, first
    asked, target = np.zeros(modules), np.zeros(modules)  # in microbatches' caps
    spare = _relative_need(load.share)
    fullest, usual = np.argmax(spare), _FIRST_FILL
    while waiting > 0 or following < n:
        while following < n and (waiting == 0 or np.max(asked) < pool_steps * microbatches):
            pool[waiting] = following
            if entered[following] < 0:
                entered[following] = now
            asked += load.share[following]
            waiting += 1
            following += 1
        for k in range(modules):
            target[k] = 1.0 if spare[k] >= _IN_PROPORTION else spare[k] * usual
        _open_step(target, room)
        settled = np.int64(1)
        for i in range(waiting):
            sample = pool[i]
            room.refused[sample] = False
            if now - entered[sample] >= urgent_after:
                settled = i + 1
                _take(sample, load, room)
            elif np.min(room.slack) > (1 - oldest_first) * microbatches:
                _take(sample, load, room)
        _take_best(pool[:waiting], load, room)
        _exchange(pool[:waiting], settled, load, room)
        if _exchange_for_two(pool[:waiting], settled, load, room):
            _exchange(pool[:waiting], settled, load, room)
        kept = 0
        for i in range(waiting):
            sample = pool[i]
            if room.microbatch[sample] >= 0:
                step[sample] = now
                asked -= load.share[sample]
            else:
                pool[kept] = sample
                kept += 1
        waiting = kept
        now += 1
        usual = _MEMORY * usual + (1 - _MEMORY) * (1 - room.slack[fullest] / microbatches)
    return now


@njit(cache=True)
def _relative_need(share):
    """Return the need of each module's budget by all samples, relative to the module needed most: float64 [M]."""
    need = np.zeros(share.shape[1])
    for sample in range(len(share)):
        for k in range(len(need)):
            need[k] += share[sample, k]
    return need / max(np.max(need), 1e-30)


@njit(cache=True)
def find_oversize(load, room):
    """bool [n]: does not fit an empty microbatch."""
    too_large = np.zeros(len(load.totals), np.bool_)
    target = np.ones(len(room.cap))
    for sample in range(len(too_large)):
        _open_step(target, room)
        too_large[sample] = not _place(sample, np.int64(0), load, room)
    return too_large


@njit(cache=True)
def _open_step(target, room):
    """Empty the rows for a new step, whose modules should be filled to `target` `[M]`, as shares of a microbatch."""
    for k in range(len(room.cap)):
        room.slack[k] = len(room.free)
        room.aim[k] = target[k] * len(room.free)
        for m in range(len(room.free)):
            room.free[m, k] = room.cap[k]
            for row in range(room.row_start[k], room.row_start[k + 1]):
                room.left[m, row] = room.row_length[k]


@njit(cache=True)
def _take(sample, load, room):
    """Place the sample in the microbatch with most left of what it asks for that holds it, or mark it refused."""
    if len(room.free) == 1:
        room.refused[sample] = not _place(sample, np.int64(0), load, room)
        return
    tried = np.zeros(len(room.free), np.bool_)
    for _ in range(len(room.free)):
        chosen, most = _NONE, -1.0
        for m in range(len(room.free)):
            left = 0.0
            for k in range(len(room.cap)):
                left += load.share[sample, k] * room.free[m, k] / room.cap[k]
            if left > most and not tried[m]:
                chosen, most = m, left
        if _place(sample, chosen, load, room):
            return
        tried[chosen] = True
    room.refused[sample] = True


@njit(cache=True)
def _place(sample, m, load, room):
    """Put every part of the sample in its fullest row of microbatch m that holds it, or none at all: bool."""
    for k in range(len(room.cap)):
        if load.totals[sample, k] > room.free[m, k]:
            return False
    begin, end = load.start[sample], load.start[sample + 1]
    for i in range(begin, end):
        part = load.by_size[i]
        k, length = load.module[part], load.length[part]
        best = -1
        for row in range(room.row_start[k], room.row_start[k + 1]):
            if room.left[m, row] >= length and (best < 0 or room.left[m, row] < room.left[m, best]):
                best = row
        if best < 0:
            for j in range(begin, i):
                room.left[m, room.place[load.by_size[j]]] += load.length[load.by_size[j]]
            return False
        room.left[m, best] -= length
        room.place[part] = best
    _count(sample, m, load, room)
    return True


@njit(cache=True)
def _take_best(pool, load, room):
    """While anything fits and helps, take the sample after which J is least."""
    while True:
        best, most = _NONE, 0.0
        for sample in pool:
            if room.microbatch[sample] >= 0 or room.refused[sample]:
                continue
            gain = 0.0
            for k in range(len(room.cap)):
                share = load.share[sample, k]
                if share > room.slack[k] + 1e-9:
                    room.refused[sample] = True
                gain += share * (2 * room.aim[k] - share)
            if gain > most and not room.refused[sample]:
                best, most = sample, gain
        if best < 0:
            return
        _take(best, load, room)


@njit(cache=True)
def _exchange(pool, settled, load, room):
    """Swap samples of the step (but the `settled` first of the pool) for waiting ones while that lowers J."""
    movable = _movable(pool, settled, room)
    for _ in range(_EXCHANGE_ROUNDS):
        changed = False
        for i in range(len(movable)):
            old, limit = movable[i], np.inf
            for _ in range(_PLACE_TRIALS):
                new, limit = _best_instead(old, limit, pool, load, room)
                if new < 0:
                    break
                m = room.microbatch[old]
                _remove(old, load, room)
                if _place(new, m, load, room):
                    movable[i], changed = new, True
                    break
                _put_back(old, m, load, room)
        if not changed:
            return


@njit(cache=True)
def _best_instead(old, limit, pool, load, room):
    """The waiting sample that lowers J most in place of `old`, but less than `limit`, and by how much; -1 = none."""
    best, most = _NONE, 1e-9
    for new in pool:
        if room.microbatch[new] >= 0:
            continue
        gain = 0.0
        for k in range(len(room.cap)):
            more = load.share[new, k] - load.share[old, k]
            if more > room.slack[k] + 1e-9:
                gain = -1.0
                break
            gain += more * (2 * room.aim[k] - more)
        if most < gain < limit:
            best, most = new, gain
    return best, most


@njit(cache=True)
def _exchange_for_two(pool, settled, load, room):
    """Put two waiting samples in for none, one or two of a microbatch (not `settled` ones), while J is not close.

    bool: whether anything was exchanged.
    """
    chosen = np.full(4, _NONE)  # two to remove, two to put in
    for exchanged in range(_PAIR_ROUNDS):
        if _distance(room) <= _CLOSE or not _find_two(pool, settled, load, room, chosen):
            return exchanged > 0
        m = room.microbatch[chosen[0]] if chosen[0] >= 0 else np.int64(0)
        for old in chosen[:2]:
            if old >= 0:
                _remove(old, load, room)
        if _place(chosen[2], m, load, room):
            if _place(chosen[3], m, load, room):
                continue
            _remove(chosen[2], load, room)
        for old in chosen[:2]:
            if old >= 0:
                _put_back(old, m, load, room)
        return exchanged > 0
    return True


@njit(cache=True)
def _find_two(pool, settled, load, room, chosen):
    """Choose the exchange after which J is least, or the first after which it is close; False where none helps."""
    movable = _movable(pool, settled, room)
    removals = 1 + len(movable) + len(movable) * (len(movable) - 1) // 2
    most_waiting = min(_PAIR_POOL, int(np.sqrt(2 * _PAIR_TRIALS / removals)))
    waiting = np.zeros(most_waiting, np.int64)
    found = 0
    for sample in pool:
        if room.microbatch[sample] < 0 and found < most_waiting:
            waiting[found] = sample
            found += 1
    now = _distance(room)
    best, chosen[2] = 1e-5, _NONE
    slack, aim = np.zeros(len(room.cap)), np.zeros(len(room.cap))
    for i in range(-1, len(movable)):
        for j in range(-1, i if i >= 0 else 0):
            first = movable[i] if i >= 0 else _NONE
            second = movable[j] if j >= 0 else _NONE
            if second >= 0 and room.microbatch[first] != room.microbatch[second]:
                continue
            base = now
            for k in range(len(room.cap)):
                gone = load.share[first, k] if first >= 0 else 0.0
                gone += load.share[second, k] if second >= 0 else 0.0
                slack[k], aim[k] = room.slack[k] + gone + 1e-9, room.aim[k] + gone
                base -= aim[k] ** 2
            gain = _two_waiting(waiting[:found], load.share, slack, aim, base, best, now - _CLOSE, chosen)
            if gain > best:
                best, chosen[0], chosen[1] = gain, first, second
                if now - best <= _CLOSE:
                    return True
    return chosen[2] >= 0


@njit(cache=True)
def _two_waiting(waiting, share, slack, aim, base, best, enough, chosen):
    """The most that two of the waiting samples gain above `best`, which are written to `chosen[2:]`."""
    for x in range(len(waiting)):
        a = waiting[x]
        fits = True
        for k in range(len(slack)):
            fits = fits and share[a, k] <= slack[k]
        if not fits:
            continue
        for y in range(x):
            b = waiting[y]
            gain = base
            for k in range(len(slack)):
                both = share[a, k] + share[b, k]
                if both > slack[k]:
                    gain = -1.0
                    break
                gain += both * (2 * aim[k] - both)
            if gain > best:
                best, chosen[2], chosen[3] = gain, a, b
                if best >= enough:
                    return best
    return best


@njit(cache=True)
def _movable(pool, settled, room):
    """The samples of the pool that are in the step and may leave it."""
    count = 0
    for i in range(settled, len(pool)):
        count += room.microbatch[pool[i]] >= 0
    movable = np.zeros(count, np.int64)
    count = 0
    for i in range(settled, len(pool)):
        if room.microbatch[pool[i]] >= 0:
            movable[count] = pool[i]
            count += 1
    return movable


@njit(cache=True)
def _distance(room):
    total = 0.0
    for k in range(len(room.aim)):
        total += room.aim[k] ** 2
    return total


@njit(cache=True)
def _count(sample, m, load, room):
    """Enter the sample's totals into microbatch m."""
    for k in range(len(room.cap)):
        room.free[m, k] -= load.totals[sample, k]
        room.slack[k] -= load.share[sample, k]
        room.aim[k] -= load.share[sample, k]
    room.microbatch[sample] = m


@njit(cache=True)
def _remove(sample, load, room):
    """Take the sample out of the step; its parts' `place` still tells where they were."""
    m = room.microbatch[sample]
    for part in range(load.start[sample], load.start[sample + 1]):
        room.left[m, room.place[part]] += load.length[part]
    for k in range(len(room.cap)):
        room.free[m, k] += load.totals[sample, k]
        room.slack[k] += load.share[sample, k]
        room.aim[k] += load.share[sample, k]
    room.microbatch[sample] = -1


@njit(cache=True)
def _put_back(sample, m, load, room):
    """Undo `_remove`."""
    for part in range(load.start[sample], load.start[sample + 1]):
        room.left[m, room.place[part]] -= load.length[part]
    _count(sample, m, load, room)
