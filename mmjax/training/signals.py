"""Handle signals to a running process: stop cleanly, or record a profiler trace."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from mmjax.training.console import print_note

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
