"""Save arrays in a folder atomically, and verify their checksums when opening them.

Storage may silently lose or change bytes, and a wrong length would be trained on. So a folder has a
hash of every file, verified once in each process that a person or a launcher has started, at more
than a gigabyte a second; worker processes do not verify again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from mmjax.disk import atomic_folder
from mmjax.errors import UserError

CHECKSUMS = "sums.json"  # {name of an array: SHA-256 of its file}

# path, inode, size and mtime_ns of each file of a folder
_verified: set[tuple[tuple[str, int, int, int], ...]] = set()


class Damaged(UserError):
    """A folder that is not as it was written."""


class Missing(Damaged):
    """A folder that was not written yet."""


def save_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write one file per array and their hashes, replacing the folder. Raises UserError where it can't be written."""
    try:
        with atomic_folder(folder) as partial:
            for name, array in arrays.items():
                np.save(partial / f"{name}.npy", array)
            (partial / CHECKSUMS).write_text(
                json.dumps({name: _sha256(partial / f"{name}.npy") for name in arrays}) + "\n"
            )
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {error.strerror or error}; make room there, or make it writable"
        ) from None


def open_arrays(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Memory-map arrays of these names that `save_arrays` saved. Raises Missing and Damaged."""
    if not os.path.lexists(folder):
        raise Missing(f"{folder} is not there")
    return open_array_files({name: folder / f"{name}.npy" for name in names}, folder / CHECKSUMS)


def open_arrays_if_sound(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray] | None:
    """Memory-map saved arrays; None where they are missing, or damaged, which is printed."""
    try:
        return open_arrays(folder, names)
    except Damaged as damage:
        print_recomputation(damage)
        return None


def open_array_files(paths: Mapping[str, Path], checksums: Path) -> dict[str, np.ndarray]:
    """Memory-map a saved folder's files wherever they have been copied to. Raises Damaged."""
    if multiprocessing.parent_process() is None:  # the parent of a worker has verified them
        _verify(paths, checksums)
    arrays = {}
    for name, path in paths.items():
        try:
            arrays[name] = np.load(path, mmap_mode="r")
        # NumPy's parser raises nearly anything on a damaged file.
        except Exception as error:
            raise Damaged(f"{path} cannot be read: {type(error).__name__}") from None
    return arrays


def _verify(paths: Mapping[str, Path], checksums: Path) -> None:
    """Raise Damaged where a file does not have its hash. Files that did not change since are not read again."""
    files = (*paths.values(), checksums)
    try:
        # Inode, size and time change whenever a file is replaced or written, so a process verifies
        # each state once.
        state = tuple(
            (str(path), s.st_ino, s.st_size, s.st_mtime_ns)
            for path in files
            for s in [_status(path)]
        )
        if state in _verified:
            return
        expected = json.loads(checksums.read_text())
        wrong = [path for name, path in paths.items() if expected[name] != _sha256(path)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{checksums.parent} is not whole: {type(error).__name__}: {error}") from None
    if wrong:
        raise Damaged(f"{wrong[0]} is not what was written")
    _verified.add(state)


def print_recomputation(damage: Damaged) -> None:
    """Print that something is computed again because its cache is damaged; nothing for the first time."""
    if not isinstance(damage, Missing):
        print(f"note   {damage}; it is made again", file=sys.stderr, flush=True)


def _status(path: Path) -> os.stat_result:
    """Return the status of a regular file: a device could be read for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is no regular file")
    return status


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
