"""Grouping `pack`: steps whose rows are full in every module at once, all of one shape.

A window of waiting samples slides over the shuffled order. A step takes its oldest samples first, so that it stays
random and none waits long, then those that bring all modules closest to full together, then exchanges samples while
that fills it further (`step_filling`). A module that has room to spare is filled to its share of the data only: else
early steps would take what later ones need. A chunk is drained, so a step is found again by replaying its chunk alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmjax.balance.budgets import Budgets
from mmjax.balance.parts import Parts
from mmjax.balance.row_maximum import choose_maximum
from mmjax.balance.step_filling import Load, Room, fill_steps, find_oversize


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
    oldest_first: the oldest samples that fit are taken until the rows of some module are this full.
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


def pack_rows(lengths: np.ndarray, maximum: np.ndarray, order: np.ndarray, pool_rows: float = 120) -> np.ndarray:
    """Pack samples into rows that hold at most `maximum` `[D]` in each dimension: the row of each, int32 `[n]`.

    The same as `pack` with one row of each module in a step: OmniBal's groups. Rows are numbered as they were filled;
    -1 for samples that are not in `order`. lengths: int `[n, D]`, the first column at least 1 (tokens of the LLM).
    pool_rows: the window of waiting samples; about 600 of them find partners that fit to 1%.
    Raises ValueError for a sample above the maximum.
    """
    lengths, maximum = np.asarray(lengths, np.int64), np.asarray(maximum, np.int64)
    sample, module = np.nonzero(lengths)
    start = np.concatenate([[0], np.cumsum(np.bincount(sample, minlength=len(lengths)))]).astype(np.int64)
    parts = Parts(start, module.astype(np.int32), lengths[sample, module])
    budgets = Budgets(np.ones_like(maximum), maximum, 0.0)
    return pack(parts, order, budgets, pool_steps=pool_rows, oldest_first=0.9, urgent_after=int(2 * pool_rows)).step


def choose_row_maximum(
    lengths: np.ndarray, samples_per_row: tuple[float, float], given: np.ndarray | None = None
) -> np.ndarray:
    """The maxima of rows, int64 `[D]`, with which `pack_rows` leaves the least empty: see `choose_maximum`."""

    def rows_needed(trial: np.ndarray, maximum: np.ndarray) -> float:
        return float(pack_rows(trial, maximum, np.arange(len(trial)), pool_rows=40).max() + 1)

    return choose_maximum(lengths, samples_per_row, rows_needed, given=given)


def oversize(parts: Parts, budgets: Budgets) -> np.ndarray:
    """Which samples do not fit the rows of one empty microbatch, bool `[n]`."""
    return find_oversize(*_prepare(parts, budgets, 1, budgets.rows * budgets.length))


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


def _prepare(parts: Parts, budgets: Budgets, microbatches: int, cap: np.ndarray) -> tuple[Load, Room]:
    totals = parts.totals(len(cap))
    load = Load(parts.sample_start, parts.module, parts.length, parts.by_size(), totals, totals / cap)
    row_start = np.concatenate([[0], np.cumsum(budgets.rows)])
    left = np.zeros((microbatches, row_start[-1]), np.int64)
    free = np.zeros((microbatches, len(cap)), np.int64)
    slack, aim = np.zeros(len(cap)), np.zeros(len(cap))
    row, microbatch = np.full(len(parts.module), -1), np.full(len(parts), -1)
    refused = np.zeros(len(parts), np.bool_)
    return load, Room(row_start, budgets.length, cap, left, free, slack, aim, row, microbatch, refused)


def _steps(
    parts: Parts, budgets: Budgets, microbatches: int, cap: np.ndarray, policy: _Policy, entered: np.ndarray, first: int
) -> Packing:
    """Pack all samples, oldest first in line, into steps from `first` on, at most `cap` `[M]` in a microbatch.

    entered: the step at which each sample entered the window, -1 where it still has to.
    """
    load, room = _prepare(parts, budgets, microbatches, cap)
    step, entered = np.full(len(parts), -1, np.int32), entered.copy()
    end = fill_steps(load, room, policy.pool_steps, policy.oldest_first, policy.urgent_after, first, entered, step)
    row = room.microbatch[parts.sample()] * budgets.rows[parts.module] + room.place - room.row_start[parts.module]
    return Packing(step, row.astype(np.int32), (step - entered).astype(np.int32), end)
