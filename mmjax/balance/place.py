"""Placing a given set of samples on microbatches and rows, for steps whose samples are not chosen by the packer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from mmjax.balance.parts import Parts


@dataclass(frozen=True)
class Placement:
    """Where the parts of one step went.

    row: int32 `[p]`, microbatch * rows of the part's module + row within the microbatch; -1 for other samples' parts.
    need: int64 `[M]`, positions of each module's fullest row, not aligned.
    """

    row: np.ndarray
    need: np.ndarray


def place(parts: Parts, order: np.ndarray, rows: Sequence[int] | np.ndarray, microbatches: int = 1) -> Placement:
    """Place the samples `order` on microbatches by greedy vector balancing, then each module's parts on rows by LPT.

    The sample with the largest load in any module, relative to that module's mean over microbatches, goes first, to the
    microbatch whose largest relative load stays least. Items stay in the microbatch of their sample. rows: `[M]`, per
    microbatch.
    """
    order = np.asarray(order, np.int64)
    rows = np.asarray(rows, np.int64)
    step = parts.take(order)
    totals = step.totals(len(rows))
    share = totals * microbatches / np.maximum(totals.sum(0), 1)
    microbatch = _balance(share, np.argsort(-share.max(1, initial=0), kind="stable"), microbatches)
    longest_first = np.argsort(-step.length, kind="stable")
    load = np.zeros((len(rows), microbatches * rows.max()), np.int64)
    step_row, need = np.zeros(len(step.module), np.int32), np.zeros(len(rows), np.int64)
    _longest_first(step.module, step.length, microbatch[step.sample()], longest_first, rows, load, step_row, need)
    row = np.full(len(parts.module), -1, np.int32)
    row[parts.of_samples(order)] = step_row
    return Placement(row, need)


def fits(need: np.ndarray, length: np.ndarray) -> bool:
    """Whether rows of these lengths `[M]` hold the fullest rows `[M]` of a placement."""
    return bool(np.all(need <= length))


@njit(cache=True)
def _balance(share, heaviest_first, microbatches):
    """The microbatch of each sample, int64 [n]; of equal choices the one with the least load in all."""
    n, modules = share.shape
    load = np.zeros((microbatches, modules))
    microbatch = np.zeros(n, np.int64)
    for sample in heaviest_first:
        best, least, least_sum = -1, np.inf, np.inf
        for m in range(microbatches):
            largest, together = 0.0, 0.0
            for k in range(modules):
                after = load[m, k] + share[sample, k]
                largest = max(largest, after)
                together += after
            if largest < least or (largest == least and together < least_sum):
                best, least, least_sum = m, largest, together
        microbatch[sample] = best
        for k in range(modules):
            load[best, k] += share[sample, k]
    return microbatch


@njit(cache=True)
def _longest_first(module, length, microbatch, longest_first, rows, load, row, need):
    """Each part, longest first, to the emptiest row of its module and microbatch; writes load, row and need."""
    for part in longest_first:
        k = module[part]
        first = microbatch[part] * rows[k]
        best = first
        for r in range(first, first + rows[k]):
            if load[k, r] < load[k, best]:
                best = r
        load[k, best] += length[part]
        row[part] = best
        need[k] = max(need[k], load[k, best])
