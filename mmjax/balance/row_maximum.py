"""Choose row maxima of each modality by trial on the data: (Q_v, Q_t) of OmniBal section 5.1, in any dimension.

A ratio of means misses what the multiset of lengths allows: two samples of 5 tiles never share a row of 9. So maxima
are tried by grouping a part of the samples with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mmjax.balance.permutation import Shuffler

_TRIAL = 4096  # samples that maxima are tried on
_MOST_ANCHORS = 12
_RATIOS = (0.97, 0.985, 1.0, 1.01, 1.02, 1.04, 1.07)  # of the other dimensions to the anchor, relative to the means'


def choose_maximum(
    lengths: np.ndarray,
    samples_per_row: tuple[float, float],
    rows_needed: Callable[[np.ndarray, np.ndarray], float],
    alignment: int | np.ndarray = 1,
    given: np.ndarray | None = None,
) -> np.ndarray:
    """Choose the row maxima, int64 `[D]`, that leave rows least empty with so many samples a row, (least, most).

    The dimension with the fewest units per sample takes every multiple of its unit in that range; the others follow in
    the proportion of the means, a little more or less. No maximum is below the longest sample, even if rows then hold
    more samples than asked for. lengths: int `[n, D]`. rows_needed: called with samples `[m, D]` and maxima `[D]` that
    all of them fit, returns how many rows it took to group them. alignment: maxima are multiples of it, one or `[D]`.
    given: int `[D]`, maxima that are decided already, 0 where they are not. Raises ValueError without samples.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) == 0:
        raise ValueError("no samples to choose bounds from")
    unit = np.broadcast_to(np.asarray(alignment, np.int64), lengths.shape[1:])
    given = np.zeros_like(unit) if given is None else np.asarray(given, np.int64)
    if np.all(given > 0):
        return given
    fits = np.all((lengths <= given) | (given == 0), axis=1)
    if not fits.any():
        raise ValueError("every sample exceeds the maxima that are given")
    lengths = lengths[fits]
    mean = lengths.mean(0)
    longest = lengths.max(0)
    used = longest > 0
    shortest = np.maximum(_up(longest, unit), unit)
    trial = lengths[Shuffler(0).permutation(len(lengths))[:_TRIAL]]
    tried = _Tried(trial, used, samples_per_row, rows_needed)
    best = tried.best_of(_candidates(mean, shortest, unit, samples_per_row, given, used))
    for k in np.flatnonzero(used & (given == 0)):
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
        # Emptiness if the fullest dimension were full: no grouping does better, so it gives the order of trials.
        at_best = 1 - (total / ((total / candidates).max(1, keepdims=True) * candidates))[:, self.used].mean(1)
        for i in np.argsort(at_best, kind="stable"):
            if self.best_score[0] == 0 and at_best[i] >= self.best_score[1]:
                break  # not even rows full in one dimension would leave less empty
            rows = self.rows_needed(self.samples, candidates[i])
            outside = max(self.samples_per_row[0] - count / rows, count / rows - self.samples_per_row[1], 0.0)
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
    # The anchor is a dimension that is fixed already, else the one with the fewest units per sample.
    decided = np.flatnonzero((fixed > 0) & used)
    if len(decided):
        anchor = int(decided[0])
        values = fixed[[anchor]]
    else:
        anchor = int(np.argmin(np.where(used, mean / unit, np.inf)))
        low, high = np.asarray(samples_per_row) * mean[anchor] / unit[anchor]
        units = np.arange(max(np.floor(low), shortest[anchor] // unit[anchor]), max(np.ceil(high), 1) + 1)
        if len(units) == 0:
            units = shortest[[anchor]] // unit[anchor]
        values = np.unique(units[np.linspace(0, len(units) - 1, min(len(units), _MOST_ANCHORS)).astype(int)])
        values = values.astype(np.int64) * unit[anchor]
    candidates = []
    for value in values:
        for ratio in _RATIOS:
            maximum = np.maximum(_up(value / mean[anchor] * mean * ratio, unit), shortest)
            maximum[anchor] = value
            candidates.append(np.where(fixed > 0, fixed, maximum))
    return np.unique(candidates, axis=0)


def _up(length: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return (np.ceil(length / unit - 1e-9) * unit).astype(np.int64)
