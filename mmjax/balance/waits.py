"""Measure how long ranks wait for each other. Rows are computed with their padding, so ranks differ in attention alone.

Under FSDP ranks meet in every phase, that is in each module of each microbatch. A rank's time in
one of them is `position * rows * length + pair * pairs`: its rows are as long as all others, and
its pairs are its samples'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Prices(NamedTuple):
    """Seconds of each module, forward and backward, float64 `[M]`, in any unit."""

    position: np.ndarray  # of a position of a row, padding or not
    pair: np.ndarray  # of a query and a key that attend, of one head in each layer

    def times(self, position: float | np.ndarray, pair: float | np.ndarray) -> Prices:
        """Scale both prices."""
        return Prices(self.position * position, self.pair * pair)


def rank_seconds(prices: Prices, positions: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Compute each rank's seconds in each phase, float64 `[..., M, ranks]`.

    positions: int `[..., M]`, of all rows of a rank. pairs: int `[..., M, ranks]`.
    """
    return (prices.position * positions)[..., None] + prices.pair[:, None] * pairs


def wait_share(seconds: np.ndarray) -> float:
    """Return the share of the time that a rank waits, on average. seconds: as of `rank_seconds`, of any phases."""
    return float(1 - seconds.mean(-1).sum() / max(seconds.max(-1).sum(), np.finfo(float).tiny))


def padding_share(prices: Prices, useful: np.ndarray, room: np.ndarray) -> float:
    """Return the share of what rows take that is for positions which hold nothing. Both int `[..., M]`, positions."""
    taken = (prices.position * room).sum()
    return float(1 - (prices.position * useful).sum() / max(taken, np.finfo(float).tiny))


def least_fullest(pairs: np.ndarray, ranks: int) -> np.ndarray:
    """Bound from below what the fullest of so many ranks has of these samples: float64 `[M]`. pairs: `[n, M]`.

    That is the mean, the largest sample, and of R + 1 samples the two that must share a rank: the
    R-th and the next.
    """
    falling = -np.sort(-pairs.astype(np.float64), axis=0)
    falling = np.pad(falling, ((0, max(0, 2 * ranks + 1 - len(falling))), (0, 0)))
    two = falling[ranks - 1 : ranks + 1].sum(0)
    three = falling[2 * ranks - 2 : 2 * ranks + 1].sum(0)
    return np.max([falling.sum(0) / ranks, falling[0], two, three], axis=0)


@dataclass(frozen=True)
class Waits:
    """Shares of a step's time.

    wait: in which a rank waits for others, on average. bound: that it would wait at least, with the
    samples that each microbatch has. padding: of what rows take, for positions that hold nothing.
    """

    wait: float
    bound: float
    padding: float


def mean_waits(waits: Sequence[Waits]) -> Waits:
    """Average over steps."""
    wait, bound, padding = np.mean([(w.wait, w.bound, w.padding) for w in waits], axis=0).tolist()
    return Waits(wait, bound, padding)
