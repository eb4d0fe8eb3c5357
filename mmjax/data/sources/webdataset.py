"""Samples of WebDataset's shards: .tar files in which neighbouring members of one name are a sample; Energon's too.

Each shard is walked once, member by member without reading what they hold, and its index is cached.
From then on any sample is read where it lies, so that shards are as random to access as any other
source.

Shards that can only be read from their beginning on (the output of a command, compressed ones, and
with a `window` all behind a URL) are read once for their index, which has their texts and what the
headers of their media say. Training reads them again, in order, as copies in a `Spool`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from mmjax.config import WebDatasetSource
from mmjax.data.sample import BadSample, Conversation, Medium, Split
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
from mmjax.data.sources.energon import (
    energon_text,
    field_of,
    list_shards,
    member_json,
    member_text,
    read_energon,
)
from mmjax.data.sources.record_keys import MEDIA as MEDIA_KEYS
from mmjax.data.sources.webdataset_index import (
    MEDIA,
    NAMES,
    TEXTS,
    VERSION,
    Member,
    index_shard,
    join_shards,
    stored_text,
)
from mmjax.data.storage.archives import MediaFolder
from mmjax.data.storage.array_store import open_arrays
from mmjax.data.storage.files import FileRef, drop_ignored, hash_strings
from mmjax.data.storage.spool import Spool, StreamFile, is_stream
from mmjax.errors import UserError

_WORKERS = 16  # shards that are walked at once: remote ones take their time


class WebDatasetRecords:
    """`Conversations` of the samples of several shards, one after the other.

    A sample's text is its .json, with messages or conversations, or a question and an answer; or
    its .txt, the answer to `source.prompt`. Its media are the members with the extensions of
    images, clips and videos, in their order. Raises UserError where a shard is missing, cut off or
    no .tar.
    """

    def __init__(
        self,
        path: str,
        source: WebDatasetSource,
        split: Split,
        cache: Path,
        where: str,
        spool: Spool,
    ) -> None:
        """path: shards, by a pattern or a range, or a folder of Energon's. where: the config's key, for messages."""
        self._source = source
        self._fields: Sequence[str] = ()  # Energon's, of the text
        self._image = ""  # Energon's field of the image
        if os.path.isdir(path):
            self._paths, self._fields, self._image = read_energon(Path(path), split, where)
        else:
            self._paths = list_shards(path, where)
        self._paths = drop_ignored(self._paths, source.ignore, where)
        if not source.window and (streams := [path for path in self._paths if is_stream(path)]):
            raise UserError(
                f"{where}: {streams[0]} can only be read from its beginning on; say how many neighbouring samples are "
                f"to be shuffled: {where.rpartition('.')[0]}.window=10000"
            )
        with ThreadPoolExecutor(_WORKERS) as pool:
            index = partial(
                index_shard, cache=cache, spool=spool if source.window else None, lock=Lock()
            )
            indexed = list(pool.map(index, self._paths))
        files = [file for file, _ in indexed]
        arrays = open_arrays(
            indexed[0][1] if len(files) == 1 else join_shards(indexed, cache), NAMES
        )
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
        shards = [
            f"{os.path.basename(path)} {stamp}"
            for path, stamp in zip(self._paths, self._stamps, strict=True)
        ]
        source = self._source
        image = (self._image,) if self._image else ()
        read = (source.question, source.answer, source.prompt, *self._fields, *image)
        return hash_strings(VERSION, repr(read), *shards)

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
        # side="right": with starts 0, 3, 3, 5, sample 3 is in the third shard, as the second is
        # empty.
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
                content=stored_text(file, k - first, stop - start)
                if isinstance(file, StreamFile)
                else None,
            )
        return members

    def _record(self, index: int) -> Record:
        members = self._members(index)
        media: dict[Medium, list[Member]] = {}
        for extension, member in members.items():
            if medium := MEDIA.get(extension.rpartition(".")[2].lower()):
                media.setdefault(medium, []).append(member)
        if self._fields:
            *question, answer = (energon_text(members, field) for field in self._fields)
            if self._image:
                media = {"image": [members[field_of(members, self._image)[0]]]}
            record = parse_question(question[0] if question else self._source.prompt, answer, media)
            read = [field_of(members, field)[0] for field in self._fields]
            images = [member for files in media.values() for member in files]
            return _with_unread_members(
                record, members, [*read, *(n for n in members if members[n] in images)]
            )
        if names := [name for name in TEXTS if name in members]:
            if len(names) > 1:
                raise BadSample(f"has both .{names[0]} and .{names[1]}; keep the one that is meant")
            text = member_text(members[names[0]])
            if not media:
                raise BadSample(
                    f"has no image, clip or video beside its .{names[0]}; its members: {', '.join(members)}"
                )
            record = parse_question(self._source.prompt, text, media)
            return _with_unread_members(record, members, [*names, *_media_names(members)])
        if "json" not in members:
            raise BadSample(f"has neither a .json nor a .txt; its members are {', '.join(members)}")
        return _with_unread_members(
            self._json_record(members, media), members, ["json", *_media_names(members)]
        )

    def _json_record(
        self, members: Mapping[str, Member], media: Mapping[Medium, list[Member]]
    ) -> Record:
        """Parse a sample's .json. Raises BadSample."""
        record = member_json(members["json"])
        if not isinstance(record, dict):
            raise BadSample(f"has a .json with a {type(record).__name__}, not an object")
        media = {
            medium: files
            for medium in KEYS
            if (files := _in_order(record, medium, media.get(medium, [])))
        }
        if turns := next(
            (name for name in ("messages", "conversations") if record.get(name)), None
        ):
            turn_record = {name: value for name, value in record.items() if name not in MEDIA_KEYS}
            return parse_chat(
                turn_record | {KEYS[medium][0]: files for medium, files in media.items()}, turns
            )
        key = self._source.answer
        if (answer := value_of_one(record, (key, f"{key}s"))) is None:
            keys = ", ".join(map(repr, record)) or "none"
            raise BadSample(
                f"has a .json with neither a conversation nor {key!r}; its keys: {keys}"
            )
        read = {*MEDIA_KEYS, self._source.question, key, f"{key}s"}
        beside = {name: value for name, value in record.items() if name not in read}
        return parse_question(
            record.get(self._source.question, self._source.prompt), answer, media, beside
        )


def _with_unread_members(
    record: Record, members: Mapping[str, Member], read: Sequence[str]
) -> Record:
    """Add the members of a sample that are not read."""
    return with_unread(record, [f".{name}" for name in members if name not in read])


def _media_names(members: Mapping[str, Member]) -> list[str]:
    """List the extensions of a sample's members that are media."""
    return [name for name in members if name.rpartition(".")[2].lower() in MEDIA]


def _in_order(
    record: Mapping[str, Any], medium: Medium, files: Sequence[Member]
) -> Sequence[Member]:
    """Return a sample's members of a medium in the order in which its record names them; in their own where it has
    other names for them.

    Raises BadSample where it names more or fewer than there are, or some by their names and others
    not.
    """
    listed = listed_files(record, KEYS[medium])
    if not listed:
        return files
    if len(listed) != len(files):
        raise BadSample(
            f"names {len(listed)} {medium} file(s), and has {len(files)} such member(s)"
        )
    by_name = {os.path.basename(file.member): file for file in files}
    paths = [one.get("path") if isinstance(one, Mapping) else one for one in listed]
    names = [os.path.basename(path) if isinstance(path, str) else "" for path in paths]
    if not any(name in by_name for name in names):
        return files
    if sorted(names) != sorted(by_name):
        member = next((name for name in names if name not in by_name), names[0])
        raise BadSample(f"names the {medium} file {member!r}; its members are {', '.join(by_name)}")
    return [by_name[name] for name in names]
