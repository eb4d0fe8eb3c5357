"""Which module imports which, read from the source: importing nothing, so that it holds for lazy imports too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path


def modules_of(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if "configs" not in parts[:2]:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def modules_of_tests(folder: Path) -> dict[str, Path]:
    """Every module of the tests by its name: pytest puts their folders on `sys.path`."""
    return {path.stem: path for path in sorted(folder.rglob("*.py"))}


def imports_of(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules that one imports, anywhere in it; `from package import module` is the module."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for level, source, imported in _import_statements(path):
        if level:
            source = ".".join([*package[: len(package) - level + 1], *source.split(".")]).strip(".")
        inner = f"{source}.{imported}"
        found.add(inner if inner in modules else source)
    return found


@cache
def _import_statements(path: Path) -> list[tuple[int, str, str]]:
    """Levels above a module that its imports start from, the modules that they name, and what is taken from those."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, node.module or "", alias.name) for alias in node.names]
    return found


def closure(seeds: Iterable[str], edges: Mapping[str, set[str]]) -> set[str]:
    """The seeds, and everything that edges lead to from them."""
    reached: set[str] = set()
    ahead = list(seeds)
    while ahead:
        node = ahead.pop()
        if node not in reached:
            reached.add(node)
            ahead += edges.get(node, ())
    return reached


def with_packages(imported: set[str]) -> set[str]:
    """Add the packages of modules: their `__init__.py` is run first."""
    return {
        name[:end]
        for name in imported
        for end in [*(dot.start() for dot in re.finditer(r"\.", name)), len(name)]
    }
