"""Restart a training that fails: ``python -m mmjax.supervise [--most N] [--wait SECONDS] -- COMMAND ...``.

The command must resume by itself, as ``python -m mmjax.train --resume=auto`` does. It is not
restarted after exit code 0, after a signal that was passed on to it, or when restarts no longer
bring it to a newer checkpoint.
"""

from __future__ import annotations

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

from mmjax.disk import PROGRESS
from mmjax.errors import UserError, command_parser, exit_process, run_command

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PASSED_ON = (*STOPPING, signal.SIGUSR2)
BAD_INPUT = 2  # exit codes
INTERRUPTED = 130
_POLL_SECONDS = 0.1


class Command:
    """A command to run once or more often, which gets the signals that this process gets."""

    def __init__(self, words: Sequence[str], progress: Path) -> None:
        self.words = list(words)
        self.progress = progress
        self.stopped = False  # by a signal: it is not to be started again
        self.process: subprocess.Popen[bytes] | None = None
        for number in PASSED_ON:
            # as nohup has it, or a shell's background
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def run(self) -> int:
        """Start it, wait for its end, and return its exit code, 128 + n where signal n killed it."""
        # While signals are blocked none can arrive between the check of `stopped` and the start of
        # the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            if self.stopped:
                return INTERRUPTED
            self.process = subprocess.Popen(
                self.words,
                env=os.environ | {PROGRESS: str(self.progress)},
                # it could not read a terminal that it is not in the foreground of
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # else a terminal's Ctrl-C would reach it twice
                preexec_fn=_prepare(os.getpid()),
            )
        except OSError as error:
            raise UserError(
                f"cannot start {self.words[0]}: {error.strerror}; give a command that runs"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = self.process.wait()
        return code if code >= 0 else 128 - code

    def saved(self) -> int:
        """Read the step of its newest checkpoint from the progress file; 0 if it has written none."""
        try:
            return int(self.progress.read_text())
        except (OSError, ValueError):
            return 0

    def sleep(self, seconds: float) -> None:
        """Wait, but no longer than until a signal stops the command."""
        deadline = time.monotonic() + seconds
        while not self.stopped and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped |= number in STOPPING
        if self.process is not None:
            self.process.send_signal(number)  # to it alone: it stops its data workers by itself


def _prepare(parent: int) -> Callable[[], None]:
    """Make the child's setup: default signal handling, and on Linux a SIGTERM when its parent dies.

    Remove `prctl` when `subprocess` can end a child with its parent.
    """
    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(set_death_signal, int(signal.SIGTERM))
            if os.getppid() != parent:  # it died before prctl
                os._exit(128 + signal.SIGTERM)
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                # Python's own would be lost when the command begins
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    return prepare


def supervise(command: Command, max_idle: int, wait: float) -> int:
    """Run a command until it is done or stopped, or until `max_idle` restarts in a row saved no newer checkpoint.

    Returns its last exit code. wait: seconds before each restart.
    """
    start = 1
    idle = 0  # restarts in a row without a newer checkpoint
    best = 0  # the newest checkpoint's step
    while True:
        _log(
            f"start {start}: {' '.join(command.words)}"
            if start == 1
            else f"start {start}, {_progress(best)}"
        )
        code = command.run()
        saved = command.saved()
        ended = f"start {start} ended with code {code}{_signal_name(code)}, {_progress(saved)}"
        if start > 1:
            idle = 0 if saved > best else idle + 1
        best = max(best, saved)
        if reason := _reason_to_end(command, code, start, saved):
            _log(f"{ended}; {reason}")
            return code
        if idle >= max_idle:
            _log(f"{ended}; giving up: {max_idle} restarts in a row without a newer checkpoint")
            return code
        _log(f"{ended}; restart in {wait:g} s")
        command.sleep(wait)
        if command.stopped:
            _log("stopped by a signal, no restart")
            return code
        start += 1


def _reason_to_end(command: Command, code: int, start: int, saved: int) -> str:
    """Explain why the command is not to be restarted; empty where it is."""
    if code == 0:
        return "done"
    if command.stopped or code == INTERRUPTED:
        return "stopped by a signal, no restart"
    # Bad input of the first start is a mistake in the command. Later it may be a node's: a disk
    # that is full, say.
    if code == BAD_INPUT and start == 1 and not saved:
        return "a restart would not mend it"
    return ""


def _signal_name(code: int) -> str:
    try:
        return f" ({signal.Signals(code - 128).name})"
    except ValueError:
        return ""


def _progress(saved: int) -> str:
    return f"{saved} steps saved" if saved else "nothing saved"


def _log(line: str) -> None:
    print(f"supervise: {time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _check_command(words: Sequence[str]) -> None:
    """Raises UserError where there is no command, or one that would not resume after a restart."""
    if not words:
        raise UserError(
            "no command to run; say python -m mmjax.supervise -- python -m mmjax.train --resume=auto ..."
        )
    trains = any(word == "mmjax.train" or word.endswith("local.sh") for word in words)
    trains |= any(
        Path(word).name == "mmjax" and command == "train" for word, command in pairwise(words)
    )
    if trains and "--resume=auto" not in words:
        raise UserError(
            f"{' '.join(words)}: a restart would not go on with this run; add --resume=auto to the command"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    end_of_options = argv.index("--") if "--" in argv else len(argv)
    parser = command_parser(
        "supervise", __doc__, usage="%(prog)s [--most N] [--wait SECONDS] -- COMMAND ..."
    )
    parser.add_argument(
        "--most", type=int, default=3, metavar="N", help="restarts in a row without progress (3)"
    )
    parser.add_argument(
        "--wait", type=float, default=10, metavar="SECONDS", help="before each restart (10)"
    )
    args, misplaced = parser.parse_known_args(argv[:end_of_options])
    if misplaced:
        raise UserError(
            f"{misplaced[0]} is no option; put -- before the command: python -m mmjax.supervise -- COMMAND"
        )
    if args.most < 0 or not args.wait >= 0:
        raise UserError(f"--most {args.most} --wait {args.wait:g}: choose 0 or more for both")
    words = argv[end_of_options + 1 :]
    _check_command(words)
    with tempfile.TemporaryDirectory(prefix="mmjax-") as folder:
        code = supervise(Command(words, Path(folder) / "progress"), args.most, args.wait)
    sys.exit(code)


if __name__ == "__main__":
    exit_process(run_command(main))
