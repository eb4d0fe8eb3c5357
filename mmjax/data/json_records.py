"""Records of JSON files, one line each or as one big array, found by where they start: none is held in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np

from mmjax.data.conversation import BadSample
from mmjax.data.kept import Damaged, keep, kept, note
from mmjax.data.stored import digest, local_copy
from mmjax.errors import UserError

_VERSION = "4"
_NAMES = ("starts", "spans", "content")
_CHUNK = 1 << 24


class JsonRecords:
    """The records of several files, one file after the other.

    Where each record starts and stops is kept under `cache`, by the file's path, size and time of change. Files are
    opened to be read and closed again: there may be thousands. Raises UserError for one that is no JSON array and no
    JSON lines.
    """

    def __init__(self, paths: Sequence[str], cache: Path) -> None:
        self._names = paths
        self._paths, folders = zip(*(_indexed_file(path, cache) for path in paths), strict=True)
        folder = folders[0] if len(folders) == 1 else _together(folders, cache)
        found = kept(folder, _NAMES)
        self._starts, self._spans, self._content = found["starts"], found["spans"], str(found["content"])

    def __len__(self) -> int:
        return len(self._spans)

    def fingerprint(self) -> str:
        """Return the hash of all bytes of all files."""
        return self._content

    def files(self) -> list[tuple[str, int]]:
        """List the files with the number of records in each."""
        return list(zip(self._names, np.diff(self._starts).tolist(), strict=True))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one record. Raises BadSample where it is no JSON object."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        start, stop = self._spans[index].tolist()
        try:
            with open(self._paths[int(self._starts.searchsorted(index, side="right")) - 1], "rb", 0) as file:
                record = json.loads(os.pread(file.fileno(), stop - start, start), object_pairs_hook=_unique_keys)
        except OSError as error:
            raise BadSample(f"cannot be read: {error}") from None
        except (ValueError, RecursionError) as error:
            raise BadSample(f"is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise BadSample(f"is a JSON {type(record).__name__}, not an object")
        return record


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its members. Raises BadSample where a key comes twice: either value may be meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadSample(f"has the key {twice!r} twice; keep the value that is meant")
    return found


def _indexed_file(path: str, cache: Path) -> tuple[Path, Path]:
    """Return a local copy of the file, and the folder with the positions of its records."""
    try:
        local = local_copy(path, cache / "copies")
        found = local.stat()
        folder = (
            cache / f"records-{digest(str(local.absolute()), str(found.st_size), str(found.st_mtime_ns), _VERSION)}"
        )
        if not _is_kept(folder):
            spans, content = _indexed(path, local)
            _write(folder, np.array([0, len(spans)]), spans, content)
    except (OSError, BadSample) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return local, folder


def _together(folders: Sequence[Path], cache: Path) -> Path:
    """Join several folders into one, since each memory-mapped array holds a file open."""
    joined = cache / f"records-{digest(*(folder.name for folder in folders))}"
    if not _is_kept(joined):
        found = [kept(folder, _NAMES) for folder in folders]
        spans, content = [of["spans"] for of in found], digest(*(str(of["content"]) for of in found))
        _write(joined, np.cumsum([0, *map(len, spans)]), np.concatenate(spans), content)
    return joined


def _is_kept(folder: Path) -> bool:
    try:
        kept(folder, _NAMES)
    except Damaged as damage:
        note(damage)
        return False
    return True


def _write(folder: Path, starts: np.ndarray, spans: np.ndarray, content: str) -> None:
    """Keep where records are.

    starts: first record of each file `[files + 1]`; spans: where each starts and stops in its file `[n, 2]`; content: a
    hash of the files' bytes.
    """
    keep(folder, {"starts": starts, "spans": spans, "content": np.array(content)})


def _indexed(path: str, local: Path) -> tuple[np.ndarray, str]:
    """Find where each record starts and stops, int64 `[n, 2]`, and hash the file. Raises UserError."""
    with local.open("rb") as file:
        content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if not local.stat().st_size:
        return np.empty((0, 2), np.int64), content
    data = np.memmap(local, np.uint8, "r")
    head = bytes(data[:_CHUNK])
    if head[:2] == b"\x1f\x8b" or head[:4] == b"(\xb5/\xfd" or head[:2] == b"PK":
        raise UserError(f"{path} is compressed, so no record of it can be found alone; unpack it")
    mark = 3 if head.startswith(b"\xef\xbb\xbf") else 0
    first = head[mark:].lstrip()[:1]
    if first == b"[":
        spans, end, empty = _elements(data[mark:])
        if empty >= 0:
            raise UserError(
                f"{path} is no JSON: at byte {mark + empty} its array has a comma with no record beside it; "
                "mend the file, or write one object to a line"
            )
        if end < 0:
            raise UserError(f"{path} is truncated: its array has {len(spans):,} whole records and no end")
        if (more := _first_text(data[mark:], end)) >= 0:
            raise UserError(
                f"{path} goes on after its array has ended, at byte {mark + more}; name several files instead of "
                "joining them, or write one object to a line"
            )
    elif first in (b"{", b""):
        spans = _lines(data[mark:])
    else:
        raise UserError(f"{path} is neither a JSON array nor JSON lines: it starts with {head[mark : mark + 20]!r}")
    return spans + mark, content


@numba.njit(cache=True, nogil=True)
def _lines(data: np.ndarray) -> np.ndarray:
    """Find the lines that hold something, without the white space around it, int64 `[n, 2]`."""
    spans, count = np.empty((1024, 2), np.int64), 0
    start, stop = -1, -1
    for i in range(len(data) + 1):
        if i == len(data) or data[i] == 10:
            if start >= 0:
                if count == len(spans):
                    spans = np.concatenate((spans, np.empty_like(spans)))
                spans[count, 0], spans[count, 1] = start, stop
                count += 1
            start = -1
        elif data[i] not in (32, 9, 13):
            if start < 0:
                start = i
            stop = i + 1
    return spans[:count]


@numba.njit(cache=True, nogil=True)
def _elements(data: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Find the elements of the outermost array, int64 `[n, 2]`.

    Also returns where the array ends, and the comma or bracket before which an element is missing; -1 where there is no
    such place.
    """
    spans, count = np.empty((1024, 2), np.int64), 0
    depth, quoted, escaped, start, stop = 0, False, False, -1, -1
    for i in range(len(data)):
        c = data[i]
        if quoted:
            if escaped:
                escaped = False
            elif c == 92:
                escaped = True
            elif c == 34:
                quoted = False
            stop = i + 1
            continue
        if c in (32, 9, 10, 13):
            continue
        if depth == 1 and c in (44, 93):
            if start >= 0:
                if count == len(spans):
                    spans = np.concatenate((spans, np.empty_like(spans)))
                spans[count, 0], spans[count, 1] = start, stop
                count += 1
            elif c == 44 or count > 0:
                return spans[:count], -1, i
            start = -1
            if c == 93:
                return spans[:count], i + 1, -1
            continue
        if depth > 0 and start < 0:
            start = i
        stop = i + 1
        if c == 34:
            quoted = True
        elif c in (91, 123):
            depth += 1
        elif c in (93, 125):
            depth -= 1
    return spans[:count], -1, -1


@numba.njit(cache=True, nogil=True)
def _first_text(data: np.ndarray, start: int) -> int:
    """Find the first byte from `start` on that is no white space; -1 if there is none."""
    for i in range(start, len(data)):
        if data[i] not in (32, 9, 10, 13):
            return i
    return -1
