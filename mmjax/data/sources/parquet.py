"""Conversations of Parquet files, read by row groups; media columns are only read when a medium is.

With a `window` rows are read in order, and each row group is fetched and unpacked once for all
processes of a host: as a copy in a `Spool`, from which rows are read where they lie.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from mmjax.config import ParquetSource
from mmjax.config.codec import did_you_mean
from mmjax.data.sample import BadSample, Conversation, Medium
from mmjax.data.sources.answers import FORMS
from mmjax.data.sources.chat_files import resolve_reference
from mmjax.data.sources.chat_records import KEYS, Record, parse_chat, parse_question, with_unread
from mmjax.data.sources.csv_tables import LINE, to_parquet
from mmjax.data.sources.parquet_files import ParquetFile, Stretches
from mmjax.data.sources.record_keys import DESCRIPTIONS, READ, refused_columns, unread_keys
from mmjax.data.storage.archives import MediaFolder
from mmjax.data.storage.files import FileRef, hash_strings, is_url
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


class ParquetRecords:
    """`StoredConversations` of the rows of several files, one file after the other.

    Reading one medium reads its column of its row group, so small row groups are quick; ArrayRecord
    is quicker. Raises UserError, naming the config's key, where a file or a column is missing.

    unread: columns that seem to hold media, and that the source does not name, by its key for them.
    """

    def __init__(
        self,
        paths: Sequence[str],
        source: ParquetSource,
        folder: MediaFolder,
        key: str,
        spool: Spool,
    ) -> None:
        """paths: Parquet, or tables in CSV, which are read as Parquet in the folder's cache."""
        self._source = source
        self.window = source.window
        self._folder = folder
        self._paths = paths
        cache = Stretches()
        self._files = [
            ParquetFile(path, cache, spool if source.window else None)
            for path in to_parquet(paths, folder.cache)
        ]
        columns = {
            name: getattr(source, name)
            for name in ("messages", "question", "answer", "images", "audio", "videos")
        }
        self._answers = FORMS.get(source.answers)
        answers = self._answers.columns if self._answers else ()
        for path, file in zip(paths, self._files, strict=True):
            names = [name for name in file.columns if name != LINE]
            for name, column in (
                columns | {f"answers={source.answers}, {name}": name for name in answers}
            ).items():
                if column and column not in file.columns:
                    raise UserError(
                        f"{key}.{name}={column}: {path} has none{did_you_mean(column, names)}"
                    )
                if "." in column:  # Parquet's separator between a struct and its field
                    raise UserError(
                        f"{key}.{name}={column}: a name with a point in it cannot be read; rename the column"
                    )
        optional = self._answers.optional_columns if self._answers else ()
        optional = tuple(column for column in optional if column in self._files[0].columns)
        texts = tuple(columns[name] for name in ("messages", "question", "answer") if columns[name])
        self._texts = (*texts, *answers, *optional)
        unread = {
            what: [c for c in COLUMNS[what] if c in self._files[0].columns]
            for what in ("images", "audio", "videos")
        }
        self.unread = {
            what: candidates[0]
            for what, candidates in unread.items()
            if candidates and not columns[what]
        }
        media: dict[Medium, str] = {"image": "images", "audio": "audio", "video": "videos"}
        self._media = {
            medium: column for medium, name in media.items() if (column := columns[name])
        }
        # Columns that the source does not name: those that may be orders are read with the texts,
        # others are reported.
        read_columns = {*self._texts, *self._media.values(), LINE}
        unnamed_columns = [set(file.columns) - read_columns for file in self._files]
        has_media = bool(self._media)
        self._orders = [
            (*refused_columns(columns, has_media), *sorted(columns & {"system"}))
            for columns in unnamed_columns
        ]
        self._unread = [
            sorted(columns - {*orders} - DESCRIPTIONS["record"])
            for columns, orders in zip(unnamed_columns, self._orders, strict=True)
        ]
        self._file_fields = [
            tuple(leaf for column in self._media.values() for leaf in file.extra_fields(column))
            for file in self._files
        ]
        self._starts = np.cumsum([0, *(file.starts[-1] for file in self._files)])
        if source.window:
            spool.check_window(
                f"{key}.path",
                source.window,
                len(self),
                [s for file in self._files for s in file.sizes],
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    def fingerprint(self) -> str:
        """Hash the files' names and stamps, and the columns that are read."""
        files = [file.identity for file in self._files]
        prompt = (self._source.prompt,) if self._source.prompt else ()
        read = repr((self._texts, self._media, *prompt))
        return hash_strings(read, self._folder.outside, *files)

    @property
    def roots(self) -> tuple[str, ...]:
        """Return where media are looked for that columns name by their paths."""
        root = self._folder.root
        return (root if is_url(root) else os.path.abspath(root),)

    def files(self) -> list[tuple[str, int]]:
        return [
            (path, int(file.starts[-1]))
            for path, file in zip(self._paths, self._files, strict=True)
        ]

    def place(self, index: int) -> str:
        number, row = self._row(index)
        file = self._files[number]
        if LINE in file.columns:
            return f"{self._paths[number]}:{file.values(row, (LINE,))[LINE]}"
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
        orders = file.values(row, self._orders[number])
        media = {medium: self._cells(file, row, column) for medium, column in self._media.items()}
        cells_by_key = {KEYS[medium][0]: cells for medium, cells in media.items()}
        if self._source.messages:
            record = parse_chat(
                orders | {"messages": texts[self._source.messages]} | cells_by_key, "messages"
            )
        elif self._answers:
            record = self._answers.parse(orders | texts | cells_by_key)
        else:
            question = (
                texts[self._source.question] if self._source.question else self._source.prompt
            )
            record = parse_question(question, texts[self._source.answer], media, orders)
        record = with_unread(
            record, (*self._unread[number], *self._unread_file_keys(file, row, number))
        )
        # References inside messages are paths or bytes; those of media columns are cells.
        files = tuple(
            ref if isinstance(ref, Cell) else resolve_reference(ref, self._folder)
            for ref in record.references
        )
        return Record(record.conversation, files)

    def _unread_file_keys(self, file: ParquetFile, row: int, number: int) -> list[str]:
        """List what a row's files have beside their bytes and paths. Raises BadSample for what is obeyed elsewhere."""
        unread = []
        for leaf in self._file_fields[number]:
            [value] = file.values(row, (leaf,)).values()
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Mapping):
                    unread += unread_keys(one, "file", READ["file"], "a file of it ")
        return unread

    def _row(self, index: int) -> tuple[int, int]:
        """Return the number of a record's file, and the row there."""
        # With files of 3 and 2 rows the starts are 0, 3, 5, and row 3 is row 0 of file 1.
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return number, index - int(self._starts[number])

    def _cells(self, file: ParquetFile, row: int, column: str) -> list[Cell | str]:
        value = file.values(row, (file.shallow(column),))[column]
        paths = value if isinstance(value, list) else [value]
        if value and all(isinstance(path, str) for path in paths):
            return paths  # files of their own, which may change as others do
        count = 0 if value is None else len(value) if isinstance(value, list) else 1
        return [Cell(file, column, row, number, self._folder) for number in range(count)]


@dataclass(frozen=True)
class Cell:
    """An encoded file in a row's media column, or one of the list there; stamped with its Parquet file's stamp."""

    file: ParquetFile
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
        if value is None or (
            isinstance(value, Mapping) and value.get("bytes") is None and not value.get("path")
        ):
            raise BadSample(f"{self.name} holds neither bytes nor a path")
        return resolve_reference(value, self.folder).read()
