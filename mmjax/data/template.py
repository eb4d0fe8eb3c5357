"""A checkpoint's chat template: from messages to the text that its model knows, and where in it the answers stand.

Templates are foreign code: they run in Jinja's sandbox, see nothing but strings, lists and dictionaries, and change
nothing. What they may use is what `transformers` gives them.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmjax.config import ChatFormat
from mmjax.data.conversation import BadSample, Conversation, Media, Medium, Message
from mmjax.data.tokenizer import Tokenizer, read_json, tokenizer_config
from mmjax.errors import UserError

Span = tuple[int, int]  # characters of a text: the first, and the one behind the last

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
# Written around what a template marks as generated. Unicode keeps these two for a program's own use: no text has them.
BEGIN, END = "\ufdd0", "\ufdd1"

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "7f3a"
MOST_WORK = 2_000_000  # turns of loops in one rendering: some seconds
CALL_WORK = 10  # turns that a call takes as long as
MOST_TEXT = 64_000_000  # characters


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, and the stretches that the assistant says: each with the end of its turn."""

    text: str
    answers: tuple[Span, ...]
    weights: tuple[float, ...] = ()  # of these answers
    prompts: tuple[int, ...] = ()  # where the prompts of these answers end, as they are asked


@dataclass(frozen=True)
class Template:
    """A chat template that was read, and what it was seen to take."""

    where: str  # for messages
    source: str
    variables: dict[str, Any]  # with the tokenizer's special tokens
    marked: bool  # it says by {% generation %} what the assistant says
    lists: frozenset[str]  # roles whose message is a list of texts and media; others are one string
    special: tuple[str, ...]  # tokens, one of which may end a turn

    def messages(self, conversation: Conversation, written: Mapping[str, str]) -> list[dict[str, Any]]:
        """A conversation as templates take it; where a message must be a string, media stand in it as `written`."""
        return [self._message(message, written) for message in conversation.messages]

    def _message(self, message: Message, written: Mapping[str, str]) -> dict[str, Any]:
        if (message.role if message.role in ROLES else "user") not in self.lists:
            return {"role": message.role, "content": _as_string(message.parts, written)}
        parts = [_text(p) if isinstance(p, str) else _medium(p.kind) for p in message.parts]
        return {"role": message.role, "content": parts}

    def render(self, messages: Sequence[dict[str, Any]], prompt: bool) -> tuple[str, tuple[Span, ...]]:
        """The text, with the beginning of an answer behind it if `prompt`; and what the template marks as generated.

        Raises BadSample where the template refuses the messages, fails on them or does too much.
        """
        try:
            text = _rendered(
                self.source,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except _Refusal as error:
            raise BadSample(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template runs code of its own, which may raise anything
            raise BadSample(f"the chat template {self.where} fails: {_reason(error)}") from None
        return _without_marks(text) if self.marked else (text, ())

    def rendered(
        self, messages: Sequence[dict[str, Any]], last_only: bool = False, weights: Sequence[float] | None = None
    ) -> Rendered:
        """The text of a whole conversation, and its answers or only the last of them.

        By the template's marks; without marks by prefixes: an answer is what its message adds to the prompt before it,
        up to the token that ends the turn. weights: of the messages, default 1; answers of weight 0 are left out.
        Raises UserError where a prompt is no prefix of the text, BadSample where marks go with no message.
        """
        weights = [1.0] * len(messages) if weights is None else weights
        text, marks = self.render(messages, False)
        said = [k for k, message in enumerate(messages) if message["role"] == ASSISTANT]
        said = said[-1:] if last_only else said
        trained = [k for k in said if weights[k]]
        if not self.marked:
            answers = tuple(self._added(messages, k, text) for k in trained)
            return Rendered(text, answers, tuple(weights[k] for k in trained), tuple(begin for begin, _ in answers))
        if not trained:
            return Rendered(text, ())
        prompts = tuple(self._prompts(messages, trained, text))
        if len({weights[k] for k in said}) > 1:
            return self._weighted(messages, text, marks, {k: weights[k] for k in trained}, prompts)
        if last_only and said:
            marks = marks[len(self.render(messages[: said[0]], False)[1]) :] if said[0] else marks
        return Rendered(text, marks, (weights[said[0]],) * len(marks), prompts)

    def _prompts(self, messages: Sequence[dict[str, Any]], trained: Sequence[int], text: str) -> Iterator[int]:
        """Yield where in the text the prompts of answers end; a template may rewrite earlier answers once more follows.

        Raises BadSample where the text of the last answer does not begin with its prompt.
        """
        for k in trained:
            if not k:
                continue
            prompt, _ = self.render(messages[:k], True)
            if text.startswith(prompt):
                yield len(prompt)
            elif k == trained[-1] == len(messages) - 1:
                raise BadSample(
                    f"the chat template asks for its answer with a prompt that ends in {prompt[-20:]!r}, and writes "
                    "something else before the answer where it is trained on; make both the same in a copy of it, and "
                    "give the copy as chat.template"
                )

    def _weighted(
        self,
        messages: Sequence[dict[str, Any]],
        text: str,
        marks: tuple[Span, ...],
        weights: Mapping[int, float],
        prompts: tuple[int, ...],
    ) -> Rendered:
        """Assign the template's marks to messages with weights, by the marks in the text up to each message."""
        of: list[tuple[Span, float]] = []
        for k, weight in weights.items():
            before = len(self.render(messages[:k], False)[1]) if k else 0
            until = len(self.render(messages[: k + 1], False)[1])
            if not 0 <= before < until <= len(marks):
                raise BadSample(
                    f"message {k} has a weight of its own, but the chat template marks no answer that is its alone"
                )
            of += ((mark, weight) for mark in marks[before:until])
        return Rendered(text, tuple(mark for mark, _ in of), tuple(weight for _, weight in of), prompts)

    def _added(self, messages: Sequence[dict[str, Any]], k: int, text: str) -> Span:
        """Return the span that message `k` adds to its prompt, without white space behind its end-of-turn token."""
        if not k:
            raise BadSample("it begins with the assistant, and the chat template marks no answers; begin with the user")
        begin = self._prefix(self.render(messages[:k], True)[0], text)
        end = self._prefix(self.render(messages[: k + 1], False)[0], text) if k + 1 < len(messages) else len(text)
        if end < begin:
            self._refuse()
        answer = text[begin:end].rstrip()
        return begin, begin + len(answer) if answer.endswith(self.special) else end

    def _prefix(self, prefix: str, text: str) -> int:
        if not text.startswith(prefix):
            self._refuse()
        return len(prefix)

    def _refuse(self) -> None:
        raise UserError(
            f"the chat template {self.where} writes an answer otherwise once more follows it than as its prompt begins "
            "or ends it, so what the assistant says can't be told apart; put {% generation %} and {% endgeneration %} "
            "around that in a copy of it, and give the copy as chat.template"
        )


def load_template(form: ChatFormat, tokenizer: Tokenizer) -> Template:
    """The chat template of a folder with this tokenizer. Raises UserError where there is none that Jinja reads."""
    source, where = template_source(form)
    try:
        _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the chat template {where}, line {error.lineno}: {error.message}; mend it") from error
    except Exception as error:  # Python's own compiler refuses what is nested too deeply, and other things
        raise UserError(f"the chat template {where} cannot be compiled: {_reason(error)}; mend it") from error
    try:
        today = datetime.fromisoformat(form.date)
    except ValueError as error:
        raise UserError(f"chat.date={form.date!r}: {error}; write it as 2025-01-31") from error
    variables = {**tokenizer.named, "strftime_now": today.strftime, **form.variables}
    marked = bool(_MARK.search(source))
    return _with_lists(Template(where, source, variables, marked, frozenset(), tuple(tokenizer.special)))


def template_source(form: ChatFormat) -> tuple[str, str]:
    """A template and where it stands: what the config names, else where transformers looks, in its order."""
    folder = Path(form.folder)
    if form.template:
        path = Path(form.template)
        if not path.is_file():
            raise UserError(f"chat.template={form.template!r} is no file; name a Jinja template")
        return path.read_text(encoding="utf-8"), str(path)
    for name in ("processor_config.json", "chat_template.json"):
        if found := read_json(folder / name).get("chat_template"):
            return _default(found, folder / name)
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    if found := tokenizer_config(form.folder).get("chat_template"):
        return _default(found, folder / "tokenizer_config.json")
    raise UserError(
        f"{folder} has no chat template (chat_template.jinja); give a Jinja file as chat.template, "
        "such as that of the model's chat version"
    )


def _default(found: Any, path: Path) -> tuple[str, str]:
    """The template itself, or of several named ones the default."""
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, dict):
        if "default" not in found:
            raise UserError(f"{path} has the chat templates {', '.join(found)} and no default; name one: chat.template")
        found = found["default"]
    return found, str(path)


def _as_string(parts: Sequence[str | Media], written: Mapping[str, str]) -> str:
    """Write a message as one string, media as `written`: on lines of their own, but where a space is beside them."""
    pieces: list[str] = []
    for k, part in enumerate(parts):
        piece = part if isinstance(part, str) else written[part.kind]
        of_media = k > 0 and not (isinstance(part, str) and isinstance(parts[k - 1], str))
        if of_media and not (pieces[-1][-1:].isspace() or piece[:1].isspace()):
            pieces.append("\n")
        pieces.append(piece)
    return "".join(pieces)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _medium(kind: Medium) -> dict[str, str]:
    """Templates ask for the type or whether there is such a key; none reads what it holds."""
    return {"type": kind, kind: kind}


def _with_lists(template: Template) -> Template:
    """The template, knowing whose messages it writes out as text when they come as lists of parts."""
    found: set[str] = set()
    for role in ("user", ASSISTANT, "system"):
        probe = {"role": role, "content": [_text(_PROBE)]}
        user = {"role": "user", "content": [_text("a")] if "user" in found else "a"}
        try:
            text, _ = template.render({"user": [probe], ASSISTANT: [user, probe], "system": [probe, user]}[role], False)
        except (BadSample, UserError):
            continue
        if _PROBE in text and not re.search(rf"""['"]text['"]: ?['"]{_PROBE}""", text):
            found.add(role)
    return replace(template, lists=frozenset(found))


# ---------------------------------------------------------------------------------------------------------- Jinja


class _Refusal(Exception):
    """An error that a template raises by raise_exception."""


class _TooMuch(Exception):
    """A template that loops, calls or writes without an end."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: what stands between them is the assistant's."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block, with a mark before and behind what it writes."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _without_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    """The text, and the stretches between marks that hold something."""
    kept, spans, length, begin = [], [], 0, 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            begin = length
        elif piece == END:
            spans.append((begin, length))
        else:
            kept.append(piece)
            length += len(piece)
    return "".join(kept), tuple(span for span in spans if span[0] < span[1])


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(value: Any, **options: Any) -> str:
    """JSON as it is, where Jinja's own filter writes it for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


class _CountedCode(CodeGenerator):
    """Code whose loops and joined strings go through the environment, which counts them.

    Jinja's sandbox limits what a template may touch, not how long it runs; this goes when it has such a limit.
    """

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = self._through("count_loop", [node.iter], node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(self._through("join_strings", node.nodes, node.lineno), frame)

    def _through(self, method: str, values: list[nodes.Expr], lineno: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), values, [], None, None)
        return call.set_lineno(lineno, override=True).set_environment(self.environment)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that ends a template which does too much, after the same work on every machine, however slow."""

    code_generator_class = _CountedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.count(CALL_WORK)
        return super().call(__context, __obj, *args, **kwargs)

    def count(self, work: int = 1) -> None:
        """Take some of the work that is left of this rendering."""
        _work.left -= work
        if _work.left < 0:
            raise _TooMuch(f"it takes more than {MOST_WORK:,} loops and calls")

    def count_loop(self, values: Iterable[Any]) -> Iterator[Any]:
        """Iterate over values, each of which counts."""
        for value in values:
            self.count()
            yield value

    def join_strings(self, *values: Any) -> str:
        """Join values as `~` does."""
        texts = list(map(str, values))
        self._check_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a sum, product, power or format, unless it is huge."""
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_length(len(left) + len(right))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int):
                    self._check_length(len(many) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_length(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            self._check_length(sum(map(int, re.findall(r"\d{1,18}", left))))  # the widths of what it formats
        return super().call_binop(context, operator, left, right)

    def _check_length(self, length: int) -> None:
        if length > MOST_TEXT:
            raise _TooMuch(f"it makes something longer than {MOST_TEXT:,} characters")


_work = threading.local()


def _rendered(source: str, **variables: Any) -> str:
    """Render a template. Raises what its code raises, and _TooMuch."""
    _work.left = MOST_WORK
    pieces, length = [], 0
    for piece in _compiled(source).generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_TEXT:
            raise _TooMuch(f"it writes more than {MOST_TEXT:,} characters")
    return "".join(pieces)


def _reason(error: Exception) -> str:
    """Say in one line what went wrong."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, jinja2.TemplateError | _TooMuch) and text else f"{type(error).__name__}: {text}"


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)
