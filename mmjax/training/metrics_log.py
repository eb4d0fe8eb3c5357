"""Log a step's metrics: JSON lines, TensorBoard scalars and, where asked for, experiment trackers.

A full disk does not stop the run: lines that could not be written are kept, and written when there
is room.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmjax.config import Config
from mmjax.console import print_lines
from mmjax.disk import atomic_write, json_lines, read_json_lines
from mmjax.errors import UserError
from mmjax.training.trackers import TrackerThread, close_trackers

MetricValue = float | str | Mapping[str, float]  # a mapping is by sample name


class MetricsLog:
    """Writer of records to `metrics.jsonl`, TensorBoard and trackers; a record's step counts updates done.

    Opened after `done` updates, it drops later records of an earlier start, so that no step is
    logged twice. config: of the run, which names the trackers; None = none. Raises UserError where
    the package of one is not installed.
    """

    def __init__(self, path: Path, done: int, config: Config | None = None) -> None:
        self.path = path
        if path.is_dir():
            raise UserError(f"{path} is a folder, and the steps are to be written there; remove it")
        if path.exists():
            _drop_after(path, done)
        # Unbuffered, so that a failed write says how much of it was written.
        self._lines = path.open("ab", buffering=0)
        self._waiting = b""  # encoded lines, the first perhaps written in part
        self._warned = False
        self._board = _Board(path.parent / "tensorboard", done)
        projects = {} if config is None else config.training.trackers
        self._trackers = [TrackerThread(name, path.parent, config) for name in projects]

    def write(self, step: int, scalars: Mapping[str, MetricValue]) -> None:
        """Log one record. NaN and Inf become strings, since JSON has no such numbers."""
        record = {"step": step, "time": round(time.time(), 3)}
        record |= {k: _plain(v) for k, v in scalars.items()}
        self._waiting += json.dumps(record).encode() + b"\n"
        # TensorBoard and trackers take numbers only; NaN and Inf are fine there.
        numbers = {k: float(v) for k, v in scalars.items() if isinstance(v, int | float)}
        try:
            self._flush()
            self._board.write(step, numbers)
        except OSError as error:
            if not self._warned:
                print_lines(
                    f"WARNING {self.path} cannot be written: {error.strerror}; its lines wait until there is room"
                )
            self._warned = True
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def _flush(self) -> None:
        """Write from where the last write stopped, even in the middle of a line."""
        while self._waiting:
            self._waiting = self._waiting[self._lines.write(self._waiting) :]
        self._warned = False

    def close(self) -> None:
        """Write what is left and close everything."""
        with contextlib.suppress(OSError):
            self._flush()
        self._lines.close()
        self._board.close()
        close_trackers(self._trackers)


class _Board:
    """Writer of TensorBoard events without a thread: that of tensorboardX's `SummaryWriter` dies on a full disk."""

    def __init__(self, folder: Path, done: int) -> None:
        with _without_torch():
            from tensorboardX import RecordWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._event = Event
        folder.mkdir(exist_ok=True)
        # as TensorBoard looks for it
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        self._writer = RecordWriter(str(folder / name))
        self._add(file_version="brain.Event:2")
        # Makes TensorBoard drop events of later steps, which an earlier start wrote.
        self._add(step=done + 1, session_log={"status": SessionLog.START})

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write all numbers of a step. Raises OSError."""
        values = [{"tag": tag, "simple_value": x} for tag, x in numbers.items()]
        self._add(step=step, summary={"value": values})
        self._writer.flush()

    def _add(self, **event: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **event).SerializeToString())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Hide PyTorch from tensorboardX, which imports it if it can: two seconds and 200 MB, for nothing used here.

    Done where a log is opened, and undone at once. Remove when tensorboardX imports it only where a
    tensor is given; 2.6.5, the newest, does not.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    try:
        yield
    finally:
        del sys.modules["torch"]


def _drop_after(path: Path, done: int) -> None:
    """Rewrite the file atomically without records of steps after `done`."""
    with atomic_write(path) as partial, partial.open("w") as output:
        records = (
            record for record in read_json_lines(path) if isinstance(record.get("step"), int)
        )
        output.writelines(json_lines([record]) for record in records if record["step"] <= done)


def _plain(value: MetricValue) -> Any:
    """Convert a value to JSON, numbers to nine digits, which tell all float32 apart."""
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, str):
        return value
    value = float(value)
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)
