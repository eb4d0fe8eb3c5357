"""Conversations of Parquet files, read by row groups; of media columns no byte is read before it is asked for."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.parquet

from mmjax.config import ParquetSource
from mmjax.config_values import did_you_mean
from mmjax.data.chat_files import find
from mmjax.data.chat_records import KEYS, Record, Reference, chat_record, question_record
from mmjax.data.conversation import BadSample, Conversation, Medium
from mmjax.data.media_folder import MediaFolder
from mmjax.data.stored import Stored, digest, filesystem, is_url, stored
from mmjax.errors import UserError

_KEPT_GROUPS = 4  # row groups of texts, and of each media column, that stay in memory


class ParquetRecords:
    """`Conversations` of the rows of several files, one after the other.

    Reading one medium reads its column of its row group: small row groups are quick, ArrayRecord is quicker. Raises
    UserError, naming the config's key, where a file or a column is not there.
    """

    def __init__(self, paths: Sequence[str], source: ParquetSource, folder: MediaFolder, key: str) -> None:
        self._source, self._folder, self._paths = source, folder, paths
        self._files = [_File(path) for path in paths]
        named = {name: getattr(source, name) for name in ("messages", "question", "answer", "images", "audio")}
        for file in self._files:
            for name, column in named.items():
                if column and column not in file.columns:
                    raise UserError(f"{key}.{name}={column}: {file.path} has none{did_you_mean(column, file.columns)}")
        self._texts = tuple(named[name] for name in ("messages", "question", "answer") if named[name])
        media: dict[Medium, str] = {"image": source.images, "audio": source.audio}
        self._media = {medium: column for medium, column in media.items() if column}
        self._starts = np.cumsum([0, *(file.starts[-1] for file in self._files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def fingerprint(self) -> str:
        """Of the files' names, sizes and times of change, and of the columns that are read."""
        files = [f"{os.path.basename(file.path)} {file.stamp}" for file in self._files]
        return digest(repr((self._texts, self._media)), self._folder.outside, *files)

    def conversation(self, index: int) -> Conversation:
        """What a row says. Raises BadSample."""
        return self._record(index).conversation

    def media(self, index: int) -> tuple[Stored, ...]:
        """Where a row's media lie. Raises BadSample."""
        return self._record(index).references

    def encoded(self, index: int, number: int) -> bytes:
        """One medium's file. Raises BadSample."""
        return self.media(index)[number].read()

    def _record(self, index: int) -> Record:
        file, row = self._place(index)
        texts = file.values(row, self._texts)
        media = {medium: self._cells(file, row, column) for medium, column in self._media.items()}
        if self._source.messages:
            beside = {KEYS[medium][0]: cells for medium, cells in media.items()}
            record = chat_record({"messages": texts[self._source.messages]} | beside, "messages")
        else:
            record = question_record(texts[self._source.question], texts[self._source.answer], media)
        named = zip(record.conversation.media(), record.references, strict=True)
        return Record(record.conversation, tuple(self._found(reference, place.kind) for place, reference in named))

    def _found(self, reference: Reference, kind: Medium) -> Stored:
        return reference if isinstance(reference, Cell) else find(reference, self._folder)

    def _cells(self, file: _File, row: int, column: str) -> list[Cell]:
        held = file.values(row, (file.shallow(column),))[column]
        count = 0 if held is None else len(held) if isinstance(held, list) else 1
        return [Cell(file, column, row, number, self._folder) for number in range(count)]

    def _place(self, index: int) -> tuple[_File, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._files[number], index - int(self._starts[number])


@dataclass(frozen=True)
class Cell:
    """The encoded file in a row's media column, or one of the list that is there."""

    file: _File
    column: str
    row: int
    number: int
    folder: MediaFolder

    @property
    def name(self) -> str:
        """File, column, row and place in the list."""
        return f"{self.file.path}::{self.column}[{self.row}][{self.number}]"

    def stamp(self) -> str:
        """The file's, as it was opened."""
        return self.file.stamp

    def open(self) -> BinaryIO:
        """From memory."""
        return io.BytesIO(self.read())

    def read(self) -> bytes:
        """Its bytes, or the file that its path names. Raises BadSample."""
        held = self.file.values(self.row, (self.column,))[self.column]
        value = held[self.number] if isinstance(held, list) else held
        if value is None or (isinstance(value, Mapping) and value.get("bytes") is None and not value.get("path")):
            raise BadSample(f"{self.name} holds neither bytes nor a path")
        return find(value, self.folder).read()


@dataclass(eq=False)
class _File:
    """One Parquet file, opened when it is first read."""

    path: str
    _groups: OrderedDict[tuple[int, str], pyarrow.ChunkedArray] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        try:
            self.stamp = stored(self.path).stamp()
            metadata = self._opened.metadata
        except (BadSample, OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{self.path} cannot be read as Parquet: {error}") from None
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.starts = np.cumsum([0, *rows])
        self.columns = self._opened.schema_arrow.names

    @cached_property
    def _opened(self) -> pyarrow.parquet.ParquetFile:
        file = filesystem(self.path).open(self.path) if is_url(self.path) else self.path
        return pyarrow.parquet.ParquetFile(file, pre_buffer=is_url(self.path))

    def shallow(self, column: str) -> str:
        """What to read of a media column to know how many there are: the paths if it has them, else all of it."""
        schema = self._opened.schema
        leaves = [schema.column(k).path for k in range(len(schema))]
        return next((leaf for leaf in leaves if leaf.startswith(f"{column}.") and leaf.endswith(".path")), column)

    def values(self, row: int, leaves: tuple[str, ...]) -> dict[str, Any]:
        """What a row holds, by column; of each leaf only what lies under it. Raises BadSample."""
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        found = {}
        with self._lock:  # a ParquetFile serves one reader at a time
            for leaf in leaves:
                found[leaf.partition(".")[0]] = self._group(group, leaf)[row - int(self.starts[group])].as_py()
        return found

    def _group(self, group: int, leaf: str) -> pyarrow.ChunkedArray:
        if (group, leaf) not in self._groups:
            try:
                table = self._opened.read_row_group(group, [leaf], use_threads=False)
            except (OSError, pyarrow.ArrowException) as error:
                raise BadSample(f"row group {group} of {self.path} cannot be read: {error}") from None
            while sum(kept[1] == leaf for kept in self._groups) >= _KEPT_GROUPS:
                del self._groups[next(kept for kept in self._groups if kept[1] == leaf)]
            self._groups[group, leaf] = table.column(0)
        self._groups.move_to_end((group, leaf))
        return self._groups[group, leaf]
