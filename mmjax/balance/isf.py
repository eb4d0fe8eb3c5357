"""Iterative Sampling and Filtering, OmniBal section 4.1: samples grouped so that a group fills one row.

Algorithms 1 (sampling) and 2 (filtering) in any number of dimensions. What the paper loses is kept and told apart here:
samples above a bound, and those that no iteration has put into an accepted group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit

_TRIAL = 4096  # samples that bounds are tried on
_TOLERANCES = (0.03, 0.06, 0.1, 0.15)


@dataclass(frozen=True)
class Iteration:
    """What one sampling and filtering kept. fill: float64 `[D]`, mean of a kept group's total / maximum."""

    groups: int
    samples: int
    fill: np.ndarray


@dataclass(frozen=True)
class Grouping:
    """The group of each sample.

    group: int32 `[n]`; 0 .. groups - 1 were accepted by the filter, the next `leftover_groups` made from what it left,
    -1 = left over, or above a bound.
    above: int64, the samples that exceed the maximum in a dimension; they fit no group.
    """

    group: np.ndarray
    groups: int
    above: np.ndarray
    iterations: tuple[Iteration, ...]
    leftover_groups: int = 0


@dataclass(frozen=True)
class Bounds:
    """maximum: Q of the paper, minimum: Q'; int64 `[D]` each."""

    maximum: np.ndarray
    minimum: np.ndarray


def isf(
    lengths: np.ndarray, maximum: np.ndarray, minimum: np.ndarray, iterations: int, rng: np.random.Generator
) -> Grouping:
    """Group samples by sampling and filtering, at most `iterations` times (T of the paper).

    Sampling shuffles what is left and opens a new group whenever the next sample would exceed `maximum` `[D]` in any
    dimension; filtering keeps the groups that reach `minimum` `[D]` in at least one. The group that is still open when
    the samples end is not a candidate. lengths: int `[n, D]`.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    maximum, minimum = np.asarray(maximum, np.int64), np.asarray(minimum, np.int64)
    group = np.full(len(lengths), -1, np.int32)
    above = np.any(lengths > maximum, axis=1)
    left = np.flatnonzero(~above)
    groups = 0
    kept: list[Iteration] = []
    for _ in range(iterations):
        if len(left) == 0:
            break
        before, groups = groups, _sample_and_filter(rng.permutation(left), lengths, maximum, minimum, group, groups)
        samples = np.flatnonzero(group >= before)
        fill = lengths[samples].sum(0) / (maximum * max(groups - before, 1))
        kept.append(Iteration(groups - before, len(samples), fill))
        left = left[group[left] < 0]
    return Grouping(group, groups, np.flatnonzero(above), tuple(kept))


def group_leftovers(lengths: np.ndarray, grouping: Grouping, maximum: np.ndarray) -> Grouping:
    """The grouping with what it left over as groups too: first fit, largest samples first, within `maximum` `[D]`."""
    lengths, maximum = np.asarray(lengths, np.int64), np.asarray(maximum, np.int64)
    left = grouping.group < 0
    left[grouping.above] = False
    left = np.flatnonzero(left)
    largest_first = left[np.argsort(-(lengths[left] / maximum).max(1), kind="stable")]
    number = _first_fit(lengths[largest_first], maximum)
    group = grouping.group.copy()
    group[largest_first] = grouping.groups + number
    return replace(grouping, group=group, leftover_groups=int(number.max(initial=-1)) + 1)


def choose_bounds(lengths: np.ndarray, samples_per_group: float, alignment: int | np.ndarray = 1) -> Bounds:
    """The bounds near `samples_per_group` mean samples that, tried on the data, leave the least of all groups empty.

    A ratio of means misses what the multiset of lengths allows: two samples of 5 tiles never share a bound of 9. Each
    dimension's maximum is tried from 0.9 to 1.25 times its mean need, never below the longest sample; the minimum as
    a share of it. alignment: maxima are multiples of it, one or `[D]`. Raises ValueError without samples.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0:
        raise ValueError("no samples to choose bounds from")
    unit = np.broadcast_to(np.asarray(alignment, np.int64), lengths.shape[1:])
    mean, longest = lengths.mean(0), lengths.max(0)
    used = longest > 0
    samples = max(float(samples_per_group), (longest[used] / mean[used]).max(initial=0))
    trial = lengths[np.random.default_rng(0).permutation(len(lengths))[:_TRIAL]]

    maximum = np.maximum(_ceil(np.maximum(samples * mean, longest), unit), unit)
    best, least = Bounds(maximum, maximum), np.inf
    for _ in range(2):
        for k in np.flatnonzero(used):
            for value in _near(samples * mean[k], longest[k], unit[k]):
                maximum = best.maximum.copy()
                maximum[k] = value
                for tolerance in _TOLERANCES:
                    bounds = Bounds(maximum, np.maximum(np.ceil(maximum * (1 - tolerance)).astype(np.int64), 1))
                    if (empty := _empty_share(trial[:, used], bounds, used)) < least:
                        best, least = bounds, empty
    return best


def _ceil(length: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return (np.ceil(length / unit - 1e-9) * unit).astype(np.int64)


def _near(need: float, longest: int, unit: int) -> np.ndarray:
    """At most nine aligned values around the mean need, one unit to either side at least."""
    low, high = min(0.9 * need, need - unit), max(1.25 * need, need + unit)
    units = np.arange(max(np.ceil(low / unit), np.ceil(longest / unit), 1), max(high, longest + unit) // unit + 1)
    return np.unique(units[np.linspace(0, len(units) - 1, min(len(units), 9)).astype(int)]).astype(np.int64) * unit


def _empty_share(trial: np.ndarray, bounds: Bounds, used: np.ndarray) -> float:
    """Mean over dimensions of the share of all groups, leftover ones too, that stays empty."""
    maximum, minimum = bounds.maximum[used], bounds.minimum[used]
    grouping = isf(trial, maximum, minimum, 10, np.random.default_rng(0))
    grouping = group_leftovers(trial, grouping, maximum)
    groups = grouping.groups + grouping.leftover_groups
    return float(1 - (trial.sum(0) / (groups * maximum)).mean())


@njit(cache=True)
def _sample_and_filter(order, lengths, maximum, minimum, group, groups):
    """One round of algorithms 1 and 2 over `order`; writes kept groups into `group`, numbered from `groups` on."""
    dimensions = len(maximum)
    total = np.zeros(dimensions, np.int64)
    begin = 0
    for i in range(len(order)):
        length = lengths[order[i]]
        over = False
        for k in range(dimensions):
            over = over or total[k] + length[k] > maximum[k]
        if over:
            keep = False
            for k in range(dimensions):
                keep = keep or total[k] >= minimum[k]
                total[k] = 0
            if keep:
                for j in range(begin, i):
                    group[order[j]] = groups
                groups += 1
            begin = i
        for k in range(dimensions):
            total[k] += length[k]
    return groups


@njit(cache=True)
def _first_fit(lengths, maximum):
    """The first open group that holds each sample, int64 [n]."""
    n, dimensions = lengths.shape
    number = np.full(n, -1, np.int64)
    left = np.empty((n, dimensions), np.int64)
    groups = 0
    for i in range(n):
        for g in range(groups + 1):
            if g == groups:
                groups += 1
                for k in range(dimensions):
                    left[g, k] = maximum[k]
            fits = True
            for k in range(dimensions):
                fits = fits and lengths[i, k] <= left[g, k]
            if fits:
                for k in range(dimensions):
                    left[g, k] -= lengths[i, k]
                number[i] = g
                break
    return number
