"""Restart a training that fails: ``python -m mmjax.supervise [--most N] [--wait SECONDS] -- COMMAND ...``.

The command must go on by itself where it was, as ``python -m mmjax.train --resume=auto`` does. It ends for good with
code 0, with a signal that was passed on to it, or when restarts no longer bring it to a newer checkpoint.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType

from mmjax.errors import UserError, leave, run_command

PROGRESS = "MMJAX_PROGRESS"  # the environment variable that names the file with the number of steps saved
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PASSED_ON = (*STOPPING, signal.SIGUSR2)
BAD_INPUT, INTERRUPTED = 2, 130
_LOOK_SECONDS = 0.1


class Command:
    """A command that is started again and again, and gets the signals that this process gets."""

    def __init__(self, words: Sequence[str], progress: Path) -> None:
        self.words = list(words)
        self.progress = progress
        self.stopped = False  # by a signal: it is not to be started again
        self.process: subprocess.Popen[bytes] | None = None
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it, or a shell's background
                signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Start it, wait for its end, and return its exit code, 128 + n where signal n killed it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # a signal finds a process, or prevents one
        try:
            if self.stopped:
                return INTERRUPTED
            self.process = subprocess.Popen(
                self.words,
                env=os.environ | {PROGRESS: str(self.progress)},
                stdin=subprocess.DEVNULL,  # it could not read a terminal that it is not in the foreground of
                start_new_session=True,  # else a terminal's Ctrl-C would reach it twice
                preexec_fn=_prepare(os.getpid()),
            )
        except OSError as error:
            raise UserError(f"cannot start {self.words[0]}: {error.strerror}; give a command that runs") from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def saved(self) -> int:
        """Return the steps of its newest checkpoint, as it has said; 0 if it said nothing."""
        try:
            return int(self.progress.read_text())
        except (OSError, ValueError):
            return 0

    def rest(self, seconds: float) -> None:
        """Wait, but no longer than until a signal comes."""
        until = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped |= number in STOPPING
        if self.process is not None:
            self.process.send_signal(number)  # to it alone: its own workers are its own business


def _prepare(parent: int) -> Callable[[], None]:
    """Prepare the new process: heed signals, and end with its parent, where the system can see to that."""
    set_death_signal = 1  # PR_SET_PDEATHSIG of Linux's prctl
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(set_death_signal, int(signal.SIGTERM))
            if os.getppid() != parent:
                os._exit(128 + signal.SIGTERM)
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)  # Python's own would be lost when the command begins
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    return prepare


def supervise(command: Command, most: int, wait: float) -> int:
    """Run a command until it is done, stopped or hopeless, and return its last exit code."""
    start, idle, best = 1, 0, 0  # idle: restarts in a row that finished no newer checkpoint
    while True:
        _say(f"start {start}: {' '.join(command.words)}" if start == 1 else f"start {start}, {_steps(best)}")
        code, saved = command.run(), command.saved()
        ended = f"start {start} ended with code {code}{_named(code)}, {_steps(saved)}"
        if start > 1:
            idle = 0 if saved > best else idle + 1
        best = max(best, saved)
        if over := _why_over(command, code, start, saved):
            _say(f"{ended}; {over}")
            return code
        if idle >= most:
            _say(f"{ended}; giving up: {most} restarts in a row without a newer checkpoint")
            return code
        _say(f"{ended}; restart in {wait:g} s")
        command.rest(wait)
        if command.stopped:
            _say("stopped by a signal, no restart")
            return code
        start += 1


def _why_over(command: Command, code: int, start: int, saved: int) -> str:
    """Return why there is nothing to restart, if so."""
    if code == 0:
        return "done"
    if command.stopped or code == INTERRUPTED:
        return "stopped by a signal, no restart"
    if code == BAD_INPUT and start == 1 and not saved:
        return "a restart would not mend it"
    return ""


def _named(code: int) -> str:
    try:
        return f" ({signal.Signals(code - 128).name})"
    except ValueError:
        return ""


def _steps(saved: int) -> str:
    return f"{saved} steps saved" if saved else "nothing saved"


def _say(line: str) -> None:
    print(f"supervise: {time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _check(words: Sequence[str]) -> None:
    """Raises UserError where there is no command, or one that would not go on after a restart."""
    if not words:
        raise UserError("no command to run; say python -m mmjax.supervise -- python -m mmjax.train --resume=auto ...")
    trains = any(word == "mmjax.train" or word.endswith("local.sh") for word in words)
    trains |= any(Path(word).name == "mmjax" and after == "train" for word, after in pairwise(words))
    if trains and "--resume=auto" not in words:
        raise UserError(f"{' '.join(words)}: a restart would not go on with this run; add --resume=auto to the command")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    given = list(sys.argv[1:] if argv is None else argv)
    own = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m mmjax.supervise",
        usage="%(prog)s [--most N] [--wait SECONDS] -- COMMAND ...",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument("--most", type=int, default=3, metavar="N", help="restarts in a row without progress (3)")
    parser.add_argument("--wait", type=float, default=10, metavar="SECONDS", help="before each restart (10)")
    args = parser.parse_args(given[:own])
    words = given[own + 1 :]
    _check(words)
    with tempfile.TemporaryDirectory(prefix="mmjax-") as folder:
        code = supervise(Command(words, Path(folder) / "progress"), args.most, args.wait)
    sys.exit(code)


if __name__ == "__main__":
    leave(run_command(main))
