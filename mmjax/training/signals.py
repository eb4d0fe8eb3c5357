"""Record a profiler trace of a few steps on request."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType

import jax

from mmjax.console import print_note

STOP = (signal.SIGTERM, signal.SIGUSR1)
TRACE = signal.SIGUSR2


class StopFlags:
    """Requests by signals so far."""

    def __init__(self) -> None:
        self.stop = ""  # name of the signal that requested it
        self.trace = False

    def heed(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: set the flag that the loop reads, and print what will happen."""
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
            signal.signal(number, flags.heed)
    return flags


STEPS = 3


class ProfilerTrace:
    """Records what this process's devices do in the steps after a request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._until: int | None = None

    def before(self, step: int, requested: bool) -> bool:
        """Start or stop recording before step `step`; return whether a recording was started."""
        if self._until is not None and step >= self._until:
            self.close()
        if not requested or self._until is not None:
            return False
        self._until = step + STEPS
        self._path = self._folder / f"step-{step + 1}"
        jax.profiler.start_trace(str(self._path))
        return True

    def close(self) -> None:
        """Stop recording, if one is under way."""
        if self._until is None:
            return
        self._until = None
        jax.profiler.stop_trace()
        print_note(f"{STEPS} steps are recorded in {self._path}; open them with xprof or ui.perfetto.dev")
