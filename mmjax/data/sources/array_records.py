"""Conversations in ArrayRecord files: everything of a sample in one record, the format to train on at scale.

A record is `MMJ1`, the length of a header (uint32, little endian), the header (JSON), and the
encoded media one after the other. The header:

    {"messages": [["user", [0, "What is this?"]], ["assistant", ["A cat."]]], "media": [["image",
    48211]]}

where a number among a message's parts is the place of that medium, a third entry of a message is
the weight of its loss where that is not 1 or a fourth follows (texts for the chat template, by
their keys), and `media` has the kind and the bytes of each, and the line breaks before and behind
its marker where there are any. A folder holds shards `00000.arrayrecord`, ..., the headers again as
`00000.jsonl`, ... (so that texts are read without the media), the media's sizes (`media_sizes.py`),
and `index.json`, which is written last: without it the folder is incomplete.
"""

from __future__ import annotations

import glob
import json
import math
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from mmjax.data.sample import BadSample, Conversation, MediaPlace, Medium, Message
from mmjax.data.sources import answers
from mmjax.data.sources.json_records import JsonRecords, load_json
from mmjax.data.storage.files import (
    FileRef,
    InlineBytes,
    check_bytes,
    file_at,
    hash_strings,
    local_copy,
    one_line,
)
from mmjax.disk import atomic_write
from mmjax.errors import UserError

MAGIC = b"MMJ1"
INDEX = "index.json"
FACTS = "facts"
_FORMAT = "mmjax-conversations-1"
_LENGTH = struct.Struct("<I")


def to_header(conversation: Conversation, lengths: Sequence[int]) -> dict[str, Any]:
    """Convert a conversation to JSON; `lengths` are the bytes of its media."""
    messages = []
    media: list[list[Any]] = []
    for message in conversation.messages:
        parts: list[str | int] = []
        for part in message.parts:
            if isinstance(part, MediaPlace):
                parts.append(len(media))
                breaks = [part.before, part.after] if part.before or part.after else []
                media.append([part.kind, lengths[len(media)], *breaks])
            else:
                parts.append(part)
        fields = [dict(message.fields)] if message.fields else []
        weights = [message.weight] if fields or message.weight != 1 else []
        messages.append([message.role, parts, *weights, *fields])
    header = {"messages": messages, "media": media} | (
        {"answers": conversation.answers} if conversation.answers else {}
    )
    return header | answers.to_json(conversation)


def from_header(header: Mapping[str, Any]) -> Conversation:
    """Convert JSON from `to_header` back to a conversation. Raises BadSample."""
    try:
        media = [MediaPlace(kind, *map(str, breaks)) for kind, _, *breaks in header["media"]]
        if odd := [medium.kind for medium in media if medium.kind not in get_args(Medium)]:
            raise ValueError(f"a medium of the kind {odd[0]!r}")
        messages = []
        for role, parts, *options in header["messages"]:
            weight, fields = (*options, *(1.0, {})[len(options) :])
            if not isinstance(role, str):
                raise ValueError(f"a message of the role {role!r}")
            if type(weight) not in (int, float) or not 0 <= weight < math.inf:
                raise ValueError(f"a message of the weight {weight!r}")
            contents = tuple(part if isinstance(part, str) else media[part] for part in parts)
            messages.append(Message(role, contents, weight, _fields(fields)))
        return Conversation(
            messages=tuple(messages),
            answers=tuple(map(str, header.get("answers", ()))),
            **answers.from_json(header, messages[-1].role),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadSample(f"has a header that is not of this format: {error!r}") from None


def _fields(fields: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((str(key), str(text)) for key, text in fields.items())


def encode_record(header: Mapping[str, Any], media: Sequence[bytes]) -> bytes:
    """Encode one record."""
    text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return b"".join((MAGIC, _LENGTH.pack(len(text)), text, *media))


def decode_record(record: bytes) -> tuple[Conversation, tuple[bytes, ...]]:
    """Decode one record to its conversation and the media's files. Raises BadSample where it is damaged."""
    start = len(MAGIC) + _LENGTH.size
    if record[: len(MAGIC)] != MAGIC or len(record) < start:
        raise BadSample("is no record of a conversation")
    stop = start + _LENGTH.unpack_from(record, len(MAGIC))[0]
    try:
        header = load_json(record[start:stop])
        lengths = [length for _, length, *_ in header["media"]]
        if odd := [length for length in lengths if type(length) is not int or length < 0]:
            raise ValueError(f"a medium of {odd[0]!r} bytes")
        # Media lie one after the other behind the header: with stop 50 and lengths 7 and 3 at
        # bounds 50, 57, 60.
        bounds = list(accumulate([stop, *lengths]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadSample(f"has a header that is not of this format: {error!r}") from None
    if bounds[-1] != len(record):
        raise BadSample(f"has {len(record)} bytes, not {bounds[-1]}")
    return from_header(header), tuple(record[a:b] for a, b in pairwise(bounds))


@contextmanager
def open_shard(path: Path) -> Iterator[ArrayRecordWriter]:
    """Open a shard to write its records; it gets its name when the body is through."""
    with atomic_write(path) as partial:
        # One record per group, so that a random read reads no other; uncompressed, since media are
        # compressed already.
        writer = ArrayRecordWriter(str(partial), "group_size:1,uncompressed")
        yield writer
        writer.close()


@dataclass(frozen=True)
class FolderIndex:
    """`index.json`: the number of records in each shard, and the fingerprint of what they were made from."""

    records: tuple[int, ...]
    made_from: str

    def write(self, folder: Path) -> None:
        """Mark a folder as complete."""
        index = {"format": _FORMAT, "records": list(self.records), "made_from": self.made_from}
        with atomic_write(folder / INDEX) as partial:
            partial.write_text(json.dumps(index) + "\n")

    @classmethod
    def read(cls, folder: str) -> FolderIndex:
        """Read a folder's index. Raises UserError where the folder is incomplete, or of another format."""
        try:
            index = load_json(file_at(os.path.join(folder, INDEX)).read())
            if index["format"] != _FORMAT:
                raise UserError(
                    f"{folder}: its format is {index['format']!r}; this version reads {_FORMAT!r}"
                )
            records, made_from = index["records"], index["made_from"]
            counts = records if isinstance(records, list) else []
            if not counts or not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError("records are no numbers")
            if not isinstance(made_from, str):
                raise ValueError("made_from is no text")
            return cls(tuple(counts), made_from)
        except BadSample:
            inner = sorted(
                glob.glob(os.path.join(glob.escape(folder), "**", INDEX), recursive=True)
            )
            remedy = (
                f"name a folder in it: {os.path.dirname(inner[0])}"
                if inner
                else "write it with python -m mmjax.index CONFIG --to arrayrecord OUT"
            )
            raise UserError(
                f"{folder} has no {INDEX}: it is no folder of conversations, or one that was not written to its end; "
                f"{remedy}"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder}/{INDEX} is not whole: {error!r}; write the folder again"
            ) from None


class ArrayRecords:
    """`StoredConversations` of a folder of shards; those behind a URL are copied into `cache` at their first use."""

    def __init__(self, folder: str, cache: Path) -> None:
        self.folder = folder
        self._cache = cache
        self._contents = FolderIndex.read(folder)
        names = [
            os.path.join(folder, f"{shard:05d}") for shard in range(len(self._contents.records))
        ]
        self._shards = [f"{name}.arrayrecord" for name in names]
        self._headers = JsonRecords([f"{name}.jsonl" for name in names], cache)
        self._starts = np.cumsum([0, *self._contents.records])
        if len(self._headers) != len(self):
            raise UserError(
                f"{folder}: {len(self._headers)} headers for {len(self)} records; write the folder again"
            )
        # Each reader keeps its shard open, and there may be a thousand.
        self._reader = lru_cache(64)(self._open)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def fingerprint(self) -> str:
        """Hash the fingerprint of what the folder was made from with all its texts."""
        return hash_strings(self._contents.made_from, self._headers.fingerprint())

    def files(self) -> list[tuple[str, int]]:
        return self._headers.files()

    def place(self, index: int) -> str:
        return self._headers.place(index)

    def conversation(self, index: int) -> Conversation:
        return from_header(self._headers[index])

    def media(self, index: int) -> tuple[FileRef, ...]:
        """Read all of a record's media at once."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        check_bytes(self.place(index), _media_bytes(self._headers[index]))
        try:
            with self._lock:  # a reader serves one thread at a time
                (record,) = self._reader(shard).read([index - int(self._starts[shard])])
        except (RuntimeError, ValueError, IndexError) as error:
            raise BadSample(f"{self._shards[shard]} cannot be read: {one_line(error)}") from None
        return tuple(map(InlineBytes, decode_record(record)[1]))

    def _open(self, shard: int) -> ArrayRecordReader:
        local = local_copy(self._shards[shard], self._cache / "copies")
        reader = ArrayRecordReader(str(local), "readahead_buffer_size:0,max_parallelism:0")
        # None of a file that is cut off, which no read survives
        options = reader.writer_options_string()
        if options is not None and "uncompressed" not in options.split(","):
            raise UserError(
                f"{self._shards[shard]} is compressed ({options}); write the folder again by mmjax.index"
            )
        return reader


def _media_bytes(header: Mapping[str, Any]) -> int:
    """Add up the bytes of a record's media; 0 where its header is odd, which `from_header` refuses."""
    try:
        return sum(length for _, length in header["media"])
    except (KeyError, TypeError, ValueError):
        return 0
