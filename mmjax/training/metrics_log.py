"""Log a run's numbers: JSON lines, TensorBoard scalars and, where asked for, Weights & Biases.

A disk that is full stops no run: what could not be written waits, and is written when there is room.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmjax.errors import UserError
from mmjax.training.console import say
from mmjax.training.json_lines import whole_lines

Value = float | str | Mapping[str, float]  # a mapping has samples by name


class MetricsLog:
    """Writes every record to `metrics.jsonl` and to TensorBoard; a record's step is the number of updates done.

    Opened after `done` updates, it drops what an earlier life recorded beyond them, so that no step stands there twice.
    project: of Weights & Biases; empty = none. Raises UserError where that is not installed.
    """

    def __init__(self, path: Path, done: int, project: str = "", config: Mapping[str, Any] | None = None) -> None:
        self.path = path
        if path.is_dir():
            raise UserError(f"{path} is a folder, and the steps are to be written there; remove it")
        if path.exists():
            _drop_after(path, done)
        self._lines, self._waiting, self._said = path.open("ab", buffering=0), b"", False
        self._board = _Board(path.parent / "tensorboard", done)
        self._project = _project(project, path.parent, config or {}) if project else None

    def write(self, step: int, scalars: Mapping[str, Value]) -> None:
        """One record. NaN and Inf are kept as strings: JSON has none."""
        record = {"step": step, "time": round(time.time(), 3)}
        record |= {k: _plain(v) for k, v in scalars.items()}
        self._waiting += json.dumps(record).encode() + b"\n"
        numbers = {k: float(v) for k, v in scalars.items() if isinstance(v, int | float)}
        try:
            self._flush()
            self._board.write(step, numbers)
        except OSError as error:
            if not self._said:
                say(f"WARNING {self.path} cannot be written: {error.strerror}; its lines wait until there is room")
            self._said = True
        if self._project is not None:
            self._project.log(numbers, step=step)

    def _flush(self) -> None:
        """Go on where the last write stopped, be it in the middle of a line."""
        while self._waiting:
            self._waiting = self._waiting[self._lines.write(self._waiting) :]
        self._said = False

    def close(self) -> None:
        """Flush all."""
        with contextlib.suppress(OSError):
            self._flush()
        self._lines.close()
        self._board.close()
        if self._project is not None:
            self._project.finish()


class _Board:
    """TensorBoard's events, written at once: tensorboardX's own writer has a thread, which a full disk would end."""

    def __init__(self, folder: Path, done: int) -> None:
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event, SessionLog
            from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        begin = SessionLog(status=SessionLog.START)  # of which TensorBoard drops what stands at later steps
        self._writer.write_event(Event(wall_time=time.time(), step=done + 1, session_log=begin))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """All numbers of a step. Raises OSError."""
        values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in numbers.items()]
        summary = self._summary(value=values)
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.close()


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX imports PyTorch wherever it is installed: two seconds and 200 MB, for what is not used here."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if there were none
    try:
        yield
    finally:
        del sys.modules["torch"]


def _project(project: str, folder: Path, config: Mapping[str, Any]) -> Any:
    """A run of Weights & Biases that goes on with that of this folder."""
    try:
        import wandb
    except ImportError:
        raise UserError(f'training.wandb={project}: wandb is not installed; pip install -e ".[wandb]"') from None
    own = folder / "wandb.json"
    try:
        known = json.loads(own.read_text())["id"] if own.is_file() else None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{own} is not what was written; remove it to begin a new run there") from None
    run = wandb.init(project=project, name=folder.name, id=known, resume="allow", dir=str(folder), config=dict(config))
    own.write_text(json.dumps({"id": run.id}) + "\n")
    return run


def logged_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl; lines that are not whole, and values that no log has, are left out."""
    for record in whole_lines(path):
        if type(record.get("step")) is int and 0 <= record["step"] < 2**53:
            yield {key: value for key, value in record.items() if _is_logged(key, value)}


def _is_logged(key: str, value: Any) -> bool:
    """Return whether `_plain` may have written this value: a person may have edited the file."""
    if key in ("batch", "slowest"):
        return isinstance(value, str)
    if key == "worst":
        return isinstance(value, dict) and all(_is_logged("loss", loss) for loss in value.values())
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return type(value) in (int, float) and abs(value) < 1e300


def _drop_after(path: Path, done: int) -> None:
    partial = path.with_suffix(".partial")
    with path.open(errors="replace") as lines, partial.open("w") as kept:
        kept.writelines(line for line in lines if _step_of(line) <= done)
    partial.rename(path)


def _plain(value: Value) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, str):
        return value
    value = float(value)
    return float(f"{value:.9g}") if math.isfinite(value) else str(value)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):  # cut off when its process was killed
        return math.inf
