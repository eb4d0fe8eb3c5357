"""Lock a run's folder, so that one training at a time writes in it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmjax.errors import UserError


@contextmanager
def run_lock_held(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder; the system releases it however the process ends.

    The lock is a file beside the folder, since the folder may be moved or deleted meanwhile. Raises UserError where
    another process holds it.
    """
    folder = folder.resolve()
    path = folder.with_name(f".{folder.name}.lock")
    try:
        lock = _hold(path)
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by {_holder(path)}: two trainings cannot write in one run; wait until it has ended, "
            "stop it, or choose another folder with run=FOLDER"
        ) from None
    except OSError:
        # The file system has no locks; or nothing can be written beside the folder; if not in it either, `claim` fails.
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _hold(path: Path) -> int:
    """Open and lock the file, and write into it who holds it. Raises BlockingIOError where another process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # closed in programs that this process executes
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its last holder deleted it between our open and our lock: try again with a new file


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"
