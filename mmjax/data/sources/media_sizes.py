"""Sizes of a data set's media, read from their headers: heights and widths, frames and sample rates.

A file's size is cached by its name and stamp (size and time of change, or the server's tag), shared
by all data sets of a cache folder, and written while headers are read: a killed run resumes where
it was.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from mmjax.config import MediaLimits
from mmjax.data.media.decode import Probe, check_media_size, limit_violations
from mmjax.data.sample import SOUND, BadSample
from mmjax.data.sources.array_records import FACTS, ArrayRecords
from mmjax.data.sources.known_files import KnownFiles, hash_to_64_bits
from mmjax.data.storage.array_store import (
    CHECKSUMS,
    Damaged,
    Missing,
    open_array_files,
    open_arrays,
    open_arrays_if_sound,
    print_recomputation,
    save_arrays,
)
from mmjax.data.storage.files import (
    Conversations,
    FileRef,
    Unreadable,
    hash_strings,
    is_url,
    local_copy,
)
from mmjax.data.storage.media_files import AudioSegment, FrameFiles, state_of
from mmjax.errors import BadMedia, UserError

KINDS = ("image", "audio", "video", SOUND)
# Read (height, width) of an image or (frames, rate) of a clip from its header. I/O errors
# propagate.
Progress = Callable[[int], None]  # called with the number of records done

_VERSION = "7"
_THREADS = 96  # files requested at a time where storage is slow
# seconds; storage is slow once 4 records in a row take longer than this, nearly all of it waiting,
_SLOW = 0.003
_LATENCY_LIMIT = 32  # since each adds 8 to a count that a fast one lowers by 1
_CHUNK = 2048  # records between two decisions whether to write


@dataclass(frozen=True)
class MediaFacts:
    """Media sizes and text lengths of all records, media in CSR over records. A bad record has no media here.

    For records with 2, 0 and 1 media `start` is 0, 2, 2, 3, and record 2 has the media
    `start[2]:start[3]`.
    """

    start: np.ndarray  # int64 [n + 1]: first medium of each record
    kind: np.ndarray  # uint8 [m]: number in KINDS
    # int64 [m, 2]: (height, width) of an image, (frames, rate) of a clip, a packed `VideoHeader`
    size: np.ndarray
    characters: np.ndarray  # int32 [n]: of all text; 0 for a bad record
    bad: np.ndarray  # int64 [b]: records that cannot be used, in order
    reason: np.ndarray  # str [b]
    unread_key: np.ndarray = field(
        default_factory=lambda: np.empty(0, "U1")
    )  # str [k]: keys that nothing reads, sorted
    # int64 [k]: records that have them
    unread_count: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.characters)

    @property
    def unread(self) -> dict[str, int]:
        """Return in how many records each key stands that nothing reads."""
        return dict(zip(self.unread_key.tolist(), self.unread_count.tolist(), strict=True))

    def of(self, kind: str) -> np.ndarray:
        """Return the sizes of all media of a kind, int64 `[k, 2]`."""
        return self.size[self.kind == KINDS.index(kind)]

    def good(self) -> np.ndarray:
        """Return the records that are not known to be bad, int64."""
        return np.setdiff1d(np.arange(len(self)), self.bad, assume_unique=True)

    def take(self, records: np.ndarray) -> MediaFacts:
        """Select these good records, in this order."""
        count = self.start[records + 1] - self.start[records]
        start = np.concatenate([[0], np.cumsum(count, dtype=np.int64)])
        # Index ranges side by side: of starts 0 2 2 3, records 2 and 0 have counts 1 2 and new
        # starts 0 1 3, so arange(3) + repeat([2 - 0, 0 - 1], [1, 2]) = 0 1 2 + 2 -1 -1 = 2 0 1.
        media = np.arange(start[-1]) + np.repeat(self.start[records] - start[:-1], count)
        return MediaFacts(
            start=start,
            kind=self.kind[media],
            size=self.size[media],
            characters=self.characters[records],
            bad=np.empty(0, np.int64),
            reason=np.empty(0, "U1"),
        )

    def save(self, folder: Path) -> None:
        """Write one file per array, and their hashes, replacing the folder."""
        save_arrays(folder, {f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def open(cls, folder: str, cache: Path, shipped: bool = False) -> MediaFacts:
        """Memory-map a saved folder; files behind a URL are copied into `cache` first. Raises Damaged.

        shipped: in a folder of ArrayRecord, whose conversations have no keys that nothing reads.
        """
        names = [f.name for f in fields(cls) if not (shipped and f.name.startswith("unread"))]
        if not is_url(folder):
            return cls(**open_arrays(Path(folder), names))
        sums = local_copy(os.path.join(folder, CHECKSUMS), cache / "copies")
        copies = {
            name: local_copy(os.path.join(folder, f"{name}.npy"), cache / "copies")
            for name in names
        }
        return cls(**open_array_files(copies, sums))


def open_facts(
    conversations: Conversations, cache: Path, limits: MediaLimits = MediaLimits()
) -> MediaFacts | None:
    """Open the facts that `read_facts` cached for these records, or that their ArrayRecord folder has; None for none.

    Media are not checked for changes since. Records with media beyond the limits are bad.
    """
    if isinstance(conversations, ArrayRecords):
        facts = _shipped_facts(conversations, cache)
        return None if facts is None else _apply_limits(facts, limits)
    try:
        return MediaFacts.open(str(_folder(conversations, cache, limits)), cache)
    except Damaged as damage:
        print_recomputation(damage)
        return None


def _shipped_facts(records: ArrayRecords, cache: Path) -> MediaFacts | None:
    """Open the facts in the records' folder. Raises UserError where they are damaged."""
    folder = os.path.join(records.folder, FACTS)
    try:
        facts = MediaFacts.open(folder, cache, shipped=True)
        if len(facts) != len(records):
            raise Damaged(
                f"{folder} has facts of {len(facts)} records, and there are {len(records)}"
            )
        return facts
    except Missing:
        return None
    except (Damaged, BadSample) as damage:
        raise UserError(
            f"{damage}; remove {folder}, so that headers are read again, or write the records again with mmjax.index"
        ) from None


def read_facts(
    conversations: Conversations,
    probes: Mapping[str, Probe],
    cache: Path,
    progress: Progress = lambda done: None,
    limits: MediaLimits = MediaLimits(),
) -> MediaFacts:
    """Read the facts of all media, headers only of files that are new or changed. Those beyond the limits are bad.

    On fast storage one thread reads thousands of headers per second, and several would contend for
    Python's lock; once storage is seen to be slow, many files are requested at a time.
    """
    if (
        isinstance(conversations, ArrayRecords)
        and (shipped := open_facts(conversations, cache, limits)) is not None
    ):
        return shipped
    known = KnownFiles(cache / "media")
    records = range(len(conversations))
    chunks = []
    unread = Counter[str]()
    states: list[int] = []
    latency = 0

    def read_record(index: int) -> _RecordFacts:
        return _read_record(conversations, index, probes, known, limits)

    pool = ThreadPoolExecutor(_THREADS)
    try:
        for chunk in (records[k : k + _CHUNK] for k in range(0, len(records), _CHUNK)):
            facts: list[_RecordFacts] = []
            while latency < _LATENCY_LIMIT and len(facts) < len(chunk):
                start, working = time.perf_counter(), time.thread_time()
                facts.append(read_record(chunk[len(facts)]))
                # Threads would not parse long records sooner, and would have many in memory.
                slow = time.perf_counter() - start > max(_SLOW, 5 * (time.thread_time() - working))
                latency = latency + 8 if slow else max(0, latency - 1)
            # All that is left of the chunk once storage is slow, else nothing.
            facts += pool.map(read_record, chunk[len(facts) :])
            chunks.append(_as_arrays(chunk.start, facts))
            unread.update(key for record in facts for key in record.unread)
            states += [state for record in facts for state in record.states]
            known.write_some()
            progress(chunk.stop)
    finally:
        pool.shutdown(cancel_futures=True)
        known.write()
    known.merge()
    names = ("kind", "size", "characters", "bad", "reason")
    joined = {name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names}
    joined["unread_key"] = np.array(sorted(unread), np.str_)
    joined["unread_count"] = np.array([unread[key] for key in sorted(unread)], np.int64)
    state = np.array(states, np.uint64)
    save_arrays(
        _states_folder(conversations, cache, limits),
        {"state": state, "host": np.array(socket.gethostname())},
    )
    media = np.concatenate([[0], *(np.diff(chunk.start) for chunk in chunks)])
    folder = _folder(conversations, cache, limits)
    MediaFacts(start=np.cumsum(media, dtype=np.int64), **joined).save(folder)
    return MediaFacts.open(str(folder), cache)


def _states_folder(conversations: Conversations, cache: Path, limits: MediaLimits) -> Path:
    return cache / _folder(conversations, cache, limits).name.replace("facts", "states")


def open_states(
    conversations: Conversations, cache: Path, limits: MediaLimits
) -> np.ndarray | None:
    """Open the states that all media had when `read_facts` read their facts on this host, uint64 `[m]`.

    None where there are none, as of records that hold their media.
    """
    if isinstance(conversations, ArrayRecords):
        return None
    arrays = open_arrays_if_sound(_states_folder(conversations, cache, limits), ("state", "host"))
    return (
        arrays["state"]
        if arrays is not None and str(arrays["host"]) == socket.gethostname()
        else None
    )


def check_state(stored: FileRef, state: int) -> None:
    """Raise UserError where a medium's file has changed since it had this state. One that is missing has not."""
    with suppress(Unreadable):
        if _state(stored) != state:
            raise UserError(
                f"{stored.name} has changed since the run was started; restore it, or train on what it has now; both "
                "with --resume"
            )


def _state(stored: FileRef) -> int:
    return hash_to_64_bits(f"{stored.name} {state_of(stored)}")


def _folder(conversations: Conversations, cache: Path, limits: MediaLimits) -> Path:
    roots = getattr(conversations, "roots", ())  # of records that name their media by paths
    return (
        cache / f"facts-{hash_strings(conversations.fingerprint(), repr(limits), _VERSION, *roots)}"
    )


def _apply_limits(facts: MediaFacts, limits: MediaLimits) -> MediaFacts:
    """Make the records with media beyond the limits bad, as `read_facts` does while it reads headers."""
    count = np.diff(facts.start)
    record = np.repeat(np.arange(len(facts)), count)
    reasons: dict[int, str] = {}  # by record
    for number, kind in enumerate(KINDS):
        media = np.flatnonzero(facts.kind == number)
        beyond = np.logical_or.reduce(
            list(limit_violations(kind, facts.size[media], limits).values())
        )
        for medium in media[beyond].tolist():
            try:
                check_media_size(kind, tuple(facts.size[medium].tolist()), limits)
            except BadMedia as error:
                reasons.setdefault(int(record[medium]), str(error))
    if not reasons:
        return facts
    bad = np.array(sorted(reasons), np.int64)
    count[bad] = 0
    remaining = ~np.isin(record, bad)
    merged = dict(zip(facts.bad.tolist(), facts.reason.tolist(), strict=True)) | reasons
    return MediaFacts(
        start=np.concatenate([[0], np.cumsum(count, dtype=np.int64)]),
        kind=facts.kind[remaining],
        size=facts.size[remaining],
        characters=np.where(np.isin(np.arange(len(facts)), bad), 0, facts.characters).astype(
            np.int32
        ),
        bad=np.array(sorted(merged), np.int64),
        reason=np.array([merged[k] for k in sorted(merged)], np.str_),
    )


@dataclass(frozen=True)
class _RecordFacts:
    """The facts of one record."""

    kinds: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    states: tuple[int, ...] = ()
    characters: int = 0
    reason: str = ""  # why it is bad
    unread: tuple[str, ...] = ()  # keys that nothing reads


def _read_record(
    conversations: Conversations,
    index: int,
    probes: Mapping[str, Probe],
    known: KnownFiles,
    limits: MediaLimits,
) -> _RecordFacts:
    unread: tuple[str, ...] = ()
    try:
        conversation = conversations.conversation(index)
        unread = conversation.unread
        media = tuple(conversation.media())
        sizes = []
        states = []
        for medium, stored in zip(media, conversations.media(index) if media else (), strict=True):
            states.append(_state(stored))
            first, second = known.size(medium.kind, stored, probes[medium.kind])
            if isinstance(stored, FrameFiles) and medium.kind == "video":
                first = stored.counted(first)
            try:
                check_media_size(medium.kind, (first, second), limits)
            except BadMedia as error:
                raise BadSample(f"{stored.name} is a bad {medium.kind} file: {error}") from None
            sizes.append(
                (
                    stored.frames(first, second) if isinstance(stored, AudioSegment) else first,
                    second,
                )
            )
    except BadSample as error:
        return _RecordFacts(reason=str(error) or "cannot be used", unread=unread)
    parts = (part for message in conversation.messages for part in message.parts)
    characters = sum(len(part) for part in parts if isinstance(part, str))
    kinds = tuple(KINDS.index(medium.kind) for medium in media)
    return _RecordFacts(kinds, tuple(sizes), tuple(states), characters, unread=unread)


def _as_arrays(first: int, records: Sequence[_RecordFacts]) -> MediaFacts:
    """Convert consecutive records, of which `first` is the index of the first, to arrays."""
    bad = [k for k, record in enumerate(records) if record.reason]
    return MediaFacts(
        start=np.concatenate(
            [[0], np.cumsum([len(record.kinds) for record in records], dtype=np.int64)]
        ),
        kind=np.array([kind for record in records for kind in record.kinds], np.uint8),
        size=np.array([size for record in records for size in record.sizes], np.int64).reshape(
            -1, 2
        ),
        characters=np.array([record.characters for record in records], np.int32),
        bad=np.array(bad, np.int64) + first,
        reason=np.array([records[k].reason for k in bad], np.str_),
    )
