"""Index the members of WebDataset shards, each shard read once."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from gzip import BadGzipFile
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import BinaryIO

import numpy as np

from mmjax.data.media.decode import Probe
from mmjax.data.sample import SOUND, BadSample, Medium
from mmjax.data.sources.known_files import KnownFiles, describe_fault
from mmjax.data.sources.processors import PROBES
from mmjax.data.storage.archives import ARCHIVE_FAULTS
from mmjax.data.storage.array_store import open_arrays, open_arrays_if_sound, save_arrays
from mmjax.data.storage.files import (
    MAX_BYTES,
    MAX_TEXT,
    ArchiveMember,
    File,
    Unreadable,
    check_unchanged,
    file_at,
    hash_strings,
    is_url,
    one_line,
    retry,
)
from mmjax.data.storage.spool import (
    PIPE,
    Forward,
    Spool,
    StreamFile,
    is_stream,
    locked,
    open_stream,
)
from mmjax.data.storage.tar_headers import tar_members
from mmjax.errors import BadMedia, UserError

# What is no medium that can be decoded is among them too: a bad sample, and not one without its
# medium.
_EXTENSIONS: Mapping[Medium, str] = {
    "image": "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm avif heic heif svg",
    "audio": "wav flac mp3 ogg oga opus m4a aac wma aiff",
    "video": "mp4 m4v webm mkv mov avi mpg mpeg wmv flv 3gp",
}
MEDIA: Mapping[str, Medium] = {
    name: medium for medium, names in _EXTENSIONS.items() for name in names.split()
}
TEXTS = ("txt", "text", "caption", "cap")
VERSION = "1"  # of the index
NAMES = ("starts", "first", "key", "where", "extension")
_STREAM_NAMES = (*NAMES, "size", "digest", "text_start", "text")  # of a shard that is a stream
MAX_MEMBERS = 1_000_000  # of a shard
MAX_NAMES = 1 << 28  # bytes of the names of a shard's members, each as long as the longest
_SHORT = 4096  # bytes of a member that a stream's index has, whatever it is
_OPEN_TEXTS = 64  # streams whose texts are open


@dataclass(frozen=True)
class Member(ArchiveMember):
    """A member of a shard, whose change in mid-run ends the run. content: what the index has of it."""

    content: bytes | None = None

    def read(self) -> bytes:
        if self.content is not None:
            return self.content
        check_unchanged(self.file, self.file_stamp)
        return super().read()


# --------------------------------------------------------------------------------------------------
# index


def index_shard(
    path: str, cache: Path, spool: Spool | None, lock: Lock
) -> tuple[File | StreamFile, Path]:
    """Index a shard unless that was done; return it, and the folder of its index. Raises UserError.

    spool: None where no shard is a stream. lock: held while sizes of media are stored.
    """
    piped = path.startswith(PIPE)
    try:
        place = path if piped or is_url(path) else os.path.abspath(path)
        folder = (
            cache / f"shard-{hash_strings(place, '' if piped else file_at(path).stamp(), VERSION)}"
        )
        if spool is not None and (is_url(path) or is_stream(path)):
            return _index_stream(path, folder.with_name(f"{folder.name}-stream"), spool, lock)
        if open_arrays_if_sound(folder, NAMES) is None:
            with file_at(path).open() as opened:
                save_arrays(folder, _index(path, opened))
    except Unreadable as error:
        raise UserError(f"{error}; give shards that can be read") from None
    except (BadSample, *ARCHIVE_FAULTS) as error:
        raise UserError(f"{path} cannot be read as a .tar: {one_line(error)}") from None
    return file_at(path), folder


def _index_stream(path: str, folder: Path, spool: Spool, lock: Lock) -> tuple[StreamFile, Path]:
    """Index a stream. One of the processes that open it reads it; the others take its index."""
    with locked(folder.with_suffix(".lock")):
        if (arrays := open_arrays_if_sound(folder, _STREAM_NAMES)) is None:
            retry(path, lambda: _read_stream(path, folder, spool, lock))
            arrays = open_arrays(folder, _STREAM_NAMES)
    return StreamFile(
        path, spool, int(arrays["size"][0]), arrays["digest"][0].decode(), folder
    ), folder


def _read_stream(path: str, folder: Path, spool: Spool, lock: Lock) -> None:
    """Read a stream to its end, and store its index, with texts and the sizes of its media."""
    text_ends = [0]
    # name, start, stop, what its probes say
    media: list[tuple[str, int, int, dict[str, Probe]]] = []

    def read(name: str, start: int, stop: int) -> None:
        extension = name.rpartition(".")[2].lower()
        if (medium := MEDIA.get(extension)) and stop - start <= MAX_BYTES:
            kinds = (medium, SOUND) if medium == "video" else (medium,)
            stream.seek(start)
            content = stream.read(stop - start)
            media.append((name, start, stop, {kind: _probed(kind, content) for kind in kinds}))
        elif stop - start <= (MAX_TEXT if extension == "json" or extension in TEXTS else _SHORT):
            stream.seek(start)
            texts.write(stream.read(stop - start))
        text_ends.append(texts.tell())

    with TemporaryFile(dir=folder.parent) as texts:
        with open_stream(path, spool.space) as stream:
            try:
                arrays = _index(path, stream, read)
            except ARCHIVE_FAULTS as error:  # which another try would not change
                if isinstance(error, OSError) and not isinstance(error, BadGzipFile):
                    raise
                raise UserError(f"{path} cannot be read as a .tar: {one_line(error)}") from None
            digest = stream.digest()
            size = stream.tell()
        file = StreamFile(path, spool, size, digest, folder)
        with lock:
            known = KnownFiles(folder.parent / "media")
            for name, start, stop, probed in media:
                place = {"start": start, "stop": stop, "size": stop - start, "deflated": 0}
                member = Member(file=file, file_stamp=file.stamp(), member=name, **place)
                for kind, probe in probed.items():
                    with suppress(BadSample):  # which is stored as well
                        known.size(kind, member, probe)
            known.write()
        texts.flush()
        text = np.memmap(texts, np.uint8, "r") if texts.tell() else np.empty(0, np.uint8)
        stamp = {"size": np.array([size]), "digest": np.array([digest.encode()])}
        save_arrays(folder, arrays | stamp | {"text": text, "text_start": np.array(text_ends)})


def _probed(kind: str, content: bytes) -> Probe:
    """Return a probe that says again of whatever file what a medium's header said."""
    try:
        size = PROBES[kind](io.BytesIO(content))
    except UserError:
        raise
    except Exception as error:  # decoders raise nearly anything on hostile bytes
        reason = describe_fault(error)  # the error itself would keep the content in memory

        def fail(file: BinaryIO) -> tuple[int, int]:
            raise BadMedia(reason)

        return fail
    return lambda file: size


def stored_text(file: StreamFile, member: int, size: int) -> bytes | None:
    """Return what the index of a stream has of a member's text; None where it has none."""
    start, text = _texts(file)
    begin, end = start[member : member + 2].tolist()
    return text[begin:end].tobytes() if end - begin == size else None


@lru_cache(_OPEN_TEXTS)
def _texts(file: StreamFile) -> tuple[np.ndarray, np.ndarray]:
    arrays = open_arrays(file.index, ("text_start", "text"))
    return arrays["text_start"], arrays["text"]


def _index(
    name: str,
    opened: BinaryIO | Forward,
    read: Callable[[str, int, int], None] = lambda name, start, stop: None,
) -> dict[str, np.ndarray]:
    """Index a shard. read: is called with name, start and stop of each member, in order."""
    # Of the members a.jpg, a.json, b.jpg: two samples, of members 0 and 1, and 2.
    #   first 0 2 3   key a b   extension jpg json jpg   where (start, stop) of each member
    first: list[int] = []
    keys: list[bytes] = []
    where: list[tuple[int, int]] = []
    extensions: list[bytes] = []
    of_sample: set[str] = set()  # extensions of the last sample
    last_key = None
    longest = 0  # bytes of a name
    for member, start, stop in _members_of(name, opened):
        folder, _, base = member.rpartition("/")
        stem, _, extension = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if key != last_key:
            first.append(len(where))
            keys.append(key.encode())
            of_sample = set()
            last_key = key
        if extension in of_sample:
            raise UserError(
                f"{name} has {member} twice in one sample; give samples names of their own"
            )
        of_sample.add(extension)
        read(member, start, stop)
        where.append((start, stop))
        extensions.append(extension.encode())
        longest = max(longest, len(keys[-1]), len(extensions[-1]))
        if len(where) > MAX_MEMBERS or len(where) * longest > MAX_NAMES:
            raise UserError(
                f"{name} has more than {len(where):,} members, with names of {longest:,} bytes; split it"
            )
    return {
        "starts": np.array([0, len(first)]),
        "first": np.array([*first, len(where)]),
        "key": np.array(keys, f"S{max(map(len, keys), default=1)}"),
        "where": np.array(where, np.int64).reshape(-1, 2),
        "extension": np.array(extensions, f"S{max(map(len, extensions), default=1)}"),
    }


def _members_of(shard: str, opened: BinaryIO | Forward) -> Iterator[tuple[str, int, int]]:
    """Yield the name, start and stop of each file in a shard. Raises as `tar_members`, and UserError for holes."""
    for member in tar_members(opened):
        name = os.path.normpath(member.name)
        if member.kind == "sparse":
            raise UserError(f"{shard} has {name} with holes (tar --sparse); write it again without")
        if (
            member.kind == "file"
            and "." in (base := os.path.basename(name))
            and not base.startswith((".", "__"))
        ):
            yield name, member.start, member.stop


def join_shards(indexed: Sequence[tuple[File | StreamFile, Path]], cache: Path) -> Path:
    """Join the indexes of several shards into one folder, since each memory-mapped array keeps a file open."""
    folders = [folder for _, folder in indexed]
    digests = [file.digest for file, _ in indexed if isinstance(file, StreamFile)]
    joined = cache / f"shards-{hash_strings(*(folder.name for folder in folders), *digests)}"
    if open_arrays_if_sound(joined, NAMES) is None:
        indexes = [open_arrays(folder, NAMES) for folder in folders]
        members = np.cumsum([0, *(len(index["where"]) for index in indexes)])
        arrays = {
            name: np.concatenate([index[name] for index in indexes])
            for name in ("key", "where", "extension")
        }
        arrays["starts"] = np.cumsum([0, *(len(index["key"]) for index in indexes)])
        first = [
            index["first"][:-1] + begin for index, begin in zip(indexes, members[:-1], strict=True)
        ]
        arrays["first"] = np.concatenate([*first, members[-1:]])
        save_arrays(joined, arrays)
    return joined
