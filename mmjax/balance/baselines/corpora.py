"""Corpora of very different lengths in one training run: grouped apart, each with its own budgets (`multi_group`).

A row of one corpus never holds samples of another, and a step's rows are all of one corpus, so that long rows do not
keep the ranks that have short ones waiting: OmniBal appendix A.8's grouping sampler.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def group_corpora(corpus: np.ndarray, group: Callable[[int, np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Group each corpus by itself: the row of each sample, int32 `[n]`, and the corpus of each row, int32 `[rows]`.

    corpus: int `[n]`, of each sample. group: called with a corpus and its samples, int64 `[m]`; returns the row of each
    of these, `[m]`, numbered from 0, and -1 for samples that are in none (above a budget).
    """
    row = np.full(len(corpus), -1, np.int32)
    rows_of: list[np.ndarray] = [np.zeros(0, np.int32)]
    rows = 0
    for one in np.unique(corpus):
        samples = np.flatnonzero(corpus == one)
        found = np.asarray(group(int(one), samples), np.int32)
        row[samples] = np.where(found < 0, -1, found + rows)
        rows_of.append(np.full(found.max(initial=-1) + 1, one, np.int32))
        rows += len(rows_of[-1])
    return row, np.concatenate(rows_of)


def steps_of_corpora(corpus: np.ndarray, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffled steps whose rows are all of one corpus: int32 `[steps, ranks]` of row numbers, -1 = no row is left.

    corpus: int `[rows]`, of each row. Every row is in one step; the last step of a corpus may have fewer than `ranks`.
    """
    steps = [np.full((0, ranks), -1, np.int32)]
    for one in np.unique(corpus):
        rows = rng.permutation(np.flatnonzero(corpus == one))
        padded = np.full(-(-len(rows) // ranks) * ranks, -1, np.int32)
        padded[: len(rows)] = rows
        steps.append(padded.reshape(-1, ranks))
    return rng.permutation(np.concatenate(steps))
