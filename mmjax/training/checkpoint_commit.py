"""How a checkpoint becomes one: every process writes its part into a partial folder, process 0 renames the whole.

    checkpoints/100             whole
    checkpoints/150.partial     being written; a leftover where no process is
    checkpoints/200.torn        could not be read when the run went on; kept until a later one is whole
    checkpoints/50.old          being removed

Nothing is removed before what replaces it is whole, so that a kill at any moment, or a full disk, costs at most the
steps since the last save. Processes wait for each other in threads of their own: training goes on.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmjax.parallel import processes

PARTIAL, TORN, OLD = ".partial", ".torn", ".old"
LEFTOVERS = (f"*{PARTIAL}", f"*{OLD}", "*.orbax-checkpoint-tmp*")
PROGRESS = "MMJAX_PROGRESS"  # names a file for the number of steps that are saved, of which `mmjax.supervise` knows


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `last`, and those after a multiple of `every` steps (0 = none)."""

    last: int
    every: int = 0

    def superfluous(self, steps: Sequence[int]) -> list[int]:
        """Of checkpoints in ascending order, those that go."""
        return [step for step in steps[: -self.last] if not (self.every and step % self.every == 0)]


class Commit:
    """A save under way in its thread. All processes begin the same ones, and learn the same of them."""

    def __init__(
        self,
        folder: Path,
        step: int,
        number: int,
        write: Callable[[], None],
        finish: Callable[[Path], None],
        retention: Retention,
    ) -> None:
        """write: this process's part. finish: what process 0 does in the partial folder when all have written theirs.

        number: of the save, the same on all processes and none twice.
        """
        self.step, self.error = step, ""  # why it is not whole, once it has ended
        self._folder, self._key, self._retention = folder, f"save/{number}", retention
        self._write, self._finish = write, finish
        self._thread = threading.Thread(target=self._run, name=f"saving step {step}")
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return not self._thread.is_alive()

    def wait(self) -> str:
        """Why the checkpoint is not whole; empty where it is. The same on every process."""
        self._thread.join()
        return self.error

    def _run(self) -> None:
        try:
            written = processes.gather(f"{self._key}/written", reason_of(self._write))
            error = next(filter(None, written), "")
            if processes.leads():
                error = error or reason_of(self._make_whole)
                if error:
                    shutil.rmtree(partial_of(self._folder, self.step), ignore_errors=True)
            self.error = processes.gather(f"{self._key}/whole", error)[0]
        except Exception as error:  # another process is gone: this one ends soon
            self.error = reason(error)

    def _make_whole(self) -> None:
        partial = partial_of(self._folder, self.step)
        self._finish(partial)
        partial.rename(self._folder / str(self.step))
        reason_of(self._tell_progress)
        reason_of(self._remove_superfluous)  # which the next save tries again

    def _tell_progress(self) -> None:
        if told := os.environ.get(PROGRESS):
            path = Path(told)
            partial = path.with_name(f"{path.name}{PARTIAL}")
            partial.write_text(str(self.step))
            partial.rename(path)

    def _remove_superfluous(self) -> None:
        for step in self._retention.superfluous(steps_in(self._folder)):
            remove(self._folder / str(step))
        remove_leftovers(self._folder)
        for torn in self._folder.glob(f"*{TORN}"):
            if int(torn.name.removesuffix(TORN)) <= self.step:
                shutil.rmtree(torn)


def steps_in(folder: Path) -> list[int]:
    """Steps of the whole checkpoints under `folder`, ascending."""
    return sorted(int(p.name) for p in folder.glob("*") if p.is_dir() and p.name.isdecimal())


def partial_of(folder: Path, step: int) -> Path:
    """Where checkpoint `step` is written."""
    return folder / f"{step}{PARTIAL}"


def begin_partial(folder: Path, step: int) -> None:
    """An empty folder to write checkpoint `step` into; process 0's."""
    partial = partial_of(folder, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint so that half of one is never taken for a whole one."""
    old = checkpoint.with_name(f"{checkpoint.name}{OLD}")
    shutil.rmtree(old, ignore_errors=True)
    checkpoint.rename(old)
    shutil.rmtree(old)


def set_aside(folder: Path, step: int) -> Path:
    """Put a checkpoint that cannot be read out of the way."""
    torn = folder / f"{step}{TORN}"
    shutil.rmtree(torn, ignore_errors=True)
    return (folder / str(step)).rename(torn)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes have left: what they were writing, and what they were removing."""
    for pattern in LEFTOVERS:
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def reason_of(work: Callable[[], None]) -> str:
    """Why `work` failed, on one line; empty where it did not."""
    try:
        work()
    except Exception as error:  # storage raises dozens of kinds
        return reason(error)
    return ""


def reason(error: BaseException) -> str:
    """Return the first line of what an error goes back to; a long one without its middle, since its end says why."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= 200 else f"{line[:80]} ... {line[-115:]}"
