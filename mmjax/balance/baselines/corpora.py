"""Group corpora of very different lengths apart, each with its own budgets, in one training run (`multi_group`).

A row of one corpus never holds samples of another, and a step's rows are all of one corpus, so that long rows do not
keep the ranks that have short ones waiting: OmniBal appendix A.8's grouping sampler.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def group_corpora(corpus: np.ndarray, group: Callable[[int, np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Group each corpus by itself; return the row of each sample, int32 `[n]`, and each row's corpus, int32 `[rows]`.

    corpus: int `[n]`, of each sample. group: called with a corpus and its samples, int64 `[m]`; returns the row of each
    of these, `[m]`, numbered from 0, and -1 for samples that are in none (above a budget).
    """
    row = np.full(len(corpus), -1, np.int32)
    corpus_of_rows: list[np.ndarray] = [np.zeros(0, np.int32)]
    next_row = 0
    for corpus_id in np.unique(corpus):
        samples = np.flatnonzero(corpus == corpus_id)
        local_row = np.asarray(group(int(corpus_id), samples), np.int32)
        row[samples] = np.where(local_row < 0, -1, local_row + next_row)
        corpus_of_rows.append(np.full(local_row.max(initial=-1) + 1, corpus_id, np.int32))
        next_row += len(corpus_of_rows[-1])
    return row, np.concatenate(corpus_of_rows)


def steps_of_corpora(corpus: np.ndarray, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """Shuffle rows into steps of one corpus each; return row numbers, int32 `[steps, ranks]`, -1 = no row.

    corpus: int `[rows]`, of each row. Every row is in one step; the last step of a corpus may have fewer than `ranks`.
    """
    steps = [np.full((0, ranks), -1, np.int32)]
    for corpus_id in np.unique(corpus):
        rows = rng.permutation(np.flatnonzero(corpus == corpus_id))
        padded = np.full(-(-len(rows) // ranks) * ranks, -1, np.int32)
        padded[: len(rows)] = rows
        steps.append(padded.reshape(-1, ranks))
    return rng.permutation(np.concatenate(steps))
