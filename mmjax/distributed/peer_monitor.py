"""Monitoring of peer processes: heartbeats, detection of exited processes, and reports that the run is stuck.

Everything goes through JAX's coordination service on process 0. Process 0 may be the one that does
not answer, and a request to it may then block for ever: each kind of request has its own thread,
and nothing else waits for them.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from mmjax.distributed.peer_links import PeerLinks, host_and_port

T = TypeVar("T")

HEARTBEAT_SECONDS = 24  # JAX's heartbeat timeout: a process silent for so long counts as dead
# JAX aborts a process that has waited half of that for process 0, without saying why: we must end
# it before.
_MUTE_SECONDS = 10
# after a heartbeat is due and has no answer, until we try to connect to process 0
_PROBE_SECONDS = 0.5
_POLL_SECONDS = 1.0
# The more processes there are, the less often each sends to process 0, so that it gets no more than
# so many a second.
_HEARTBEATS_PER_SECOND = 500
_POLLS_PER_SECOND = 250  # each names all processes and gets them back
# between heartbeats: `_MUTE_SECONDS` must be longer, so that the limits hold for 3,000 processes
_MOST_SECONDS = 6.0
_ASKING = 32  # processes that read the phases of all others where the run is stuck
_REPLY_SECONDS = 5.0  # timeout of requests that process 0 answers at once, if at all
# beyond the time between heartbeats, in which one comes even on a busy machine
_BEATS_SECONDS = 3.0
_LISTEN_SECONDS = 20.0  # timeout of one request for the report of a stuck run
_LEAVE_SECONDS = 10.0  # that process 0 waits for the others to leave

_ending = threading.Lock()


def heartbeat_seconds(count: int) -> float:
    """Return the seconds between two heartbeats of each of `count` processes."""
    return min(max(_POLL_SECONDS, count / _HEARTBEATS_PER_SECOND), _MOST_SECONDS)


def poll_seconds(count: int) -> float:
    """Return the seconds between two questions of each of `count` processes who is alive."""
    return max(_POLL_SECONDS, count / _POLLS_PER_SECOND)


class Phase(NamedTuple):
    """The current phase of this process; times of `time.monotonic`."""

    step: int  # from 0; -1 = before the first
    name: str
    began: float
    step_began: float  # the step, or work outside any step
    action: int = 0  # passes of a pipeline that this process has walked in the step
    detail: str = ""  # the pass that it runs, and the transfer that it waits for


@dataclass(frozen=True)
class PeerStatus:
    """The phase of a process by its last heartbeat."""

    step: int
    name: str
    seconds: float  # since the start of the phase
    host: str
    silent: bool  # no heartbeat lately
    action: int = 0  # this and the next as in Phase
    detail: str = ""
    role: str = ""  # stages of a pipeline that it has


STUCK = 3  # exit codes
LOST = 1


class StuckReport(NamedTuple):
    """The report of the first process that noticed that the run is stuck, has lost a process, or was stopped early."""

    line: str
    silent: tuple[int, ...]  # processes that will not answer
    code: int = STUCK  # with which all end


class PeerMonitor:
    """Threads of one process that send its heartbeats and watch for peers that exited or are stuck."""

    def __init__(self, client: Any, address: str, index: int, count: int, links: PeerLinks) -> None:
        """address: of process 0, host:port. links: open ones to the other processes."""
        start = time.monotonic()
        self.phase = Phase(-1, "starting", start, start)  # the watchdog updates it
        self.stuck: StuckReport | None = None
        self.roles: Mapping[int, str] = {}  # stages of a pipeline by process
        self.index = index
        self.count = count
        self.links = links
        self._client = client
        self._address = host_and_port(address)
        self._finished = threading.Event()
        self._unanswered = 0  # seconds since process 0 last answered
        self._heartbeat_seconds = heartbeat_seconds(count)
        loops = (self._send_heartbeats, self._listen, self._poll_live_processes, self._watch_first)
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]

    def start(self) -> None:
        """Start the threads."""
        _delay_abort()
        for thread in self._threads:
            thread.start()
        self.links.watch((self.index + 1) % self.count, self._report_lost)

    def finish(self) -> None:
        """Stop watching: from here on peers may exit."""
        self.links.leave()
        self._finished.set()

    def read_phases(self) -> dict[int, PeerStatus] | None:
        """Read the phase of every process, this one included; None if process 0 does not answer. Takes seconds."""
        earlier = call_with_timeout(_REPLY_SECONDS, self._read_heartbeats)
        time.sleep(self._heartbeat_seconds + _BEATS_SECONDS)
        latest = call_with_timeout(_REPLY_SECONDS, self._read_heartbeats)
        if earlier is None or latest is None:
            return None
        no_heartbeat = PeerStatus(step=-1, name="starting", seconds=0.0, host="", silent=True)
        phases = dict.fromkeys(range(self.count), no_heartbeat)
        for process, heartbeat in latest.items():
            beat = heartbeat.pop("beat")
            # Two readings with the same counter: no heartbeat came between them. This process
            # clearly runs.
            silent = process in earlier and earlier[process]["beat"] == beat
            phases[process] = PeerStatus(**heartbeat, silent=silent and process != self.index)
        return {
            process: replace(status, role=self.roles.get(process, ""))
            for process, status in phases.items()
        }

    def may_read_phases(self, seconds: float) -> bool:
        """Return whether this process may ask for all phases, so long beyond its limit.

        The limit of all passes at once. A few ask; the others wait for their report, and ask where
        none comes.
        """
        return self.index % -(-self.count // _ASKING) == 0 or seconds > _LISTEN_SECONDS

    def publish_stuck(self, stuck: StuckReport) -> StuckReport:
        """Report to all processes that the run is stuck; return the report that came first, which all print."""

        def report() -> StuckReport:
            with suppress(Exception):  # another process was faster
                self._client.key_value_set("mmjax/stuck", json.dumps(stuck))
            return _parse_stuck(
                self._client.blocking_key_value_get("mmjax/stuck", _milliseconds(_REPLY_SECONDS))
            )

        return call_with_timeout(_REPLY_SECONDS, report) or stuck

    def await_exits(self, peers: Collection[int]) -> None:
        """Announce that this process exits. Process 0 waits for the others, which would else blame it for their end."""
        self.links.leave()
        if self.index:
            call_with_timeout(
                _REPLY_SECONDS,
                lambda: self._client.key_value_set(f"mmjax/leaving/{self.index}", ""),
            )
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in set(peers) - {0}:
            with suppress(Exception):  # it ends for another reason
                seconds = max(0.1, deadline - time.monotonic())
                self._client.blocking_key_value_get(
                    f"mmjax/leaving/{process}", _milliseconds(seconds)
                )

    def _read_heartbeats(self) -> dict[int, dict[str, Any]]:
        entries = self._client.key_value_dir_get("mmjax/phase/")
        return {int(key.rpartition("/")[2]): json.loads(heartbeat) for key, heartbeat in entries}

    def _send_heartbeats(self) -> None:
        """Write this process's phase again and again. Success also shows that process 0 is alive."""
        host = socket.gethostname()
        for beat in itertools.count(1):
            if self._finished.wait(self._heartbeat_seconds):
                return
            phase = self.phase
            heartbeat = {
                "step": phase.step,
                "name": phase.name,
                "seconds": time.monotonic() - phase.began,
                "action": phase.action,
                "detail": phase.detail,
                "beat": beat,
                "host": host,
            }
            try:
                self._client.key_value_set(
                    f"mmjax/phase/{self.index}", json.dumps(heartbeat), allow_overwrite=True
                )
                self._unanswered = 0
            except Exception as error:
                if _disconnected(error):
                    return self._end_without_first()

    def _listen(self) -> None:
        """Wait for the report of a stuck run, or for process 0 to disconnect."""
        while not self._finished.is_set():
            try:
                report = self._client.blocking_key_value_get(
                    "mmjax/stuck", _milliseconds(_LISTEN_SECONDS)
                )
            except Exception as error:
                if _disconnected(error):
                    return self._end_without_first()
            else:
                stuck = _parse_stuck(report)
                if stuck.code == LOST:
                    return self._end_without(stuck.silent)
                self.stuck = stuck
                return

    def _poll_live_processes(self) -> None:
        """End this process when another one died. The service answers once all live processes have asked."""
        everyone = list(range(self.count))
        while not self._finished.wait(poll_seconds(self.count)):
            try:
                alive = set(self._client.get_live_nodes(everyone))
            except Exception as error:
                if _disconnected(error):
                    return self._end_without_first()
                continue
            if dead := sorted(set(everyone) - alive):
                return self._end_without(dead)

    def _report_lost(self, process: int) -> None:
        """Tell all processes that one is gone; where it is process 0, each notices by itself."""
        if process and not self._finished.is_set():
            self.publish_stuck(StuckReport(f"{self._describe([process])} ended", (process,), LOST))

    def _end_without(self, dead: Sequence[int]) -> None:
        """End this process because others are dead."""
        if self._finished.is_set():
            return
        exit_once()
        self.await_exits(set(range(self.count)) - set(dead))
        peers = [p for p in dead if p != self.index]
        if not peers:
            self._end(
                "the others took this process for gone, so long was it stopped or out of reach"
            )
        self._end(f"{self._describe(peers)} ended or cannot be reached")

    def _watch_first(self) -> None:
        """End this process when process 0 has not answered for a while; polls, so a stopped process counts no time."""
        while self.index and not self._finished.wait(_POLL_SECONDS):
            self._unanswered += 1
            if self._unanswered * _POLL_SECONDS > _MUTE_SECONDS:
                exit_once()
                self._end(f"{self._describe([0])}, which coordinates them, does not answer")
            if (
                self._unanswered * _POLL_SECONDS > self._heartbeat_seconds + _PROBE_SECONDS
                and _refused(*self._address)
            ):
                return self._end_without_first()

    def _end_without_first(self) -> None:
        if not self._finished.is_set():
            exit_once()
            self._end(f"{self._describe([0])}, which coordinates them, ended or cannot be reached")

    def _describe(self, processes: Sequence[int]) -> str:
        """Name processes, and the stages of a pipeline that they have."""
        noun = "process" if len(processes) == 1 else "processes"
        roles = "; ".join(self.roles[p] for p in processes if p in self.roles)
        return f"{noun} {', '.join(map(str, processes))} of this run's {self.count}" + (
            f" ({roles})" if roles else ""
        )

    def _end(self, why: str) -> None:
        """Print why and exit at once: an orderly exit would wait for processes that are dead."""
        this = f"process {self.index}" + (f", {self.phase.detail}," if self.phase.detail else "")
        line = (
            f"error: {why}; {this} ends too. Its own last lines may say why; go on with --resume\n"
        )
        os.write(2, line.encode())
        call_with_timeout(1, sys.stdout.flush)
        os._exit(1)


def _refused(host: str, port: int) -> bool:
    """Return whether nobody listens there any more. A stopped process still seems to: its kernel accepts for it."""
    try:
        socket.create_connection((host, port), _POLL_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _delay_abort() -> None:
    """Delay aborts by six seconds, in which a thread here can print who died: JAX aborts as it loses process 0.

    It aborts in the thread that delivers the service's answers, where no Python handler would run.
    The C library's `sleep` as the signal's handler does, is async-signal-safe, and takes the
    signal's number, 6, for seconds. Then the abort goes on. Only a command of several processes gets
    here, and to its end. Without it the end of process 0 was not named two times of three (JAX 0.10.2
    with `jax_enable_recoverability`). Remove when JAX raises an error in Python, or calls back, where it
    loses process 0.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def exit_once() -> None:
    """Let the first calling thread exit the process; block every later caller."""
    _ending.acquire()


def call_with_timeout(seconds: float, work: Callable[[], T]) -> T | None:
    """Call `work` in a thread with a timeout; return None if it raises or takes longer (the thread is abandoned)."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _parse_stuck(report: str) -> StuckReport:
    line, silent, code = json.loads(report)
    return StuckReport(line, tuple(silent), code)


def _disconnected(error: Exception) -> bool:
    """Return whether the connection to process 0 is lost; a timeout only means that the answer takes longer."""
    return "DEADLINE_EXCEEDED" not in str(error)


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
