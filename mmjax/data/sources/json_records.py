"""Random access to the records of JSON files, in JSON lines or one array, by an index of their positions."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np

from mmjax.data.sample import BadSample
from mmjax.data.storage.array_store import open_arrays, open_arrays_if_sound, save_arrays
from mmjax.data.storage.files import (
    MAX_TEXT,
    LocalFile,
    Unreadable,
    check_bytes,
    check_unchanged,
    hash_strings,
    local_copy,
)
from mmjax.errors import UserError

_VERSION = "5"  # of the index
_NAMES = ("starts", "spans", "content")
_CHUNK = 1 << 24
MAX_VALUES = 1 << 22  # of one record; as Python's objects they take up to 200 bytes each


class JsonRecords:
    """The records of several files, one file after the other.

    Start and stop of each record are cached under `cache`, by the file's path, size and time of
    change. Files are opened for each read and closed again: there may be thousands. Raises
    UserError for one that is neither a JSON array nor JSON lines.
    """

    def __init__(self, paths: Sequence[str], cache: Path) -> None:
        self._names = paths
        self._paths, folders, self._stamps = zip(
            *(_index_file(path, cache) for path in paths), strict=True
        )
        arrays = open_arrays(folders[0] if len(folders) == 1 else _join(folders, cache), _NAMES)
        self._starts = arrays["starts"]  # int64 [files + 1]: first record of each file
        # int64 [n, 3]: start and stop of each record in its file, and its line, from 1
        self._spans = arrays["spans"]
        self._content = str(arrays["content"])  # hash of the files' bytes

    def __len__(self) -> int:
        return len(self._spans)

    def fingerprint(self) -> str:
        """Return the hash of all bytes of all files."""
        return self._content

    def files(self) -> list[tuple[str, int]]:
        """List the files with the number of records in each."""
        return list(zip(self._names, np.diff(self._starts).tolist(), strict=True))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one record. Raises BadSample where it is no JSON object, and UserError where its file has changed."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        start, stop, _ = self._spans[index].tolist()
        number = self._file_of(index)
        path = str(self._paths[number])
        try:
            check_bytes("the record", stop - start, MAX_TEXT)
            with open(path, "rb", 0) as file:
                record = load_json(
                    os.pread(file.fileno(), stop - start, start), object_pairs_hook=unique_keys
                )
        except BadSample:
            raise
        except (OSError, ValueError, RecursionError) as error:
            # Records may be appended in mid-run; where those before them have moved, all would be
            # lost as bad ones.
            check_unchanged(LocalFile(path), self._stamps[number])
            if isinstance(error, OSError):
                raise Unreadable(f"cannot be read: {error}") from None
            # The decoder's own text counts lines from the record's first.
            position = (
                f"{error.msg} (character {error.pos + 1})"
                if isinstance(error, json.JSONDecodeError)
                else error
            )
            raise BadSample(f"is not JSON: {position}") from None
        if not isinstance(record, dict):
            raise BadSample(f"is a JSON {type(record).__name__}, not an object")
        return record

    def place(self, index: int) -> str:
        """Name a record's file and line, or in an array on one line its number there."""
        file = self._file_of(index)
        first, last = self._starts[file : file + 2].tolist()
        lines = self._spans[first:last, 2]
        line = int(lines[index - first])
        one_line = len(lines) > 1 and lines[0] == lines[-1]
        return (
            f"{self._names[file]}[{index - first}]" if one_line else f"{self._names[file]}:{line}"
        )

    def _file_of(self, index: int) -> int:
        # side="right": with starts 0, 3, 3, 5, record 3 is in the third file, as the second is
        # empty.
        return int(self._starts.searchsorted(index, side="right")) - 1


def load_json(text: bytes, **options: Any) -> Any:
    """Parse JSON of at most MAX_TEXT bytes. Raises ValueError, RecursionError, BadSample for too many values."""
    # Each value but the first stands behind one of these.
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadSample(f"has more than {MAX_VALUES:,} values")
    return json.loads(text, **options)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises BadSample where a key comes twice: either value may be meant."""
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise BadSample(f"has the key {duplicate!r} twice; keep the value that is meant")
    return members


def _index_file(path: str, cache: Path) -> tuple[Path, Path, str]:
    """Index a file unless that was done; return its local copy, the folder of the index, and the copy's stamp."""
    try:
        local = local_copy(path, cache / "copies")
        stamp = LocalFile(str(local)).stamp()
        key = hash_strings(str(local.absolute()), stamp, _VERSION)
        folder = cache / f"records-{key}"
        if open_arrays_if_sound(folder, _NAMES) is None:
            spans, content = _find_records(path, local)
            save_arrays(
                folder,
                {"starts": np.array([0, len(spans)]), "spans": spans, "content": np.array(content)},
            )
    except (OSError, BadSample) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return local, folder, stamp


def _join(folders: Sequence[Path], cache: Path) -> Path:
    """Join the indexes of several files into one folder, since each memory-mapped array keeps a file open."""
    joined = cache / f"records-{hash_strings(*(folder.name for folder in folders))}"
    if open_arrays_if_sound(joined, _NAMES) is None:
        indexes = [open_arrays(folder, _NAMES) for folder in folders]
        spans = [index["spans"] for index in indexes]
        content = hash_strings(*(str(index["content"]) for index in indexes))
        starts = np.cumsum([0, *map(len, spans)])  # files of 3, 0 and 2 records: 0, 3, 3, 5
        save_arrays(
            joined, {"starts": starts, "spans": np.concatenate(spans), "content": np.array(content)}
        )
    return joined


def _find_records(path: str, local: Path) -> tuple[np.ndarray, str]:
    """Find where each record starts and stops, and its line, int64 `[n, 3]`; hash the file. Raises UserError."""
    with local.open("rb") as file:
        content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if not local.stat().st_size:
        return np.empty((0, 3), np.int64), content
    # Pages of the map are read as the kernels below go through them, so files may exceed memory.
    data = np.memmap(local, np.uint8, "r")
    head = bytes(data[:_CHUNK])
    # The first bytes of gzip, zstd and zip.
    if head[:2] == b"\x1f\x8b" or head[:4] == b"(\xb5/\xfd" or head[:2] == b"PK":
        raise UserError(f"{path} is compressed, so no record of it can be found alone; unpack it")
    bom = 3 if head.startswith(b"\xef\xbb\xbf") else 0  # UTF-8's byte order mark
    first = head[bom:].lstrip()[:1]
    if first == b"[":
        spans, end, empty = _elements(data[bom:])
        if empty >= 0:
            raise UserError(
                f"{path} is no JSON: at byte {bom + empty} its array has a comma with no record beside it; "
                "mend the file, or write one object to a line"
            )
        if end < 0:
            raise UserError(
                f"{path} is truncated: its array has {len(spans):,} whole records and no end"
            )
        if (rest := _first_text(data[bom:], end)) >= 0:
            raise UserError(
                f"{path} goes on after its array has ended, at byte {bom + rest}; name several files instead of "
                "joining them, or write one object to a line"
            )
    elif first in (b"{", b""):
        spans = _lines(data[bom:])
    else:
        utf_16 = (
            " (UTF-16; save it as UTF-8)" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else ""
        )
        raise UserError(
            f"{path} is neither a JSON array nor JSON lines: it starts with {head[bom : bom + 20]!r}{utf_16}"
        )
    spans[:, :2] += bom
    return spans, content


@numba.njit(cache=True, nogil=True)
def _append(spans: np.ndarray, count: int, start: int, stop: int, line: int) -> np.ndarray:
    """Write a span at `count`, in a table of twice the size if it is full, and return the table."""
    if count == len(spans):
        spans = np.concatenate((spans, np.empty_like(spans)))
    spans[count, 0] = start
    spans[count, 1] = stop
    spans[count, 2] = line
    return spans


@numba.njit(cache=True, nogil=True)
def _lines(data: np.ndarray) -> np.ndarray:
    """Find the lines that are not blank, without the white space around their text, int64 `[n, 3]`."""
    spans = np.empty((1024, 3), np.int64)
    count = 0
    line = 1
    start = stop = -1
    for i in range(len(data) + 1):
        if i == len(data) or data[i] == 10:  # \n
            if start >= 0:
                spans = _append(spans, count, start, stop, line)
                count += 1
            start = -1
            line += 1
        elif data[i] not in (32, 9, 13):  # space, tab, \r
            if start < 0:
                start = i
            stop = i + 1
    return spans[:count]


@numba.njit(cache=True, nogil=True)
def _elements(data: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Find the elements of the outermost array, int64 `[n, 3]`.

    Also returns where the array ends, and the comma or bracket before which an element is missing;
    -1 for none.
    """
    spans = np.empty((1024, 3), np.int64)
    count = depth = 0
    line = start_line = 1
    quoted = escaped = False
    start = stop = -1
    for i in range(len(data)):
        c = data[i]
        if quoted:
            if escaped:
                escaped = False
            elif c == 92:  # backslash
                escaped = True
            elif c == 34:  # "
                quoted = False
            stop = i + 1
            continue
        if c in (32, 9, 10, 13):  # white space
            line += c == 10
            continue
        if depth == 1 and c in (44, 93):  # , ] of the outermost array: an element ends
            if start >= 0:
                spans = _append(spans, count, start, stop, start_line)
                count += 1
            elif c == 44 or count > 0:
                return spans[:count], -1, i
            start = -1
            if c == 93:
                return spans[:count], i + 1, -1
            continue
        if depth > 0 and start < 0:
            start = i
            start_line = line
        stop = i + 1
        if c == 34:
            quoted = True
        elif c in (91, 123):  # [ {
            depth += 1
        elif c in (93, 125):  # ] }
            depth -= 1
    return spans[:count], -1, -1


@numba.njit(cache=True, nogil=True)
def _first_text(data: np.ndarray, start: int) -> int:
    """Find the first byte from `start` on that is not white space; -1 if there is none."""
    for i in range(start, len(data)):
        if data[i] not in (32, 9, 10, 13):
            return i
    return -1
