"""Group samples into the microbatches of step n: a pure function of (config, seed, index, step).

Every process computes the same, on any devices and with any balance, and resuming needs the step
number alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mmjax.balance.isf import Grouping, group_leftovers, isf
from mmjax.balance.lpt import split
from mmjax.balance.pack import columns_for, count_steps, oversize, pack
from mmjax.balance.parts import Parts
from mmjax.balance.permutation import Shuffler
from mmjax.config import BatchConfig, IsfGrouping, NoGrouping, PackGrouping, Samples
from mmjax.data.plan.budget import Budget
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.sampler import Draws, Due, Pool, Stream, pools_of, shares

_FEW_STEPS = 8  # chunks of fewer are packed badly
# samples whose totals are so near the mean that their number says what they need
_SURELY_TYPICAL = 30_000
# samples of a chunk, below which grouping it takes some hundredths of a second
SOON_GROUPED = 4_096
_MORE = 1.25  # times the requested samples that rows hold for their alignment alone
SHORT_CHUNK = 32  # steps of a chunk, below which one step more makes all of them smaller


def stream_of(
    batch: BatchConfig,
    samples_per_step: float,
    pools: Sequence[Pool],
    weights: Sequence[float],
    seed: int,
) -> Stream:
    """Make the stream of a run, whose chunks have about `chunk_steps` steps; `pack` has fewer where steps are large.

    No chunk has more than a window of a source that is read in order, unless that is less than a
    few steps.
    """
    steps = batch.grouping.chunk_steps
    multiple = 1.0
    match batch.grouping:
        case PackGrouping():
            # 128 steps of 128 samples, 64 of 512, 32 of 2,048: what is planned at once grows more
            # slowly than the step.
            steps = min(steps, max(2, round(128 * (128 / samples_per_step) ** 0.5)))
            multiple = samples_per_step
        case NoGrouping():
            multiple = round(samples_per_step)
    size = steps * samples_per_step
    windows = [
        pool.window / share
        for pool, share in zip(pools, shares(weights), strict=True)
        if pool.window and share
    ]
    size = min(size, max(_FEW_STEPS * samples_per_step, min(windows))) if windows else size
    return Stream(pools, weights, max(1, round(size)), seed, multiple)


def steps_for(samples: int, per_step: float) -> int:
    """Count the steps of about `per_step` samples that take them all; rounding ends of chunks may add a sample."""
    # A mean of 24.3 samples a step makes chunks of a rounded number, at times one more than their
    # steps hold.
    rounding = 0 if float(per_step).is_integer() else 1
    return max(1, math.ceil((samples - rounding) / max(per_step, 1.0)))


def isf_groups(lengths: np.ndarray, budget: Budget, iterations: int, rng: Shuffler) -> Grouping:
    """Group samples `[n, modules]` by ISF; what it leaves over forms further groups behind the others."""
    maximum = np.array(budget.lengths)
    grouping = isf(lengths, maximum, np.array(budget.minimum), iterations, rng)
    return group_leftovers(lengths, grouping, maximum)


class Group(NamedTuple):
    """The samples of one microbatch."""

    samples: np.ndarray  # int64 [n]
    # int32 [p]: in which of the budget's rows each part fits; None = the grouping does not say
    row: np.ndarray | None


class _Chunk(NamedTuple):
    """Samples that were grouped together, one step after the other. Only what is asked for is laid out in rows."""

    samples: np.ndarray  # int64 [n]
    step_start: np.ndarray  # int64 [steps + 1]
    part_start: np.ndarray  # int64 [n + 1]
    # int32 [p]: microbatch * rows of the module + row; None = the grouping does not say
    row: np.ndarray | None
    waited: np.ndarray | None = None  # int32 [n]: steps; None = nobody waits

    def step(self, k: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the samples of the k-th step and their parts' rows."""
        a, b = self.step_start[k : k + 2]
        return self.samples[a:b], None if self.row is None else self.row[
            self.part_start[a] : self.part_start[b]
        ]

    def __len__(self) -> int:
        return len(self.step_start) - 1


@dataclass
class StepGrouper:
    """Groups samples into steps, chunk by chunk. What it remembers (chunks, where they start) only saves time."""

    index: LengthIndex
    batch: BatchConfig
    weights: Sequence[float]  # of the sources
    seed: int
    budget: Budget
    # of the chunks found so far and the one after them
    first_steps: list[int] = field(default_factory=lambda: [0])
    first: int = 0  # the step of the run that is the first here
    due: Due = ()  # what epochs that were begun before it still owe
    epochs_before: float = 0.0  # that were done before it

    def __post_init__(self) -> None:
        wide = np.flatnonzero(np.any(self.index.totals > np.array(self.budget.lengths), axis=1))
        self.oversize = _oversize(self.index, wide, self.batch, self.budget)
        self.columns = _columns(
            self.index, np.setdiff1d(wide, self.oversize), self.batch, self.budget
        )
        self.pools: list[Pool] = pools_of(self.index, self.weights, self.oversize, self.due)
        self._stream = stream_of(
            self.batch, self.budget.samples_per_step, self.pools, self.weights, self.seed
        )
        # Two, since a step near a chunk's end and one after it are asked for in turn.
        self._chunk = lru_cache(maxsize=2)(self._group_chunk)

    def step(self, step: int) -> list[Group]:
        """Return the microbatches of a step. Chunks whose start is not known are grouped first, one after the other."""
        chunk, position = self._place_of(step)
        return self._microbatches(*self._chunk(chunk).step(position))

    def longest_wait(self, step: int) -> int:
        """Return for how many steps a sample of this step waited at most, from when it could have been chosen."""
        chunk, position = self._place_of(step)
        grouped = self._chunk(chunk)
        first, last = grouped.step_start[position : position + 2]
        return 0 if grouped.waited is None else int(grouped.waited[first:last].max(initial=0))

    def used(self, step: int) -> tuple[dict[int, Draws], np.ndarray]:
        """Return what the chunk of a step has of each source, and the ids of its samples that came before the step."""
        chunk, position = self._place_of(step)
        grouped = self._chunk(chunk)
        return self._stream.draws(chunk), grouped.samples[: grouped.step_start[position]]

    def epochs_after(self, step: int) -> float:
        """Return how many epochs are done after a step: one is as many samples as all sources together have."""
        chunk, position = self._place_of(step)
        drawn = self._samples_before(chunk) + int(self._chunk(chunk).step_start[position + 1])
        due, rest = self._due
        # First the remainder of an epoch begun with other data, then whole ones.
        epochs = rest * drawn / due if drawn < due else rest + (drawn - due) / self.epoch_samples
        return self.epochs_before + epochs

    def source_epochs_after(self, step: int) -> np.ndarray:
        """Return how often each source's samples came until after a step, float64 `[sources]`.

        Of the data of this segment of the run: what was due of an epoch begun before it does not
        count.
        """
        chunk, position = self._place_of(step)
        samples = self._chunk(chunk).samples[: self._chunk(chunk).step_start[position + 1]]
        draws = np.bincount(self.index.source_of(samples), minlength=len(self.pools)).astype(
            np.float64
        )
        for source, draw in self._stream.draws(chunk).items():
            draws[source] += draw.begin - len(self.pools[source].due)
        return np.maximum(draws, 0) / np.maximum(list(map(len, self.pools)), 1)

    def source_shares(self, steps: int) -> list[tuple[str, int, float, float]]:
        """List each source that is drawn from: its name, samples, share of all, and its own epochs in so many steps."""
        draws = steps * self.samples_per_step
        return [
            (str(name), len(pool), float(share), float(share) * draws / len(pool))
            for name, pool, share in zip(
                self.index.source_name, self.pools, shares(self.weights), strict=True
            )
            if share > 0
        ]

    def steps_for_epochs(self, epochs: float) -> int:
        """Return with which number of steps of the run so many epochs are done. Groups every chunk up to there."""
        due, rest = self._due
        remaining = max(0.0, epochs - self.epochs_before)
        # The first `due` samples complete `rest` of an epoch; after them every epoch has
        # `epoch_samples`.
        if remaining < rest:
            samples = round(remaining / rest * due)
        else:
            samples = round(due + (remaining - rest) * self.epoch_samples)
        chunk = 0
        while self._samples_before(chunk + 1) < samples:
            chunk += 1
        # The first step of the chunk after which so many samples have come.
        steps_in_chunk = np.searchsorted(
            self._chunk(chunk).step_start, samples - self._samples_before(chunk)
        )
        return self.first + self._first_step(chunk) + int(steps_in_chunk)

    def _samples_before(self, chunk: int) -> int:
        return sum(draw.begin for draw in self._stream.draws(chunk).values())

    def epoch_notes(self) -> tuple[str, ...]:
        """Say where epochs are so short that steps suffer, as a source's samples come at most once in a step."""
        draws = self._stream.draws(0)
        per_step = self.requested
        if (chunk := sum(draw.end - draw.begin for draw in draws.values())) >= 8 * per_step:
            return ()
        sizes = {s: draw.last - draw.first for s, draw in draws.items()}
        # The source whose epoch ends first, since it is drawn from most in proportion to its size.
        shortest = min(sizes, key=lambda s: sizes[s] / self.weights[s])
        # a window is so short, not the epoch
        if draws[shortest].end - draws[shortest].begin < sizes[shortest]:
            return ()
        name = self.index.source_name[shortest]
        key = f"data.sources.{name}.weight" if len(draws) > 1 else "batch.size.count"
        steps = self._first_step(1)
        what = f"all {sizes[shortest]} samples of {name} come once in {steps} step{'s' if steps > 1 else ''}"
        if chunk < per_step:
            return (
                f"{what}, and never twice in one: steps have at most {chunk} samples; lower {key}",
            )
        if chunk / steps > 0.95 * per_step:
            return (what,)
        why = "no step holds samples of two epochs"
        if steps > steps_for(chunk, per_step):
            why = "rows that hold more of them would cost more than these steps"
        return (
            f"{what} of {chunk / steps:.3g} instead of {per_step:.3g}, since {why}; lower {key} to fill them",
        )

    def samples_in(self, chunk: int) -> int:
        """Count the samples of a chunk."""
        return self._stream.samples_in(chunk)

    @property
    def requested(self) -> float:
        """Mean number of samples that a step should have; more than the config says where one sample is so long."""
        per_step = self.budget.samples_per_step
        exact = isinstance(self.batch.size, Samples) and per_step < _MORE * self.batch.size.count
        return self.batch.size.count if exact else per_step

    @property
    def epoch_samples(self) -> int:
        """Count the samples of an epoch: all that are used of the sources that are drawn from."""
        return sum(
            len(pool) for pool, weight in zip(self.pools, self.weights, strict=True) if weight > 0
        )

    @property
    def samples_per_step(self) -> float:
        """Mean number of samples in the steps of the first chunk; fewer than the budget's where chunks are short."""
        return self.samples_in(0) / self._first_step(1)

    @property
    def _due(self) -> tuple[int, float]:
        """Return the number of samples that are due, and the part of an epoch that they complete."""
        due = sum(
            len(pool.due)
            for pool, weight in zip(self.pools, self.weights, strict=True)
            if weight > 0
        )
        return due, 1 - self.epochs_before % 1 if due else 0.0

    def _place_of(self, step: int) -> tuple[int, int]:
        """Return the chunk of a step of the run, and which of its steps it is."""
        # Chunks are counted from the segment's first step, not from the run's.
        step -= self.first
        while self.first_steps[-1] <= step:
            self._first_step(len(self.first_steps))
        chunk = int(np.searchsorted(self.first_steps, step, side="right")) - 1
        return chunk, step - self.first_steps[chunk]

    def _first_step(self, chunk: int) -> int:
        """Return the first step of a chunk, counted from that of the segment."""
        while len(self.first_steps) <= chunk:
            self.first_steps.append(self.first_steps[-1] + self.steps_in(len(self.first_steps) - 1))
        return self.first_steps[chunk]

    def steps_in(self, chunk: int) -> int:
        """Count the steps of a chunk; only with ISF, and where it is small, it has to be grouped for that."""
        samples = self.samples_in(chunk)
        match self.batch.grouping:
            case IsfGrouping():
                return len(self._chunk(chunk))
            # How many steps a small chunk takes is only known when it is packed, and that is quick.
            case PackGrouping() if samples < SOON_GROUPED:
                return len(self._chunk(chunk))
            case PackGrouping() if samples < _SURELY_TYPICAL:
                parts = self.index.parts(self._stream.chunk(chunk))
                return count_steps(parts, self.budget.room(), self.batch.microbatches, self.columns)
        return steps_for(samples, self.budget.samples_per_step)

    def _microbatches(self, samples: np.ndarray, row: np.ndarray | None) -> list[Group]:
        parts = self.index.parts(samples)
        count = self.batch.microbatches
        if row is None:
            microbatch = split(parts.totals(len(self.budget.rows)), count)
            return [Group(samples[microbatch == m], None) for m in range(count)]
        rows = np.array(self.budget.rows)[parts.module]
        # With 4 rows of a module, row 6 of the step is row 2 of microbatch 1.
        microbatch, in_microbatch = np.divmod(row, rows)
        # what a step's rows do not hold comes in one more
        count = max(count, int(microbatch.max(initial=0)) + 1)
        # A sample's first part is the LLM's, and all its parts are in one microbatch.
        chosen = [np.flatnonzero(microbatch[parts.sample_start[:-1]] == m) for m in range(count)]
        in_microbatch = in_microbatch.astype(np.int32)
        return [
            Group(samples[indices], in_microbatch[parts.of_samples(indices)]) for indices in chosen
        ]

    def _group_chunk(self, chunk: int) -> _Chunk:
        grouping = self.batch.grouping
        order = self._stream.chunk(chunk)
        match grouping:
            case PackGrouping(pool_steps=pool):
                if len(order) >= SOON_GROUPED:
                    return self._packed(order, pool, self.steps_in(chunk))
                # Small chunks are packed into as few steps as can be: to leave room for surprises
                # costs them most. But an epoch of few steps has no fewer than its samples make.
                packed = self._packed(order, pool)
                steps = max(1, round(len(order) / self.requested))
                return (
                    packed
                    if steps >= SHORT_CHUNK or len(packed) >= steps
                    else self._packed(order, pool, steps)
                )
            case IsfGrouping(iterations=iterations):
                return self._isf(order, iterations, Shuffler(self.seed, 3, chunk))
            case NoGrouping():
                steps = steps_for(len(order), self.budget.samples_per_step)
                return _Chunk(
                    order, np.arange(steps + 1) * len(order) // steps, np.zeros(0, np.int64), None
                )

    def _packed(self, order: np.ndarray, pool_steps: int, steps: int = 0) -> _Chunk:
        """Pack samples into so many steps; 0 = as few as can be."""
        parts = self.index.parts(order)
        count = self.batch.microbatches
        packing = pack(
            parts,
            np.arange(len(order)),
            self.budget.room(),
            count,
            pool_steps,
            self.columns,
            steps=steps,
        )
        return _chunk_of(order, parts, packing.step, packing.row, packing.waited)

    def _isf(self, order: np.ndarray, iterations: int, rng: Shuffler) -> _Chunk:
        parts = self.index.parts(order)
        grouping = isf_groups(self.index.totals[order], self.budget, iterations, rng)
        groups = grouping.groups + grouping.leftover_groups
        # A group fills one row of every module, so a step takes as many groups as it has rows.
        steps = -(-groups // (self.budget.rows[0] * self.batch.microbatches))
        # What is left over comes among the rest, and the last step is about as full as the others.
        position = rng.permutation(groups)[grouping.group]
        # 10 groups in 3 steps begin at 0, 3 and 6.
        first = np.arange(steps + 1) * groups // steps
        step = np.searchsorted(first, position, side="right") - 1
        return _chunk_of(
            order, parts, step, np.repeat(position - first[step], np.diff(parts.sample_start))
        )


def _oversize(
    index: LengthIndex, wide: np.ndarray, batch: BatchConfig, budget: Budget
) -> np.ndarray:
    """Find the samples that fit no budget: ids, int64, sorted. wide: those that fill more than a row of a module."""
    too_wide = wide
    if not isinstance(batch.grouping, IsfGrouping):  # whose groups fill one row of each module
        too_wide = wide[oversize(index.parts(wide), budget.room())]
    return np.union1d(np.flatnonzero(index.llm_tokens > budget.longest), too_wide)


def _columns(index: LengthIndex, wide: np.ndarray, batch: BatchConfig, budget: Budget) -> int:
    """Count the columns of the budget's rows: equal groups of rows, one of which holds all parts of a sample."""
    if not isinstance(batch.grouping, PackGrouping):
        return 1
    return columns_for(index.parts(wide), budget.room())


def _chunk_of(
    samples: np.ndarray,
    parts: Parts,
    step: np.ndarray,
    row: np.ndarray,
    waited: np.ndarray | None = None,
) -> _Chunk:
    by_step = np.argsort(step, kind="stable")
    # Where each step begins among the sorted; one number more than steps, the last is the end.
    step_start = np.searchsorted(step[by_step], np.arange(step.max(initial=-1) + 2))
    part_start = _starts(np.diff(parts.sample_start)[by_step])
    waited = None if waited is None else waited[by_step]
    return _Chunk(samples[by_step], step_start, part_start, row[parts.of_samples(by_step)], waited)


def _starts(count: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(count, dtype=np.int64)])
