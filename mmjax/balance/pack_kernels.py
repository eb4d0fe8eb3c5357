"""Fill one microbatch from a queue of waiting samples: the inner loops of grouping `pack`.

Kernels are in one file with those that they call: Numba's cache of a function does not see that a
callee in another file has changed. A first run waits for Numba's compiler, so loops stand where
NumPy's functions would: each of these is compiled from Python as well, `a[:] = b` with strings for
its error. Numbers that other functions are given are no literals, for each of which Numba compiles
a function of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_WINDOW = 256  # waiting samples that are compared for one place
_CANDIDATES = 512  # waiting samples that exchanges may use
_MOVABLE = 160  # samples of the microbatch that may be exchanged
_TRIALS = 24  # waiting samples, best first, that rows are sought for in the place of one
_ROUNDS = 2
_CLOSE = 1e-4  # squared distance from the goal, in microbatches, below which nothing is exchanged
# Shares are sums of quotients, so a sample that fills a module exactly may seem to exceed it by
# this much.
_ROUNDING = 1e-12
# Signs of a sample that goes into the microbatch, or out of it.
_IN = np.int64(1)
_OUT = np.int64(-1)


class Room(NamedTuple):
    """Free space and contents of the microbatch that is being filled."""

    row_free: np.ndarray  # [rows] positions
    free: np.ndarray  # [columns, M] positions
    slack: np.ndarray  # [M] as shares of the microbatch
    aim: np.ndarray  # [M] the same up to the goal, below 0 beyond it
    row: np.ndarray  # [p]
    inside: np.ndarray  # bool [n]


@njit(cache=True)
def choose(queue, head, old, limit, load, room, share, everything):
    """Choose samples by their totals alone, and mark them as inside: their ids in the order chosen.

    First the `head` of the queue, then the oldest, of which the first `old` may go beyond the goal,
    until a module has `share` of its goal; then, of a window of waiting samples, always the one
    that brings the use nearest to the goal. The oldest alone where all are larger than the goal,
    and never more than `limit`.
    """
    n = len(queue)
    modules = len(room.aim)
    chosen = np.empty(n, np.int64)
    count = i = 0
    # The smallest goal is not 0, for it divides below: a module that nobody needs counts as
    # reached.
    goal = room.aim.copy()
    for k in range(modules):
        goal[k] = max(goal[k], 1e-30)
    while i < n and count < limit:
        s = queue[i]
        if i >= head and not everything:
            fits = True
            least_open = np.inf
            for k in range(modules):
                # The old may use what is free beyond the goal, for they cannot wait; others must
                # stay within the goal.
                fits &= load.share[s, k] <= (room.slack[k] if i < old else room.aim[k]) + _ROUNDING
                # The part of a module's goal that is still open; the fullest module decides.
                least_open = min(least_open, room.aim[k] / goal[k])
            if i >= old and 1 - least_open >= share:
                break
        else:
            fits = True
        i += 1
        if fits:
            _count(s, load, room, _IN)
            chosen[count] = s
            count += 1
    # The window makes the second stage linear: each choice compares at most _WINDOW samples,
    # however many wait.
    window = np.empty(_WINDOW, np.int64)
    size = next_waiting = 0
    while count < limit and not everything:
        # Refilled from the oldest that are still outside.
        while size < _WINDOW and next_waiting < n:
            if not room.inside[queue[next_waiting]]:
                window[size] = queue[next_waiting]
                size += 1
            next_waiting += 1
        best = -1
        max_gain = 0.0
        for j in range(size):
            gain = _gain(window[j], load, room)
            if gain > max_gain:
                best = j
                max_gain = gain
        if best < 0:
            break
        _count(window[best], load, room, _IN)
        chosen[count] = window[best]
        count += 1
        size -= 1
        # Order in the window does not matter: the last candidate takes the place of the chosen one.
        window[best] = window[size]
    # An empty microbatch would never end, so a sample above every goal goes alone.
    if count == 0 and min(n, limit) > 0:
        _count(queue[0], load, room, _IN)
        chosen[0] = queue[0]
        count = 1
    return chosen[:count]


@njit(cache=True)
def _gain(s, load, room):
    """Compute how much a sample lowers the squared distance from the goal; negative where it does not fit."""
    gain = 0.0
    for k in range(len(room.aim)):
        x = load.share[s, k]
        if x > room.slack[k] + _ROUNDING:
            return -1.0
        # aim^2 - (aim - x)^2 = x (2 aim - x), summed over modules.
        gain += x * (2 * room.aim[k] - x)
    return gain


@njit(cache=True)
def _count(s, load, room, sign):
    """Enter a sample's totals, or take them out."""
    for k in range(len(room.aim)):
        room.slack[k] -= sign * load.share[s, k]
        room.aim[k] -= sign * load.share[s, k]
    room.inside[s] = sign > 0


@njit(cache=True)
def parts_in(samples, load, module):
    """Return these samples' parts in a module, or in all (-1), and whose they are: int64 [q], indices into samples."""
    # Counted first, as an upper bound for all modules: Numba's arrays do not grow.
    total = 0
    for s in samples:
        total += load.start[s + 1] - load.start[s]
    part = np.empty(total, np.int64)
    owner = np.empty(total, np.int64)
    count = 0
    for i in range(len(samples)):
        for j in range(load.start[samples[i]], load.start[samples[i] + 1]):
            if module < 0 or load.module[j] == module:
                part[count] = j
                owner[count] = i
                count += 1
    return part[:count], owner[:count]


@njit(cache=True)
def measure(chosen, load, rows, room):
    """Count what is left of rows and columns after these samples; return whether no row is too full."""
    modules = len(rows.per_column)
    columns = len(room.free)
    for k in range(modules):
        # Begin with empty rows, then take off every part where `room.row` puts it.
        for r in range(rows.start[k], rows.start[k + 1]):
            room.row_free[r] = rows.length[k]
    for s in chosen:
        for j in range(load.start[s], load.start[s + 1]):
            room.row_free[room.row[j]] -= load.length[j]
    fits = True
    for k in range(modules):
        for c in range(columns):
            free = 0
            # Column c of module k has rows start[k] + c * per_column[k] and the per_column[k] - 1
            # after it.
            for r in range(
                rows.start[k] + c * rows.per_column[k], rows.start[k] + (c + 1) * rows.per_column[k]
            ):
                free += room.row_free[r]
                fits &= room.row_free[r] >= 0
            room.free[c, k] = free
    return fits


@njit(cache=True)
def eject(chosen, head, load, rows, room):
    """Take samples out until no row is too full, none of the first `head`; return whether that was enough.

    Of a row that is too full goes the sample with the shortest part that is enough, else with the
    longest.
    """
    n_rows = len(room.row_free)
    begin = np.zeros(n_rows + 1, np.int64)
    for s in chosen:
        for j in range(load.start[s], load.start[s + 1]):
            # Counting sort: begin[r + 1] counts row r's parts, and its running sum is where each
            # row's parts begin.
            begin[room.row[j] + 1] += 1
    # Parts grouped by row: those of row r are part[begin[r] : begin[r + 1]].
    for r in range(n_rows):
        begin[r + 1] += begin[r]
    part = np.empty(begin[n_rows], np.int64)
    owner = np.empty(begin[n_rows], np.int64)
    # The next place to fill in each row's range.
    free = begin.copy()
    for i in range(len(chosen)):
        for j in range(load.start[chosen[i]], load.start[chosen[i] + 1]):
            r = room.row[j]
            part[free[r]] = j
            owner[free[r]] = i
            free[r] += 1
    for r in range(n_rows):
        while room.row_free[r] < 0:
            best = -1
            for x in range(begin[r], begin[r + 1]):
                # The head must stay, and samples that went out for another row have no part here
                # any more.
                if owner[x] < head or not room.inside[chosen[owner[x]]]:
                    continue
                length = load.length[part[x]]
                enough = load.length[part[x]] >= -room.row_free[r]
                if best >= 0:
                    best_length = load.length[part[best]]
                    best_enough = best_length >= -room.row_free[r]
                    # Prefer a part that ends the overflow, and of those the shortest; if none does,
                    # the longest, to need few.
                    if best_enough and (not enough or length >= best_length):
                        continue
                    if not best_enough and not enough and length <= best_length:
                        continue
                best = x
            if best < 0:
                return False
            _move(chosen[owner[best]], load, rows, room, _OUT)
    return True


@njit(cache=True)
def _move(s, load, rows, room, sign):
    """Take a sample out of the rows that its parts' `row` says (sign -1), or put it in there again (1)."""
    # All parts of a sample share a column, so its first part, the LLM's, tells which.
    c = (room.row[load.start[s]] - rows.start[0]) // rows.per_column[0]
    for k in range(len(rows.per_column)):
        room.free[c, k] -= sign * load.total[s, k]
    for j in range(load.start[s], load.start[s + 1]):
        room.row_free[room.row[j]] -= sign * load.length[j]
    _count(s, load, room, sign)


@njit(cache=True)
def place(s, load, rows, room):
    """Put a sample in the fullest column that holds it, each part in the fullest row that does; False if none does."""
    best = -1
    min_ratio = np.inf
    for c in range(len(room.free)):
        free_ratio = 0.0
        for k in range(len(rows.per_column)):
            if room.free[c, k] < load.total[s, k]:
                free_ratio = np.inf
                break
            if load.total[s, k] > 0:
                # How many such samples the column could hold, summed over modules: the smallest is
                # the tightest fit.
                free_ratio += room.free[c, k] / load.total[s, k]
        if free_ratio < min_ratio:
            best = c
            min_ratio = free_ratio
    if best < 0:
        return False
    begin = load.start[s]
    end = load.start[s + 1]
    for j in range(begin, end):
        k = load.module[j]
        chosen = -1
        for r in range(
            rows.start[k] + best * rows.per_column[k],
            rows.start[k] + (best + 1) * rows.per_column[k],
        ):
            if room.row_free[r] >= load.length[j] and (
                chosen < 0 or room.row_free[r] < room.row_free[chosen]
            ):
                chosen = r
        if chosen < 0:
            # Undo the parts placed so far: the column holds the sample's totals but not its parts.
            for i in range(begin, j):
                room.row_free[room.row[i]] += load.length[i]
            return False
        room.row_free[chosen] -= load.length[j]
        room.row[j] = chosen
    for k in range(len(rows.per_column)):
        room.free[best, k] -= load.total[s, k]
    _count(s, load, room, _IN)
    return True


@njit(cache=True)
def improve(queue, head, old, limit, load, rows, room):
    """Add waiting samples, up to `limit` in all, and exchange others but the `old` for them, to come near the goal."""
    waiting = np.empty(_CANDIDATES, np.int64)
    w = 0
    for s in queue:
        if w == _CANDIDATES:
            break
        if not room.inside[s]:
            waiting[w] = s
            w += 1
    waiting = waiting[:w]
    # From here on `limit` counts samples that may still be added.
    for s in queue:
        limit -= room.inside[s]
    limit -= _fill_up(waiting, limit, load, rows, room)
    movable = np.empty(_MOVABLE, np.int64)
    m = 0
    # Backwards, so that the youngest give up their place first: those have the most time left.
    for i in range(len(queue) - 1, max(head, old) - 1, -1):
        if m == _MOVABLE:
            break
        if room.inside[queue[i]]:
            movable[m] = queue[i]
            m += 1
    gain = np.empty(w)
    for _ in range(_ROUNDS):
        changed = False
        for i in range(m):
            # Squared distance to the goal over all modules: what is left would not pay for another
            # search.
            distance = 0.0
            for k in range(len(room.aim)):
                distance += room.aim[k] * room.aim[k]
            if distance <= _CLOSE:
                return
            changed |= _exchange(movable, i, waiting, gain, load, rows, room)
        if not changed:
            return
        limit -= _fill_up(waiting, limit, load, rows, room)


@njit(cache=True)
def _exchange(movable, i, waiting, gain, load, rows, room):
    """Exchange a sample for the waiting one that brings use nearest to the goal and finds rows; return success."""
    old = movable[i]
    for j in range(len(waiting)):
        gain[j] = 0.0
        if room.inside[waiting[j]]:
            continue
        for k in range(len(room.aim)):
            change = load.share[waiting[j], k] - load.share[old, k]
            if change > room.slack[k] + _ROUNDING:
                # More than is free in a module: no exchange, whatever it wins in the others.
                gain[j] = -1.0
                break
            # As in `_gain`, for a change of use that may be negative.
            gain[j] += change * (2 * room.aim[k] - change)
    for _ in range(min(_TRIALS, len(waiting))):
        best = 0
        for j in range(1, len(waiting)):
            if gain[j] > gain[best]:
                best = j
        if gain[best] <= 1e-9:
            return False
        gain[best] = -1.0
        # The sample's rows stay in `room.row`, so that it comes back where the candidate finds
        # none.
        _move(old, load, rows, room, _OUT)
        if place(waiting[best], load, rows, room):
            movable[i], waiting[best] = waiting[best], old
            return True
        _move(old, load, rows, room, _IN)
    return False


@njit(cache=True)
def _fill_up(waiting, limit, load, rows, room):
    """Add the waiting sample that brings use nearest to the goal until none helps or finds rows; return the count."""
    refused = np.empty(len(waiting), np.bool_)
    for j in range(len(waiting)):
        refused[j] = room.inside[waiting[j]]
    added = 0
    while added < limit:
        best = -1
        max_gain = 0.0
        for j in range(len(waiting)):
            if not refused[j]:
                gain = _gain(waiting[j], load, room)
                # Every sample that is added lowers aim and slack, and with them all gains.
                refused[j] = gain <= 0  # and will stay so
                if gain > max_gain:
                    best = j
                    max_gain = gain
        if best < 0:
            break
        refused[best] = True
        # A sample without rows counts as refused and not as added; `place` has then changed
        # nothing.
        added += place(waiting[best], load, rows, room)
    return added


@njit(cache=True)
def close(queue, current, load, room, microbatch, used):
    """Number the samples of this microbatch and drop them from the queue; return how many still wait."""
    # The queue is compacted in place; its order, and so the age of those who wait, stays.
    n_waiting = 0
    for s in queue:
        if room.inside[s]:
            microbatch[s] = current
            room.inside[s] = False
            for k in range(len(used)):
                used[k] += load.share[s, k]
        else:
            queue[n_waiting] = s
            n_waiting += 1
    return n_waiting
