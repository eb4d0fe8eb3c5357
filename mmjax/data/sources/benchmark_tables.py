"""Read the tables of public benchmarks: TSV with images in base64, as VLMEvalKit has them, and Parquet of the Hub."""

from __future__ import annotations

import ast
import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmjax.data.sample import BadSample
from mmjax.data.sources.csv_tables import to_parquet
from mmjax.data.sources.energon import list_shards
from mmjax.data.sources.parquet_files import ParquetFile, Stretches
from mmjax.data.storage.files import file_at
from mmjax.errors import UserError

IMAGES = ("image", *(f"image_{number}" for number in range(1, 9)))  # columns
REFERENCE = 64  # characters of an image that is the `index` of a row with the same one, at most


def stamps(path: str, option: str) -> list[str]:
    """Return what changes when a table's files do."""
    return [f"{file} {file_at(file).stamp()}" for file in list_shards(path, option)]


def read_table(
    path: str, option: str, columns: Sequence[str], cache: Path
) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """Yield the rows of a table without their images, and these.

    columns: that the table must have. Raises UserError, naming `option`, where one is missing, and
    where an image is none.
    """
    by_index: dict[str, list[bytes]] = {}
    number = 0
    for shard in to_parquet(list_shards(path, option), cache):
        file = ParquetFile(shard, Stretches())
        if missing := [name for name in columns if name not in file.columns]:
            raise UserError(
                f"{option} {path} has no column {missing[0]!r}, which this benchmark reads; it has "
                f"{', '.join(name for name in file.columns if not name.startswith('#'))}"
            )
        for place in range(int(file.starts[-1])):
            number += 1
            try:
                row = file.values(place, tuple(file.columns))
                images = _images_of(row, by_index)
            except (BadSample, binascii.Error) as error:
                raise UserError(f"{option} {path}: row {number}: {error}") from None
            if images:
                by_index[str(row.get("index"))] = images
            yield {name: value for name, value in row.items() if name not in IMAGES}, images


def _images_of(row: Mapping[str, Any], by_index: Mapping[str, list[bytes]]) -> list[bytes]:
    values = [row[name] for name in IMAGES if row.get(name)]
    if len(values) == 1 and isinstance(text := values[0], str):
        if len(text) <= REFERENCE:
            if text not in by_index:
                raise BadSample(f"its image is that of row {text!r}, which is not before it")
            return by_index[text]
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            values = ast.literal_eval(text) if text.startswith("[") else values
    return [_content(value) for value in values]


def _content(value: Any) -> bytes:
    if isinstance(value, Mapping):
        value = value.get("bytes")
    if isinstance(value, str):
        value = base64.b64decode(value, validate=True)
    if not isinstance(value, bytes):
        raise BadSample("an image has no content")
    return value
