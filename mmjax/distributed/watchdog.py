"""End a process that hangs: write where every thread stands, say which process has not arrived, and exit with code 3.

The loop reports its phase (`Watchdog.set_phase`); a thread beside it watches the clock. With
several processes, the first that finds the run stuck tells the others, and all end with the same
line.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, get_args

from mmjax.config import WatchConfig
from mmjax.distributed import coordination
from mmjax.distributed.peer_monitor import (
    STUCK,
    PeerMonitor,
    PeerStatus,
    Phase,
    StuckReport,
    call_with_timeout,
    exit_once,
)
from mmjax.errors import exit_at_once

# Phases of a process, in the order in which a step, or a run, reaches them.
PhaseName = Literal[
    "starting",
    "opening",
    "planning",
    "compiling",
    "waiting for data",
    "running",
    "evaluating",
    "saving",
    "probing rates",
    "closing",
]
_ORDER = {name: k for k, name in enumerate(get_args(PhaseName))}
_STEP_PHASES = ("waiting for data", "running")

_POLL_SECONDS = 1.0
_STEPS = 100  # most recent steps, whose median is taken
_MAX_NAMED = 4  # processes that a line names
_REPORT_SECONDS = 15.0  # for writing the stacks: the storage may be what hangs
_WORKERS_SECONDS = 1.0  # for data workers to write theirs
# of a pipeline's step, or three times the median, until it says what it waits for
_MENTION_SECONDS = 30.0
_LOCKED_SECONDS = 60.0  # beyond the limit, until the timer in C ends the process


class Watchdog:
    """Watches this process while it is entered as a context; otherwise it only records times.

    folder: gets the stacks. Where a limit is passed the process ends with code 3. Where native code
    keeps all Python threads from running, also the watchdog's, a timer in C ends the process a
    minute later, with code 1.
    """

    def __init__(self, config: WatchConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._times: deque[float] = deque(maxlen=_STEPS)
        clock = time.monotonic()
        self._phase = Phase(-1, "opening", clock, clock)
        self._progress: Callable[[], tuple[int, str]] = lambda: (0, "")
        self._mentioned = -1  # the last step of which `_mention_wait` has said something
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def set_phase(self, name: PhaseName, step: int | None = None) -> None:
        """Record the phase that begins, and its step (from 0; by default the current one). It is cheap."""
        last = self._phase
        clock = time.monotonic()
        step = last.step if step is None else step
        # Waiting for data and running are one step to the limit, whose time goes on from the one to
        # the other.
        same_step = name in _STEP_PHASES and last.name in _STEP_PHASES and step == last.step
        if last.name in _STEP_PHASES and not same_step:
            self._times.append(clock - last.step_began)
        self._phase = Phase(step, name, clock, last.step_began if same_step else clock)

    def beat(self) -> None:
        """Record that the current phase makes progress, so that its time starts anew."""
        clock = time.monotonic()
        self._phase = self._phase._replace(began=clock, step_began=clock)

    def follow(self, progress: Callable[[], tuple[int, str]], roles: Mapping[int, str]) -> None:
        """Report with the phase how far this process has walked a pipeline's passes, and what it waits for.

        roles: the stages of every process.
        """
        self._progress = progress
        if (peers := coordination.peer_monitor()) is not None:
            peers.roles = roles

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching; where the thread is already ending this process, wait for that."""
        self._finished.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._finished.wait(_POLL_SECONDS):
            peers = coordination.peer_monitor()
            if peers is not None:
                action, detail = self._progress()
                peers.phase = self._phase._replace(action=action, detail=detail)
            # The timer in C is set anew each time: it only runs out where this thread cannot run.
            if limit := self._limit(self._phase.name):
                faulthandler.dump_traceback_later(limit + _LOCKED_SECONDS, exit=True, file=2)
            else:
                faulthandler.cancel_dump_traceback_later()
            if peers is not None and peers.stuck is not None:
                self._end(peers, peers.stuck)
            if stuck := self._stuck(peers):
                self._end(peers, stuck if peers is None else peers.publish_stuck(stuck))
            self._mention_wait()

    def _mention_wait(self) -> None:
        """Say once a step what this process waits for, where a pipeline's step takes far longer than those before."""
        phase = self._phase
        detail = self._progress()[1]
        seconds = time.monotonic() - phase.step_began
        late = seconds > max(_MENTION_SECONDS, 3 * self._median)
        if late and detail and phase.name in _STEP_PHASES and phase.step != self._mentioned:
            self._mentioned = phase.step
            _write(
                f"step {phase.step + 1} has taken {seconds:.0f} s: process {coordination.index()} is {detail}\n"
            )

    def _limit(self, name: str) -> float:
        """Return the seconds that a phase may take; 0 = no limit."""
        if name not in _STEP_PHASES:
            return self._config.others
        return self._config.seconds and max(self._config.seconds, self._config.times * self._median)

    @property
    def _median(self) -> float:
        return median(self._times) if self._times else 0.0

    def _stuck(self, peers: PeerMonitor | None) -> StuckReport | None:
        """Return what to report where this process, or one that it waits for, hangs; None where neither does."""
        phase = self._phase
        limit = self._limit(phase.name)
        seconds = time.monotonic() - phase.step_began
        if not limit or seconds <= limit:
            return None
        if peers is not None and not peers.may_read_phases(seconds - limit):
            return None
        status = None if peers is None else peers.read_phases()
        late = not_arrived(status) if status else []
        if (
            late
            and phase.name in _STEP_PHASES
            and all(status[p].name not in _STEP_PHASES for p in late)
        ):
            # The processes that all wait for are in a phase that may take longer than a step.
            limit = self._config.others
        # Asking the others took time, in which this process may have gone on.
        if self._phase != phase or not limit or seconds <= limit:
            return None
        who = (
            f"this process was {describe_phase(phase.name, phase.step)}"
            if peers is None
            else describe_missing(status, late)
        )
        detail = self._progress()[1]
        if detail and coordination.index() not in late:
            who += f"; process {coordination.index()} is {detail}"
        silent = tuple(p for p, peer in (status or {}).items() if peer.silent)
        return StuckReport(self._line(phase, seconds, limit, who), silent)

    def _line(self, phase: Phase, seconds: float, limit: float, who: str) -> str:
        name = f"step {phase.step + 1}" if phase.name in _STEP_PHASES else phase.name
        key = (
            "others"
            if limit == self._config.others
            else "seconds"
            if limit == self._config.seconds
            else "times"
        )
        allowed = f"{limit:g} s"
        if key == "times":
            allowed = f"{self._config.times:g} x the median of {self._median:.1f} s"
        return (
            f"{name} has taken {seconds:.0f} s, more than {allowed}; {who}. Where every thread stood is above and in "
            f"{self._folder}; go on with --resume, or allow more time with training.watch.{key}"
        )

    def _end(self, peers: PeerMonitor | None, stuck: StuckReport) -> None:
        # Only one thread of the process goes on from here: another may be ending it already.
        exit_once()
        if stuck.code == STUCK:
            call_with_timeout(_REPORT_SECONDS, self._write_stacks)
        _write(f"{'error: ' if stuck.code == STUCK else ''}{stuck.line}\n")
        call_with_timeout(1, sys.stdout.flush)
        if peers is not None:
            peers.await_exits(set(range(peers.count)) - set(stuck.silent))
        if stuck.code != STUCK:
            exit_at_once(stuck.code)
        for worker in multiprocessing.active_children():
            worker.kill()  # one that is stuck in native code would stay
        os._exit(stuck.code)  # the main thread, which alone could exit in order, is stuck

    def _write_stacks(self) -> None:
        phase = self._phase
        title = f"process {coordination.index()} of {coordination.count()}, {describe_phase(phase.name, phase.step)}"
        _write(f"\n{title}:\n")
        faulthandler.dump_traceback(2)
        workers = multiprocessing.active_children() if phase.name == "waiting for data" else []
        if workers:
            _write(f"\ndata workers {', '.join(str(w.pid) for w in workers)} of {title}:\n")
            for worker in workers:
                # Workers print their own stacks on this signal.
                os.kill(worker.pid, signal.SIGQUIT)
            time.sleep(_WORKERS_SECONDS)
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"process-{coordination.index()}.txt").open("w") as file:
            file.write(f"{title}:\n")
            file.flush()
            faulthandler.dump_traceback(file)


def not_arrived(status: Mapping[int, PeerStatus]) -> list[int]:
    """Return the processes that the others wait for: those without a heartbeat, else those behind the first."""
    # A process without a heartbeat may have stopped anywhere; the phase it last reported says
    # nothing.
    if silent := [p for p, peer in status.items() if peer.silent]:
        return silent
    reached = {p: (peer.step, _ORDER[peer.name], peer.action) for p, peer in status.items()}
    last = min(reached.values())
    return (
        [p for p, phase in reached.items() if phase == last] if max(reached.values()) > last else []
    )


def describe_missing(status: Mapping[int, PeerStatus] | None, late: Sequence[int]) -> str:
    """Describe the processes that have not arrived, and where they were last seen.

    status: None where process 0 did not answer.
    """
    if status is None:
        return "process 0, which coordinates the others, does not answer"
    if not late:
        name, step = next((peer.name, peer.step) for peer in status.values())
        cause = (
            ": a device, or the network between them, does not answer" if name == "running" else ""
        )
        return f"all processes are {describe_phase(name, step)}{cause}"
    lines = []
    for p in late[:_MAX_NAMED]:
        peer = status[p]
        name = (
            f"process {p}"
            + (f" ({peer.role})" if peer.role else "")
            + (f" on {peer.host}" if peer.host else "")
        )
        state = "gives no sign of life" if peer.silent else "has not arrived"
        place = describe_phase(peer.name, peer.step) + (f", {peer.detail}" if peer.detail else "")
        lines.append(f"{name} {state}, last seen {place}, for {peer.seconds:.0f} s")
    return "; ".join(lines) + (
        f"; and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
    )


def describe_phase(name: str, step: int) -> str:
    """Describe a phase, as in `waiting for data of step 12`."""
    prefixes = dict.fromkeys(("evaluating", "saving", "probing rates"), "after ")
    prepositions = {"waiting for data": "of ", "running": "", **prefixes}
    return (
        f"{name} {prepositions[name]}step {step + 1}"
        if name in prepositions and step >= 0
        else name
    )


def _write(text: str) -> None:
    """Write to standard error past Python's lock of it, which the stuck thread may hold."""
    os.write(2, text.encode())
