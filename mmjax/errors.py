"""What a person is told when their input cannot work, and how a command ends."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """A mistake in what the user gave: one line that says what is wrong, where, and what to do.

    everywhere: every process of the run raises the same, so that one of them need say it.
    """

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere


class BadMedia(ValueError):
    """An image or a clip that cannot be used: one plain reason, without the name of what it belongs to."""


def run_command(main: Callable[[], None]) -> int:
    """Run a command and return its exit code: 0, 2 for bad input (one line on stderr), 130 when interrupted.

    Any other exception is a fault of mmjax's own and keeps its traceback.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def leave(code: int) -> NoReturn:
    """End the process with `code`: as Python does, but for taking its interpreter down.

    That can end in an abort and code 134, also after work that is done: threads of libraries (XLA's, TensorStore's) may
    wait in native code for an interpreter that is gone.
    """
    threading._shutdown()  # the threads that Python waits for, and what ends with them
    if code:
        gc.collect()  # what the frames of an error held: memory shared with workers
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
