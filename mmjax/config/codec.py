"""Read the meaning of each config key from the comments and docstrings of the dataclasses in `mmjax.config`.

The meaning of a field is the comment behind it or right above it; that of a kind is its docstring's first line.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import json
import math
import re
import textwrap
import tokenize
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mmjax.config.other_names import name_here
from mmjax.errors import UserError

Hint = Any  # what typing.get_type_hints gives for a field
Tree = Any  # dict, list, str, int, float, bool or None, nested

MAX_INT = 2**53  # beyond, JSON readers that use floats change an int
_KEY = re.compile(r"[\w.\-]+")


def union_members(hint: Hint) -> tuple[Hint, ...]:
    """List the alternatives of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


@functools.cache
def field_hints(cls: type) -> dict[str, Hint]:
    """Map a dataclass's fields to their types, without `kind`, which only discriminates a union."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name != "kind"}


def kinds(hint: Hint) -> dict[str, type]:
    """Map the kinds of a union of dataclasses to the dataclasses; empty for any other type."""
    return {m.kind: m for m in union_members(hint) if dataclasses.is_dataclass(m) and hasattr(m, "kind")}


def expected(hint: Hint) -> str:
    """Describe the values that a type allows, for a message."""
    if by_kind := kinds(hint):
        return f"a kind: {', '.join(by_kind)}"
    parts = []
    for member in union_members(hint):
        origin, args = get_origin(member), get_args(member)
        if origin is Literal:
            parts.append(("one of " if len(args) > 1 else "") + ", ".join(map(str, args)))
        elif origin is tuple:
            item = expected(args[0])
            parts.append("several, with commas between them" + ("" if item in parts else f", of: {item}"))
        elif origin is dict:
            parts.append(f"entries by name, each {expected(args[1])}")
        else:
            name = "none" if member is types.NoneType else member.__name__
            parts.append({bool: "true or false", float: "a finite float"}.get(member, name))
    return " or ".join(parts)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known name, as `: did you mean '...'?`, or list the known ones."""
    known = list(known)
    if close := difflib.get_close_matches(name, known, 1):
        return f": did you mean {close[0]!r}?"
    return f"; known: {', '.join(known[:20]) or 'none'}" + (", ..." if len(known) > 20 else "")


# ------------------------------------------------------------------------------------------- dataclasses and trees


def encode(hint: Hint, value: Any, where: str) -> Tree:
    """Convert a value to a plain tree. Raises UserError, naming the key `where`, if it is not of this type."""
    for member in union_members(hint):
        origin, args = get_origin(member), get_args(member)
        if dataclasses.is_dataclass(member) and type(value) is member:
            tree = {"kind": member.kind} if hasattr(member, "kind") else {}
            # `kind` has a default but is a field, so a config can set another one.
            if "kind" in tree and value.kind != member.kind:
                raise UserError(f"{where}.kind: got {value.kind!r}, but a {member.__name__} is a {member.kind!r}")
            return tree | {
                name: encode(hint, getattr(value, name), join(where, name))
                for name, hint in field_hints(member).items()
            }
        if origin is tuple and isinstance(value, tuple):
            return [encode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
        if origin is dict and isinstance(value, dict):
            return {_key(k, where): encode(args[1], v, join(where, k)) for k, v in value.items()}
    return _scalar(hint, value, where)


def decode(hint: Hint, tree: Tree, where: str) -> Any:
    """Convert a plain tree to a value. Raises UserError, naming the key, where the tree does not fit the type."""
    for member in union_members(hint):
        origin, args = get_origin(member), get_args(member)
        if dataclasses.is_dataclass(member) and isinstance(tree, dict):
            return _decode_dataclass(select_dataclass(hint, tree, where), tree, where)
        if origin is tuple and isinstance(tree, list):
            return tuple(decode(args[0], t, f"{where}[{i}]") for i, t in enumerate(tree))
        if origin is dict and isinstance(tree, dict):
            return {_key(k, where): decode(args[1], t, join(where, k)) for k, t in tree.items()}
    return _scalar(hint, tree, where)


def select_dataclass(hint: Hint, tree: Tree, where: str) -> type:
    """Select the dataclass that a tree describes: the only one of its type, or the one of its `kind`."""
    dataclass_members = [m for m in union_members(hint) if dataclasses.is_dataclass(m)]
    if len(dataclass_members) == 1:
        return dataclass_members[0]
    by_kind = kinds(hint)
    if (kind := tree.get("kind")) not in by_kind:
        raise UserError(f"{where}: unknown kind {kind!r}{did_you_mean(str(kind), by_kind)}")
    return by_kind[kind]


def _decode_dataclass(cls: type, tree: dict[str, Tree], where: str) -> Any:
    hints = field_hints(cls)
    for name, value in tree.items():
        if name == "kind" and hasattr(cls, "kind"):
            if value != cls.kind:
                raise UserError(f"{where}: unknown kind {value!r}{did_you_mean(str(value), [cls.kind])}")
        elif name not in hints:
            known = [join(where, n) for n in hints]
            raise UserError(f"unknown key {join(where, name)!r}{did_you_mean(join(where, name), known)}")
    for name in required(cls):
        if name not in tree:
            raise UserError(f"missing key {join(where, name)!r}, {expected(hints[name])}: it has no default; give it")
    return cls(**{name: decode(hints[name], tree[name], join(where, name)) for name in hints if name in tree})


def required(cls: type) -> list[str]:
    """List the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(cls) if f.default is missing and f.default_factory is missing]


def defaults(cls: type, where: str) -> dict[str, Tree]:
    """Build the tree of a dataclass from its defaults; fields without one are missing."""
    tree: dict[str, Tree] = {"kind": cls.kind} if hasattr(cls, "kind") else {}
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, hint in field_hints(cls).items():
        if name not in required(cls):
            factory = fields[name].default_factory
            value = fields[name].default if factory is dataclasses.MISSING else factory()
            tree[name] = encode(hint, value, join(where, name))
    return tree


def join(where: str, name: str) -> str:
    """Join the dotted key of a section, empty for the root, and the name of a field in it."""
    return f"{where}.{name}" if where else name


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise UserError(f"{where}: {key!r} cannot be a name; use letters, digits, '_', '-' and '.'")
    return key


def _scalar(hint: Hint, value: Any, where: str) -> Tree:
    if type(value) is int and abs(value) > MAX_INT:
        raise UserError(f"{where}: a whole number beyond {MAX_INT}, which no float holds exactly; give a smaller one")
    for member in union_members(hint):
        if get_origin(member) is Literal:
            # By type too: True == 1 and 1.0 == 1.
            if any(value == v and type(value) is type(v) for v in get_args(member)):
                return value
        elif type(value) is member and not (member is float and not math.isfinite(value)):
            return value
    if type(value) is int and float in union_members(hint):
        return float(value)
    simple = isinstance(value, bool | int | float | str)
    kind = "none" if value is None else f"a {type(value).__name__}"
    raise _mismatch(hint, f"{kind}, {value!r}" if simple else kind, str(value), where)


def _mismatch(hint: Hint, got: str, text: str, where: str) -> UserError:
    """Make the error for a value of another type. got: describes the value; text: is compared with the choices."""
    choices = [v for m in union_members(hint) if get_origin(m) is Literal for v in get_args(m)] + list(kinds(hint))
    close = difflib.get_close_matches(text, choices, 1)
    return UserError(
        f"{where}: got {got}; expected {expected(hint)}" + (f": did you mean {close[0]!r}?" if close else "")
    )


# ------------------------------------------------------------------------------------------------- text of one value


def parse(hint: Hint, text: str, where: str) -> Tree:
    """Parse a value of an override into a tree. Raises UserError with the text and what is expected."""
    options = {get_origin(m) or m: m for m in union_members(hint)}
    # From the most to the least specific: only what is nothing else is a plain string.
    if dict in options and text == "{}":
        return {}
    if types.NoneType in options and text.lower() == "none":
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in options and (value := _number(number, text)) is not None:
            return _scalar(hint, value, where)
    if Literal in options and (same := [v for v in get_args(options[Literal]) if str(v) == text]):
        return same[0]
    if tuple in options and (Literal not in options or "," in text or text == "()"):
        parts = [part.strip() for part in text.removeprefix("(").removesuffix(")").split(",")]
        inner = get_args(options[tuple])[0]
        return [parse(inner, part, f"{where}[{i}]") for i, part in enumerate(parts) if part or i < len(parts) - 1]
    if str in options:
        return _unquoted(text)
    raise _mismatch(hint, repr(text), text, where)


def parse_argument(hint: Hint, text: str, where: str) -> Any:
    """Parse an argument of a function by its annotation; by one of a class that has no text, return the text.

    Raises UserError with the text and what is expected.
    """
    known = (int, float, bool, str, types.NoneType, Literal, tuple)
    if any((get_origin(member) or member) not in known for member in union_members(hint)):
        return text
    return decode(hint, parse(hint, text, where), where)


def text_of(hint: Hint, tree: Tree) -> str:
    """Format a value of a tree as text that `parse` reads back to the same value."""
    if tree is None or isinstance(tree, bool):
        return str(tree).lower()
    if isinstance(tree, list):
        return ",".join(map(str, tree)) + ("," if len(tree) == 1 else "") if tree else "()"
    text = repr(tree) if isinstance(tree, float) else str(tree)
    if not isinstance(tree, str):
        return text
    # A string that would be read as another type, such as "none", needs quotes.
    plain = text and text.isprintable() and text == text.strip() and not text.startswith('"')
    return text if plain and parse(hint, text, "") == tree else json.dumps(text)


def _number(kind: type, text: str) -> int | float | None:
    try:
        value = kind(text)
    except ValueError:
        return None
    return value if kind is int or math.isfinite(value) else None


def _unquoted(text: str) -> str:
    if len(text) > 1 and text.startswith('"') and text.endswith('"'):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


# ----------------------------------------------------------------------------------------------- editing by lines


class Leaf(NamedTuple):
    """A value of a tree, and the dataclass field that it belongs to."""

    key: str
    text: str
    owner: type | None  # the dataclass that has the field; for an entry of a dict, the one with the dict
    field: str
    kind: type | None  # the dataclass of a union whose kind the text names


def walk(hint: Hint, tree: Tree, where: str = "", owner: type | None = None, field: str = "") -> Iterator[Leaf]:
    """Yield every value of a tree, a union's kind before its fields, an empty dict as `{}`."""
    member = next((m for m in union_members(hint) if dataclasses.is_dataclass(m) or get_origin(m) is dict), None)
    if member is None or not isinstance(tree, dict):
        yield Leaf(where, text_of(hint, tree), owner, field, None)
    elif get_origin(member) is dict:
        if not tree:
            yield Leaf(where, "{}", owner, field, None)
        for key, value in tree.items():
            yield from walk(get_args(member)[1], value, join(where, key), owner, field)
    else:
        cls = select_dataclass(hint, tree, where)
        if len(kinds(hint)) > 1:
            yield Leaf(where, tree["kind"], owner, field, cls)
        for name, field_hint in field_hints(cls).items():
            yield from walk(field_hint, tree[name], join(where, name), cls, name)


def leaves(hint: Hint, tree: Tree, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every `(key, text)` of a tree, in the order of `walk`."""
    return ((leaf.key, leaf.text) for leaf in walk(hint, tree, where))


def key_of(line: str) -> str:
    """Return the key of a line `a.b=value`."""
    return line.partition("=")[0].strip()


def assign(hint: Hint, tree: dict[str, Tree], line: str) -> None:
    """Edit a tree in place by one line `a.b=value`. Raises UserError for an unknown key or a value of another type."""
    key, equals, text = (part.strip() for part in line.partition("="))
    if not equals or not key:
        answer = name_here(line, "") or "write key=value, such as training.steps=100"
        raise UserError(f"{line!r} is not an override; {answer}")
    root = tree
    where = ""  # the key of `tree`
    path = key.split(".")  # the rest of the key, below `tree`
    while True:
        member = next((m for m in union_members(hint) if dataclasses.is_dataclass(m) or get_origin(m) is dict), None)
        if member is None:
            raise UserError(f"unknown key {key!r}: {where} is {expected(hint)}, it has no fields")
        if get_origin(member) is dict:
            hint = get_args(member)[1]
            name, path = _split_entry(hint, tree, path)
            plain = [m for m in union_members(hint) if dataclasses.is_dataclass(m) and not kinds(hint)]
            if plain and not path and "." in name and name not in tree:
                # Named is no field, and no entry: an entry of this name has fields of its own.
                raise UserError(_unknown(line, join(where, name), hint, plain[0], root))
        else:
            cls = select_dataclass(hint, tree, where)
            name, *path = path
            if name not in field_hints(cls):
                raise UserError(_unknown(line, join(where, name), hint, cls, root))
            hint = field_hints(cls)[name]
        where = join(where, name)
        if not path:
            tree[name] = _parse_assigned(hint, tree.get(name), text, where)
            return
        # The key goes on below an entry that does not exist yet, or an optional section that is none.
        if tree.get(name) is None:
            tree[name] = _new_entry(hint, key, where)
        tree = tree[name]


def value_at(tree: Tree, key: str) -> Tree:
    """Return the value of a key in a tree, of a union its kind; None where there is no such key."""
    path = key.split(".")
    for n in range(len(path), 0, -1):
        if isinstance(tree, dict) and (name := ".".join(path[:n])) in tree:
            value, rest = tree[name], ".".join(path[n:])
            if rest:
                return value_at(value, rest)
            return value.get("kind") if isinstance(value, dict) else value
    return None


def _split_entry(hint: Hint, tree: dict[str, Tree], path: list[str]) -> tuple[str, list[str]]:
    """Split a key below a dict into an entry's name, which may have dots, and the rest.

    The name is that of the longest entry that exists and has a field or nothing behind it, or else ends before the
    first part that is a field's name: `llm.lora.learning_rate` is the field `learning_rate` of the entry `llm.lora`.
    """
    fields = {name for m in union_members(hint) if dataclasses.is_dataclass(m) for name in field_hints(m)}
    for n in range(len(path), 0, -1):
        if ".".join(path[:n]) in tree and (n == len(path) or path[n] in fields or not fields & set(path)):
            return ".".join(path[:n]), path[n:]
    for n in range(1, len(path)):
        if path[n] in fields:
            return ".".join(path[:n]), path[n:]
    return ".".join(path), []


def _new_entry(hint: Hint, key: str, where: str) -> Tree:
    if by_kind := kinds(hint):
        raise UserError(f"unknown key {key!r}: there is no {where!r}; say {where}=<kind> first ({', '.join(by_kind)})")
    member = next(m for m in union_members(hint) if m is not type(None))
    return defaults(member, where) if dataclasses.is_dataclass(member) else {}


def _parse_assigned(hint: Hint, old: Tree, text: str, where: str) -> Tree:
    if by_kind := kinds(hint):
        if text not in by_kind:
            # Of no kind yet, a value may be one of the first: of samples, a number is how many.
            current = old.get("kind") if isinstance(old, dict) else None
            suggestion = _field_for(by_kind[current] if current else next(iter(by_kind.values())), text, where)
            mismatch = str(_mismatch(hint, repr(text), text, where))
            raise UserError(mismatch + (f": {suggestion}" if suggestion and "did you mean" not in mismatch else ""))
        # Naming the kind that is set already must not reset its fields.
        if isinstance(old, dict) and old.get("kind") == text:
            return old
        carried = _carried(by_kind, old, text) if isinstance(old, dict) else {}
        return defaults(by_kind[text], where) | carried
    if section := next((m for m in union_members(hint) if dataclasses.is_dataclass(m)), None):
        if text == "none" and type(None) in union_members(hint):
            return None
        fields = ", ".join(join(where, name) for name in field_hints(section))
        suggestion = _field_for(section, text, where) or f"set one of {fields}"
        raise UserError(f"{where}: got {text!r}, but it has fields; {suggestion}")
    entries = next((m for m in union_members(hint) if get_origin(m) is dict), None)
    if entries and text not in ("{}", "none"):
        names = [join(where, name) for name in old or {}] or [join(where, "NAME")]
        values = get_args(entries)[1]
        if not any(map(dataclasses.is_dataclass, union_members(values))) and _parses(values, text):
            raise UserError(f"{where}: got {text!r}, but it has entries by name; write {names[0]}={text}")
    return parse(hint, text, where)


def _carried(by_kind: Mapping[str, type], old: Mapping[str, Tree], kind: str) -> dict[str, Tree]:
    """Return the values that another kind takes over: of fields that both list as `carried`."""
    shared = set(getattr(by_kind[kind], "carried", ()))
    shared &= set(getattr(by_kind.get(str(old.get("kind"))), "carried", ()))
    return {name: value for name, value in old.items() if name in shared}


def _field_for(section: type, text: str, where: str) -> str:
    """Suggest the field of a section that a value is for: the first that takes a number, or is a text and required."""
    hints = field_hints(section)
    words = (str, tuple)  # what takes any text
    for name, hint in hints.items():
        loose = any((get_origin(m) or m) in words for m in union_members(hint))
        if (not loose or (name in required(section) and hint is str)) and _parses(hint, text):
            return f"did you mean {join(where, name)}={text}?"
    return ""


def _parses(hint: Hint, text: str) -> bool:
    try:
        parse(hint, text, "")
    except UserError:
        return False
    return not any(map(dataclasses.is_dataclass, union_members(hint)))


def _unknown(line: str, level: str, hint: Hint, cls: type, root: Tree) -> str:
    """Describe an unknown key. level: its part that is unknown first; cls: the dataclass without that field."""
    key, _, text = (part.strip() for part in line.partition("="))
    parent, _, name = level.rpartition(".")
    if name == "kind" and hasattr(cls, "kind"):
        return f"unknown key {key!r}: say {parent}=<kind> ({', '.join(kinds(hint))})"
    kinds_with_field = [kind for kind, member in kinds(hint).items() if name in field_hints(member)]
    if kinds_with_field:
        return f"unknown key {key!r}: {parent} is {cls.kind!r}; say {parent}={kinds_with_field[0]} first"
    if answer := name_here(key, text, field_hints(cls) if parent else ()):
        return f"unknown key {key!r}: {answer}"
    known = [join(parent, n) for n in field_hints(cls)]
    elsewhere = [k for k in _keys(root) if k.endswith(f".{name}")]
    if elsewhere and not difflib.get_close_matches(level, known, 1):
        return f"unknown key {key!r}: did you mean {' or '.join(map(repr, elsewhere[:3]))}?"
    return f"unknown key {key!r}{did_you_mean(level, known)}"


def _keys(tree: Tree, where: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield join(where, name)
            yield from _keys(value, join(where, name))


def meaning(leaf: Leaf) -> str:
    """Describe a key of a config: its field's comment, then the docstring of the kind that is its value."""
    comments = {} if leaf.owner is None else field_comments(leaf.owner)
    kind = "" if leaf.kind is None else (inspect.getdoc(leaf.kind) or "").partition("\n")[0]
    return ": ".join(filter(None, [comments.get(leaf.field, ""), kind]))


@functools.cache
def field_comments(cls: type) -> dict[str, str]:
    """Read the comments of a dataclass's fields, inherited ones too; empty where its source is not available."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            comments |= _parse_comments(base)
    return comments


def _parse_comments(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    # The parser drops comments and the tokenizer has no fields: match both by line.
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    comments = {}
    previous_end = 0  # line where the statement before ends: comments after it belong to this one
    for node in definition.body:
        is_field = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if is_field and (lines := [text for n, text in by_line.items() if previous_end < n <= node.end_lineno]):
            comments[node.target.id] = " ".join(lines)
        previous_end = node.end_lineno
    return comments


def first_line(path: Path) -> str:
    """Read the first line of a Python file's docstring, without executing it; empty where there is none."""
    try:
        return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    except (OSError, SyntaxError, ValueError):
        return ""
