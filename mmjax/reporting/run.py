"""Read run folders: config, launches, and metrics as curves of a bounded number of points; plan last steps again."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mmjax.config import Config
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.step_plan import StepPlan
from mmjax.errors import UserError
from mmjax.runtime.run_dir import RunFolder, parse_record
from mmjax.training.run_data import Launch, launch_of_step, loader_of, read_launches

POINTS = 1_500  # of a curve, about, at most: no chart has more pixels
NOT_CURVES = ("step", "time")  # keys of the metrics
WORST_STEPS = 20  # the last steps, whose worst samples are listed


@dataclass(frozen=True)
class Curve:
    """A metric over steps. A point aggregates several steps where there are many; all arrays are float64 `[n]`."""

    step: np.ndarray  # the last of a point's steps
    mean: np.ndarray
    low: np.ndarray  # the smallest value of a point's steps
    high: np.ndarray  # the largest

    def __len__(self) -> int:
        return len(self.step)

    def thinned(self, max_points: int) -> Curve:
        """Aggregate neighbouring points until at most `max_points` are left."""
        if len(self) <= max_points:
            return self
        # reduceat reduces from each start up to the next: starts [0, 2] of 5 points reduce [0:2]
        # and [2:5].
        starts = np.unique(np.linspace(0, len(self), max_points, endpoint=False).astype(int))
        counts = np.diff([*starts, len(self)])
        return Curve(
            step=self.step[starts + counts - 1],
            mean=np.add.reduceat(self.mean, starts) / counts,
            low=np.minimum.reduceat(self.low, starts),
            high=np.maximum.reduceat(self.high, starts),
        )

    def smoothed(self) -> np.ndarray:
        """Compute a moving average at each point: of the last twentieth of all points, of fewer at the start."""
        window = max(1, len(self) // 20)
        # sums[b] - sums[a] is the sum of the points a to b - 1.
        sums = np.concatenate([[0.0], np.cumsum(self.mean)])
        first = np.maximum(np.arange(len(self)) + 1 - window, 0)
        last = np.arange(1, len(self) + 1)
        return (sums[last] - sums[first]) / (last - first)

    def typical(self) -> float:
        """Compute the median of the second half, when a run has settled."""
        return float(np.median(self.mean[len(self) // 2 :]))


@dataclass(frozen=True)
class Worst:
    """A sample, by name, whose loss was among the largest of its step."""

    sample: str
    step: int
    loss: float


@dataclass(frozen=True)
class Metrics:
    """Contents of a metrics.jsonl."""

    curves: Mapping[str, Curve]
    steps: int  # the last step that was logged
    worst: tuple[Worst, ...]  # of the last steps, each sample once, the largest loss first
    # by process: how many steps it finished last, and their seconds in all
    slowest: Mapping[str, tuple[int, float]]
    not_finite: int  # steps whose loss or gradient is not finite

    def with_prefix(self, prefix: str) -> dict[str, Curve]:
        """Select the curves whose names start with a prefix, by the rest of their names."""
        return {
            key.removeprefix(prefix): curve
            for key, curve in self.curves.items()
            if key.startswith(prefix)
        }


NOTHING = Metrics({}, 0, (), {}, 0)


def read_metrics(path: Path, max_points: int = POINTS) -> Metrics:
    """Read a metrics.jsonl as curves of at most `max_points` points. Lines that are cut off are skipped."""
    follower = MetricsFollower(path, max_points)
    follower.update()
    return follower.metrics()


class MetricsFollower:
    """Follow a metrics.jsonl that a run appends to: every update reads only what was added since the last one.

    Curves have at most twice `max_points` points. Where more would be needed, the file is read
    again from its start, as it is where another file has taken its place: a resumed run drops the
    lines behind its checkpoint.
    """

    def __init__(self, path: Path, max_points: int = POINTS) -> None:
        self._path = path
        self._max_points = max_points
        self._file = 0  # its inode
        self._restart()

    def _restart(self, lines: int = 0) -> None:
        self.offset = 0  # bytes that were read
        self._lines = 0
        self._steps_per_point = max(1, -(-lines // self._max_points))
        self._reader = _MetricsReader()

    def update(self, seconds: float = math.inf) -> bool:
        """Read the lines that were added, for about so many seconds; return whether that were all."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                full = self._lines >= 2 * self._max_points * self._steps_per_point
                if full or stat.st_ino != self._file or stat.st_size < self.offset:
                    self._file = stat.st_ino
                    self._restart(_count_lines(self._path))
                return self._read_on(file, time.monotonic() + seconds)
        except FileNotFoundError:
            self._restart()
            return True

    def _read_on(self, file: BinaryIO, deadline: float) -> bool:
        file.seek(self.offset)
        for line in file:
            record = parse_record(line.decode(errors="replace"))
            if record is None and not line.endswith(b"\n"):
                return True  # its end is not written yet
            self.offset += len(line)
            if record is None:
                continue
            self._lines += 1
            self._reader.add(record)
            if self._lines % self._steps_per_point == 0:
                self._reader.end_point()
            if time.monotonic() > deadline:
                return False
        return True

    def metrics(self) -> Metrics:
        """Return what was read."""
        return self._reader.metrics()


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


class _MetricsReader:
    """Aggregates records of single steps into points."""

    def __init__(self) -> None:
        self._open: dict[str, list[float]] = {}  # values of the point that is not complete
        self._points: dict[str, list[tuple[float, ...]]] = {}  # (step, mean, low, high)
        self._last: dict[str, int] = {}  # the last step with a value for a key
        self._worst: deque[tuple[int, dict[str, Any]]] = deque(maxlen=WORST_STEPS)
        self._slowest: Counter[str] = Counter()
        self._slow_seconds: Counter[str] = Counter()
        self._not_finite = self._step = 0

    def add(self, record: Mapping[str, Any]) -> None:
        step = self._step = record["step"]
        for key, value in record.items():
            # a bool is an int to isinstance
            if type(value) in (int, float) and key not in NOT_CURVES:
                self._open.setdefault(key, []).append(value)
                self._last[key] = step
        # NaN and Inf are logged as strings: JSON has neither.
        self._not_finite += any(
            isinstance(record.get(key), str) for key in ("loss", "gradient_norm")
        )
        if isinstance(worst := record.get("worst"), dict):
            self._worst.append((step, worst))
        if isinstance(process := record.get("slowest"), str):
            self._slowest[process] += 1
            self._slow_seconds[process] += float(record.get("seconds/slowest", 0.0))

    def end_point(self) -> None:
        for key in self._open:
            self._points.setdefault(key, []).append(self._open_point(key))
        self._open.clear()

    def _open_point(self, key: str) -> tuple[float, ...]:
        values = self._open[key]
        return self._last[key], sum(values) / len(values), min(values), max(values)

    def metrics(self) -> Metrics:
        curves = {}
        for key in self._last:  # in the order of the log
            last = [self._open_point(key)] if key in self._open else []
            step, mean, low, high = np.array(self._points.get(key, []) + last, float).T
            curves[key] = Curve(step, mean, low, high)
        return Metrics(
            curves=curves,
            steps=self._step,
            worst=tuple(self._worst_samples()),
            slowest={
                process: (n, self._slow_seconds[process])
                for process, n in self._slowest.most_common()
            },
            not_finite=self._not_finite,
        )

    def _worst_samples(self) -> list[Worst]:
        largest: dict[str, Worst] = {}
        for step, worst in self._worst:
            for sample, value in worst.items():
                loss = float(value)
                # NaN is larger than any
                if sample not in largest or not loss <= largest[sample].loss:
                    largest[sample] = Worst(sample, step, loss)
        return sorted(
            largest.values(), key=lambda w: -w.loss if math.isfinite(w.loss) else -math.inf
        )


PLANNED_STEPS = 32  # the last steps, whose rows and work are shown


@dataclass(frozen=True)
class Run:
    """Contents of a run folder."""

    name: str
    folder: RunFolder
    config: Config
    metrics: Metrics
    launches: Sequence[dict[str, Any]]  # their lines of `history.jsonl`, the first one first
    colour: int  # of its curves, where runs are compared

    @property
    def resumes(self) -> list[int]:
        """Steps after which the run resumed."""
        return [launch["first"] for launch in self.launches[1:]]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the LLM, its encoders and its generators."""
        return "llm", *self.config.model.item_modules


@dataclass(frozen=True)
class Planned:
    """Plans of consecutive steps, from `first` (counted from 0) on; no sample of them is loaded."""

    launch: Launch
    loader: StepLoader
    first: int
    plans: Sequence[StepPlan]

    @property
    def span(self) -> str:
        """Describe the range of steps, counted from 1 as in the log."""
        return f"steps {self.first + 1} to {self.first + len(self.plans)}"

    def work(self, balanced: bool) -> np.ndarray:
        """Count the positions of every rank, int64 `[modules, steps, ranks]`, as it ran or as without balancing."""
        by_step = [
            sum(m.work() if balanced else m.unbalanced for m in plan.microbatches)
            for plan in self.plans
        ]
        return np.stack(by_step, axis=1)

    def fills(self, module: int) -> np.ndarray:
        """Compute the used share of every row of a module, float64 `[rows of all these steps]`."""
        fills = []
        for microbatch in (m for plan in self.plans for m in plan.microbatches):
            of_module = microbatch.module == module  # [parts]: a sample's text, or one of its items
            useful = self.loader.index.useful(microbatch.samples)[of_module]
            rows = microbatch.rows[module] * microbatch.topology.ranks
            fills.append(
                np.bincount(microbatch.row[of_module], useful, rows)
                / microbatch.shape.lengths[module]
            )
        return np.concatenate(fills)


def read_runs(paths: Sequence[Path], with_metrics: bool = True, trust: bool = False) -> list[Run]:
    """Read the runs in these folders. Raises UserError where one is no run, or is given twice.

    trust: execute and fetch what their configs say, whoever wrote them.
    """
    folders = [RunFolder(path.resolve(), trusted=trust) for path in paths]
    for k, folder in enumerate(folders):
        if folder in folders[:k]:
            raise UserError(f"{paths[k]} is given twice; give each run once")
    names = [folder.path.name for folder in folders]
    return [
        Run(
            name=names[k] if names.count(names[k]) == 1 else str(folder.path),
            folder=folder,
            config=folder.stored_config(),
            metrics=read_metrics(folder.metrics) if with_metrics else NOTHING,
            launches=read_launches(folder.history),
            colour=k,
        )
        for k, folder in enumerate(folders)
    ]


def plan_again(run: Run) -> Planned:
    """Plan the last steps of a run again, or its first steps where it has done none.

    Raises UserError where its history, its length index or its data files are gone, and where that
    would execute or fetch what others wrote.
    """
    last = max(run.metrics.steps, 1)
    launch = launch_of_step(run.folder.history, last - 1, run.folder.due_samples)
    if launch is None:
        raise UserError(
            "there is no history.jsonl that tells how its steps were made: it has not started yet, or is old"
        )
    run.folder.check(launch.config)
    if not run.metrics.steps:
        last = min(
            launch.first + PLANNED_STEPS, max(launch.config.training.steps, launch.first + 1)
        )
    loader = loader_of(launch, run.folder)
    first = max(launch.first, last - PLANNED_STEPS)
    return Planned(launch, loader, first, [loader.plan(step) for step in range(first, last)])
