"""Iterative Sampling and Filtering, OmniBal section 4.1: samples grouped so that a group fills one row.

Algorithms 1 (sampling) and 2 (filtering) in any number of dimensions. What the paper loses is kept
and told apart here: samples above a bound, and those that no iteration has put into an accepted
group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.balance.budgets import choose_maximum
from mmjax.balance.permutation import Shuffler

_TRIAL = 4096  # samples that minima are tried on
_SHUFFLES = 3  # of one trial: one alone is as uncertain as bounds differ
_CACHED = 2**16  # samples that are shuffled at once
_MOST_OPEN = 256  # groups that leftover samples are tried in
_TOLERANCES = (0.03, 0.06, 0.1, 0.15)


@dataclass(frozen=True)
class Iteration:
    """Result of a round of sampling and filtering. fill: float64 `[D]`, mean of an accepted group's total / maximum."""

    groups: int
    samples: int
    fill: np.ndarray


@dataclass(frozen=True)
class Grouping:
    """The group of each sample.

    group: int32 `[n]`; 0 .. groups - 1 were accepted by the filter, the next `leftover_groups` made
    from what it left, -1 = left over, or above a bound.
    oversize: int64, the samples that exceed the maximum in a dimension; they fit no group.
    """

    group: np.ndarray
    groups: int
    oversize: np.ndarray
    iterations: tuple[Iteration, ...]
    leftover_groups: int = 0


@dataclass(frozen=True)
class Bounds:
    """maximum: Q of the paper, minimum: Q'; int64 `[D]` each."""

    maximum: np.ndarray
    minimum: np.ndarray


def isf(
    lengths: np.ndarray,
    maximum: np.ndarray,
    minimum: np.ndarray,
    iterations: int,
    rng: Shuffler | np.random.Generator,
) -> Grouping:
    """Group samples by sampling and filtering, at most `iterations` times (T of the paper).

    Sampling shuffles what is left and opens a new group whenever the next sample would exceed
    `maximum` `[D]` in any dimension; filtering keeps the groups that reach `minimum` `[D]` in at
    least one. The group that is still open when the samples end is not a candidate. lengths: int
    `[n, D]`.
    """
    lengths = np.ascontiguousarray(lengths, np.int64)
    maximum = np.asarray(maximum, np.int64)
    minimum = np.asarray(minimum, np.int64)
    group = np.full(len(lengths), -1, np.int32)
    # Samples and their lengths are shuffled together: looked up at random addresses, they would
    # take most of the time.
    kind = np.int32 if max(len(lengths), *maximum) < 2**31 else np.int64
    remaining, order = (
        _Samples(np.empty(len(lengths), kind), np.empty(lengths.shape, kind)) for _ in range(2)
    )
    count = _take_within(lengths, maximum, remaining)
    # Sought only where the count says that there are some.
    above = (
        np.flatnonzero(np.any(lengths > maximum, axis=1))
        if count < len(lengths)
        else np.zeros(0, np.int64)
    )
    history: list[Iteration] = []
    groups = 0
    for _ in range(iterations):
        if count == 0:
            break
        # Two buffers take turns: the shuffle writes the other one, whose front then holds the
        # rejected samples.
        _shuffle(remaining.first(count), order.first(count), rng)
        first_group = groups
        candidates = count
        total = np.zeros(len(maximum), np.int64)
        groups, count = _sample_and_filter(
            order.first(count), maximum, minimum, group, groups, total
        )
        # The front of `order` now has those that remain; `remaining` may be overwritten in the next
        # round.
        remaining, order = order, remaining
        history.append(
            Iteration(
                groups - first_group,
                candidates - count,
                total / (maximum * max(groups - first_group, 1)),
            )
        )
    return Grouping(group, groups, above, tuple(history))


class _Samples(NamedTuple):
    """Samples in some order, `[m]`, and their lengths in the same order, `[m, D]`."""

    number: np.ndarray
    length: np.ndarray

    def first(self, count: int) -> _Samples:
        return _Samples(self.number[:count], self.length[:count])


def _shuffle(samples: _Samples, shuffled: _Samples, rng: Shuffler | np.random.Generator) -> None:
    """Write the samples in random order into `shuffled`.

    Many are first dealt to random buckets that fit in a cache, then each bucket is shuffled: a
    uniform shuffle too (Rao 1961, Sandelius 1962), in time proportional to the samples.
    """
    buckets = 1
    # A random byte chooses the bucket, so there are at most 256.
    while buckets < 256 and len(samples.number) > buckets * _CACHED:
        buckets *= 2
    start = np.array([0, len(samples.number)])
    if buckets > 1:
        start = _deal(
            samples, np.frombuffer(rng.bytes(len(samples.number)), np.uint8), buckets, shuffled
        )
        samples = shuffled
    for begin, end in pairwise(start):
        order = rng.permutation(end - begin)
        shuffled.number[begin:end] = samples.number[begin:end].take(order)
        shuffled.length[begin:end] = samples.length[begin:end].take(order, axis=0)


def group_leftovers(lengths: np.ndarray, grouping: Grouping, maximum: np.ndarray) -> Grouping:
    """Group the leftover samples of a grouping too: first fit, largest samples first, within `maximum` `[D]`."""
    lengths = np.asarray(lengths, np.int64)
    maximum = np.asarray(maximum, np.int64)
    remaining = grouping.group < 0
    remaining[grouping.oversize] = False
    remaining = np.flatnonzero(remaining)
    largest_first = remaining[np.argsort(-(lengths[remaining] / maximum).max(1), kind="stable")]
    # First fit decreasing; with several dimensions, by the one that a sample fills most.
    number = _first_fit(lengths[largest_first], maximum)
    group = grouping.group.copy()
    group[largest_first] = grouping.groups + number
    return replace(grouping, group=group, leftover_groups=int(number.max(initial=-1)) + 1)


def choose_bounds(
    lengths: np.ndarray,
    samples_per_group: tuple[float, float],
    alignment: int | np.ndarray = 1,
    fixed: np.ndarray | None = None,
) -> Bounds:
    """Choose the bounds that, tried on the data, leave the least of all groups empty, leftover ones too.

    The maximum is chosen as in `choose_maximum`, whose arguments these are, the minimum as a share
    of it.
    """

    def rows_needed(trial: np.ndarray, maximum: np.ndarray) -> float:
        return min(_all_groups(trial, bounds) for bounds in _tolerated(maximum))

    # Each maximum is judged with the minimum that suits it best.
    maximum = choose_maximum(lengths, samples_per_group, rows_needed, alignment, fixed)
    lengths = np.asarray(lengths, np.int64)
    trial = lengths[np.all(lengths <= maximum, axis=1)]
    # Another seed than `choose_maximum` has: its trial has been fitted to.
    trial = trial[Shuffler(1).permutation(len(trial))[:_TRIAL]]
    return min(_tolerated(maximum), key=lambda bounds: _all_groups(trial, bounds))


def _tolerated(maximum: np.ndarray) -> list[Bounds]:
    return [
        Bounds(maximum, np.maximum(np.ceil(maximum * (1 - t)).astype(np.int64), 1))
        for t in _TOLERANCES
    ]


def _all_groups(trial: np.ndarray, bounds: Bounds) -> float:
    """Count the groups that the samples make within the bounds, leftover ones too: the mean of a few shuffles."""
    groups = 0
    for seed in range(_SHUFFLES):
        grouping = isf(trial, bounds.maximum, bounds.minimum, 10, Shuffler(seed))
        groups += grouping.groups + group_leftovers(trial, grouping, bounds.maximum).leftover_groups
    return groups / _SHUFFLES


@njit(cache=True)
def _take_within(lengths, maximum, within):
    """Write the samples that exceed the maximum in no dimension to the front of `within`; return how many."""
    count = 0
    for i in range(len(lengths)):
        fits = True
        for k in range(len(maximum)):
            fits &= lengths[i, k] <= maximum[k]
        if fits:
            within.number[count] = i
            for k in range(len(maximum)):
                within.length[count, k] = lengths[i, k]
            count += 1
    return count


@njit(cache=True)
def _deal(samples, bucket, buckets, dealt):
    """Write the samples one bucket after the other; return where each bucket starts, int64 [buckets + 1].

    buckets: a power of 2; the bucket of a sample is in the low bits of `bucket`.
    """
    start = np.zeros(buckets + 1, np.int64)
    for b in bucket:
        start[(b & (buckets - 1)) + 1] += 1
    # Counting sort: bucket sizes [2, 0, 3] become starts [0, 2, 2, 5]; `free` is the next slot of
    # each bucket.
    start = np.cumsum(start)
    free = start.copy()
    for i in range(len(bucket)):
        b = bucket[i] & (buckets - 1)
        _copy(samples, i, dealt, free[b])
        free[b] += 1
    return start


@njit(cache=True)
def _copy(samples, index, to, place):
    to.number[place] = samples.number[index]
    for k in range(samples.length.shape[1]):
        to.length[place, k] = samples.length[index, k]


@njit(cache=True)
def _sample_and_filter(order, maximum, minimum, group, groups, accepted_total):
    """Run one round of algorithms 1 and 2 over the samples `order`; rejected samples are moved to its front.

    Writes accepted groups into `group` `[n]`, numbered from `groups` on, and adds their lengths to
    `accepted_total` `[D]`. Returns the number of the next group, and how many samples remain.
    """
    dimensions = len(maximum)
    # Lengths of the group that is open, begin .. i.
    total = np.zeros(dimensions, np.int64)
    begin = remaining = 0
    for i in range(len(order.number)):
        over = False
        for k in range(dimensions):
            total[k] += order.length[i, k]
            over |= total[k] > maximum[k]
        if not over:
            continue
        # Sample i does not fit: the group is begin .. i - 1, without its lengths.
        keep = False
        for k in range(dimensions):
            total[k] -= order.length[i, k]
            # One dimension is enough: of an image-heavy and a text-heavy group each fills another
            # module.
            keep |= total[k] >= minimum[k]
        if keep:
            for j in range(begin, i):
                group[order.number[j]] = groups
            groups += 1
        else:
            # In place: `remaining` never overtakes `begin`, so nothing unread is overwritten.
            for j in range(begin, i):
                _copy(order, j, order, remaining)
                remaining += 1
        for k in range(dimensions):
            # A bool times a number: nothing is added for a rejected group.
            accepted_total[k] += keep * total[k]
            total[k] = order.length[i, k]
        begin = i
    # The group that is open at the end was never tested against the next sample: it goes round once
    # more.
    for j in range(begin, len(order.number)):
        _copy(order, j, order, remaining)
        remaining += 1
    return groups, remaining


@njit(cache=True)
def _first_fit(lengths, maximum):
    """Return the first open group that holds each sample, int64 [n].

    Groups are closed that none of the rest fits, and the oldest where too many are open: else time
    is quadratic.
    """
    n, dimensions = lengths.shape
    number = np.full(n, -1, np.int64)
    # A suffix minimum: a group with less room than this can receive no later sample and is closed.
    smallest = lengths.copy()  # of this sample and those after it
    for i in range(n - 2, -1, -1):
        for k in range(dimensions):
            smallest[i, k] = min(smallest[i, k], smallest[i + 1, k])
    free = np.empty((n, dimensions), np.int64)
    open_groups = np.empty(_MOST_OPEN, np.int64)
    groups = opened = 0
    for i in range(n):
        n_open = 0
        placed = False
        for j in range(opened):
            g = open_groups[j]
            alive = True
            fits = not placed
            for k in range(dimensions):
                alive &= free[g, k] >= smallest[i, k]
                fits &= free[g, k] >= lengths[i, k]
            if fits:
                placed = True
                number[i] = g
                for k in range(dimensions):
                    free[g, k] -= lengths[i, k]
            if alive:
                open_groups[n_open] = g
                n_open += 1
            if placed:
                # These were not looked at, so nothing is known of them: they stay.
                for rest in range(j + 1, opened):
                    open_groups[n_open] = open_groups[rest]
                    n_open += 1
                break
        opened = n_open
        if not placed:
            number[i] = groups
            for k in range(dimensions):
                free[groups, k] = maximum[k] - lengths[i, k]
            if opened == _MOST_OPEN:
                # Drop the oldest: it has been tried by the most samples.
                open_groups[: opened - 1] = open_groups[1:opened].copy()
                opened -= 1
            open_groups[opened] = groups
            opened += 1
            groups += 1
    return number
