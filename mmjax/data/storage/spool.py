"""Read files without random access: they are copied, as many at once as fit a folder of bounded size.

The folder is a window over what sources read in order. Processes that share it copy each file once,
and what was used longest ago makes room. What a killed process was copying is copied again.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import lzma
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from mmjax.data.storage.files import Unreadable, file_at, filesystem, hash_strings, is_url, retry
from mmjax.disk import remove_path
from mmjax.errors import UserError

PIPE = "pipe:"  # before a command whose output is the file
_STEP = 1 << 20  # bytes that are copied at a time
# bytes that a `Forward` can seek back; readers of .tar step back by a header at most
_KEPT = 1 << 16
_XZ_MEMORY = 1 << 28  # bytes; presets need 65 MiB at most, and a header may ask for 4 GiB
_POLL_SECONDS = 0.05
# exit codes of a command whose output nobody reads to the end
_STOPPED = -signal.SIGPIPE, 128 + signal.SIGPIPE

Write = Callable[[BinaryIO, Callable[[int], None]], None]  # to a file, after reserving the bytes


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made where it is missing. The end of the process frees it too."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Spool:
    """A folder with copies of at most `space` bytes together, also while they are made."""

    folder: Path
    space: int

    def open(self, name: str, write: Write) -> BinaryIO:
        """Open the copy of this name, made by `write` where there is none, to read. Raises UserError."""
        path = self.folder / hash_strings(name)
        while True:
            with suppress(FileNotFoundError):
                file = path.open("rb")  # stays readable when another process makes room
                os.utime(file.fileno())
                return file
            self._copy(name, path, write)

    def check_window(self, where: str, window: int, samples: int, sizes: Sequence[int]) -> None:
        """Raise UserError where the copies of two windows, one behind the other, do not fit. sizes: bytes of files."""
        needed = sum(sizes) * min(1.0, 2 * window / max(1, samples)) + max(sizes, default=0)
        if min(sum(sizes), needed) > self.space:
            raise UserError(
                f"{where.rpartition('.')[0]}.window={window}: two windows take {needed / 1e9:.3g} GB, and "
                f"data.window_space={self.space / 1e9:g}; raise that, or lower the window"
            )

    def _copy(self, name: str, path: Path, write: Write) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits while another process copies it
            if not _is_at(file, partial):
                return
            try:
                if path.exists():
                    partial.unlink()
                    return
                file.truncate(0)
                write(file, lambda size: self._reserve(name, file, size))
                file.flush()
                partial.rename(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def _reserve(self, name: str, file: BinaryIO, size: int) -> None:
        """Make room for the bytes of a file, which count from here on."""
        if size > self.space:
            raise _beyond_space(name, size, self.space)
        while True:
            with locked(self.folder / "lock"):
                if self._used() + size > self.space:
                    for _, old in sorted(
                        (status.st_mtime_ns, path) for path, status in self._entries()
                    ):
                        _remove_unused(old)
                        if self._used() + size <= self.space:
                            break
                if self._used() + size <= self.space:
                    file.truncate(size)
                    return
            time.sleep(_POLL_SECONDS)  # other copies are being made

    def _used(self) -> int:
        return sum(status.st_size for _, status in self._entries())

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # a copy has just got its name
                yield path, path.stat()


def _beyond_space(name: str, size: int, space: int) -> UserError:
    return UserError(
        f"{name} has {size / 1e9:.3g} GB, and data.window_space={space / 1e9:g} GB is all that copies may "
        "take; raise it, or make smaller files"
    )


def _is_at(file: BinaryIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _remove_unused(path: Path) -> None:
    """Remove a copy, or what a killed process left of one; what a living one is writing stays."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.name != "lock":
            path.unlink()


# --------------------------------------------------------------------------------------------------
# streams


def is_stream(path: str) -> bool:
    """Return whether a file can only be read from its beginning on: a command's output, or a compressed file."""
    return path.startswith(PIPE) or fsspec.utils.infer_compression(path) is not None


@dataclass(frozen=True)
class StreamFile:
    """A file that is read whole, decompressed, into a spool. Its stamp is a hash of its bytes, which are verified.

    index: the folder of what is known of it, which is removed when it brings other bytes.
    """

    name: str  # a path, a URL, or a command after `PIPE`
    spool: Spool
    size: int  # bytes
    digest: str
    index: Path

    def stamp(self) -> str:
        return f"{self.size}-{self.digest}"

    def range(self, start: int, stop: int) -> bytes:
        """Read bytes `start` to `stop` - 1. Raises UserError: without the file many samples would be lost at once."""
        try:
            with self.spool.open(f"{self.name} {self.digest}", self._write) as file:
                return os.pread(file.fileno(), stop - start, start)
        except Unreadable as error:
            raise UserError(f"{error}; go on with --resume when it is there again") from None

    def _write(self, file: BinaryIO, reserve: Callable[[int], None]) -> None:
        reserve(self.size)

        def copy() -> None:
            file.seek(0)
            with open_stream(self.name, self.spool.space) as stream:
                while (data := stream.read(_STEP)) and file.tell() + len(data) <= self.size:
                    file.write(data)
                if data or stream.tell() != self.size or stream.digest() != self.digest:
                    remove_path(self.index)
                    raise UserError(
                        f"{self.name} has changed since it was indexed, or is cut off; restore it and go on with "
                        "--resume, or train on what it has now with --resume --new-data"
                    )

        retry(self.name, copy)


class Forward(io.RawIOBase):
    """A stream whose bytes are hashed as they pass. It seeks forward by reading, and a little back.

    Raises UserError where more than `space` bytes pass.
    """

    def __init__(self, stream: Any, name: str, space: int) -> None:
        self._stream = stream
        self._name = name
        self._space = space
        self._hash = hashlib.blake2b(digest_size=16)
        self._passed = 0  # bytes
        self._kept = b""  # the last of them
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or offset < self._passed - len(self._kept):
            raise io.UnsupportedOperation("a stream cannot go back")
        while self._passed < offset and self._pass(min(_STEP, offset - self._passed)):
            pass
        self._position = min(offset, self._passed)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read so many bytes; fewer only at the end."""
        self.seek(self._position)
        passed = self._kept[len(self._kept) - (self._passed - self._position) :]
        data = io.BytesIO()
        data.write(passed if size < 0 else passed[:size])
        while (size < 0 or data.tell() < size) and (
            piece := self._pass(_STEP if size < 0 else min(_STEP, size - data.tell()))
        ):
            data.write(piece)
        self._position += data.tell()
        return data.getvalue()

    def digest(self) -> str:
        """Hash all bytes to the end of the stream, which is read."""
        while self._pass(_STEP):
            pass
        self._position = self._passed
        return self._hash.hexdigest()

    def _pass(self, size: int) -> bytes:
        data: bytes = self._stream.read(size)
        self._hash.update(data)
        self._passed += len(data)
        if self._passed > self._space:
            raise _beyond_space(self._name, self._passed, self._space)
        self._kept = (self._kept + data)[-_KEPT:] if len(data) < _KEPT else data[-_KEPT:]
        return data


class _Xz(io.RawIOBase):
    """Unpack .xz or .lzma as `lzma.LZMAFile`, but with no more than `_XZ_MEMORY`, whatever the header asks for."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._unpack = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = b""
        while not data:
            packed = b""
            if self._unpack.eof:  # another stream may follow, behind zeros
                packed = self._unpack.unused_data.lstrip(b"\0")
                while not packed and (piece := self._stream.read(_STEP)):
                    packed = piece.lstrip(b"\0")
                if not packed:
                    return b""
                self._unpack = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
            elif self._unpack.needs_input and not (packed := self._stream.read(_STEP)):
                raise EOFError("compressed file ended before its end was reached")
            data = self._unpack.decompress(packed, size)
        return data


@contextmanager
def open_stream(name: str, space: int) -> Iterator[Forward]:
    """Open a file, a URL or the output of a command to read from its beginning on.

    Raises Unreadable, OSError, and UserError where it has more than `space` bytes, unpacked.
    """
    kind = fsspec.utils.infer_compression(name)
    opened = (
        _command(name)
        if name.startswith(PIPE)
        else _url(name)
        if is_url(name)
        else file_at(name).open()
    )
    with opened as stream:
        if kind in ("xz", "lzma"):
            yield Forward(_Xz(stream), name, space)
        else:
            yield Forward(
                fsspec.compression.compr[kind](stream, mode="rb") if kind else stream, name, space
            )


def _url(url: str) -> Any:
    # Without blocks HTTP is one request, which needs no server that knows ranges.
    options = {"block_size": 0} if url.startswith("http") else {}
    return filesystem(url).open(url, "rb", **options)


@contextmanager
def _command(name: str) -> Iterator[BinaryIO]:
    command = name.removeprefix(PIPE)
    with tempfile.TemporaryFile() as errors:
        try:
            with subprocess.Popen(
                command, shell=True, stdout=subprocess.PIPE, stderr=errors
            ) as process:
                yield process.stdout
        finally:  # also where its output is nonsense since it failed
            if (code := process.returncode) not in (0, *_STOPPED):
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                raise Unreadable(f"{name} failed: {lines[-1] if lines else f'exit code {code}'}")
