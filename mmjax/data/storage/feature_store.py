"""Outputs of frozen encoders, stored on disk by what they were made of, within a bound.

An encoder has a folder, named by a hash of all that its outputs depend on; an item a key, a hash of
the encoder's input. Shards are written whole or not at all, by any number of processes and runs at
once. A reader takes whatever it finds: what is missing, was evicted or is damaged is encoded again,
to the same bits.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmjax.console import print_note
from mmjax.disk import atomic_folder, remove_path

KEY_BYTES = 16
SHARD_BYTES = 2**28
SHARD_SECONDS = 60.0  # the work that a killed process loses, about
SHARDS = 16  # that the bound has room for, at least
LISTED_SECONDS = 20.0  # between looks for shards that others have written
USED_SECONDS = 600.0  # between notes that a shard is in use
ABANDONED_SECONDS = 3600.0  # after which what a killed process began to write is removed

ITEM = np.dtype(
    [("key", f"V{KEY_BYTES}"), ("start", np.int64), ("length", np.int64), ("checksum", np.uint32)]
)


class FeatureLayout(NamedTuple):
    """Describe one position of an encoder's output."""

    width: int  # channels
    dtype: np.dtype  # of the activations


@dataclass
class FeatureReader:
    """Reads the outputs of one encoder that are stored."""

    folder: Path
    layout: FeatureLayout
    _shards: dict[str, np.ndarray | None] = field(default_factory=dict)  # items by folder
    _places: dict[bytes, tuple[str, int]] = field(default_factory=dict)  # shard and number in it
    _used: dict[str, float] = field(default_factory=dict)  # when that was noted last
    _listed: float = -LISTED_SECONDS

    def read(self, key: bytes) -> np.ndarray | None:
        """Return the stored output of an item, `[m, width]`, or None."""
        if key not in self._places:
            self._list()
        if (place := self._places.get(key)) is None:
            return None
        name, number = place
        item = self._shards[name][number]
        shard = self.folder / name
        try:
            values = np.fromfile(
                shard / "values.bin",
                self.layout.dtype,
                int(item["length"]) * self.layout.width,
                offset=int(item["start"]),
            )
            is_sound = checksum(item, values) == item["checksum"]
        except (OSError, MemoryError, ValueError):  # evicted meanwhile, or a damaged place
            is_sound = False
        if not is_sound:
            self._forget(name)
            return None
        now = time.monotonic()
        if now - self._used.get(name, -USED_SECONDS) >= USED_SECONDS:
            self._used[name] = now
            with suppress(OSError):
                os.utime(shard)
        return values.reshape(-1, self.layout.width)

    def _list(self) -> None:
        """Take in shards that were written since the last look."""
        now = time.monotonic()
        if now - self._listed < LISTED_SECONDS:
            return
        self._listed = now
        for name in shard_names(self.folder):
            if name not in self._shards:
                items = read_items(self.folder / name)
                self._shards[name] = items
                if items is not None:
                    keys = [key.tobytes() for key in items["key"]]
                    self._places |= {key: (name, n) for n, key in enumerate(keys)}

    def _forget(self, name: str) -> None:
        """Read nothing more of a shard that is gone or damaged, and remove what is left of it."""
        self._shards[name] = None
        self._places = {key: place for key, place in self._places.items() if place[0] != name}
        with suppress(OSError):
            remove_path(self.folder / name)


@dataclass
class FeatureWriter:
    """Collects the outputs of one encoder and writes them in shards, as long as all stores together keep a bound."""

    folder: Path  # of the encoder, in that of all encoders
    layout: FeatureLayout
    space: int  # bytes that the stores of all encoders may take together
    _pending: dict[bytes, np.ndarray] = field(default_factory=dict)
    _bytes: int = 0
    _since: float = 0.0  # when the first of those came
    _began: float = field(default_factory=time.time)
    # the shard that a thread writes, and its end
    _writing: dict[bytes, np.ndarray] = field(default_factory=dict)
    _written: Future[None] | None = None
    _thread: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "store"))

    def pending(self, key: bytes) -> np.ndarray | None:
        """Return an item's output that is not written yet, or None."""
        features = self._pending.get(key)
        return self._writing.get(key) if features is None else features

    def add(self, key: bytes, features: np.ndarray) -> None:
        """Add an item's output `[m, width]`."""
        if not self.space:
            return
        if not self._pending:
            self._since = time.monotonic()
        self._pending[key] = features
        self._bytes += features.nbytes + ITEM.itemsize
        is_full = self._bytes >= min(SHARD_BYTES, self.space // SHARDS)
        if is_full or time.monotonic() - self._since > SHARD_SECONDS:
            self._begin_shard()

    def flush(self) -> None:
        """Write what was added."""
        self._begin_shard()
        if self._written is not None:
            self._written.result()

    def _begin_shard(self) -> None:
        """Begin to write what was added, when the shard before it is written."""
        if self._written is not None:
            self._written.result()
        self._writing, self._pending = self._pending, {}
        needed, self._bytes = self._bytes, 0
        self._written = self._thread.submit(self._write, self._writing, needed)

    def _write(self, features: dict[bytes, np.ndarray], needed: int) -> None:
        """Write a shard. What finds no room is left out: it is encoded again when it comes again."""
        if not features:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._exclusively():
                if self._make_room(needed):
                    write_shard(self.folder / uuid.uuid4().hex, features)
        except OSError as error:
            self.space = 0  # training goes on without
            print_note(
                f"note   {self.folder} cannot be written: {error.strerror or error}; outputs of frozen encoders are "
                "not stored from here on"
            )

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold the stores of all encoders, so that processes do not fill the same room."""
        with (self.folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            yield

    def _make_room(self, needed: int) -> bool:
        """Evict what was not used for longest until there is room; nothing that was used since this writer began.

        Each epoch reads everything once: were the oldest of the same run evicted, every item would
        be gone before it came again.
        """
        shards = []
        for path in self.folder.parent.glob("*/*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix in (".partial", ".old"):
                    if time.time() - status.st_mtime > ABANDONED_SECONDS:
                        remove_path(path)
                else:
                    shards.append((status.st_mtime, shard_bytes(path), path))
        used = sum(size for _, size, _ in shards)
        for modified, size, path in sorted(shards):
            if used + needed <= self.space or modified >= self._began:
                break
            remove_path(path)
            used -= size
        return used + needed <= self.space


def write_shard(folder: Path, features: dict[bytes, np.ndarray]) -> None:
    """Write a shard atomically. Raises OSError."""
    items = np.zeros(len(features), ITEM)
    start = 0
    with atomic_folder(folder) as partial:
        with (partial / "values.bin").open("wb") as file:
            for item, (key, values) in zip(items, features.items(), strict=True):
                item["key"], item["start"], item["length"] = key, start, len(values)
                item["checksum"] = checksum(item, values)
                file.write(np.ascontiguousarray(values))
                start += values.nbytes
            file.flush()
            os.fsync(file.fileno())
        np.save(partial / "items.npy", items)


def shard_names(folder: Path) -> list[str]:
    """List the shards of an encoder's folder."""
    try:
        return sorted(path.name for path in folder.iterdir() if not path.suffix)
    except OSError:
        return []


def read_items(shard: Path) -> np.ndarray | None:
    """Read the table of a shard's items; None where it is damaged or gone."""
    try:
        items = np.load(shard / "items.npy")
    except Exception:  # NumPy's parser raises nearly anything on a damaged file
        return None
    return items if items.dtype == ITEM and items.ndim == 1 else None


def shard_bytes(shard: Path) -> int:
    """Return the size of a shard's files."""
    return sum(file.stat().st_size for file in shard.iterdir())


def checksum(item: np.void, values: np.ndarray) -> int:
    """Compute the checksum of an item's output, its key and its place."""
    place = item["key"].tobytes() + repr((int(item["start"]), int(item["length"]))).encode()
    return zlib.crc32(np.ascontiguousarray(values).view(np.uint8), zlib.crc32(place))
