"""Encode the dataclasses of `mmjax.config` as JSON trees, and decode and parse values of their fields' types."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from mmjax.errors import UserError

Hint = Any  # what typing.get_type_hints gives for a field
Tree = Any  # dict, list, str, int, float, bool or None, nested
MAX_INT = 2**53  # beyond, JSON readers that use floats change an int
NONES = ("none", "null")  # texts of no value
_KEY = re.compile(r"[\w.\-]+")


def union_members(hint: Hint) -> tuple[Hint, ...]:
    """List the alternatives of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


@functools.cache
def annotated_hints(cls: type) -> dict[str, Hint]:
    """Map a dataclass's fields to their types as they are written, with ranges (`mmjax.config.ranges`)."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def field_hints(cls: type) -> dict[str, Hint]:
    """Map a dataclass's fields to their types, without `kind`, which only discriminates a union."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.name != "kind"}


def kinds(hint: Hint) -> dict[str, type]:
    """Map the kinds of a union of dataclasses to the dataclasses; empty for any other type."""
    return {
        m.kind: m for m in union_members(hint) if dataclasses.is_dataclass(m) and hasattr(m, "kind")
    }


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
            parts.append(
                "several, with commas between them" + ("" if item in parts else f", of: {item}")
            )
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


# -------------------------------------------------------------------------------------------
# dataclasses and trees


def encode(hint: Hint, value: Any, where: str) -> Tree:
    """Convert a value to a plain tree. Raises UserError, naming the key `where`, if it is not of this type."""
    for member in union_members(hint):
        origin, args = get_origin(member), get_args(member)
        if dataclasses.is_dataclass(member) and type(value) is member:
            tree = {"kind": member.kind} if hasattr(member, "kind") else {}
            # `kind` has a default but is a field, so a config can set another one.
            if "kind" in tree and value.kind != member.kind:
                raise UserError(
                    f"{where}.kind: got {value.kind!r}, but a {member.__name__} is a {member.kind!r}"
                )
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
                raise UserError(
                    f"{where}: unknown kind {value!r}{did_you_mean(str(value), [cls.kind])}"
                )
        elif name not in hints:
            known = [join(where, n) for n in hints]
            raise UserError(
                f"unknown key {join(where, name)!r}{did_you_mean(join(where, name), known)}"
            )
    for name in required(cls):
        if name not in tree:
            raise UserError(
                f"missing key {join(where, name)!r}, {expected(hints[name])}: it has no default; give it"
            )
    return cls(
        **{
            name: decode(hints[name], tree[name], join(where, name))
            for name in hints
            if name in tree
        }
    )


def required(cls: type) -> list[str]:
    """List the fields of a dataclass that have no default."""
    missing = dataclasses.MISSING
    return [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is missing and f.default_factory is missing
    ]


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
        raise UserError(
            f"{where}: a whole number beyond {MAX_INT}, which no float holds exactly; give a smaller one"
        )
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
    choices = [
        v for m in union_members(hint) if get_origin(m) is Literal for v in get_args(m)
    ] + list(kinds(hint))
    close = difflib.get_close_matches(text, choices, 1)
    return UserError(
        f"{where}: got {got}; expected {expected(hint)}"
        + (f": did you mean {close[0]!r}?" if close else "")
    )


# -------------------------------------------------------------------------------------------------
# text of one value


def parse(hint: Hint, text: str, where: str) -> Tree:
    """Parse a value of an override into a tree. Raises UserError with the text and what is expected."""
    options = {get_origin(m) or m: m for m in union_members(hint)}
    # From the most to the least specific: only what is nothing else is a plain string.
    if dict in options and text == "{}":
        return {}
    if types.NoneType in options and text.lower() in NONES:
        return None
    if text == "null":
        raise _mismatch(hint, text, text, where)
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in options and (value := _number(number, text)) is not None:
            return _scalar(hint, value, where)
    literals = get_args(options.get(Literal))
    if same := [v for v in literals if str(v) == unquoted(text)]:
        return same[0]
    if tuple in options and (not literals or "," in text or text == "()" or text[:1] == "["):
        parts = _parts(text)
        inner = get_args(options[tuple])[0]
        return [
            parse(inner, part, f"{where}[{i}]")
            for i, part in enumerate(parts)
            if part or i < len(parts) - 1
        ]
    if str in options:
        return unquoted(text)
    raise _mismatch(hint, repr(text), text, where)


def _parts(text: str) -> list[str]:
    """Split the text of several values: by commas, or as JSON's list of such texts, which may have commas."""
    with suppress(ValueError):
        if isinstance(parts := json.loads(text), list):
            return list(map(str, parts))
    return [part.strip() for part in text.removeprefix("(").removesuffix(")").split(",")]


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
        if any("," in item for item in tree if isinstance(item, str)):
            return json.dumps(tree)
        return ",".join(map(str, tree)) + ("," if len(tree) == 1 else "") if tree else "()"
    text = repr(tree) if isinstance(tree, float) else str(tree)
    if not isinstance(tree, str):
        return text
    # A string that would be read as another type, such as "none", needs quotes.
    plain = (
        text
        and text.isprintable()
        and text == text.strip()
        and not text.startswith('"')
        and text != "null"
    )
    return text if plain and parse(hint, text, "") == tree else json.dumps(text)


def _number(kind: type, text: str) -> int | float | None:
    try:
        value = kind(text)
    except ValueError:
        return None
    return value if kind is int or math.isfinite(value) else None


def unquoted(text: str) -> str:
    if len(text) > 1 and text.startswith('"') and text.endswith('"'):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


# -----------------------------------------------------------------------------------------------
# editing by lines


class Leaf(NamedTuple):
    """A value of a tree, and the dataclass field that it belongs to."""

    key: str
    text: str
    # the dataclass that has the field; for an entry of a dict, the one with the dict
    owner: type | None
    field: str
    kind: type | None  # the dataclass of a union whose kind the text names


def walk(
    hint: Hint, tree: Tree, where: str = "", owner: type | None = None, field: str = ""
) -> Iterator[Leaf]:
    """Yield every value of a tree, a union's kind before its fields, an empty dict as `{}`."""
    member = next(
        (m for m in union_members(hint) if dataclasses.is_dataclass(m) or get_origin(m) is dict),
        None,
    )
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
