"""Arrays that are kept in a folder: written whole or not at all, believed only while their bytes are as written.

Storage may lose or change some of them without a word, and a length that is wrong would be trained on. So a folder has
a hash of every file, which is looked at once in each process that a person or a launcher has started, at more than a
gigabyte a second; the workers that such a process starts do not look again.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.errors import UserError

SUMS = "sums.json"  # the hash of every file by its name

_sound: set[tuple[tuple[str, int, int, int], ...]] = set()  # folders that were found whole: their files as they were


class Damaged(UserError):
    """A folder that is not as it was written; the message says what of it."""


class Missing(Damaged):
    """Nothing was written yet."""


def keep(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write one file per array and their hashes; what lies in the folder's place is replaced.

    Raises UserError where there is no room, or no right, to write it.
    """
    try:
        _keep(folder, arrays)
    except OSError as error:
        shutil.rmtree(folder.with_name(f"{folder.name}.{os.getpid()}.partial"), ignore_errors=True)
        raise UserError(f"{folder} cannot be written: {error.strerror or error}; make room there") from None


def _keep(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    partial, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{end}") for end in ("partial", "old"))
    remove(partial)
    partial.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(partial / f"{name}.npy", array)
    sums = {name: _sum(partial / f"{name}.npy") for name in arrays}
    (partial / SUMS).write_text(json.dumps(sums) + "\n")
    with suppress(FileNotFoundError):
        folder.rename(old)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        if not folder.exists():
            raise
        remove(partial)
    remove(old)


def kept(folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Memory-map arrays of these names, as they were given to `keep`. Raises Missing and Damaged."""
    if not os.path.lexists(folder):
        raise Missing(f"{folder} is not there")
    return kept_files({name: folder / f"{name}.npy" for name in names}, folder / SUMS)


def kept_files(paths: Mapping[str, Path], sums: Path) -> dict[str, np.ndarray]:
    """The same of a folder's files wherever they have been copied to. Raises Damaged."""
    if multiprocessing.parent_process() is None:
        _check(paths, sums)
    found = {}
    for name, path in paths.items():
        try:
            found[name] = np.load(path, mmap_mode="r")
        except Exception as error:  # of a file that is not whole, NumPy's reader raises what its parser stumbles over
            raise Damaged(f"{path} cannot be read: {type(error).__name__}") from None
    return found


def _check(paths: Mapping[str, Path], sums: Path) -> None:
    """Raises Damaged where a file's bytes are not those that `sums` says. What was found whole is not read again."""
    files = (*paths.values(), sums)
    try:
        state = tuple((str(path), s.st_ino, s.st_size, s.st_mtime_ns) for path in files for s in [path.stat()])
        if state in _sound:
            return
        said = json.loads(sums.read_text())
        wrong = [path for name, path in paths.items() if said[name] != _sum(path)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{sums.parent} is not whole: {type(error).__name__}: {error}") from None
    if wrong:
        raise Damaged(f"{wrong[0]} is not what was written")
    _sound.add(state)


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def note(damage: Damaged) -> None:
    """Say that something is made again; what is made for the first time goes unsaid."""
    if not isinstance(damage, Missing):
        print(f"note   {damage}; it is made again", file=sys.stderr, flush=True)


def sealed(told: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to a JSON object: with a changed letter it might still be valid JSON."""
    return dict(told) | {"sum": _sum_of(told)}


def unsealed(told: Any) -> dict[str, Any]:
    """Verify and remove the checksum of `sealed`. Raises ValueError on a mismatch."""
    if not isinstance(told, dict) or told.get("sum") != _sum_of({k: v for k, v in told.items() if k != "sum"}):
        raise ValueError("it is not what was written")
    return {k: v for k, v in told.items() if k != "sum"}


def _sum_of(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
