"""Handle signals: SIGTERM and SIGUSR1 stop a run after the current step, SIGUSR2 records a trace of its next steps.

Before the first step of a start there is nothing to save, and TERM, USR1 and Ctrl-C end it at once.
Python runs handlers in the main thread alone, which may compile for minutes in native code: a
thread waits for signals beside it.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax

from mmjax.console import print_note
from mmjax.data.loading.workers import kill_workers
from mmjax.distributed import coordination
from mmjax.errors import StoppedBySignal, exit_at_once

STOP = (signal.SIGTERM, signal.SIGUSR1)
TRACE = signal.SIGUSR2
TRACED_STEPS = 3
INTERRUPTED = 130
_NATIVE_SECONDS = 2.0  # until the main thread is taken to be in native code
_ORDERLY_SECONDS = 10.0  # that it has to end in order


class StopFlags:
    """Requests by signals, which the loop reads between steps."""

    def __init__(self) -> None:
        self.stop = ""  # name of the signal that requested it
        self.trace = False
        self.stepped = False  # whether a step was begun since the start: there is something to save
        self.again = "start it again"  # how, where nothing was saved
        self._noticed = threading.Event()  # the main thread runs a handler
        self._ended = threading.Event()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Set the flag of a signal, and print what will happen. Raises StoppedBySignal where nothing is to be saved."""
        del frame
        name = signal.Signals(number).name
        if number == TRACE:
            self.trace = True
            print_note(f"{name}: the next steps are recorded")
            return
        # The first signal is reported as the reason; later ones change nothing.
        if self.stepped:
            self.stop = self.stop or name
            print_note(f"{name}: saving after this step, then ending")
        elif not self.stop:
            self.stop = name
            self._noticed.set()
            print_note(self.describe_end(name))
            kill_workers()  # which may be starting, and would be waited for
            raise StoppedBySignal

    def describe_end(self, name: str) -> str:
        """Describe what a signal does that comes before the first step."""
        return f"{name}: no step was made since the start, so there is nothing to save; ending; {self.again}"

    def watch(self, signals: socket.socket) -> None:
        """End the process at a signal for which the main thread has no time. signals: gets the number of each."""
        while numbers := signals.recv(1):
            number = signal.Signals(numbers[0])
            if self.stepped or number not in (*STOP, signal.SIGINT):
                continue
            noticed = self._noticed.wait(_NATIVE_SECONDS)
            if self._ended.wait(_ORDERLY_SECONDS if noticed else 0) or self.stepped:
                continue
            if not noticed:
                print_note(
                    "interrupted" if number == signal.SIGINT else self.describe_end(number.name)
                )
            code = INTERRUPTED if number == signal.SIGINT else 0
            coordination.end_others(code)
            exit_at_once(code)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Note that the main thread handles Ctrl-C, by the handler that was there before."""
        self._noticed.set()
        self._interrupt(number, frame)

    def drop(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Report an exception that nothing can catch, but not that of a signal: `watch` ends the process after it."""
        if not isinstance(unraisable.exc_value, StoppedBySignal):
            self._report(unraisable)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals in the body: TERM and USR1 request a clean stop, USR2 a profiler trace."""
        # only the main thread can install handlers
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = dict.fromkeys((*STOP, TRACE), self.handle)
        self._interrupt = signal.getsignal(signal.SIGINT)
        if callable(self._interrupt):
            handlers[signal.SIGINT] = self.interrupt
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # A handler may run in a callback of the garbage collection, where what it raises goes no
        # further.
        self._report, sys.unraisablehook = sys.unraisablehook, self.drop
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self.watch, args=(receiver,), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            signal.set_wakeup_fd(previous_fd)
            sender.close()
            thread.join()
            receiver.close()
            sys.unraisablehook = self._report
            for number, handler in previous.items():
                signal.signal(number, handler)


class ProfilerTrace:
    """Records what this process's devices do in the steps after a request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._end_step: int | None = None  # None = nothing is recorded

    def before_step(self, step: int, flags: StopFlags) -> None:
        """Stop a recording that ends before `step`, and start one that is requested, whose flag is cleared."""
        if self._end_step is not None and step >= self._end_step:
            self.close()
        if flags.trace and self._end_step is None:
            flags.trace = False
            self._end_step = step + TRACED_STEPS
            self._path = self._folder / f"step-{step + 1}"
            jax.profiler.start_trace(str(self._path))

    def close(self) -> None:
        """Stop recording, if one is under way."""
        if self._end_step is None:
            return
        self._end_step = None
        jax.profiler.stop_trace()
        print_note(
            f"{TRACED_STEPS} steps are recorded in {self._path}; open them with xprof or ui.perfetto.dev"
        )
