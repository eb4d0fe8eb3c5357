"""Print what a command is doing while it prints nothing else, and measure where the time of its start goes.

Imports the standard library only: a command calls `start_clock` before the imports that take
seconds.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mmjax import __version__

QUIET_SECONDS = 3.0  # after which an activity is printed for the first time
REPEAT_SECONDS = 4.0  # between lines on a terminal, at first
# between lines later, as when thousands of programs are compiled, and always in a file
LATER_SECONDS = 60.0
LATER = 300.0  # seconds after which that is

FIRST_PORT = 20000  # of those on which process 0 may listen
PORTS = 10000

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_PRINTING = {"-h", "--help", "--show"}
_started = time.monotonic()


class Activity:
    """Something that takes a while, with a counter `done` of `total` where `total` is not 0."""

    def __init__(self, name: str, total: int = 0) -> None:
        self.name = name
        self.total = total
        self.done = 0
        # resumed: when the last activity inside it ended
        self.began = self.resumed = time.monotonic()

    def __str__(self) -> str:
        progress = f" {self.done:,} of {self.total:,}" if self.total else ""
        return f"{self.name}{progress} ... {time.monotonic() - self.began:.0f} s"


_stack: list[Activity] = []  # the innermost is last; only the main thread changes it
_seconds: dict[str, float] = {}  # of each activity that has ended, without those inside it
_last_output = _started


def start_clock(name: str) -> None:
    """Print that the command `name` starts, and from then on every activity that lasts longer than 3 seconds.

    Lines go to standard error, of process 0 only; none where the command only prints its help or
    config. Called once, by a command that runs as the program. Also makes Ctrl-C end it with one
    line and code 130 until the command installs a handler of its own.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    os.environ.update(launcher_variables(os.environ))
    main = sys.modules["__main__"]
    if main.__spec__ is not None and main.__spec__.name.startswith("mmjax."):
        # A process that is spawned imports its parent's main module first, unless that has neither
        # name nor file: this command and all that it imports, of which data workers need half.
        main.__spec__ = None
        del main.__file__
    _stack.append(Activity("loading libraries"))
    gc.disable()  # a fifth of the time of imports, whose objects stay
    if os.environ.get("MMJAX_PROCESS", "0") == "0" and not _PRINTING.intersection(sys.argv):
        print(f"mmjax {__version__}  {name}: loading libraries", file=sys.stderr, flush=True)
        threading.Thread(target=_print_slow, name="mmjax-activity", daemon=True).start()


def use_huge_pages() -> None:
    """Execute this program anew with a C library that takes huge pages, where Linux grants them and there is no GPU.

    XLA allocates a step's memory in every step. In pages of 4 kB a step of 8M parameters has
    128,000 page faults, 12 % of its time (docs/measurements/peer.md). The C library reads its
    settings before the first line of a program, so the same process begins again. Called first by
    what runs as the program.
    """
    chosen = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in chosen or os.path.exists("/dev/nvidiactl"):
        return
    try:
        on_request = "[madvise]" in HUGE_PAGES.read_text()
    except OSError:  # not Linux, or without huge pages
        return
    if on_request:
        tunables = ":".join(filter(None, [chosen, "glibc.malloc.hugetlb=1"]))
        os.execve(
            sys.executable,
            [sys.executable, *sys.orig_argv[1:]],
            os.environ | {"GLIBC_TUNABLES": tunables},
        )


def launcher_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Derive MMJAX_COORDINATOR, MMJAX_PROCESSES and MMJAX_PROCESS from what srun or mpirun tells each of its tasks.

    Empty where the MMJAX variables are set already, where neither has started this process, and
    where it is alone.
    """
    if "MMJAX_PROCESSES" in variables:
        return {}
    # unlike SLURM_NTASKS set by srun only, and not in the batch script itself
    if "SLURM_STEP_NUM_TASKS" in variables:
        count = variables["SLURM_STEP_NUM_TASKS"]
        process = variables.get("SLURM_PROCID", "0")
        host = _first_host(variables.get("SLURM_STEP_NODELIST", ""))
        job = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
    elif "OMPI_COMM_WORLD_SIZE" in variables:
        count = variables["OMPI_COMM_WORLD_SIZE"]
        process = variables.get("OMPI_COMM_WORLD_RANK", "0")
        # Open MPI 5 names a job prterun-HOST-PID@N, where HOST is that of mpirun, which has rank 0
        # by default.
        job = variables.get("PMIX_NAMESPACE", "") or variables.get("OMPI_MCA_orte_hnp_uri", "")
        named = re.match(r"prterun-(.+)-\d+@\d+$", job) or re.search(r"tcp://([\d.]+)", job)
        one_host = variables.get("OMPI_COMM_WORLD_LOCAL_SIZE") == count
        host = "127.0.0.1" if one_host else named[1] if named else ""
    else:
        return {}
    if count == "1":
        return {}
    # the same for all tasks, another one for the next job
    port = FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    ours = {"MMJAX_PROCESSES": count, "MMJAX_PROCESS": process}
    if host and "MMJAX_COORDINATOR" not in variables:
        ours["MMJAX_COORDINATOR"] = f"{host}:{port}"
    return ours


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's node list: of `gpu[003-010,020],x1` it is `gpu003`."""
    first = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in first.groups()) if first else ""


def end_loading() -> None:
    """End the activity of loading libraries, which `start_clock` started."""
    if _stack and _stack[0].name == "loading libraries":
        gc.freeze()
        gc.enable()
        _add_seconds(_stack.pop(0))


@contextmanager
def rare_collection() -> Iterator[None]:
    """Collect garbage rarely meanwhile, which takes a tenth of the time of Python that traces and compiles.

    Not for steps: in them a cycle of references may hold large arrays.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def activity(name: str, total: int = 0) -> Iterator[Activity]:
    """Name what the body does. Its seconds, without those of activities inside it, are added to `seconds()`."""
    if threading.current_thread() is not threading.main_thread():
        yield Activity(name, total)
        return
    entered = Activity(name, total)
    if _stack:
        _add_seconds(_stack[-1])
    _stack.append(entered)
    try:
        yield entered
    finally:
        _add_seconds(_stack.pop())
        if _stack:
            _stack[-1].resumed = time.monotonic()


def record_output() -> None:
    """Record that the command has printed something."""
    global _last_output
    _last_output = time.monotonic()


def seconds() -> dict[str, float]:
    """Return the seconds since `start_clock` by activity, each without those inside it; empty if it was not called."""
    if "loading libraries" not in _seconds:
        return {}
    rest = time.monotonic() - _started - sum(_seconds.values())
    return dict(sorted(_seconds.items(), key=lambda pair: -pair[1])) | {"everything else": rest}


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Exit at once: nothing needs cleaning up yet, and a KeyboardInterrupt inside an import has a long traceback."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _add_seconds(paused: Activity) -> None:
    _seconds[paused.name] = _seconds.get(paused.name, 0.0) + time.monotonic() - paused.resumed


def _print_slow() -> None:
    """Print the innermost activity whenever nothing was printed for a while, for ever."""
    while True:
        time.sleep(0.5)
        innermost = _stack[-1:]  # read once: the main thread may end the activity at any time
        if not innermost:
            continue
        time_now = time.monotonic()
        age = time_now - innermost[0].began
        silence = time_now - _last_output
        interval = REPEAT_SECONDS if age < LATER and sys.stderr.isatty() else LATER_SECONDS
        # silence >= age: nothing was printed since the activity began, so it has not been named
        # yet. An interval after the last line even one that has just begun is: several short ones
        # are as quiet as a long one.
        if silence >= interval or silence >= age >= QUIET_SECONDS:
            print(f"       {innermost[0]}", file=sys.stderr, flush=True)
            record_output()
