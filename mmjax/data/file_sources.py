"""Opens what a config says of data set files, as conversations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from mmjax.config import ArrayRecordSource, DataConfig, FileSource, ManifestSource, ParquetSource, QuestionsSource
from mmjax.data.array_records import ArrayRecords
from mmjax.data.chat_files import ChatFiles
from mmjax.data.chat_records import parse_chat, parse_manifest_line, parse_question_record
from mmjax.data.conversation import Medium
from mmjax.data.media_folder import MediaFolder
from mmjax.data.parquet import ParquetRecords
from mmjax.data.stored import Conversations, is_url, list_files
from mmjax.errors import UserError
from mmjax.hub import JSON, PARQUET, cached_path, dataset_files, is_dataset

Split = Literal["train", "validation", "test"]

TURNS = {"llava": "conversations", "sharegpt": "conversations", "messages": "messages"}  # where a record has them
FOLDERS: Mapping[Medium, str] = {"image": "images", "audio": "audio"}  # where a source says that media are


def cache_folder(data: DataConfig) -> Path:
    """Where what is learned of files is kept."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "mmjax" / "data"
    return Path(data.cache).expanduser() if data.cache else own


def path_of(source: FileSource, split: Split) -> str:
    """The files of a split; empty where the source has none for it."""
    return source.path if split == "train" else str(getattr(source, split))


def open_conversations(source: FileSource, split: Split, cache: Path, key: str) -> Conversations:
    """The records of a source's split. No media is read.

    key: of the source in the config, for messages. Raises UserError where files or folders are missing or broken, or
    hold no records.
    """
    where = f"{key}.{'path' if split == 'train' else split}"
    if not (path := path_of(source, split)):
        raise UserError(f"{where} is empty: the source has no {split} files; name some")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.cache={cache}: {error.strerror}; name a folder that you may write") from None
    opened = _open_conversations(source, cached_path(os.path.expanduser(path)), split, cache, key)
    if not len(opened):
        raise UserError(f"{where}={path}: holds no records")
    return opened


def _open_conversations(source: FileSource, path: str, split: Split, cache: Path, key: str) -> Conversations:
    where = f"{key}.{'path' if split == 'train' else split}"
    if isinstance(source, ArrayRecordSource):
        return ArrayRecords(path, cache)
    if is_dataset(path):
        paths = dataset_files(path, split, PARQUET if isinstance(source, ParquetSource) else JSON, where)
        path = paths[0]
    else:
        paths = list_files(path, where)
    if isinstance(source, ParquetSource):
        return ParquetRecords(paths, source, MediaFolder(_parent(path), source.outside, cache), key)
    folders: dict[Medium, MediaFolder] = {}
    for medium, name in FOLDERS.items():
        root = os.path.expanduser(getattr(source, name, ""))
        if root and not is_url(root) and not os.path.exists(root):
            raise UserError(f"{key}.{name}={root}: there is no such folder or archive")
        folders[medium] = MediaFolder(root or _parent(path), source.outside, cache)
    if isinstance(source, ManifestSource):
        return ChatFiles(
            paths, cache, folders, partial(parse_manifest_line, prompt=source.prompt), f"clips {source.prompt}"
        )
    if isinstance(source, QuestionsSource):
        keys = {"question": source.question, "answer": source.answer}
        return ChatFiles(paths, cache, folders, partial(parse_question_record, **keys), f"questions {keys}")
    turns = TURNS[source.kind]
    return ChatFiles(paths, cache, folders, partial(parse_chat, turns=turns), turns)


def _parent(path: str) -> str:
    """The folder of a file, or of the first pattern in its path."""
    plain = min((path.find(mark) for mark in "*?[" if mark in path), default=len(path))
    folder = path[:plain].rpartition("/")[0]
    return folder or ("/" if path.startswith("/") else ".")
