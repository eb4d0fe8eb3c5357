"""Render chat templates of strangers in a sandbox whose work, characters and numbers are bounded."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Marks around what a template declares as generated. Unicode reserves these two for internal use:
# no text has them.
BEGIN = "\ufdd0"
END = "\ufdd1"
MAX_WORK = 2_000_000  # loop iterations in one rendering: some seconds
CALL_WORK = 10  # loop iterations that take as long as a call
MAX_CHARACTERS = 64_000_000  # of one text
MAX_WRITTEN = 256_000_000  # characters of all texts that are made in one rendering
# a number that a function or filter is given: columns, times, elements; as Jinja's own of range()
MAX_WIDTH = 100_000
MAX_BITS = 10_000  # of a whole number
# elements of a list, or characters of a text, whose copying takes as long as a loop iteration
COPIED = 16
# Functions and filters that copy a text; others may take it character by character.
TEXT_FUNCTIONS = {
    "capitalize", "count", "d", "default", "e", "encode", "endswith", "escape", "find", "format", "indent", "join",
    "length", "lower", "lstrip", "removeprefix", "removesuffix", "replace", "rfind", "rstrip", "safe", "split",
    "splitlines", "startswith", "string", "strip", "title", "tojson", "trim", "upper",
}  # fmt: skip


class TemplateRefusal(Exception):
    """An error that a template raises with raise_exception."""


class _TooMuch(Exception):
    """A template exceeds the limits on loops, calls or text."""


class _Generation(Extension):
    """Parse `{% generation %} ... {% endgeneration %}`, the block around an answer."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Write marks before and behind the block's text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


class _CountedCode(CodeGenerator):
    """Compile loops and joined strings to calls of the environment, which counts them.

    Jinja's sandbox limits what a template may touch, not how long it runs; this goes when it has
    such a limit.
    """

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = self._through("count_loop", [node.iter], node.lineno)
        super().visit_For(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame)
        else:  # the names that a loop or a set assigns
            super().visit_Tuple(node, frame)

    def _counted(self, visit: Callable[..., None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.count_elements(")
        visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(self._through("join_strings", node.nodes, node.lineno), frame)

    def _through(self, method: str, values: list[nodes.Expr], lineno: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), values, [], None, None)
        return call.set_lineno(lineno, override=True).set_environment(self.environment)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that stops a template after the same amount of work on every machine."""

    code_generator_class = _CountedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.count(CALL_WORK)
        if getattr(__obj, "__self__", None) is __self:  # `count_loop` and `join_strings`
            return super().call(__context, __obj, *args, **kwargs)
        args = __self.as_lists(args)
        __self.check_arguments(getattr(__obj, "__name__", ""), (_receiver(__obj), *args), kwargs)
        return __self.count_elements(super().call(__context, __obj, *args, **kwargs))

    def count(self, work: int = 1) -> None:
        """Subtract from the rendering's budget of work."""
        _work.budget -= work
        # Thread-local, since one environment renders in many threads.
        if _work.budget < 0:
            raise _TooMuch(f"it takes more than {MAX_WORK:,} loops and calls")

    def count_loop(self, values: Iterable[Any]) -> Iterator[Any]:
        """Iterate over values, counting each."""
        for value in values:
            self.count()
            yield value

    def count_elements(self, value: Any) -> Any:
        """Count what a container holds, inner ones as often as they stand in it, or a text's characters.

        Pairs of pairs of pairs are short and take ages to write or compare.
        """
        if isinstance(value, str):
            self._count_characters(len(value))
        waiting = [value]
        while waiting:
            inner = waiting.pop()
            if isinstance(inner, list | tuple | dict):
                self.count(1 + len(inner))
                waiting.extend(inner.values() if isinstance(inner, dict) else inner)
        return value

    def join_strings(self, *values: Any) -> str:
        """Join values as `~` does."""
        texts = list(map(str, values))
        self._count_characters(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, x: Any, y: Any) -> Any:
        """Compute a sum, product, power or format unless its result is huge."""
        if isinstance(x, int) and isinstance(y, int):
            self._check_bits(operator, x, y)
        elif operator == "+" and hasattr(x, "__len__") and hasattr(y, "__len__"):
            self._count_result(x, len(x) + len(y))
        elif operator == "*":
            for value, times in ((x, y), (y, x)):
                if hasattr(value, "__len__") and isinstance(times, int):
                    self._count_result(value, len(value) * max(times, 0))
        elif operator == "%" and isinstance(x, str):
            self._count_characters(self._formatted_length(x, (y,)))
        return super().call_binop(context, operator, x, y)

    def as_lists(self, args: Sequence[Any]) -> list[Any]:
        """Return arguments with lists in place of iterators, such as what the filter `map` makes."""
        return [
            list(self.count_loop(value)) if isinstance(value, Iterator) else value for value in args
        ]

    def check_arguments(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise _TooMuch where a function or filter of this name would make something huge of its arguments."""
        arguments = [*args, *kwargs.values()]
        if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in arguments):
            raise _TooMuch(f"it calls {name} with a number beyond {MAX_WIDTH:,}")
        texts = [value for value in arguments if isinstance(value, str)]
        self.count(sum(map(len, texts)) // (COPIED if name in TEXT_FUNCTIONS else 1))
        widths = [value for value in arguments if isinstance(value, int)]
        length = sum(map(len, texts))
        if name == "replace" and len(texts) > 2:
            length += texts[0].count(texts[1]) * len(texts[2])
        elif name == "join":
            joined = next((value for value in arguments if isinstance(value, list | tuple)), ())
            length += sum(length + len(value) for value in joined if isinstance(value, str))
        elif name in ("format", "format_map"):
            length = self._formatted_length(texts[0], arguments) if texts else 0
        elif name == "translate":
            tables = [value for value in arguments if isinstance(value, dict)]
            length *= max(
                (len(v) for table in tables for v in table.values() if isinstance(v, str)),
                default=1,
            )
        elif name == "expandtabs":
            length += sum(text.count("\t") for text in texts) * max(widths, default=8)
        elif name == "indent":
            length += sum(text.count("\n") + 1 for text in texts) * max(
                [4, *widths, *map(len, texts[1:])]
            )
        elif name == "wordwrap":
            length *= 1 + max(map(len, texts[1:]), default=1)
        self._count_characters(length)

    def _formatted_length(self, form: str, values: Iterable[Any]) -> int:
        """Bound the characters of a text that is formatted: its field widths, and the longest value in every field."""
        self.count(len(form) // COPIED)
        waiting = list(values)
        longest = 0
        while waiting:
            value = waiting.pop()
            self.count()
            inner = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list | tuple)
                else ()
            )
            waiting.extend(inner)
            # A width may be a value itself, as in "%*d".
            width = (
                len(value)
                if isinstance(value, str)
                else abs(value)
                if isinstance(value, int)
                else 0
            )
            longest = max(longest, width)
        fields = form.count("%") + form.count("{")
        return len(form) + sum(map(int, re.findall(r"\d{1,18}", form))) + fields * longest

    def _count_result(self, value: Any, length: int) -> None:
        """Count a text or a list of this length."""
        if isinstance(value, str):
            self._count_characters(length)
        else:
            self._check_length(length)
            self.count(length // COPIED)

    def _count_characters(self, length: int) -> None:
        self._check_length(length)
        _work.characters += length
        if _work.characters > MAX_WRITTEN:
            raise _TooMuch(f"it makes texts of more than {MAX_WRITTEN:,} characters")

    def _check_length(self, length: int) -> None:
        if length > MAX_CHARACTERS:
            raise _TooMuch(f"it makes something longer than {MAX_CHARACTERS:,} characters")

    def _check_bits(self, operator: str, x: int, y: int) -> None:
        bits = {"*": x.bit_length() + y.bit_length(), "**": x.bit_length() * abs(y)}.get(
            operator, 0
        )
        if bits > MAX_BITS:
            raise _TooMuch(f"it makes something longer than a number of {MAX_BITS:,} bits")


def _receiver(method: Any) -> Any:
    """Return the object of a bound method, also where the sandbox has wrapped it; None for other functions."""
    return getattr(getattr(method, "__wrapped__", method), "__self__", None)


def _bounded(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments of a filter, which Jinja calls without asking the sandbox."""

    @functools.wraps(apply)
    def checked(*args: Any, **kwargs: Any) -> Any:
        environment = _environment()
        environment.count(CALL_WORK)
        args = environment.as_lists(args)
        environment.check_arguments(name, args, kwargs)
        return environment.count_elements(apply(*args, **kwargs))

    return checked


_work = threading.local()


def render_source(source: str, **variables: Any) -> str:
    """Render a template. Raises what its code raises, and _TooMuch."""
    _work.budget = MAX_WORK
    _work.characters = 0
    pieces = []
    length = 0
    for piece in compile_source(source).generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise _TooMuch(f"it writes more than {MAX_CHARACTERS:,} characters")
    return "".join(pieces)


def describe_error(error: Exception) -> str:
    """Describe an error in one line."""
    text = " ".join(str(error).split())[:200]
    return (
        text
        if isinstance(error, jinja2.TemplateError | _TooMuch) and text
        else f"{type(error).__name__}: {text}"
    )


@functools.cache
def _environment() -> _Environment:
    # trim_blocks and lstrip_blocks are what transformers sets, and decide where line breaks stay.
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    environment.filters |= {
        name: _bounded(name, apply) for name, apply in environment.filters.items()
    }
    environment.globals["raise_exception"] = _raise_exception
    return environment


@functools.lru_cache(maxsize=16)
def compile_source(source: str) -> jinja2.Template:
    """Compile a template for the sandbox."""
    return _environment().from_string(source)
