"""What one benchmark measured: its figures, the result that they follow from, and what a paper says of the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Measurement:
    """figures: what `--json` prints. arrays: what `--out` writes. paper: by figure, the published one beside it."""

    figures: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    paper: Mapping[str, str] = field(default_factory=dict)


def median_seconds(run: Callable[[], object], within: float = 10.0) -> float:
    """Median duration of five runs; of fewer, one at least, where they take longer than `within` seconds in all."""
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) <= within:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
