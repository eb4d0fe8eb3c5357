"""What the processes of a run know of each other while they work: where each is, who is gone, who says it is stuck.

Everything goes through the coordination service that process 0 runs. Process 0 may be the one that does not answer, and
a question to it may then wait for ever: each kind of question has a thread of its own, and nothing else waits for them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

HEARTBEAT_SECONDS = 24  # of JAX itself: a process without a sign of life for so long counts as gone
# JAX aborts a process, without a name, that has waited half of that for process 0: it has to be said before.
_MUTE_SECONDS = 10
_DOUBT_SECONDS = 1.5  # without an answer, after which it is tried whether process 0 is still there
_LOOK_SECONDS = 1.0
_ASK_SECONDS = 5.0  # for an answer that process 0 gives at once, if it gives any
_BEATS_SECONDS = 4.0  # in which a process that runs gives at least one sign of life, also on a busy machine
_LISTEN_SECONDS = 20.0  # of one question whether anybody is stuck
_LEAVE_SECONDS = 10.0  # that process 0 waits for the others to leave

_ending = threading.Lock()


class Place(NamedTuple):
    """Where this process is in its work; times of `time.monotonic`."""

    step: int  # from 0; -1 = before the first
    doing: str
    since: float  # when it began to do that
    began: float  # when it began with the step, or with what is no part of one


@dataclass(frozen=True)
class Seen:
    """Where a process was last seen."""

    step: int
    doing: str
    seconds: float  # for which it had been doing that
    host: str
    silent: bool  # it gives no sign of life


class Stuck(NamedTuple):
    """What the first process that found the run stuck has told the others."""

    line: str
    silent: tuple[int, ...]  # processes that will not answer


class Lookout:
    """The threads of one process that tell the others where it is, and look for those that are gone or stuck."""

    def __init__(self, client: Any, address: str, index: int, count: int) -> None:
        """address: of process 0, host:port."""
        now = time.monotonic()
        self.place = Place(-1, "starting", now, now)  # whoever knows better sets it
        self.stuck: Stuck | None = None
        self.index, self.count = index, count
        self._client = client
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._finished = threading.Event()
        self._unanswered = 0  # looks since process 0 has answered
        self._threads = [
            threading.Thread(target=of, daemon=True)
            for of in (self._tell, self._listen, self._ask_who_lives, self._notice_mute)
        ]

    def start(self) -> None:
        """Begin to look."""
        _delay_abort()
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """From now on it is no fault that others leave."""
        self._finished.set()

    def everyone(self) -> dict[int, Seen] | None:
        """Where every process is, this one included; None when process 0 does not answer. Takes a few seconds."""
        before = within(_ASK_SECONDS, self._told)
        time.sleep(_BEATS_SECONDS)
        now = within(_ASK_SECONDS, self._told)
        if before is None or now is None:
            return None
        found = {p: Seen(-1, "starting", 0.0, "", True) for p in range(self.count)}
        for process, told in now.items():
            beat = told.pop("beat")
            silent = process in before and before[process]["beat"] == beat
            found[process] = Seen(**told, silent=silent and process != self.index)
        return found

    def say_stuck(self, stuck: Stuck) -> Stuck:
        """Tell the others that the run is stuck. What the first of them has said is what all say."""

        def say() -> Stuck:
            with suppress(Exception):  # another was faster
                self._client.key_value_set("mmjax/stuck", json.dumps(stuck))
            return _stuck_of(self._client.blocking_key_value_get("mmjax/stuck", _milliseconds(_ASK_SECONDS)))

        return within(_ASK_SECONDS, say) or stuck

    def await_leavers(self, others: Collection[int]) -> None:
        """Tell that this process leaves. Process 0 leaves last: without it the others would take it for the culprit."""
        if self.index:
            within(_ASK_SECONDS, lambda: self._client.key_value_set(f"mmjax/leaving/{self.index}", ""))
            return
        deadline = time.monotonic() + _LEAVE_SECONDS
        for other in set(others) - {0}:
            with suppress(Exception):  # it ends for another reason
                left = max(0.1, deadline - time.monotonic())
                self._client.blocking_key_value_get(f"mmjax/leaving/{other}", _milliseconds(left))

    def _told(self) -> dict[int, dict[str, Any]]:
        found = self._client.key_value_dir_get("mmjax/place/")
        return {int(key.rpartition("/")[2]): json.loads(told) for key, told in found}

    def _tell(self) -> None:
        """Say where this process is, once a second. That it can be said shows that process 0 is there."""
        beat, host = 0, socket.gethostname()
        while not self._finished.wait(_LOOK_SECONDS):
            beat, place = beat + 1, self.place
            told = {"step": place.step, "doing": place.doing, "seconds": time.monotonic() - place.since}
            told |= {"beat": beat, "host": host}
            try:
                self._client.key_value_set(f"mmjax/place/{self.index}", json.dumps(told), allow_overwrite=True)
                self._unanswered = 0
            except Exception as error:
                if _hung_up(error):
                    return self._end_without_first()

    def _listen(self) -> None:
        """Wait for somebody to say that the run is stuck, and for process 0 to hang up."""
        while not self._finished.is_set():
            try:
                said = self._client.blocking_key_value_get("mmjax/stuck", _milliseconds(_LISTEN_SECONDS))
            except Exception as error:
                if _hung_up(error):
                    return self._end_without_first()
            else:
                self.stuck = _stuck_of(said)
                return

    def _ask_who_lives(self) -> None:
        """End this process when another one is gone. The service answers when all that live have asked."""
        everyone = list(range(self.count))
        while not self._finished.wait(_LOOK_SECONDS):
            try:
                alive = set(self._client.get_live_nodes(everyone))
            except Exception as error:
                if _hung_up(error):
                    return self._end_without_first()
                continue
            if gone := sorted(set(everyone) - alive):
                if not self._finished.is_set():
                    claim_the_end()
                    self.await_leavers(alive)
                    self._end_without(gone)
                return

    def _notice_mute(self) -> None:
        """End this process when process 0 has not answered for some time in which this one was running."""
        while self.index and not self._finished.wait(_LOOK_SECONDS):
            self._unanswered += 1
            if self._unanswered * _LOOK_SECONDS > _MUTE_SECONDS:
                claim_the_end()
                self._end(f"process 0 of this run's {self.count}, which coordinates them, does not answer")
            if self._unanswered * _LOOK_SECONDS > _DOUBT_SECONDS and _refused(*self._address):
                return self._end_without_first()

    def _end_without_first(self) -> None:
        if not self._finished.is_set():
            claim_the_end()
            self._end(f"process 0 of this run's {self.count}, which coordinates them, ended or cannot be reached")

    def _end_without(self, gone: list[int]) -> None:
        others = [str(p) for p in gone if p != self.index]
        if not others:
            self._end("the others took this process for gone, so long was it stopped or out of reach")
        of = "process" if len(others) == 1 else "processes"
        self._end(f"{of} {', '.join(others)} of this run's {self.count} ended or cannot be reached")

    def _end(self, why: str) -> None:
        """Say why and end at once: an orderly end would wait for processes that are not there."""
        line = f"error: {why}; process {self.index} ends too. Its own last lines may say why; go on with --resume\n"
        os.write(2, line.encode())
        within(1, sys.stdout.flush)
        os._exit(1)


def _refused(host: str, port: int) -> bool:
    """Whether nobody listens there any more. A process that was stopped still seems to listen."""
    try:
        socket.create_connection((host, port), _LOOK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _delay_abort() -> None:
    """Have an abort wait, so that a thread here can say who is gone: JAX aborts at once when it loses process 0.

    It does so in the thread that hands out the service's answers: none comes meanwhile. A handler in
    Python would not run. The C library's `sleep` does, is safe there, and takes the signal's number for seconds: six.
    Then the abort goes on.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def claim_the_end() -> None:
    """Returns to the first thread that wants to end this process; the others wait here for the end."""
    _ending.acquire()


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """What `work` returns, or None when it raises or has not come back by then; then its thread is left to itself."""
    found: list[T] = []

    def run() -> None:
        with suppress(Exception):
            found.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _stuck_of(said: str) -> Stuck:
    line, silent = json.loads(said)
    return Stuck(line, tuple(silent))


def _hung_up(error: Exception) -> bool:
    """Whether process 0 is not there; otherwise the answer only takes longer."""
    return "DEADLINE_EXCEEDED" not in str(error)


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
