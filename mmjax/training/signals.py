"""Handle signals: SIGTERM and SIGUSR1 stop a run after the current step, SIGUSR2 records a trace of its next steps."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

import jax

from mmjax.console import print_note

STOP = (signal.SIGTERM, signal.SIGUSR1)
TRACE = signal.SIGUSR2
TRACED_STEPS = 3


class StopFlags:
    """Requests by signals, which the loop reads between steps."""

    def __init__(self) -> None:
        self.stop = ""  # name of the signal that requested it
        self.trace = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Set the flag of a signal, and print what will happen."""
        del frame
        name = signal.Signals(number).name
        if number == TRACE:
            self.trace = True
            print_note(f"{name}: the next steps are recorded")
        else:
            # The first signal is reported as the reason; later ones change nothing.
            self.stop = self.stop or name
            print_note(f"{name}: saving after this step, then ending")


def install_signal_handlers() -> StopFlags:
    """Install handlers: SIGTERM and SIGUSR1 request a clean stop, SIGUSR2 a profiler trace. Returns the flags."""
    flags = StopFlags()
    if threading.current_thread() is threading.main_thread():  # only the main thread can install handlers
        for number in (*STOP, TRACE):
            signal.signal(number, flags.handle)
    return flags


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
        print_note(f"{TRACED_STEPS} steps are recorded in {self._path}; open them with xprof or ui.perfetto.dev")
