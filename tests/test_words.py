"""How the package reads: names that say what they hold, docstrings that are sentences, one value a statement."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
RIDDLE = re.compile(
    "of|own|found|told|said|asked|given|kept|held|left|made|lies|whole|each|most|least|at|behind|here|home|there|several|"
    "alone|together|more|still|others|other|now|before|after|gone|wanted|thought|seen"
)
FRAGMENT = re.compile("What|Where|Whether|Which|How|Who|Why|When|Of|As|That|Those|Whose|By")


@cache
def trees() -> dict[str, ast.Module]:
    return {
        str(p.relative_to(ROOT)): ast.parse(p.read_text())
        for p in sorted((ROOT / "mmjax").rglob("*.py"))
    }


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every variable and argument that is bound, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def test_hardly_a_name_is_a_word_that_says_nothing_of_what_it_holds():
    bound = [(file, line, name) for file, tree in trees().items() for line, name in names(tree)]
    riddles = [f"{file}:{line} {name}" for file, line, name in bound if RIDDLE.fullmatch(name)]
    assert len(riddles) <= 0.004 * len(bound), riddles


def test_every_docstring_begins_with_a_sentence():
    """`Return the rows of a rank.`, not `Of a rank: its rows.` or `What a rank has.`"""
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    first_words = [
        (f"{file}:{getattr(node, 'lineno', 1)}", re.match(r"\W*(\w+)", docstring))
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, documented) and (docstring := ast.get_docstring(node))
    ]
    assert [place for place, word in first_words if word and FRAGMENT.fullmatch(word[1])] == []


def test_hardly_a_statement_assigns_unrelated_values():
    """`a, b = f(), g()` is two statements; values that are swapped or belong together are few."""
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in trees())
    pairs = [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    ]
    assert len(pairs) <= 0.003 * lines, pairs
