"""Reading, editing and storing configs, and finding the functions that they name.

A config is a Python file with `def config() -> Config`. A variant starts from a file beside it:

    base = sibling(__file__, "tiny_omni")

    def config() -> Config:
        return dataclasses.replace(base.config(), name="mine")

Lines `a.b=value` edit it; what results is checked, printed, stored as JSON and rebuilt from that JSON alone. A
function of your own is stored as `module:qualname` and looked up here and nowhere else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from mmjax.config import Config, FunctionSource, ModelConfig
from mmjax.config_checks import validate
from mmjax.config_meanings import first_line, meaning
from mmjax.config_values import assign, decode, did_you_mean, encode, leaves, walk
from mmjax.errors import UserError

__all__ = [
    "callbacks_of",
    "default_config",
    "describe",
    "describe_with_meanings",
    "differences",
    "edit",
    "find",
    "from_json",
    "keep",
    "keys_of",
    "load",
    "resolve",
    "shipped",
    "sibling",
    "to_json",
    "validate",
]

KEPT = "config.py"  # a run folder's copy of its config file
SHORT = 16  # characters of a key's value; the meanings of longer ones stand further to the right
LENGTHS = "training.steps", "training.epochs"  # of a run, which has one of them

Read = dict[Path, types.ModuleType | None]  # files of one reading; None while a file is being executed

_reading: ContextVar[Read | None] = ContextVar("reading", default=None)


# -------------------------------------------------------------------------------------------------------- reading


def load(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a file, or of one of mmjax's by name (`tiny_vlm`), edited by lines `a.b=value`, and validated.

    Lines `name=text` whose name is one of config()'s own parameters are given to it. Raises UserError, with file and
    line for a fault of the file, with the key for a fault of a value.
    """
    path = find(path_or_name)
    with _one_reading() as read:
        module = _execute(path, read)
        given = _arguments(module, overrides)
        tree = _tree_of(module, path, read, given)
    _assign_all(tree, [line for line in overrides if line.partition("=")[0] not in given])
    config = decode(Config, tree, "")
    try:
        validate(config)
        for name, source in config.data.sources.items():
            if isinstance(source, FunctionSource):
                _function_of(source.function, f"data.sources.{name}.function", module, path)
        for key, function in _callbacks(config.model):
            _function_of(function, key, module, path)
    except UserError as error:
        raise UserError(f"{error}" if overrides else f"{path}: {error}") from None
    return config


def edit(config: Config, overrides: Sequence[str]) -> Config:
    """A config edited by lines `a.b=value`, and validated."""
    tree = encode(Config, config, "")
    _assign_all(tree, overrides)
    edited = decode(Config, tree, "")
    validate(edited)
    return edited


def _assign_all(tree: dict[str, Any], lines: Sequence[str]) -> None:
    """Edit a tree by lines; a length of the run in epochs takes the place of one in steps, and the other way round."""
    keys = [line.partition("=")[0].strip() for line in lines]
    for key, line in zip(keys, lines, strict=True):
        assign(Config, tree, line)
        for one, other in (LENGTHS, LENGTHS[::-1]):
            if key == one and other not in keys:
                assign(Config, tree, f"{other}=0")


def default_config() -> Path:
    """The file that `python -m mmjax.train` runs when it is given none."""
    return _shipped() / "tiny_omni.py"


def shipped() -> dict[str, str]:
    """Name every config of mmjax's own, with what its file says of itself first."""
    return {path.stem: first_line(path) for path in sorted(_shipped().glob("*.py"))}


def find(path_or_name: str | Path) -> Path:
    """The config file of this path, or of this name among mmjax's own. Raises UserError if there is none."""
    path = Path(path_or_name).expanduser()
    if path.is_file() and path.suffix == ".py":
        return path.absolute()
    if path.exists() and (path.is_file() or path.parent != Path(".")):
        raise UserError(f"{path} is not a config: a config is a Python file, name.py, with def config() -> Config")
    shipped = _shipped() / path.with_suffix(".py").name
    if path.parent in (Path("."), Path("configs")) and path.suffix in ("", ".py") and shipped.is_file():
        return shipped
    folder = path.parent if path.parent != Path(".") or path.suffix else _shipped()
    beside = sorted(p.stem for p in folder.glob("*.py")) if folder.is_dir() else []
    own = sorted(p.stem for p in _shipped().glob("*.py"))
    raise UserError(f"no config {path_or_name}{did_you_mean(path.stem, dict.fromkeys([*beside, *own]))}")


def sibling(file: str, name: str) -> types.ModuleType:
    """The config file `name` beside `file` (give `__file__`), executed; mmjax's own where there is none beside it."""
    folder = Path(file).absolute().parent
    candidates = [folder / f"{name}.py", _shipped() / f"{name}.py"]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None or not name.isidentifier():
        known = dict.fromkeys(p.stem for where in (folder, _shipped()) for p in sorted(where.glob("*.py")))
        raise UserError(f"{file}: no config {name!r} beside it{did_you_mean(name, known)}")
    if path.name == KEPT:
        raise UserError(f"{file}: derives from {path}, but a run keeps its own config as {KEPT}; rename that file")
    with _one_reading() as read:
        return _execute(path, read)


def keep(path_or_name: str | Path, folder: Path) -> None:
    """Copy a config file into a run's folder as `config.py`, and beside it the files that it derives from."""
    path = find(path_or_name)
    with _one_reading() as read:
        module = _execute(path, read)
        with suppress(UserError):  # of what it was given to start with, nothing is known here
            _tree_of(module, path, read)
        texts = {p.name if p != path else KEPT: p.read_text() for p in read if p == path or p.parent != _shipped()}
    for name, text in texts.items():
        (folder / name).write_text(text)


def _shipped() -> Path:
    package = Path(__file__).absolute().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


@contextmanager
def _one_reading() -> Iterator[Read]:
    """The files read so far: within one reading each is executed once; a sibling joins the reading around it."""
    if (outer := _reading.get()) is not None:
        yield outer
        return
    read: Read = {}
    token = _reading.set(read)
    try:
        yield read
    finally:
        _reading.reset(token)


def _execute(path: Path, read: Read) -> types.ModuleType:
    if path in read:
        if (module := read[path]) is None:
            raise UserError(f"{path}: derives from itself, by way of {list(read)[-1].name}")
        return module
    read[path] = None
    name = f"mmjax_config_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    with _faults_in(path, read):
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    read[path] = module
    return module


@contextmanager
def _faults_in(path: Path, read: Read) -> Iterator[None]:
    """Turn what a config file raises into one line that says where in the files that were read."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) in read]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else f"{path}:1"
        raise UserError(f"{place}: " + " ".join(f"{type(error).__name__}: {error}".split())) from None


def _arguments(module: types.ModuleType, lines: Sequence[str]) -> dict[str, str]:
    """Select the overrides `name=text` that name a parameter of the module's config()."""
    make = getattr(module, "config", None)
    known = inspect.signature(make).parameters if isinstance(make, types.FunctionType) else {}
    return {name: text for name, _, text in (line.partition("=") for line in lines) if name in known}


def _tree_of(
    module: types.ModuleType, path: Path, read: Read, given: Mapping[str, str] | None = None
) -> dict[str, Any]:
    make = getattr(module, "config", None)
    if not isinstance(make, types.FunctionType):
        raise UserError(f"{path}:1: has no function config; a config file defines def config() -> Config")
    needed = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    if missing := [name for name in needed if name not in (given or {})]:
        raise UserError(f"{path}: config() asks for {missing[0]}; say it after the config's name: {missing[0]}=...")
    with _faults_in(path, read):
        made = make(**(given or {}))
    if type(made) is not Config:
        line = make.__code__.co_firstlineno
        raise UserError(f"{path}:{line}: config() returns {type(made).__name__}, expected mmjax.config.Config")
    try:
        return encode(Config, made, "")
    except UserError as error:
        key = str(error).partition(":")[0]
        raise UserError(f"{path}:{_line_of(key, make, path)}: {error}") from None


def _line_of(key: str, make: types.FunctionType, path: Path) -> int:
    """Find the line that sets this key: the only `name=` of its name, else the start of `config`."""
    name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
    found = [
        k.value.lineno for k in ast.walk(ast.parse(path.read_text())) if isinstance(k, ast.keyword) and k.arg == name
    ]
    return found[0] if len(found) == 1 else make.__code__.co_firstlineno


# -------------------------------------------------------------------------------------------- storing and comparing


def to_json(config: Config) -> str:
    """A config as JSON, every field written out."""
    return json.dumps(encode(Config, config, ""), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The config that `to_json` stored. Raises UserError for what is no such JSON, or has an unknown key or kind."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the stored config is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"the stored config is a JSON {type(tree).__name__}, expected an object")
    return decode(Config, tree, "")


def describe(config: Config) -> str:
    """A config as aligned lines `key = value`; each is a valid override."""
    lines = list(leaves(Config, encode(Config, config, "")))
    width = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:<{width}} = {text}" for key, text in lines)


def describe_with_meanings(config: Config) -> str:
    """Describe a config, each key's meaning behind its value, as mmjax.config has it beside the field."""
    values = list(walk(Config, encode(Config, config, "")))
    width = max(len(leaf.key) for leaf in values)
    lines = [(f"{leaf.key:<{width}} = {leaf.text}", meaning(leaf)) for leaf in values]
    column = width + SHORT
    return "\n".join(f"{line:<{column}}  # {about}" if about else line for line, about in lines)


def keys_of(config: Config) -> list[str]:
    """The names of all its values, as overrides have them."""
    return [key for key, _ in leaves(Config, encode(Config, config, ""))]


def differences(a: Config, b: Config) -> list[str]:
    """List differences as `key: old -> new`; a key or whole section that one lacks is `absent`."""
    old, new = (dict(leaves(Config, encode(Config, c, ""))) for c in (a, b))
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        parent_absent = any(key.startswith(f"{k}.") and (k in old) != (k in new) for k in (*old, *new))
        if old.get(key) != new.get(key) and not parent_absent:
            lines.append(f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}")
    return lines


# -------------------------------------------------------------------------------------------------------- functions


def resolve(function: str, folder: Path | None) -> Callable[..., Any]:
    """The function or class `module:qualname`, in mmjax, or in a run's kept config file as `config:qualname`.

    Raises UserError for anything else: a stored config must not be able to call what it likes.
    """
    if not function.startswith("config:"):
        return _function_of(function, "function", None, None)
    path = None if folder is None else Path(folder).absolute() / KEPT
    if path is None or not path.is_file():
        place = f"there is no {path}" if path else "no run folder is known"
        raise UserError(f"function {function!r} is in the run's config file, but {place}; give the run's folder")
    _warn_of_others(path)
    with _one_reading() as read:
        return _function_of(function, "function", _execute(path, read), path)


@functools.cache
def _warn_of_others(path: Path) -> None:
    """Say once that a file is executed which somebody else has written: it may do whatever this user may."""
    if path.stat().st_uid not in (os.getuid(), 0):
        print(f"note: {path} belongs to another user, and is executed as you", file=sys.stderr, flush=True)


def callbacks_of(model: ModelConfig, folder: Path | None) -> dict[str, Callable[..., Any]]:
    """The functions that a model's encoders name, by these names; `folder` and errors as in `resolve`."""
    return {function: resolve(function, folder) for _, function in _callbacks(model)}


def _callbacks(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """The keys of the functions that a model's encoders name, and these names."""
    for name, encoder in model.encoders.items():
        for field in dataclasses.fields(encoder.callbacks):
            if function := getattr(encoder.callbacks, field.name):
                yield f"model.encoders.{name}.callbacks.{field.name}", function


def _function_of(function: str, where: str, module: types.ModuleType | None, path: Path | None) -> Callable[..., Any]:
    module_name, _, qualname = function.partition(":")
    parts = qualname.split(".")
    known = module_name == "config" or module_name.split(".")[0] == "mmjax"
    if not known or not all(map(str.isidentifier, parts)):
        raise UserError(f"{where}: {function!r} is neither mmjax.<module>:<name> nor config:<name>")
    if any(part.startswith("_") for part in [*parts, *module_name.split(".")]):
        raise UserError(f"{where}: {function!r} is private; name a public function or class")
    if module_name == "config":
        found: Any = module
    else:
        try:
            found = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(f"{where}: {function!r}: {error}") from None
    for part in parts:
        found = getattr(found, part, None)
    inside = module_name == "config" or getattr(found, "__module__", "").split(".")[0] == "mmjax"
    if not callable(found) or not inside:
        raise UserError(f"{where}: no function {qualname!r} in {path or module_name}")
    return found
