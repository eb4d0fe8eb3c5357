"""Headers of .tar files: read as by Python's tarfile, and refused where GNU tar refuses them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from mmjax.data.storage.archives import MediaFolder
from mmjax.data.storage.tar_headers import tar_members
from mmjax.errors import UserError

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "GNU": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
NAMES = {
    "ustar": ["a.txt", "f/" * 70 + "b.txt"],
    "GNU": ["a.txt", "é" * 300],
    "pax": ["a.txt", "é" * 300],
}
BLOCK = 512


def header(name: str = "0.txt", **fields: object) -> bytearray:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return bytearray(info.tobuf(tarfile.USTAR_FORMAT))


def signed(head: bytearray) -> bytes:
    """Return a header with the checksum that it needs."""
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def changed(start: int, field: bytes, **fields: object) -> bytes:
    head = header(**fields)
    head[start : start + len(field)] = field
    return signed(head)


def described(record: bytes, length: int | None = None) -> bytes:
    """An empty file behind a POSIX header of one record, which says its own length unless one is given."""
    if length is None:
        length = next(
            n for n in range(len(record), len(record) + 9) if len(b"%d %s" % (n, record)) == n
        )
    content = b"%d %s" % (length, record)
    extended = header("x", type=tarfile.XHDTYPE, size=len(content))
    return (
        signed(extended)
        + content.ljust(-(-len(content) // BLOCK) * BLOCK, b"\0")
        + signed(header())
    )


def members(content: bytes) -> list:
    return list(tar_members(io.BytesIO(content)))


@pytest.mark.parametrize("form", FORMATS)
def test_members_are_where_tarfile_finds_them(form) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=FORMATS[form]) as archive:
        for name in NAMES[form]:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            info.mtime = 1.5 if form == "pax" else 1
            archive.addfile(info, io.BytesIO(b"x" * len(name)))
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"of {kind.decode()}")
            info.type = kind
            info.linkname = NAMES[form][-1][:90]
            archive.addfile(info)
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as archive:
        expected = [(m.name, m.offset_data, m.size) for m in archive.getmembers()]
    got = members(file.getvalue())
    assert [(m.name.rstrip("/"), m.start, m.size) for m in got] == expected
    assert [m.kind for m in got] == ["file", "file", "directory", "link", "link", "other"]


MALFORMED = {
    "another checksum": (
        bytes(header()).replace(b"0.txt", b"1.txt"),
        "does not go with its checksum",
    ),
    "letters as its size": (changed(124, b"00000000009\0"), "a size of b'00000000009"),
    "spaces as its size": (changed(124, b" " * 12), "a size of b' '"),
    "a size below 0": (changed(124, b"\xff" * 12), "a negative size"),
    "a size beyond 2^63": (changed(124, b"\x80" + b"\xff" * 11), "a size of"),
    "letters as its owner": (changed(108, b"0x1\0"), "a uid of"),
    "a link with bytes": (
        changed(124, b"00000001000\0", type=tarfile.SYMTYPE),
        "is no file, and has 512 bytes",
    ),
    "a record without a line break": (
        described(b"path=a.jpg", 13),
        "an extended header of it is malformed",
    ),
    "a record longer than its header": (
        described(b"path=a.jpg\n", 99),
        "an extended header of it is malformed",
    ),
    "a record without a length": (
        described(b"path=a.jpg\n").replace(b"14 p", b"xx p"),
        "an extended header of it is",
    ),
    "a record without =": (described(b"path\n"), "an extended header of it has path="),
    "a record with a size below 0": (
        described(b"size=-5\n"),
        "an extended header of it has size='-5'",
    ),
    "a record with a size of 1e9": (
        described(b"size=1e9\n"),
        "an extended header of it has size='1e9'",
    ),
    "a record with a time of nan": (
        described(b"mtime=nan\n"),
        "an extended header of it has mtime='nan'",
    ),
    "a name with a null byte": (described(b"path=a\0b\n"), "an extended header of it has path="),
    "a shorter file than it says": (changed(124, b"00000100000\0"), "it is cut off: it has no end"),
    "more behind its end": (
        signed(header()) + bytes(2 * BLOCK) + signed(header()),
        "it goes on behind its end",
    ),
    "a block of zeros in its middle": (
        signed(header()) + bytes(BLOCK) + signed(header()),
        "goes on behind its end",
    ),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_what_gnu_tar_refuses_is_refused_whatever_tarfile_makes_of_it(what, tmp_path: Path) -> None:
    """But for what follows an end, which GNU tar leaves out without a word."""
    content, message = MALFORMED[what]
    (tmp_path / "d.tar").write_bytes(content + bytes(2 * BLOCK))
    with pytest.raises(UserError, match=r"d\.tar: the archive cannot be read: .*" + message):
        MediaFolder(str(tmp_path / "d.tar"), "refuse", tmp_path / "cache").find("0.txt")


def test_a_file_with_holes_is_one_however_that_is_said() -> None:
    assert [m.kind for m in members(described(b"GNU.sparse.major=1\n") + bytes(2 * BLOCK))] == [
        "sparse"
    ]
    holes = header(type=tarfile.GNUTYPE_SPARSE, size=3)
    holes[482] = 1  # where the holes are goes on in a block of its own
    got = members(
        signed(holes)
        + bytes(BLOCK)
        + b"abc".ljust(BLOCK, b"\0")
        + signed(header())
        + bytes(2 * BLOCK)
    )
    assert [(m.kind, m.start, m.size) for m in got] == [
        ("sparse", 2 * BLOCK, 3),
        ("file", 4 * BLOCK, 0),
    ]
