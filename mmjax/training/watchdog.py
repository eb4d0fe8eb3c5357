"""Ends a process that does not get on: it writes where every thread stands, says who has not arrived, and exits 3.

The loop says what it does (`Watchdog.at`); a thread beside it looks at the clock. With several processes, the first
that finds the run stuck tells the others, and all end with the same line.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from mmjax.config import WatchConfig
from mmjax.parallel import processes
from mmjax.parallel.lookout import Lookout, Place, Seen, Stuck, claim_the_end, within

# What a process can be doing, in the order in which a step, or a run, comes to it.
Doing = Literal["starting", "opening", "compiling", "waiting for data", "running", "evaluating", "saving", "closing"]
_ORDER = {doing: k for k, doing in enumerate(get_args(Doing))}
_IN_STEP = ("waiting for data", "running")

STUCK = 3  # exit code
_LOOK_SECONDS = 1.0
_STEPS = 100  # whose median counts
_NAMED = 4  # processes in a line
_REPORT_SECONDS = 15.0  # for the stacks: the storage may be what hangs
_WORKERS_SECONDS = 1.0  # for data workers to write theirs
_LOCKED_SECONDS = 60.0  # behind the limit


class Watchdog:
    """Looks after this process while it is entered; otherwise it only takes notes.

    `folder` gets the stacks. Where a limit is passed the process ends with code 3. Where native code keeps all Python
    threads from running, this one too, a timer in C ends it a minute later, with code 1.
    """

    def __init__(self, config: WatchConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._times: deque[float] = deque(maxlen=_STEPS)
        now = time.monotonic()
        self._place = Place(-1, "opening", now, now)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def at(self, doing: Doing, step: int | None = None) -> None:
        """Say what this process does from now on, in which step (from 0; by default in the same). It is cheap."""
        before, now = self._place, time.monotonic()
        step = before.step if step is None else step
        goes_on = doing in _IN_STEP and before.doing in _IN_STEP and step == before.step
        if before.doing in _IN_STEP and not goes_on:
            self._times.append(now - before.began)
        self._place = Place(step, doing, now, before.began if goes_on else now)

    def beat(self) -> None:
        """Say that this process gets on with what it is doing."""
        now = time.monotonic()
        self._place = self._place._replace(since=now, began=now)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Where this process is being ended, wait for that."""
        self._finished.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._finished.wait(_LOOK_SECONDS):
            others = processes.lookout()
            if others is not None:
                others.place = self._place
            self._time_locked()
            if others is not None and others.stuck is not None:
                self._end(others, others.stuck)
            if stuck := self._stuck(others):
                self._end(others, stuck if others is None else others.say_stuck(stuck))

    def _time_locked(self) -> None:
        if limit := self._limit(self._place.doing):
            faulthandler.dump_traceback_later(limit + _LOCKED_SECONDS, exit=True, file=2)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _limit(self, doing: str) -> float:
        """Seconds; 0 = none."""
        if doing not in _IN_STEP:
            return self._config.others
        return self._config.seconds and max(self._config.seconds, self._config.times * self._median)

    @property
    def _median(self) -> float:
        return median(self._times) if self._times else 0.0

    def _stuck(self, others: Lookout | None) -> Stuck | None:
        """What there is to say where this process, or one that it waits for, does not get on."""
        place = self._place
        limit, taken = self._limit(place.doing), time.monotonic() - place.began
        if not limit or taken <= limit:
            return None
        seen = None if others is None else others.everyone()
        late = not_arrived(seen) if seen else []
        if late and place.doing in _IN_STEP and all(seen[p].doing not in _IN_STEP for p in late):
            # Those that all wait for are at something that may take longer than a step.
            limit = self._config.others
        if self._place != place or not limit or taken <= limit:
            return None
        who = f"this process was {_where(place.doing, place.step)}" if others is None else missing(seen, late)
        silent = [p for p, of in seen.items() if of.silent] if seen else []
        return Stuck(self._line(place, taken, limit, who), tuple(silent))

    def _line(self, place: Place, taken: float, limit: float, who: str) -> str:
        what = f"step {place.step + 1}" if place.doing in _IN_STEP else place.doing
        if limit == self._config.others:
            key, more = "training.watch.others", f"{limit:g} s"
        elif limit == self._config.seconds:
            key, more = "training.watch.seconds", f"{limit:g} s"
        else:
            key, more = "training.watch.times", f"{self._config.times:g} x the median of {self._median:.1f} s"
        return (
            f"{what} has taken {taken:.0f} s, more than {more}; {who}. Where every thread stood is above and in "
            f"{self._folder}; go on with --resume, or allow more time with {key}"
        )

    def _end(self, others: Lookout | None, stuck: Stuck) -> None:
        claim_the_end()
        within(_REPORT_SECONDS, self._write_stacks)
        _write(f"error: {stuck.line}\n")
        within(1, sys.stdout.flush)
        if others is not None:
            others.await_leavers(set(range(others.count)) - set(stuck.silent))
        for worker in multiprocessing.active_children():
            worker.kill()  # one that is stuck in native code would stay
        os._exit(STUCK)

    def _write_stacks(self) -> None:
        place = self._place
        title = f"process {processes.index()} of {processes.count()}, {_where(place.doing, place.step)}"
        _write(f"\n{title}:\n")
        faulthandler.dump_traceback(2)
        workers = multiprocessing.active_children() if place.doing == "waiting for data" else []
        if workers:
            _write(f"\ndata workers {', '.join(str(w.pid) for w in workers)} of {title}:\n")
            for worker in workers:
                os.kill(worker.pid, signal.SIGQUIT)
            time.sleep(_WORKERS_SECONDS)
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"process-{processes.index()}.txt").open("w") as file:
            file.write(f"{title}:\n")
            file.flush()
            faulthandler.dump_traceback(file)


def not_arrived(seen: Mapping[int, Seen]) -> list[int]:
    """The processes that the others wait for: those without a sign of life, else those that are behind the first."""
    if silent := [p for p, of in seen.items() if of.silent]:
        return silent
    reached = {p: (of.step, _ORDER[of.doing]) for p, of in seen.items()}
    behind = min(reached.values())
    return [p for p, of in reached.items() if of == behind] if max(reached.values()) > behind else []


def missing(seen: Mapping[int, Seen] | None, late: Sequence[int]) -> str:
    """Who has not arrived, where it was last seen; None where process 0 could not be asked."""
    if seen is None:
        return "process 0, which coordinates the others, does not answer"
    if not late:
        doing, step = next((of.doing, of.step) for of in seen.values())
        cause = ": a device, or the network between them, does not answer" if doing == "running" else ""
        return f"all processes are {_where(doing, step)}{cause}"
    told = [_absent(p, seen[p]) for p in late[:_NAMED]]
    return "; ".join(told) + (f"; and {len(late) - _NAMED} more" if len(late) > _NAMED else "")


def _absent(process: int, of: Seen) -> str:
    name = f"process {process}" + (f" on {of.host}" if of.host else "")
    last = f"last seen {_where(of.doing, of.step)}, for {of.seconds:.0f} s"
    return f"{name} gives no sign of life, {last}" if of.silent else f"{name} has not arrived, {last}"


def _where(doing: str, step: int) -> str:
    """As in `waiting for data of step 12`."""
    of = {"waiting for data": "of ", "running": "", "evaluating": "after ", "saving": "after "}
    return f"{doing} {of[doing]}step {step + 1}" if doing in of and step >= 0 else doing


def _write(text: str) -> None:
    """To standard error, past Python's lock of it: whoever is stuck may hold that."""
    os.write(2, text.encode())
