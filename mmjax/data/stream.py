"""In which order samples come: a shuffled, weighted mixture of sources, as a pure function of (seed, chunk).

Nothing is kept between chunks and nothing is as long as a source: a permutation is computed where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.data.index import LengthIndex
from mmjax.errors import UserError

_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 are spread evenly
_ROUNDS = 8
_DUE = 1 << 32  # the shuffles of epochs that were begun with other data are none of a whole epoch's

Due = Sequence[
    Sequence[np.ndarray]
]  # of every source, what epochs that were begun before still owe: sorted ids of each


@dataclass(frozen=True)
class Pool:
    """The samples of one source that may be used: ids `start` to `stop` - 1 but the `excluded` (sorted ids)."""

    start: int
    stop: int
    excluded: np.ndarray
    due: tuple[np.ndarray, ...] = ()  # ids that come before its first whole epoch

    def __len__(self) -> int:
        return self.stop - self.start - len(self.excluded)

    def draw(self, begin: int, end: int, key: np.uint64) -> tuple[np.ndarray, np.ndarray]:
        """The ids that are drawn as number `begin` to `end` - 1, and of which epoch each is, int64; `due` come first.

        Every epoch has a permutation of its own, which depends on `key`.
        """
        ids, epochs, at = [], [], 0
        for epoch, due in enumerate(self.due):
            rank = np.arange(max(begin, at), min(end, at + len(due))) - at
            ids.append(due[_shuffled(rank, len(due), key, np.full(len(rank), _DUE + epoch))])
            epochs.append(np.full(len(rank), epoch))
            at += len(due)
        epoch, rank = np.divmod(np.arange(max(begin, at), end) - at, max(1, len(self)))
        ids.append(self.ids(_shuffled(rank, len(self), key, epoch)))
        return np.concatenate(ids), np.concatenate([*epochs, epoch + len(self.due)])

    def epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        """The number of an epoch's first draw, and all its ids."""
        if epoch < len(self.due):
            return sum(map(len, self.due[:epoch])), self.due[epoch]
        start = sum(map(len, self.due)) + (epoch - len(self.due)) * len(self)
        return start, self.ids(np.arange(len(self)))

    def ids(self, ranks: np.ndarray) -> np.ndarray:
        """The ids of the usable samples with these ranks, int64."""
        skipped = np.searchsorted(self.excluded - self.start - np.arange(len(self.excluded)), ranks, side="right")
        return self.start + ranks + skipped


def pools_of(index: LengthIndex, weights: Sequence[float], excluded: np.ndarray, due: Due = ()) -> list[Pool]:
    """The usable samples of every source: not those that are excluded or bad.

    Raises UserError where a source that should be drawn from has none.
    """
    due = due or [()] * len(weights)
    excluded, pools = np.union1d(excluded, index.bad), []
    for s, weight in enumerate(weights):
        start, stop = map(int, index.source_start[s : s + 2])
        left = (np.setdiff1d(ids, excluded) for ids in due[s])
        own = excluded[(excluded >= start) & (excluded < stop)]
        pools.append(Pool(start, stop, own, tuple(ids for ids in left if len(ids))))
        if weight > 0 and not len(pools[-1]):
            if np.isin(np.arange(start, stop), index.bad).all() and stop > start:
                reason = index.reason[np.searchsorted(index.bad, start)]
                raise UserError(
                    f"data.sources.{index.source_name[s]}: none of its {stop - start} samples can be used; the first: "
                    f"{reason}"
                )
            shortest = f"; the shortest has {index.llm_tokens[start:stop].min()} LLM tokens" if stop > start else ""
            raise UserError(
                f"data.sources.{index.source_name[s]}: none of its {stop - start} samples fits the batch{shortest}; "
                f"raise batch.size, or set data.sources.{index.source_name[s]}.weight=0"
            )
    return pools


def chunk_samples(pools: Sequence[Pool], weights: Sequence[float], size: int, seed: int, chunk: int) -> np.ndarray:
    """Sample ids of one chunk, int64 `[size]`.

    Each source is read in epochs, every epoch in its own permutation, so within a source nothing comes twice before all
    of it came once. Raises UserError where no weight is positive.
    """
    before, until = drawn(weights, size, chunk), drawn(weights, size, chunk + 1)
    ids = []
    for s, (pool, begin, end) in enumerate(zip(pools, before, until, strict=True)):
        if end > begin:
            ids.append(pool.draw(begin, end, key_of(seed, s))[0])
    return np.random.default_rng((seed, 2, chunk)).permutation(np.concatenate(ids))


def drawn(weights: Sequence[float], size: int, chunks: int) -> np.ndarray:
    """How many samples of each source the first `chunks` chunks of `size` hold, int64 `[sources]`.

    A chunk holds a source's share of it rounded up or down, so that the mean is exact, however small the share.
    """
    weight = np.asarray(weights, np.float64)
    if not (np.all(np.isfinite(weight)) and np.all(weight >= 0) and weight.sum() > 0):
        raise UserError(f"the weights of data.sources are {weight.tolist()}; give them 0 or more, and one more than 0")
    share = np.cumsum(weight / weight.sum())
    share[np.flatnonzero(weight)[-1] :] = 1
    # Systematic sampling: a source gets the integers between its borders, which move along with the chunk.
    border = np.floor(size * share + (_GOLDEN * np.arange(chunks)[:, None]) % 1).astype(np.int64).sum(0)
    return np.diff(border, prepend=0)


def key_of(seed: int, source: int) -> np.uint64:
    """What the permutations of a source depend on."""
    return np.random.SeedSequence((seed, 1, source)).generate_state(1, np.uint64)[0]


def _shuffled(rank: np.ndarray, n: int, key: np.uint64, epoch: np.ndarray) -> np.ndarray:
    """Where a permutation of 0 .. n - 1 that depends on key and epoch puts each rank, int64.

    A Feistel network permutes the next power of four; what falls outside goes through it again until it falls inside.
    """
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = _mixed(epoch.astype(np.uint64) ^ key)
    value = rank.astype(np.uint64)
    outside = np.ones(len(value), bool)
    while outside.any():
        left, right, own = value[outside] >> half, value[outside] & low, keys[outside]
        for turn in range(_ROUNDS):
            left, right = right, left ^ (_mixed(right ^ _mixed(own + np.uint64(turn))) & low)
        value[outside] = left << half | right
        outside = value >= np.uint64(n)
    return value.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of the input changes half of the output's."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
