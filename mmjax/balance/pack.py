"""Grouping `pack`: steps whose rows are full in every module at once, all of one shape.

A chunk is packed microbatch by microbatch, from a queue in the order of the shuffle, in four moves.
(1) Samples are chosen by their totals alone: the oldest first, then, of a short window, those that
bring every module to its goal. (2) Their parts are laid in rows, longest first and with exchanges.
(3) Samples of rows that stay too full go back. (4) What is still missing is added, or exchanged
for, within bounds. Each move is near linear in the samples.

All parts of a sample lie in one column where rows allow it: `columns` equal groups of rows of every
module. Where the ranks divide the columns, a rank takes its columns, and nothing has to be placed
or sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmjax.balance.budgets import Budgets, choose_maximum, units
from mmjax.balance.lpt import longest_first, lpt, polish
from mmjax.balance.pack_columns import Columns
from mmjax.balance.pack_kernels import (
    Room,
    choose,
    close,
    eject,
    improve,
    measure,
    parts_in,
    place,
)
from mmjax.balance.pack_queue import Load, Rows, admit, fit_alone
from mmjax.balance.parts import Parts

LONGEST_WAIT = 10  # steps
_SOON = 2  # steps before it must, a sample goes before all others
# this, divided by the root of the samples of a microbatch, is the share of a goal that is chosen to
# fit
_CHOSEN = 2.5
_LEAST_IN_COLUMN = 12  # samples, with which a column can be full in all modules
# samples of a microbatch, below which a chunk that needed one step more is packed again, evenly
_FEW = 512
_SO_FEW = 8  # microbatches of a chunk, below which the first try leaves nothing empty
_MANY = 128  # microbatches of a chunk, above which all but its end are as full as can be
_SPARE = 0.03  # what rows leave empty, times the root of the samples of a microbatch
_SPARE_IN_COLUMNS = 0.2
_ROOM = 0.06  # as _SPARE: what a number of steps that is counted beforehand leaves empty
_ROOM_IN_COLUMNS = 0.015
_BEHIND = 0.01  # of the microbatches that are left: more than they hold is missing
_TAIL = 8  # steps that are packed again where a chunk needs more of them
_SURELY_MISSING = 0.8  # of the room for what is left over
# more than an even share is taken while there is a choice: the last step has none
_EASE = 0.01, 0.04
# the same, before the steps that may be packed again: a long chunk leaves its end some slack
_EASE_BEFORE = 0.004
_EASE_IN_COLUMNS = 0.16, 0.32  # the same where steps are large, divided by the samples of a column


@dataclass(frozen=True)
class Packing:
    """Step and row of each sample and part.

    step: int32 `[n]`, -1 for samples that were not in the order given.
    row: int32 `[p]`, microbatch * rows of the part's module + row within the microbatch; -1
    likewise.
    waited: int32 `[n]`, steps between the one at which the sample joined the queue and its own; -1
    likewise.
    """

    step: np.ndarray
    row: np.ndarray
    waited: np.ndarray


def pack(
    parts: Parts,
    order: np.ndarray,
    budgets: Budgets,
    microbatches: int = 1,
    pool_steps: float = 4,
    columns: int = 1,
    longest_wait: int = LONGEST_WAIT,
    steps: int = 0,
) -> Packing:
    """Pack the samples `order` into steps: each gets exactly one, and all its parts rows of one column.

    Deterministic. No sample waits for more than `longest_wait` steps.
    pool_steps: so many steps' worth of samples wait in the queue.
    columns: a divisor of every module's rows; 1 lets the parts of a sample lie in any rows of its
    microbatch.
    steps: so many, at most as many as samples; 0 = as few as can be. Where these do not hold all
    samples, some of them get more than `microbatches`. Raises ValueError for a sample that fits no
    column; `oversize` finds these beforehand.
    """
    order = np.asarray(order, np.int64)
    if steps > len(order):
        raise ValueError(f"{len(order)} samples do not make {steps} steps")
    # From here on samples are numbered by their place in the order: sample i is order[i].
    taken = parts if np.array_equal(order, np.arange(len(parts))) else parts.take(order)
    chunk = _Chunk(taken, budgets, microbatches, columns, pool_steps, longest_wait, steps)
    if np.any(too_large := ~fit_alone(chunk.load, chunk.rows)):
        where = "microbatch" if columns == 1 else "column"
        raise ValueError(
            f"sample {order[np.argmax(too_large)]} does not fit the rows of an empty {where}"
        )
    chunk.pack(steps)
    levelled = columns > 1 and chunk.columns.prices is not None
    if levelled:
        chunk.columns.level(chunk.microbatch, chunk.row)

    # Where there are more microbatches than planned, a step's are those from ceil(step * all /
    # steps) on.
    steps = steps or -(-chunk.current // microbatches)
    total = max(chunk.current, steps * microbatches)
    # `latest` was set to the microbatch of joining plus the longest wait, so this gets the former
    # back.
    joined = chunk.latest - longest_wait * microbatches
    # Microbatches are dealt to steps evenly, the surplus ones as far apart as can be.
    if levelled:
        step_of = np.arange(chunk.current) * steps // total
        chunk.microbatch = chunk.columns.deal(step_of, chunk.microbatch, chunk.row)
    in_step = chunk.microbatch * steps // total
    within = chunk.microbatch - -(-in_step * total // steps)
    owner = np.repeat(np.arange(len(order)), np.diff(chunk.load.start))
    # Example: 7 microbatches in 3 steps; microbatch 4 is in step 4 * 3 // 7 = 1, which starts at
    # ceil(7 / 3) = 3.
    step = np.full(len(parts), -1, np.int32)
    waited = np.full(len(parts), -1, np.int32)
    row = np.full(len(parts.module), -1, np.int32)
    step[order] = in_step
    waited[order] = in_step - joined * steps // total
    # Kernels number the rows of all modules through; a plan numbers each module's from 0 in each
    # step.
    first = within[owner] * budgets.rows[chunk.load.module] - chunk.rows.start[chunk.load.module]
    row[parts.of_samples(order)] = first + chunk.row
    return Packing(step, row, waited)


def count_steps(parts: Parts, budgets: Budgets, microbatches: int = 1, columns: int = 1) -> int:
    """Count the steps that hold these samples with room to spare, so that `pack` takes one pass and no more rows."""
    load, _ = _prepare(parts, budgets, columns)
    # Microbatches that the neediest module fills; the others have rows to spare.
    need = float(load.share.sum(0).max(initial=0.0))
    room = _ROOM_IN_COLUMNS if columns > 1 else _ROOM * (need / max(len(parts), 1)) ** 0.5
    return min(max(1, math.ceil(need * (1 + room) / microbatches - 1e-9)), max(len(parts), 1))


def columns_for(parts: Parts, budgets: Budgets) -> int:
    """Return how many columns the rows of a microbatch make for such samples; 1 where columns would stay too empty.

    parts: those of all samples that fill more than a row of a module; the others fit every column.
    """
    # Every module must have equally many rows in each column, so their number divides all modules'
    # rows.
    columns = int(np.gcd.reduce(budgets.rows))
    if columns == 1 or budgets.samples_per_step < _LEAST_IN_COLUMN * columns:
        return 1
    load, rows = _prepare(parts, budgets, columns)
    return columns if fit_alone(load, rows).all() else 1


def oversize(parts: Parts, budgets: Budgets) -> np.ndarray:
    """Find the samples that do not fit the rows of one empty microbatch, bool `[n]`."""
    return ~fit_alone(*_prepare(parts, budgets, 1))


def _prepare(parts: Parts, budgets: Budgets, columns: int) -> tuple[Load, Rows]:
    modules = len(budgets.rows)
    total = parts.totals(modules)
    # Parts come in multiples of their module's unit, so the end of a row that is no multiple stays
    # empty.
    usable = np.maximum(budgets.length // units(parts, modules) * units(parts, modules), 1)
    rows = Rows(np.concatenate([[0], np.cumsum(budgets.rows)]), budgets.rows // columns, usable)
    return Load(
        parts.sample_start, parts.module, parts.length, total, total / (budgets.rows * usable)
    ), rows


class _Chunk:
    """State of a chunk while its samples are packed. Samples are numbered in the order of the shuffle."""

    def __init__(
        self,
        parts: Parts,
        budget: Budgets,
        microbatches: int,
        columns: int,
        pool_steps: float,
        longest_wait: int,
        steps: int,
    ) -> None:
        self.load, self.rows = _prepare(parts, budget, columns)
        self.need = self.load.share.sum(0)  # float64 [M], microbatches that all samples fill
        self.microbatches = microbatches  # of a step
        self.longest_wait = longest_wait  # steps
        self.all_weights = budget.all_weights
        self.columns = Columns(
            count=columns,
            load=self.load,
            rows=self.rows,
            unit=units(parts, len(self.need)),
            pairs=parts.pairs,
            prices=None if parts.pairs is None else budget.prices,
            all_weights=budget.all_weights,
        )
        n = len(parts)
        planned = max(float(self.need.max(initial=0)), steps * microbatches, 1e-9)
        # n / planned is the mean number of samples of a microbatch, so this many make pool_steps
        # steps.
        self.max_waiting = int(min(pool_steps * microbatches * n / planned, n)) + 1
        self.queue = np.full(n, -1, np.int64)  # whose first `waiting` are waiting, the oldest first
        self.latest = np.full(n, -1, np.int64)  # the last microbatch that a sample may wait for
        self.microbatch = np.full(n, -1, np.int64)  # of each that has one
        self.row = np.full(len(parts.module), -1, np.int64)
        # rows of the queue's head, if nothing better is found
        self.turn = np.full(len(parts.module), -1, np.int64)
        self.inside = np.zeros(n, bool)  # of the microbatch that is being filled
        self.used = np.zeros(len(self.need))  # microbatches filled so far
        self.waiting = 0
        self.following = 0  # the first that has not joined the queue
        self.current = 0  # microbatch

    @property
    def per_microbatch(self) -> float:
        """Return how many samples fill a microbatch."""
        return len(self.inside) / max(float(self.need.max()), 1e-9)

    def pack(self, steps: int) -> None:
        """Pack everything into so many steps, 0 = as few as can be, or into more microbatches where it must be."""
        if len(self.inside) == 0:
            return
        count = self.microbatches
        need = float(self.need.max())
        # Small chunks are packed again as a whole where they came out too long; in large ones only
        # the tail is.
        from_start = self.per_microbatch < _FEW and need <= _MANY
        end = max(steps * count, math.ceil(need - 1e-9)) if steps else self._fewest(need)
        while True:
            # The part that no attempt repeats.
            if not from_start:
                end = self._fill_beginning(end)
            start = self._saved()
            # The first attempt fills each microbatch hardly more than evenly, the second leaves the
            # end more slack.
            for attempt, ease in enumerate(self._eases()):
                if attempt:
                    self._restore(start)
                self._fill_until(end, end, ease)
                if not self._left():
                    return
            # Each sample fits a microbatch of its own, so growing `end` must end; this guards
            # against a kernel's mistake.
            if self.current > 4 * end:
                raise AssertionError("samples that fit a microbatch alone are left over")
            # What is left over, in microbatches of the neediest module. Only a part of it is added,
            # for what is packed again may come out fuller.
            extra = math.ceil(_SURELY_MISSING * float((self.need - self.used).max()))
            self._restore(start)
            end += max(extra - 1, 1) if steps else max(-(-extra // count) - 1, 1) * count

    def _eases(self) -> tuple[float, float]:
        """Return by how much each attempt fills microbatches beyond an even share, while there are samples to spare.

        Columns of many samples are so alike that they are hardly needed to differ, and full ones
        cost exchanges.
        """
        if self.columns.count == 1 or self.per_microbatch < _FEW:
            return _EASE
        per_column = self.per_microbatch / self.columns.count
        first, second = (
            min(ease / per_column, limit)
            for ease, limit in zip(_EASE_IN_COLUMNS, _EASE, strict=True)
        )
        return first, second

    def _fewest(self, need: float) -> int:
        """Estimate the microbatches of so few whole steps that most likely hold all samples."""
        columns = self.columns.count > 1 and self.per_microbatch >= _FEW
        spare = (_SPARE_IN_COLUMNS if columns else _SPARE) / self.per_microbatch**0.5
        # Long chunks are as full as can be but for their end; in short ones a whole step to spare
        # would be a large part.
        if need > _MANY or need < _SO_FEW:
            spare = 0.0
        return (
            -(-math.ceil(need / (1 - min(spare, 0.5)) - 1e-9) // self.microbatches)
            * self.microbatches
        )

    def _fill_beginning(self, end: int) -> int:
        """Fill microbatches up to those that may be packed again; return `end`, later where these came out emptier."""
        while self.current < end - _TAIL * self.microbatches and self._left():
            missing = float((self.need - self.used).max())
            if not self.all_weights and missing > (1 + _BEHIND) * (end - self.current):
                # What is left does not fit any more, and full microbatches are those that take
                # longest to lay out.
                further = math.ceil(missing * self.current / float(self.used.max()))
                end = -(-(self.current + further) // self.microbatches) * self.microbatches
            self._fill_until(end, self.current + 1, _EASE_BEFORE)
        return end

    def _left(self) -> bool:
        return self.waiting > 0 or self.following < len(self.inside)

    def _fill_until(self, end: int, until: int, ease: float = 0.0) -> None:
        """Fill microbatches up to `until`, of `end` that share what is left evenly."""
        while self.current < until and self._left():
            # The goal is what remains over the microbatches that remain, so that early errors
            # spread over all later ones.
            even = np.maximum(self.need - self.used, 0) / (end - self.current)
            self._fill(np.minimum(even * (1 + ease), 1.0), end - self.current - 1)

    def _saved(self) -> tuple:
        arrays = self.queue, self.latest, self.microbatch, self.row, self.used
        return tuple(array.copy() for array in arrays), (self.waiting, self.following, self.current)

    def _restore(self, saved: tuple) -> None:
        self.queue, self.latest, self.microbatch, self.row, self.used = (
            array.copy() for array in saved[0]
        )
        self.waiting, self.following, self.current = saved[1]

    def _fill(self, goal: np.ndarray, later: int) -> None:
        """Fill one microbatch to about `goal` `[M]`, shares of it; the last, with none `later`, takes what it can."""
        n = len(self.inside)
        last = later == 0
        count = self.microbatches
        # In microbatches, like `latest`: whoever joins now must leave the queue by then.
        deadline = self.current + self.longest_wait * count
        self.waiting, self.following, head = admit(
            self.load, self.rows, self.columns.count, self.queue, self.waiting, self.following,
            n if last else self.max_waiting, self.current, self.latest, deadline, self.turn,
        )  # fmt: skip
        queue = self.queue[: self.waiting]
        # `slack` is what still fits, `aim` what is missing to the goal: both fall with every
        # sample, aim below 0.
        room = Room(
            row_free=np.zeros(self.rows.start[-1], np.int64),
            free=np.zeros((self.columns.count, len(goal)), np.int64),
            slack=np.ones(len(goal)),
            aim=goal.copy(),
            row=self.row,
            inside=self.inside,
        )
        # The queue is in the order of joining, so `latest` ascends, and those who must go soon are
        # its first ones.
        old = int(np.searchsorted(self.latest[queue], self.current + _SOON * count, side="right"))
        # With few samples a microbatch, more of it is left for the choice that reaches all goals at
        # once: of 100 a quarter.
        oldest_first = 1 - min(0.8, _CHOSEN / self.per_microbatch**0.5)
        # At least one sample is left for each later step, and taken by the first microbatch of this
        # one.
        spare = self.waiting + n - self.following - later // count
        limit = max(spare, 1 if self.current % count == 0 else 0, head)
        chosen = choose(queue, head, old, limit, self.load, room, oldest_first, last)
        # If even without the samples that were taken out a row is too full, the head of next-fit is
        # sure to fit.
        if not self._place_in_rows(chosen, room) and not eject(
            chosen, head, self.load, self.rows, room
        ):
            self._take_head(chosen, head, room, goal)
        if (
            self.waiting and limit and not self.inside[queue].any()
        ):  # a lone sample whose parts only `admit` lays in its rows
            self._take_head(queue[:1], 1, room, goal)
        if not last:
            improve(queue, head, old, limit, self.load, self.rows, room)
        self.waiting = close(queue, self.current, self.load, room, self.microbatch, self.used)
        self.current += 1

    def _take_head(self, chosen: np.ndarray, head: int, room: Room, goal: np.ndarray) -> None:
        """Put the head of the queue in the rows that next-fit has found, then what else was chosen where it fits."""
        room.slack[:] = 1
        room.aim[:] = goal
        room.inside[chosen] = False
        part, _ = parts_in(chosen[:head], self.load, -1)
        room.row[part] = self.turn[part]
        room.inside[chosen[:head]] = True
        # The kernels' `_count` for many samples at once.
        for amount in (room.slack, room.aim):
            amount -= self.load.share[chosen[:head]].sum(0)
        measure(chosen[:head], self.load, self.rows, room)
        for sample in chosen[head:]:
            place(sample, self.load, self.rows, room)

    def _place_in_rows(self, chosen: np.ndarray, room: Room) -> bool:
        """Lay the parts of these samples in rows as evenly as exchanges make it; return whether all fit."""
        # With columns a sample's parts stay together, so samples are placed; else each module's
        # parts by themselves.
        if self.columns.count > 1:
            self.columns.place(chosen, room.row)
        else:
            for k, length in enumerate(self.rows.length):
                part, _ = parts_in(chosen, self.load, k)
                size = self.load.length[part]
                order = longest_first(size)
                row = np.zeros(len(part), np.int32)
                full = np.zeros(self.rows.per_column[k], np.int64)
                lpt(size, order, row, full)
                if full.max() > length:
                    # Longest first leaves a row too full in a tight module; exchanges between rows
                    # mend most of it.
                    polish(size, order, row, full, length)
                room.row[part] = self.rows.start[k] + row
        return measure(chosen, self.load, self.rows, room)


def pack_rows(
    lengths: np.ndarray, maximum: np.ndarray, order: np.ndarray, pool_rows: float = 120
) -> np.ndarray:
    """Pack samples into rows that hold at most `maximum` `[D]` in each dimension: the row of each, int32 `[n]`.

    The same as `pack` with one row of each module in a step: OmniBal's groups. Rows are numbered as
    they were filled; -1 for samples that are not in `order`. lengths: int `[n, D]`, the first
    column at least 1 (tokens of the LLM).
    pool_rows: the queue of waiting samples; about 600 of them find partners that fit to 1%.
    Raises ValueError for a sample above the maximum.
    """
    lengths = np.asarray(lengths, np.int64)
    maximum = np.asarray(maximum, np.int64)
    # Each dimension becomes a module, and each length above 0 a part; nonzero runs row by row,
    # which is CSR order.
    sample, module = np.nonzero(lengths)
    start = np.concatenate([[0], np.cumsum(np.bincount(sample, minlength=len(lengths)))]).astype(
        np.int64
    )
    parts = Parts(start, module.astype(np.int32), lengths[sample, module])
    budgets = Budgets(np.ones_like(maximum), maximum, 0.0)
    return pack(parts, order, budgets, pool_steps=pool_rows, longest_wait=int(3 * pool_rows)).step


def choose_row_maximum(
    lengths: np.ndarray, samples_per_row: tuple[float, float], fixed: np.ndarray | None = None
) -> np.ndarray:
    """Choose the maxima of rows, int64 `[D]`, with which `pack_rows` leaves the least empty: see `choose_maximum`."""

    def rows_needed(trial: np.ndarray, maximum: np.ndarray) -> float:
        return float(pack_rows(trial, maximum, np.arange(len(trial)), pool_rows=40).max() + 1)

    return choose_maximum(lengths, samples_per_row, rows_needed, fixed=fixed)
