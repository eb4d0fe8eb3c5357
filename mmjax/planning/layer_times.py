"""How fast a device runs layers: measured over a grid of row lengths where it was profiled, else what it reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmjax.planning.clusters import Rates

FORWARD = "forward"  # beside the remat policies, whose seconds are of both passes
APART = 1.25  # points of a grid are at least so many times each other


class LayerTimes(NamedTuple):
    """Seconds of one layer of a tower on so many rows, by their length: forward alone, and both passes by policy."""

    rows: int
    seconds: Mapping[int, Mapping[str, float]]

    def at(self, length: int) -> dict[str, float]:
        """Of rows of this length.

        Seconds per position are taken to be linear between two points of the grid, which is exact for layers whose
        attention grows with the square of the length; outside the grid they are those of its end.
        """
        grid = sorted(self.seconds)
        of_point = self.seconds[grid[0]]
        return {
            name: length * float(np.interp(length, grid, [self.seconds[n][name] / n for n in grid]))
            for name in of_point
        }


@dataclass(frozen=True)
class Speed:
    """What a device reaches, and by tower how long its layers take where that was measured."""

    rates: Rates
    measured: Mapping[str, LayerTimes] = field(default_factory=dict)

    def layer(self, tower: str, shape: tuple[int, int]) -> dict[str, float] | None:
        """Measured seconds of one layer on (rows, row length); None where it was not."""
        times = self.measured.get(tower)
        rows, length = shape
        if times is None:
            return None
        return {name: seconds * rows / times.rows for name, seconds in times.at(length).items()}


def grid_of(lengths: Sequence[int]) -> list[int]:
    """The row lengths to measure for rows of these: the shortest, the longest, and powers of two between."""
    low, high = min(lengths), max(lengths)
    powers = (2**k for k in range(high.bit_length()))
    return sorted({low, high} | {n for n in powers if APART * low <= n <= high / APART})
