"""A run that loses a process, or a host with its memory, goes on from the memory of the hosts: no step is lost unsaid.

`python tests/training/test_lost_hosts.py` kills 20 times and prints what each took.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import TINY
from restarts import last, losses, steps_of
from started import begin, environment, finish, kill, process_of, wait_until

from mmjax import train
from mmjax.disk import PROGRESS

KILLS = 20
HOSTS = str(Path(__file__).with_name("hosts.py"))
SHORT = (TINY, "schedule.warmup=2", "training.evaluate_every=0", "training.checkpoint_every=0")
LONG = (*SHORT, "training.steps=100000", "mesh.data=1", "mesh.fsdp=-1")


def test_killed_where_nothing_is_on_disk_a_run_goes_on_from_memory_to_the_same_bits(
    runs, folder, tmp_path
):
    memory = (f"training.memory_folder={tmp_path}", "training.memory_every=1")
    words = (*SHORT, "training.steps=8", "schedule.final=1")  # of any length, the same rates
    whole = runs / "never_killed"
    train.main([*words, f"run={whole}"])
    told = {PROGRESS: str(tmp_path / "progress")}
    variables = environment(8, **told)
    command = [sys.executable, "-m", "mmjax.train", *words, *memory, f"run={folder}"]
    process = begin([*command, "training.steps=100000"], variables)
    wait_until(lambda: last(folder) >= 4, process)
    process.kill()
    process.communicate()
    assert not list((folder / "checkpoints").iterdir())
    saved = int((tmp_path / "progress").read_text())
    ended = finish(begin([*command, "--resume"], variables))
    assert ended.code == 0, ended
    (step,) = re.findall(rf"resumed {folder} at step (\d+), from memory", ended.out)
    assert int(step) >= saved >= 2  # a step is logged before its snapshot waits for the last one
    assert losses(folder) == losses(whole)
    assert not list(tmp_path.glob("mmjax-*"))  # it has ended, and is on disk


class Kill(NamedTuple):
    """One kill of a process of a run."""

    victim: int
    logged: int  # steps before
    resumed: int  # step at which it went on
    seconds: float  # until a step more was logged

    @property
    def repeated(self) -> int:
        """How many steps were made again."""
        return max(0, self.logged - self.resumed)


class Supervised:
    """A run of four processes on as many hosts under a supervisor."""

    def __init__(self, folder: Path, memory: Path, *words: str) -> None:
        self.folder = folder
        self.memory = memory
        self.log = folder.with_name(f"{folder.name}.log")
        with self.log.open("w") as file:
            training = [*words, f"run={folder}", "training.memory_every=1", "--resume=auto"]
            self.process = begin(
                [sys.executable, "-m", "mmjax.supervise", "--wait", "0", "--", sys.executable, HOSTS, "4", *training,
                 f"training.memory_folder={memory}"],
                environment(1, PYTHONPATH=os.pathsep.join(sys.path)), stdout=file, stderr=file,
            )  # fmt: skip
        wait_until(lambda: last(folder) >= 3, self.process, 1800)

    def resumed(self) -> list[int]:
        """The steps at which it went on, so far."""
        return [int(x) for x in re.findall(r"at step (\d+), from memory", self.log.read_text())]

    def kill(self, victim: int, lost: tuple[int, ...] = ()) -> Kill:
        """Kill a process, with the memory of some hosts, and wait until the run has gone on."""
        starts = len(self.resumed())
        number = process_of(self.folder, victim)
        os.kill(number, signal.SIGKILL)
        began = time.monotonic()
        for host in lost:
            for path in self.memory.glob(f"mmjax-*/*/host{host}"):
                shutil.rmtree(path)
        logged = last(self.folder)
        wait_until(
            lambda: len(self.resumed()) > starts and last(self.folder) > logged, self.process, 240
        )
        return Kill(victim, logged, self.resumed()[-1], time.monotonic() - began)


def is_running(folder: Path) -> bool:
    """Whether a run has a process left."""
    try:
        return process_of(folder, 0) > 0
    except AssertionError:
        return False


def check_exact(supervised: Supervised, beside: Path) -> int:
    """Compare every step with a run of the same layout that nothing has disturbed; return their number."""
    kill(supervised.process)
    wait_until(lambda: not is_running(supervised.folder))
    steps = last(supervised.folder)
    with beside.with_suffix(".log").open("w") as log:
        undisturbed = begin(
            [sys.executable, HOSTS, "4", *LONG, f"run={beside}"],
            environment(1, PYTHONPATH=os.pathsep.join(sys.path)), stdout=log, stderr=log,
        )  # fmt: skip
    wait_until(lambda: last(beside) >= steps, undisturbed, 1800)
    kill(undisturbed)
    found, wanted = steps_of(supervised.folder), steps_of(beside)
    assert list(found) == list(range(1, steps + 1))
    assert losses(supervised.folder).keys() == found.keys()  # none is logged twice
    for step, record in found.items():
        # The hash of all that the step's batch holds, each of its samples once, and the worst of them.
        assert record["batch"] == wanted[step]["batch"]
        assert record["worst"].keys() == wanted[step]["worst"].keys()
        assert record["loss"] == pytest.approx(wanted[step]["loss"], rel=1e-4)
    return steps


@pytest.mark.exhaustive
def test_a_host_that_loses_its_memory_gets_its_shards_from_its_neighbour(folder, tmp_path):
    supervised = Supervised(folder, tmp_path, *LONG)
    for victim in (2, 0):
        killed = supervised.kill(victim, lost=(victim,))
        assert killed.repeated <= 1, killed
    # Two neighbours at once are more than copies are made for: nothing is in memory any more.
    wait_until(lambda: last(folder) > killed.resumed + 3, supervised.process)
    text = supervised.log.read_text()
    assert "WARNING" not in text
    check_exact(supervised, tmp_path / "beside")


@pytest.mark.exhaustive
def test_killed_at_random_moments_no_step_is_lost_unsaid_and_every_sample_comes_once(
    folder, tmp_path
):
    kill_often(folder, tmp_path, 5)


def kill_often(folder: Path, memory: Path, kills: int) -> tuple[list[Kill], int]:
    """Kill a random process at random moments, and compare the run with an undisturbed one."""
    rng = random.Random(11)
    supervised = Supervised(folder, memory, *LONG)
    killed = []
    for _ in range(kills):
        before = last(folder)
        wait_until(lambda: last(folder) > before, supervised.process)  # noqa: B023
        time.sleep(rng.uniform(0, 2))
        killed.append(supervised.kill(rng.randrange(4)))
        print(f"{killed[-1]}, load {os.getloadavg()[0]:.1f}", flush=True)
        assert killed[-1].repeated <= 1, killed
    return killed, check_exact(supervised, folder.with_name("undisturbed"))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    every, compared = kill_often(place / "run", place, KILLS)
    times = sorted(killed.seconds for killed in every)
    repeated = [killed.repeated for killed in every]
    print(
        f"{len(every)} kills: on after {times[0]:.1f} to {times[-1]:.1f} s, median {times[len(times) // 2]:.1f}; "
        f"steps made again {repeated}; {compared} steps equal to an undisturbed run's"
    )
