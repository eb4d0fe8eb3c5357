"""Render conversations with a checkpoint's chat template, and locate the answers in the text.

Templates are foreign code: they run in Jinja's sandbox, see nothing but strings, lists and
dictionaries, and change nothing. They get the functions and variables that `transformers` gives
them.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from mmjax.config import ChatFormat, Placeholder
from mmjax.data.sample import (
    JSON_FIELDS,
    TOOLS,
    BadSample,
    Conversation,
    MediaPlace,
    Message,
    with_line_breaks,
)
from mmjax.data.text.placeholders import folder_families
from mmjax.data.text.template_sandbox import (
    BEGIN,
    END,
    TemplateRefusal,
    _environment,
    compile_source,
    describe_error,
    render_source,
)
from mmjax.data.text.tokenizer import Tokenizer, tokenizer_config
from mmjax.disk import read_json
from mmjax.errors import UserError


def compile_any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that finds any of these texts, longer ones first."""
    return re.compile(
        "|".join(map(re.escape, sorted({t for t in texts if t}, key=len, reverse=True))) or "(?!)"
    )


@dataclass(frozen=True)
class TokenizerInput:
    """A conversation's text as it is tokenized, with one token for each medium."""

    text: str
    answers: tuple[Span, ...]  # that are trained on
    weights: tuple[float, ...]  # of these answers
    prompts: tuple[int, ...]  # ends of these answers' prompts
    media: tuple[Span, ...]  # including the text around them, such as <img> and </img>
    kinds: tuple[str, ...]  # of these media


def write_media(
    rendered: RenderedChat,
    places: Mapping[str, Placeholder],
    written: re.Pattern[str],
    texts: Mapping[str, Sequence[Sequence[str]]] = {},
    sounded: Sequence[bool] = (),
) -> TokenizerInput:
    """Replace what the template wrote for each medium, found by `written`, with its token and the text around it.

    texts: by kind, what stands before each part of each medium of the kind, and behind its last
    part; such a medium has a token for each part. sounded: of each video, whether its sound is
    among its items; empty: of none.
    """
    kind_of = {p.written: kind for kind, p in places.items()}
    pieces = []
    media = []
    kinds = []
    remaining = {kind: iter(of_kind) for kind, of_kind in texts.items()}
    with_sound = iter(sounded)
    length = last = 0  # of the new text, and in the rendered one
    # From position `starts[k]` of the rendered text on, positions move by `shifts[k]`: where
    # "<image>" becomes "<img>" in "a<image>b", b moves from 8 to 6, so the second entries are 8 and
    # -2.
    starts = [0]
    shifts = [0]
    for match in written.finditer(rendered.text):
        kind = kind_of[match[0]]
        place = places[kind]
        sound = kind == "video" and next(with_sound, False)
        prefix, suffix = (
            (place.sound_before, place.sound_after) if sound else (place.before, place.after)
        )
        item = prefix + (place.token or place.written) + suffix
        pieces.append(rendered.text[last : match.start()])
        length += match.start() - last
        *leading, trailing = (next(remaining[kind]) if kind in remaining else ()) or ("", "")
        parts = [text + item for text in leading]
        parts[-1] += trailing
        for part in parts:
            pieces.append(part)
            media.append((length, length + len(part)))
            kinds.append(kind)
            length += len(part)
        last = match.end()
        starts.append(last)
        shifts.append(length - last)

    def move(position: int) -> int:
        return position + shifts[bisect_right(starts, position) - 1]

    return TokenizerInput(
        text="".join([*pieces, rendered.text[last:]]),
        answers=tuple((move(begin), move(end)) for begin, end in rendered.answers),
        weights=rendered.weights,
        prompts=tuple(map(move, rendered.prompts)),
        media=tuple(media),
        kinds=tuple(kinds),
    )


def check_places(places: Sequence[str], media: Sequence[str]) -> None:
    """Raise BadSample unless there is one place for each medium; both are lists of kinds."""
    for kind in dict.fromkeys([*places, *media]):
        if places.count(kind) != media.count(kind):
            raise BadSample(
                f"its text has {places.count(kind)} places for {media.count(kind)} media of the kind {kind}: "
                "the chat template does not write each of them once"
            )


Span = tuple[int, int]  # characters of a text: [begin, end)
ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ABOUT_THINKING = re.compile("think|reason")  # in names of a template's variables
REASONING = "reasoning_content"  # of a message: what was thought before an answer
# around what is thought, where a model writes it before its answer
BEGIN_OF_THINKING, END_OF_THINKING = "<think>", "</think>"
_PROBE = "7f3a"  # a text that no template contains


@dataclass(frozen=True)
class RenderedChat:
    """A conversation's text with the spans of the answers, each including the end of its turn."""

    text: str
    answers: tuple[Span, ...]
    weights: tuple[float, ...] = ()  # of these answers
    prompts: tuple[int, ...] = ()  # ends of these answers' prompts


@dataclass(frozen=True)
class Template:
    """A chat template, and the form of messages that it takes."""

    where: str  # its file, for error messages
    source: str
    variables: dict[str, Any]  # including the tokenizer's special tokens
    marked: bool  # whether it marks answers with {% generation %}
    lists: frozenset[str]  # roles whose message is a list of texts and media; others are one string
    special: tuple[str, ...]  # tokens, one of which may end a turn
    line_breaks: bool = False  # whether line breaks beside markers are text, and none is added

    def messages(
        self, conversation: Conversation, written: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Convert a conversation to the template's messages; where one must be a string, media are as `written`."""
        return [self._message(message, written) for message in conversation.messages]

    def _message(self, message: Message, written: Mapping[str, str]) -> dict[str, Any]:
        beside = {"role": message.role, **field_values(message)}
        own_parts = with_line_breaks(message.parts) if self.line_breaks else message.parts
        if (message.role if message.role in ROLES else "user") not in self.lists:
            if self.line_breaks:
                content = "".join(p if isinstance(p, str) else written[p.kind] for p in own_parts)
            else:
                content = _as_string(own_parts, written)
            return {**beside, "content": content}
        # Templates test a medium's type or whether its key exists; none reads the value.
        parts = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": p.kind, p.kind: p.kind}
            for p in own_parts
        ]
        return {**beside, "content": parts}

    def render(
        self, messages: Sequence[dict[str, Any]], prompt: bool
    ) -> tuple[str, tuple[Span, ...]]:
        """Render the text, with a generation prompt at its end if `prompt`, and return it with the marked spans.

        Raises BadSample where the template refuses the messages, fails on them or exceeds the
        limits.
        """
        tools = None
        if messages and TOOLS in messages[0]:
            tools = messages[0][TOOLS]
            first = {key: value for key, value in messages[0].items() if key != TOOLS}
            messages = [first, *messages[1:]]
        try:
            text = render_source(
                self.source,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except TemplateRefusal as error:
            raise BadSample(f"the chat template refuses it: {error}") from None
        except Exception as error:  # a template runs code of its own, which may raise anything
            raise BadSample(
                f"the chat template {self.where} fails: {describe_error(error)}"
            ) from None
        return _without_marks(text) if self.marked else (text, ())

    def rendered(
        self,
        messages: Sequence[dict[str, Any]],
        last_only: bool = False,
        weights: Sequence[float] | None = None,
    ) -> RenderedChat:
        """Render a whole conversation and locate its answers, or only the last of them.

        Answers are what the template marks; without marks, what their message adds to the prompt
        before it, up to the token that ends the turn. weights: of the messages, default 1; answers
        of weight 0 are left out. Raises UserError where a prompt is no prefix of the text,
        BadSample where a mark belongs to no message.
        """
        weights = [1.0] * len(messages) if weights is None else weights
        text, marks = self.render(messages, False)
        reasoning = str(messages[-1].get(REASONING, "")).strip()
        if reasoning not in text:
            raise BadSample(
                f"the chat template {self.where} leaves the {REASONING} of its last answer out; make it write that by "
                "its variables (data.chat.variables), or leave the key out"
            )
        answered = [k for k, message in enumerate(messages) if message["role"] == ASSISTANT]
        answered = answered[-1:] if last_only else answered
        trained = [k for k in answered if weights[k]]
        if not self.marked:
            answers = tuple(self._added(messages, k, text) for k in trained)
            return RenderedChat(
                text,
                answers,
                tuple(weights[k] for k in trained),
                tuple(begin for begin, _ in answers),
            )
        if not trained:
            return RenderedChat(text, ())
        prompts = tuple(self._prompts(messages, trained, text))
        if len({weights[k] for k in answered}) > 1:
            spans = [(k, mark) for k in trained for mark in self._marks_of(messages, k, marks)]
            return RenderedChat(
                text, tuple(mark for _, mark in spans), tuple(weights[k] for k, _ in spans), prompts
            )
        # All answers have one weight, so that it does not matter which mark belongs to which
        # message.
        if last_only and answered[0]:
            marks = marks[len(self.render(messages[: answered[0]], False)[1]) :]
        return RenderedChat(text, marks, (weights[answered[0]],) * len(marks), prompts)

    def _prompts(
        self, messages: Sequence[dict[str, Any]], trained: Sequence[int], text: str
    ) -> Iterator[int]:
        """Yield the ends of the answers' prompts in the text; a template may rewrite earlier answers once more follows.

        Raises BadSample where the text of the last answer does not begin with its prompt.
        """
        for k in trained:
            if not k:
                continue
            # The prompt as generation renders it: the messages before the answer, then the
            # template's opening of one.
            prompt, _ = self.render(messages[:k], True)
            if text.startswith(prompt):
                yield len(prompt)
            elif k == trained[-1] == len(messages) - 1:
                raise _other_prompt(prompt)

    def _variables_that_keep(
        self, messages: Sequence[dict[str, Any]], k: int
    ) -> Iterator[tuple[str, str]]:
        """Find the template's variables by which message `k` stays as it was when more follows it."""
        for name in sorted(meta.find_undeclared_variables(_environment().parse(self.source))):
            for value in (True, False) if _ABOUT_THINKING.search(name) else ():
                try:
                    variant = replace(self, variables={**self.variables, name: value})
                    text = variant.render(messages, False)[0]
                    until = variant.render(messages[: k + 1], False)[0]
                    prompt = variant.render(messages[:k], True)[0]
                except BadSample:
                    continue
                if text.startswith(until) and until.startswith(prompt):
                    yield name, str(value).lower()

    def _marks_of(
        self, messages: Sequence[dict[str, Any]], k: int, marks: tuple[Span, ...]
    ) -> tuple[Span, ...]:
        """Return the marks of message `k`: those that the text with it has and the text before it has not."""
        first = len(self.render(messages[:k], False)[1]) if k else 0
        stop = len(self.render(messages[: k + 1], False)[1])
        if not 0 <= first < stop <= len(marks):
            raise BadSample(
                f"message {k} has a weight of its own, but the chat template marks no answer that is its alone"
            )
        return marks[first:stop]

    def _added(self, messages: Sequence[dict[str, Any]], k: int, text: str) -> Span:
        """Return the span that message `k` adds to its prompt, without white space behind its end-of-turn token."""
        if not k:
            raise BadSample(
                "it begins with the assistant, and the chat template marks no answers; begin with the user"
            )
        prompt, _ = self.render(messages[:k], True)
        until = self.render(messages[: k + 1], False)[0] if k + 1 < len(messages) else text
        if not (text.startswith(prompt) and text.startswith(until) and len(prompt) <= len(until)):
            if k + 1 == len(messages):
                raise _other_prompt(prompt)
            remedies = [
                f"data.chat.variables.{name}={value}"
                for name, value in self._variables_that_keep(messages, k)
            ]
            remedies.append(
                "data.chat.train_on=last_assistant, which trains on each conversation's last answer alone"
            )
            raise UserError(
                f"the chat template {self.where} writes an answer otherwise once more follows it than as its prompt "
                "begins or ends it, so what the assistant says can't be told apart; put {% generation %} and "
                "{% endgeneration %} around that in a copy of it, and give the copy as chat.template; or say "
                f"{', or say '.join(remedies)}"
            )
        begin = len(prompt)
        end = len(until)
        # Templates often write a line break behind the end-of-turn token, which a model need not
        # generate.
        answer = text[begin:end].rstrip()
        return begin, begin + len(answer) if answer.endswith(self.special) else end


def field_values(message: Message) -> dict[str, Any]:
    """Return what a message has beside its parts, as a template takes it. Raises BadSample for what is no JSON."""
    try:
        return {key: json.loads(x) if key in JSON_FIELDS else x for key, x in message.fields}
    except (ValueError, RecursionError):
        raise BadSample("has tools or calls that are no JSON") from None


def _other_prompt(prompt: str) -> BadSample:
    return BadSample(
        f"the chat template asks for its answer with a prompt that ends in {prompt[-20:]!r}, and writes something else "
        "before the answer where it is trained on; make both the same by its variables (data.chat.variables), or in a "
        "copy of it, and give the copy as chat.template"
    )


# What Janus's processor writes before every text where its config says so.
JANUS = (
    "{{ 'You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language.\\n\\n' }}"
)
# PaliGemma's folders have none: its processor writes images, <bos>, the prompt and a line break,
# then the suffix.
PALIGEMMA = """
{%- if messages | length > 2 or messages[0]['role'] != 'user' -%}
    {{ raise_exception('PaliGemma answers one question, and takes nothing else: one of the user, then an answer') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {%- set last = namespace(image=-1) -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'image' -%}{%- set last.image = loop.index0 -%}{%- endif -%}
        {%- endfor -%}
        {%- if last.image < 0 -%}{{ bos_token }}{%- endif -%}
        {%- for part in message['content'] -%}
            {{- '<image>' if part['type'] == 'image' else part['text'] -}}
            {%- if loop.index0 == last.image -%}{{ bos_token }}{%- endif -%}
        {%- endfor -%}
        {{- '\n' -}}
    {%- else -%}
        {{- message['content'] + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""


def load_template(form: ChatFormat, tokenizer: Tokenizer) -> Template:
    """Load the chat template of a folder with this tokenizer. Raises UserError where there is none that compiles."""
    source, where = template_source(form)
    source = _before_texts(Path(form.folder)) + source
    try:
        compile_source(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"the chat template {where}, line {error.lineno}: {error.message}; mend it"
        ) from error
    except (
        Exception
    ) as error:  # Python's own compiler refuses what is nested too deeply, and other things
        raise UserError(
            f"the chat template {where} cannot be compiled: {describe_error(error)}; mend it"
        ) from error
    try:
        today = datetime.fromisoformat(form.date)
    except ValueError as error:
        raise UserError(f"chat.date={form.date!r}: {error}; write it as 2025-01-31") from error
    # A fixed date, where transformers has today's: tokens must not depend on the day of the run.
    variables = {**tokenizer.named, "strftime_now": today.strftime, **form.variables}
    template = Template(
        where=where,
        source=source,
        variables=variables,
        marked=bool(_MARK.search(source)),
        lists=frozenset(),
        special=tuple(tokenizer.special),
        line_breaks=form.line_breaks == "text",
    )
    return _with_lists(template)


def _before_texts(folder: Path) -> str:
    """Return the template of what a folder's processor writes before every text."""
    processor = read_json(folder / "processor_config.json", {})
    is_said = processor.get("use_default_system_prompt") is True
    return JANUS if is_said and "janus" in folder_families(folder, processor) else ""


def template_source(form: ChatFormat) -> tuple[str, str]:
    """Return a template and its file: what the config names, else where transformers looks, in its order."""
    folder = Path(form.folder)
    if form.template:
        path = Path(form.template)
        if not path.is_file():
            raise UserError(f"chat.template={form.template!r} is no file; name a Jinja template")
        return path.read_text(encoding="utf-8"), str(path)
    for name in ("processor_config.json", "chat_template.json"):
        if templates := read_json(folder / name, {}).get("chat_template"):
            return _default(templates, folder / name)
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    if templates := tokenizer_config(form.folder).get("chat_template"):
        return _default(templates, folder / "tokenizer_config.json")
    if "paligemma" in folder_families(folder, read_json(folder / "processor_config.json", {})):
        return PALIGEMMA, f"of {folder}"
    raise UserError(
        f"{folder} has no chat template (chat_template.jinja); give a Jinja file as chat.template, "
        "such as that of the model's chat version"
    )


def _default(templates: Any, path: Path) -> tuple[str, str]:
    """Return the template itself, or the default of several named ones. Raises UserError where there is no text."""
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {str(entry.get("name")): entry.get("template") for entry in templates}
    if isinstance(templates, dict):
        if "default" not in templates:
            raise UserError(
                f"{path} has the chat templates {', '.join(templates)} and no default; name one: chat.template"
            )
        templates = templates["default"]
    if not isinstance(templates, str):
        raise UserError(
            f"{path}: chat_template is a {type(templates).__name__}, neither a text nor texts by name; get the file "
            "again, or name a Jinja file: chat.template"
        )
    return templates, str(path)


def _as_string(parts: Sequence[str | MediaPlace], written: Mapping[str, str]) -> str:
    """Join a message to one string, with media as `written`: on lines of their own unless beside white space."""
    pieces: list[str] = []
    for k, part in enumerate(parts):
        piece = part if isinstance(part, str) else written[part.kind]
        beside_medium = k > 0 and not (isinstance(part, str) and isinstance(parts[k - 1], str))
        if beside_medium and not (pieces[-1][-1:].isspace() or piece[:1].isspace()):
            pieces.append("\n")
        pieces.append(piece)
    return "".join(pieces)


def _with_lists(template: Template) -> Template:
    """Find the roles whose messages the template accepts as lists of parts, by rendering one for each."""
    lists: set[str] = set()
    # Users come first, since the probes of the other roles need a user's message before or after
    # them.
    for role in ("user", ASSISTANT, "system"):
        probe = {"role": role, "content": [{"type": "text", "text": _PROBE}]}
        user = {
            "role": "user",
            "content": [{"type": "text", "text": "a"}] if "user" in lists else "a",
        }
        try:
            text, _ = template.render(
                {"user": [probe], ASSISTANT: [user, probe], "system": [probe, user]}[role], False
            )
        except (BadSample, UserError):
            continue
        # A template that expects a string prints the list as Python or JSON: {'type': 'text',
        # 'text': '7f3a'}.
        if _PROBE in text and not re.search(rf"""['"]text['"]: ?['"]{_PROBE}""", text):
            lists.add(role)
    return replace(template, lists=frozenset(lists))


def _without_marks(text: str) -> tuple[str, tuple[Span, ...]]:
    """Remove the marks; return the text and the non-empty spans between marks."""
    texts = []
    spans = []
    length = begin = 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            begin = length
        elif piece == END:
            spans.append((begin, length))
        else:
            texts.append(piece)
            length += len(piece)
    return "".join(texts), tuple(span for span in spans if span[0] < span[1])
