"""Read files by reference: local, remote, inside an archive, inline, or a stretch of a clip's file."""

from __future__ import annotations

import glob as local_glob
import hashlib
import io
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar

import fsspec

from mmjax.data.sample import BadSample, Conversation
from mmjax.disk import atomic_write
from mmjax.errors import UserError

HEAD = 4096  # bytes of the first read of a remote file; most headers are shorter
MAX_BYTES = 1 << 29  # of one encoded file, also unpacked: a larger one is no image or clip
MAX_TEXT = 1 << 26  # bytes of one record, or of a member with text
PIECE = 1 << 22  # bytes that are read at a time of what may be longer than it says
_ATTEMPTS = 4
# What file systems call their tag or time of change: HTTP and S3, GCS, Azure, SFTP, the Hugging
# Face Hub, ...
_STAMPS = (
    "ETag",
    "etag",
    "Content-MD5",
    "md5Hash",
    "Last-Modified",
    "LastModified",
    "mtime",
    "last_modified",
    "blob_id",
)

T = TypeVar("T")


class Unreadable(BadSample):
    """A missing or unreadable file. That may pass, while other BadSamples are faults of its bytes."""


def check_bytes(name: str, size: int, limit: int = MAX_BYTES) -> None:
    """Raise BadSample for a file of more bytes than are read into memory."""
    if size > limit:
        raise BadSample(f"{name} has {size:,} bytes, more than the {limit:,} that are read of one")


class FileRef(Protocol):
    """An encoded file. All methods raise Unreadable where it is missing or cannot be read."""

    @property
    def name(self) -> str:
        """Return a name that no other file has."""

    def stamp(self) -> str:
        """Return a string that changes when the bytes change."""

    def open(self) -> BinaryIO:
        """Open it to read a header: fetches little more than what is read."""

    def read(self) -> bytes:
        """Read all of it."""


def check_unchanged(file: File, stamp: str) -> None:
    """Raise UserError where a file of many samples is gone, or has changed since it had this stamp.

    As bad samples they would be lost one by one.
    """
    try:
        if file.stamp() == stamp:
            return
    except Unreadable as error:
        raise UserError(f"{error}; go on with --resume when it is there again") from None
    raise UserError(
        f"{file.name} has changed since it was opened; restore it and go on with --resume, or train on what it has "
        "now with --resume --new-data"
    )


class Conversations(Protocol):
    """Random access to the records of a data set, and to the files of their media. Nothing is decoded.

    `conversation` and `media` raise BadSample for a record that cannot be used.
    """

    def __len__(self) -> int: ...

    def fingerprint(self) -> str:
        """Return a hash that changes when any record changes."""

    def files(self) -> list[tuple[str, int]]:
        """List the data set's files with the number of records in each, in order."""

    def place(self, index: int) -> str:
        """Name where a record stands, for a person: by its file and line, row or key."""

    def conversation(self, index: int) -> Conversation:
        """Read a record's conversation."""

    def media(self, index: int) -> tuple[FileRef, ...]:
        """Return the files of a record's media, in order: JPEG, PNG, WAV, FLAC, ..."""


@dataclass(frozen=True)
class InlineBytes:
    """Bytes that are part of their record; name and stamp are a hash of them."""

    content: bytes

    @property
    def name(self) -> str:
        return f"inline:{self.stamp()}"

    def stamp(self) -> str:
        return hashlib.blake2b(self.content, digest_size=16).hexdigest()

    def open(self) -> BinaryIO:
        return io.BytesIO(self.content)

    def read(self) -> bytes:
        return self.content


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine, stamped with its size and time of change."""

    name: str  # its path

    def stamp(self) -> str:
        with raise_unreadable(self.name):
            status = os.stat(self.name)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise Unreadable(f"{self.name} is not a file")
        return f"{status.st_size}-{status.st_mtime_ns}"

    def open(self) -> BinaryIO:
        self.stamp()
        with raise_unreadable(self.name):
            return open(self.name, "rb")

    def read(self) -> bytes:
        with self.open() as file, raise_unreadable(self.name):
            check_bytes(self.name, os.fstat(file.fileno()).st_size)
            return file.read()

    def range(self, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` - 1."""
        with self.open() as file, raise_unreadable(self.name):
            return os.pread(file.fileno(), stop - start, start)


@dataclass(frozen=True)
class RemoteFile:
    """A file behind an fsspec URL, stamped with its size and the server's tags or time of change."""

    name: str  # its URL

    def stamp(self) -> str:
        info = self._info
        tags = [f"{key}={info[key]}" for key in _STAMPS if info.get(key) is not None]
        return f"{info.get('size')}-{'-'.join(tags)}"

    def open(self) -> BinaryIO:
        return io.BufferedReader(_RangeReader(self, self.size()), HEAD)

    def size(self) -> int:
        """Return the size in bytes. Raises Unreadable where the server does not say."""
        if (size := self._info.get("size")) is None:
            raise Unreadable(f"{self.name}: the server does not say how long it is")
        return int(size)

    def read(self) -> bytes:
        check_bytes(self.name, self._info.get("size") or 0)
        return retry(self.name, self._read)

    def _read(self) -> bytes:
        if not self.name.startswith("http"):
            return filesystem(self.name).cat_file(self.name)
        # A server may send more than it says, and compressed. Without blocks this is one request.
        with filesystem(self.name).open(self.name, "rb", block_size=0) as file:
            return read_bounded(file, self.name)

    def range(self, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` - 1, also from a server that only serves whole files."""
        data: bytes = retry(
            self.name, lambda: filesystem(self.name).cat_file(self.name, start=start, end=stop)
        )
        return data if len(data) <= stop - start else data[start:stop]

    @property
    def _info(self) -> dict[str, Any]:
        # Requested once; not a cached_property, which before Python 3.12 makes all threads wait for
        # each other.
        if "info" not in self.__dict__:
            self.__dict__["info"] = retry(self.name, lambda: _info(self.name))
        return self.__dict__["info"]


File = LocalFile | RemoteFile


@dataclass(frozen=True)
class ArchiveMember:
    """A member of an archive, stamped with the archive's stamp when it was opened."""

    file: File
    file_stamp: str
    member: str
    start: int  # bytes of the archive
    stop: int
    size: int  # bytes when inflated
    deflated: int  # 0 or 1
    crc: int = -1  # CRC-32 of what it holds; -1: the archive says none

    @property
    def name(self) -> str:
        return f"{self.file.name}::{self.member}"

    def stamp(self) -> str:
        return f"{self.file_stamp}-{self.start}"

    def open(self) -> BinaryIO:
        if self.deflated:
            return io.BytesIO(self.read())
        return io.BufferedReader(_RangeReader(self.file, self.size, self.start), HEAD)

    def read(self) -> bytes:
        """Read all of it. Raises BadSample also where it inflates to another size than the archive says."""
        check_bytes(self.name, max(self.size, self.stop - self.start))
        try:
            data = self._inflated() if self.deflated else self.file.range(self.start, self.stop)
        except zlib.error as error:
            raise BadSample(f"{self.name} is corrupt: {error}") from None
        if len(data) != self.size:
            raise BadSample(
                f"{self.name} is truncated or corrupt: {len(data)} bytes, not {self.size}"
            )
        if self.crc >= 0 and zlib.crc32(data) != self.crc:
            raise BadSample(
                f"{self.name} is corrupt: its bytes do not go with the archive's CRC-32"
            )
        return data

    def _inflated(self) -> bytes:
        """Inflate piece by piece, to one byte beyond the size that the archive says at most."""
        inflate = zlib.decompressobj(-15)  # raw deflate, without zlib's header
        data = io.BytesIO()
        for start in range(self.start, self.stop, PIECE):
            packed = self.file.range(start, min(start + PIECE, self.stop))
            while packed and data.tell() <= self.size:
                data.write(inflate.decompress(packed, min(PIECE, self.size + 1 - data.tell())))
                packed = inflate.unconsumed_tail
        return data.getvalue()


def read_bounded(file: Any, name: str, limit: int = MAX_BYTES) -> bytes:
    """Read a file to its end, piece by piece. Raises BadSample once it has more than `limit` bytes."""
    data = io.BytesIO()
    while piece := file.read(PIECE):
        data.write(piece)
        check_bytes(name, data.tell(), limit)
    return data.getvalue()  # which shares the buffer


class _RangeReader(io.RawIOBase):
    """Read a file by ranges, each at least twice as long as the one before: a long header takes few requests.

    The caches of fsspec read blocks of one size: many requests for a long header, or many bytes for
    a short one.
    """

    def __init__(self, file: File, size: int, offset: int = 0) -> None:
        self._file = file
        self._size = size
        self._offset = offset  # of our byte 0 in the file
        self._position = 0
        self._window = b""  # bytes from `_window_start` on
        self._window_start = 0
        self._next_size = HEAD  # bytes: 4 KB, 8 KB, ... up to 4 MB

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(
            0,
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence],
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = self._position
        count = min(len(buffer), max(0, self._size - start))
        # Read ahead: most headers are in the first 4 KB, and a long one takes log2 of its size in
        # requests.
        if (
            not self._window_start
            <= start
            <= start + count
            <= self._window_start + len(self._window)
        ):
            stop = min(self._size, start + max(count, self._next_size))
            self._window = self._file.range(self._offset + start, self._offset + stop)
            self._window_start = start
            self._next_size = min(2 * self._next_size, PIECE)
        data = self._window[start - self._window_start :][:count]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


# --------------------------------------------------------------------------------------------------
# paths and URLs


def is_url(path: str) -> bool:
    """Return whether fsspec is to read it; anything else is a path of this machine."""
    return "://" in path


def file_at(path: str) -> File:
    """Return the file of a path or URL."""
    return RemoteFile(path) if is_url(path) else LocalFile(path)


@cache
def _filesystem(process: int, url_start: str) -> Any:
    # `process` is part of the cache's key alone: a forked worker must not share its parent's
    # connections.
    try:
        return fsspec.core.url_to_fs(url_start)[0]
    except (ImportError, ValueError) as error:
        raise Unreadable(f"{url_start}: fsspec cannot open it: {one_line(error)}") from None


def filesystem(url: str) -> Any:
    """Return fsspec's file system of a URL, one per server and process: its connections do not survive a fork."""
    scheme, _, rest = url.partition("://")
    return _filesystem(os.getpid(), f"{scheme}://{rest.partition('/')[0]}")


def list_files(path: str, key: str) -> list[str]:
    """List the files of a path, URL or pattern with `*`, sorted. Raises UserError, which names config key `key`."""
    try:
        if not any(character in path for character in "*?["):
            file_at(path).stamp()
            files = [path]
        elif is_url(path):
            files = [
                filesystem(path).unstrip_protocol(name) for name in filesystem(path).glob(path)
            ]
        else:
            files = local_glob.glob(path, recursive=True)
    except BadSample as error:
        raise UserError(
            f"{key}: {error}; give a path, a pattern with * or a URL that fsspec opens"
        ) from None
    except Exception as error:  # each client library behind fsspec has its own
        raise UserError(f"{key}={path}: {one_line(error)}") from None
    if not files:
        raise UserError(
            f"{key}={path}: no such file; give a path, a pattern with * or a URL that fsspec opens"
        )
    return sorted(files)


def drop_ignored(files: Sequence[str], patterns: Sequence[str], key: str) -> list[str]:
    """Return the files whose path ends in none of these patterns, such as drafts/*.

    key: of the files in the config, for messages. Raises UserError for an empty pattern, or where
    no file is left.
    """
    ignore = f"{key.rpartition('.')[0]}.ignore={','.join(patterns)}"
    try:
        used = [file for file in files if not any(map(PurePosixPath(file).match, patterns))]
    except ValueError:
        raise UserError(f"{ignore}: has an empty pattern; take it out") from None
    if not used:
        raise UserError(f"{ignore}: leaves out all {len(files)} files of {key}; name fewer")
    return used


def file_inside(folder: str, name: Any, what: str) -> str:
    """Join a folder and the name that one of its files gives another one; it may have `*` and ranges.

    what: the file, for messages. Raises UserError for anything else: what stands in data fetches
    nothing, executes nothing and reads nothing elsewhere.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError(
            f"{what} names a file by {str(name)[:80]!r}; expected a path inside {folder}"
        )
    if is_url(name) or os.path.isabs(name) or ".." in Path(name).parts:
        raise UserError(
            f"{what} names {name[:200]!r}, which is outside of {folder}; name that yourself in the config"
        )
    return os.path.join(folder, name)


def local_copy(path: str, folder: Path) -> Path:
    """Return a local file as it is; copy a remote one into `folder`, once per stamp."""
    if not is_url(path):
        return Path(path)
    file = RemoteFile(path)
    copy = folder / f"{hash_strings(path, file.stamp())}{Path(path).suffix}"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Several processes may copy at once: each writes a file of its own, and the renames replace
        # each other.
        with atomic_write(copy) as partial:
            retry(path, lambda: filesystem(path).get_file(path, str(partial)))
            if partial.stat().st_size != file.size():
                raise UserError(
                    f"{path}: only {partial.stat().st_size} of {file.size()} bytes came; run again"
                )
    return copy


def hash_strings(*parts: str) -> str:
    """Hash these strings together to 32 hexadecimal digits."""
    return hashlib.blake2b(
        "\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()


def _info(url: str) -> dict[str, Any]:
    try:
        return dict(filesystem(url).info(url))
    except FileNotFoundError:
        # fsspec's HTTP raises this for any error; a read raises the actual one.
        filesystem(url).cat_file(url, start=0, end=1)
        return dict(filesystem(url).info(url))


def retry(url: str, read: Callable[[], T]) -> T:
    """Call `read`, again after 0.25, 1 and 4 s where the error may be transient. Raises Unreadable."""
    for attempt in range(_ATTEMPTS):
        try:
            return read()
        except (UserError, BadSample):
            raise
        except Exception as error:  # each client library behind fsspec has its own
            # Client errors (4xx) stay, except 408 (timeout) and 429 (rate limit).
            permanent = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)
            refused = 400 <= getattr(error, "status", 0) < 500 and error.status not in (408, 429)
            if permanent or refused or attempt + 1 == _ATTEMPTS:
                raise _unreadable(url, error) from None
            time.sleep(0.25 * 4**attempt)
    raise AssertionError("unreachable")


@contextmanager
def raise_unreadable(path: str) -> Iterator[None]:
    """Turn errors of the operating system into Unreadable."""
    try:
        yield
    except BadSample:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: Exception) -> Unreadable:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Unreadable(f"{path} is missing")
    return Unreadable(f"{path} cannot be read: {one_line(error)}")


def one_line(error: Exception) -> str:
    """Describe an error in one line, for a message: libraries use several lines, or none."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__
