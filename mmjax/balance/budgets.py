"""Choose the row lengths of every module from the data so that all modules fill up together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.balance.parts import Parts
from mmjax.balance.permutation import Shuffler
from mmjax.balance.waits import Prices

_TRIAL = 4096  # samples that maxima are tried on
_MOST_ANCHORS = 12
# of the other dimensions to the anchor, relative to the means'
_RATIOS = (0.97, 0.985, 1.0, 1.01, 1.02, 1.04, 1.07)


def choose_maximum(
    lengths: np.ndarray,
    samples_per_row: tuple[float, float],
    rows_needed: Callable[[np.ndarray, np.ndarray], float],
    alignment: int | np.ndarray = 1,
    fixed: np.ndarray | None = None,
) -> np.ndarray:
    """Choose the row maxima, int64 `[D]`, that leave rows least empty with so many samples a row, (least, most).

    The dimension with the fewest units per sample takes every multiple of its unit in that range;
    the others follow in the proportion of the means, a little more or less. No maximum is below the
    longest sample, even if rows then hold more samples than asked for. lengths: int `[n, D]`.
    rows_needed: called with samples `[m, D]` and maxima `[D]` that all of them fit, returns how
    many rows it took to group them. alignment: maxima are multiples of it, one or `[D]`.
    fixed: int `[D]`, maxima that are decided already, 0 where they are not. Raises ValueError
    without samples.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0:
        raise ValueError("no samples to choose bounds from")
    # One alignment for every dimension, also where one number was given.
    unit = np.broadcast_to(np.asarray(alignment, np.int64), lengths.shape[1:])
    fixed = np.zeros_like(unit) if fixed is None else np.asarray(fixed, np.int64)
    if np.all(fixed > 0):
        return fixed
    fits = np.all((lengths <= fixed) | (fixed == 0), axis=1)
    if not fits.any():
        raise ValueError("every sample exceeds the maxima that are given")
    lengths = lengths[fits]
    mean = lengths.mean(0)
    longest = lengths.max(0)
    used = longest > 0
    # Even a dimension that nobody uses gets one unit, so that no maximum is 0.
    shortest = np.maximum(_up(longest, unit), unit)
    trial = lengths[Shuffler(0).permutation(len(lengths))[:_TRIAL]]
    tried = _Tried(trial, used, samples_per_row, rows_needed)
    # First all dimensions together along the means, then each by itself around the best.
    best = tried.best_of(_candidates(mean, shortest, unit, samples_per_row, fixed, used))
    for k in np.flatnonzero(used & (fixed == 0)):
        variants = np.tile(best, (len(_RATIOS), 1))
        variants[:, k] = np.maximum(_up(best[k] * np.array(_RATIOS), unit[k]), shortest[k])
        best = tried.best_of(np.unique(variants, axis=0))
    return best


@dataclass
class _Tried:
    """Maxima tried so far on some samples: the best of them and, of that, how far it misses and what it wastes."""

    samples: np.ndarray
    used: np.ndarray
    samples_per_row: tuple[float, float]
    rows_needed: Callable[[np.ndarray, np.ndarray], float]
    best: np.ndarray | None = None
    best_score: tuple[float, float] = (np.inf, np.inf)

    def best_of(self, candidates: np.ndarray) -> np.ndarray:
        """Return the best of `[c, D]` and of those tried before."""
        total = self.samples.sum(0)
        count = len(self.samples)
        # Emptiness if the fullest dimension were full: no grouping does better, so it gives the
        # order of trials.
        at_best = 1 - (total / ((total / candidates).max(1, keepdims=True) * candidates))[
            :, self.used
        ].mean(1)
        for i in np.argsort(at_best, kind="stable"):
            # Candidates come by the best that they could be, so all others are no better either.
            if self.best_score[0] == 0 and at_best[i] >= self.best_score[1]:
                break  # not even rows full in one dimension would leave less empty
            rows = self.rows_needed(self.samples, candidates[i])
            # By how many samples a row misses the range; 0 inside it. Compared first: range before
            # emptiness.
            outside = max(
                self.samples_per_row[0] - count / rows, count / rows - self.samples_per_row[1], 0.0
            )
            empty = float(1 - (total / (rows * candidates[i]))[self.used].mean())
            if (outside, empty) < self.best_score:
                self.best = candidates[i]
                self.best_score = (outside, empty)
        assert self.best is not None
        return self.best


def _candidates(
    mean: np.ndarray,
    shortest: np.ndarray,
    unit: np.ndarray,
    samples_per_row: tuple[float, float],
    fixed: np.ndarray,
    used: np.ndarray,
) -> np.ndarray:
    """List distinct maxima to try, int64 `[c, D]`."""
    # The anchor is a dimension that is fixed already, else the one with the fewest units per
    # sample.
    decided = np.flatnonzero((fixed > 0) & used)
    if len(decided):
        anchor = int(decided[0])
        values = fixed[[anchor]]
    else:
        anchor = int(np.argmin(np.where(used, mean / unit, np.inf)))
        # How many units of the anchor so many samples take on average.
        low, high = np.asarray(samples_per_row) * mean[anchor] / unit[anchor]
        units = np.arange(
            max(np.floor(low), shortest[anchor] // unit[anchor]), max(np.ceil(high), 1) + 1
        )
        if len(units) == 0:
            units = shortest[[anchor]] // unit[anchor]
        # At most _MOST_ANCHORS of them, evenly over the range.
        values = np.unique(
            units[np.linspace(0, len(units) - 1, min(len(units), _MOST_ANCHORS)).astype(int)]
        )
        values = values.astype(np.int64) * unit[anchor]
    candidates = []
    for value in values:
        for ratio in _RATIOS:
            maximum = np.maximum(_up(value / mean[anchor] * mean * ratio, unit), shortest)
            maximum[anchor] = value
            candidates.append(np.where(fixed > 0, fixed, maximum))
    return np.unique(candidates, axis=0)


def _up(length: np.ndarray, unit: np.ndarray) -> np.ndarray:
    # Less a trifle, so that 3.0000000001 units stay 3.
    return (np.ceil(length / unit - 1e-9) * unit).astype(np.int64)


# samples per step may move by this share to keep aligned rows of all modules in proportion
_GIVE = 0.04


@dataclass(frozen=True)
class Budgets:
    """Capacity of one microbatch for each module.

    rows: int64 `[M]`, rows per microbatch.
    length: int64 `[M]`, positions of a row.
    samples_per_step: the mean that the packer should reach with these.
    notes: what differs from the request, and why; one line each.
    prices: by which columns are levelled; None: they are not.
    all_weights: encoders get every weight that there is even where none can make columns fit, as
    older versions did.
    """

    rows: np.ndarray
    length: np.ndarray
    samples_per_step: float
    notes: tuple[str, ...] = ()
    prices: Prices | None = None
    all_weights: bool = False


def fit_budgets(
    parts: Parts,
    samples_per_step: float,
    rows: Sequence[int] | np.ndarray,
    microbatches: int = 1,
    alignment: int = 8,
    headroom: float = 0.02,
    names: Sequence[str] = (),
) -> Budgets:
    """Size rows in proportion to each module's mean use, whose rows hold the largest item and the largest sample.

    rows: `[M]`, at most so many rows per microbatch; fewer where the largest item needs longer
    ones. Where even one row would then be out of proportion, there are more samples in a step. A
    module without parts keeps its rows, of length `alignment`. headroom: a budget's excess over
    mean use; the default is what the packer leaves empty at 24 to 48 samples a step, so that steps
    really have `samples_per_step`. names: of the modules, for the notes. Raises ValueError without
    samples, or for numbers below 1.
    """
    requested = np.asarray(rows, np.int64)
    if len(parts) == 0:
        raise ValueError("no samples to fit budgets to")
    if samples_per_step <= 0 or microbatches < 1 or alignment < 1 or np.any(requested < 1):
        raise ValueError("samples per step, rows, microbatches and alignment must be at least 1")
    modules = len(requested)
    totals = parts.totals(modules)
    unit = units(parts, modules)
    # Budgets scale with the number of samples per step, so everything is counted in positions per
    # sample of a step. positions of a microbatch, for each sample of a step
    per_sample = totals.mean(0) * (1 + headroom) / microbatches
    item = parts.largest(modules)
    sample = totals.max(0)
    used = item > 0

    # So many samples a step need, on average, as much of a module as its largest sample alone.
    min_count = align(sample, unit, alignment)[used] / per_sample[used]
    # With fewer, rows would be longer in one module alone, and the others' emptier.
    count = max(float(samples_per_step), min_count.max())
    fitted = requested.copy()
    # Fewer, longer rows where rows that hold the largest item would together exceed the module's
    # share.
    for k in np.flatnonzero(used):
        while fitted[k] > 1 and fitted[k] * shortest_rows(
            item[k], sample[k], fitted[k], unit[k], alignment
        ) > (count * per_sample[k]):
            fitted[k] -= 1
    shortest = np.maximum(shortest_rows(item, sample, fitted, unit, alignment), alignment)
    # All modules are to be full after the same number of samples.
    length = _in_proportion(count * per_sample, fitted, shortest, used, unit, alignment)
    # A row is filled in whole units, so the rest of `length // unit` stays empty; the tightest
    # module decides.
    reached = float(
        (fitted * (length // unit * unit) / np.where(used, per_sample, np.inf))[used].min()
    )

    min_length = shortest_rows(item, sample, fitted, unit, 1)
    named = list(names) or [f"module {k}" for k in range(modules)]
    notes = [
        f"{named[k]}: {fitted[k]} rows instead of {requested[k]}, since a row must hold {min_length[k]}"
        for k in np.flatnonzero(fitted < requested)
    ]
    if count > samples_per_step:
        largest = np.flatnonzero(used)[np.argmax(min_count)]
        notes.append(
            f"{count:.1f} samples per step instead of {samples_per_step:.1f}, since one sample takes up to"
            f" {sample[largest]} positions of {named[largest]}"
        )
    return Budgets(fitted, length, reached, tuple(notes))


def units(parts: Parts, modules: int) -> np.ndarray:
    """Return the greatest common divisor of each module's part lengths, int64 `[modules]`: a tile, if all are tiles."""
    unit = [np.gcd.reduce(parts.length[parts.module == k]) for k in range(modules)]
    return np.maximum(np.array(unit, np.int64), 1)


def align(length: np.ndarray, unit: np.ndarray, alignment: int) -> np.ndarray:
    """Raise lengths to whole units, and what that takes to the alignment."""
    # -(-a // b) rounds up. 70 in units of 16 are 80, and aligned to 32 they are 96.
    return -(-(-(-length // unit) * unit) // alignment) * alignment


def shortest_rows(
    item: np.ndarray, sample: np.ndarray, rows: np.ndarray, unit: np.ndarray, alignment: int
) -> np.ndarray:
    """Return the shortest rows that hold the largest item and, together, the largest sample."""
    # A sample may spread over all rows of a module, an item may not.
    return align(np.maximum(item, -(-sample // rows)), unit, alignment)


def _in_proportion(
    need: np.ndarray,
    rows: np.ndarray,
    shortest: np.ndarray,
    used: np.ndarray,
    unit: np.ndarray,
    alignment: int,
) -> np.ndarray:
    """Round row lengths near need / rows: rounding each up by itself would leave the roomiest module unfilled."""
    best = shortest
    min_loss = np.inf
    # Around the requested size outwards: 1, 1, 1.001, 0.999, 1.002, ... so the nearest of equals
    # wins.
    for scale in 1 + np.linspace(0, _GIVE, 41)[:, None] * np.array([1, -1]):
        for s in scale:
            length = np.maximum(
                align(np.ceil(s * need / rows - 1e-9).astype(np.int64), unit, alignment), shortest
            )
            # Both the spread between modules and the distance from the requested size count as
            # loss. how many steps' mean need each module holds
            steps = (rows * (length // unit * unit))[used] / need[used]
            loss = 1 - steps.min() / steps.max() + abs(steps.min() - 1) / 2
            if loss < min_loss - 1e-12:
                best = length
                min_loss = loss
    return best
