"""Resolve the paths of a data set's records to files in its media folder, URL or archive, and nowhere else."""

from __future__ import annotations

import base64
import binascii
import lzma
import os
import posixpath
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import numpy as np

from mmjax.config import Outside
from mmjax.data.sample import BadSample
from mmjax.data.storage.array_store import open_arrays, open_arrays_if_sound, save_arrays
from mmjax.data.storage.files import (
    ArchiveMember,
    File,
    FileRef,
    InlineBytes,
    LocalFile,
    RemoteFile,
    file_at,
    hash_strings,
    is_url,
    one_line,
)
from mmjax.data.storage.tar_headers import tar_members
from mmjax.errors import UserError
from mmjax.hub import repository_of

ARCHIVES = (".zip", ".tar")
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# of a .zip member: signature, lengths of its name and its extra field
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_NAMES = ("name", "where")  # arrays of an archive's index
# Kinds of members: 0 is stored as it is, 1 is deflated, these cannot be read.
_LINK = 2
_ENCRYPTED = 3
_METHOD = 4
# What zipfile, decompressors and `tar_members` raise for damaged archives.
ARCHIVE_FAULTS = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    ValueError,
    ArithmeticError,
    RuntimeError,
    struct.error,
)
_WHY = {_LINK: "is a link", _ENCRYPTED: "is encrypted", _METHOD: "is packed by an unknown method"}


@dataclass(frozen=True)
class MediaFolder:
    """Find what a record refers to, in a folder, a URL, or a .zip or .tar.

    root: an archive's members are indexed once, under `cache`. Unless `outside` is "allow", a
    reference that leaves the root is refused: an absolute path, a URL, `..`, a link that leads out
    of it and of the Hugging Face cache's folder of the data set that it is in. An absolute path
    into the root stays in it. outside_key: of `outside` in the config, for messages; empty: there
    is none.
    """

    root: str
    outside: Outside
    cache: Path
    outside_key: str = ""

    def find(self, reference: str) -> FileRef:
        """Resolve a path in this folder, or a data: URL. Raises BadSample, naming the reference."""
        if any("\ud800" <= character <= "\udfff" for character in reference):
            raise BadSample(f"refers to a file by what is not Unicode text: {reference[:200]!r}")
        if reference.startswith("data:"):
            return InlineBytes(data_url(reference))
        if not reference or "\0" in reference:
            raise BadSample(f"refers to a file without a name: {reference!r}")
        if is_url(reference) or os.path.isabs(reference):
            if self.outside == "refuse" and not self._holds(reference):
                raise self._points_outside(reference)
            return file_at(reference)
        # a server would decode %2e to a dot
        unquoted = unquote(reference) if is_url(self.root) else reference
        inside = posixpath.normpath(unquoted)
        if (inside == ".." or inside.startswith(("../", "/"))) and self.outside == "refuse":
            raise self._points_outside(reference)
        if self._archive is not None:
            return self._archive.find(inside)
        if is_url(self.root):
            return RemoteFile(posixpath.join(self.root, reference))
        # normpath has removed `..`, but a link inside the folder may still lead out of it.
        path = os.path.join(self._real_root, inside)
        target = os.path.realpath(path)
        if self.outside == "refuse" and not any(
            os.path.commonpath([inner, target]) == inner for inner in self._within
        ):
            raise BadSample(
                f"{reference!r} is a link that leads outside of {self.root}{self._remedy}"
            )
        return LocalFile(path)

    def _holds(self, reference: str) -> bool:
        """Tell whether an absolute path leads to a file in this folder."""
        if is_url(reference) or is_url(self.root) or self._archive is not None:
            return False
        target = os.path.realpath(reference)
        return any(os.path.commonpath([inner, target]) == inner for inner in self._within)

    def _points_outside(self, reference: str) -> BadSample:
        return BadSample(f"{reference[:200]!r} points outside of {self.root}{self._remedy}")

    @property
    def _remedy(self) -> str:
        return f" ({self.outside_key}=allow reads it)" if self.outside_key else ""

    @cached_property
    def _real_root(self) -> str:
        return os.path.realpath(self.root)

    @cached_property
    def _within(self) -> tuple[str, ...]:
        """The real folders into which links may lead."""
        repository = repository_of(self.root)
        return (self._real_root, os.path.realpath(repository)) if repository else (self._real_root,)

    @cached_property
    def _archive(self) -> Archive | None:
        if self.root.endswith(COMPRESSED):
            raise UserError(
                f"{self.root} is compressed as a whole, so nothing in it can be found alone; unpack it"
            )
        return Archive.open(self.root, self.cache) if self.root.endswith(ARCHIVES) else None


@dataclass(frozen=True)
class Archive:
    """The index of a .zip's or .tar's members, sorted by the hash of their names and memory-mapped."""

    file: File
    stamp: str
    name: np.ndarray  # "S32" [n], sorted
    # int64 [n, 5]: start and stop in the archive, size when inflated, kind, CRC-32 or -1
    where: np.ndarray

    @classmethod
    def open(cls, path: str, cache: Path) -> Archive:
        """Index an archive, or open its cached index. Raises UserError where it is no archive."""
        file = file_at(path)
        try:
            stamp = file.stamp()
            folder = (
                cache
                / f"members2-{hash_strings(os.path.abspath(path) if not is_url(path) else path, stamp)}"
            )
            if (members := open_arrays_if_sound(folder, _NAMES)) is None:
                _write_index(folder, file)
                members = open_arrays(folder, _NAMES)
        except (BadSample, *ARCHIVE_FAULTS) as error:
            raise UserError(f"{path}: the archive cannot be read: {one_line(error)}") from None
        return cls(file, stamp, members["name"], members["where"])

    def find(self, member: str) -> ArchiveMember:
        """Find a member. Raises BadSample where it is missing, a link or can't be unpacked."""
        key = hash_strings(member).encode()
        # of equal names the last counts, as in unpacking
        row = int(np.searchsorted(self.name, key, side="right")) - 1
        if row < 0 or self.name[row] != key:
            raise BadSample(f"{self.file.name}::{member} is missing")
        start, stop, size, kind, crc = map(int, self.where[row])
        if kind in _WHY:
            raise BadSample(f"{self.file.name}::{member} {_WHY[kind]}")
        if self.file.name.endswith(".zip"):
            # The directory has the position of the member's own header, which alone has that
            # header's length.
            header = self.file.range(start, start + _LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise BadSample(
                    f"{self.file.name}::{member} is corrupt: it does not start where the directory says"
                )
            skipped = _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header)[1:])
            start += skipped
            stop += skipped
        return ArchiveMember(
            file=self.file,
            file_stamp=self.stamp,
            member=member,
            start=start,
            stop=stop,
            size=size,
            deflated=kind,
            crc=crc,
        )


def _write_index(folder: Path, file: File) -> None:
    with file.open() as opened:
        rows = _zip_members(opened) if file.name.endswith(".zip") else _tar_members(opened)
        # Hashes have one length, so that names can be searched in a memory-mapped array.
        inside = (
            (hash_strings(name), where) for name, where in rows if not name.startswith(("/", "../"))
        )
        members = np.fromiter(inside, [("name", "S32"), ("where", np.int64, 5)])
    members = members[np.argsort(members["name"], kind="stable")]
    save_arrays(folder, {name: np.ascontiguousarray(members[name]) for name in _NAMES})


def _zip_members(opened: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    with zipfile.ZipFile(opened) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            # Encrypted and linked members are indexed too, so that a record that names one is told
            # why.
            kind = {zipfile.ZIP_STORED: 0, zipfile.ZIP_DEFLATED: 1}.get(
                member.compress_type, _METHOD
            )
            if member.flag_bits & 1:
                kind = _ENCRYPTED
            if stat.S_ISLNK(member.external_attr >> 16):
                kind = _LINK
            start = member.header_offset
            place = (start, start + member.compress_size, member.file_size, kind, member.CRC)
            yield posixpath.normpath(member.filename), place


def _tar_members(opened: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for member in tar_members(opened):
        if member.kind != "directory":
            kind = {"file": 0, "link": _LINK}.get(member.kind, _METHOD)
            yield (
                posixpath.normpath(member.name),
                (member.start, member.stop, member.size, kind, -1),
            )


def data_url(url: str) -> bytes:
    """Decode a `data:image/png;base64,...` URL. Raises BadSample."""
    head, comma, body = url.partition(",")
    if not comma:
        raise BadSample(f"{head[:40]!r} is a data: URL without data")
    return unbase64(body) if head.endswith(";base64") else unquote_to_bytes(body)


def unbase64(text: str) -> bytes:
    """Decode base64. Raises BadSample."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadSample(f"holds base64 that cannot be decoded: {error}") from None
