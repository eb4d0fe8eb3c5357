"""Report a user's mistakes in one line, check output files before any work, and end commands with their exit codes."""

from __future__ import annotations

import argparse
import atexit
import gc
import logging
import multiprocessing.util
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# characters of a very long message that are shown: the place, and the remedy
MESSAGE_BEGIN, MESSAGE_END = 800, 350


def bounded_line(text: object) -> str:
    """Return a message as one line: what is not printable is escaped, and the middle of a very long one left out.

    Messages quote what users and strangers wrote: paths, keys and values of any length, with line
    breaks and with what a terminal obeys.
    """
    line = str(text)
    if len(line) > MESSAGE_BEGIN + MESSAGE_END:
        omitted = len(line) - MESSAGE_BEGIN - MESSAGE_END
        line = f"{line[:MESSAGE_BEGIN]} [{omitted:,} characters] {line[-MESSAGE_END:]}"
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class UserError(Exception):
    """A mistake in the user's input: one line that says what is wrong, where, and how to fix it.

    everywhere: every process of the run raises it, so that only one of them needs to print it.
    """

    code = 2  # with which the command ends

    def __init__(self, message: str, everywhere: bool = False) -> None:
        super().__init__(bounded_line(message))
        self.everywhere = everywhere


class NotConnected(UserError):
    """Processes that did not reach each other in time: another start may go well, as `mmjax.supervise` tries."""

    code = 1


class CommandParser(argparse.ArgumentParser):
    """Parser of a command's line, whose faults are one line each."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (all arguments: {self.prog} --help)")


def command_parser(command: str, description: str | None, **options: Any) -> CommandParser:
    """Make the parser of `python -m mmjax.<command>`. options: others that `ArgumentParser` takes."""
    prog = f"python -m mmjax.{command}"
    return CommandParser(prog=prog, description=description, allow_abbrev=False, **options)


class StoppedBySignal(BaseException):
    """A request to end, raised where there is nothing to save: the command ends with code 0."""


class BadMedia(ValueError):
    """An image or a clip that cannot be used: one plain reason, without the name of the sample."""

    def __init__(self, reason: object) -> None:
        super().__init__(bounded_line(reason))


THREADS_PER_DEVICE = 4


def set_cpu_threads() -> None:
    """Let XLA have threads for the collectives of all of a process's CPU devices; before JAX starts.

    A collective holds a thread until all devices have come. XLA has as many threads as cores, and
    where devices do two collectives in another order, too few of them wait for each other for good.
    NPROC is what it reads, undocumented: to go when XLA's collectives on CPUs hold no threads.
    """
    devices = os.environ.get("JAX_NUM_CPU_DEVICES", "1")
    if devices.isdigit() and int(devices) > 1:
        os.environ.setdefault(
            "NPROC", str(max(os.cpu_count() or 1, THREADS_PER_DEVICE * int(devices)))
        )


# that a process must be able to open: a save of a small model opens dozens beside those of
# libraries
LEAST_FILES = 256
MAX_FILES = 65536  # that it asks for


def raise_file_limit() -> None:
    """Let this process open as many files as it may: shells often grant fewer by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def check_file_limit() -> None:
    """Raise UserError where this process may not open as many files as saving and loading need."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        raise UserError(
            f"this process may open {soft} files at once, and needs {LEAST_FILES}; allow more with ulimit -n 65536, in "
            "a container with docker run --ulimit nofile=65536"
        )


@contextmanager
def explain_runtime_errors() -> Iterator[None]:
    """Raise UserError with what to do where JAX raises in the body that memory or the time to connect is exhausted."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        line = " ".join(text.split("\n")[0].split())[:200]
        if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in text:
            raise UserError(f"a device is out of memory ({line}); {LESS_MEMORY}") from error
        if (
            type(error).__name__ == "JaxRuntimeError"
            and "Gloo context initialization failed" in text
        ):
            raise NotConnected(
                f"the processes did not reach each other in the time that XLA gives them ({line}); see that the hosts "
                "are not busy with other programs and that MMJAX_COORDINATOR is in a network of all of them, and start "
                "again with --resume"
            ) from error
        raise


LESS_MEMORY = (
    "lower batch.rows or batch.size, leave out the longest samples or cut the prompt, compute attention by blocks "
    "(model.llm.attention=blockwise), recompute more (model.llm.remat=full), or share parameters (mesh.fsdp); "
    "python -m mmjax.plan says what fits"
)


def run_command(main: Callable[[], int | None]) -> int:
    """Run a command and return its exit code: 0, or what it returns; 2 for bad input (one line on stderr), 130 for ^C.

    0 also where a signal has stopped it before there was anything to save. Any other exception is a
    bug in mmjax and keeps its traceback.
    """
    set_cpu_threads()
    raise_file_limit()
    silence_storage()
    try:
        with raise_ctrl_c_once(), explain_runtime_errors():
            return main() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except StoppedBySignal:
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


# TensorStore's errors begin with a status code: "OUT_OF_RANGE: Error writing ..".
_STATUS = re.compile(r"[A-Z]+(_[A-Z]+)*: ")


@cache
def silence_storage() -> None:
    """Print nothing of what Orbax and TensorStore warn of, and of their reads and writes that fail late.

    Every save would be a warning; the command prints one line of its own. Where one array of many
    cannot be read or written, Orbax gives up and closes its event loop (0.12.8). The others end
    later in threads of TensorStore, some after the command has printed its error, and each would
    print a traceback: a hundred for a model of the tests. Only in a command's process, and to its
    end: libraries leave hooks alone. Remove when Orbax awaits them all.
    """
    previous_hook = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        # Writes that finish after Orbax has closed its event loop.
        closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (closed or (isinstance(error, Exception) and _from_storage(error))):
            previous_hook(unraisable)

    def allow(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        late = error is not None and "was never retrieved" in record.getMessage()
        return not (late and _from_storage(error))

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(allow)
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def _from_storage(error: BaseException) -> bool:
    """Return whether an error was raised by Orbax, or by TensorStore, whose errors have no traceback."""
    if error.__traceback__ is None:
        return bool(_STATUS.match(str(error)))
    modules = (
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return any(name.startswith("orbax.") for name in modules)


@contextmanager
def raise_ctrl_c_once() -> Iterator[None]:
    """Raise KeyboardInterrupt for the first Ctrl-C, wherever it arrives, and ignore further ones during the clean-up.

    Python cannot raise out of a destructor or a callback of the garbage collector (JAX has one): a
    KeyboardInterrupt raised there is printed as ignored, and the command would go on. The signal is
    then sent again. Remove that hook when Python raises such a KeyboardInterrupt in the main
    thread.
    """
    previous = signal.getsignal(signal.SIGINT)
    replaceable = (
        previous is signal.default_int_handler
        or getattr(previous, "__module__", "") == "mmjax.startup"
    )
    if threading.current_thread() is not threading.main_thread() or not replaceable:
        # somebody else handles it: a notebook, a caller that did this already, or a shell's
        # background job
        yield
        return
    raised = False
    hook = sys.unraisablehook

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if raised:
            end = f"kill -KILL {os.getpid()} ends it at once"
            print(f"interrupted already: tidying up ({end})", file=sys.stderr, flush=True)
            return
        raised = True
        raise KeyboardInterrupt

    def unraisable(ignored: sys.UnraisableHookArgs) -> None:
        nonlocal raised
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            hook(ignored)
            return
        raised = False
        # A real signal: `_thread.interrupt_main` does not wake a main thread that is waiting.
        resend = partial(signal.pthread_kill, threading.main_thread().ident, signal.SIGINT)
        threading.Timer(0.05, resend).start()

    signal.signal(signal.SIGINT, interrupt)
    sys.unraisablehook = unraisable
    try:
        yield
    finally:
        # else another hook was installed over it meanwhile, and stays
        if sys.unraisablehook is unraisable:
            sys.unraisablehook = hook
        signal.signal(signal.SIGINT, previous)


def exit_at_once(code: int) -> NoReturn:
    """Exit the process from any thread without waiting for others, nor for data workers, which are killed.

    What `multiprocessing` would free at an orderly exit is freed, or Python would call it leaked.
    It has no public name for that. Remove when it frees it by itself.
    """

    def end_workers() -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
        multiprocessing.util._exit_function()

    ending = threading.Thread(target=end_workers, daemon=True)
    ending.start()
    ending.join(2)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_process(code: int) -> NoReturn:
    """Exit the process with `code` as Python does, but without finalising the interpreter.

    Finalising can end in an abort and code 134 after all work is done: threads of libraries (XLA's,
    TensorStore's) may wait in native code for an interpreter that is gone. Python has no public
    name for the two steps of finalising that are wanted, `threading._shutdown` and
    `atexit._run_exitfuncs`. Remove, for `sys.exit`, when Python 3.14 is the oldest supported: there
    such threads hang until the process is gone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading._shutdown()  # joins non-daemon threads and runs their exit hooks, as finalising would
    if code:
        gc.collect()  # frees memory shared with workers that frames of an error still refer to
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


PLOT_SUFFIXES = (".png", ".svg")


def check_output(option: str, path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise UserError where the file of an option cannot be written, or has none of these suffixes."""
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{option} {path}: name a file that ends in {' or '.join(suffixes)}")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option} {path}: name a file in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{option} {path}: permission denied; name a file that you may write")
