"""Conversations of Parquet files, read by row groups; of media columns no byte is read before it is asked for."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from mmjax.data.stored import Stored, digest, filesystem, is_url, one_line, stored
from mmjax.errors import UserError

_KEPT_GROUPS = 4  # row groups of each column that stay in memory


class ParquetRecords:
    """`Conversations` of the rows of several files, one after the other.

    Reading one medium reads its column of its row group: small row groups are quick, ArrayRecord is quicker. Raises
    UserError, naming the config's key, where a file or a column is not there.
    """

    def __init__(self, paths: Sequence[str], source: ParquetSource, folder: MediaFolder, key: str) -> None:
        self._source, self._folder, self._paths = source, folder, paths
        held = _Held()
        self._files = [_File(path, held) for path in paths]
        named = {name: getattr(source, name) for name in ("messages", "question", "answer", "images", "audio")}
        for file in self._files:
            for name, column in named.items():
                if column and column not in file.columns:
                    raise UserError(f"{key}.{name}={column}: {file.path} has none{did_you_mean(column, file.columns)}")
                if "." in column:  # which separates a struct's name from its field's
                    raise UserError(
                        f"{key}.{name}={column}: a name with a point in it cannot be read; rename the column"
                    )
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

    def files(self) -> list[tuple[str, int]]:
        """The files and how many rows each has."""
        return [(path, int(file.starts[-1])) for path, file in zip(self._paths, self._files, strict=True)]

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


def column_names(path: str) -> list[str]:
    """The columns of one file. Raises UserError for what is no Parquet file."""
    return list(_File(path, _Held()).columns)


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


class _Held:
    """The row groups that were read last, of all files together: a few of each column."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[str, int, str], pyarrow.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, group: int, leaf: str) -> pyarrow.ChunkedArray | None:
        """What was put there, if it is still held."""
        with self._lock:
            if (path, group, leaf) in self._groups:
                self._groups.move_to_end((path, group, leaf))
            return self._groups.get((path, group, leaf))

    def put(self, path: str, group: int, leaf: str, column: pyarrow.ChunkedArray) -> None:
        """In place of the one of this column that was not wanted for longest."""
        with self._lock:
            self._groups[path, group, leaf] = column
            same = [kept for kept in self._groups if kept[2] == leaf]
            for kept in same[:-_KEPT_GROUPS]:
                del self._groups[kept]


class _File:
    """One Parquet file. It is opened to be read and closed again: there may be thousands."""

    def __init__(self, path: str, held: _Held) -> None:
        self.path, self._held, self._lock = path, held, threading.Lock()
        try:
            self.stamp = stored(path).stamp()
            with self._opened() as file:
                self._metadata, self.columns = file.metadata, file.schema_arrow.names
                self._leaves = [file.schema.column(k).path for k in range(len(file.schema))]
        except (BadSample, OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} cannot be read as Parquet: {one_line(error)}") from None
        groups = range(self._metadata.num_row_groups)
        self.starts = np.cumsum([0, *(self._metadata.row_group(group).num_rows for group in groups)])

    def shallow(self, column: str) -> str:
        """What to read of a media column to know how many there are: the paths if it has them, else all of it."""
        named = (leaf for leaf in self._leaves if leaf.startswith(f"{column}.") and leaf.endswith(".path"))
        return next(named, column)

    def values(self, row: int, leaves: tuple[str, ...]) -> dict[str, Any]:
        """What a row holds, by column; of each leaf only what lies under it. Raises BadSample."""
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        at = row - int(self.starts[group])
        with self._lock:  # so that threads that want the same row group read it once
            return {leaf.partition(".")[0]: self._group(group, leaf)[at].as_py() for leaf in leaves}

    def _group(self, group: int, leaf: str) -> pyarrow.ChunkedArray:
        if (column := self._held.get(self.path, group, leaf)) is None:
            try:
                with self._opened() as file:
                    column = file.read_row_group(group, [leaf], use_threads=False).column(0)
            except (OSError, pyarrow.ArrowException) as error:
                raise BadSample(f"row group {group} of {self.path} cannot be read: {one_line(error)}") from None
            self._held.put(self.path, group, leaf, column)
        return column

    @contextmanager
    def _opened(self) -> Iterator[pyarrow.parquet.ParquetFile]:
        remote, known = is_url(self.path), getattr(self, "_metadata", None)
        with ExitStack() as closing:
            file = closing.enter_context(filesystem(self.path).open(self.path)) if remote else self.path
            yield closing.enter_context(pyarrow.parquet.ParquetFile(file, metadata=known, pre_buffer=remote))
