"""Write files and folders whole or not at all, read and write JSON, and find the user's cache and settings."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mmjax.errors import UserError

# Environment variable by which `mmjax.supervise` names the file into which a run writes its last
# saved step.
PROGRESS = "MMJAX_PROGRESS"


def user_cache(program: str = "mmjax") -> Path:
    """Return a program's folder in `$XDG_CACHE_HOME`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / program


def user_config() -> Path:
    """Return mmjax's folder in `$XDG_CONFIG_HOME`, by default in `~/.config`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "mmjax"


# ------------------------------------------------------------------------------------------------
# atomic replacement


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a file to write instead of `path`, which it replaces after the body, or is removed where that raises.

    A kill or a full disk never leaves half a file at `path`. Raises OSError.
    """
    with _partial(path) as partial:
        yield partial
        partial.rename(path)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill, which replaces `folder`, or whatever is there, as in `atomic_write`."""
    with _partial(folder) as partial:
        partial.mkdir(parents=True)
        yield partial
        # A folder with files cannot be replaced by a rename, so the old one is moved away first.
        # Between the two renames there is none, which readers take for one that was not written
        # yet.
        old = partial.with_suffix(".old")
        with suppress(FileNotFoundError):
            folder.rename(old)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster, and its folder stays
                raise
    remove_path(old)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yield an unused name beside `path`; what is there after the body is removed."""
    # Unlike process ids, such names are unique among the nodes that share a disk, too.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        yield partial
    finally:
        with suppress(OSError):
            remove_path(partial)


def remove_path(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# JSON


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON object. Raises UserError where the file holds none, or is missing and there is no default."""
    if default is not None and not path.exists():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}; get the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; get the file again")
    return value


def json_lines(records: Iterable[Any]) -> str:
    """Format JSON values, one to a line."""
    return "".join(json.dumps(record) + "\n" for record in records)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of every line; a missing file has none, and incomplete lines are skipped."""
    if not path.is_file():
        return
    with path.open(errors="replace") as lines:
        yield from (record for record in map(parse_object, lines) if record is not None)


def parse_object(line: str) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def append_json_lines(path: Path, records: Iterable[Any]) -> None:
    """Append JSON values, one to a line. A killed process may have left half a line, which then gets its end first."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(json_lines(records).encode())


def with_checksum(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add a checksum to a JSON object: with a changed letter it might still be valid JSON."""
    # so that the checksum is of what reading gives: lists, not tuples
    fields = json.loads(json.dumps(fields))
    return fields | {"sum": _sum_of(fields)}


def verify_checksum(fields: Any) -> dict[str, Any]:
    """Verify and remove the checksum of `with_checksum`. Raises ValueError on a mismatch."""
    if not isinstance(fields, dict) or fields.get("sum") != _sum_of(
        {k: v for k, v in fields.items() if k != "sum"}
    ):
        raise ValueError("it is not what was written")
    return {k: v for k, v in fields.items() if k != "sum"}


def write_sealed(path: Path, fields: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum, atomically."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(with_checksum(fields)) + "\n")


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Read what `write_sealed` wrote; None where the file is missing or damaged."""
    try:
        return verify_checksum(json.loads(path.read_text()))
    except (OSError, ValueError, RecursionError):
        return None


def _sum_of(fields: Mapping[str, Any]) -> str:
    # Sorted keys: the order in a file does not matter.
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
