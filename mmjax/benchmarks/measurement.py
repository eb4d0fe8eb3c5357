"""Hold what one benchmark measured: its figures, the result that they follow from, and a paper's figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Measurement:
    """Hold figures, which `--json` prints, arrays, which `--out` writes, and the figures that the paper published."""

    figures: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    paper: Mapping[str, str] = field(default_factory=dict)


def median_seconds(run: Callable[[], object], within: float = 10.0) -> float:
    """Time five runs, or fewer where they take longer than `within` seconds in all; return the median."""
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) <= within:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
