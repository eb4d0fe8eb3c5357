"""A run's metrics as curves of a few points, read line by line: a million steps take no more room than a thousand."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.training.metrics_log import logged_records

POINTS = 1_500  # about as many as a curve has at most: a chart is not wider than that
NUMBERS, PLACES = (int, float), ("step", "time")  # JSON's, and keys that are no curves
WORST_STEPS = 20  # the last ones, whose worst samples are shown


@dataclass(frozen=True)
class Curve:
    """One value over steps. Each point stands for several steps where there are many."""

    step: np.ndarray  # float64 [n]: the last of a point's steps
    mean: np.ndarray  # float64 [n]
    low: np.ndarray  # float64 [n]: the smallest value of a point's steps
    high: np.ndarray  # float64 [n]

    def __len__(self) -> int:
        return len(self.step)

    def thinned(self, most: int) -> Curve:
        """The same in at most `most` points."""
        if len(self) <= most:
            return self
        starts = np.unique(np.linspace(0, len(self), most, endpoint=False).astype(int))
        counts = np.diff([*starts, len(self)])
        ends = starts + counts - 1
        mean = np.add.reduceat(self.mean, starts) / counts
        return Curve(
            self.step[ends], mean, np.minimum.reduceat(self.low, starts), np.maximum.reduceat(self.high, starts)
        )

    def smoothed(self) -> np.ndarray:
        """The mean of the last twentieth of all points, at each of them; of fewer at the start."""
        window = max(1, len(self) // 20)
        sums = np.concatenate([[0.0], np.cumsum(self.mean)])
        first = np.maximum(np.arange(len(self)) + 1 - window, 0)
        last = np.arange(1, len(self) + 1)
        return (sums[last] - sums[first]) / (last - first)

    def typical(self) -> float:
        """The median of the second half, when a run has settled."""
        return float(np.median(self.mean[len(self) // 2 :]))


@dataclass(frozen=True)
class Worst:
    """A sample whose loss was among the largest of its step. sample: its name."""

    sample: str
    step: int
    loss: float


@dataclass(frozen=True)
class Metrics:
    """What metrics.jsonl tells. slowest: how often each process was ready last, and how many seconds it took in all."""

    curves: Mapping[str, Curve]
    steps: int  # the last step that was written down
    worst: tuple[Worst, ...]  # of the last steps, each sample once, the largest loss first
    slowest: Mapping[str, tuple[int, float]]
    not_finite: int  # steps whose loss or gradient is no finite number

    def under(self, prefix: str) -> dict[str, Curve]:
        """Curves by what follows `prefix` in their names."""
        return {key.removeprefix(prefix): curve for key, curve in self.curves.items() if key.startswith(prefix)}


NOTHING = Metrics({}, 0, (), {}, 0)


def read_metrics(path: Path, most: int = POINTS) -> Metrics:
    """The curves of a metrics.jsonl, at most `most` points each; lines that are cut off are left out."""
    lines = _lines_in(path)
    per_point, reading = max(1, -(-lines // most)), _Reading()
    for number, record in enumerate(logged_records(path), start=1):
        reading.add(record)
        if number % per_point == 0:
            reading.end_point()
    return reading.found()


def _lines_in(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


class _Reading:
    """Records added up to points."""

    def __init__(self) -> None:
        self._open: dict[str, list[float]] = {}
        self._points: dict[str, list[tuple[float, ...]]] = {}
        self._last: dict[str, int] = {}  # the step of a key's open point
        self._worst: deque[tuple[int, dict[str, Any]]] = deque(maxlen=WORST_STEPS)
        self._slowest: Counter[str] = Counter()
        self._slow_seconds: Counter[str] = Counter()
        self._not_finite = self._step = 0

    def add(self, record: Mapping[str, Any]) -> None:
        step = self._step = record["step"]
        for key, value in record.items():
            if type(value) in NUMBERS and key not in PLACES:
                if key in self._open:
                    self._open[key].append(value)
                else:
                    self._open[key] = [value]
                self._last[key] = step
        # NaN and Inf are kept as strings: JSON has none.
        self._not_finite += any(isinstance(record.get(key), str) for key in ("loss", "gradient_norm"))
        if isinstance(worst := record.get("worst"), dict):
            self._worst.append((step, worst))
        if isinstance(process := record.get("slowest"), str):
            self._slowest[process] += 1
            self._slow_seconds[process] += float(record.get("seconds/slowest", 0.0))

    def end_point(self) -> None:
        for key, values in self._open.items():
            point = self._last[key], sum(values) / len(values), min(values), max(values)
            self._points.setdefault(key, []).append(point)
        self._open.clear()

    def found(self) -> Metrics:
        self.end_point()
        curves = {key: Curve(*np.array(points, float).T) for key, points in self._points.items()}
        slowest = {process: (n, self._slow_seconds[process]) for process, n in self._slowest.most_common()}
        return Metrics(curves, self._step, tuple(self._worst_samples()), slowest, self._not_finite)

    def _worst_samples(self) -> list[Worst]:
        largest: dict[str, Worst] = {}
        for step, worst in self._worst:
            for sample, told in worst.items():
                loss = float(told)
                if sample not in largest or not loss <= largest[sample].loss:
                    largest[sample] = Worst(sample, step, loss)
        return sorted(largest.values(), key=lambda w: -w.loss if math.isfinite(w.loss) else -math.inf)
