"""What a person, or the cluster, asks of a running process: to stop in order, or to record what it does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def heeded() -> Iterator[Asked]:
    """Heed signals inside; in a thread other than the main one, where Python cannot, nothing is asked."""
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, asked.heed) for number in (*STOP, TRACE)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
