"""What every step must fit into: rows and shapes of all modules, from the config and the data before step 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.balance.budgets import Budgets, fit_budgets
from mmjax.balance.isf import Grouping, choose_bounds, group_leftovers, isf
from mmjax.balance.parts import Parts
from mmjax.balance.place import place
from mmjax.balance.shapes import choose_shapes
from mmjax.config import BatchConfig, Config, IsfGrouping, NoGrouping, PackGrouping, Tokens
from mmjax.data.index import LengthIndex
from mmjax.data.stream import Pool, chunk_samples, pools_of
from mmjax.planning.cost import relative_cost

Shape = tuple[int, ...]  # row length of every module, the LLM first

TYPICAL = 1024, 65_536  # at least and at most so many samples are drawn to see what is typical of the mixture
DRY_RUN_STEPS = 512


@dataclass(frozen=True)
class Budget:
    """Decided before step 0, and stored with the run."""

    rows: Shape  # per microbatch
    shapes: tuple[Shape, ...]  # compiled ahead, the cheapest first; the last holds every step seen in the dry run
    samples_per_step: float  # mean
    longest: int  # a sample of more LLM tokens is not used
    minimum: Shape = ()  # grouping isf: what a group must reach in one module (Q')
    notes: tuple[str, ...] = ()

    def of_microbatch(self, shape: Shape) -> Budgets:
        """The room of one microbatch of this shape."""
        return Budgets(np.array(self.rows), np.array(shape), self.samples_per_step)


def make_budget(index: LengthIndex, config: Config, weights: Sequence[float]) -> Budget:
    """Choose rows and shapes of every module for the mixture of sources that `weights` say.

    A sample with more LLM tokens than a microbatch of `batch.size` is not used. Raises UserError where a source that
    should be drawn from has none left.
    """
    batch, seed, modules = config.batch, config.seed, ("llm", *config.model.encoders)
    by_tokens = isinstance(batch.size, Tokens)
    longest = batch.size.count // batch.microbatches if by_tokens else int(index.llm_tokens.max(initial=0))
    rows = np.array([batch.rows[m] for m in modules])
    # A row ends where a token of the LLM does.
    alignment = math.lcm(batch.alignment, *index.positions_per_token.tolist())
    pools = pools_of(index, weights, np.flatnonzero(index.llm_tokens > longest))
    size = int(np.clip(sum(len(p) for p, w in zip(pools, weights, strict=True) if w > 0), *TYPICAL))
    typical = chunk_samples(pools, weights, size, seed, 0)
    mean = float(index.llm_tokens[typical].mean())
    samples = max(1.0, batch.size.count / mean) if by_tokens else float(batch.size.count)
    extremes = _extremes(index, pools, weights)
    match batch.grouping:
        case PackGrouping():
            parts = index.parts(np.concatenate([typical, extremes]))
            fitted = fit_budgets(parts, samples, rows, batch.microbatches, alignment, names=modules)
            return _budget(fitted.rows, fitted.length[None], fitted.samples_per_step, longest, notes=fitted.notes)
        case IsfGrouping(iterations=iterations):
            lengths = index.totals[np.concatenate([typical, extremes])]
            return _isf_budget(lengths, samples, rows, batch, iterations, alignment, longest)
        case NoGrouping(chunk_steps=chunk_steps):
            samples = round(samples)
            chunks = range(-(-DRY_RUN_STEPS // chunk_steps))
            order = np.concatenate([chunk_samples(pools, weights, chunk_steps * samples, seed, c) for c in chunks])
            needs = _needs(index, order, extremes, samples, rows, batch.microbatches)
            # By operations alone a small encoder's rows would be left half empty, and its own ranks with them: so each
            # module counts between its part of the operations and an equal part.
            cost = np.sqrt(rows * relative_cost(config.model) / np.maximum(needs.mean(0), 1))
            shapes = choose_shapes(needs, cost, batch.shapes, alignment)
            return _budget(rows, shapes, samples, longest)


def _budget(
    rows: np.ndarray,
    shapes: np.ndarray,
    samples_per_step: float,
    longest: int,
    minimum: Sequence[int] = (),
    notes: tuple[str, ...] = (),
) -> Budget:
    lengths = tuple(tuple(shape) for shape in shapes.tolist())
    return Budget(tuple(rows.tolist()), lengths, float(samples_per_step), longest, tuple(map(int, minimum)), notes)


def _extremes(index: LengthIndex, pools: Sequence[Pool], weights: Sequence[float]) -> np.ndarray:
    """Samples that may be drawn and have the largest total or the largest item of a module."""
    usable = np.zeros(len(index), bool)
    for pool, weight in zip(pools, weights, strict=True):
        if weight > 0:
            usable[pool.start : pool.stop] = True
            usable[pool.excluded] = False
    largest = [np.argmax(np.where(usable, total, -1)) for total in index.totals.T]
    of_item = np.repeat(usable, np.diff(index.item_start))
    for encoder in np.unique(index.item_encoder[of_item]):
        item = np.argmax(np.where(of_item & (index.item_encoder == encoder), index.item_positions, -1))
        largest.append(np.searchsorted(index.item_start, item, side="right") - 1)
    return np.unique(np.array(largest, np.int64))


def _needs(
    index: LengthIndex, order: np.ndarray, extremes: np.ndarray, samples: int, rows: np.ndarray, microbatches: int
) -> np.ndarray:
    """What microbatches of the first steps need, and what the largest samples need alone, int64 `[needs, modules]`."""
    needs = []
    for step in [*np.split(order, range(samples, len(order), samples)), *extremes[:, None]]:
        parts = index.parts(step)
        row = place(parts, np.arange(len(parts)), rows, microbatches).row
        needs.append(needs_of(parts, row, rows, microbatches))
    return np.concatenate(needs)


def needs_of(parts: Parts, row: np.ndarray, rows: np.ndarray, microbatches: int) -> np.ndarray:
    """Positions of the fullest row of each module, int64 `[microbatches, modules]`, for parts in rows `[p]`."""
    used = np.zeros((len(rows), microbatches * rows.max()), np.int64)
    np.add.at(used, (parts.module, row), parts.length)
    return np.stack([used[k, : microbatches * n].reshape(microbatches, n).max(1) for k, n in enumerate(rows)], axis=1)


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
    least = float((lengths.max(0) / mean).max())  # samples of a group
    count = int(np.clip(samples / batch.microbatches // least, 1, rows[0]))
    mean = samples / (count * batch.microbatches)
    bounds = choose_bounds(lengths, (0.9 * mean, 1.25 * mean), alignment)
    budget = _budget(np.full(len(rows), count), bounds.maximum[None], samples, longest, bounds.minimum)

    grouping = isf_groups(lengths, budget, iterations, np.random.default_rng(0))
    groups = grouping.groups + grouping.leftover_groups
    reached = len(lengths) / groups * count * batch.microbatches
    notes = (
        f"{count} rows of each module instead of {rows[0]}, since a group must hold {least:.1f} mean samples",
        f"isf leaves {np.mean(grouping.group >= grouping.groups):.0%} of the samples over after {iterations} iterations"
        f"; they form {grouping.leftover_groups} of {groups} groups, which are trained on like the others",
    )
    return replace(budget, samples_per_step=reached, notes=notes if count < rows[0] else notes[1:])


def isf_groups(lengths: np.ndarray, budget: Budget, iterations: int, rng: np.random.Generator) -> Grouping:
    """ISF groups of samples `[n, modules]`, what it leaves over as groups of their own behind the others."""
    maximum = np.array(budget.shapes[-1])
    grouping = isf(lengths, maximum, np.array(budget.minimum), iterations, rng)
    return group_leftovers(lengths, grouping, maximum)
