"""Data sets that LLaMA-Factory's dataset_info.json describes by columns and tags, in alpaca's or ShareGPT's form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from mmjax.config import Outside
from mmjax.config.codec import did_you_mean
from mmjax.data.sample import TOOLS, BadSample
from mmjax.data.sources.answer_records import REFERENCE, parse_pair
from mmjax.data.sources.chat_records import (
    FUNCTION_CALL,
    KEYS,
    Record,
    parse_chat,
    with_unread,
)
from mmjax.data.sources.record_keys import MEDIA, is_absent, unread_keys
from mmjax.data.storage.files import file_inside, list_files
from mmjax.errors import UserError

DATASET_INFO = "dataset_info.json"
_MEDIA = {"images": "image", "videos": "video", "audios": "audio"}
# By format the columns that are read, with their names where an entry gives none; None: there is
# none then.
_COLUMNS: Mapping[str, Mapping[str, str | None]] = {
    "alpaca": {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "system": None,
        "tools": None,
        "history": None,
    },
    "sharegpt": {"messages": "conversations", "system": None, "tools": None},
}
# of a message, whose tags name two of them or others
_MESSAGE = ("role", "from", "content", "value")
_TAGS = {"role_tag": "from", "content_tag": "value"}
_ROLES = {  # tags of roles: what a record calls them by default, and the role
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "observation_tag": ("observation", "tool"),
    "function_tag": (FUNCTION_CALL, FUNCTION_CALL),
    "system_tag": ("system", "system"),
}
# Keys of an entry that say where else the data lie, which does not matter where their files are
# named.
_ELSEWHERE = (
    "hf_hub_url",
    "ms_hub_url",
    "om_hub_url",
    "script_url",
    "cloud_file_name",
    "file_sha1",
    "subset",
    "folder",
    "load_from",
    "revision",
)
_MAX_SAMPLES = 100_000_000
_SPLIT = "train"  # the only one that LLaMA-Factory finds in a file


def read_entries(file: Path, where: str) -> dict[str, dict[str, Any]]:
    """Read the data sets that a dataset_info.json describes, by name. Raises UserError, naming `where`."""
    try:
        entries = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {file.name} cannot be read: {error}") from None
    if not isinstance(entries, dict):
        raise UserError(f"{where}: {file.name} is no object of data sets by name")
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


@dataclass(frozen=True)
class DatasetInfo:
    """One entry of a dataset_info.json."""

    files: list[str]
    folder: str  # that media are relative to
    form: str  # alpaca or sharegpt
    columns: Mapping[str, str | None]
    tags: Mapping[str, str]
    roles: Mapping[str, str]  # by what records call them
    ranking: bool = False  # records hold pairs of answers
    samples: int = 0  # so many records are drawn of all; 0: all

    @classmethod
    def read(cls, path: str, entry: str, where: str, outside: Outside = "refuse") -> DatasetInfo:
        """Read an entry of the file, or of the file in a folder. where: the config's key. Raises UserError.

        outside: whether its files may be in another folder.
        """
        file = Path(path) / DATASET_INFO if os.path.isdir(path) else Path(path)
        entries = read_entries(file, f"{where}.path={path}")
        if entry not in entries:
            raise UserError(
                f"{where}: {file} has no data set {entry!r}{did_you_mean(entry, list(entries))}"
            )
        return cls.parse(entries[entry], file.parent, f"{where}: {entry!r} of {file}", outside)

    @classmethod
    def parse(
        cls, entry: Mapping[str, Any], folder: Path, what: str, outside: Outside = "refuse"
    ) -> DatasetInfo:
        """Parse an entry. what: a description of it, for messages. Raises UserError for what is not read."""
        known = (
            "file_name",
            "formatting",
            "columns",
            "tags",
            "ranking",
            "num_samples",
            "split",
            *_ELSEWHERE,
        )
        if unknown := [key for key in entry if key not in known]:
            raise UserError(f"{what} has {unknown[0]}, which is not read")
        if not (name := entry.get("file_name")):
            raise UserError(f"{what} has no file_name; fetch its files, and name them there")
        form = entry.get("formatting", "alpaca")
        if form not in _COLUMNS:
            raise UserError(f"{what} has formatting={form!r}; read are {', '.join(_COLUMNS)}")
        columns = _names(entry, "columns", what)
        tags = _names(entry, "tags", what)
        if not isinstance(ranking := entry.get("ranking") or False, bool):
            raise UserError(f"{what} has ranking={ranking!r}; give true or false")
        if (split := entry.get("split") or _SPLIT) != _SPLIT:
            raise UserError(
                f"{what} has split={split!r}, which its files do not have; name the files of that split"
            )
        samples = entry.get("num_samples")
        if samples is not None and (type(samples) is not int or not 1 <= samples <= _MAX_SAMPLES):
            raise UserError(
                f"{what} has num_samples={samples!r}; give a number of records from 1 to {_MAX_SAMPLES:,}"
            )
        pair = {"chosen": "chosen", "rejected": "rejected"} if ranking else {}
        readable = {**_COLUMNS[form], **pair, **dict.fromkeys(_MEDIA)}
        if unknown := [key for key in columns if key not in readable]:
            raise UserError(f"{what} has columns.{unknown[0]}, which is not read")
        if unknown := [key for key in tags if key not in (*_TAGS, *_ROLES)]:
            raise UserError(f"{what} has tags.{unknown[0]}, which is not read")
        if form == "alpaca" and tags:
            raise UserError(
                f"{what} has tags, which are read with formatting=sharegpt alone; set that, or drop them"
            )
        for key, names in (
            ("columns", [name for name in (readable | columns).values() if name]),
            ("tags", [tags.get(key) or default for key, default in _TAGS.items()]),
            ("tags", [tags.get(key) or default for key, (default, _) in _ROLES.items()]),
        ):
            if repeated := next((name for name in names if names.count(name) > 1), ""):
                raise UserError(f"{what} has {repeated!r} twice in its {key}; each means one thing")
        inside = outside == "refuse" or not isinstance(name, str)
        path = Path(file_inside(str(folder), name, what)) if inside else folder / name
        pattern = str(path / "*") if path.is_dir() else str(path)
        files = list_files(pattern, what)
        if not_json := [file for file in files if not file.endswith((".json", ".jsonl"))]:
            raise UserError(
                f"{what}: {not_json[0]} is no JSON; name Parquet files in a source of the kind parquet"
            )
        return cls(
            files=files,
            folder=str(folder),
            form=form,
            columns=readable | columns,
            tags={key: tags.get(key) or default for key, default in _TAGS.items()},
            roles={tags.get(key) or default: role for key, (default, role) in _ROLES.items()},
            ranking=ranking,
            samples=samples or 0,
        )

    @property
    def reading(self) -> str:
        """Describe everything that `record` depends on."""
        return repr(
            (self.form, self.columns, self.tags, self.roles, *(["ranking"] if self.ranking else []))
        )

    def record(self, record: Mapping[str, Any]) -> Record:
        """Parse a record of its files. Raises BadSample."""
        unread = self._unread(record)
        media: dict[str, Any] = {
            KEYS[kind][0]: record.get(self.columns[name] or "") for name, kind in _MEDIA.items()
        }
        turns = self._alpaca(record) if self.form == "alpaca" else self._sharegpt(record)
        media |= {column: self._value(record, column) for column in ("system", TOOLS)}
        if self.ranking:
            chosen, rejected = (self._answer(record, key) for key in ("chosen", "rejected"))
            return with_unread(parse_pair(turns, chosen, rejected, media, record), unread)
        return with_unread(parse_chat({"messages": turns} | media, "messages"), unread)

    def _unread(self, record: Mapping[str, Any]) -> list[str]:
        """List the keys that no column names. Raises BadSample for those that say what is trained on."""
        read = frozenset(
            name for name in (*self.columns.values(), *(REFERENCE if self.ranking else ())) if name
        )
        unnamed = (*_MEDIA, *MEDIA, *_COLUMNS[self.form], "history")
        for key in unnamed:
            if key not in read and not is_absent(record.get(key)):
                raise BadSample(
                    f"has {key}, which the columns of its entry in dataset_info.json do not name"
                )
        return unread_keys(record, "record", read)

    def _alpaca(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        questions = [q for q in (self._value(record, "prompt"), self._value(record, "query")) if q]
        if not all(isinstance(question, str) for question in questions):
            raise BadSample(f"has a {self.columns['prompt']} that is not text")
        history = self._value(record, "history") or []
        if not isinstance(history, list) or any(
            not isinstance(p, list) or len(p) != 2 for p in history
        ):
            raise BadSample(
                f"has a {self.columns['history']} that is no list of pairs of a question and an answer"
            )
        pairs = [*history, ("\n".join(questions), self._value(record, "response"))]
        turns = [
            {"role": role, "content": content}
            for pair in pairs
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        # of a pair both answers are in columns of their own
        return turns[:-1] if self.ranking else turns

    def _answer(self, record: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Return the chosen or the rejected answer as a message. Raises BadSample."""
        if not (answer := self._value(record, key)):
            raise BadSample(f"has no {key} answer: {self.columns[key]}={answer!r}")
        return (
            self._message(answer)
            if isinstance(answer, Mapping)
            else {"role": "assistant", "content": answer}
        )

    def _sharegpt(self, record: Mapping[str, Any]) -> list[Any]:
        turns = self._value(record, "messages")
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise BadSample(f"has no {self.columns['messages']}")
        return [self._message(turn) for turn in turns]

    def _message(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        role, content = (turn.get(self.tags[tag]) for tag in ("role_tag", "content_tag"))
        more_keys = {key: value for key, value in turn.items() if key not in self.tags.values()}
        if second := next((key for key in _MESSAGE if not is_absent(more_keys.get(key))), ""):
            raise BadSample(
                f"has a message with {second} beside its tags {', '.join(self.tags.values())}"
            )
        return {**more_keys, "role": self.roles.get(str(role), role), "content": content}

    def _value(self, record: Mapping[str, Any], column: str) -> Any:
        name = self.columns.get(column)
        return record.get(name) if name else None


def _names(entry: Mapping[str, Any], key: str, what: str) -> Mapping[str, Any]:
    """Return the columns or tags of an entry. Raises UserError where they are no names."""
    names = entry.get(key) or {}
    if not isinstance(names, dict) or any(
        not isinstance(name, str | NoneType) for name in names.values()
    ):
        raise UserError(f"{what} has {key} that are no object of names: {names!r}")
    return names
