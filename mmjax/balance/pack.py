"""Grouping `pack`: steps whose rows are full in every module at once, all of one shape.

A window of waiting samples slides over the shuffled order. A step takes its oldest samples first, so that none waits
long, then those that bring all modules closest to full together, then exchanges samples while that fills it further.
A chunk is drained, so a step is found again by replaying its chunk alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.balance.budgets import Budgets
from mmjax.balance.parts import LLM, Parts

_NONE = np.int64(-1)  # typed: Numba compiles every callee once more for a literal
_EXCHANGE_ROUNDS = 2  # more gained 0.1 points of fill for half as much time again


@dataclass(frozen=True)
class Packing:
    """Where each sample and part went.

    step: int32 `[n]`, -1 for samples that were not in the order given.
    row: int32 `[p]`, microbatch * rows of the part's module + row within the microbatch; -1 likewise.
    waited: int32 `[n]`, steps between the one at which the sample entered the window and its own; -1 likewise.
    """

    step: np.ndarray
    row: np.ndarray
    waited: np.ndarray
    n_steps: int


def pack(
    parts: Parts,
    order: np.ndarray,
    budgets: Budgets,
    microbatches: int = 1,
    pool_steps: float = 4,
    oldest_first: float = 0.6,
    urgent_after: int = 8,
) -> Packing:
    """Pack the samples `order` into steps: each gets exactly one, and all its parts rows of one microbatch.

    Deterministic. The last steps share what is left evenly.
    pool_steps: the window holds this many steps' worth of waiting samples, in the module that has most of them.
    oldest_first: the oldest samples that fit are taken until the LLM's rows are this full.
    urgent_after: samples that have waited this many steps go before all others and are not exchanged for others.
    Raises ValueError for a sample that fits no step; `oversize` finds these beforehand.
    """
    order = np.asarray(order, np.int64)
    chunk = parts.take(order)
    if np.any(too_large := oversize(chunk, budgets)):
        raise ValueError(f"sample {order[np.argmax(too_large)]} does not fit the rows of an empty microbatch")
    policy = _Policy(float(pool_steps), float(oldest_first), urgent_after)
    cap = budgets.rows * budgets.length
    packed = _steps(chunk, budgets, microbatches, cap, policy, np.full(len(order), -1, np.int64), 0)
    packed = _share_tail(chunk, budgets, microbatches, packed, policy)

    step, waited = np.full(len(parts), -1, np.int32), np.full(len(parts), -1, np.int32)
    row = np.full(len(parts.module), -1, np.int32)
    step[order], waited[order], row[parts.of_samples(order)] = packed.step, packed.waited, packed.row
    return Packing(step, row, waited, packed.n_steps)


def oversize(parts: Parts, budgets: Budgets) -> np.ndarray:
    """Which samples do not fit the rows of one empty microbatch, bool `[n]`."""
    return _oversize(*_prepare(parts, budgets, 1, budgets.rows * budgets.length))


def _share_tail(chunk: Parts, budgets: Budgets, microbatches: int, packed: Packing, policy: _Policy) -> Packing:
    """Repack the steps after the last sample has entered into as few as possible, equally full.

    Otherwise the last update of a chunk may rest on a single sample.
    """
    if len(chunk) == 0:
        return packed
    entered = packed.step - packed.waited
    first = int(entered.max())
    tail = np.flatnonzero(packed.step >= first)
    rest = chunk.take(tail)
    totals = rest.totals(len(budgets.rows))
    capacity = budgets.rows * budgets.length
    in_steps = totals.sum(0) / (capacity * microbatches)
    anything = _Policy(float("inf"), 0.0, policy.urgent_after)
    for steps in range(max(1, int(np.ceil(in_steps.max()))), packed.n_steps - first + 1):
        for allowance in (0.02, 0.05, 0.1, 0.2, 0.4):
            even = np.ceil(in_steps / steps * capacity * (1 + allowance)).astype(np.int64) + 1  # never 0
            cap = np.minimum(capacity, np.maximum(even, totals.max(0)))
            again = _steps(rest, budgets, microbatches, cap, anything, entered[tail].astype(np.int64), first)
            if again.n_steps <= first + steps:
                step, row, waited = packed.step.copy(), packed.row.copy(), packed.waited.copy()
                step[tail], waited[tail], row[chunk.of_samples(tail)] = again.step, again.waited, again.row
                return Packing(step, row, waited, again.n_steps)
    return packed


class _Policy(NamedTuple):
    pool_steps: float
    oldest_first: float
    urgent_after: int


class _Load(NamedTuple):
    """What samples ask for: `Parts`, with `by_size`, totals `[n, M]` and these as shares of a microbatch's cap."""

    start: np.ndarray
    module: np.ndarray
    length: np.ndarray
    by_size: np.ndarray
    totals: np.ndarray
    share: np.ndarray


class _Room(NamedTuple):
    """The step being filled. The rows of all modules are numbered in one go within a microbatch."""

    row_start: np.ndarray  # [M + 1]
    row_length: np.ndarray  # [M] positions
    cap: np.ndarray  # [M] positions in a microbatch; at most what its rows hold
    left: np.ndarray  # [microbatch, row] positions
    free: np.ndarray  # [microbatch, M] positions under the cap
    slack: np.ndarray  # [M] free positions of the step, as shares of a microbatch's cap
    place: np.ndarray  # [p] row
    microbatch: np.ndarray  # [n], -1 = not in a step
    refused: np.ndarray  # [n] did not fit the step as it is


def _prepare(parts: Parts, budgets: Budgets, microbatches: int, cap: np.ndarray) -> tuple[_Load, _Room]:
    totals = parts.totals(len(cap))
    load = _Load(parts.sample_start, parts.module, parts.length, parts.by_size(), totals, totals / cap)
    row_start = np.concatenate([[0], np.cumsum(budgets.rows)])
    left = np.zeros((microbatches, row_start[-1]), np.int64)
    free, slack = np.zeros((microbatches, len(cap)), np.int64), np.zeros(len(cap))
    place, microbatch = np.full(len(parts.module), -1), np.full(len(parts), -1)
    refused = np.zeros(len(parts), np.bool_)
    return load, _Room(row_start, budgets.length, cap, left, free, slack, place, microbatch, refused)


def _steps(
    parts: Parts, budgets: Budgets, microbatches: int, cap: np.ndarray, policy: _Policy, entered: np.ndarray, first: int
) -> Packing:
    """Pack all samples, oldest first in line, into steps from `first` on, at most `cap` `[M]` in a microbatch.

    entered: the step at which each sample entered the window, -1 where it still has to.
    """
    load, room = _prepare(parts, budgets, microbatches, cap)
    step, entered = np.full(len(parts), -1, np.int32), entered.copy()
    end = _fill_steps(load, room, policy.pool_steps, policy.oldest_first, policy.urgent_after, first, entered, step)
    row = room.microbatch[parts.sample()] * budgets.rows[parts.module] + room.place - room.row_start[parts.module]
    return Packing(step, row.astype(np.int32), (step - entered).astype(np.int32), end)


@njit(cache=True)
def _empty(room):
    """Open the rows of a new step."""
    for k in range(len(room.cap)):
        room.slack[k] = len(room.free)
        for m in range(len(room.free)):
            room.free[m, k] = room.cap[k]
            for row in range(room.row_start[k], room.row_start[k + 1]):
                room.left[m, row] = room.row_length[k]


@njit(cache=True)
def _count(sample, m, load, room):
    """Enter the sample's totals into microbatch m."""
    for k in range(len(room.cap)):
        room.free[m, k] -= load.totals[sample, k]
        room.slack[k] -= load.share[sample, k]
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
    room.microbatch[sample] = -1


@njit(cache=True)
def _put_back(sample, m, load, room):
    """Undo `_remove`."""
    for part in range(load.start[sample], load.start[sample + 1]):
        room.left[m, room.place[part]] -= load.length[part]
    _count(sample, m, load, room)


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
def _take(sample, load, room):
    """Place the sample in the microbatch with most left of what it asks for that holds it, or mark it refused."""
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
def _take_best(pool, load, room):
    """While anything fits, take the sample after which the sum over modules of (1 - use / budget)^2 is least."""
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
                gain += share * (2 * room.slack[k] - share)
            if gain > most and not room.refused[sample]:
                best, most = sample, gain
        if best < 0:
            return
        _take(best, load, room)


@njit(cache=True)
def _exchange(pool, settled, load, room):
    """Swap samples of the step (but the `settled` first of the pool) for waiting ones while that lowers the sum."""
    movable = np.zeros(len(pool), np.int64)
    taken = 0
    for i in range(settled, len(pool)):
        if room.microbatch[pool[i]] >= 0:
            movable[taken] = pool[i]
            taken += 1
    for _ in range(_EXCHANGE_ROUNDS):
        changed = False
        for new in pool:
            if room.microbatch[new] >= 0:
                continue
            for i in range(taken):
                old = movable[i]
                m = room.microbatch[old]
                gain = 0.0
                for k in range(len(room.cap)):
                    more = load.share[new, k] - load.share[old, k]
                    if more > room.slack[k] + 1e-9:
                        gain = -1.0
                        break
                    gain += more * (2 * room.slack[k] - more)
                if gain <= 1e-9:
                    continue
                _remove(old, load, room)
                if _place(new, m, load, room):
                    movable[i] = new
                    changed = True
                    break
                _put_back(old, m, load, room)
        if not changed:
            return


@njit(cache=True)
def _fill_steps(load, room, pool_steps, oldest_first, urgent_after, first, entered, step):
    """Slide the window over all samples, fill one step after the other; the number after the last one."""
    n, microbatches = len(step), len(room.free)
    pool = np.zeros(n, np.int64)
    waiting, following, now = 0, 0, first
    asked = np.zeros(len(room.cap))  # by the waiting samples, in microbatches' caps
    while waiting > 0 or following < n:
        while following < n and (waiting == 0 or _largest(asked) < pool_steps * microbatches):
            pool[waiting] = following
            if entered[following] < 0:
                entered[following] = now
            _add(asked, load.share, following, 1.0)
            waiting += 1
            following += 1
        _empty(room)
        urgent = np.int64(0)
        for i in range(waiting):
            sample = pool[i]
            room.refused[sample] = False
            if now - entered[sample] >= urgent_after:
                urgent += 1
                _take(sample, load, room)
            elif room.slack[LLM] > (1 - oldest_first) * microbatches:
                _take(sample, load, room)
        _take_best(pool[:waiting], load, room)
        _exchange(pool[:waiting], urgent, load, room)
        kept = 0
        for i in range(waiting):
            sample = pool[i]
            if room.microbatch[sample] >= 0:
                step[sample] = now
                _add(asked, load.share, sample, -1.0)
            else:
                pool[kept] = sample
                kept += 1
        waiting = kept
        now += 1
    return now


@njit(cache=True)
def _largest(values):
    most = values[0]
    for value in values:
        most = max(most, value)
    return most


@njit(cache=True)
def _add(total, share, sample, sign):
    for k in range(len(total)):
        total[k] += sign * share[sample, k]


@njit(cache=True)
def _oversize(load, room):
    """bool [n]: does not fit an empty microbatch."""
    too_large = np.zeros(len(load.totals), np.bool_)
    for sample in range(len(too_large)):
        _empty(room)
        too_large[sample] = not _place(sample, np.int64(0), load, room)
    return too_large
