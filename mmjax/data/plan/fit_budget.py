"""Choose the rows that a run packs, and their lengths, so that steps have as many samples as the batch says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mmjax.balance.budgets import align, fit_budgets, shortest_rows, units
from mmjax.balance.isf import choose_bounds
from mmjax.balance.lpt import split, to_rows
from mmjax.balance.parts import Parts
from mmjax.balance.permutation import Shuffler
from mmjax.config import BatchConfig, Config, IsfGrouping, NoGrouping, PackGrouping, Tokens
from mmjax.data.plan.budget import PLANNER, Budget, assumed_prices, position_flops
from mmjax.data.plan.grouping import (
    SHORT_CHUNK,
    SOON_GROUPED,
    StepGrouper,
    isf_groups,
    steps_for,
    stream_of,
)
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.sampler import Pool, Stream, pools_of, typical_samples

# at least and at most so many samples are drawn to see what is typical of the mixture
TYPICAL = 1024, 65_536
_HEADROOM = 0.02  # of budgets over mean use: what `pack` leaves empty at 24 to 48 samples a step
# of so many columns of so few samples each, some cannot be filled further
_HEADROOM_IN_THIN_COLUMNS = 0.024
_MANY_COLUMNS = 1024
_THIN_COLUMN = 24
# at most so many steps, of at most so many samples, are placed to see what they need
DRY_RUN = 512, 1_000_000


def make_budget(index: LengthIndex, config: Config, weights: Sequence[float]) -> Budget:
    """Choose rows and shapes of every module for the mixture of sources that `weights` say, and price them.

    A sample of more LLM tokens than `data.max_tokens`, a microbatch of `batch.size` or the learned
    positions is not used. Raises UserError where a source that should be drawn from has none left.
    """
    prices = assumed_prices(config)
    return replace(
        _fit_budget(index, config, weights),
        planner=PLANNER,
        position_flops=tuple(position_flops(config).tolist()),
        position_seconds=tuple(prices.position.tolist()),
        pair_seconds=tuple(prices.pair.tolist()),
    )


def _fit_budget(index: LengthIndex, config: Config, weights: Sequence[float]) -> Budget:
    batch = config.batch
    modules = ("llm", *config.model.item_modules)
    by_tokens = isinstance(batch.size, Tokens)
    # With a batch of tokens no sample may be more than a microbatch; with one of samples all are
    # used.
    longest = (
        batch.size.count // batch.microbatches
        if by_tokens
        else int(index.llm_tokens.max(initial=0))
    )
    remedy = "raise batch.size"
    longest = min(longest, config.model.llm.max_tokens)
    if (cap := config.data.max_tokens) is not None and cap < longest:
        longest = cap
        remedy = f"raise data.max_tokens={cap}"
    rows = np.array([batch.rows[m] for m in modules])
    # A row ends where a token of the LLM does.
    alignment = math.lcm(batch.alignment, *index.positions_per_token.tolist())
    pools = pools_of(index, weights, np.flatnonzero(index.llm_tokens > longest), remedy=remedy)
    # As many draws as there are samples, within these bounds.
    size = int(np.clip(sum(len(p) for p, w in zip(pools, weights, strict=True) if w > 0), *TYPICAL))
    typical = typical_samples(pools, weights, size, config.seed)
    mean = float(index.llm_tokens[typical].mean())
    samples = max(1.0, batch.size.count / mean) if by_tokens else float(batch.size.count)
    extremes = _extremes(index, pools, weights)
    match batch.grouping:
        case PackGrouping():
            # The extremes must fit as well, though they are too few to change the mean.
            parts = index.parts(np.concatenate([typical, extremes]))
            columns = int(np.gcd.reduce(rows))
            thin = columns >= _MANY_COLUMNS and samples < _THIN_COLUMN * columns
            headroom = _HEADROOM_IN_THIN_COLUMNS if thin else _HEADROOM
            fitted = fit_budgets(
                parts, samples, rows, batch.microbatches, alignment, headroom, names=modules
            )
            budget = _budget(
                fitted.rows, fitted.length, fitted.samples_per_step, longest, notes=fitted.notes
            )
            grouper = StepGrouper(index, batch, weights, config.seed, budget)
            return fit_short_epochs(grouper, parts, alignment, modules)
        case IsfGrouping(iterations=iterations):
            lengths = index.totals[np.concatenate([typical, extremes])]
            return _isf_budget(lengths, samples, rows, batch, iterations, alignment, longest)
        case NoGrouping():
            samples = round(samples)
            stream = stream_of(batch, samples, pools, weights, config.seed)
            steps = _first_steps(stream, samples)
            # Each extreme sample must fit alone, also where no dry-run step draws it.
            needs = _needs(index, [*steps, *extremes[:, None]], rows, batch)
            return _budget(
                rows, -(-np.maximum(needs.max(0), 1) // alignment) * alignment, samples, longest
            )


class LongSamples(NamedTuple):
    """The few samples by which the rows of a module are much longer than the others need."""

    module: str
    samples: np.ndarray  # int64 [n]: the largest first
    positions: int  # of the largest one
    largest_other: int  # positions of the largest of all others
    row: tuple[int, int]  # rows and their length
    row_without: tuple[int, int]
    room: float  # positions of all rows for a sample of a step
    room_without: float
    samples_per_step: float
    samples_per_step_without: float


_FEW = 0.05  # of the samples
_MANY_NAMED = 1000
_MUCH_LONGER = 2.0  # than any other


def long_samples(
    index: LengthIndex, config: Config, weights: Sequence[float], budget: Budget
) -> LongSamples | None:
    """Find the few samples that make rows long, and what leaving them out would save; None where there are none."""
    good = np.setdiff1d(np.arange(len(index)), index.bad)
    good = good[np.array(weights)[index.source_of(good)] > 0]
    good = good[index.llm_tokens[good] <= budget.longest]
    names = ("llm", *config.model.item_modules)
    gaps = []
    for module in range(len(names)):
        totals = index.totals[good, module]
        few = min(max(1, int(_FEW * len(good))), _MANY_NAMED, len(good) - 1)
        order = np.argpartition(-totals, few) if few else np.arange(0)
        order = good[order[: few + 1]]
        order = order[np.argsort(-index.totals[order, module], kind="stable")]
        largest = index.totals[order, module].astype(float)
        ratio = largest[:-1] / np.maximum(largest[1:], 1)
        if len(ratio) and largest[-1] > 0 and ratio.max() >= _MUCH_LONGER:
            gaps.append(
                (
                    ratio.max(),
                    module,
                    order[: int(ratio.argmax()) + 1],
                    int(largest[ratio.argmax() + 1]),
                )
            )
    if not gaps:
        return None
    _, module, samples, other = max(gaps, key=lambda gap: gap[0])
    reasons = dict(zip(index.bad.tolist(), index.reason.tolist(), strict=True)) | dict.fromkeys(
        samples.tolist(), ""
    )
    bad = np.array(sorted(reasons), np.int64)
    without = make_budget(
        replace(index, bad=bad, reason=np.array([reasons[k] for k in bad.tolist()])),
        config,
        weights,
    )
    room, room_without = (
        budgets.rows[module] * budgets.lengths[module] / budgets.samples_per_step
        for budgets in (budget, without)
    )
    steps = budget.samples_per_step, without.samples_per_step
    if max(room / room_without, steps[0] / steps[1]) < _MUCH_LONGER:
        return None
    return LongSamples(
        module=names[module],
        samples=samples,
        positions=int(index.totals[samples[0], module]),
        largest_other=other,
        row=(budget.rows[module], budget.lengths[module]),
        row_without=(without.rows[module], without.lengths[module]),
        room=room,
        room_without=room_without,
        samples_per_step=steps[0],
        samples_per_step_without=steps[1],
    )


def _first_steps(stream: Stream, per_step: int) -> list[np.ndarray]:
    """Return the samples of the first steps without grouping, of as many as a dry run takes."""
    steps: list[np.ndarray] = []
    chunk = 0
    max_steps = max(1, min(DRY_RUN[0], DRY_RUN[1] // per_step))
    while len(steps) < max_steps:
        order = stream.chunk(chunk)
        count = steps_for(len(order), per_step)
        # 10 samples in 4 steps are cut at 2, 5 and 7.
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
    # One sample for each module, the one with the largest total; -1 keeps unusable ones from
    # winning.
    largest = [np.argmax(np.where(usable, total, -1)) for total in index.totals.T]
    item_usable = np.repeat(usable, np.diff(index.item_start))
    for encoder in np.unique(index.item_encoder[item_usable]):
        item = np.argmax(
            np.where(item_usable & (index.item_encoder == encoder), index.item_positions, -1)
        )
        # From the item's number to its sample: item_start 0, 2, 2, 3 gives item 2 to sample 2.
        largest.append(np.searchsorted(index.item_start, item, side="right") - 1)
    return np.unique(np.array(largest, np.int64))


def _needs(
    index: LengthIndex, steps: Sequence[np.ndarray], rows: np.ndarray, batch: BatchConfig
) -> np.ndarray:
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

    A row of each module must hold the longest sample; fewer rows keep the number of samples where
    that makes them long.
    """
    mean = np.maximum(lengths.mean(0), 1e-9)
    # A row that holds the longest sample of a module holds so many mean ones, and in every module
    # as many.
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


_TRIALS = 8  # sizes of a microbatch, and numbers of rows
_TRIAL_CHUNKS = 3


def fit_short_epochs(
    grouper: StepGrouper, parts: Parts, alignment: int, names: Sequence[str]
) -> Budget:
    """Change the rows of a budget where short chunks take more steps than their samples make.

    The last steps of a chunk have few samples to choose from, and a row of 816 positions holds one
    sample of 640: 20 of these, 10 a step, take three steps of 8 such rows, and two of 5 rows of
    1,288. Rows stay as they are where others would cost as much as the additional steps. parts: of
    typical samples and of the largest. names: of the modules.
    """
    budget = grouper.budget
    requested_steps = [
        steps_for(grouper.samples_in(chunk), grouper.requested) for chunk in range(_TRIAL_CHUNKS)
    ]
    if max(requested_steps) >= SHORT_CHUNK or grouper.samples_in(0) >= SOON_GROUPED:
        return budget
    steps = list(map(grouper.steps_in, range(_TRIAL_CHUNKS)))
    unit = units(parts, len(names))
    item = parts.largest(len(names))
    sample = parts.totals(len(names)).max(0)
    requested = np.array([grouper.batch.rows[name] for name in names])
    room = np.array(budget.rows) * budget.lengths
    numbers = np.unique(np.linspace(1, requested.max(), _TRIALS).astype(np.int64))[::-1]
    for larger in (
        np.linspace(1, sum(steps) / sum(requested_steps), _TRIALS, endpoint=False)
        if steps > requested_steps
        else ()
    ):
        for number in numbers:
            rows = np.minimum(requested, number)
            lengths = align(np.ceil(room * larger / rows).astype(np.int64), unit, alignment)
            if np.any(lengths < shortest_rows(item, sample, rows, unit, alignment)):
                continue
            fitted = replace(budget, rows=tuple(rows.tolist()), lengths=tuple(lengths.tolist()))
            trial = replace(grouper, budget=fitted, first_steps=[0])
            if all(trial.steps_in(chunk) <= limit for chunk, limit in enumerate(requested_steps)):
                return replace(fitted, notes=_row_notes(budget, fitted, requested, names))
    return budget


def _row_notes(
    previous: Budget, adjusted: Budget, requested: np.ndarray, names: Sequence[str]
) -> tuple[str, ...]:
    """Return the notes of a budget with those of the modules whose number of rows has changed since."""
    changed = {
        name: f"{name}: {new} rows instead of {wish}, so that an epoch has as many steps as batch.size says"
        for name, old, new, wish in zip(
            names, previous.rows, adjusted.rows, requested.tolist(), strict=True
        )
        if new not in (old, wish)
    }
    same = {
        name
        for name, old, new in zip(names, previous.rows, adjusted.rows, strict=True)
        if old == new
    }
    unchanged = (
        note
        for note in previous.notes
        if " rows instead of " not in note or note.partition(":")[0] in same
    )
    return *unchanged, *changed.values()
