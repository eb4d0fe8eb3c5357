"""Choose the rows of every module and their lengths, into which every step must fit, before step 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.balance.budgets import Budgets, fit_budgets
from mmjax.balance.isf import Grouping, choose_bounds, group_leftovers, isf
from mmjax.balance.permutation import Shuffler
from mmjax.balance.place import split, to_rows
from mmjax.config import BatchConfig, Config, IsfGrouping, NoGrouping, PackGrouping, Tokens
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.sampler import Pool, Stream, pools_of, typical_samples

Lengths = tuple[int, ...]  # of every module, the LLM first

TYPICAL = 1024, 65_536  # at least and at most so many samples are drawn to see what is typical of the mixture
DRY_RUN = 512, 1_000_000  # at most so many steps, of at most so many samples, are placed to see what they need


@dataclass(frozen=True)
class Budget:
    """Decided before step 0, and stored with the run: with the seed, it says which samples each step has."""

    rows: Lengths  # per microbatch
    lengths: Lengths  # of a row of every module; a microbatch of such rows holds every sample that is used
    samples_per_step: float  # mean
    longest: int  # a sample of more LLM tokens is not used
    minimum: Lengths = ()  # grouping isf: what a group must reach in one module (Q')
    notes: tuple[str, ...] = ()

    def room(self) -> Budgets:
        """Return the room of one microbatch."""
        return Budgets(np.array(self.rows), np.array(self.lengths), self.samples_per_step)


def make_budget(index: LengthIndex, config: Config, weights: Sequence[float]) -> Budget:
    """Choose rows and shapes of every module for the mixture of sources that `weights` say.

    A sample with more LLM tokens than a microbatch of `batch.size` is not used. Raises UserError where a source that
    should be drawn from has none left.
    """
    batch = config.batch
    modules = ("llm", *config.model.encoders)
    by_tokens = isinstance(batch.size, Tokens)
    longest = batch.size.count // batch.microbatches if by_tokens else int(index.llm_tokens.max(initial=0))
    rows = np.array([batch.rows[m] for m in modules])
    # A row ends where a token of the LLM does.
    alignment = math.lcm(batch.alignment, *index.positions_per_token.tolist())
    pools = pools_of(index, weights, np.flatnonzero(index.llm_tokens > longest))
    size = int(np.clip(sum(len(p) for p, w in zip(pools, weights, strict=True) if w > 0), *TYPICAL))
    typical = typical_samples(pools, weights, size, config.seed)
    mean = float(index.llm_tokens[typical].mean())
    samples = max(1.0, batch.size.count / mean) if by_tokens else float(batch.size.count)
    extremes = _extremes(index, pools, weights)
    match batch.grouping:
        case PackGrouping():
            parts = index.parts(np.concatenate([typical, extremes]))
            fitted = fit_budgets(parts, samples, rows, batch.microbatches, alignment, names=modules)
            return _budget(fitted.rows, fitted.length, fitted.samples_per_step, longest, notes=fitted.notes)
        case IsfGrouping(iterations=iterations):
            lengths = index.totals[np.concatenate([typical, extremes])]
            return _isf_budget(lengths, samples, rows, batch, iterations, alignment, longest)
        case NoGrouping():
            samples = round(samples)
            stream = stream_of(batch, samples, pools, weights, config.seed)
            steps = _first_steps(stream, samples)
            # Each extreme sample must fit alone, also where no dry-run step draws it.
            needs = _needs(index, [*steps, *extremes[:, None]], rows, batch)
            return _budget(rows, -(-np.maximum(needs.max(0), 1) // alignment) * alignment, samples, longest)


def stream_of(
    batch: BatchConfig, samples_per_step: float, pools: Sequence[Pool], weights: Sequence[float], seed: int
) -> Stream:
    """Make the stream of a run, whose chunks have about `chunk_steps` steps; `pack` has fewer where steps are large."""
    steps = batch.grouping.chunk_steps
    multiple = 1.0
    match batch.grouping:
        case PackGrouping():
            steps = min(steps, max(2, round(128 * (128 / samples_per_step) ** 0.5)))
            multiple = samples_per_step
        case NoGrouping():
            multiple = round(samples_per_step)
    return Stream(pools, weights, max(1, round(steps * samples_per_step)), seed, multiple)


def steps_for(samples: int, per_step: float) -> int:
    """Count the steps of about `per_step` samples that take them all; rounding ends of chunks may add a sample."""
    rounding = 0 if float(per_step).is_integer() else 1
    return max(1, math.ceil((samples - rounding) / max(per_step, 1.0)))


def _first_steps(stream: Stream, per_step: int) -> list[np.ndarray]:
    """Return the samples of the first steps without grouping, of as many as a dry run takes."""
    steps: list[np.ndarray] = []
    chunk = 0
    max_steps = max(1, min(DRY_RUN[0], DRY_RUN[1] // per_step))
    while len(steps) < max_steps:
        order = stream.chunk(chunk)
        count = steps_for(len(order), per_step)
        steps += np.split(order, np.arange(1, count) * len(order) // count)
        chunk += 1
    return steps[:max_steps]


def _budget(
    rows: np.ndarray,
    lengths: np.ndarray,
    samples_per_step: float,
    longest: int,
    minimum: Sequence[int] = (),
    notes: tuple[str, ...] = (),
) -> Budget:
    return Budget(
        rows=tuple(map(int, rows)),
        lengths=tuple(map(int, lengths)),
        samples_per_step=float(samples_per_step),
        longest=longest,
        minimum=tuple(map(int, minimum)),
        notes=notes,
    )


def _extremes(index: LengthIndex, pools: Sequence[Pool], weights: Sequence[float]) -> np.ndarray:
    """Find the samples that may be drawn and have the largest total or the largest item of a module."""
    usable = np.zeros(len(index), bool)
    for pool, weight in zip(pools, weights, strict=True):
        if weight > 0:
            usable[pool.start : pool.stop] = True
            usable[pool.excluded] = False
    largest = [np.argmax(np.where(usable, total, -1)) for total in index.totals.T]
    item_usable = np.repeat(usable, np.diff(index.item_start))
    for encoder in np.unique(index.item_encoder[item_usable]):
        item = np.argmax(np.where(item_usable & (index.item_encoder == encoder), index.item_positions, -1))
        largest.append(np.searchsorted(index.item_start, item, side="right") - 1)
    return np.unique(np.array(largest, np.int64))


def _needs(index: LengthIndex, steps: Sequence[np.ndarray], rows: np.ndarray, batch: BatchConfig) -> np.ndarray:
    """Count the positions of each module's fullest row in each of these steps, int64 `[steps, modules]`."""
    needs = []
    for samples in steps:
        parts = index.parts(samples)
        microbatch = split(parts.totals(len(rows)), batch.microbatches)
        needs.append(to_rows(parts.module, parts.length, microbatch[parts.sample()], rows)[1])
    return np.stack(needs)


def _isf_budget(
    lengths: np.ndarray,
    samples: float,
    rows: np.ndarray,
    batch: BatchConfig,
    iterations: int,
    alignment: int,
    longest: int,
) -> Budget:
    """One group fills one row of every module, so all have as many rows: at most the LLM's.

    A row of each module must hold the longest sample; fewer rows keep the number of samples where that makes them long.
    """
    mean = np.maximum(lengths.mean(0), 1e-9)
    group_samples = float((lengths.max(0) / mean).max())  # in units of the mean sample
    count = int(np.clip(samples / batch.microbatches // group_samples, 1, rows[0]))
    mean = samples / (count * batch.microbatches)
    bounds = choose_bounds(lengths, (0.9 * mean, 1.25 * mean), alignment)
    budget = _budget(np.full(len(rows), count), bounds.maximum, samples, longest, bounds.minimum)

    grouping = isf_groups(lengths, budget, iterations, Shuffler(0))
    groups = grouping.groups + grouping.leftover_groups
    reached = len(lengths) / groups * count * batch.microbatches
    notes = (
        f"{count} rows of each module instead of {rows[0]}, since a group must hold {group_samples:.1f} mean samples",
        f"isf leaves {np.mean(grouping.group >= grouping.groups):.0%} of the samples over after {iterations} iterations"
        f"; they form {grouping.leftover_groups} of {groups} groups, which are trained on like the others",
    )
    return replace(budget, samples_per_step=reached, notes=notes if count < rows[0] else notes[1:])


def isf_groups(lengths: np.ndarray, budget: Budget, iterations: int, rng: Shuffler) -> Grouping:
    """Group samples `[n, modules]` by ISF; what it leaves over forms further groups behind the others."""
    maximum = np.array(budget.lengths)
    grouping = isf(lengths, maximum, np.array(budget.minimum), iterations, rng)
    return group_leftovers(lengths, grouping, maximum)
