"""Columns of the rows of a microbatch: samples laid in them, their attention levelled, and dealt to microbatches.

A column is an equal part of the rows of every module, and holds all parts of its samples.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from mmjax.balance.level import level
from mmjax.balance.lpt import to_rows
from mmjax.balance.node_deal import by_leading_encoder, deal_evenly, node_means
from mmjax.balance.pack_kernels import parts_in
from mmjax.balance.pack_queue import Load, Rows
from mmjax.balance.parts import LLM, Parts
from mmjax.balance.vector_lpt import balance
from mmjax.balance.waits import Prices

# about so many samples, of at most so many columns, are exchanged among themselves
_BLOCK = 1024, 64
_BLOCKS_ALIKE = 0.002
_ENCODER_WEIGHTS = 0.5, 0.25, 0.1  # of the LLM's, where columns do not fit with equal ones
_NO_ROOM = 0.002  # of a column
_LONG_SAMPLE = 0.5  # of a column
_CEILING = 0.9  # of a column's spare room, up to which columns may differ
# of a column: loads are sums of quotients, so full ones may seem to exceed it; positions are
# coarser
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Columns:
    """The columns of a chunk's microbatches, `count` in each."""

    count: int
    load: Load
    rows: Rows
    unit: np.ndarray  # int64 [M], as of `units`
    pairs: np.ndarray | None  # int64 [p]
    prices: Prices | None  # by which columns are levelled; None: they are not
    all_weights: bool  # as in Budget

    def level(self, microbatch: np.ndarray, row: np.ndarray) -> None:
        """Exchange samples between the columns of each microbatch so that their attention is even; writes row `[p]`."""
        order = np.argsort(microbatch, kind="stable")
        ends = np.arange(1, microbatch.max(initial=0) + 1)
        for chosen in np.split(order, np.searchsorted(microbatch[order], ends)):
            self._level_one(chosen, row)

    def _level_one(self, chosen: np.ndarray, row: np.ndarray) -> None:
        part, owner = parts_in(chosen, self.load, -1)
        start = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(chosen)))])
        parts = Parts(start, self.load.module[part], self.load.length[part], self.pairs[part])
        column = self._column(chosen, row)[owner]
        per_column = self.rows.per_column
        levelled = level(parts, column, self.count, per_column, self.rows.length, self.prices)
        if levelled is column:
            return
        if per_column.max() == 1:
            row[part] = self.rows.start[parts.module] + levelled
            return
        changed = np.isin(
            levelled, np.concatenate([column, levelled])[np.tile(column != levelled, 2)]
        )
        module = parts.module[changed]
        in_module, _ = to_rows(module, parts.length[changed], levelled[changed], per_column)
        row[part[changed]] = self.rows.start[module] + in_module

    def deal(self, step: np.ndarray, microbatch: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Deal each step's columns to its microbatches by their attention; return the microbatch of each sample.

        step: int `[microbatches]`, of each. Writes row `[p]`.
        """
        if len(np.unique(step)) == len(step):
            return microbatch
        modules = len(self.unit)
        module, parts = self.load.module, np.diff(self.load.start)
        column = self._column(np.arange(len(microbatch)), row)
        # Columns of all microbatches are numbered through: with 4, column 1 of microbatch 2 is
        # number 9.
        number = microbatch * self.count + column
        flat = np.repeat(number, parts) * modules + module
        pairs = np.bincount(flat, self.pairs, len(step) * self.count * modules)
        seconds = pairs.reshape(len(step), self.count, modules) * self.prices.pair
        place = np.empty(len(step) * self.count, np.int64)
        for first, last in itertools.pairwise(
            [*np.flatnonzero(np.diff(step, prepend=-1)), len(step)]
        ):
            begin = first * self.count
            place[begin : last * self.count] = begin + sort_columns(seconds[first:last])
        microbatch, new_column = np.divmod(place[number], self.count)
        row += np.repeat(new_column - column, parts) * self.rows.per_column[module]
        return microbatch

    def _column(self, samples: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the column of samples, that of their LLM part, int64 `[n]`."""
        first = row[self.load.start[samples]] - self.rows.start[LLM]
        return first // self.rows.per_column[LLM]

    def place(self, chosen: np.ndarray, row: np.ndarray) -> None:
        """Assign samples to blocks of columns, then columns, by all modules; then parts to rows. Writes row."""
        cost = self.load.total[chosen].astype(np.float64)
        capacity = self.rows.length * self.rows.per_column
        block = int(np.clip(_BLOCK[0] * self.count // max(len(chosen), 1), 8, _BLOCK[1]))
        begin = np.arange(0, self.count, block)
        # Blocks of columns play the part of nodes: 130 columns in blocks of 64 are 64, 64 and 2.
        size = np.diff(begin, append=self.count)
        node = deal_evenly(cost, size, _BLOCKS_ALIKE)
        mean = node_means(cost, node, size)
        order = by_leading_encoder(cost, node, mean)
        start = np.concatenate([[0], np.cumsum(np.bincount(node, minlength=len(size)))])
        # Up to somewhat below what a column holds: the mean cannot always be reached, nor need it.
        spare = (
            ((1 - _CEILING) * np.maximum(capacity - mean, 0)).astype(np.int64)
            // self.unit
            * self.unit
        )
        # Relative to a column's mean load; below 1 nobody could stay.
        ceiling = np.maximum((capacity - spare) / mean, 1.0)
        column = np.zeros(len(chosen), np.int32)
        for b in range(len(size)):
            in_block = order[start[b] : start[b + 1]]
            column[in_block] = self._place_in_block(
                cost[in_block] / mean[b], int(size[b]), ceiling[b], capacity / mean[b]
            )
        part, owner = parts_in(chosen, self.load, -1)
        module = self.load.module[part]
        # Columns are numbered inside their block; `begin` makes that the number of all.
        in_module = group = (column + begin[node])[owner]
        if self.rows.per_column.max() > 1:
            in_module, _ = to_rows(module, self.load.length[part], group, self.rows.per_column)
        row[part] = self.rows.start[module] + in_module

    def _place_in_block(
        self, relative: np.ndarray, columns: int, ceiling: np.ndarray, capacity: np.ndarray
    ) -> np.ndarray:
        """Choose the column of each sample of a block, int64 `[n]`. All are relative to a column's mean load.

        Where a long text leaves encoders no room, these may be less equal. relative: `[n, M]`.
        ceiling, capacity: `[M]`, what a column should have at most, and what it can hold.
        """
        # Kernels run over samples inside phases, so a phase's costs lie side by side.
        cost = np.ascontiguousarray(relative.T)
        every = np.arange(len(relative))
        weight = np.ones(len(cost))
        column, load = balance(cost, every, np.ones(columns), weight, ceiling, ceiling)
        if np.all(load <= ceiling[:, None]):
            return column

        def excess_of(load: np.ndarray) -> float:
            return float(np.maximum(load - np.maximum(capacity, 1.0)[:, None], 0).sum())

        # Where one long sample leaves a column no room for others that fill it, and none has room
        # to spare, no weight of encoders helps. Samples have to go, fewest where the LLM counts
        # most.
        hopeless = capacity[LLM] < 1 + _NO_ROOM and relative[:, LLM].max() > _LONG_SAMPLE
        min_excess = excess_of(np.stack([np.bincount(column, phase, columns) for phase in cost]))
        for encoders in _ENCODER_WEIGHTS[-1 if hopeless and not self.all_weights else 0 :]:
            if min_excess <= _ROUNDING:
                break
            # The LLM's rows stay the strictest, while encoders' unevenness is charged less and
            # less.
            weight[LLM + 1 :] = encoders
            candidate, load = balance(cost, every, np.ones(columns), weight, ceiling, ceiling)
            if (excess := excess_of(load)) < min_excess:
                min_excess = excess
                column = candidate
        return column


def sort_columns(seconds: np.ndarray) -> np.ndarray:
    """Deal the columns of a step's microbatches anew so that those alike in attention run together: int64 `[J * C]`.

    Ranks meet in every microbatch, so that one long sample in each of them costs its time in each.
    seconds: float64 `[J, C, M]`, of columns. Returns the place of each column among all; its own
    where nothing is gained.

        microbatch 0   4 1    the fullest of each, 4 + 3, become 4 + 2    4 3
        microbatch 1   3 2                                                1 2

    >>> sort_columns(np.array([[[4.0], [1.0]], [[3.0], [2.0]]])).tolist()
    [0, 2, 1, 3]
    """
    microbatches, columns, _ = seconds.shape
    best = np.arange(microbatches * columns)
    fullest = seconds.max(1).sum()
    # With C = 5 the heaviest is column 0 of microbatch 0, the next ones 2, 4, 3 and 1: neighbours,
    # which one rank may have together, add up to about the same. Every other microbatch has them
    # the other way round.
    number = np.arange(columns)
    column = np.where(2 * number < columns, 2 * number, 2 * (columns - number) - 1)
    column = np.where(np.arange(microbatches)[:, None] % 2, columns - 1 - column, column)
    ordered = (np.arange(microbatches)[:, None] * columns + column).ravel()
    # By all phases together, or by one that is less even than the others.
    for key in (seconds.sum(-1), *np.moveaxis(seconds, -1, 0)):
        places = np.empty_like(best)
        places[np.argsort(-key.ravel(), kind="stable")] = ordered
        dealt = np.empty_like(seconds).reshape(-1, seconds.shape[-1])
        dealt[places] = seconds.reshape(dealt.shape)
        if (total := dealt.reshape(seconds.shape).max(1).sum()) < fullest:
            best = places
            fullest = total
    return best
