"""Commit checkpoints atomically: all processes write into a partial folder, which process 0 renames at the end.

    checkpoints/100             complete
    checkpoints/150.partial     being written, or left by a killed process
    checkpoints/200.torn        could not be read when the run was resumed; kept until a later one is complete
    checkpoints/50.old          being removed

Nothing is removed before its replacement is complete, so that a kill at any moment, or a full disk,
costs at most the steps since the last save. Processes wait for each other in background threads,
while training continues.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmjax.disk import PROGRESS, atomic_write
from mmjax.distributed import coordination

PARTIAL = ".partial"
TORN = ".torn"
OLD = ".old"
LEFTOVERS = (f"*{PARTIAL}", f"*{OLD}", "*.orbax-checkpoint-tmp*")


@dataclass(frozen=True)
class Retention:
    """Retention policy: the newest `last` checkpoints stay, those after a multiple of `every` steps, and the best."""

    last: int
    every: int = 0
    best: int = 0  # step of the best evaluation; 0 = none

    def steps_to_remove(self, steps: Sequence[int]) -> list[int]:
        """Return the checkpoints to remove, of these in ascending order."""
        return [
            s
            for s in steps[: -self.last]
            if s != self.best and not (self.every and s % self.every == 0)
        ]


@dataclass(eq=False)
class Commit:
    """A save in its background thread. All processes start the same saves, and get the same result of each.

    number: unique to this save, the same on all processes. write: writes this process's part.
    finish: completes the partial folder, on process 0, once all parts are written.
    """

    folder: Path
    step: int
    number: int
    write: Callable[[], None]
    finish: Callable[[Path], None]
    retention: Retention
    error: str = field(default="", init=False)  # why the save failed, once it has ended

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"saving step {self.step}")
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self) -> str:
        """Wait for the save, and return why it failed, the same on every process; empty where it did not."""
        self._thread.join()
        return self.error

    def _run(self) -> None:
        try:
            # Nothing gets its final name before all processes have reported that their part is
            # written.
            written = coordination.gather(
                f"save/{self.number}/written", run_and_describe_failure(self.write)
            )
            error = next(filter(None, written), "")
            if coordination.is_leader():
                error = error or run_and_describe_failure(self._publish)
                if error:
                    shutil.rmtree(partial_folder(self.folder, self.step), ignore_errors=True)
            self.error = coordination.gather(f"save/{self.number}/whole", error)[0]
        except Exception as error:  # another process has died: this one ends soon
            self.error = root_cause_line(error)

    def _publish(self) -> None:
        """Give the checkpoint its final name, then remove what it replaces."""
        partial = partial_folder(self.folder, self.step)
        self.finish(partial)
        partial.rename(self.folder / str(self.step))
        # The checkpoint is complete whatever fails from here on; the next save tries these again.
        run_and_describe_failure(lambda: report_progress(self.step))
        run_and_describe_failure(self._remove_superfluous)

    def _remove_superfluous(self) -> None:
        for step in self.retention.steps_to_remove(saved_steps(self.folder)):
            remove(self.folder / str(step))
        remove_leftovers(self.folder)
        for torn in self.folder.glob(f"*{TORN}"):
            # Kept for a person to look at until a checkpoint of its step, or of a later one, is
            # complete.
            name = torn.name.removesuffix(TORN)
            if name.isdecimal() and int(name) <= self.step:
                shutil.rmtree(torn)


def report_progress(step: int) -> None:
    """Tell the supervisor, if there is one, that a step is saved. Raises OSError."""
    if name := os.environ.get(PROGRESS):
        with atomic_write(Path(name)) as partial:
            partial.write_text(str(step))


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints under `folder`, ascending."""
    return sorted(int(p.name) for p in folder.glob("*") if p.is_dir() and p.name.isdecimal())


def partial_folder(folder: Path, step: int) -> Path:
    """Return the folder into which checkpoint `step` is written."""
    return folder / f"{step}{PARTIAL}"


def begin_partial(folder: Path, step: int) -> None:
    """Make an empty folder to write checkpoint `step` into; on process 0 only."""
    partial = partial_folder(folder, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint, renamed first so that a half-removed one is never taken for a checkpoint."""
    old = checkpoint.with_name(f"{checkpoint.name}{OLD}")
    shutil.rmtree(old, ignore_errors=True)
    checkpoint.rename(old)
    shutil.rmtree(old)


def set_aside(folder: Path, step: int) -> Path:
    """Rename a checkpoint that cannot be read, so that the run resumes from an older one."""
    torn = folder / f"{step}{TORN}"
    shutil.rmtree(torn, ignore_errors=True)
    return (folder / str(step)).rename(torn)


def remove_leftovers(folder: Path) -> None:
    """Remove the partial folders that killed processes were writing or removing."""
    for pattern in LEFTOVERS:
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def run_and_describe_failure(work: Callable[[], None]) -> str:
    """Run `work`, and return why it failed, on one line; empty where it did not."""
    try:
        work()
    except Exception as error:  # storage raises dozens of kinds
        return root_cause_line(error)
    return ""


def root_cause_line(error: BaseException) -> str:
    """Return the first line of what an error goes back to; a long one without its middle, since its end says why."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:80]} ... {line[-115:]}"
