"""Samples of WebDataset's shards: .tar files in which neighbouring members of one name are a sample; Energon's too.

Each shard is walked once, member by member without reading what they hold, and its index is cached. From then on any
sample is read where it lies, so that shards are as random to access as any other source.

Shards that can only be read from their beginning on (the output of a command, compressed ones, and with a `window` all
behind a URL) are read once for their index, which has their texts and what the headers of their media say. Training
reads them again, in order, as copies in a `Spool`.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from gzip import BadGzipFile
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import yaml

from mmjax.config import WebDatasetSource
from mmjax.data.media.decode import Probe
from mmjax.data.sample import SOUND, BadSample, Conversation, Medium, Split
from mmjax.data.sources.chat_files import resolve_reference
from mmjax.data.sources.chat_records import (
    KEYS,
    Record,
    listed_files,
    parse_chat,
    parse_question,
    value_of_one,
    with_unread,
)
from mmjax.data.sources.json_records import load_json, unique_keys
from mmjax.data.sources.media_sizes import KnownFiles, describe_fault
from mmjax.data.sources.processors import PROBES
from mmjax.data.storage.archives import ARCHIVE_FAULTS, MediaFolder
from mmjax.data.storage.array_store import open_arrays, open_arrays_if_sound, save_arrays
from mmjax.data.storage.files import (
    MAX_BYTES,
    MAX_TEXT,
    ArchiveMember,
    File,
    FileRef,
    Unreadable,
    check_bytes,
    check_unchanged,
    file_at,
    file_inside,
    hash_strings,
    is_url,
    list_files,
    one_line,
    retry,
)
from mmjax.data.storage.spool import PIPE, Forward, Spool, StreamFile, is_stream, locked, open_stream
from mmjax.data.storage.tar_headers import tar_members
from mmjax.errors import BadMedia, UserError

ENERGON = ".nv-meta"  # folder of a data set that Megatron Energon has prepared
_ENERGON_SPLITS = {"train": "train", "validation": "val", "test": "test"}
# Keys of dataset.yaml that are read, or change no sample.
_ENERGON_KEYS = ("__module__", "__class__", "sample_type", "field_map", "subflavor", "subflavors")
_ENERGON_TEXTS = {"CaptioningSample": ("caption",), "VQASample": ("context", "answers")}  # by the sample's class
_ENERGON_READ = ", ".join(f"{kind} with image, {', '.join(names)}" for kind, names in _ENERGON_TEXTS.items())
# What is no medium that can be decoded is among them too: a bad sample, and not one without its medium.
_EXTENSIONS: Mapping[Medium, str] = {
    "image": "jpg jpeg jpe jfif png webp bmp gif tif tiff ppm avif heic heif svg",
    "audio": "wav flac mp3 ogg oga opus m4a aac wma aiff",
    "video": "mp4 m4v webm mkv mov avi mpg mpeg wmv flv 3gp",
}
_MEDIA: Mapping[str, Medium] = {name: medium for medium, names in _EXTENSIONS.items() for name in names.split()}
_TEXTS = ("txt", "text", "caption", "cap")
_VERSION = "1"  # of the index
_NAMES = ("starts", "first", "key", "where", "extension")
_STREAM_NAMES = (*_NAMES, "size", "digest", "text_start", "text")  # of a shard that is a stream
MAX_MEMBERS = 1_000_000  # of a shard
MAX_NAMES = 1 << 28  # bytes of the names of a shard's members, each as long as the longest
_SHORT = 4096  # bytes of a member that a stream's index has, whatever it is
_OPEN_TEXTS = 64  # streams whose texts are open
_WORKERS = 16  # shards that are walked at once: remote ones take their time
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")  # Energon's json[turns][0]
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class WebDatasetRecords:
    """`Conversations` of the samples of several shards, one after the other.

    A sample's text is its .json, with messages or conversations, or a question and an answer; or its .txt, the answer
    to `source.prompt`. Its media are the members with the extensions of images, clips and videos, in their order.
    Raises UserError where a shard is missing, cut off or no .tar.
    """

    def __init__(
        self, path: str, source: WebDatasetSource, split: Split, cache: Path, where: str, spool: Spool
    ) -> None:
        """path: shards, by a pattern or a range, or a folder of Energon's. where: the config's key, for messages."""
        self._source = source
        self._fields: Sequence[str] = ()  # Energon's, of the text
        self._image = ""  # Energon's field of the image
        if os.path.isdir(path):
            self._paths, self._fields, self._image = _energon(Path(path), split, where)
        else:
            self._paths = list_shards(path, where)
        if not source.window and (streams := [path for path in self._paths if is_stream(path)]):
            raise UserError(
                f"{where}: {streams[0]} can only be read from its beginning on; say how many neighbouring samples are "
                f"to be shuffled: {where.rpartition('.')[0]}.window=10000"
            )
        with ThreadPoolExecutor(_WORKERS) as pool:
            index = partial(_index_shard, cache=cache, spool=spool if source.window else None, lock=Lock())
            indexed = list(pool.map(index, self._paths))
        files = [file for file, _ in indexed]
        arrays = open_arrays(indexed[0][1] if len(files) == 1 else _join(indexed, cache), _NAMES)
        sizes = [file.size for file in files if isinstance(file, StreamFile)]
        spool.check_window(where, source.window, len(arrays["key"]), sizes)
        self.window = source.window
        self._starts = arrays["starts"]  # int64 [shards + 1]: first sample of each shard
        self._first = arrays["first"]  # int64 [samples + 1]: first member of each sample
        self._key = arrays["key"]  # bytes [samples]
        self._where = arrays["where"]  # int64 [members, 2]: start and stop in the shard
        self._extension = arrays["extension"]  # bytes [members]
        self._files = files
        self._stamps = [file.stamp() for file in files]
        self._outside = MediaFolder(os.path.dirname(self._paths[0]), "refuse", cache)

    def __len__(self) -> int:
        return len(self._key)

    def fingerprint(self) -> str:
        """Hash the shards' names and stamps, and what is read of them."""
        shards = [f"{os.path.basename(path)} {stamp}" for path, stamp in zip(self._paths, self._stamps, strict=True)]
        read = (
            self._source.question,
            self._source.answer,
            self._source.prompt,
            *self._fields,
            *filter(None, (self._image,)),
        )
        return hash_strings(_VERSION, repr(read), *shards)

    def files(self) -> list[tuple[str, int]]:
        return list(zip(self._paths, np.diff(self._starts).tolist(), strict=True))

    def place(self, index: int) -> str:
        return f"{self._paths[self._shard_of(index)]}::{self._key[index].decode()}"

    def conversation(self, index: int) -> Conversation:
        return self._record(index).conversation

    def media(self, index: int) -> tuple[FileRef, ...]:
        return tuple(
            ref if isinstance(ref, Member) else resolve_reference(ref, self._outside)
            for ref in self._record(index).references
        )

    def _shard_of(self, index: int) -> int:
        # side="right": with starts 0, 3, 3, 5, sample 3 is in the third shard, as the second is empty.
        return int(self._starts.searchsorted(index, side="right")) - 1

    def _members(self, index: int) -> dict[str, Member]:
        """Return a sample's members by their extension."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = self._shard_of(index)
        file = self._files[shard]
        first = int(self._first[self._starts[shard]])  # member of the shard
        members = {}
        for k in range(*self._first[index : index + 2].tolist()):
            extension = self._extension[k].decode()
            start, stop = self._where[k].tolist()
            members[extension] = Member(
                file=file,
                file_stamp=self._stamps[shard],
                member=f"{self._key[index].decode()}.{extension}",
                start=start,
                stop=stop,
                size=stop - start,
                deflated=0,
                content=_stored_text(file, k - first, stop - start) if isinstance(file, StreamFile) else None,
            )
        return members

    def _record(self, index: int) -> Record:
        members = self._members(index)
        media: dict[Medium, list[Member]] = {}
        for extension, member in members.items():
            if medium := _MEDIA.get(extension.rpartition(".")[2].lower()):
                media.setdefault(medium, []).append(member)
        if self._fields:
            *question, answer = (_energon_text(members, field) for field in self._fields)
            if self._image:
                media = {"image": [members[_field_of(members, self._image)[0]]]}
            record = parse_question(question[0] if question else self._source.prompt, answer, media)
            read = [_field_of(members, field)[0] for field in self._fields]
            images = [member for files in media.values() for member in files]
            return _with_unread_members(record, members, [*read, *(n for n in members if members[n] in images)])
        if names := [name for name in _TEXTS if name in members]:
            if len(names) > 1:
                raise BadSample(f"has both .{names[0]} and .{names[1]}; keep the one that is meant")
            text = _text(members[names[0]])
            if not media:
                raise BadSample(
                    f"has no image, clip or video beside its .{names[0]}; its members: {', '.join(members)}"
                )
            record = parse_question(self._source.prompt, text, media)
            return _with_unread_members(record, members, [*names, *_media_names(members)])
        if "json" not in members:
            raise BadSample(f"has neither a .json nor a .txt; its members are {', '.join(members)}")
        return _with_unread_members(self._json_record(members, media), members, ["json", *_media_names(members)])

    def _json_record(self, members: Mapping[str, Member], media: Mapping[Medium, list[Member]]) -> Record:
        """Parse a sample's .json. Raises BadSample."""
        record = _json(members["json"])
        if not isinstance(record, dict):
            raise BadSample(f"has a .json with a {type(record).__name__}, not an object")
        media = {medium: files for medium in KEYS if (files := _in_order(record, medium, media.get(medium, [])))}
        names = {name for keys in KEYS.values() for name in keys}
        if turns := next((name for name in ("messages", "conversations") if record.get(name)), None):
            turn_record = {name: value for name, value in record.items() if name not in names}
            return parse_chat(turn_record | {KEYS[medium][0]: files for medium, files in media.items()}, turns)
        key = self._source.answer
        if (answer := value_of_one(record, (key, f"{key}s"))) is None:
            keys = ", ".join(map(repr, record)) or "none"
            raise BadSample(f"has a .json with neither a conversation nor {key!r}; its keys: {keys}")
        read = {*names, self._source.question, key, f"{key}s"}
        beside = {name: value for name, value in record.items() if name not in read}
        return parse_question(record.get(self._source.question, self._source.prompt), answer, media, beside)


@dataclass(frozen=True)
class Member(ArchiveMember):
    """A member of a shard, whose change in mid-run ends the run. content: what the index has of it."""

    content: bytes | None = None

    def read(self) -> bytes:
        if self.content is not None:
            return self.content
        check_unchanged(self.file, self.file_stamp)
        return super().read()


def _with_unread_members(record: Record, members: Mapping[str, Member], read: Sequence[str]) -> Record:
    """Add the members of a sample that are not read."""
    return with_unread(record, [f".{name}" for name in members if name not in read])


def _media_names(members: Mapping[str, Member]) -> list[str]:
    """List the extensions of a sample's members that are media."""
    return [name for name in members if name.rpartition(".")[2].lower() in _MEDIA]


def _in_order(record: Mapping[str, Any], medium: Medium, files: Sequence[Member]) -> Sequence[Member]:
    """Return a sample's members of a medium in the order in which its record names them; in their own where it has
    other names for them.

    Raises BadSample where it names more or fewer than there are, or some by their names and others not.
    """
    listed = listed_files(record, KEYS[medium])
    if not listed:
        return files
    if len(listed) != len(files):
        raise BadSample(f"names {len(listed)} {medium} file(s), and has {len(files)} such member(s)")
    by_name = {os.path.basename(file.member): file for file in files}
    paths = [one.get("path") if isinstance(one, Mapping) else one for one in listed]
    names = [os.path.basename(path) if isinstance(path, str) else "" for path in paths]
    if not any(name in by_name for name in names):
        return files
    if sorted(names) != sorted(by_name):
        other = next((name for name in names if name not in by_name), names[0])
        raise BadSample(f"names the {medium} file {other!r}; its members are {', '.join(by_name)}")
    return [by_name[name] for name in names]


def list_shards(path: str, where: str) -> list[str]:
    """List the shards of a path, URL or command, with `*` or ranges such as {000..127}. Raises UserError.

    path: as the user has typed it; of what stands in data, `file_inside` makes a path that is no command.
    """
    if (span := _RANGE.search(path)) is None:
        if path.startswith(PIPE):
            return [path]
        # A file in this folder may be called as if it were a command.
        return [os.path.join(os.curdir, file) if file.startswith(PIPE) else file for file in list_files(path, where)]
    first, last = span.groups()
    if int(first) > int(last):
        raise UserError(f"{where}={path}: {span[0]} counts down; write {{{last}..{first}}}")
    # One by one: what stands in data may name a range of any length, and ends at the first that is missing.
    numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return [s for n in numbers for s in list_shards(f"{path[: span.start()]}{n}{path[span.end() :]}", where)]


def _text(member: Member) -> str:
    check_bytes(member.name, member.size, MAX_TEXT)
    try:
        return member.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise BadSample(f"{member.name} is not UTF-8") from None


def _json(member: Member) -> Any:
    check_bytes(member.name, member.size, MAX_TEXT)
    content = member.read()
    try:
        return load_json(content, object_pairs_hook=unique_keys)
    except BadSample as error:
        raise BadSample(f"{member.name} {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadSample(f"{member.name} is not JSON: {error}") from None


# -------------------------------------------------------------------------------------------------------------- index


def _index_shard(path: str, cache: Path, spool: Spool | None, lock: Lock) -> tuple[File | StreamFile, Path]:
    """Index a shard unless that was done; return it, and the folder of its index. Raises UserError.

    spool: None where no shard is a stream. lock: held while sizes of media are stored.
    """
    piped = path.startswith(PIPE)
    try:
        place = path if piped or is_url(path) else os.path.abspath(path)
        folder = cache / f"shard-{hash_strings(place, '' if piped else file_at(path).stamp(), _VERSION)}"
        if spool is not None and (is_url(path) or is_stream(path)):
            return _index_stream(path, folder.with_name(f"{folder.name}-stream"), spool, lock)
        if open_arrays_if_sound(folder, _NAMES) is None:
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
    return StreamFile(path, spool, int(arrays["size"][0]), arrays["digest"][0].decode(), folder), folder


def _read_stream(path: str, folder: Path, spool: Spool, lock: Lock) -> None:
    """Read a stream to its end, and store its index, with texts and the sizes of its media."""
    text_ends = [0]
    media: list[tuple[str, int, int, dict[str, Probe]]] = []  # name, start, stop, what its probes say

    def read(name: str, start: int, stop: int) -> None:
        extension = name.rpartition(".")[2].lower()
        if (medium := _MEDIA.get(extension)) and stop - start <= MAX_BYTES:
            kinds = (medium, SOUND) if medium == "video" else (medium,)
            stream.seek(start)
            content = stream.read(stop - start)
            media.append((name, start, stop, {kind: _probed(kind, content) for kind in kinds}))
        elif stop - start <= (MAX_TEXT if extension == "json" or extension in _TEXTS else _SHORT):
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


def _stored_text(file: StreamFile, member: int, size: int) -> bytes | None:
    """Return what the index of a stream has of a member's text; None where it has none."""
    start, text = _texts(file)
    begin, end = start[member : member + 2].tolist()
    return text[begin:end].tobytes() if end - begin == size else None


@lru_cache(_OPEN_TEXTS)
def _texts(file: StreamFile) -> tuple[np.ndarray, np.ndarray]:
    arrays = open_arrays(file.index, ("text_start", "text"))
    return arrays["text_start"], arrays["text"]


def _index(
    name: str, opened: BinaryIO | Forward, read: Callable[[str, int, int], None] = lambda name, start, stop: None
) -> dict[str, np.ndarray]:
    """Index a shard. read: is called with name, start and stop of each member, in order."""
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
            raise UserError(f"{name} has {member} twice in one sample; give samples names of their own")
        of_sample.add(extension)
        read(member, start, stop)
        where.append((start, stop))
        extensions.append(extension.encode())
        longest = max(longest, len(keys[-1]), len(extensions[-1]))
        if len(where) > MAX_MEMBERS or len(where) * longest > MAX_NAMES:
            raise UserError(f"{name} has more than {len(where):,} members, with names of {longest:,} bytes; split it")
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
        if member.kind == "file" and "." in (base := os.path.basename(name)) and not base.startswith((".", "__")):
            yield name, member.start, member.stop


def _join(indexed: Sequence[tuple[File | StreamFile, Path]], cache: Path) -> Path:
    """Join the indexes of several shards into one folder, since each memory-mapped array keeps a file open."""
    folders = [folder for _, folder in indexed]
    digests = [file.digest for file, _ in indexed if isinstance(file, StreamFile)]
    joined = cache / f"shards-{hash_strings(*(folder.name for folder in folders), *digests)}"
    if open_arrays_if_sound(joined, _NAMES) is None:
        indexes = [open_arrays(folder, _NAMES) for folder in folders]
        members = np.cumsum([0, *(len(index["where"]) for index in indexes)])
        arrays = {name: np.concatenate([index[name] for index in indexes]) for name in ("key", "where", "extension")}
        arrays["starts"] = np.cumsum([0, *(len(index["key"]) for index in indexes)])
        first = [index["first"][:-1] + begin for index, begin in zip(indexes, members[:-1], strict=True)]
        arrays["first"] = np.concatenate([*first, members[-1:]])
        save_arrays(joined, arrays)
    return joined


# ------------------------------------------------------------------------------------------------------------ Energon


def _energon(folder: Path, split: Split, where: str) -> tuple[list[str], Sequence[str], str]:
    """Return the shards of a split of a folder that Energon has prepared, and where samples have text and image."""
    described = _yaml(folder / ENERGON / "dataset.yaml", where)
    listed = folder / ENERGON / "split.yaml"
    splits = _yaml(listed, where)
    for file, values, read in (("dataset.yaml", described, _ENERGON_KEYS), ("split.yaml", splits, ("split_parts",))):
        if order := next((key for key in values if values[key] and key not in read), None):
            raise UserError(
                f"{where}={folder}: {ENERGON}/{file} has {order}, which is not read; prepare a folder without it, or "
                "give the shards themselves"
            )
    parts = _inner(splits, "split_parts").get(_ENERGON_SPLITS[split]) or []
    if not isinstance(parts, list):
        raise UserError(f"{listed}: split_parts.{_ENERGON_SPLITS[split]} is no list of shards")
    paths = [file_inside(os.path.join(folder, ""), part, str(listed)) for part in parts]
    shards = [shard for path in paths for shard in list_shards(path, where)]
    if not shards:
        raise UserError(f"{where}={folder}: {ENERGON}/split.yaml has no shards of {_ENERGON_SPLITS[split]}")
    kind = _inner(described, "sample_type").get("__class__", "")
    field_map = _inner(described, "field_map")
    if not field_map:
        return shards, (), ""
    texts = _ENERGON_TEXTS.get(kind, ())
    if (
        not texts
        or not all(isinstance(field_map.get(name), str) for name in texts)
        or not isinstance(field_map.get("image", ""), str)
        or set(field_map) - {*texts, "image"}
    ):
        raise UserError(
            f"{where}={folder}: {ENERGON}/dataset.yaml has the sample type {kind!r} with the fields "
            f"{', '.join(map(str, field_map))}; read are {_ENERGON_READ}, and samples without field_map"
        )
    return shards, [field_map[name] for name in texts], field_map.get("image", "")


def _inner(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside another; empty where it is missing, or something else."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _yaml(path: Path, where: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(
            f"{where}={path.parents[1]}: {ENERGON}/{path.name}: {error.strerror}; give a folder that `energon prepare` "
            "has prepared, or the shards themselves"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {one_line(error)}") from None
    return value if isinstance(value, dict) else {}


def _field_of(members: Mapping[str, Member], field: str) -> tuple[str, list[str]]:
    """Find the member that a field of Energon's map refers to, the first of several (`jpg,png`), and the keys in it.

    Return its extension, and the keys behind it, as in json[turns][0].
    """
    for option in field.split(","):
        if (match := _FIELD.fullmatch(option)) and match[1] in members:
            return match[1], re.findall(r"\[([^\[\]]+)\]", match[2])
    raise BadSample(f"has no .{field}; its members are {', '.join(members)}")


def _energon_text(members: Mapping[str, Member], field: str) -> Any:
    """Return the text, or the texts, that a field of Energon's map refers to."""
    name, keys = _field_of(members, field)
    member = members[name]
    value = _json(member) if name.rpartition(".")[2] == "json" else _text(member)
    for key in keys:
        try:
            value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise BadSample(f"{member.name} has no {field}") from None
    return value
