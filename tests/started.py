"""Commands in processes of their own, as a user starts them; none outlives its test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LOCAL = str(ROOT / "launch" / "local.sh")


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


_started: list[subprocess.Popen] = []


def start(*words: object, devices: int = 1, **options) -> subprocess.Popen:
    """Start `python -m WORDS` in a session of its own."""
    return begin([sys.executable, "-m", *map(str, words)], environment(devices), **options)


def launch(processes: int, *words: object, devices: int) -> subprocess.Popen:
    """Start a training of several processes in a session of its own."""
    return begin([LOCAL, str(processes), *map(str, words)], environment(devices))


def environment(devices: int, **more: str) -> dict[str, str]:
    """Of a command with that many CPU devices."""
    found = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": str(devices),
    }
    return found | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | more


def begin(command: Sequence[str], variables: dict[str, str], **options) -> subprocess.Popen:
    """Start a command in a session of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    options = {"text": True, "start_new_session": True, "preexec_fn": heed_interrupts}
    process = subprocess.Popen(command, env=variables, **options, **pipes)
    _started.append(process)
    return process


def heed_interrupts() -> None:
    # Tests that were started in the background ignore Ctrl-C, and would have their children do the
    # same.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen, seconds: float = 480) -> Ended:
    """How it ended."""
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, without_activities(err))


def without_activities(err: str) -> str:
    """What a command has written to standard error beside what it says it is busy with."""
    return re.sub(r"(?m)^(mmjax \S+  \w+: loading libraries| {7}\S.* \.\.\. \d+ s)\n", "", err)


def wait_until(
    what: Callable[[], object], process: subprocess.Popen | None = None, seconds: float = 480
) -> None:
    """Until something is so, while the process runs."""
    deadline = time.monotonic() + seconds
    while not what():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def process_of(run: Path, number: int) -> int:
    """The process with this number of a run that several train."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().split("\0")
            variables = (folder / "environ").read_text().split("\0")
        except (OSError, ValueError):
            continue
        if (
            f"run={run}" in command
            and f"MMJAX_PROCESS={number}" in variables
            and "mmjax.train" in command
        ):
            return int(folder.name)
    raise AssertionError(f"process {number} is not there")


def kill(process: subprocess.Popen) -> None:
    """It and all that it has started, at once."""
    for number in [p.name for p in Path("/proc").glob("[0-9]*")]:
        with contextlib.suppress(OSError):
            if os.getsid(int(number)) == process.pid != int(number):
                os.kill(int(number), signal.SIGKILL)
    process.kill()
    process.wait()


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def kill_started() -> None:
    """Whatever a test that has failed has left running."""
    while _started:
        kill(_started.pop())
