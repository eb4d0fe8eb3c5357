"""What a person, or the cluster, asks of a running process: to stop in order, or to record what it does."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from mmjax.training.console import note

STOP = (signal.SIGTERM, signal.SIGUSR1)
TRACE = signal.SIGUSR2


class Asked:
    """What was asked so far."""

    def __init__(self) -> None:
        self.stop = ""  # the signal that asked for it
        self.trace = False

    def heed(self, number: int, frame: FrameType | None) -> None:
        """A handler: says what will be done, which the loop does."""
        del frame
        name = signal.Signals(number).name
        if number == TRACE:
            self.trace = True
            note(f"{name}: the next steps are recorded")
        else:
            self.stop = self.stop or name
            note(f"{name}: saving after this step, then ending")


def heed() -> Asked:
    """From now on what this process is asked for by signals, which end it no more: it ends by itself."""
    asked = Asked()
    if threading.current_thread() is threading.main_thread():  # no other can
        for number in (*STOP, TRACE):
            signal.signal(number, asked.heed)
    return asked
