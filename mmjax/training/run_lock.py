"""One training at a time in a run's folder."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmjax.errors import UserError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run's folder for this process; the system lets go of it however the process ends.

    The lock is a file beside the folder, which may be moved or deleted meanwhile. Raises UserError where another
    process holds it.
    """
    folder = folder.resolve()
    path = folder.with_name(f".{folder.name}.lock")
    try:
        held = _hold(path)
    except BlockingIOError:
        raise UserError(
            f"{folder} is in use by {_holder(path)}: two trainings cannot write in one run; wait until it has ended, "
            "stop it, or choose another folder with run=FOLDER"
        ) from None
    except OSError:  # no locks here, or nothing can be written beside the folder; if in it neither, claiming it says so
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(held)


def _hold(path: Path) -> int:
    """The open and locked file at the path, which says who holds it. Raises BlockingIOError where another does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # closed in processes that this one executes
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                os.ftruncate(file, 0)
                os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its holder has just deleted it


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
