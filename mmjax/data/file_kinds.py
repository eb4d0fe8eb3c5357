"""What a data set's file is, by looking at it: for who names a file and nothing else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmjax.config import (
    ArrayRecordSource,
    FileSource,
    LlavaSource,
    ManifestSource,
    MessagesSource,
    ParquetSource,
    QuestionsSource,
)
from mmjax.data.array_records import INDEX
from mmjax.data.json_records import JsonRecords
from mmjax.data.parquet import column_names
from mmjax.data.stored import list_files
from mmjax.errors import UserError

KEYS = {  # of a JSON record, by which its file is known
    "conversations": LlavaSource,
    "messages": MessagesSource,
    "audio_filepath": ManifestSource,
    "question": QuestionsSource,
}
COLUMNS = {  # of Parquet, by what they hold
    "messages": ("messages", "conversations"),
    "question": ("question", "questions", "query"),
    "answer": ("answers", "answer", "label", "text"),
    "images": ("images", "image"),
    "audio": ("audio", "audios"),
}


def source_of(path: str, option: str, cache: Path, **folders: str) -> FileSource:
    """The source that a file's name or its first record says. folders: `images` and `audio`, where they are given.

    Raises UserError, naming `option`, where neither says what it is.
    """
    if os.path.isfile(os.path.join(path, INDEX)):
        return ArrayRecordSource(path)
    paths = list_files(path, option)
    if paths[0].endswith(".parquet"):
        return _parquet(path, paths[0], option)
    records = JsonRecords(paths, cache)
    first: Any = records[0] if len(records) else {}
    kind = next((kind for key, kind in KEYS.items() if key in first), None)
    if kind is None:
        raise UserError(
            f"{option} {path}: its first record has none of {', '.join(KEYS)}; name what it is in a config's "
            "data.sources and score that"
        )
    given = {name: folder for name, folder in folders.items() if folder and name in kind.__dataclass_fields__}
    return kind(path, **given)


def _parquet(path: str, first: str, option: str) -> ParquetSource:
    names = column_names(first)
    found = {what: _first(known, names) for what, known in COLUMNS.items()}
    if found["messages"]:
        found |= {"question": "", "answer": ""}
    elif not (found["question"] and found["answer"]):
        raise UserError(
            f"{option} {path}: has the columns {', '.join(names)}; expected messages, or question and answer"
        )
    return ParquetSource(path, **found)


def _first(known: Sequence[str], names: Sequence[str]) -> str:
    return next((name for name in known if name in names), "")
