"""Read the metadata of Energon, Megatron's format of WebDataset shards, and its samples' texts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmjax.config.yaml_files import read_yaml
from mmjax.data.sample import BadSample, Split
from mmjax.data.sources.json_records import load_json, unique_keys
from mmjax.data.sources.webdataset_index import Member
from mmjax.data.storage.files import MAX_TEXT, check_bytes, file_inside, list_files
from mmjax.data.storage.spool import PIPE
from mmjax.errors import UserError

ENERGON = ".nv-meta"  # folder of a data set that Megatron Energon has prepared
_ENERGON_SPLITS = {"train": "train", "validation": "val", "test": "test"}
# Keys of dataset.yaml that are read, or change no sample.
_ENERGON_KEYS = ("__module__", "__class__", "sample_type", "field_map", "subflavor", "subflavors")
# by the sample's class
_ENERGON_TEXTS = {"CaptioningSample": ("caption",), "VQASample": ("context", "answers")}
_ENERGON_READ = ", ".join(
    f"{kind} with image, {', '.join(names)}" for kind, names in _ENERGON_TEXTS.items()
)
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")  # Energon's json[turns][0]
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def list_shards(path: str, where: str) -> list[str]:
    """List the shards of a path, URL or command, with `*` or ranges such as {000..127}. Raises UserError.

    path: as the user has typed it; of what stands in data, `file_inside` makes a path that is no
    command.
    """
    if (span := _RANGE.search(path)) is None:
        if path.startswith(PIPE):
            return [path]
        # A file in this folder may be called as if it were a command.
        return [
            os.path.join(os.curdir, file) if file.startswith(PIPE) else file
            for file in list_files(path, where)
        ]
    first, last = span.groups()
    if int(first) > int(last):
        raise UserError(f"{where}={path}: {span[0]} counts down; write {{{last}..{first}}}")
    # One by one: what stands in data may name a range of any length, and ends at the first that is
    # missing.
    numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return [
        s
        for n in numbers
        for s in list_shards(f"{path[: span.start()]}{n}{path[span.end() :]}", where)
    ]


def member_text(member: Member) -> str:
    """Read a text of bounded size. Raises BadSample where it is not UTF-8."""
    check_bytes(member.name, member.size, MAX_TEXT)
    try:
        return member.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise BadSample(f"{member.name} is not UTF-8") from None


def member_json(member: Member) -> Any:
    """Read JSON of bounded size. Raises BadSample where it is none."""
    check_bytes(member.name, member.size, MAX_TEXT)
    content = member.read()
    try:
        return load_json(content, object_pairs_hook=unique_keys)
    except BadSample as error:
        raise BadSample(f"{member.name} {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadSample(f"{member.name} is not JSON: {error}") from None


# --------------------------------------------------------------------------------------------------
# Energon


def read_energon(folder: Path, split: Split, where: str) -> tuple[list[str], Sequence[str], str]:
    """Return the shards of a split of a folder that Energon has prepared, and where samples have text and image."""
    described = _yaml(folder / ENERGON / "dataset.yaml", where)
    listed = folder / ENERGON / "split.yaml"
    splits = _yaml(listed, where)
    for file, values, read in (
        ("dataset.yaml", described, _ENERGON_KEYS),
        ("split.yaml", splits, ("split_parts",)),
    ):
        if order := next((key for key in values if values[key] and key not in read), None):
            raise UserError(
                f"{where}={folder}: {ENERGON}/{file} has {order}, which is not read; prepare a folder without it, or "
                "give the shards themselves"
            )
    parts = _inner(splits, "split_parts").get(_ENERGON_SPLITS[split]) or []
    if not isinstance(parts, list):
        raise UserError(f"{listed}: split_parts.{_ENERGON_SPLITS[split]} is no list of shards")
    paths = [file_inside(os.path.join(folder, ""), part, str(listed)) for part in parts]
    shards = [shard for path in paths for shard in list_shards(path, where)]
    if not shards:
        raise UserError(
            f"{where}={folder}: {ENERGON}/split.yaml has no shards of {_ENERGON_SPLITS[split]}"
        )
    kind = _inner(described, "sample_type").get("__class__", "")
    field_map = _inner(described, "field_map")
    if not field_map:
        return shards, (), ""
    texts = _ENERGON_TEXTS.get(kind, ())
    if (
        not texts
        or not all(isinstance(field_map.get(name), str) for name in texts)
        or not isinstance(field_map.get("image", ""), str)
        or set(field_map) - {*texts, "image"}
    ):
        raise UserError(
            f"{where}={folder}: {ENERGON}/dataset.yaml has the sample type {kind!r} with the fields "
            f"{', '.join(map(str, field_map))}; read are {_ENERGON_READ}, and samples without field_map"
        )
    return shards, [field_map[name] for name in texts], field_map.get("image", "")


def _inner(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a mapping inside another; empty where it is missing, or something else."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}


def _yaml(path: Path, where: str) -> dict[str, Any]:
    try:
        value = read_yaml(path)
    except OSError as error:
        raise UserError(
            f"{where}={path.parents[1]}: {ENERGON}/{path.name}: {error.strerror}; give a folder that `energon prepare` "
            "has prepared, or the shards themselves"
        ) from None
    return value if isinstance(value, dict) else {}


def field_of(members: Mapping[str, Member], field: str) -> tuple[str, list[str]]:
    """Find the member that a field of Energon's map refers to, the first of several (`jpg,png`), and the keys in it.

    Return its extension, and the keys behind it, as in json[turns][0].
    """
    for option in field.split(","):
        if (match := _FIELD.fullmatch(option)) and match[1] in members:
            return match[1], re.findall(r"\[([^\[\]]+)\]", match[2])
    raise BadSample(f"has no .{field}; its members are {', '.join(members)}")


def energon_text(members: Mapping[str, Member], field: str) -> Any:
    """Return the text, or the texts, that a field of Energon's map refers to."""
    name, keys = field_of(members, field)
    member = members[name]
    value = member_json(member) if name.rpartition(".")[2] == "json" else member_text(member)
    for key in keys:
        try:
            value = value[int(key) if isinstance(value, list) else key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise BadSample(f"{member.name} has no {field}") from None
    return value
