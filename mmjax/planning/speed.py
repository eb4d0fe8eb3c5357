"""Speed of a device: layer times measured over a grid of row lengths where it was profiled, else assumed rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmjax.planning.hardware import Rates

FORWARD = "forward"  # key beside the remat policies, whose seconds are of both passes
APART = 1.25  # least ratio of neighbouring grid points


class LayerTimes(NamedTuple):
    """Measured seconds of one layer of a tower on `rows` rows, by row length: forward, and both passes by policy."""

    rows: int
    seconds: Mapping[int, Mapping[str, float]]
    source: str = "on this machine"  # where they were measured

    def interpolate(self, length: int) -> dict[str, float]:
        """Interpolate the seconds at a row length.

        Seconds per position are linear between grid points, which is exact for a time of a*n +
        b*n^2, as layers with quadratic attention have; outside the grid they are those of its end.
        """
        grid = sorted(self.seconds)
        return {
            name: length * float(np.interp(length, grid, [self.seconds[n][name] / n for n in grid]))
            for name in self.seconds[grid[0]]
        }


@dataclass(frozen=True)
class Speed:
    """A device's rates, and measured layer times of the towers that were profiled."""

    rates: Rates
    measured: Mapping[str, LayerTimes] = field(default_factory=dict)

    def layer(self, tower: str, shape: tuple[int, int]) -> dict[str, float] | None:
        """Return measured seconds of one layer on (rows, row length), by policy; None where it was not profiled."""
        if (times := self.measured.get(tower)) is None:
            return None
        rows, length = shape
        return {
            name: seconds * rows / times.rows for name, seconds in times.interpolate(length).items()
        }


def profile_lengths(lengths: Sequence[int]) -> list[int]:
    """Choose row lengths to profile for rows of these lengths: shortest, longest, and powers of two between."""
    low = min(lengths)
    high = max(lengths)
    # Powers of two that are not nearly the shortest or the longest: of 900 to 5,000, 2048 alone,
    # since 1024 is less than 1.25 times 900 and 4096 less than a 1.25th below 5,000.
    powers = (2**k for k in range(high.bit_length()))
    return sorted({low, high} | {n for n in powers if APART * low <= n <= high / APART})
