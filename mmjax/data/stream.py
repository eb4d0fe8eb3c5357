"""In which order samples come: a shuffled, weighted mixture of sources, as a pure function of (seed, chunk)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shares(weights: Sequence[float], size: int) -> np.ndarray:
    """How many of `size` samples come from each source: largest remainders, at least one where a weight is positive."""
    weight = np.asarray(weights, float)
    exact = size * weight / weight.sum()
    counts = np.maximum(np.floor(exact), weight > 0).astype(np.int64)
    by_remainder = np.argsort(-(exact - np.floor(exact)), kind="stable")
    for k in range(size - int(counts.sum())):
        counts[by_remainder[k % len(by_remainder)]] += 1
    while counts.sum() > size:
        counts[np.argmax(counts)] -= 1
    return counts


def chunk_samples(eligible: Sequence[np.ndarray], weights: Sequence[float], size: int, seed: int, chunk: int) -> np.ndarray:
    """Sample ids of one chunk, int64 `[size]`.

    Each source is read in epochs, every epoch in its own permutation, so within a source nothing comes twice before all
    of it came once. `eligible[s]` are the ids of source `s` that may be used.
    """
    drawn = []
    for s, (ids, count) in enumerate(zip(eligible, shares(weights, size), strict=True)):
        position, end = chunk * int(count), (chunk + 1) * int(count)
        while position < end:
            epoch, at = divmod(position, len(ids))
            take = min(end - position, len(ids) - at)
            drawn.append(ids[np.random.default_rng((seed, 1, s, epoch)).permutation(len(ids))[at : at + take]])
            position += take
    return np.random.default_rng((seed, 2, chunk)).permutation(np.concatenate(drawn))
