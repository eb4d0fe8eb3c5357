"""The step plan: which samples form step n, and where each of their parts lies.

A pure function of (config, seed, index, step): every process and every worker computes the same plan, and resuming
needs the step number alone. Microbatches, rows and budgets come from the config and the data, never from the devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mmjax.balance.pack import oversize, pack
from mmjax.balance.parts import Parts
from mmjax.balance.place import place
from mmjax.balance.shapes import assign
from mmjax.config import BatchConfig, IsfGrouping, NoGrouping, PackGrouping
from mmjax.data.budget import Budget, Shape, isf_groups, needs_of
from mmjax.data.index import LengthIndex
from mmjax.data.stream import Pool, chunk_samples, pools_of

# Raised whenever the same config and data get other plans than before: older runs then can't go on, and say so.
PLANNER = 2


@dataclass(frozen=True)
class MicrobatchPlan:
    """Where the parts of one microbatch lie. Parts are in CSR order: each sample's LLM part, then its items."""

    samples: np.ndarray  # int64 [n]: ids in the length index
    part_start: np.ndarray  # int64 [n + 1]
    module: np.ndarray  # int32 [p]: 0 = LLM
    row: np.ndarray  # int32 [p]
    offset: np.ndarray  # int64 [p]
    length: np.ndarray  # int64 [p]
    shape: Shape


@dataclass(frozen=True)
class StepPlan:
    """One optimizer update, before anything is loaded."""

    step: int
    microbatches: tuple[MicrobatchPlan, ...]

    def samples(self) -> np.ndarray:
        """Ids of all samples of the step."""
        return np.concatenate([m.samples for m in self.microbatches])

    def digest(self) -> int:
        """A 63-bit hash that processes compare before they update."""
        digest = hashlib.sha256()
        for m in self.microbatches:
            for a in (m.samples, m.module, m.row, m.offset, np.array(m.shape)):
                digest.update(np.ascontiguousarray(a, np.int64).tobytes())
        return int.from_bytes(digest.digest()[:8], "little") >> 1


class _Chunk(NamedTuple):
    """Samples that were grouped together, one step after the other. Only what is asked for is laid out in rows."""

    samples: np.ndarray  # int64 [n]
    step_start: np.ndarray  # int64 [steps + 1]
    part_start: np.ndarray  # int64 [n + 1]
    row: np.ndarray | None  # int32 [p]: microbatch * rows of the module + row; None = the grouping does not say

    def step(self, k: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The samples of the k-th step and their parts' rows."""
        a, b = self.step_start[k : k + 2]
        return self.samples[a:b], None if self.row is None else self.row[self.part_start[a] : self.part_start[b]]

    def __len__(self) -> int:
        return len(self.step_start) - 1


@dataclass
class StepPlanner:
    """Plans steps chunk by chunk. What it remembers, the last chunks and where chunks start, only saves time."""

    index: LengthIndex
    batch: BatchConfig
    weights: Sequence[float]  # of the sources
    seed: int
    budget: Budget
    first_steps: list[int] = field(default_factory=lambda: [0])  # of the chunks found so far and the one after them

    def __post_init__(self) -> None:
        self.oversize = _oversize(self.index, self.batch, self.budget)
        self._pools: list[Pool] = pools_of(self.index, self.weights, self.oversize)
        self._chunk = lru_cache(maxsize=2)(self._plan_chunk)

    def plan(self, step: int) -> StepPlan:
        """The plan of step `step`. Chunks whose start is not known yet are grouped first, one after the other."""
        if isinstance(self.batch.grouping, NoGrouping):
            chunk, at = divmod(step, self.batch.grouping.chunk_steps)
        else:
            while self.first_steps[-1] <= step:
                self.first_steps.append(self.first_steps[-1] + len(self._chunk(len(self.first_steps) - 1)))
            chunk = int(np.searchsorted(self.first_steps, step, side="right")) - 1
            at = step - self.first_steps[chunk]
        return StepPlan(step, self._laid_out(*self._chunk(chunk).step(at)))

    def plan_once(self, samples: np.ndarray) -> list[tuple[MicrobatchPlan, ...]]:
        """Steps that hold exactly these samples, each once (packed; for evaluation)."""
        chunk = self._packed(samples, PackGrouping().pool_steps)
        return [self._laid_out(*chunk.step(k)) for k in range(len(chunk))]

    def _plan_chunk(self, chunk: int) -> _Chunk:
        samples_per_step, grouping = self.budget.samples_per_step, self.batch.grouping
        size = max(1, round(grouping.chunk_steps * samples_per_step))
        order = chunk_samples(self._pools, self.weights, size, self.seed, chunk)
        match grouping:
            case PackGrouping(pool_steps=pool):
                return self._packed(order, pool)
            case IsfGrouping(iterations=iterations):
                return self._isf(order, iterations, np.random.default_rng((self.seed, 3, chunk)))
            case NoGrouping():
                start = np.arange(grouping.chunk_steps + 1) * int(samples_per_step)
                return _Chunk(order, start, np.zeros(0, np.int64), None)

    def _packed(self, order: np.ndarray, pool_steps: int) -> _Chunk:
        parts = self.index.parts(order)
        budgets = self.budget.of_microbatch(self.budget.shapes[-1])
        packing = pack(parts, np.arange(len(order)), budgets, self.batch.microbatches, pool_steps)
        return _chunk_of(order, parts, packing.step, packing.row)

    def _isf(self, order: np.ndarray, iterations: int, rng: np.random.Generator) -> _Chunk:
        parts = self.index.parts(order)
        grouping = isf_groups(self.index.totals[order], self.budget, iterations, rng)
        groups, per_step = grouping.groups + grouping.leftover_groups, self.budget.rows[0] * self.batch.microbatches
        steps = -(-groups // per_step)
        # What is left over comes among the rest, and the last step is about as full as the others.
        position = rng.permutation(groups)[grouping.group]
        first = np.arange(steps + 1) * groups // steps
        step = np.searchsorted(first, position, side="right") - 1
        return _chunk_of(order, parts, step, np.repeat(position - first[step], np.diff(parts.sample_start)))

    def _placed(self, parts: Parts) -> tuple[np.ndarray, list[Shape]]:
        """Grouping `none`: rows for a step's parts, and for each microbatch the cheapest shape that holds it.

        Where no shape does, the step runs in more microbatches, of the largest shape.
        """
        every = np.arange(len(parts))
        rows, shapes = np.array(self.budget.rows), np.array(self.budget.shapes)
        row = place(parts, every, rows, self.batch.microbatches).row
        chosen = [assign(need, shapes) for need in needs_of(parts, row, rows, self.batch.microbatches)]
        if min(chosen) >= 0:
            return row, [self.budget.shapes[k] for k in chosen]
        largest = self.budget.shapes[-1]
        packing = pack(parts, every, self.budget.of_microbatch(largest), 1, pool_steps=len(parts))
        return packing.row + packing.step[parts.sample()] * rows[parts.module], [largest] * packing.n_steps

    def _laid_out(self, samples: np.ndarray, row: np.ndarray | None) -> tuple[MicrobatchPlan, ...]:
        """The microbatches of a step: in every row, parts lie one after the other in the order of the samples."""
        parts = self.index.parts(samples)
        shapes = [self.budget.shapes[-1]] * self.batch.microbatches
        if row is None:
            row, shapes = self._placed(parts)
        rows = np.array(self.budget.rows)
        offset = _offsets(row.astype(np.int64) * len(rows) + parts.module, parts.length)
        microbatch = row // rows[parts.module]
        room = np.array(shapes)[microbatch, parts.module]
        if np.any(over := offset + parts.length > room):
            raise AssertionError(f"sample {samples[parts.sample()[over][0]]} reaches beyond the end of its row")
        plans = []
        for m, shape in enumerate(shapes):
            chosen = np.flatnonzero(microbatch[parts.sample_start[:-1]] == m)
            at, start = parts.of_samples(chosen), _starts(np.diff(parts.sample_start)[chosen])
            in_microbatch = (row - m * rows[parts.module])[at].astype(np.int32)
            plans.append(
                MicrobatchPlan(
                    samples[chosen], start, parts.module[at], in_microbatch, offset[at], parts.length[at], shape
                )
            )
        return tuple(plans)


def _oversize(index: LengthIndex, batch: BatchConfig, budget: Budget) -> np.ndarray:
    """Ids of the samples that fit no budget, int64, sorted."""
    wide = np.flatnonzero(np.any(index.totals > np.array(budget.shapes[-1]), axis=1))
    too_wide = wide
    if not isinstance(batch.grouping, IsfGrouping):  # whose groups fill one row of each module
        too_wide = wide[oversize(index.parts(wide), budget.of_microbatch(budget.shapes[-1]))]
    return np.union1d(np.flatnonzero(index.llm_tokens > budget.longest), too_wide)


def _chunk_of(samples: np.ndarray, parts: Parts, step: np.ndarray, row: np.ndarray) -> _Chunk:
    by_step = np.argsort(step, kind="stable")
    step_start = np.searchsorted(step[by_step], np.arange(step.max(initial=-1) + 2))
    part_start = _starts(np.diff(parts.sample_start)[by_step])
    return _Chunk(samples[by_step], step_start, part_start, row[parts.of_samples(by_step)])


def _starts(count: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(count, dtype=np.int64)])


def _offsets(row: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Where each part begins when those of equal row follow each other, int64."""
    by_row = np.argsort(row, kind="stable")
    before = np.cumsum(length[by_row]) - length[by_row]
    first = np.flatnonzero(np.diff(row[by_row], prepend=-1))
    offset = np.empty(len(row), np.int64)
    offset[by_row] = before - np.repeat(before[first], np.diff(first, append=len(row)))
    return offset
