"""Say what a command is busy with while it says nothing else, and note where the time of its start goes.

Imports the standard library alone: a command calls `begin` before the imports that take seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

QUIET_SECONDS = 3.0  # of one activity before it is named
REPEAT_SECONDS = 4.0  # between lines, within the first minute
LATER_SECONDS = 60.0  # between lines, after it

_PRINTING = {"-h", "--help", "--show"}
_started = time.monotonic()


class Activity:
    """Something that takes a while; `done` of `total`, where it counts."""

    def __init__(self, name: str, total: int = 0) -> None:
        self.name, self.total, self.done = name, total, 0
        self.began = self.resumed = time.monotonic()

    def __str__(self) -> str:
        counted = f" {self.done:,} of {self.total:,}" if self.total else ""
        return f"{self.name}{counted} ... {time.monotonic() - self.began:.0f} s"


_stack: list[Activity] = []  # the innermost is last; only the main thread changes it
_seconds: dict[str, float] = {}
_spoke = _started  # when a line was last printed


def begin(name: str) -> None:
    """Start the clock, say that the command `name` starts, and from then on whatever takes longer than 3 seconds.

    Lines go to standard error, of process 0 only; none where the command only prints its help or config. Called once,
    by a command that runs as the program. Until its own handling of Ctrl-C is there, that ends it in one line and code
    130.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    _stack.append(Activity("loading libraries"))
    if os.environ.get("MMJAX_PROCESS", "0") == "0" and not _PRINTING.intersection(sys.argv):
        print(f"mmjax  {name}: loading libraries", file=sys.stderr, flush=True)
        threading.Thread(target=_report, name="mmjax-activity", daemon=True).start()


def loaded() -> None:
    """End what `begin` began: all libraries are there."""
    if _stack and _stack[0].name == "loading libraries":
        _note(_stack.pop(0))


@contextmanager
def activity(name: str, total: int = 0) -> Iterator[Activity]:
    """Name what the body does, in case it takes long. Its seconds, without those of activities in it, are noted."""
    if threading.current_thread() is not threading.main_thread():
        yield Activity(name, total)
        return
    this = Activity(name, total)
    if _stack:
        _note(_stack[-1])
    _stack.append(this)
    try:
        yield this
    finally:
        _note(_stack.pop())
        if _stack:
            _stack[-1].resumed = time.monotonic()


def spoke() -> None:
    """Note that the command has printed something: silence begins anew."""
    global _spoke
    _spoke = time.monotonic()


def seconds() -> dict[str, float]:
    """Return the seconds since `begin`, by activity, each without those in it; nothing where it was not called."""
    if "loading libraries" not in _seconds:
        return {}
    rest = time.monotonic() - _started - sum(_seconds.values())
    return dict(sorted(_seconds.items(), key=lambda pair: -pair[1])) | {"everything else": rest}


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: nothing is there yet that would have to be tidied up."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _note(ended: Activity) -> None:
    _seconds[ended.name] = _seconds.get(ended.name, 0.0) + time.monotonic() - ended.resumed


def _report() -> None:
    """Print the innermost activity where nothing was printed for a while."""
    while True:
        time.sleep(0.5)
        innermost = _stack[-1:]  # one look: the main thread may end it meanwhile
        if not innermost:
            continue
        now = time.monotonic()
        age, silence = now - innermost[0].began, now - _spoke
        between = REPEAT_SECONDS if age < 60 else LATER_SECONDS
        if min(age, silence) >= (QUIET_SECONDS if silence >= age else between):
            print(f"       {innermost[0]}", file=sys.stderr, flush=True)
            spoke()
