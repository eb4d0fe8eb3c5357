"""Signals before the first step end a run at once, also where native code keeps Python's handlers from running."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from commands import TINY
from started import ROOT, begin, environment, finish, start, wait_until

from mmjax.training.signals import StopFlags

BUSY = """
import hashlib, os, signal, sys, threading
from mmjax.errors import run_command
from mmjax.training.signals import StopFlags

flags = StopFlags()
flags.stepped = sys.argv[2] == "stepped"

def main():
    with flags.installed():
        threading.Timer(0.1, os.kill, (os.getpid(), int(sys.argv[1]))).start()
        # Native code that no signal interrupts, as a compiler is; half an hour of it, or ten seconds.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**7 if flags.stepped else 10**9)
        print(flags.stop)

sys.exit(run_command(main))
"""


def busy(number: signal.Signals, when: str):
    return finish(begin([sys.executable, "-c", BUSY, str(int(number)), when], environment(1)), 120)


@pytest.mark.default_cases("TERM")
@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [
        (
            signal.SIGTERM,
            0,
            "SIGTERM: no step was made since the start, so there is nothing to save; ending; start it",
        ),
        (
            signal.SIGUSR1,
            0,
            "SIGUSR1: no step was made since the start, so there is nothing to save; ending; start it",
        ),
        (signal.SIGINT, 130, "interrupted"),
    ],
    ids=["TERM", "USR1", "INT"],
)
def test_a_signal_while_native_code_runs_before_the_first_step_ends_the_process_with_one_line(
    number, code, expected
):
    ended = busy(number, "before")
    assert ended.code == code
    assert ended.err.startswith(expected)
    assert len(ended.err.splitlines()) == 1


def test_what_a_handler_raises_in_a_finalizer_or_a_collection_is_no_traceback(capsys, monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)

    class Finalized:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    flags = StopFlags()
    with flags.installed():
        Finalized()
        assert flags.stop == "SIGTERM"
    assert not reported
    assert "".join(capsys.readouterr()) == f"{flags.describe_end('SIGTERM')}\n"


@pytest.mark.exhaustive
def test_a_signal_after_the_first_step_waits_for_the_step():
    ended = busy(signal.SIGTERM, "stepped")
    assert (ended.code, ended.out) == (0, "SIGTERM\n")
    assert ended.err == "SIGTERM: saving after this step, then ending\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_stopped_while_it_compiles_ends_within_the_grace_of_a_cluster_and_goes_on(
    processes, folder
):
    words = (
        TINY,
        f"run={folder}",
        "training.evaluate_every=0",
        "training.steps=2",
        "schedule.warmup=1",
    )
    words += ("data.workers=2",)
    log = folder.with_name("log.txt")
    with log.open("w") as file:
        command = [str(ROOT / "launch" / "local.sh"), str(processes), *words]
        process = begin(command, environment(1), stderr=file, stdout=file)
        wait_until(lambda: "compiling the programs" in log.read_text(), process)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    assert "no step was made since the start" in log.read_text()
    assert "leaked" not in log.read_text()
    assert not (folder / "metrics.jsonl").read_text()
    again = finish(start("mmjax.train", *words, "--resume"))
    assert again.code == 0, again
