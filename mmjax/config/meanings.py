"""Read the meaning of each config key from the comments and docstrings of the dataclasses in `mmjax.config`.

The meaning of a field is the comment behind it or right above it; that of a kind is its docstring's
first line.
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

from mmjax.config.codec import Leaf


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
        if is_field and (
            lines := [text for n, text in by_line.items() if previous_end < n <= node.end_lineno]
        ):
            comments[node.target.id] = " ".join(lines)
        previous_end = node.end_lineno
    return comments


def first_line(path: Path) -> str:
    """Read the first line of a Python file's docstring, without executing it; empty where there is none."""
    try:
        return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    except (OSError, SyntaxError, ValueError):
        return ""
