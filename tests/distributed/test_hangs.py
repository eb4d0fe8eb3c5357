"""Runs in which something stands still, as a user starts them: real processes, stopped, killed or blocked for ever."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from commands import TINY
from restarts import steps_of
from started import Ended, finish, launch, process_of, wait_until

WORDS = (
    "training.steps=100000",
    "training.evaluate_every=0",
    "training.checkpoint_every=0",
    "batch.shapes=1",
)
SOON = ("training.watch.seconds=8", "training.watch.times=3")
LIMIT = 8 + 60

BLOCKED = '''
import multiprocessing
import os
import time
from dataclasses import replace

from mmjax.config import FunctionSource
from mmjax.config.loading import sibling

tiny = sibling(__file__, "tiny")


class Blocked(tiny.Few):
    """Waits at the sixtieth sample that a worker of the last process reads."""

    wait = read = 0

    def sample(self, index):
        self.read += 1
        last = int(os.environ["MMJAX_PROCESS"]) + 1 == int(os.environ["MMJAX_PROCESSES"])
        if self.read == 60 and last and multiprocessing.parent_process():
            self.wait_for_the_disk()
        return super().sample(index)

    def wait_for_the_disk(self):
        time.sleep(self.wait)


def blocked(split, wait):
    few = tiny.few(split, "text")
    source = Blocked(few.source, split, 2)
    source.wait = wait
    return source


def config():
    base = tiny.config()
    source = FunctionSource("config:blocked", {"wait": 100_000})
    return replace(base, name="blocked", data=replace(base.data, sources={"few": source}, workers=1))
'''


@pytest.fixture(scope="module")
def blocked(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("blocked")
    shutil.copy(TINY, folder)
    (folder / "blocked.py").write_text(BLOCKED)
    return str(folder / "blocked.py")


def seconds_until_gone(run: Path, processes: Sequence[int]) -> float:
    """Until these processes of the run have ended."""
    began = time.monotonic()
    left = [process_of(run, number) for number in processes]
    wait_until(lambda: not any(Path(f"/proc/{p}/cmdline").exists() and _runs(p) for p in left))
    return time.monotonic() - began


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Stopped(NamedTuple):
    """What became of a run of four processes of which one was stopped."""

    seconds: float  # until the others had ended
    said: str  # by them, on stderr
    ended: Ended  # all, once that one went on


def stop_one_of_four(run: Path, number: int, *words: str) -> Stopped:
    """Stop a process in mid-run until the others have ended, then let it go on."""
    launched = launch(4, TINY, f"run={run}", *WORDS, *words, devices=1)
    wait_until(lambda: len(steps_of(run)) > 10)
    stopped = process_of(run, number)
    os.kill(stopped, signal.SIGSTOP)
    try:
        seconds = seconds_until_gone(run, [p for p in range(4) if p != number])
        assert _runs(stopped)
        said = written(launched.stderr)
    finally:
        os.kill(stopped, signal.SIGCONT)
    # before the launcher would end it: it finds out by itself
    return Stopped(seconds, said, finish(launched, 50))


def written(pipe: IO[str]) -> str:
    """What stands in a pipe by now."""
    os.set_blocking(pipe.fileno(), False)
    pieces = []
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(pipe.fileno(), 1 << 16):
            pieces.append(piece)
    os.set_blocking(pipe.fileno(), True)
    return b"".join(pieces).decode()


def stacks(run: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in (run / "stacks").iterdir()}


def test_a_stopped_process_is_named_by_the_other_which_ends(runs):
    """By the watchdog, or on a machine that is far too busy by the missing heartbeat: the end and the name are one."""
    run = runs / "stopped_one_of_two"
    launched = launch(2, TINY, f"run={run}", *WORDS, *SOON, devices=1)
    wait_until(lambda: len(steps_of(run)) > 10, launched)
    stopped = process_of(run, 1)
    os.kill(stopped, signal.SIGSTOP)
    try:
        seconds_until_gone(run, [0])
        assert _runs(stopped)
        said = written(launched.stderr)
    finally:
        os.kill(stopped, signal.SIGCONT)
    ended = finish(launched)
    assert ended.code in (1, 3), ended
    assert "process 1 " in next(line for line in said.splitlines() if line.startswith("error: "))


@pytest.mark.exhaustive
def test_one_process_of_four_that_is_stopped_is_named_by_the_others_which_leave_their_stacks(runs):
    run = runs / "stopped"
    stopped = stop_one_of_four(run, 2, *SOON)
    assert stopped.seconds < LIMIT
    assert stopped.ended.code == 3
    lines = [line for line in stopped.said.splitlines() if line.startswith("error: step ")]
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert "process 2 on " in lines[0]
    assert "gives no sign of life, last seen " in lines[0]
    assert {f"process-{p}.txt" for p in (0, 1, 3)} <= set(stacks(run))
    for p in (0, 1, 3):
        assert "most recent call first" in stacks(run)[f"process-{p}.txt"]


@pytest.mark.exhaustive
def test_process_zero_of_four_that_is_stopped_is_named_by_the_others(runs):
    run = runs / "stopped_first"
    stopped = stop_one_of_four(run, 0)
    assert stopped.seconds < 60
    assert stopped.ended.code == 1
    for other in (1, 2, 3):
        line = f"process 0 of this run's 4, which coordinates them, does not answer; process {other} ends too"
        assert line in stopped.said


@pytest.mark.exhaustive
def test_process_zero_that_is_killed_is_named_by_the_others(runs):
    run = runs / "killed_first"
    launched = launch(2, TINY, f"run={run}", *WORDS, devices=1)
    wait_until(lambda: len(steps_of(run)) > 10)
    os.kill(process_of(run, 0), signal.SIGKILL)
    ended = finish(launched, 50)
    assert ended.code == 137
    assert (
        "process 0 of this run's 2, which coordinates them, ended or cannot be reached; process 1 ends"
        in ended.err
    )


@pytest.mark.exhaustive
def test_a_process_whose_data_never_comes_is_named_and_its_workers_say_where_they_wait(
    runs, blocked
):
    run = runs / "blocked"
    launched = launch(2, blocked, f"run={run}", *WORDS, *SOON, devices=1)
    wait_until(lambda: len(steps_of(run)) >= 6)
    processes = [process_of(run, p) for p in range(2)]
    workers = {int(child) for p in processes for child in children(p)}
    began = time.monotonic()
    ended = finish(launched, 180)
    assert time.monotonic() - began < LIMIT + 20  # of steps before it
    assert ended.code == 3
    lines = [line for line in ended.err.splitlines() if line.startswith("error: step ")]
    assert len(lines) == 2
    assert len(set(lines)) == 1
    assert "process 1 on " in lines[0]
    assert "has not arrived, last seen waiting for data of step " in lines[0]
    assert "process 0 on" not in lines[0]
    assert "in wait_for_the_disk" in ended.err
    assert set(stacks(run)) == {"process-0.txt", "process-1.txt"}
    assert stacks(run)["process-1.txt"].startswith("process 1 of 2, waiting for data of step ")
    wait_until(lambda: not any(map(_runs, workers)))


def children(process: int) -> list[str]:
    found = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.exhaustive
def test_a_step_that_is_slow_within_the_limits_is_left_alone(runs, blocked):
    run = runs / "slow"
    words = (
        "training.steps=20",
        "data.sources.few.arguments.wait=6",
        "data.prefetch=1",
        "training.watch.seconds=60",
    )
    ended = finish(launch(1, blocked, f"run={run}", *WORDS[1:], *words, devices=1))
    assert ended.code == 0, ended
    waited = [record["seconds/step"] for record in steps_of(run).values()]
    assert max(waited) > 5, waited
    assert not (run / "stacks").exists()
