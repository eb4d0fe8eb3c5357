"""Read the meaning of each config key from the comments and docstrings of the dataclasses in `mmjax.config`.

A field's meaning is the comment behind it, or on the lines right above it; a kind's is its docstring's first line.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
from pathlib import Path

from mmjax.config_values import Leaf


def meaning(leaf: Leaf) -> str:
    """Say what a key of a config means: its field's comment, then the docstring of the kind that it names."""
    comment = {} if leaf.owner is None else field_comments(leaf.owner)
    kind = "" if leaf.kind is None else (inspect.getdoc(leaf.kind) or "").partition("\n")[0]
    return ": ".join(filter(None, [comment.get(leaf.field, ""), kind]))


@functools.cache
def field_comments(cls: type) -> dict[str, str]:
    """Read the comments of a dataclass's fields by name; none where its source is not there."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_comments(base)
    return found


def _own_comments(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (definition,) = ast.parse(source).body
    found, end = {}, 0
    for node in definition.body:
        own = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if own and (lines := [text for at, text in comments.items() if end < at <= node.end_lineno]):
            found[node.target.id] = " ".join(lines)
        end = node.end_lineno
    return found


def first_line(path: Path) -> str:
    """Read the first line of a Python file's docstring, without executing it; empty where there is none."""
    try:
        return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    except (OSError, SyntaxError, ValueError):
        return ""
