"""Read the headers of a .tar, as strictly as GNU tar reads them: what it refuses would be another member elsewhere.

A .tar is blocks of 512 bytes: a header for each member, then what it holds; blocks of zeros are its
end. Longer names and sizes are in members of their own, in front of the one that they describe: in
records of POSIX ("pax"), or GNU's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_TAR_HEADER = 1 << 20  # bytes; extended ones hold long names
_BLOCK = 512  # bytes
_RECORD = 20 * _BLOCK  # bytes to a multiple of which writers fill a .tar up
_CHECKSUM = slice(148, 156)
# Bytes of a header: name 0, numbers 100, kind 156, name of a link's file 157, magic 257, and in
# POSIX's the beginning of a longer name 345.
_NUMBERS = {  # fields of every header
    "mode": slice(100, 108),
    "uid": slice(108, 116),
    "gid": slice(116, 124),
    "size": slice(124, 136),
    "mtime": slice(136, 148),
    "checksum": _CHECKSUM,
}
_POSIX = b"ustar\0"  # the magic of headers whose names may begin in a field of their own
_GNU_SPARSE = "GNU.sparse."
# Records of POSIX headers that GNU tar reads, and what it takes as their values.
_RECORDS = {
    **dict.fromkeys(("size", "uid", "gid"), re.compile(r"[0-9]{1,19}")),
    **dict.fromkeys(("mtime", "atime", "ctime"), re.compile(r"-?[0-9]{1,19}(\.[0-9]*)?")),
    **dict.fromkeys(("path", "linkpath"), re.compile(r"[^\0]+")),
}
_LENGTH = re.compile(rb"[ \t]*([0-9]{1,9})[ \t]+")

Kind = Literal["file", "directory", "link", "sparse", "other"]
_KINDS: Mapping[bytes, Kind] = {
    **dict.fromkeys((b"0", b"\0", b"7"), "file"),
    **dict.fromkeys((b"1", b"2"), "link"),
    b"5": "directory",
    b"S": "sparse",
}
_WITHOUT_BYTES = b"23456"  # links by name, devices, directories and pipes


@dataclass(frozen=True)
class TarMember:
    """A member of a .tar, and where its bytes are."""

    name: str
    kind: Kind
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


def tar_members(opened: Any) -> Iterator[TarMember]:
    """Yield the members of a .tar, which is read from its beginning on; nothing is collected.

    Raises ValueError for what GNU tar refuses, for headers of more than `MAX_TAR_HEADER` bytes,
    where there is no end, without which a whole .tar and one cut between members look the same, and
    where more follows behind it.
    """
    position = 0
    shared: dict[str, str] = {}  # records for all members from here on
    records: dict[str, str] = {}  # and for the next one
    while any(header := _read(opened, position, _BLOCK)):
        numbers = _numbers(header, position)
        kind = header[156:157]
        start = position + _BLOCK
        if kind in b"LKxXg":
            content = _read(opened, start, _extended_size(numbers["size"]))
            if kind in b"LK":
                records["path" if kind == b"L" else "linkpath"] = _text(content)
            else:
                (shared if kind == b"g" else records).update(_pax_records(content))
            position = _behind(start, numbers["size"])
            continue
        described = shared | records
        name = described.get("path") or _name(header)
        size = 0 if kind == b"1" else int(described.get("size", numbers["size"]))
        if size and kind in _WITHOUT_BYTES:
            raise ValueError(f"{name[:200]!r} is no file, and has {size:,} bytes")
        extended = kind == b"S" and header[482]
        while extended:  # where the holes are
            extended = _read(opened, start, _BLOCK)[504]
            start += _BLOCK
        yield TarMember(name, _kind(kind, name, described), start, size)
        records = {}
        position = _behind(start, size)
    if any(_rest(opened, position + _BLOCK)):
        raise ValueError("it goes on behind its end; name several files instead of joining them")


def _behind(start: int, size: int) -> int:
    """Return where the header behind a member is."""
    return start + -(-size // _BLOCK) * _BLOCK


def _kind(kind: bytes, name: str, records: Mapping[str, str]) -> Kind:
    known = _KINDS.get(kind, "other")
    if known != "file":
        return known
    if any(record.startswith(_GNU_SPARSE) for record in records):
        return "sparse"
    return "directory" if name.endswith("/") else "file"


def _read(opened: Any, position: int, size: int) -> bytes:
    """Read so many bytes at a position. Raises ValueError where the file ends before."""
    opened.seek(position)
    if len(content := opened.read(size)) < size:
        raise ValueError("it is cut off: it has no end; make or fetch it again")
    return content


def _rest(opened: Any, position: int) -> bytes:
    """Read to the end of a record, which is where most files end."""
    opened.seek(position)
    return opened.read(_behind(0, _RECORD - position % _RECORD))


def _extended_size(size: int) -> int:
    if size > MAX_TAR_HEADER:
        raise ValueError(f"it has a header of {size:,} bytes")
    return size


def _numbers(header: bytes, position: int) -> dict[str, int]:
    """Return the numbers of a header. Raises ValueError where one is none, or the checksum is another one."""
    numbers = {field: _number(header[place]) for field, place in _NUMBERS.items()}
    for field, number in numbers.items():
        if number is None:
            raise ValueError(
                f"its header at byte {position:,} has a {field} of {header[_NUMBERS[field]]!r}"
            )
        if number < 0 and field != "mtime":
            raise ValueError(f"its header at byte {position:,} has a negative {field}")
    summed = header[: _CHECKSUM.start] + b" " * 8 + header[_CHECKSUM.stop :]
    unsigned = sum(summed)
    # Some writers have taken bytes as -128 to 127.
    if numbers["checksum"] not in (unsigned, unsigned - 256 * sum(byte > 127 for byte in summed)):
        raise ValueError(f"its header at byte {position:,} does not go with its checksum")
    return numbers


def _number(field: bytes) -> int | None:
    """Parse octal digits, or a binary number after a bit that says so; None for anything else."""
    if field[0] in (0x80, 0xFF):
        number = (
            int.from_bytes(field, signed=True) if field[0] == 0xFF else int.from_bytes(field[1:])
        )
        return number if abs(number) < 1 << 63 else None
    digits = field.removeprefix(b"\0").partition(b"\0")[0]
    words = digits.split()
    if not digits or (len(words) == 1 and re.fullmatch(rb"[0-7]+", words[0])):
        return int(words[0], 8) if words else 0
    return None


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == _POSIX else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="surrogateescape")


def _pax_records(content: bytes) -> dict[str, str]:
    """Parse POSIX records: each its length, a key, = and a value. Raises ValueError where one is malformed."""
    records = {}
    start = 0
    while content[start:].strip(b"\0"):
        length = _LENGTH.match(content, start)
        stop = start + int(length[1]) if length else 0
        if (
            not length
            or not length.end() < stop <= len(content)
            or content[stop - 1 : stop] != b"\n"
        ):
            raise ValueError(
                f"an extended header of it is malformed: {content[start : start + 40]!r}"
            )
        key, equals, value = (
            content[length.end() : stop - 1].decode(errors="surrogateescape").partition("=")
        )
        if not equals or (key in _RECORDS and not _RECORDS[key].fullmatch(value)):
            raise ValueError(f"an extended header of it has {key[:40]}={value[:40]!r}")
        records[key] = value
        start = stop
    return records
