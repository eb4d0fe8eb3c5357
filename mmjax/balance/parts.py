"""Parts of samples as arrays, and how evenly ranks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LLM = 0  # the module that every sample has exactly one part of


@dataclass(frozen=True)
class Parts:
    """Lengths that each sample needs of each module: one LLM part, then one part per item.

    sample_start: int64 `[n + 1]`, the parts of sample i are `sample_start[i] : sample_start[i +
    1]`.
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
        if (
            len(start) == 0
            or start[0] != 0
            or start[-1] != len(self.module)
            or len(self.module) != len(self.length)
        ):
            raise ValueError(
                "sample_start must run from 0 to the number of parts, one module and one length each"
            )
        if np.any(np.diff(start) < 1):
            raise ValueError(f"sample {int(np.argmax(np.diff(start) < 1))} has no LLM part")
        first = np.zeros(len(self.module), bool)
        first[start[:-1]] = True
        if np.any(wrong := ((self.module == LLM) != first) | (self.module < LLM)):
            sample = int(np.searchsorted(start, int(np.argmax(wrong)), side="right")) - 1
            raise ValueError(
                f"sample {sample}: its first part, and no other, must be its LLM part (module {LLM})"
            )
        if np.any(self.length < 1):
            sample = int(np.searchsorted(start, int(np.argmax(self.length < 1)), side="right")) - 1
            raise ValueError(
                f"sample {sample} has a part of length {int(self.length.min())}; at least 1"
            )

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
        first = self.sample_start[samples]
        return ranges(first, self.sample_start[samples + 1] - first)

    def take(self, samples: np.ndarray) -> Parts:
        """Select the parts of these samples, in this order."""
        part = self.of_samples(samples)
        count = np.diff(self.sample_start)[samples]
        start = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        return Parts(
            start,
            self.module[part],
            self.length[part],
            None if self.pairs is None else self.pairs[part],
        )


def ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenate start, start + 1, .. for `length` each: int64 `[sum of lengths]`.

    One arange runs through all; each range adds what takes its first number to its start:

        start 7, 3 and length 2, 3
        arange      0  1 | 2  3  4
        added       7  7 | 1  1  1      7 - 0 and 3 - 2
        result      7  8 | 3  4  5

    >>> ranges(np.array([7, 3]), np.array([2, 3])).tolist()
    [7, 8, 3, 4, 5]
    """
    return np.arange(length.sum()) + np.repeat(start - np.cumsum(length) + length, length)


def offsets_by_key(length: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Sum the lengths before each item that have its key: where it begins if those of a key follow each other.

    length, key: int `[n]`, no key negative. Returns int64 `[n]`.

        length  5 3 4        sorted by key   3 | 5 4
        key     1 0 1        sum before      0 | 3 8
                             first of key    0 | 3 3
                             offset          0 | 0 5

    >>> offsets_by_key(np.array([5, 3, 4]), np.array([1, 0, 1])).tolist()
    [0, 0, 5]
    """
    by_key = np.argsort(key, kind="stable")
    preceding = np.cumsum(length[by_key]) - length[by_key]
    first = np.flatnonzero(np.diff(key[by_key], prepend=-1))
    offset = np.empty(len(key), np.int64)
    offset[by_key] = preceding - np.repeat(preceding[first], np.diff(first, append=len(key)))
    return offset


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

    totals: `[..., sequences, N]`, what each rank computes of each sequence (images of the encoder,
    tokens of the LLM). The result is float `[...]`, the mean over sequences; 0 where every sequence
    is split evenly.
    """
    return _below_largest(totals).mean(-1)


def fill(used: np.ndarray, budget: np.ndarray) -> np.ndarray:
    """Divide useful positions by budget, summed over steps: float `[M]` from `[steps, M]` and `[M]` or `[steps, M]`."""
    used = np.asarray(used, np.float64)
    return used.sum(0) / np.broadcast_to(budget, used.shape).sum(0)


def _below_largest(amount: np.ndarray) -> np.ndarray:
    amount = np.asarray(amount, np.float64)
    largest = amount.max(-1)
    return (largest - amount.mean(-1)) / np.where(largest > 0, largest, 1)
