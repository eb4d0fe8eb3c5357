"""Conversations of Parquet files, read by row groups; media columns are only read when a medium is.

With a `window` rows are read in order, and each row group is fetched and unpacked once for all processes of a host: as
a copy in a `Spool`, from which rows are read where they lie.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.parquet

from mmjax.config import ParquetSource
from mmjax.config.codec import did_you_mean
from mmjax.data.sample import BadSample, Conversation, Medium
from mmjax.data.sources.chat_files import (
    KEYS,
    Record,
    parse_chat,
    parse_preference,
    parse_question,
    parse_rollouts,
    resolve_reference,
)
from mmjax.data.storage.archives import MediaFolder
from mmjax.data.storage.files import (
    FileRef,
    Unreadable,
    check_unchanged,
    file_at,
    filesystem,
    hash_strings,
    is_url,
    one_line,
)
from mmjax.data.storage.spool import Spool
from mmjax.errors import UserError

COLUMNS = {  # names that columns usually have, by what they hold
    "messages": ("messages", "conversations"),
    "question": ("question", "questions", "query"),
    "answer": ("answers", "answer", "label", "text"),
    "images": ("images", "image"),
    "audio": ("audio", "audios"),
    "videos": ("videos", "video"),
}
_CACHED_GROUPS = 4  # row groups of each column that stay in memory
# By `ParquetSource.answers`, the columns of several answers to a prompt that must be there, and those that may.
ANSWER_COLUMNS = {"pair": ("chosen", "rejected"), "rollouts": ("prompt", "completion_ids", "logprobs", "advantages")}
_MORE_COLUMNS = {"pair": ("prompt", "ref_chosen_logps", "ref_rejected_logps"), "rollouts": ("ref_logprobs",)}


class ParquetRecords:
    """`StoredConversations` of the rows of several files, one file after the other.

    Reading one medium reads its column of its row group, so small row groups are quick; ArrayRecord is quicker. Raises
    UserError, naming the config's key, where a file or a column is missing.

    unread: columns that seem to hold media, and that the source does not name, by its key for them.
    """

    def __init__(
        self, paths: Sequence[str], source: ParquetSource, folder: MediaFolder, key: str, spool: Spool
    ) -> None:
        self._source = source
        self.window = source.window
        self._folder = folder
        self._paths = paths
        cache = _GroupCache()
        self._files = [_File(path, cache, spool if source.window else None) for path in paths]
        columns = {
            name: getattr(source, name) for name in ("messages", "question", "answer", "images", "audio", "videos")
        }
        answers = ANSWER_COLUMNS.get(source.answers, ())
        for file in self._files:
            for name, column in (columns | {f"answers={source.answers}, {name}": name for name in answers}).items():
                if column and column not in file.columns:
                    raise UserError(f"{key}.{name}={column}: {file.path} has none{did_you_mean(column, file.columns)}")
                if "." in column:  # Parquet's separator between a struct and its field
                    raise UserError(
                        f"{key}.{name}={column}: a name with a point in it cannot be read; rename the column"
                    )
        optional = tuple(c for c in _MORE_COLUMNS.get(source.answers, ()) if c in self._files[0].columns)
        texts = tuple(columns[name] for name in ("messages", "question", "answer") if columns[name])
        self._texts = (*texts, *answers, *optional)
        unread = {
            what: [c for c in COLUMNS[what] if c in self._files[0].columns] for what in ("images", "audio", "videos")
        }
        self.unread = {what: found[0] for what, found in unread.items() if found and not columns[what]}
        media: dict[Medium, str] = {"image": source.images, "audio": source.audio, "video": source.videos}
        self._media = {medium: column for medium, column in media.items() if column}
        self._starts = np.cumsum([0, *(file.starts[-1] for file in self._files)])
        if source.window:
            spool.check_window(f"{key}.path", source.window, len(self), [s for file in self._files for s in file.sizes])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def fingerprint(self) -> str:
        """Hash the files' names and stamps, and the columns that are read."""
        files = [f"{os.path.basename(file.path)} {file.stamp}" for file in self._files]
        return hash_strings(repr((self._texts, self._media)), self._folder.outside, *files)

    def files(self) -> list[tuple[str, int]]:
        return [(path, int(file.starts[-1])) for path, file in zip(self._paths, self._files, strict=True)]

    def place(self, index: int) -> str:
        number, row = self._row(index)
        return f"{self._paths[number]}[{row}]"

    def conversation(self, index: int) -> Conversation:
        return self._record(index).conversation

    def media(self, index: int) -> tuple[FileRef, ...]:
        return self._record(index).references

    def _record(self, index: int) -> Record:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number, row = self._row(index)
        file = self._files[number]
        texts = file.values(row, self._texts)
        media = {medium: self._cells(file, row, column) for medium, column in self._media.items()}
        cells_by_key = {KEYS[medium][0]: cells for medium, cells in media.items()}
        if self._source.messages:
            record = parse_chat({"messages": texts[self._source.messages]} | cells_by_key, "messages")
        elif self._source.answers != "one":
            parse = parse_preference if self._source.answers == "pair" else parse_rollouts
            record = parse(texts | cells_by_key)
        else:
            record = parse_question(texts[self._source.question], texts[self._source.answer], media)
        # References inside messages are paths or bytes; those of media columns are cells.
        files = tuple(
            ref if isinstance(ref, Cell) else resolve_reference(ref, self._folder) for ref in record.references
        )
        return Record(record.conversation, files)

    def _row(self, index: int) -> tuple[int, int]:
        """Return the number of a record's file, and the row there."""
        # With files of 3 and 2 rows the starts are 0, 3, 5, and row 3 is row 0 of file 1.
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _cells(self, file: _File, row: int, column: str) -> list[Cell]:
        value = file.values(row, (file.shallow(column),))[column]
        count = 0 if value is None else len(value) if isinstance(value, list) else 1
        return [Cell(file, column, row, number, self._folder) for number in range(count)]


def column_names(path: str) -> list[str]:
    """List the columns of one file. Raises UserError where it is no Parquet file."""
    return list(_File(path, _GroupCache()).columns)


@dataclass(frozen=True)
class Cell:
    """An encoded file in a row's media column, or one of the list there; stamped with its Parquet file's stamp."""

    file: _File
    column: str
    row: int
    number: int
    folder: MediaFolder

    @property
    def name(self) -> str:
        return f"{self.file.path}::{self.column}[{self.row}][{self.number}]"

    def stamp(self) -> str:
        return self.file.stamp

    def open(self) -> BinaryIO:
        return io.BytesIO(self.read())

    def read(self) -> bytes:
        """Read its bytes, or the file that its path names. Raises BadSample."""
        value = self.file.values(self.row, (self.column,))[self.column]
        if isinstance(value, list):
            value = value[self.number]
        if value is None or (isinstance(value, Mapping) and value.get("bytes") is None and not value.get("path")):
            raise BadSample(f"{self.name} holds neither bytes nor a path")
        return resolve_reference(value, self.folder).read()


class _GroupCache(dict[str, Callable[["_File", int], pyarrow.ChunkedArray]]):
    """Read row groups, by leaf, through one cache per leaf that all files share."""

    def __missing__(self, leaf: str) -> Callable[[_File, int], pyarrow.ChunkedArray]:
        read = lru_cache(_CACHED_GROUPS)(lambda file, group: file.read_group(group, leaf))
        return self.setdefault(leaf, read)


class _File:
    """One Parquet file. It is opened for each read and closed again: there may be thousands."""

    def __init__(self, path: str, cache: _GroupCache, spool: Spool | None = None) -> None:
        """spool: through which row groups are read; None: `cache` has them."""
        self.path = path
        self._spool = spool
        self._cache = cache
        self._metadata: pyarrow.parquet.FileMetaData | None = None  # so that it is read once
        self._lock = threading.Lock()
        try:
            self.stamp = file_at(path).stamp()
            with self._open() as file:
                self._metadata = file.metadata
                self.columns = file.schema_arrow.names
                self._leaves = [file.schema.column(k).path for k in range(len(file.schema))]
        except (BadSample, OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} cannot be read as Parquet: {one_line(error)}") from None
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        self.starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self.sizes = [group.total_byte_size for group in groups]  # unpacked

    def shallow(self, column: str) -> str:
        """Return the leaf that is cheapest to read to count a row's media: the paths if there are any, else all."""
        paths = (leaf for leaf in self._leaves if leaf.startswith(f"{column}.") and leaf.endswith(".path"))
        return next(paths, column)

    def values(self, row: int, leaves: tuple[str, ...]) -> dict[str, Any]:
        """Read a row's values by column, and of each column only the given leaf. Raises BadSample."""
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        row_in_group = row - int(self.starts[group])
        # The lock makes threads that need the same row group read it once.
        if self._spool is not None:
            return {leaf.partition(".")[0]: self._copied(group, leaf)[row_in_group].as_py() for leaf in leaves}
        with self._lock:
            return {leaf.partition(".")[0]: self._cache[leaf](self, group)[row_in_group].as_py() for leaf in leaves}

    def _copied(self, group: int, leaf: str) -> pyarrow.ChunkedArray:
        """Memory-map a leaf of a row group, copied as an Arrow file. Raises UserError where the file has changed."""

        def write(file: BinaryIO, reserve: Callable[[int], None]) -> None:
            table = pyarrow.table({leaf: self.read_group(group, leaf)})
            size = pyarrow.MockOutputStream()
            for sink in (size, file):
                with pyarrow.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table)
                if sink is size:
                    reserve(size.size())

        with self._spool.open(f"{self.path} {self.stamp} {group} {leaf}", write) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # stays when the file is closed
        return pyarrow.ipc.open_file(pyarrow.py_buffer(mapped)).read_all().column(0)

    def read_group(self, group: int, leaf: str) -> pyarrow.ChunkedArray:
        """Read one leaf of a row group. Raises BadSample, and UserError where the file has changed."""
        check_unchanged(file_at(self.path), self.stamp)
        try:
            with self._open() as file:
                return file.read_row_group(group, [leaf], use_threads=False).column(0)
        except (OSError, pyarrow.ArrowException) as error:
            raise Unreadable(f"row group {group} of {self.path} cannot be read: {one_line(error)}") from None

    @contextmanager
    def _open(self) -> Iterator[pyarrow.parquet.ParquetFile]:
        # pre_buffer joins the many small reads of a row group, each of which would be a request to the server.
        remote = is_url(self.path)
        with ExitStack() as stack:
            file = stack.enter_context(filesystem(self.path).open(self.path)) if remote else self.path
            yield stack.enter_context(pyarrow.parquet.ParquetFile(file, metadata=self._metadata, pre_buffer=remote))
