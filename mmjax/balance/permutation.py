"""Random permutations that depend on their key alone: NumPy may change `Generator.permutation` from version to version.

A Fisher-Yates shuffle by splitmix64 (Steele, Lea, Flood 2014), in whole numbers only, so every
machine does the same.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# 2^64 over the golden ratio, an odd number: steps of it visit all 2^64 states.
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Shuffler:
    """A stream of permutations and bytes.

    key: whole numbers, none negative; NumPy promises that `SeedSequence` makes the same of them in
    every version.
    """

    def __init__(self, *key: int) -> None:
        self._state = np.random.SeedSequence(key).generate_state(1, np.uint64)

    def permutation(self, n: int) -> np.ndarray:
        """Return the numbers 0 .. n - 1 in random order, int64 `[n]`; n below 2^32."""
        order = np.arange(n)
        _shuffle(order, self._state)
        return order

    def bytes(self, n: int) -> bytes:
        """Return n random bytes."""
        # Eight bytes a draw, the last one cut.
        drawn = np.empty(-(-n // 8), np.uint64)
        _draw(drawn, self._state)
        # Little-endian on every machine, or the bytes would depend on it.
        return drawn.astype("<u8").tobytes()[:n]


@njit(cache=True)
def _mixed(x):
    """Apply splitmix64's finaliser: every bit of the input changes half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True)
def _draw(drawn, state):
    for i in range(len(drawn)):
        state[0] += _STEP
        drawn[i] = _mixed(state[0])


@njit(cache=True)
def _shuffle(order, state):
    """Exchange each place, the last first, with one up to it that 32 random bits choose: biased by at most n / 2^32."""
    for i in range(len(order) - 1, 0, -1):
        state[0] += _STEP
        # The top 32 bits r give floor(r * (i + 1) / 2^32), a place in 0 .. i, without a division.
        partner = np.int64(
            ((_mixed(state[0]) >> np.uint64(32)) * np.uint64(i + 1)) >> np.uint64(32)
        )
        order[i], order[partner] = order[partner], order[i]
