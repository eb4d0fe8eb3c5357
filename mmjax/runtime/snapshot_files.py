"""Files of snapshots in the memory of hosts: one of each step and process that writes.

    /dev/shm/mmjax-<user's number>/<run's id>/<host>/120-3.state

is what process 3 wrote after step 120: a line of JSON with a checksum, then the bytes of pieces of
arrays, each with the sum of its bits. A file has its name once it is whole, and no other host's
file has the same one, so that a host keeps copies of others' files beside its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np

from mmjax.disk import atomic_write, remove_path, verify_checksum, with_checksum
from mmjax.distributed import coordination
from mmjax.distributed.peer_links import PeerLinks
from mmjax.errors import UserError
from mmjax.runtime.bit_sums import host_bit_sum

FORMAT = "mmjax-snapshot-1"
KEEP = "keep snapshot"  # requests between processes
SEND = "send snapshot"
_NAME = re.compile(r"(\d+)-(\d+)\.state")

Box = tuple[tuple[int, int], ...]  # first and last (exclusive) index along every axis


class Whole(NamedTuple):
    """A snapshot that the hosts together have."""

    step: int
    start: str
    holders: dict[int, list[int]]  # by writer, the processes on whose hosts its file is


class Piece(NamedTuple):
    """A part of an array."""

    name: str
    shape: tuple[int, ...]  # of the whole array
    box: Box
    values: np.ndarray


class StoredPiece(NamedTuple):
    """Describe a piece in a file; the offset counts from the end of the header."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    offset: int
    bit_sum: int


@dataclass(frozen=True)
class SnapshotHeader:
    """Describe a file: whose it is, of which step, and what belongs to it.

    start: names the start of the run that wrote it, of whose layout its pieces are. group: the
    first writer of the processes whose files together are the whole state, which are as many as
    `writers`. config, data: as of a checkpoint.
    """

    run: str
    start: str
    step: int
    writer: int
    group: int
    writers: int
    config: str
    data: dict[str, Any]


class SnapshotFile:
    """A file that is read. Raises ValueError or OSError where it is none, or damaged."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.header, self.pieces = parse_header(file.readline())
            self._start = file.tell()
        self._path = path

    def read(self, piece: StoredPiece) -> np.ndarray:
        """Read a piece, and compare it with its checksum."""
        dtype = jnp.dtype(piece.dtype)
        lengths = [last - first for first, last in piece.box]
        count = int(np.prod(lengths, dtype=np.int64))
        offset = self._start + piece.offset
        values = np.fromfile(self._path, dtype, count, offset=offset)
        if values.size != count or host_bit_sum(values) != piece.bit_sum:
            raise ValueError(f"{piece.name} in {self._path} is not what was written")
        return values.reshape(lengths)


def write_snapshot(folder: Path, header: SnapshotHeader, pieces: Sequence[Piece]) -> Path:
    """Write a file, whole or not at all. Raises OSError."""
    stored, offset = [], 0
    for piece in pieces:
        bit_sum = host_bit_sum(piece.values)
        dtype = piece.values.dtype.name
        stored.append(StoredPiece(*piece[:3], dtype=dtype, offset=offset, bit_sum=bit_sum))
        offset += piece.values.nbytes
    path = folder / f"{header.step}-{header.writer}.state"
    fields = {"format": FORMAT, "header": asdict(header), "pieces": stored}
    with atomic_write(path) as partial, partial.open("wb") as file:
        file.write(json.dumps(with_checksum(fields)).encode() + b"\n")
        for piece in pieces:
            file.write(piece.values.reshape(-1).view(np.uint8).data)
    return path


def parse_header(line: bytes) -> tuple[SnapshotHeader, list[StoredPiece]]:
    """Parse the first line of a file. Raises ValueError where it is damaged, or of another format."""
    fields = verify_checksum(json.loads(line))
    if fields.get("format") != FORMAT:
        raise ValueError(f"its format is {fields.get('format')!r}, not {FORMAT!r}")
    pieces = [StoredPiece(name, tuple(shape), tuple(map(tuple, box)), *rest)
              for name, shape, box, *rest in fields["pieces"]]  # fmt: skip
    return SnapshotHeader(**fields["header"]), pieces


class SnapshotFolder:
    """The files in the memory of this host, of one run. Processes of a host share it."""

    def __init__(self, root: Path, run: str, host: str) -> None:
        """Raises UserError where the folder cannot be made, or is another user's."""
        self._user = root / f"mmjax-{os.getuid()}"
        self.run = run
        self.path = self._user / run / host
        try:
            self._user.mkdir(mode=0o700, exist_ok=True)
            status = self._user.lstat()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"training.memory_folder={root}: {error.strerror}; name a folder of a memory file system"
            ) from None
        if status.st_uid != os.getuid():
            raise UserError(
                f"{self._user} is not yours; remove it, or set another training.memory_folder"
            )

    def free_bytes(self) -> int:
        """Return the bytes that may be written, those of this run's present files among them."""
        with suppress(OSError):
            here = sum(path.stat().st_size for path in self.path.iterdir())
            return shutil.disk_usage(self.path).free + here
        return 0

    def open(self, step: int, writer: int, start: str = "") -> SnapshotFile | None:
        """Open a file; None where it is missing, damaged, or of another run, or of another start where one is given."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            file = SnapshotFile(self.path / f"{step}-{writer}.state")
            header = file.header
            if (header.run, header.step, start or header.start) == (self.run, step, header.start):
                return file
        return None

    def whole_snapshots(self) -> dict[int, Whole]:
        """Return, the same on all processes, the snapshots that the hosts together have, by step."""
        here = []
        for step, writer in self._names():
            if (file := self.open(step, writer)) is not None:
                header = file.header
                here.append([step, header.start, header.group, header.writers, writer])
        holders: dict[tuple[Any, ...], dict[int, list[int]]] = defaultdict(dict)
        for process, text in enumerate(coordination.gather("snapshots", json.dumps(here))):
            for *group, writer in json.loads(text):
                holders[tuple(group)].setdefault(writer, []).append(process)
        whole: dict[int, Whole] = {}
        for (step, start, _, writers), found in holders.items():
            if len(found) == writers:
                merged = whole.get(step, Whole(step, start, {}))
                # each host may have all, or two starts have made the step
                if merged.start == start:
                    whole[step] = merged._replace(holders=merged.holders | found)
        return whole

    def remove_before(self, step: int) -> None:
        """Remove the files of earlier steps."""
        self._remove(lambda other: other < step)

    def remove_after(self, step: int) -> None:
        """Remove the files of later steps, and what killed processes have left."""
        self._remove(lambda other: other > step)
        for partial in self.path.glob("*.partial"):
            remove_path(partial)

    def remove_all(self) -> None:
        """Remove the folder, and those above it that are empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
            self._user.rmdir()

    def _remove(self, condition: Callable[[int], bool]) -> None:
        for step, writer in self._names():
            if condition(step):
                # a process of the same host may be faster
                (self.path / f"{step}-{writer}.state").unlink(missing_ok=True)

    def _names(self) -> list[tuple[int, int]]:
        matches = [_NAME.fullmatch(path.name) for path in self.path.iterdir()]
        return sorted((int(match[1]), int(match[2])) for match in matches if match)

    # ----------------------------------------------------------------------------------------------
    # between hosts

    def serve(self, links: PeerLinks) -> None:
        """Keep and send files for other processes."""
        links.handle(KEEP, self._keep)
        links.handle(SEND, self._send)

    def copy_to(self, links: PeerLinks, process: int, path: Path) -> None:
        """Have another process keep a copy of a file. Raises OSError."""
        fields = {"name": path.name, "bytes": path.stat().st_size}
        with links.request(process, KEEP, **fields) as stream, path.open("rb") as file:
            shutil.copyfileobj(file, stream, 1 << 20)
            stream.flush()
            if stream.read(1) != b"+":
                raise ConnectionError(f"process {process} could not keep {path.name}")

    def fetch(self, links: PeerLinks, process: int, step: int, writer: int) -> None:
        """Get a copy of a file that another process has. Raises OSError."""
        name = f"{step}-{writer}.state"
        with links.request(process, SEND, name=name, header=False) as stream:
            length = int(stream.readline())
            self._receive(name, length, stream)

    def fetch_pieces(
        self, links: PeerLinks, process: int, step: int, writer: int
    ) -> list[StoredPiece]:
        """Ask what is in a file that another process has. Raises OSError or ValueError."""
        name = f"{step}-{writer}.state"
        with links.request(process, SEND, name=name, header=True) as stream:
            return parse_header(stream.readline())[1]

    def _keep(self, fields: dict[str, Any], stream: BinaryIO) -> None:
        self._receive(str(fields["name"]), int(fields["bytes"]), stream)
        stream.write(b"+")
        stream.flush()

    def _send(self, fields: dict[str, Any], stream: BinaryIO) -> None:
        name = str(fields["name"])
        if not _NAME.fullmatch(name):
            return
        with (self.path / name).open("rb") as file:
            if fields["header"]:
                stream.write(file.readline())
            else:
                stream.write(f"{os.fstat(file.fileno()).st_size}\n".encode())
                shutil.copyfileobj(file, stream, 1 << 20)
            stream.flush()

    def _receive(self, name: str, length: int, stream: BinaryIO) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(name)
        with atomic_write(self.path / name) as partial, partial.open("wb") as file:
            while length:
                chunk = stream.read(min(length, 1 << 20))
                if not chunk:
                    raise ConnectionError(f"{name} was cut off")
                file.write(chunk)
                length -= len(chunk)
