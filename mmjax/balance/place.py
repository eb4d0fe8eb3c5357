"""Placing given samples on microbatches, and parts on the rows of a microbatch or a rank."""

from __future__ import annotations

import numpy as np
from numba import njit


def split(totals: np.ndarray, microbatches: int) -> np.ndarray:
    """Assign each sample a microbatch, int64 `[n]`, by greedy vector balancing. totals: int `[n, M]`, positions.

    The sample with the largest load in any module, relative to that module's mean over microbatches, goes first, to the
    microbatch whose largest relative load stays least.
    """
    share = totals * microbatches / np.maximum(totals.sum(0), 1)
    return _balance(share, np.argsort(-share.max(1, initial=0), kind="stable"), microbatches)


def to_rows(
    module: np.ndarray, length: np.ndarray, group: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Assign each part a row, longest first to the emptiest of its group and module; return each module's fullest too.

    module, length, group: int `[p]`; a group is a microbatch or a rank. rows: int64 `[M]`, of each group. Returns int32
    `[p]`, group * rows + row within the group, and int64 `[M]`, positions, not aligned.
    """
    groups = int(group.max(initial=0)) + 1
    load = np.zeros((len(rows), groups * int(rows.max())), np.int64)
    row = np.zeros(len(module), np.int32)
    need = np.zeros(len(rows), np.int64)
    longest_first = np.argsort(-length, kind="stable")
    _longest_first(module, length, np.asarray(group, np.int64), longest_first, rows, load, row, need)
    return row, need


@njit(cache=True)
def _balance(share, heaviest_first, microbatches):
    """Assign each sample a microbatch, int64 [n]; of equal choices the one with the least load in all."""
    n, modules = share.shape
    load = np.zeros((microbatches, modules))
    microbatch = np.zeros(n, np.int64)
    for sample in heaviest_first:
        best = -1
        min_largest = min_sum = np.inf
        for m in range(microbatches):
            largest = load_sum = 0.0
            for k in range(modules):
                new_load = load[m, k] + share[sample, k]
                largest = max(largest, new_load)
                load_sum += new_load
            if largest < min_largest or (largest == min_largest and load_sum < min_sum):
                best = m
                min_largest = largest
                min_sum = load_sum
        microbatch[sample] = best
        for k in range(modules):
            load[best, k] += share[sample, k]
    return microbatch


@njit(cache=True)
def _longest_first(module, length, group, longest_first, rows, load, row, need):
    """Assign each part, longest first, to the emptiest row of its module and group; writes load, row and need.

    The rows of a module and group are a binary heap; of equally empty ones the first goes first.
    """
    heap = np.empty(load.shape, np.int64)  # rows within their group
    for k in range(len(rows)):
        heap[k] = np.arange(load.shape[1]) % rows[k]
    for part in longest_first:
        k = module[part]
        first = group[part] * rows[k]
        count = rows[k]
        emptiest = heap[k, first]
        new_load = load[k, first + emptiest] + length[part]
        load[k, first + emptiest] = new_load
        row[part] = first + emptiest
        need[k] = max(need[k], new_load)
        slot = 0
        # The emptiest row has been filled: sift it down the heap, whose node h has children 2 h + 1 and 2 h + 2.
        while 2 * slot + 1 < count:
            child = 2 * slot + 1
            if child + 1 < count:
                left_row = heap[k, first + child]
                right_row = heap[k, first + child + 1]
                a = load[k, first + left_row]
                b = load[k, first + right_row]
                child += b < a or (b == a and right_row < left_row)
            lower = heap[k, first + child]
            child_load = load[k, first + lower]
            if new_load < child_load or (new_load == child_load and emptiest < lower):
                break
            heap[k, first + slot] = lower
            slot = child
        heap[k, first + slot] = emptiest
