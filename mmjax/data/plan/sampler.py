"""Order the samples: a shuffled, weighted mixture of sources, cut into chunks, as a pure function of (seed, chunk).

Each source is read in epochs, each in a permutation of its own, and a chunk holds samples of one
epoch of each source: where an epoch ends a chunk ends. Nothing is kept between chunks and nothing
is as long as a source, since a permutation is computed for the ranks that are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mmjax.balance.permutation import Shuffler
from mmjax.config import DataConfig
from mmjax.data.plan.length_index import LengthIndex
from mmjax.errors import UserError

_ROUNDS = 8
# keys the permutation of an epoch that began with other data, apart from those of whole epochs
_REMAINDER = 1 << 32

# of every source, the ids that are left of an epoch that was begun before, sorted
Due = Sequence[np.ndarray]


@dataclass(frozen=True)
class Pool:
    """The samples of one source that may be used: ids `start` to `stop` - 1 but the `excluded` (sorted ids)."""

    start: int
    stop: int
    excluded: np.ndarray
    # ids that come before its first whole epoch
    due: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # neighbours that are shuffled together, of files in random order; 0: all samples
    window: int = 0
    # first id of each file, with a window
    files: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return self.stop - self.start - len(self.excluded)

    def draw(self, begin: int, end: int, key: np.uint64) -> np.ndarray:
        """Return the ids of draws `begin` to `end` - 1, int64: first what is due, then epoch after epoch.

        Every epoch has a permutation of its own, which depends on `key`.
        """
        # Draws before len(due) are what is due, in a shuffle of its own; the others count from
        # there on in epochs.
        due = np.arange(begin, min(end, len(self.due)))
        epoch, rank = np.divmod(
            np.arange(max(begin, len(self.due)), end) - len(self.due), max(1, len(self))
        )
        first = self.due[
            _shuffled(due, len(self.due), key, np.full(len(due), _REMAINDER), self.window)
        ]
        rank = _shuffled(rank, len(self), key, epoch, self.window)
        return np.concatenate(
            [first, self.ids(self._of_files(rank, key, epoch) if self.window else rank)]
        )

    def _of_files(self, position: np.ndarray, key: np.uint64, epoch: np.ndarray) -> np.ndarray:
        """Return the ranks of the samples at these positions of an epoch, in which files come in a random order."""
        first = self.files - self.start - np.searchsorted(self.excluded, self.files)
        count = np.diff(first, append=len(self))
        ranks = np.empty_like(position)
        for number in np.unique(epoch):
            order = np.argsort(
                _mixed(_mixed(np.arange(len(first), dtype=np.uint64) ^ key) + np.uint64(number))
            )
            begin = np.cumsum(count[order]) - count[order]
            in_epoch = epoch == number
            # Files of 3, 0 and 2 samples in the order 2, 1, 0 begin at 0, 2 and 2; position 2 is
            # the first of file 0.
            place = np.searchsorted(begin, position[in_epoch], side="right") - 1
            ranks[in_epoch] = first[order][place] + position[in_epoch] - begin[place]
        return ranks

    def ids(self, ranks: np.ndarray) -> np.ndarray:
        """Return the ids of the usable samples with these ranks, int64."""
        # Ids 10 to 15 without 11 and 13, which 1 and 2 usable ones precede: ranks 0..3 skip 0, 1,
        # 2, 2: 10, 12, 14, 15.
        skipped = np.searchsorted(
            self.excluded - self.start - np.arange(len(self.excluded)), ranks, side="right"
        )
        return self.start + ranks + skipped


def mixture_weights(data: DataConfig, index: LengthIndex) -> list[float]:
    """Return each source's share of the samples, not normalised, by its weight and `data.temperature`.

    Sources are counted without bad samples.
    """
    weights = [source.weight for source in data.sources.values()]
    if not data.temperature:
        return weights
    start = index.source_start
    usable = np.diff(start) - np.diff(np.searchsorted(index.bad, start))
    return [w * n ** (1 / data.temperature) for w, n in zip(weights, usable.tolist(), strict=True)]


def pools_of(
    index: LengthIndex,
    weights: Sequence[float],
    excluded: np.ndarray,
    due: Due = (),
    remedy: str = "raise batch.size",
) -> list[Pool]:
    """Collect the usable samples of every source: not those that are excluded or bad.

    remedy: what lets the excluded ones in. Raises UserError where a source that should be drawn
    from has none.
    """
    excluded = np.union1d(excluded, index.bad)
    pools = []
    for s, weight in enumerate(weights):
        start, stop = map(int, index.source_start[s : s + 2])
        # A sample that was due may have become bad since.
        remaining = np.setdiff1d(due[s] if due else [], excluded).astype(np.int64)
        excluded_here = excluded[(excluded >= start) & (excluded < stop)]
        pools.append(Pool(start, stop, excluded_here, remaining))
        if len(index.window) and index.window[s]:
            files = index.file_start[(index.file_start >= start) & (index.file_start < stop)]
            pools[-1] = replace(pools[-1], window=int(index.window[s]), files=files)
        if weight > 0 and not len(pools[-1]):
            # Two causes with two remedies: broken data, or a batch too small for all samples.
            if np.isin(np.arange(start, stop), index.bad).all() and stop > start:
                reason = index.reason[np.searchsorted(index.bad, start)]
                raise UserError(
                    f"data.sources.{index.source_name[s]}: none of its {stop - start} samples can be used; the first: "
                    f"{reason}"
                )
            tokens = index.llm_tokens[np.setdiff1d(np.arange(start, stop), index.bad)]
            shortest = f"; the shortest has {tokens.min()} LLM tokens" if len(tokens) else ""
            raise UserError(
                f"data.sources.{index.source_name[s]}: none of its {stop - start} samples fits the batch{shortest}; "
                f"{remedy}, or set data.sources.{index.source_name[s]}.weight=0"
            )
    return pools


class Draws(NamedTuple):
    """Draws `begin` to `end` - 1 of a source, all of one epoch, which has the draws `first` to `last` - 1."""

    begin: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class Stream:
    """Chunks of a weighted mixture of sources, each as long as the epochs allow.

    The source that has the shortest epoch at its weight sets the pace: its epochs are cut into
    equal chunks of at most `size` samples. Epochs of the others end with the nearest chunk, and
    have equal shares of their chunks. So every epoch ends where a chunk ends, and weights hold
    exactly in the mean of all epochs.
    """

    pools: Sequence[Pool]
    weights: Sequence[float]
    size: int
    seed: int
    # a lone source's chunks hold a multiple of this many samples, but for the last of an epoch
    multiple: float = 1

    def chunk(self, chunk: int) -> np.ndarray:
        """Return the sample ids of a chunk in random order, int64. Raises UserError where no weight is positive."""
        ids = [
            self.pools[s].draw(draw.begin, draw.end, key_of(self.seed, s))
            for s, draw in self.draws(chunk).items()
        ]
        # Sources one after the other; the shuffle below mixes them.
        drawn = np.concatenate(ids)
        return drawn[Shuffler(self.seed, 2, chunk).permutation(len(drawn))]

    def samples_in(self, chunk: int) -> int:
        """Count the samples of a chunk without drawing them."""
        return sum(draw.end - draw.begin for draw in self.draws(chunk).values())

    def draws(self, chunk: int) -> dict[int, Draws]:
        """Return what a chunk has of each source that is drawn from, by the source's number."""
        return {s: self._draws(s, chunk, mean) for s, mean in self._chunks_per_epoch.items()}

    def _draws(self, source: int, chunk: int, per_epoch: float) -> Draws:
        pool = self.pools[source]
        due = len(pool.due)
        size = len(pool)
        # What is due takes its proportion of an epoch's chunks, rounded up.
        due_chunks = math.ceil(per_epoch * due / size)
        if chunk < due_chunks:
            return self._share(0, due, chunk, due_chunks)
        chunk -= due_chunks
        # Epoch e has the chunks from floor(e * per_epoch + 0.5) on: with 2.5 chunks an epoch 0..2,
        # 3..4, 5..7, ...
        epoch = int((chunk + 0.5) / per_epoch)  # or, by rounding, a neighbour of this one
        while (begin := math.floor(epoch * per_epoch + 0.5)) > chunk:
            epoch -= 1
        while (end := math.floor((epoch + 1) * per_epoch + 0.5)) <= chunk:
            begin = end
            epoch += 1
        return self._share(due + epoch * size, size, chunk - begin, end - begin)

    def _share(self, first: int, size: int, number: int, count: int) -> Draws:
        """Return the share of chunk `number` of the `count` that an epoch of `size` draws has."""
        unit = self.multiple if len(self._chunks_per_epoch) == 1 else 1
        # ceil(n * size / count) in multiples of the unit: 10 draws in 3 chunks are cut at 4 and 7,
        # in units of 4 at 4 and 8.
        begin, end = (
            min(round(-(-n * size // (count * unit)) * unit), size) for n in (number, number + 1)
        )
        return Draws(first + begin, first + end, first, first + size)

    @cached_property
    def _chunks_per_epoch(self) -> dict[int, float]:
        """Compute the mean number of chunks in an epoch of each source that is drawn from, at least 1."""
        # An epoch of source s is over after so many draws of all sources.
        drawn = {
            s: len(self.pools[s]) / share for s, share in enumerate(shares(self.weights)) if share
        }
        shortest = min(drawn.values())  # in draws of all sources
        # The shortest epoch has a whole number of chunks; others in proportion, at least as many.
        return {s: draws / shortest * math.ceil(shortest / self.size) for s, draws in drawn.items()}


def typical_samples(
    pools: Sequence[Pool], weights: Sequence[float], size: int, seed: int
) -> np.ndarray:
    """Draw about `size` ids in the proportions of the mixture, int64, wherever epochs end, and from all files."""
    pools = [replace(pool, window=0) for pool in pools]
    # Rounded running sums, so that the counts add up to the size.
    ends = np.floor(np.cumsum(shares(weights)) * size + 0.5).astype(np.int64)
    counts = enumerate(np.diff(ends, prepend=0).tolist())
    return np.concatenate(
        [pools[s].draw(0, count, key_of(seed, s)) for s, count in counts if count]
    )


def shares(weights: Sequence[float]) -> np.ndarray:
    """Scale weights so that their sum is 1. Raises UserError where they make no mixture."""
    weight = np.asarray(weights, np.float64)
    if not (np.all(np.isfinite(weight)) and np.all(weight >= 0) and weight.sum() > 0):
        raise UserError(
            f"the weights of data.sources are {weight.tolist()}; give them 0 or more, and one more than 0"
        )
    return weight / weight.sum()


def key_of(seed: int, source: int) -> np.uint64:
    """Derive the key of a source's permutations from the run's seed."""
    return np.random.SeedSequence((seed, 1, source)).generate_state(1, np.uint64)[0]


def _shuffled(
    rank: np.ndarray, n: int, key: np.uint64, epoch: np.ndarray, window: int = 0
) -> np.ndarray:
    """Permute ranks within 0 .. n - 1, keyed by `key` and epoch, int64; each window of so many by itself, unless 0."""
    if not window:
        return _permuted(rank, n, key, epoch)
    number, inside = np.divmod(rank, window)
    keys = epoch.astype(np.uint64) ^ _mixed(number.astype(np.uint64))
    size = np.minimum(window, n - number * window)  # the last window may be shorter
    for one in np.unique(size):
        inside[size == one] = _permuted(inside[size == one], int(one), key, keys[size == one])
    return number * window + inside


def _permuted(rank: np.ndarray, n: int, key: np.uint64, epoch: np.ndarray) -> np.ndarray:
    """Permute ranks within 0 .. n - 1, keyed by `key` and epoch, int64.

    A Feistel network permutes the next power of four; what falls outside goes through it again
    until it falls inside.
    """
    # Bits of each half: for n = 1000, whose numbers have 10 bits, 5; for 2000 with 11, 6, a network
    # over 4096.
    half = np.uint64(max(1, (max(n - 1, 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = _mixed(epoch.astype(np.uint64) ^ key)
    value = rank.astype(np.uint64)
    outside = np.ones(len(value), bool)
    while outside.any():
        high_half = value[outside] >> half
        low_half = value[outside] & low
        key_outside = keys[outside]
        for turn in range(_ROUNDS):
            mask = _mixed(low_half ^ _mixed(key_outside + np.uint64(turn))) & low
            # One round: the halves swap, one of them masked by a function of the other, which can
            # be undone.
            high_half, low_half = low_half, high_half ^ mask
        value[outside] = high_half << half | low_half
        # Walking the cycle until it returns below n keeps it a permutation; under 4 turns on
        # average, as the domain is less than 4 n.
        outside = value >= np.uint64(n)
    return value.astype(np.int64)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Mix bits by splitmix64's finaliser: every bit of the input changes half of the output's."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
