"""The watchdog by itself, in processes of its own that it may end; and whom it names among several."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from started import ROOT

from mmjax.config import WatchConfig
from mmjax.distributed import peer_monitor
from mmjax.distributed.peer_monitor import PeerStatus
from mmjax.distributed.watchdog import Watchdog, describe_missing, not_arrived

BEGIN = """
import ctypes, sys, time
from pathlib import Path
from mmjax.config import WatchConfig
from mmjax.distributed.watchdog import Watchdog

def stand_still():
    time.sleep(600)
"""


def watched(body: str, folder: Path, **limits: float) -> subprocess.CompletedProcess:
    """What becomes of a process that runs `body` while a watchdog looks after it."""
    enter = f"\nwith Watchdog(WatchConfig(**{limits}), Path({str(folder)!r})) as watchdog:\n"
    code = BEGIN + enter + textwrap.indent(textwrap.dedent(body), "    ") + "\nprint('done')\n"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=480
    )


def test_a_step_that_stands_still_ends_with_all_stacks_the_step_and_what_it_was_doing(tmp_path):
    ended = watched(
        """
        for step in range(6):
            watchdog.set_phase("waiting for data", step)
            watchdog.set_phase("running", step)
        watchdog.set_phase("waiting for data", 6)
        stand_still()
        """,
        tmp_path / "stacks",
        seconds=2,
    )
    assert ended.returncode == 3
    line = ended.stderr.splitlines()[-1]
    assert line.startswith("error: step 7 has taken ")
    assert "more than 2 s; this process was waiting for data of step 7." in line
    assert (
        f"{tmp_path / 'stacks'}; go on with --resume, or allow more time with training.watch.seconds"
        in line
    )
    for written in (ended.stderr, (tmp_path / "stacks" / "process-0.txt").read_text()):
        assert "process 0 of 1, waiting for data of step 7" in written
        assert "in stand_still" in written
        assert "in _watch" in written  # of all threads


@pytest.mark.exhaustive
def test_slow_steps_have_as_many_times_their_median_and_what_is_no_step_its_own_limit(tmp_path):
    ended = watched(
        """
        for step in range(3):
            watchdog.set_phase("waiting for data", step)
            time.sleep(0.7)
            watchdog.set_phase("running", step)
        watchdog.set_phase("waiting for data", 3)
        time.sleep(4)  # more than two seconds, less than 10 x 0.7
        watchdog.set_phase("saving")
        time.sleep(3)
        watchdog.set_phase("evaluating")
        for _ in range(2):
            time.sleep(3)
            watchdog.beat()
        """,
        tmp_path,
        seconds=2,
        times=10,
        others=5,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_saving_that_stands_still_ends_by_its_own_limit(tmp_path):
    ended = watched(
        "watchdog.set_phase('saving', 9)\nstand_still()", tmp_path, seconds=600, others=2
    )
    assert ended.returncode == 3
    assert "error: saving has taken " in ended.stderr
    assert "more than 2 s; this process was saving after step 10" in ended.stderr
    assert "training.watch.others" in ended.stderr


def test_without_limits_nothing_is_ended(tmp_path):
    body = "watchdog.set_phase('running', 0)\ntime.sleep(2)\nwatchdog.set_phase('saving')\ntime.sleep(2)"
    assert watched(body, tmp_path, seconds=0, others=0).returncode == 0


def test_a_folder_that_cannot_be_written_keeps_no_process_from_ending(tmp_path):
    (tmp_path / "file").touch()
    ended = watched(
        "watchdog.set_phase('running', 0)\nstand_still()", tmp_path / "file" / "stacks", seconds=1
    )
    assert ended.returncode == 3
    assert "in stand_still" in ended.stderr


@pytest.mark.exhaustive
def test_native_code_that_keeps_python_from_running_is_ended_too(tmp_path):
    ended = watched(
        "watchdog.set_phase('running', 0)\ntime.sleep(2)\nctypes.PyDLL(None).sleep(600)",
        tmp_path,
        seconds=4,
    )
    assert ended.returncode == 1
    assert "most recent call first" in ended.stderr


# --------------------------------------------------------------------------------------------------
# several processes


def seen(step: int, name: str, silent: bool = False) -> PeerStatus:
    return PeerStatus(step, name, 5.0, "host", silent)


@pytest.mark.parametrize(
    ("places", "late"),
    [
        ([seen(8, "running"), seen(7, "waiting for data"), seen(7, "running")], [1]),
        ([seen(8, "waiting for data"), seen(8, "running"), seen(8, "waiting for data")], [0, 2]),
        ([seen(8, "running"), seen(8, "running"), seen(8, "running", silent=True)], [2]),
        ([seen(8, "saving"), seen(9, "running"), seen(9, "waiting for data")], [0]),
        ([seen(-1, "opening"), seen(-1, "compiling")], [0]),
        ([seen(0, "compiling"), seen(0, "planning")], [1]),
        ([seen(8, "running"), seen(8, "running")], []),
    ],
)
def test_who_is_behind_or_gives_no_sign_of_life_has_not_arrived(places, late):
    assert not_arrived(dict(enumerate(places))) == late


def test_the_line_names_who_is_missing_where_it_was_last_seen():
    places = dict(
        enumerate(
            [seen(7, "waiting for data"), seen(8, "running"), seen(8, "running", silent=True)]
        )
    )
    assert (
        describe_missing(places, [0])
        == "process 0 on host has not arrived, last seen waiting for data of step 8, for 5 s"
    )
    assert (
        describe_missing(places, [2])
        == "process 2 on host gives no sign of life, last seen running step 9, for 5 s"
    )
    many = dict(enumerate([seen(7, "running")] * 9 + [seen(8, "running")]))
    assert describe_missing(many, list(range(9))).endswith("; and 5 more")
    same = dict(enumerate([seen(7, "running")] * 2))
    assert "all processes are running step 8: a device, or the network" in describe_missing(
        same, []
    )
    assert describe_missing(None, []) == "process 0, which coordinates the others, does not answer"


@pytest.mark.exhaustive
def test_a_late_step_of_a_pipeline_says_once_what_it_waits_for(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("mmjax.distributed.watchdog._MENTION_SECONDS", 0.0)
    watchdog = Watchdog(WatchConfig(), tmp_path)
    watchdog.follow(
        lambda: (3, "in the backward pass of audio, waiting for the gradients of llm"), {}
    )
    for name, step in (("running", 4), ("saving", 4), ("running", 4), ("running", 5)):
        watchdog.set_phase(name, step)
        watchdog._mention_wait()
    said = "step {} has taken 0 s: process 0 is in the backward pass of audio, waiting for the gradients of llm"
    assert capfd.readouterr().err.splitlines() == [said.format(5), said.format(6)]


def test_telling_the_watchdog_where_one_is_costs_nothing(tmp_path):
    watchdog = Watchdog(WatchConfig(), tmp_path)
    began = time.process_time()
    for step in range(20_000):
        watchdog.set_phase("waiting for data", step)
        watchdog.set_phase("running", step)
    assert time.process_time() - began < 4  # 100 us a call, 20 times what it takes


@pytest.mark.parametrize("count", [2, 500, 2560])
def test_however_many_processes_there_are_process_0_gets_a_bounded_number_of_requests(count):
    assert count / peer_monitor.heartbeat_seconds(count) <= 512
    assert count / peer_monitor.poll_seconds(count) <= 256
    # late, and yet no sign of its end
    assert peer_monitor.heartbeat_seconds(count) + 3 < peer_monitor._MUTE_SECONDS
    monitors = [
        peer_monitor.PeerMonitor(None, "127.0.0.1:1", index, count, None) for index in range(count)
    ]
    asking = [monitor.index for monitor in monitors if monitor.may_read_phases(0)]
    assert 0 in asking
    assert min(2, count) <= len(asking) <= 32
    assert all(monitor.may_read_phases(21) for monitor in monitors)  # no report has come
