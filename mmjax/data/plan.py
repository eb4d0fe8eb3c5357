"""The step plan: which samples form step n, and where each of their parts lies.

A pure function of (config, seed, index, step): every process and every worker computes the same plan, and resuming needs
the step number alone. Microbatches, rows and budgets come from the config and the data, never from the devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from mmjax.balance.isf import choose_bounds, group_leftovers, isf
from mmjax.balance.budgets import Budgets, fit_budgets
from mmjax.balance.pack import oversize, pack
from mmjax.balance.parts import Parts
from mmjax.balance.place import place
from mmjax.balance.shapes import assign, choose_shapes
from mmjax.config import BatchConfig, IsfGrouping, NoGrouping, PackGrouping, Samples
from mmjax.data.index import LengthIndex
from mmjax.data.stream import chunk_samples
from mmjax.errors import UserError

Shape = tuple[int, ...]  # row length of every module, the LLM first


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


@dataclass(frozen=True)
class Budget:
    """What every step must fit into: decided from the config and the data before step 0, and stored with the run."""

    rows: Shape  # per microbatch
    shapes: tuple[Shape, ...]  # compiled ahead; the last holds every step seen in the dry run
    samples_per_step: int
    notes: tuple[str, ...] = ()


@dataclass
class StepPlanner:
    """Plans steps chunk by chunk; remembers where chunks start, and the last chunks planned."""

    index: LengthIndex
    batch: BatchConfig
    weights: Sequence[float]
    seed: int
    budget: Budget
    _first_step: list[int] = field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        self.parts = self.index.parts()
        bad = oversize(self.parts, self._budgets(self.budget.shapes[-1]))
        start = self.index.source_start
        self.eligible = [np.arange(a, b)[~bad[a:b]] for a, b in zip(start[:-1], start[1:], strict=True)]
        if not all(len(ids) for ids, w in zip(self.eligible, self.weights, strict=True) if w > 0):
            raise UserError("a source has no sample that fits the budgets; raise batch.size or lower batch.rows")
        self.oversize = np.flatnonzero(bad)
        self._chunk = lru_cache(maxsize=2)(self._plan_chunk)

    def plan(self, step: int) -> StepPlan:
        """The plan of step `step`. Replays the chunks before it once."""
        while self._first_step[-1] <= step:
            self._first_step.append(self._first_step[-1] + len(self._chunk(len(self._first_step) - 1)))
        chunk = int(np.searchsorted(self._first_step, step, side="right")) - 1
        return StepPlan(step, self._chunk(chunk)[step - self._first_step[chunk]])

    def plan_once(self, samples: np.ndarray) -> list[tuple[MicrobatchPlan, ...]]:
        """Steps that hold exactly these samples, each once (packed; for evaluation)."""
        return self._packed(samples, PackGrouping().pool_steps)

    def _plan_chunk(self, chunk: int) -> list[tuple[MicrobatchPlan, ...]]:
        size = self.batch.grouping.chunk_steps * self.budget.samples_per_step
        order = chunk_samples(self.eligible, self.weights, size, self.seed, chunk)
        match self.batch.grouping:
            case PackGrouping(pool_steps=pool):
                return self._packed(order, pool)
            case IsfGrouping(iterations=iterations):
                return self._isf(order, iterations, np.random.default_rng((self.seed, 3, chunk)))
            case NoGrouping():
                n = self.budget.samples_per_step
                return [self._placed(order[i : i + n]) for i in range(0, len(order), n)]

    def _packed(self, order: np.ndarray, pool_steps: int) -> list[tuple[MicrobatchPlan, ...]]:
        (shape,) = self.budget.shapes
        parts = self.parts.take(order)
        packing = pack(parts, np.arange(len(order)), self._budgets(shape), self.batch.microbatches, pool_steps)
        by_step = np.argsort(packing.step, kind="stable")
        bounds = np.searchsorted(packing.step[by_step], np.arange(packing.n_steps + 1))
        row_of = _ragged(packing.row, parts.sample_start)
        return [
            self._microbatches(order[chosen], [row_of[i] for i in chosen], self.batch.microbatches, shape)
            for chosen in (by_step[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True))
        ]

    def _budgets(self, shape: Shape) -> Budgets:
        return Budgets(np.array(self.budget.rows), np.array(shape), self.budget.samples_per_step)

    def _placed(self, samples: np.ndarray) -> tuple[MicrobatchPlan, ...]:
        """Grouping `none`: the cheapest compiled shape that holds each microbatch; where none does, one microbatch more."""
        parts = self.parts.take(samples)
        rows = np.array(self.budget.rows)
        shapes = np.array(self.budget.shapes)
        cost = rows * module_cost(len(rows))
        for count in range(self.batch.microbatches, len(samples) + self.batch.microbatches):
            placement = place(parts, np.arange(len(samples)), rows, count)
            row_of = _ragged(placement.row, parts.sample_start)
            chosen = [assign(need, shapes, cost) for need in placement.needs]
            if min(chosen) >= 0:
                return self._microbatches(samples, row_of, count, *(self.budget.shapes[k] for k in chosen))
        raise AssertionError("a sample that fits no shape alone was not listed as oversize")

    def _isf(self, order: np.ndarray, iterations: int, rng: np.random.Generator) -> list[tuple[MicrobatchPlan, ...]]:
        (shape,) = self.budget.shapes
        parts = self.parts.take(order)
        lengths, maximum = parts.totals(len(shape)), np.array(shape)
        grouping = isf(lengths, maximum, isf_minimum(maximum), iterations, rng)
        group = group_leftovers(lengths, maximum, grouping.group)
        groups = rng.permutation(group.max() + 1)
        rank = np.empty_like(groups)
        rank[groups] = np.arange(len(groups))
        row_in_epoch = rank[group]
        per_step = self.budget.rows[0] * self.batch.microbatches
        steps = []
        for step in range(-(-len(groups) // per_step)):
            chosen = np.flatnonzero(row_in_epoch // per_step == step)
            count = np.diff(parts.sample_start)[chosen]
            rows = [np.full(c, r % per_step) for c, r in zip(count, row_in_epoch[chosen], strict=True)]
            steps.append(self._microbatches(order[chosen], rows, self.batch.microbatches, shape))
        return steps

    def _microbatches(
        self, samples: np.ndarray, row_of: Sequence[np.ndarray], count: int, *shapes: Shape
    ) -> tuple[MicrobatchPlan, ...]:
        """Lay samples, whose parts' rows (microbatch * rows + row) are known, into rows one after the other."""
        rows = self.budget.rows
        microbatch = np.array([r[0] // rows[0] for r in row_of], np.int64)
        plans = []
        for m in range(count):
            chosen = np.flatnonzero(microbatch == m)
            parts = self.parts.take(samples[chosen])
            row = np.concatenate([row_of[i] for i in chosen]) if len(chosen) else np.zeros(0, np.int64)
            row = row - m * np.array(rows)[parts.module]
            offset = np.zeros(len(row), np.int64)
            used = np.zeros((len(rows), max(rows)), np.int64)
            for k, (module, r, length) in enumerate(zip(parts.module, row, parts.length, strict=True)):
                offset[k] = used[module, r]
                used[module, r] += length
            shape = shapes[m % len(shapes)]
            if (used > np.array(shape)[:, None]).any():
                raise AssertionError(f"a row of {used.max(1)} positions exceeds its budget {shape}")
            plans.append(
                MicrobatchPlan(
                    samples[chosen], parts.sample_start, parts.module, row.astype(np.int32), offset, parts.length, shape
                )
            )
        return tuple(plans)


def _ragged(values: np.ndarray, start: np.ndarray) -> list[np.ndarray]:
    return [values[a:b] for a, b in zip(start[:-1], start[1:], strict=True)]


def isf_minimum(maximum: np.ndarray) -> np.ndarray:
    """Q' of ISF: what a group must reach in one dimension to be kept; 15/16 of the bound (the paper: Q_t - 128 of 4096)."""
    return maximum - maximum // 16


def module_cost(modules: int) -> np.ndarray:
    """Relative cost of one row position of each module, for choosing among shapes: equal."""
    return np.ones(modules)


def make_budget(index: LengthIndex, batch: BatchConfig, modules: Sequence[str], weights: Sequence[float], seed: int) -> Budget:
    """Choose rows and shapes of every module from the data. `modules` are the batch's row keys, the LLM first."""
    parts = index.parts()
    rows = np.array([batch.rows[m] for m in modules])
    mean = float(np.mean(index.llm_tokens))
    samples = batch.size.count if isinstance(batch.size, Samples) else max(1, round(batch.size.count / mean))
    match batch.grouping:
        case PackGrouping():
            budgets = fit_budgets(parts, samples, rows, batch.microbatches, batch.alignment)
            return _budget(budgets.rows, [budgets.length], budgets.samples_per_step, budgets.notes)
        case IsfGrouping():
            rows = np.full(len(modules), rows[0])
            lengths = parts.totals(len(modules))
            bounds = choose_bounds(lengths, samples / (rows[0] * batch.microbatches), batch.alignment)
            return _budget(rows, [bounds], samples)
        case NoGrouping():
            needs = _dry_run(parts, index, batch, rows, samples, weights, seed)
            shapes = choose_shapes(needs, rows * module_cost(len(rows)), batch.shapes, batch.alignment)
            return _budget(rows, shapes, samples)


def _budget(rows: np.ndarray, shapes: Sequence[np.ndarray], samples: int, notes: tuple[str, ...] = ()) -> Budget:
    return Budget(tuple(map(int, rows)), tuple(tuple(map(int, s)) for s in shapes), int(samples), notes)


DRY_RUN_STEPS = 512  # at least; whole chunks


def _dry_run(
    parts: Parts,
    index: LengthIndex,
    batch: BatchConfig,
    rows: np.ndarray,
    samples: int,
    weights: Sequence[float],
    seed: int,
) -> np.ndarray:
    """What the first steps will need, int64 `[needs, modules]`."""
    everything = [np.arange(a, b) for a, b in zip(index.source_start[:-1], index.source_start[1:], strict=True)]
    chunk = batch.grouping.chunk_steps
    chunks = range(-(-DRY_RUN_STEPS // chunk))
    order = np.concatenate([chunk_samples(everything, weights, chunk * samples, seed, c) for c in chunks])
    # The largest shape holds the largest item of all, seen in the dry run or not.
    needs = [parts.largest(len(rows))]
    for i in range(0, len(order), samples):
        step = parts.take(order[i : i + samples])
        needs.extend(place(step, np.arange(samples), rows, batch.microbatches).needs)
    return np.array(needs)
