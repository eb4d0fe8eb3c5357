"""Tell what this user's own runs say from what others wrote, and let only the former be executed or fetched.

A run's config may name functions of the config.py in its folder, commands whose output is data,
URLs and repositories. Whoever opens the run would execute and fetch them. So a run is signed when
it starts: a code for each of these values, and for each Python file, by a key that is in the user's
home alone. Owners and modes of files would not do: what was unpacked from an archive belongs to
this user, and folders that a group shares do not.

What is signed stays so in a copy, after a move, and when other values of the config change.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, get_args

from mmjax.config import ChatFormat, Config, DataConfig, FileSource, FunctionSource
from mmjax.config.codec import encode, key_of, walk
from mmjax.config.loading import callback_names
from mmjax.data.storage.files import is_url
from mmjax.data.storage.spool import PIPE
from mmjax.disk import user_config
from mmjax.errors import UserError
from mmjax.hub import would_download
from mmjax.planning.plan_file import Plan

SIGNATURES = "signatures"  # a run folder's file of codes, one a line
SIGNATURE = "signature"  # a plan file's last key
MAX_INNOCENT = 3  # characters, which name neither a command nor a URL
HELP = "execute and fetch what a run or a plan says that you did not make"
_OWN_RUN = "this run"  # the line that is signed when a run begins
_PATHS = ("path", "validation", "test")  # of a source of files


class Statement(NamedTuple):
    """A value of a config that is executed or fetched."""

    key: str
    text: str
    verb: str


def statements_of(config: Config) -> list[Statement]:
    """List what a config's sources, callbacks and settings would execute or fetch."""
    statements = []
    for name, source in config.data.sources.items():
        if isinstance(source, FunctionSource):
            text = f"{source.function} {json.dumps(source.arguments, sort_keys=True)}"
            statements.append(Statement(f"data.sources.{name}.function", text, "executed"))
    for key, function in callback_names(config.model):
        if function.startswith("config:"):
            statements.append(Statement(key, function, "executed"))
    for leaf in walk(Config, encode(Config, config, "")):
        of_file = leaf.owner in get_args(FileSource)
        names_folder = (of_file and leaf.field in _PATHS) or (
            leaf.owner is ChatFormat and leaf.field == "folder"
        )
        pool = leaf.owner is DataConfig and leaf.field == "pool" and leaf.text != DataConfig.pool
        # may name programs to run
        compiler = leaf.owner is Config and leaf.field == "compiler" and leaf.text != "{}"
        # its records may name URLs
        allowed = of_file and leaf.field == "outside" and leaf.text == "allow"
        if PIPE in leaf.text or pool or compiler:
            statements.append(Statement(leaf.key, leaf.text, "executed"))
        elif is_url(leaf.text) or allowed or (names_folder and would_download(leaf.text)):
            statements.append(Statement(leaf.key, leaf.text, "fetched"))
    return statements


def check_run(folder: Path, config: Config, typed: Sequence[str] = ()) -> None:
    """Raise UserError where this user did not say what the config in a run's folder would execute or fetch.

    typed: overrides `a.b=value`, whose keys count no more.
    """
    signed = _Signed(folder)
    keys = {key_of(line) for line in typed}
    for key, text, verb in statements_of(config):
        if key not in keys and not signed.has(f"{key}={text}"):
            raise _refusal(
                str(folder), f"its config says {key}={text[:200]!r}, which would be {verb}"
            )
    check_files(folder, config)


def check_files(
    folder: Path, config: Config, texts: Callable[[], Mapping[str, str]] = dict
) -> None:
    """Raise UserError where a run's Python files would be executed, and one is not signed.

    texts: of files by name that count as signed, where they are needed.
    """
    if not _executes_files(config):
        return
    signed = _Signed(folder)
    for path in _files_of(folder):
        content = path.read_bytes()
        if (
            not signed.has(_line_of(path.name, content))
            and texts().get(path.name, "").encode() != content
        ):
            raise _refusal(str(folder), f"its {path.name} would be executed")


def check_plan(plan: Plan, config: Config, typed: Sequence[str] = ()) -> None:
    """Raise UserError where what a plan file set in a config would be executed or fetched, and it is not signed.

    typed: overrides of the command line, whose keys count no more.
    """
    if _is_signed_text(plan.path):
        return
    typed_keys = {key_of(word) for word in typed}
    keys = [key_of(word) for word in plan.settings]
    values = [
        value for word in plan.arguments if len(value := word.partition("=")[2]) > MAX_INNOCENT
    ]
    for key, text, verb in statements_of(config):
        # The plan set the key itself or a section that it is in; or an argument of the config's
        # function, which is part of the value.
        by_plan = any(f"{key}.".startswith(f"{name}.") for name in keys) or any(
            value in text for value in values
        )
        if by_plan and key not in typed_keys:
            raise _refusal(
                f"plan={plan.path}", f"it says {key}={text[:200]!r}, which would be {verb}", "plan"
            )


def sign_text(text: str) -> str:
    """Add this user's code to the text of a JSON object; where the home cannot be written there is none."""
    # {"a": 1} becomes {"a": 1,\n  "signature": "<code of the text before>"}, which is JSON still.
    with suppress(OSError):
        key = _key() or _make_key()
        return f'{text.rstrip().removesuffix("}")},\n  "{SIGNATURE}": "{_code(key, text)}"}}\n'
    return text


def _is_signed_text(path: Path) -> bool:
    text, _, rest = path.read_text().rpartition(f',\n  "{SIGNATURE}": "')
    key = _key()
    return key is not None and rest == f'{_code(key, text + "}" + chr(10))}"}}\n'


def is_own(folder: Path) -> bool:
    """Return whether this user has started the run in a folder."""
    return _Signed(folder).has(_OWN_RUN)


def sign_run(folder: Path, config: Config, as_own: bool) -> None:
    """Sign what a config would execute and fetch, and the Python files in its run's folder, as this user's own.

    as_own: sign that the run itself is this user's, too. Where the home cannot be written nothing
    is signed, and the run counts as another's.
    """
    lines = [f"{key}={text}" for key, text, _ in statements_of(config)]
    if as_own:
        lines.append(_OWN_RUN)
    if _executes_files(config):
        lines += [_line_of(path.name, path.read_bytes()) for path in _files_of(folder)]
    with suppress(OSError):
        key = _key() or _make_key()
        _append(folder / SIGNATURES, [_code(key, line) for line in lines])


class _Signed:
    """The lines of a run that are signed by this user."""

    def __init__(self, folder: Path) -> None:
        self._key = _key()
        try:
            self._codes = set((folder / SIGNATURES).read_text().split())
        except (OSError, UnicodeDecodeError):
            self._codes = set()

    def has(self, line: str) -> bool:
        # A set's look-up takes no constant time, but whoever could measure it executes programs as
        # this user already.
        return self._key is not None and _code(self._key, line) in self._codes


def _executes_files(config: Config) -> bool:
    return any(text.startswith("config:") for _, text, _ in statements_of(config))


def _files_of(folder: Path) -> list[Path]:
    """List a run's copies of its config and of the files that it derives from."""
    return sorted(folder.glob("*.py"))


def _refusal(place: str, what: str, kind: str = "run") -> UserError:
    return UserError(
        f"{place}: you did not make this {kind}, or it was changed since: {what}; look at it, and say --trust to do as "
        "it says"
    )


def _line_of(name: str, content: bytes) -> str:
    return f"{name}: {hashlib.sha256(content).hexdigest()}"


def _code(key: bytes, line: str) -> str:
    return hmac.digest(key, line.encode("utf-8", "surrogatepass"), "sha256").hex()


def _append(path: Path, codes: Iterable[str]) -> None:
    known = set(path.read_text().split()) if path.is_file() else set()
    new = [code for code in dict.fromkeys(codes) if code not in known]
    if new:
        with path.open("a") as file:
            # a killed process may have left half a line
            file.write("".join(f"\n{code}" for code in new) + "\n")


def _key() -> bytes | None:
    """Read the user's key; None where there is none yet."""
    try:
        key = (user_config() / "key").read_bytes()
    except OSError:
        return None
    return key if len(key) == 32 else None


def _make_key() -> bytes:
    """Make the user's key, which no one else can read. Raises OSError."""
    path = user_config() / "key"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"key.{secrets.token_hex(8)}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
    try:
        # A link fails where the key is already there, in one step, and never shows half a key.
        with suppress(FileExistsError):
            os.link(partial, path)  # another process may have been faster
    finally:
        partial.unlink()
    return path.read_bytes()
