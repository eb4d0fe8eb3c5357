"""Cache the sizes of media by file name and stamp, so that each header is read once for all data sets and runs."""

from __future__ import annotations

import fcntl
import hashlib
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmjax.data.media.decode import Probe
from mmjax.data.sample import SOUND, BadSample
from mmjax.data.storage.files import FileRef, Unreadable
from mmjax.disk import append_json_lines, atomic_write, read_json_lines, remove_path
from mmjax.errors import UserError

# One row for each file: the hashes of its kind and name, and of its stamp with the size, and the
# size. Sorted by the first, so that a lookup in a memory-mapped file reads a few pages.
_ROW = np.dtype([("key", np.uint64), ("stamp", np.uint64), ("size", np.int64, 2)])
_SECONDS = 5.0  # between two writes: the work that a killed run loses
_ROWS = 50_000  # new sizes that are written at once whatever the time


class KnownFiles:
    """A cache of media sizes by file name and stamp: sorted and memory-mapped, and in memory those of this run.

    Sizes are cached whatever the limits, so that other limits need no header read again.

    Its folder has `all.npy`, `found-*.npy` that runs wrote since these were merged, and
    `unreadable.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_write = time.monotonic()
        self._new: dict[tuple[int, int], tuple[int, int]] = {}
        # Sizes of the last write, as neighbouring records often share files; older ones are only on
        # disk.
        self._written: dict[tuple[int, int], tuple[int, int]] = {}
        self._new_bad: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        tables = _rows(folder / "all.npy", "r"), _unique(list(map(_rows, self._shards())))
        # Keys are copied out: searching a field of the rows would copy the whole field each time.
        self._tables = [(np.ascontiguousarray(rows["key"]), rows) for rows in tables if len(rows)]
        self._bad = _read_bad(folder / "unreadable.jsonl")

    def size(self, kind: str, stored: FileRef, probe: Probe) -> tuple[int, int]:
        """Look a medium's size up, or read it from the header. Raises BadSample."""
        key = hash_to_64_bits(f"{kind} {stored.name}")
        stamp = hash_to_64_bits(stored.stamp())
        if (reason := self._bad.get((key, stamp))) is not None:
            raise BadSample(reason)
        if (size := self._new.get((key, stamp)) or self._written.get((key, stamp))) is not None:
            return size
        # The stamp in a row is sealed with its size: it differs if the file has changed, and if the
        # row is damaged.
        for keys, rows in self._tables:
            row = int(keys.searchsorted(np.uint64(key)))
            if row < len(keys) and keys[row] == key:
                size = tuple(rows[row]["size"].tolist())
                if rows[row]["stamp"] == _seal(stamp, size):
                    return size
        try:
            size = _read_header(stored, kind, probe)
        except Unreadable:
            raise
        except BadSample as error:
            self._new_bad.append({"key": key, "stamp": stamp, "reason": str(error)})
            raise
        self._new[key, stamp] = size
        return size

    def write_some(self) -> None:
        """Write new sizes if there are many or the last write is long ago."""
        if len(self._new) >= _ROWS or time.monotonic() - self._last_write > _SECONDS:
            self.write()

    def write(self) -> None:
        """Write all sizes read since the last write."""
        if self._new:
            self._written = self._new
            self._new = {}
            rows = [(key, _seal(stamp, size), size) for (key, stamp), size in self._written.items()]
            _write_rows(self._folder / f"found-{uuid.uuid4().hex}.npy", np.array(rows, _ROW))
        if self._new_bad:
            append_json_lines(self._folder / "unreadable.jsonl", self._new_bad)
            self._new_bad = []
        self._last_write = time.monotonic()

    def merge(self) -> None:
        """Merge all files into one; one process at a time."""
        with (self._folder / "lock").open("w") as lock:
            # Released when the file is closed, also by the end of the process.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shards := self._shards()):
                return
            merged = self._folder / "all.npy"
            rows = _unique([_rows(merged), *map(_rows, shards)])
            if merged.is_dir():
                remove_path(merged)
            _write_rows(merged, rows)
            for shard in shards:
                remove_path(shard)

    def _shards(self) -> list[Path]:
        return sorted(self._folder.glob("found-*.npy"), key=lambda path: path.stat().st_mtime_ns)


def _unique(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Join rows, sort them by key and keep the last of each key."""
    # Reversed, since np.unique returns the first index of each key.
    joined = np.concatenate([np.empty(0, _ROW), *rows])[::-1]
    return joined[np.unique(joined["key"], return_index=True)[1]]


def _rows(path: Path, mode: Literal["r"] | None = None) -> np.ndarray:
    """Load the rows of one file; none where it is missing or damaged, so that those headers are read again."""
    try:
        rows = np.load(path, mmap_mode=mode)
    except Exception:  # NumPy's parser raises nearly anything on a damaged file
        return np.empty(0, _ROW)
    return rows if rows.dtype == _ROW and rows.ndim == 1 else np.empty(0, _ROW)


def _write_rows(path: Path, rows: np.ndarray) -> None:
    # given a name, NumPy would append .npy to it
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.save(file, rows)


def _seal(stamp: int, size: tuple[int, int]) -> int:
    """Hash the stamp with the size, so that a row whose size storage has changed matches no file."""
    return hash_to_64_bits(f"{stamp} {size[0]} {size[1]}")


def _read_bad(path: Path) -> dict[tuple[int, int], str]:
    """Read the bad files' reasons; a line that a killed run left unfinished is skipped."""
    reasons = {}
    for record in read_json_lines(path):
        with suppress(KeyError, TypeError):
            reasons[record["key"], record["stamp"]] = str(record["reason"])
    return reasons


def hash_to_64_bits(text: str) -> int:
    # 64 bits: a wrong size needs a collision of the name's hash and of the stamp's at once.
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


def describe_fault(error: Exception) -> str:
    """Describe in one line why a decoder refuses a file."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _read_header(stored: FileRef, kind: str, probe: Probe) -> tuple[int, int]:
    with stored.open() as file:
        try:
            first, second = probe(file)
        except (Unreadable, UserError):
            raise
        except Exception as error:  # decoders raise nearly anything on hostile bytes
            text = describe_fault(error)
            # an I/O error; decoders set no errno
            if isinstance(error, OSError) and error.errno is not None:
                raise Unreadable(f"{stored.name} cannot be read: {text}") from None
            raise BadSample(f"{stored.name} is a bad {kind} file: {text}") from None
    if (first <= 0 and kind != SOUND) or second <= 0:
        raise BadSample(f"{stored.name} is an empty {kind}: {first} x {second}")
    return int(first), int(second)
