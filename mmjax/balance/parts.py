"""Parts of samples as arrays, and how evenly ranks share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LLM = 0  # the module that every sample has exactly one part of


@dataclass(frozen=True)
class Parts:
    """Lengths that each sample needs of each module: one LLM part, then one part per item.

    sample_start: int64 `[n + 1]`, the parts of sample i are `sample_start[i] : sample_start[i + 1]`.
    module: int32 `[p]`, 0 = LLM, then the encoders.
    length: int64 `[p]`, positions that the part takes in its row, alignment included; at least 1.
    pairs: int64 `[p]`, of a query and a key, that attention computes of the part; None: not known.
    Raises ValueError when a sample's first part, and only that, is not its LLM part.
    """

    sample_start: np.ndarray
    module: np.ndarray
    length: np.ndarray
    pairs: np.ndarray | None = None

    def __post_init__(self) -> None:
        start = self.sample_start
        if len(start) == 0 or start[0] != 0 or start[-1] != len(self.module) or len(self.module) != len(self.length):
            raise ValueError("sample_start must run from 0 to the number of parts, one module and one length each")
        if np.any(np.diff(start) < 1):
            raise ValueError(f"sample {int(np.argmax(np.diff(start) < 1))} has no LLM part")
        first = np.zeros(len(self.module), bool)
        first[start[:-1]] = True
        if np.any(wrong := ((self.module == LLM) != first) | (self.module < LLM)):
            sample = int(np.searchsorted(start, int(np.argmax(wrong)), side="right")) - 1
            raise ValueError(f"sample {sample}: its first part, and no other, must be its LLM part (module {LLM})")
        if np.any(self.length < 1):
            sample = int(np.searchsorted(start, int(np.argmax(self.length < 1)), side="right")) - 1
            raise ValueError(f"sample {sample} has a part of length {int(self.length.min())}; at least 1")

    def __len__(self) -> int:
        return len(self.sample_start) - 1

    def sample(self) -> np.ndarray:
        """Return the sample of each part, int64 `[p]`."""
        return np.repeat(np.arange(len(self)), np.diff(self.sample_start))

    def totals(self, modules: int) -> np.ndarray:
        """Sum positions per sample and module, int64 `[n, modules]`."""
        # Sample i's total of module k is at i * modules + k of the flat array.
        flat = np.bincount(self.sample() * modules + self.module, self.length, len(self) * modules)
        return np.rint(flat).astype(np.int64).reshape(len(self), modules)

    def pairs_by_sample(self, modules: int) -> np.ndarray:
        """Sum pairs per sample and module, float64 `[n, modules]`."""
        flat = np.bincount(self.sample() * modules + self.module, self.pairs, len(self) * modules)
        return flat.reshape(len(self), modules)

    def largest(self, modules: int) -> np.ndarray:
        """Return the longest part of each module, int64 `[modules]`; 0 where it has none."""
        longest = np.zeros(modules, np.int64)
        np.maximum.at(longest, self.module, self.length)
        return longest

    def of_samples(self, samples: np.ndarray) -> np.ndarray:
        """Return the indices of these samples' parts, one sample after the other, int64."""
        start = self.sample_start
        count = start[samples + 1] - start[samples]
        # start [4, 0], count [2, 3] -> [4, 5, 0, 1, 2]: the arange has counted 2 before sample 1, hence 0 - 2 is added.
        return np.arange(count.sum()) + np.repeat(start[samples] - np.cumsum(count) + count, count)

    def take(self, samples: np.ndarray) -> Parts:
        """Select the parts of these samples, in this order."""
        part = self.of_samples(samples)
        count = np.diff(self.sample_start)[samples]
        start = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        return Parts(start, self.module[part], self.length[part], None if self.pairs is None else self.pairs[part])


def parts_of(samples: Sequence[Sequence[tuple[int, int]]]) -> Parts:
    """Build Parts from each sample's (module, length) pairs, the LLM's first."""
    start = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])]).astype(np.int64)
    module, length = np.array([pair for sample in samples for pair in sample], np.int64).reshape(-1, 2).T
    return Parts(start, module.astype(np.int32), np.ascontiguousarray(length))


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
