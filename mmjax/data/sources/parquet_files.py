"""Read cells of Parquet files by stretches of their row groups, of which bounded parts are in memory at a time."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any, BinaryIO

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from mmjax.data.sample import BadSample
from mmjax.data.sources.chat_records import MAX_CHARACTERS
from mmjax.data.sources.parquet_pages import Unpacked, measure_chunk
from mmjax.data.storage.files import (
    Unreadable,
    check_bytes,
    check_unchanged,
    file_at,
    filesystem,
    is_url,
    one_line,
)
from mmjax.data.storage.spool import Spool
from mmjax.errors import UserError

MAX_UNPACKED = 1 << 27  # bytes of a row group's column that are unpacked together
MAX_PAGE = 3 << 27  # bytes of a page, which is unpacked as a whole
# bytes of unpacked stretches in memory: of a text and a media column, which take turns
MAX_CACHED = 1 << 28
# of a row group's column; as indices and offsets they take 16 bytes each
MAX_GROUP_VALUES = 1 << 24
_BUFFER = 1 << 20  # bytes that are read of a column chunk at a time


def column_names(path: str) -> list[str]:
    """List the columns of one file. Raises UserError where it is no Parquet file."""
    return list(ParquetFile(path, Stretches()).columns)


class Stretches:
    """Unpacked stretches of row groups, by file, row group, leaf and number: those that were used last."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[tuple[ParquetFile, int, str, int], pyarrow.Array] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, file: ParquetFile, group: int, leaf: str, number: int) -> pyarrow.Array:
        """Return a stretch, read where it is not here. Raises as `ParquetFile.read_stretch`."""
        key = (file, group, leaf, number)
        if (array := self._arrays.get(key)) is None:
            room = MAX_CACHED - MAX_UNPACKED
            with self._lock:  # what was used longest ago goes
                arrays = self._arrays
                while arrays and sum(stretch.nbytes for stretch in arrays.values()) > room:
                    arrays.popitem(last=False)
            array = file.read_stretch(group, leaf, number)
        with self._lock:
            self._arrays[key] = array
            self._arrays.move_to_end(key)
        return array


# A file is row groups of columns, and what is in memory are stretches of rows of one column:
#
#   row group 0 | question   [ stretch 0 | stretch 1 | ... ]   as many rows each as surely fit
#               | image      [ 0 | 1 | 2 | 3 | ...         ]   into MAX_UNPACKED bytes
#   row group 1 | ...


class ParquetFile:
    """One Parquet file. It is opened for each read and closed again: there may be thousands."""

    def __init__(self, path: str, cache: Stretches, spool: Spool | None = None) -> None:
        """spool: through which row groups are read; None: `cache` has them."""
        self.path = path
        self._spool = spool
        self._cache = cache
        self._metadata: pyarrow.parquet.FileMetaData | None = None  # so that it is read once
        self._lock = threading.Lock()  # so that threads that need the same stretch read it once
        try:
            self.stamp = file_at(path).stamp()
            # By which it is known again: a converted table by its name, which is what it holds.
            name = os.path.basename(path)
            self.identity = name if name.startswith("table-") else f"{name} {self.stamp}"
            with self._open() as file:
                self._metadata = file.metadata
                self.columns = file.schema_arrow.names
                columns = [file.schema.column(k) for k in range(len(file.schema))]
                self._leaves = [column.path for column in columns]
                self._repeated = [column.max_repetition_level > 0 for column in columns]
        except (BadSample, OSError, pyarrow.ArrowException) as error:
            raise UserError(f"{path} cannot be read as Parquet: {one_line(error)}") from None
        groups = [
            self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)
        ]
        self.starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self.sizes = [group.total_byte_size for group in groups]  # unpacked
        self._rows: dict[tuple[int, str], int] = {}  # of a stretch, by row group and leaf

    def shallow(self, column: str) -> str:
        """Return the leaf that is cheapest to read to count a row's media: the paths if there are any, else all."""
        paths = (
            leaf
            for leaf in self._leaves
            if leaf.startswith(f"{column}.") and leaf.endswith(".path")
        )
        return next(paths, column)

    def extra_fields(self, column: str) -> list[str]:
        """List the leaves of a media column's structs that are neither bytes nor a path."""
        known = ("bytes", "path", "element", "item")  # the latter of lists without structs
        leaves = (leaf for leaf in self._leaves if leaf.startswith(f"{column}."))
        return [leaf for leaf in leaves if leaf.rpartition(".")[2] not in known]

    def values(self, row: int, leaves: tuple[str, ...]) -> dict[str, Any]:
        """Read a row's values by column, and of each column only the given leaf. Raises BadSample."""
        group = int(np.searchsorted(self.starts, row, side="right")) - 1
        row_in_group = row - int(self.starts[group])
        read = self._cached if self._spool is None else self._copied
        return {
            leaf.partition(".")[0]: self._value(read(group, leaf, row_in_group), row, leaf)
            for leaf in leaves
        }

    def _value(self, cell: pyarrow.Array, row: int, leaf: str) -> Any:
        """Convert a cell, an array of one value. Raises BadSample for a text that is longer than any that is read."""
        if not pyarrow.types.is_nested(cell.type) and not pyarrow.types.is_binary(cell.type):
            check_bytes(f"{self.path}::{leaf}[{row}]", cell.nbytes, 4 * MAX_CHARACTERS)
        return cell[0].as_py()

    def _cached(self, group: int, leaf: str, row: int) -> pyarrow.Array:
        number, row_in_stretch = divmod(row, self._rows_of_stretch(group, leaf))
        with self._lock:
            return self._cache.get(self, group, leaf, number).slice(row_in_stretch, 1)

    def _copied(self, group: int, leaf: str, row: int) -> pyarrow.Array:
        """Read a cell of a row group's leaf, which is copied as an Arrow file and memory-mapped.

        Raises UserError where the file has changed.
        """

        def write(file: BinaryIO, reserve: Callable[[int], None]) -> None:
            size = pyarrow.MockOutputStream()
            for sink in (size, file):
                with self._stretches(group, leaf) as batches:
                    first = next(batches)
                    with pyarrow.ipc.new_file(sink, first.schema) as writer:
                        for batch in chain([first], batches):
                            writer.write_batch(batch)
                if sink is size:
                    reserve(size.size())

        with self._spool.open(f"{self.path} {self.stamp} {group} {leaf}", write) as file:
            # stays when the file is closed
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        column = pyarrow.ipc.open_file(pyarrow.py_buffer(mapped)).read_all().column(0)
        return column.slice(row, 1).chunk(0)

    def read_stretch(self, group: int, leaf: str, number: int) -> pyarrow.Array:
        """Read a stretch of one leaf of a row group. Raises BadSample, and UserError where the file has changed."""
        with self._stretches(group, leaf) as batches:
            return next(islice(batches, number, None)).column(0)

    @contextmanager
    def _stretches(self, group: int, leaf: str) -> Iterator[Iterator[pyarrow.RecordBatch]]:
        check_unchanged(file_at(self.path), self.stamp)
        try:
            rows = self._rows_of_stretch(group, leaf)
            with self._open() as file:
                yield file.iter_batches(rows, row_groups=[group], columns=[leaf], use_threads=False)
        except (OSError, ValueError, StopIteration, pyarrow.ArrowException) as error:
            raise Unreadable(
                f"row group {group} of {self.path} cannot be read: {one_line(error)}"
            ) from None

    def _rows_of_stretch(self, group: int, leaf: str) -> int:
        """Return how many rows are unpacked together: all of a row group, unless they may take more than MAX_UNPACKED.

        Raises BadSample for a row group of which not even that can be said.
        """
        if (rows := self._rows.get((group, leaf))) is None:
            rows = self._rows[group, leaf] = self._measure_stretch(group, leaf)
        return rows

    def _measure_stretch(self, group: int, leaf: str) -> int:
        metadata = self._metadata.row_group(group)
        numbers = [
            k for k, path in enumerate(self._leaves) if path == leaf or path.startswith(f"{leaf}.")
        ]
        try:
            chunks = [self._unpacked(metadata.column(number)) for number in numbers]
        except (OSError, ValueError, RecursionError) as error:
            raise BadSample(
                f"row group {group} of {self.path} cannot be read: {one_line(error)}"
            ) from None
        rows = max(1, metadata.num_rows)
        values = sum(chunk.values for chunk in chunks)
        page = max(chunk.page for chunk in chunks)
        size = sum(chunk.size for chunk in chunks)
        if max(rows, values) > MAX_GROUP_VALUES:
            raise self._too_large(
                group, f"{max(rows, values):,} values of {leaf}, more than {MAX_GROUP_VALUES:,}"
            )
        if page > MAX_PAGE:
            raise self._too_large(
                group, f"a page of {page:,} bytes of {leaf}, more than {MAX_PAGE:,}"
            )
        if size + sum(chunk.values * chunk.dictionary for chunk in chunks) <= MAX_UNPACKED:
            return rows
        longest = max(chunk.dictionary for chunk in chunks)
        if longest and size <= MAX_UNPACKED:  # most values of a dictionary are much shorter than it
            total, longest = self._measure_dictionary(
                group, leaf, [self._leaves[number] for number in numbers]
            )
            if size + total <= MAX_UNPACKED:
                return rows
            if any(self._repeated[number] for number in numbers):
                raise self._too_large(
                    group, f"{total:,} bytes of {leaf}, more than {MAX_UNPACKED:,}"
                )
        return max(1, min(rows, MAX_UNPACKED // max(1, longest, size // rows)))

    def _too_large(self, group: int, reason: str) -> BadSample:
        return BadSample(
            f"row group {group} of {self.path} has {reason}; write it again in smaller row groups"
        )

    def _unpacked(self, chunk: pyarrow.parquet.ColumnChunkMetaData) -> Unpacked:
        """Measure a column chunk: by its pages, or far away, where each costs a request, by what the footer claims."""
        size = chunk.total_uncompressed_size
        text = chunk.physical_type in ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
        if is_url(self.path):
            return Unpacked(
                size, 0, chunk.num_values, size if text and chunk.has_dictionary_page else 0
            )
        # A writer may leave the dictionary's place out of the footer, or write 0.
        start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
        with open(self.path, "rb") as file:
            measured = measure_chunk(file, start, chunk.total_compressed_size)
        return measured if text else measured._replace(dictionary=0)

    def _measure_dictionary(self, group: int, leaf: str, paths: Sequence[str]) -> tuple[int, int]:
        """Return the bytes of all values of a leaf, and of the longest, by its dictionaries and what refers to them."""
        with self._open(read_dictionary=list(paths)) as file:
            column = file.read_row_group(group, [leaf], use_threads=False).column(0)
        total = longest = 0
        for array in (flat for chunk in column.chunks for flat in _flattened(chunk)):
            if pyarrow.types.is_dictionary(array.type):
                lengths = pyarrow.compute.binary_length(array.dictionary)
                total += pyarrow.compute.sum(lengths.take(array.indices).cast("int64")).as_py() or 0
                longest = max(longest, pyarrow.compute.max(lengths).as_py() or 0)
        return total, longest

    @contextmanager
    def _open(self, **options: Any) -> Iterator[pyarrow.parquet.ParquetFile]:
        # A local column chunk is read through a buffer. pre_buffer joins the many small reads of a
        # remote row group, each of which would be a request to the server.
        remote = is_url(self.path)
        with ExitStack() as stack:
            file = (
                stack.enter_context(filesystem(self.path).open(self.path)) if remote else self.path
            )
            buffer = 0 if remote else _BUFFER
            options |= {"metadata": self._metadata, "pre_buffer": remote, "buffer_size": buffer}
            yield stack.enter_context(pyarrow.parquet.ParquetFile(file, **options))


def _flattened(array: pyarrow.Array) -> Iterator[pyarrow.Array]:
    """Yield the arrays of the leaves of an array of lists and structs."""
    if pyarrow.types.is_nested(array.type):
        for inner in array.flatten() if pyarrow.types.is_struct(array.type) else [array.flatten()]:
            yield from _flattened(inner)
    else:
        yield array
