"""A training that fails is started again: real processes, real signals, a few lines of Python for the training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from started import finish, start, wait_until

from mmjax.errors import UserError
from mmjax.supervise import main

# Ends as it is told for each of its starts: "12:1" after 12 saved steps with code 1, ":-9" by
# signal 9, ":" waits.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
folder, ends = Path(sys.argv[1]), sys.argv[2:]
got = folder / "got"
def note(number, frame):
    with got.open("a") as file:
        file.write(f"{signal.Signals(number).name} ")
    if number != signal.SIGUSR2:
        os._exit(5)
for name in ("INT", "TERM", "USR1", "USR2"):
    signal.signal(getattr(signal, f"SIG{name}"), note)
starts = folder / "starts"
before = len(starts.read_text().splitlines()) if starts.exists() else 0
with starts.open("a") as file:
    file.write(f"{os.getpid()}\\n")
saved, code = ends[min(before, len(ends) - 1)].split(":")
if saved:
    progress = Path(os.environ["MMJAX_PROGRESS"])
    progress.with_name("partial").write_text(saved)
    progress.with_name("partial").rename(progress)
if not code:
    time.sleep(600)
if int(code) < 0:
    os.kill(os.getpid(), -int(code))
sys.exit(int(code))
"""


def supervised(folder: Path, *ends: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    script = folder / "training.py"
    script.write_text(TRAINING)
    words = (*(options or ("--wait", "0")), "--", sys.executable, str(script), str(folder), *ends)
    return start("mmjax.supervise", *words)


def starts_of(folder: Path) -> list[int]:
    """The process ids of all starts so far."""
    path = folder / "starts"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_fails_is_started_again_until_it_is_done_and_each_start_is_told(
    tmp_path: Path,
) -> None:
    ended = finish(supervised(tmp_path, "4:1", "8:-9", "12:0"))
    assert ended.code == 0
    assert len(starts_of(tmp_path)) == 3
    told = [line.split(" ", 3)[3] for line in ended.err.splitlines()]
    assert told[0].startswith(f"start 1: {sys.executable}")
    assert told[1:] == [
        "start 1 ended with code 1, 4 steps saved; restart in 0 s",
        "start 2, 4 steps saved",
        "start 2 ended with code 137 (SIGKILL), 8 steps saved; restart in 0 s",
        "start 3, 8 steps saved",
        "start 3 ended with code 0, 12 steps saved; done",
    ]


@pytest.mark.parametrize(
    ("ends", "options", "starts"),
    [
        (("4:7",), (), 4),  # the first start made progress; three restarts did not
        ((":7",), ("--most", "1", "--wait", "0"), 2),
        ((":7", ":7", ":7", "4:7"), (), 7),  # a newer checkpoint: three more
        (("8:7", "4:7", "8:7", "9:7", ":7"), (), 7),  # one that was there before is none
    ],
)
def test_after_restarts_in_a_row_without_a_newer_checkpoint_it_ends_with_the_last_code(
    tmp_path: Path, ends: tuple[str, ...], options: tuple[str, ...], starts: int
) -> None:
    ended = finish(supervised(tmp_path, *ends, options=options))
    assert ended.code == 7
    assert len(starts_of(tmp_path)) == starts
    most = 1 if "--most" in options else 3
    assert f"giving up: {most} restarts in a row without a newer checkpoint" in ended.err


def test_bad_input_is_not_tried_again_unless_it_had_worked_before(tmp_path: Path) -> None:
    ended = finish(supervised(tmp_path, ":2"))
    assert (ended.code, len(starts_of(tmp_path))) == (2, 1)
    assert "a restart would not mend it" in ended.err
    for case in (["4:2", ":0"], [":1", ":2", ":0"]):
        folder = tmp_path / str(len(case))
        folder.mkdir()
        assert finish(supervised(folder, *case)).code == 0
        assert len(starts_of(folder)) == len(case)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_reaches_the_command_once_and_ends_it_for_good_with_its_own_code(
    tmp_path: Path, name: str
) -> None:
    process = supervised(tmp_path, "4:")
    wait_until(lambda: starts_of(tmp_path))
    # as a terminal sends Ctrl-C: to all that is in the foreground
    os.killpg(process.pid, getattr(signal, name))
    ended = finish(process)
    assert ended.code == 5
    assert "stopped by a signal, no restart" in ended.err
    assert (tmp_path / "got").read_text() == f"{name} "
    assert len(starts_of(tmp_path)) == 1


def test_a_command_that_was_interrupted_itself_is_not_started_again(tmp_path: Path) -> None:
    ended = finish(supervised(tmp_path, ":130"))
    assert (ended.code, len(starts_of(tmp_path))) == (130, 1)


def test_usr2_is_passed_on_and_ends_nothing(tmp_path: Path) -> None:
    process = supervised(tmp_path, ":", ":0")
    wait_until(lambda: starts_of(tmp_path))
    process.send_signal(signal.SIGUSR2)
    wait_until((tmp_path / "got").exists)
    os.kill(starts_of(tmp_path)[0], signal.SIGKILL)
    assert finish(process).code == 0
    assert len(starts_of(tmp_path)) == 2


def test_a_signal_ends_the_wait_for_a_restart(tmp_path: Path) -> None:
    process = supervised(tmp_path, "4:7", options=("--wait", "600"))
    assert process.stderr
    while "restart in 600 s" not in process.stderr.readline():
        pass
    process.terminate()
    ended = finish(process)
    assert (ended.code, len(starts_of(tmp_path))) == (7, 1)
    assert "stopped by a signal, no restart" in ended.err


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent is gone"
)
def test_the_command_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    process = supervised(tmp_path, ":")
    wait_until(lambda: starts_of(tmp_path))
    process.kill()
    wait_until((tmp_path / "got").exists)
    assert (tmp_path / "got").read_text() == "SIGTERM "


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("python", "-m", "mmjax.train", "tiny_vlm"), "add --resume=auto to the command"),
        (("python", "-m", "mmjax.train", "--resume"), "add --resume=auto to the command"),
        (("launch/local.sh", "2", "tiny_vlm"), "add --resume=auto to the command"),
        (("/venv/bin/mmjax", "train", "tiny_vlm"), "add --resume=auto to the command"),
        ((), "no command to run"),
        (("no-such-program",), "cannot start no-such-program: No such file or directory"),
    ],
)
def test_a_command_that_cannot_be_restarted_is_refused(words: tuple[str, ...], said: str) -> None:
    ended = finish(start("mmjax.supervise", "--", *words))
    assert ended.code == 2
    assert said in ended.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls"], "ls is no option; put -- before the command"),
        (["--most", "-1", "--", "ls"], "--most -1 --wait 10: choose 0 or more"),
        (["--wait", "nan", "--", "ls"], "--wait nan: choose 0 or more"),
    ],
)
def test_options_that_say_nothing_are_refused_with_what_to_write(
    words: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        main(words)
