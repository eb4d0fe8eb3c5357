"""Change a config by lines of `key=value`, as the command line has them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from typing import get_args, get_origin

from mmjax.config.codec import (
    NONES,
    Hint,
    Tree,
    _mismatch,
    defaults,
    did_you_mean,
    expected,
    field_hints,
    join,
    kinds,
    parse,
    required,
    select_dataclass,
    union_members,
    unquoted,
)
from mmjax.config.other_names import name_here
from mmjax.errors import UserError


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
        member = next(
            (
                m
                for m in union_members(hint)
                if dataclasses.is_dataclass(m) or get_origin(m) is dict
            ),
            None,
        )
        if member is None:
            raise UserError(f"unknown key {key!r}: {where} is {expected(hint)}, it has no fields")
        if get_origin(member) is dict:
            hint = get_args(member)[1]
            name, path = _split_entry(hint, tree, path)
            plain = [
                m for m in union_members(hint) if dataclasses.is_dataclass(m) and not kinds(hint)
            ]
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
        # The key goes on below an entry that does not exist yet, or an optional section that is
        # none.
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

    The name is that of the longest entry that exists and has a field or nothing behind it, or else
    ends before the first part that is a field's name: `llm.lora.learning_rate` is the field
    `learning_rate` of the entry `llm.lora`.
    """
    fields = {
        name for m in union_members(hint) if dataclasses.is_dataclass(m) for name in field_hints(m)
    }
    for n in range(len(path), 0, -1):
        if ".".join(path[:n]) in tree and (
            n == len(path) or path[n] in fields or not fields & set(path)
        ):
            return ".".join(path[:n]), path[n:]
    for n in range(1, len(path)):
        if path[n] in fields:
            return ".".join(path[:n]), path[n:]
    return ".".join(path), []


def _new_entry(hint: Hint, key: str, where: str) -> Tree:
    if by_kind := kinds(hint):
        raise UserError(
            f"unknown key {key!r}: there is no {where!r}; say {where}=<kind> first ({', '.join(by_kind)})"
        )
    member = next(m for m in union_members(hint) if m is not type(None))
    return defaults(member, where) if dataclasses.is_dataclass(member) else {}


def _parse_assigned(hint: Hint, old: Tree, text: str, where: str) -> Tree:
    if by_kind := kinds(hint):
        text = unquoted(text)
        if text not in by_kind:
            # Of no kind yet, a value may be one of the first: of samples, a number is how many.
            current = old.get("kind") if isinstance(old, dict) else None
            suggestion = _field_for(
                by_kind[current] if current else next(iter(by_kind.values())), text, where
            )
            mismatch = str(_mismatch(hint, repr(text), text, where))
            raise UserError(
                mismatch
                + (f": {suggestion}" if suggestion and "did you mean" not in mismatch else "")
            )
        # Naming the kind that is set already must not reset its fields.
        if isinstance(old, dict) and old.get("kind") == text:
            return old
        carried = _carried(by_kind, old, text) if isinstance(old, dict) else {}
        return defaults(by_kind[text], where) | carried
    if section := next((m for m in union_members(hint) if dataclasses.is_dataclass(m)), None):
        if text in NONES and type(None) in union_members(hint):
            return None
        fields = ", ".join(join(where, name) for name in field_hints(section))
        suggestion = _field_for(section, text, where) or f"set one of {fields}"
        raise UserError(f"{where}: got {text!r}, but it has fields; {suggestion}")
    entries = next((m for m in union_members(hint) if get_origin(m) is dict), None)
    if entries and text not in ("{}", "none"):
        names = [join(where, name) for name in old or {}] or [join(where, "NAME")]
        values = get_args(entries)[1]
        if not any(map(dataclasses.is_dataclass, union_members(values))) and _parses(values, text):
            raise UserError(
                f"{where}: got {text!r}, but it has entries by name; write {names[0]}={text}"
            )
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
    keys = list(_keys(root))
    if close := difflib.get_close_matches(level, known, 1):
        full_key = close[0] + key.removeprefix(level)
        suggestions = [full_key if full_key in keys else close[0]]
    else:
        suggestions = [k for k in keys if k.endswith(f".{name}")][:3]
    if suggestions:
        return f"unknown key {key!r}: did you mean {' or '.join(map(repr, suggestions))}?"
    return f"unknown key {key!r}{did_you_mean(level, known)}"


def _keys(tree: Tree, where: str = "") -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield join(where, name)
            yield from _keys(value, join(where, name))
