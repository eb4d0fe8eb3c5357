"""What is known of a data set's media from their headers: heights and widths, frames and rates.

A file's facts are kept by its name and stamp (size and time of change, or the server's tag), shared by all data sets of
a cache folder, and written as they come: a run that was killed goes on where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from mmjax.data.array_records import FACTS, ArrayRecords
from mmjax.data.conversation import BadSample, Medium
from mmjax.data.excerpts import Cut
from mmjax.data.kept import SUMS, Damaged, Missing, keep, kept, kept_files, note, remove
from mmjax.data.stored import Stored, StoredConversations, Unreadable, digest, is_url, local_copy
from mmjax.errors import UserError

KINDS: tuple[Medium, ...] = ("image", "audio")
# (height, width) of an image, (frames, rate) of a clip, from its header. It passes on what reading the file raises.
Probe = Callable[[BinaryIO], tuple[int, int]]
Progress = Callable[[int], None]  # told how many records are done

_VERSION = "2"
_ROW = np.dtype([("key", np.uint64), ("stamp", np.uint64), ("size", np.int64, 2)])
_WAITING = 96  # files that are asked for at a time where they are waited for
_SLOW, _OFTEN = 0.003, 32  # seconds that a record takes then; 4 such records in a row tell
_CHUNK = 2048  # records between two looks at what is to be written
_SECONDS = 5.0  # of work that a killed run loses
_ROWS = 50_000


@dataclass(frozen=True)
class MediaFacts:
    """Of all records of a data set; media in CSR over records. A bad record has no media here."""

    start: np.ndarray  # int64 [n + 1]: first medium of each record
    kind: np.ndarray  # uint8 [m]: number in KINDS
    size: np.ndarray  # int64 [m, 2]: (height, width) of an image, (frames, rate) of a clip
    characters: np.ndarray  # int32 [n]: of all text; 0 of a bad record
    bad: np.ndarray  # int64 [b]: records that cannot be used, in order
    reason: np.ndarray  # str [b]

    def __len__(self) -> int:
        return len(self.characters)

    def of(self, kind: Medium) -> np.ndarray:
        """Sizes of all media of a kind, int64 `[k, 2]`."""
        return self.size[self.kind == KINDS.index(kind)]

    def good(self) -> np.ndarray:
        """Records that can be used as far as is known, int64."""
        return np.setdiff1d(np.arange(len(self)), self.bad, assume_unique=True)

    def take(self, records: np.ndarray) -> MediaFacts:
        """Of these good records alone, in this order."""
        count = self.start[records + 1] - self.start[records]
        start = np.concatenate([[0], np.cumsum(count, dtype=np.int64)])
        media = np.arange(start[-1]) + np.repeat(self.start[records] - start[:-1], count)
        none = np.empty(0, np.int64), np.empty(0, "U1")
        return MediaFacts(start, self.kind[media], self.size[media], self.characters[records], *none)

    def save(self, folder: Path) -> None:
        """Write one file per array, and their hashes; a folder that is there is replaced."""
        keep(folder, {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def open(cls, folder: str, cache: Path) -> MediaFacts:
        """Memory-map what `save` wrote; what is behind a URL is copied into `cache`. Raises Damaged."""
        if not is_url(folder):
            return cls(**kept(Path(folder), [f.name for f in fields(cls)]))
        sums, *copies = (
            local_copy(os.path.join(folder, name), cache / "copies")
            for name in (SUMS, *(f"{f.name}.npy" for f in fields(cls)))
        )
        return cls(**kept_files({f.name: copy for f, copy in zip(fields(cls), copies, strict=True)}, sums))


def open_facts(conversations: StoredConversations, cache: Path) -> MediaFacts | None:
    """What `read_facts` found for these records, or what their ArrayRecord folder has; None if there is nothing.

    No file is looked at: that a medium changed since is not seen.
    """
    if isinstance(conversations, ArrayRecords):
        return _written_facts(conversations, cache)
    try:
        return MediaFacts.open(str(_folder(conversations, cache)), cache)
    except Damaged as damage:
        note(damage)
        return None


def _written_facts(records: ArrayRecords, cache: Path) -> MediaFacts | None:
    """Those that came with the records. Raises UserError where they are not whole."""
    folder = os.path.join(records.folder, FACTS)
    try:
        found = MediaFacts.open(folder, cache)
        if len(found) != len(records):
            raise Damaged(f"{folder} has facts of {len(found)} records, and there are {len(records)}")
    except Missing:
        return None
    except (Damaged, BadSample) as damage:
        raise UserError(
            f"{damage}; remove {folder}, so that headers are read again, or write the records again with mmjax.index"
        ) from None
    return found


def read_facts(
    conversations: StoredConversations,
    probes: Mapping[Medium, Probe],
    cache: Path,
    progress: Progress = lambda done: None,
) -> MediaFacts:
    """The facts of all media; headers are read only of files that are new or changed.

    One thread reads the headers of thousands of files a second where they come at once; several would only take turns.
    Where files are waited for, many are asked for at a time.
    """
    if isinstance(conversations, ArrayRecords) and (written := open_facts(conversations, cache)) is not None:
        return written
    known, chunks, records, waited = _KnownFiles(cache / "media"), [], range(len(conversations)), 0

    def facts_of(index: int) -> _RecordFacts:
        return _facts_of(conversations, index, probes, known)

    pool = ThreadPoolExecutor(_WAITING)
    try:
        for chunk in (records[k : k + _CHUNK] for k in range(0, len(records), _CHUNK)):
            found: list[_RecordFacts] = []
            while waited < _OFTEN and len(found) < len(chunk):
                began = time.perf_counter()
                found.append(facts_of(chunk[len(found)]))
                waited = waited + 8 if time.perf_counter() - began > _SLOW else max(0, waited - 1)
            found += pool.map(facts_of, chunk[len(found) :])
            chunks.append(_as_arrays(chunk.start, found))
            known.keep_some()
            progress(chunk.stop)
    finally:
        pool.shutdown(cancel_futures=True)
        known.keep()
    known.settle()
    _joined(chunks).save(_folder(conversations, cache))
    return MediaFacts.open(str(_folder(conversations, cache)), cache)


def _folder(conversations: StoredConversations, cache: Path) -> Path:
    return cache / f"facts-{digest(conversations.fingerprint(), _VERSION)}"


@dataclass(frozen=True)
class _RecordFacts:
    kinds: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    characters: int = 0
    reason: str = ""  # why it is bad


def _facts_of(
    conversations: StoredConversations, index: int, probes: Mapping[Medium, Probe], known: _KnownFiles
) -> _RecordFacts:
    try:
        conversation = conversations.conversation(index)
        places = tuple(conversation.media())
        media = conversations.media(index) if places else ()
        sizes = []
        for place, stored in zip(places, media, strict=True):
            first, second = known.size(place.kind, stored, probes[place.kind])
            sizes.append((stored.frames(first, second) if isinstance(stored, Cut) else first, second))
    except BadSample as error:
        return _RecordFacts(reason=str(error) or "cannot be used")
    parts = (part for message in conversation.messages for part in message.parts)
    text = sum(len(part) for part in parts if isinstance(part, str))
    return _RecordFacts(tuple(KINDS.index(place.kind) for place in places), tuple(sizes), text)


def _as_arrays(first: int, found: Sequence[_RecordFacts]) -> MediaFacts:
    """Of records from `first` on."""
    bad = [number for number, facts in enumerate(found) if facts.reason]
    return MediaFacts(
        start=np.concatenate([[0], np.cumsum([len(facts.kinds) for facts in found], dtype=np.int64)]),
        kind=np.array([kind for facts in found for kind in facts.kinds], np.uint8),
        size=np.array([size for facts in found for size in facts.sizes], np.int64).reshape(-1, 2),
        characters=np.array([facts.characters for facts in found], np.int32),
        bad=np.array(bad, np.int64) + first,
        reason=np.array([found[number].reason for number in bad], np.str_),
    )


def _joined(chunks: Sequence[MediaFacts]) -> MediaFacts:
    media = np.concatenate([[0], *(np.diff(chunk.start) for chunk in chunks)])
    rest = {f.name: np.concatenate([getattr(chunk, f.name) for chunk in chunks]) for f in fields(MediaFacts)[1:]}
    return MediaFacts(np.cumsum(media, dtype=np.int64), **rest)


class _KnownFiles:
    """Sizes of files by name and stamp, sorted and memory-mapped, and those found since.

    In its folder: `all.npy`; what further runs found, one file each time they wrote; `bad.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._written = folder, time.monotonic()
        self._new: dict[tuple[int, int], tuple[int, int]] = {}
        self._before: dict[tuple[int, int], tuple[int, int]] = {}  # what was written last
        self._new_bad: list[tuple[int, int, str]] = []
        folder.mkdir(parents=True, exist_ok=True)
        settled, recent = _rows(folder / "all.npy", "r"), _sorted(list(map(_rows, self._shards())))
        # Of keys beside each other: searching among rows would copy all keys each time.
        self._known = [(np.ascontiguousarray(rows["key"]), rows) for rows in (settled, recent) if len(rows)]
        self._bad = _read_bad(folder / "bad.jsonl")

    def size(self, kind: Medium, stored: Stored, probe: Probe) -> tuple[int, int]:
        """From what is known, else from the header. Raises BadSample."""
        key, stamp = _hash(f"{kind} {stored.name}"), _hash(stored.stamp())
        if (reason := self._bad.get((key, stamp))) is not None:
            raise BadSample(reason)
        if (found := self._new.get((key, stamp)) or self._before.get((key, stamp))) is not None:
            return found
        for keys, rows in self._known:
            at = int(keys.searchsorted(np.uint64(key)))
            if at < len(keys) and keys[at] == key:
                found = tuple(rows[at]["size"].tolist())
                if rows[at]["stamp"] == _sealed(stamp, found):
                    return found
        try:
            size = _probed(stored, kind, probe)
        except Unreadable:
            raise
        except BadSample as error:
            self._new_bad.append((key, stamp, str(error)))
            raise
        self._new[key, stamp] = size
        return size

    def keep_some(self) -> None:
        """Write what was found, if that is much or the last time is long ago."""
        if len(self._new) >= _ROWS or time.monotonic() - self._written > _SECONDS:
            self.keep()

    def keep(self) -> None:
        """Write what was found since the last time."""
        if self._new:
            self._before, self._new = self._new, {}
            rows = [(key, _sealed(stamp, size), size) for (key, stamp), size in self._before.items()]
            name = f"{uuid.uuid4().hex}.npy"
            np.save(self._folder / f"partial-{name}", np.array(rows, _ROW))
            (self._folder / f"partial-{name}").rename(self._folder / f"found-{name}")
        if self._new_bad:
            bad, self._new_bad = self._new_bad, []
            with (self._folder / "bad.jsonl").open("a") as file:
                file.write("".join(json.dumps(line) + "\n" for line in bad))
        self._written = time.monotonic()

    def settle(self) -> None:
        """Make one file of all; one process at a time."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shards := self._shards()):
                return
            whole = self._folder / "all.npy"
            partial = self._folder / f"partial-{uuid.uuid4().hex}.npy"
            np.save(partial, _sorted([_rows(whole), *map(_rows, shards)]))
            if whole.is_dir():
                remove(whole)
            partial.rename(whole)
            for shard in shards:
                remove(shard)

    def _shards(self) -> list[Path]:
        return sorted(self._folder.glob("found-*.npy"), key=lambda path: path.stat().st_mtime_ns)


def _sorted(rows: Sequence[np.ndarray]) -> np.ndarray:
    """By key, each once: the last."""
    joined = np.concatenate([np.empty(0, _ROW), *rows])[::-1]
    return joined[np.unique(joined["key"], return_index=True)[1]]


def _rows(path: Path, mode: Literal["r"] | None = None) -> np.ndarray:
    """What is kept in one file; none where it is not there or not whole, and those headers are read again."""
    try:
        rows = np.load(path, mmap_mode=mode)
    except Exception:  # of a file that is not whole, NumPy's reader raises what its parser stumbles over
        return np.empty(0, _ROW)
    return rows if rows.dtype == _ROW and rows.ndim == 1 else np.empty(0, _ROW)


def _sealed(stamp: int, size: tuple[int, int]) -> int:
    """What a row has as its stamp: with a size that storage has changed, it is that of no file."""
    return _hash(f"{stamp} {size[0]} {size[1]}")


def _read_bad(path: Path) -> dict[tuple[int, int], str]:
    """What is whole of the bad files' lines: a killed run may have left half of one."""
    found = {}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with suppress(ValueError, TypeError, RecursionError):
            key, stamp, reason = json.loads(line)
            found[key, stamp] = str(reason)
    return found


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _probed(stored: Stored, kind: Medium, probe: Probe) -> tuple[int, int]:
    with stored.open() as file:
        try:
            first, second = probe(file)
        except Unreadable:
            raise
        except Exception as error:  # decoders raise what they like for hostile bytes
            told = " ".join(str(error).split())[:200] or type(error).__name__
            if isinstance(error, OSError) and error.errno is not None:  # of reading, not of what was read
                raise Unreadable(f"{stored.name} cannot be read: {told}") from None
            raise BadSample(f"{stored.name} is a bad {kind} file: {told}") from None
    if first <= 0 or second <= 0:
        raise BadSample(f"{stored.name} is an empty {kind}: {first} x {second}")
    return int(first), int(second)
