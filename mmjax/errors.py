"""Report mistakes in a user's input in one line, handle Ctrl-C, and end commands with their exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
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
        with heed_interrupts():
            main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def heed_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first Ctrl-C, wherever it arrives, and for no other while that one is heeded.

    Python cannot raise out of a destructor or a callback of the garbage collector (JAX has one): a Ctrl-C that arrives
    there is printed as ignored, and the command would go on. It is sent once more then. Further ones would end what
    the first has begun to tidy up.
    """
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler or getattr(before, "__module__", "") == "mmjax.startup"
    if threading.current_thread() is not threading.main_thread() or not ours:
        yield  # somebody else decides: a notebook, a caller that does this already, or a shell's background
        return
    raised, hook = False, sys.unraisablehook

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            end = f"kill -KILL {os.getpid()} ends it at once"
            print(f"interrupted already: tidying up ({end})", file=sys.stderr, flush=True)
            return
        raised = True
        raise KeyboardInterrupt

    def unraisable(dropped: sys.UnraisableHookArgs) -> None:
        nonlocal raised
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            hook(dropped)
            return
        raised = False
        # A real signal: `_thread.interrupt_main` does not wake a main thread that waits for something.
        again = partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
        threading.Timer(0.05, again).start()

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        if sys.unraisablehook is unraisable:  # else another was put before it meanwhile, and stays
            sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)


def leave(code: int) -> NoReturn:
    """End the process with `code`: as Python does, but for taking its interpreter down.

    That can end in an abort and code 134, also after work that is done: threads of libraries (XLA's, TensorStore's) may
    wait in native code for an interpreter that is gone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is leaving
    threading._shutdown()  # the threads that Python waits for, and what ends with them
    if code:
        gc.collect()  # what the frames of an error held: memory shared with workers
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
