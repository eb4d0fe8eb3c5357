"""Checks of the shapes written in the models' annotations, at every call (jaxtyping and beartype)."""

from __future__ import annotations

import ast

import jaxtyping
from beartype import beartype  # noqa: F401  checked modules take it from here
from jaxtyping import _import_hook

_Transformer = _import_hook.JaxtypingTransformer


class _Shapes(_Transformer):
    """Leaves alone those functions inside functions that annotate no shapes.

    Each would be wrapped anew, for a millisecond, whenever the function around it is called.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        inner = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        if not inner or _has_shapes(node):
            return super().visit_FunctionDef(node)
        self._parents.append(node)
        self.generic_visit(node)
        self._parents.pop()
        return node


def check_shapes(package: str) -> None:
    """Check all modules of a package that are imported from now on."""
    _import_hook.JaxtypingTransformer = _Shapes
    jaxtyping.install_import_hook(package, f"{__name__}.beartype")


def _has_shapes(function: ast.FunctionDef) -> bool:
    """Whether an annotation of it holds a string, as `Float[Array, "r t d"]` does."""
    arguments = function.args
    every = (
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    )
    annotations = [function.returns, *(argument.annotation for argument in every if argument)]
    parts = [part for annotation in annotations if annotation for part in ast.walk(annotation)]
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)
