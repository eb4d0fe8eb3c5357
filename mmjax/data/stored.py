"""Where encoded bytes lie: local files, files behind any fsspec URL, pieces of them, and bytes at hand."""

from __future__ import annotations

import glob as local_glob
import hashlib
import io
import os
import stat
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import fsspec

from mmjax.data.conversation import BadSample, Conversations
from mmjax.errors import UserError

HEAD = 4096  # bytes of a remote file that are read first; most headers are shorter
LARGEST = 1 << 30  # bytes of one encoded file: a larger one is no image or clip
_ATTEMPTS = 4
_STAMPS = ("ETag", "etag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "mtime", "last_modified")

T = TypeVar("T")


class Unreadable(BadSample):
    """A file that is missing or cannot be read; that may change, other than what is wrong with its bytes."""


class Stored(Protocol):
    """An encoded file. All methods raise Unreadable where it is missing or cannot be read."""

    @property
    def name(self) -> str:
        """Tells it from all others."""

    def stamp(self) -> str:
        """Changes when its bytes change."""

    def open(self) -> BinaryIO:
        """For headers: reads no more than is asked for, or little more."""

    def read(self) -> bytes: ...


class StoredConversations(Conversations, Protocol):
    """Conversations that say where their media lie, so that a header can be read without the rest."""

    def media(self, index: int) -> tuple[Stored, ...]:
        """The record's media, in order. Raises BadSample."""


@dataclass(frozen=True)
class Inline:
    """Bytes that came with their record."""

    content: bytes

    @property
    def name(self) -> str:
        """By content."""
        return f"inline:{self.stamp()}"

    def stamp(self) -> str:
        """A hash."""
        return hashlib.blake2b(self.content, digest_size=16).hexdigest()

    def open(self) -> BinaryIO:
        """From memory."""
        return io.BytesIO(self.content)

    def read(self) -> bytes:
        """All of it."""
        return self.content


@dataclass(frozen=True)
class LocalFile:
    """A file of this machine."""

    path: str

    @property
    def name(self) -> str:
        """Its path."""
        return self.path

    def stamp(self) -> str:
        """Size and time of change."""
        try:
            found = os.stat(self.path)
        except (OSError, ValueError) as error:
            raise _unreadable(self.path, error) from None
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise Unreadable(f"{self.path} is not a file")
        return f"{found.st_size}-{found.st_mtime_ns}"

    def open(self) -> BinaryIO:
        """As Python does."""
        self.stamp()
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def read(self) -> bytes:
        """All of it."""
        with self.open() as file:
            try:
                if os.fstat(file.fileno()).st_size > LARGEST:
                    raise BadSample(f"{self.path} has more than {LARGEST >> 20} MB")
                return file.read()
            except OSError as error:
                raise _unreadable(self.path, error) from None

    def range(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` - 1."""
        with self.open() as file:
            try:
                return os.pread(file.fileno(), stop - start, start)
            except OSError as error:
                raise _unreadable(self.path, error) from None


@dataclass(frozen=True)
class RemoteFile:
    """A file behind an fsspec URL."""

    url: str

    @property
    def name(self) -> str:
        """Its URL."""
        return self.url

    def stamp(self) -> str:
        """The server's tag or time of change, and the size. Raises Unreadable."""
        found = self._info
        told = [f"{key}={found[key]}" for key in _STAMPS if found.get(key) is not None]
        return f"{found.get('size')}-{'-'.join(told)}"

    def open(self) -> BinaryIO:
        """A window that grows as more is read."""
        return io.BufferedReader(_Ranges(self, self.size()), HEAD)

    def size(self) -> int:
        """Bytes. Raises Unreadable where the server does not say."""
        if (size := self._info.get("size")) is None:
            raise Unreadable(f"{self.url}: the server does not say how long it is")
        return int(size)

    def read(self) -> bytes:
        """All of it."""
        return _tried(self.url, lambda: filesystem(self.url).cat_file(self.url))

    def range(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` - 1, also from a server that can only give the whole file."""
        found: bytes = _tried(self.url, lambda: filesystem(self.url).cat_file(self.url, start=start, end=stop))
        return found if len(found) <= stop - start else found[start:stop]

    @property
    def _info(self) -> dict[str, Any]:
        """Asked once; not a cached_property, which before Python 3.12 makes all threads wait for each other."""
        if "info" not in self.__dict__:
            self.__dict__["info"] = _tried(self.url, lambda: _info(self.url))
        return self.__dict__["info"]


File = LocalFile | RemoteFile


@dataclass(frozen=True)
class Piece:
    """A member of an archive: bytes of a file, as they are or deflated to `size`."""

    file: File
    file_stamp: str
    member: str
    start: int
    stop: int
    size: int
    deflated: int

    @property
    def name(self) -> str:
        """Of the archive and the member."""
        return f"{self.file.name}::{self.member}"

    def stamp(self) -> str:
        """The archive's, as it was opened."""
        return f"{self.file_stamp}-{self.start}"

    def open(self) -> BinaryIO:
        """A window of an archive that is not compressed; else all of it, from memory."""
        if self.deflated:
            return io.BytesIO(self.read())
        return io.BufferedReader(_Ranges(self.file, self.size, self.start), HEAD)

    def read(self) -> bytes:
        """All of it. Raises BadSample also where it inflates to more than the archive says."""
        if self.size > LARGEST:
            raise BadSample(f"{self.name} has more than {LARGEST >> 20} MB")
        found = self.file.range(self.start, self.stop)
        if self.deflated:
            try:
                found = zlib.decompressobj(-15).decompress(found, self.size + 1)
            except zlib.error as error:
                raise BadSample(f"{self.name} is corrupt: {error}") from None
        if len(found) != self.size:
            raise BadSample(f"{self.name} is truncated or corrupt: {len(found)} bytes, not {self.size}")
        return found


class _Ranges(io.RawIOBase):
    """Reads of a file by ranges, each at least twice as long as the one before, so that a long header takes few."""

    def __init__(self, file: File, size: int, offset: int = 0) -> None:
        self._file, self._size, self._offset = file, size, offset
        self._at, self._start, self._held, self._next = 0, 0, b"", HEAD

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._size - self._at))
        if not self._start <= self._at <= self._at + wanted <= self._start + len(self._held):
            stop = min(self._size, self._at + max(wanted, self._next))
            self._held = self._file.range(self._offset + self._at, self._offset + stop)
            self._start, self._next = self._at, 2 * self._next
        found = self._held[self._at - self._start :][:wanted]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


# -------------------------------------------------------------------------------------------------- paths and URLs


def is_url(path: str) -> bool:
    """Whether fsspec is to read it; anything else is a path of this machine."""
    return "://" in path


def stored(path: str) -> File:
    """The file of a path or URL."""
    return RemoteFile(path) if is_url(path) else LocalFile(path)


@cache
def _filesystem(process: int, url_start: str) -> Any:
    try:
        return fsspec.core.url_to_fs(url_start)[0]
    except (ImportError, ValueError) as error:
        raise Unreadable(f"{url_start}: fsspec cannot open it: {one_line(error)}") from None


def filesystem(url: str) -> Any:
    """fsspec's, one for each server and process: its connections are kept, and do not survive a fork."""
    scheme, _, rest = url.partition("://")
    return _filesystem(os.getpid(), f"{scheme}://{rest.partition('/')[0]}")


def found_files(path: str, key: str) -> list[str]:
    """The files of a path, URL or pattern with `*`, sorted. Raises UserError, naming the config's `key`, for none."""
    try:
        if not any(mark in path for mark in "*?["):
            stored(path).stamp()
            found = [path]
        elif is_url(path):
            found = [filesystem(path).unstrip_protocol(name) for name in filesystem(path).glob(path)]
        else:
            found = local_glob.glob(path, recursive=True)
    except BadSample as error:
        raise UserError(f"{key}: {error}; give a path, a pattern with * or a URL that fsspec opens") from None
    except Exception as error:  # each client library behind fsspec has its own
        raise UserError(f"{key}={path}: {one_line(error)}") from None
    if not found:
        raise UserError(f"{key}={path}: no such file; give a path, a pattern with * or a URL that fsspec opens")
    return sorted(found)


def local_copy(path: str, folder: Path) -> Path:
    """The file itself where it is of this machine, else a copy in `folder`, made once for each stamp."""
    if not is_url(path):
        return Path(path)
    file = RemoteFile(path)
    copy = folder / f"{digest(path, file.stamp())}{Path(path).suffix}"
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = copy.with_name(f"{copy.name}.{os.getpid()}.partial")
        _tried(path, lambda: filesystem(path).get_file(path, str(partial)))
        if partial.stat().st_size != file.size():
            raise UserError(f"{path}: only {partial.stat().st_size} of {file.size()} bytes came; run again")
        partial.rename(copy)
    return copy


def digest(*parts: str) -> str:
    """A name for these strings together, 32 hexadecimal digits."""
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _info(url: str) -> dict[str, Any]:
    try:
        return dict(filesystem(url).info(url))
    except FileNotFoundError:  # HTTP's says so whatever went wrong; reading tells
        filesystem(url).cat_file(url, start=0, end=1)
        return dict(filesystem(url).info(url))


def _tried(url: str, read: Callable[[], T]) -> T:
    """What `read` gives, tried again after a while where the fault may pass. Raises Unreadable."""
    for attempt in range(_ATTEMPTS):
        try:
            return read()
        except (UserError, BadSample):
            raise
        except Exception as error:  # each client library behind fsspec has its own
            lasting = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)
            refused = 400 <= getattr(error, "status", 0) < 500 and error.status not in (408, 429)
            if lasting or refused or attempt + 1 == _ATTEMPTS:
                raise _unreadable(url, error) from None
            time.sleep(0.25 * 4**attempt)
    raise AssertionError("unreachable")


def _unreadable(path: str, error: Exception) -> Unreadable:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return Unreadable(f"{path} is missing")
    return Unreadable(f"{path} cannot be read: {one_line(error)}")


def one_line(error: Exception) -> str:
    """What went wrong, for a message: libraries say it in several lines, or not at all."""
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(told.split())[:200] or type(error).__name__
