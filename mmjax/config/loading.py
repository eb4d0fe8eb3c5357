"""Load, edit and store configs, and resolve the functions that they name.

A config is a Python file with `def config() -> Config`. A variant starts from a file beside it:

    base = sibling(__file__, "tiny_omni")

    def config() -> Config:
        return dataclasses.replace(base.config(), name="mine")

or a YAML or JSON file with the same keys, whose variant names its `base`. Overrides `a.b=value`
edit it; the result is validated, printed, stored as JSON and rebuilt from that JSON alone. Your own
functions are stored as `module:qualname`, and this module alone looks them up.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import hashlib
import importlib
import inspect
import json
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from mmjax.config import Config, FunctionSource, ModelConfig
from mmjax.config.assignment import assign, value_at
from mmjax.config.codec import (
    decode,
    defaults,
    did_you_mean,
    encode,
    key_of,
    leaves,
    parse_argument,
    unquoted,
    walk,
)
from mmjax.config.meanings import first_line, meaning
from mmjax.config.other_names import name_here
from mmjax.config.validation import validate
from mmjax.config.yaml_files import config_lines
from mmjax.errors import UserError

__all__ = [
    "apply_overrides",
    "config_parameters",
    "copy_config",
    "default_config",
    "describe",
    "describe_with_meanings",
    "differences",
    "find_config",
    "from_json",
    "is_override",
    "keys_of",
    "load",
    "resolve",
    "resolve_callbacks",
    "shipped_configs",
    "sibling",
    "to_json",
    "validate",
]

CONFIG_COPY = (
    "config.py"  # a run folder's copy of its config file, which is config.yaml of YAML and JSON
)
DATA_SUFFIXES = (".yaml", ".yml", ".json")
CONFIG_SUFFIXES = (".py", *DATA_SUFFIXES)
ARGUMENTS = "arguments."  # of a base's config(), in YAML
STORED_CONFIG = "config.json"  # the resolved config in a run's folder
# characters of a key's value before its meaning; longer values push it to the right
VALUE_WIDTH = 16
LENGTHS = ("training.steps", "training.epochs")  # of a run, which has one of them

# config files that one load executes; None while a file is executing
Loaded = dict[Path, types.ModuleType | None]

_loading: ContextVar[Loaded | None] = ContextVar("loading", default=None)


# --------------------------------------------------------------------------------------------------
# loading


def load(
    path_or_name: str | Path, overrides: Sequence[str] = (), planned: Sequence[str] = ()
) -> Config:
    """Load a config from a file, or one of mmjax's by name (`tiny_vlm`), apply overrides `a.b=value` and validate it.

    Overrides `name=text` that name a parameter of the file's config() are passed to it. planned:
    overrides of a plan, which the others change. Raises UserError with file and line for a mistake
    in the file, and with the key for a bad value.
    """
    path = find_config(path_or_name)
    with _share_modules() as modules:
        module = _execute(path, modules)
        arguments = _config_arguments(module, [*planned, *overrides])
        tree = _config_tree(module, path, modules, arguments)
        lines = [
            [line for line in words if key_of(line) not in arguments]
            for words in (planned, overrides)
        ]
        for name in arguments.keys() & set(map(key_of, overrides)):
            _check_effect(
                name,
                arguments,
                [*lines[0], *lines[1]],
                tree,
                partial(_config_tree, module, path, modules),
            )
    for words in lines:
        _assign_all(tree, words)
    config = decode(Config, tree, "")
    try:
        validate(config)
        for name, source in config.data.sources.items():
            if isinstance(source, FunctionSource):
                _look_up(source.function, f"data.sources.{name}.function", module, path)
        for key, function in callback_names(config.model):
            _look_up(function, key, module, path)
    except UserError as error:
        raise UserError(f"{error}" if overrides or planned else f"{path}: {error}") from None
    return config


def config_parameters(path: Path) -> list[str]:
    """List the parameters of a config file's config(), which overrides may name."""
    with _share_modules() as modules:
        return list(_parameters(_execute(path, modules)))


def apply_overrides(
    config: Config, overrides: Sequence[str], planned: Sequence[str] = ()
) -> Config:
    """Apply overrides `a.b=value` to a config, after those of a plan, and validate the result."""
    tree = encode(Config, config, "")
    for lines in (planned, overrides):
        _assign_all(tree, lines)
    edited = decode(Config, tree, "")
    validate(edited)
    return edited


def _check_effect(
    name: str,
    arguments: Mapping[str, str],
    lines: Sequence[str],
    tree: dict[str, Any],
    make_tree: Callable[[Mapping[str, str]], dict[str, Any]],
) -> None:
    """Raise UserError where all that an argument of config() sets is set by overrides `lines` too, so it has no effect.

    tree: of the config with these arguments. What an argument sets is seen by giving it another
    text.
    """
    built = dict(leaves(Config, tree))
    assigned = _assigned(tree, lines)
    text = arguments[name]
    for variant in filter(None, [f"{text}_", str(int(text) + 1) if text.isdecimal() else ""]):
        try:
            changed = make_tree({**arguments, name: variant})
            lost = _assigned(changed, lines) == assigned
        except UserError:
            # the text has a meaning of its own: it names a checkpoint, or one of several models
            continue
        set_by_it = [key for key, value in leaves(Config, changed) if built.get(key) != value]
        lines_of = [
            (key, line)
            for key in set_by_it
            for line in lines
            if f"{key}.".startswith(f"{key_of(line)}.")
        ]
        if lost and lines_of:
            key, line = lines_of[0]
            raise UserError(f"{name}={text} and {line} set {key} twice; leave one of them out")


def _assigned(tree: dict[str, Any], lines: Sequence[str]) -> dict[str, Any]:
    """Return a copy of a tree with these overrides."""
    tree = copy.deepcopy(tree)
    for line in lines:
        assign(Config, tree, line)
    return tree


def is_override(word: str) -> bool:
    """Tell whether a word of a command line is written as a change to a config."""
    return "=" in word and key_of(word).partition(".")[0] in (
        field.name for field in dataclasses.fields(Config)
    )


def _assign_all(tree: dict[str, Any], lines: Sequence[str], places: Mapping[str, str] = {}) -> None:
    """Apply overrides to a tree. Setting the run's length in epochs unsets it in steps, and the other way round.

    places: where they stand in a file.
    """
    keys = [key_of(line) for line in lines]
    for n, (key, line) in enumerate(zip(keys, lines, strict=True)):
        below = {
            earlier: value_at(tree, key_of(earlier))
            for earlier in lines[:n]
            if key_of(earlier).startswith(f"{key}.")
        }
        with _errors_at(places.get(line)):
            assign(Config, tree, line)
        if undone := [
            earlier for earlier, value in below.items() if value_at(tree, key_of(earlier)) != value
        ]:
            raise UserError(
                f"{undone[0]} is undone by {line} behind it; put {undone[0]} last, or leave one of them out"
            )
        if key in LENGTHS and not set(LENGTHS) <= set(keys):
            (unset,) = set(LENGTHS) - {key}
            assign(Config, tree, f"{unset}=0")


def default_config() -> Path:
    """Return the config file that commands use when none is named."""
    return _shipped_folder() / "tiny_omni.py"


def config_of_words(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Find the config that one of a command's words names, or else the default; return its file and the other words."""
    named = next((word for word in words if "=" not in word), "")
    path = find_config(named) if named else default_config()
    return path, [word for word in words if word is not named]


def shipped_configs() -> dict[str, str]:
    """List the configs that come with mmjax, with the first line of each file's docstring."""
    return {path.stem: first_line(path) for path in sorted(_shipped_folder().glob("*.py"))}


def find_config(path_or_name: str | Path) -> Path:
    """Find a config file by path, or by name among those that come with mmjax. Raises UserError if there is none."""
    path = Path(path_or_name).expanduser()
    if path.name == STORED_CONFIG:
        raise UserError(
            f"{path}: runs and checkpoints have a file of this name; to go on with a run say --resume {path.parent}, "
            "to start another from its config copy the file to a name of its own"
        )
    if path.is_file() and path.suffix in CONFIG_SUFFIXES:
        return path.absolute()
    if path.exists() and (path.is_file() or path.parent != Path(".")):
        raise UserError(
            f"{path} is not a config: a config is a Python file, name.py, with def config() -> Config, or a .yaml or "
            ".json with its keys"
        )
    shipped = _shipped_folder() / path.with_suffix(".py").name
    if (
        path.parent in (Path("."), Path("configs"))
        and path.suffix in ("", ".py")
        and shipped.is_file()
    ):
        return shipped
    known = list(map(str, _configs_in(path.parent)))
    if not known and path.parent not in (Path("."), Path("configs")):
        raise UserError(f"no config {path_or_name}: {path.parent} has none")
    known = [*shipped_configs(), *known]
    raise UserError(f"no config {path_or_name}{did_you_mean(str(path), known)}")


def sibling(file: str, name: str, suffixes: Sequence[str] = CONFIG_SUFFIXES) -> types.ModuleType:
    """Load the config file `name` beside `file` (pass `__file__`), or else the one that comes with mmjax."""
    folder = Path(file).absolute().parent
    candidates = [folder / f"{name}{suffix}" for suffix in suffixes]
    candidates.append(_shipped_folder() / f"{name}.py")
    path = next((p for p in candidates if p.is_file()), None)
    if path is None or not name.isidentifier():
        raise UserError(
            f"{file}: no config {name!r} beside it{did_you_mean(name, _config_names(folder))}"
        )
    if path.stem == Path(CONFIG_COPY).stem:
        raise UserError(
            f"{file}: derives from {path}, but a run keeps its own config as {path.name}; rename that file"
        )
    with _share_modules() as modules:
        return _execute(path, modules)


def copy_config(path_or_name: str | Path, folder: Path) -> None:
    """Copy a config file into a run's folder, and beside it the files that it derives from."""
    for name, text in config_texts(path_or_name).items():
        (folder / name).write_text(text)


def config_texts(path_or_name: str | Path) -> dict[str, str]:
    """Read a config file and those that it derives from, by their names in a run's folder.

    `config.py` has the functions that the config may name; a YAML or JSON file is `config.yaml`.
    """
    path = find_config(path_or_name)
    shipped = _shipped_folder()
    with _share_modules() as modules:
        module = _execute(path, modules)
        with suppress(UserError):  # config() may need arguments, which are not known here
            _config_tree(module, path, modules)
        names = {
            # the other names that end in .json are those of a run's own files
            p: p.name if p.suffix == ".py" else f"{p.stem}.yaml"
            for p in modules
            if p.parent != shipped
        }
        names[path] = "config.yaml"
        names |= dict.fromkeys([p for p in modules if p.suffix == ".py"][:1], CONFIG_COPY)
        return {name: p.read_text() for p, name in names.items()}


def _shipped_folder() -> Path:
    package = Path(__file__).absolute().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _configs_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.*") if path.suffix in CONFIG_SUFFIXES)


def _config_names(folder: Path) -> list[str]:
    """List the configs in a folder and those that come with mmjax, each once."""
    folders = (folder, _shipped_folder())
    return list(dict.fromkeys(path.stem for f in folders for path in _configs_in(f)))


@contextmanager
def _share_modules() -> Iterator[Loaded]:
    """Yield the modules loaded so far, so that a load executes each file once; `sibling` joins the load around it."""
    if (outer := _loading.get()) is not None:
        yield outer
        return
    modules: Loaded = {}
    token = _loading.set(modules)
    try:
        yield modules
    finally:
        _loading.reset(token)


def _execute(path: Path, modules: Loaded) -> types.ModuleType:
    if path in modules:
        if (module := modules[path]) is None:
            raise UserError(f"{path}: derives from itself, by way of {list(modules)[-1].name}")
        return module
    modules[path] = None
    name = f"mmjax_config_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    # as importlib does: dataclasses and pickle look a class's module up there
    sys.modules[name] = module
    # Executed under a name of its own instead of imported: files of equal names in two folders stay
    # apart.
    if path.suffix in DATA_SUFFIXES:
        _read_data_file(path, module, modules)
        modules[path] = module
        return module
    with _errors_with_line(path, modules):
        exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    modules[path] = module
    return module


def _read_data_file(path: Path, module: types.ModuleType, modules: Loaded) -> None:
    """Give a module the config() of a YAML or JSON file, of which nothing is executed.

    Its `base`, a shipped config that is called with `arguments` or another such file, gives what
    the file does not say, and functions.
    """
    places = dict(config_lines(path))
    named = next((line for line in places if key_of(line) == "base"), "")
    arguments = {}
    if named:
        place = places.pop(named)
        base = sibling(place, unquoted(named.partition("=")[2]), DATA_SUFFIXES)
        vars(module).update(vars(base))
        for line in [line for line in places if line.startswith(ARGUMENTS)]:
            arguments[key_of(line).removeprefix(ARGUMENTS)] = line.partition("=")[2]
            del places[line]

    def config(**given: str) -> Config:
        tree = defaults(Config, "")
        if named:
            with _errors_at(place):
                tree = _config_tree(base, Path(base.__file__), modules, arguments | given)
        _assign_all(tree, list(places), places)
        with _errors_at(str(path)):
            return decode(Config, tree, "")

    # The command line gives the base's arguments too, of which the file may lack any.
    config.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in (_parameters(base) if named else ())
        ]
    )
    module.config = config


@contextmanager
def _errors_at(place: str | None) -> Iterator[None]:
    """Put a place, `file:line`, before the UserErrors of the body."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}" if place else f"{error}") from None


@contextmanager
def _errors_with_line(path: Path, modules: Loaded) -> Iterator[None]:
    """Turn an exception in a config file into a UserError with the innermost file and line of the loaded files."""
    try:
        yield
    except UserError:
        raise
    except SyntaxError as error:
        # none for a null byte
        place = f"{error.filename}:{error.lineno}" if error.filename else path
        raise UserError(f"{place}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) in modules
        ]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else f"{path}:1"
        raise UserError(
            f"{place}: " + " ".join(f"{type(error).__name__}: {error}".split())
        ) from None


def _parameters(module: types.ModuleType) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's config()."""
    make = getattr(module, "config", None)
    return inspect.signature(make).parameters if isinstance(make, types.FunctionType) else {}


def _config_arguments(module: types.ModuleType, lines: Sequence[str]) -> dict[str, str]:
    """Select the overrides `name=text` that name a parameter of the module's config().

    Raises UserError for a name that is no section of a config, and much like a parameter.
    """
    parameters = _parameters(module)
    texts = {name: text for name, _, text in (line.partition("=") for line in lines)}
    for name in (
        texts.keys() - parameters.keys() - {field.name for field in dataclasses.fields(Config)}
    ):
        if "." in name or name_here(name, ""):
            continue
        if difflib.get_close_matches(name, parameters, 1):
            raise UserError(f"unknown key {name!r}{did_you_mean(name, parameters)}")
    return {name: text for name, text in texts.items() if name in parameters}


def _config_tree(
    module: types.ModuleType,
    path: Path,
    modules: Loaded,
    arguments: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Call a module's config() and encode the result. Raises UserError with the file's line for any mistake."""
    arguments = arguments or {}
    make = getattr(module, "config", None)
    if not isinstance(make, types.FunctionType):
        raise UserError(
            f"{path}:1: has no function config; a config file defines def config() -> Config"
        )
    parameters = inspect.signature(make).parameters
    needed = [p.name for p in parameters.values() if p.default is p.empty]
    if unknown := [name for name in arguments if name not in parameters]:
        raise UserError(
            f"{path}: config() has no argument {unknown[0]!r}{did_you_mean(unknown[0], parameters)}"
        )
    if missing := [name for name in needed if name not in arguments]:
        raise UserError(
            f"{path}: config() asks for {missing[0]}; say it after the config's name: {missing[0]}=... (of a YAML "
            "file's base, below arguments)"
        )
    with _errors_with_line(path, modules):
        hints = get_type_hints(make)
        config = make(
            **{
                name: parse_argument(hints.get(name, str), text, name)
                for name, text in arguments.items()
            }
        )
    if type(config) is not Config:
        line = make.__code__.co_firstlineno
        raise UserError(
            f"{path}:{line}: config() returns {type(config).__name__}, expected mmjax.config.Config"
        )
    # Constructors of dataclasses check no types; encoding does.
    try:
        return encode(Config, config, "")
    except UserError as error:
        key = str(error).partition(":")[0]
        raise UserError(f"{path}:{_line_of(key, make, path)}: {error}") from None


def _line_of(key: str, make: types.FunctionType, path: Path) -> int:
    """Find the line that sets this key: the only `name=` of its name, else the start of `config`."""
    name = re.sub(r"\[\d+\]$", "", key).rpartition(".")[2]
    nodes = ast.walk(ast.parse(path.read_text()))
    lines = [
        node.value.lineno for node in nodes if isinstance(node, ast.keyword) and node.arg == name
    ]
    return lines[0] if len(lines) == 1 else make.__code__.co_firstlineno


# --------------------------------------------------------------------------------------------
# storing and comparing


def to_json(config: Config) -> str:
    """Format a config as JSON with every field."""
    return json.dumps(encode(Config, config, ""), indent=2) + "\n"


def from_json(text: str) -> Config:
    """Rebuild a config from `to_json`'s text. Raises UserError for other JSON, and for an unknown key or kind."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the stored config is not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"the stored config is a JSON {type(tree).__name__}, expected an object")
    return decode(Config, tree, "")


def describe(config: Config) -> str:
    """Format a config as aligned lines `key = value`, each a valid override."""
    lines = list(leaves(Config, encode(Config, config, "")))
    width = max(len(key) for key, _ in lines)
    return "\n".join(f"{key:<{width}} = {text}" for key, text in lines)


def describe_with_meanings(config: Config) -> str:
    """Format a config like `describe`, with the comment of each key in mmjax.config behind its value."""
    values = list(walk(Config, encode(Config, config, "")))
    width = max(len(leaf.key) for leaf in values)
    lines = [(f"{leaf.key:<{width}} = {leaf.text}", meaning(leaf)) for leaf in values]
    column = width + VALUE_WIDTH
    return "\n".join(f"{line:<{column}}  # {about}" if about else line for line, about in lines)


def keys_of(config: Config) -> list[str]:
    """List the keys of all values of a config, as in overrides."""
    return [key for key, _ in leaves(Config, encode(Config, config, ""))]


def differences(a: Config, b: Config) -> list[str]:
    """List the differences between two configs as `key: old -> new`; a missing key or section is `absent`."""
    old, new = (dict(leaves(Config, encode(Config, c, ""))) for c in (a, b))
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        # Of a section that one lacks only the section is listed, not each of its keys.
        parent_absent = any(
            key.startswith(f"{k}.") and (k in old) != (k in new) for k in (*old, *new)
        )
        if old.get(key) != new.get(key) and not parent_absent:
            lines.append(f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}")
    return lines


# --------------------------------------------------------------------------------------------------
# functions


def resolve(function: str, folder: Path | None) -> Callable[..., Any]:
    """Look up the function or class `module:qualname` in mmjax, or `config:qualname` in a run's copy of its config.

    Raises UserError for anything else: a stored config must not be able to call arbitrary code.
    That the folder is to be trusted is for `runtime.run_trust` to know, before its config gets
    here.
    """
    if not function.startswith("config:"):
        return _look_up(function, "function", None, None)
    path = None if folder is None else Path(folder).absolute() / CONFIG_COPY
    if path is None or not path.is_file():
        place = f"there is no {path}" if path else "no run folder is known"
        raise UserError(
            f"function {function!r} is in the run's config file, but {place}; give the run's folder"
        )
    with _share_modules() as modules:
        return _look_up(function, "function", _execute(path, modules), path)


def resolve_callbacks(model: ModelConfig, folder: Path | None) -> dict[str, Callable[..., Any]]:
    """Resolve the callbacks of a model's encoders, by `module:qualname`; `folder` and errors as in `resolve`."""
    return {function: resolve(function, folder) for _, function in callback_names(model)}


def callback_names(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and the `module:qualname` of each callback of a model's encoders."""
    for name, encoder in model.encoders.items():
        for field in dataclasses.fields(encoder.callbacks):
            if function := getattr(encoder.callbacks, field.name):
                yield f"model.encoders.{name}.callbacks.{field.name}", function


def _look_up(
    function: str, where: str, module: types.ModuleType | None, path: Path | None
) -> Callable[..., Any]:
    """Look up a public function of mmjax, or of a config file that is loaded as `module` from `path`.

    Raises UserError, naming the key `where`.
    """
    module_name, _, qualname = function.partition(":")
    parts = qualname.split(".")
    known = module_name == "config" or module_name.split(".")[0] == "mmjax"
    if not known or not all(map(str.isidentifier, parts)):
        raise UserError(f"{where}: {function!r} is neither mmjax.<module>:<name> nor config:<name>")
    if any(part.startswith("_") for part in [*parts, *module_name.split(".")]):
        raise UserError(f"{where}: {function!r} is private; name a public function or class")
    try:
        value: Any = module if module_name == "config" else importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"{where}: {function!r}: {error}") from None
    for part in parts:
        value = getattr(value, part, None)
    # Other packages' functions, which a module of mmjax imports, are refused too.
    allowed = module_name == "config" or getattr(value, "__module__", "").split(".")[0] == "mmjax"
    if not callable(value) or not allowed:
        raise UserError(f"{where}: no function {qualname!r} in {path or module_name}")
    return value
