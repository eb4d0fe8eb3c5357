"""Metrics of a grouping: how full, how equal and how random it is."""

from __future__ import annotations

import numpy as np


def pad_ratio(lengths: np.ndarray) -> np.ndarray:
    """Compute OmniBal eq. 1, sum_i (t_max - t_i) / (t_max * B) over the B samples of a mini-batch.

    lengths: `[..., B]`; the result is float `[...]`, 0 where all lengths are 0.
    """
    return _below_largest(lengths)


def dist_ratio(totals: np.ndarray) -> np.ndarray:
    """Compute OmniBal eq. 2, sum_i (T_max - T_i) / (T_max * N) over the mini-batch tokens of N ranks.

    totals: `[..., N]`; the result is float `[...]`, 0 where no rank has a token.
    """
    return _below_largest(totals)


def sp_ratio(totals: np.ndarray) -> np.ndarray:
    """Compute OmniBal appendix A.8: eq. 2 over the N sequence-parallel ranks that share each of the sequences.

    totals: `[..., sequences, N]`, what each rank computes of each sequence (images of the encoder, tokens of the LLM).
    The result is float `[...]`, the mean over sequences; 0 where every sequence is split evenly.
    """
    return _below_largest(totals).mean(-1)


def fill(used: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Divide useful positions by budget, summed over steps: float `[M]` from `[steps, M]` and `[M]` or `[steps, M]`."""
    used = np.asarray(used, np.float64)
    return used.sum(0) / np.broadcast_to(budget, used.shape).sum(0)


def samples_per_row(row: np.ndarray) -> float:
    """Compute n / (distinct rows) over each sample's row, `[n]`, numbered across steps; -1 = in no row."""
    row = np.asarray(row)[np.asarray(row) >= 0]
    return len(row) / max(len(np.unique(row)), 1)


def row_correlation(lengths: np.ndarray, row: np.ndarray) -> float:
    """Compute the intraclass correlation of sample lengths `[n]` in rows `[n]`: are long samples packed with long ones?

    sum over rows and pairs i != j of (t_i - mean)(t_j - mean) / (number of such pairs * variance). About 0 for random
    rows of free length, 1 for rows of equal samples, below 0 where long ones go with short ones; 0 without pairs.
    """
    lengths = np.asarray(lengths, np.float64)
    number = np.unique(np.asarray(row), return_inverse=True)[1]
    away = lengths - lengths.mean() if len(lengths) else lengths
    # Sum over pairs i != j of a_i a_j = (sum a)^2 - sum a^2, in each row.
    pair_sum = np.bincount(number, away) ** 2 - np.bincount(number, away**2)
    count = np.bincount(number)
    pairs = float((count * (count - 1)).sum())
    variance = float((away**2).mean()) if len(lengths) else 0.0
    return float(pair_sum.sum()) / (pairs * variance) if pairs and variance else 0.0


def overdispersion(source: np.ndarray, step: np.ndarray) -> float:
    """Measure how much more a source's share varies from step to step than if samples were drawn independently.

    For source s with share p of all samples, c_t of the n_t samples of step t and T steps:
    sum_t n_t * (c_t / n_t - p)^2 / (p * (1 - p)) / (T - 1). About 1 for a shuffle; the largest over sources.
    source, step: int `[n]`. 0 with fewer than two steps or sources.
    """
    sources, source = np.unique(np.asarray(source), return_inverse=True)
    steps, step = np.unique(np.asarray(step), return_inverse=True)
    if len(sources) < 2 or len(steps) < 2:
        return 0.0
    count = np.bincount(step * len(sources) + source, minlength=len(steps) * len(sources)).astype(np.float64)
    count = count.reshape(len(steps), len(sources))
    size = count.sum(1, keepdims=True)
    share = count.sum(0) / len(source)
    excess = (size * (count / size - share) ** 2).sum(0) / (share * (1 - share))
    return float(excess.max() / (len(steps) - 1))


def _below_largest(amount: np.ndarray) -> np.ndarray:
    amount = np.asarray(amount, np.float64)
    largest = amount.max(-1)
    return (largest - amount.mean(-1)) / np.where(largest > 0, largest, 1)
