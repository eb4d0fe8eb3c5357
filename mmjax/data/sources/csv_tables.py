"""Tables in CSV and TSV files, converted once to Parquet in the cache, with the line of every row beside its values."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from mmjax.data.sample import BadSample
from mmjax.data.storage.files import hash_strings, local_copy, one_line
from mmjax.disk import atomic_write
from mmjax.errors import UserError

TABLES = (".csv", ".tsv")
LINE = "#line"  # column of the lines on which rows begin
_VERSION = "1"
_DELIMITERS = ",;\t"  # that spreadsheets write, by the country
_ROWS = 1024  # of a row group
_MAX_FIELD = 1 << 24  # characters
_MARKS = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PK": "a spreadsheet or a ZIP",
    b"\x1f\x8b": "gzip",
}


def csv_to_parquet(path: str, cache: Path) -> Path:
    """Convert a table unless that was done; return the Parquet file, named by what the table holds.

    Values are texts, and null where a field is empty. Raises UserError, naming the line, for what
    is no table: another encoding than UTF-8, rows of other lengths than the head, a quote that does
    not end.
    """
    try:
        local = local_copy(path, cache / "copies")
        with local.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            start = file.read(2)
    except (OSError, BadSample) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None
    if start in _MARKS:
        raise UserError(f"{path} is {_MARKS[start]}, not CSV in UTF-8; save it as CSV UTF-8")
    table = cache / f"table-{hash_strings(content, Path(path).suffix, _VERSION)}.parquet"
    if not table.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with local.open("rb") as file, atomic_write(table) as partial:
            _convert(path, file, partial)
    return table


def _lines(path: str, file: BinaryIO) -> Iterator[str]:
    """Decode lines, the first without its byte order mark."""
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{path}:{number}: is not UTF-8; save it as CSV UTF-8") from None


def _convert(path: str, file: BinaryIO, out: Path) -> None:
    csv.field_size_limit(_MAX_FIELD)
    lines = _lines(path, file)
    head = next(lines, "")
    delimiter = "\t" if path.endswith(".tsv") else max(_DELIMITERS, key=head.count)
    reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if not any(names):
            raise UserError(f"{path} is empty; its first line names the columns")
        if odd := [name for name in names if not name or names.count(name) > 1]:
            raise UserError(
                f"{path}:1: the column {odd[0]!r} has no name of its own; name every column once"
            )
        schema = pyarrow.schema(
            [(LINE, pyarrow.int64()), *((name, pyarrow.string()) for name in names)]
        )
        rows = _rows(path, reader, len(names))
        with pyarrow.parquet.ParquetWriter(out, schema) as writer:
            while chunk := list(islice(rows, _ROWS)):
                writer.write_batch(
                    pyarrow.record_batch(list(zip(*chunk, strict=True)), schema=schema)
                )
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: is no CSV: {error}; mend the line") from None


def _rows(path: str, reader: Any, columns: int) -> Iterator[tuple[Any, ...]]:
    """Yield the line on which each row begins, and its fields; blank lines are left out."""
    first = reader.line_num + 1
    for row in reader:
        if row:
            if len(row) != columns:
                raise UserError(
                    f"{path}:{first}: has {len(row)} fields, and the first line names {columns} columns; put quotes "
                    "around texts with delimiters, line breaks or quotes"
                )
            yield first, *(field or None for field in row)
        first = reader.line_num + 1


def to_parquet(paths: Sequence[str], cache: Path) -> list[str]:
    """Return the files that rows are read from: tables converted, Parquet as it is."""
    return [str(csv_to_parquet(path, cache)) if path.endswith(TABLES) else path for path in paths]
