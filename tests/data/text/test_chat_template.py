"""Chat templates write what transformers writes with them, and say where the answers stand, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from jinja2 import Environment
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from mmjax.config import ChatFormat
from mmjax.data.sample import BadSample, Conversation, MediaPlace, Message
from mmjax.data.text import template_sandbox
from mmjax.data.text.chat_template import Template, load_template
from mmjax.data.text.placeholders import folder_families
from mmjax.data.text.tokenizer import load_tokenizer
from mmjax.errors import UserError

WRITTEN = {"image": "<image>", "audio": "<audio>"}
BOS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
TEMPLATES = {
    "qwen2": (checkpoints.QWEN2, {}),
    "qwen3": (checkpoints.QWEN3, {}),
    "llama3": (checkpoints.LLAMA3_1, {"date_string": "2 Jan 2025"}),
    "mistral": (checkpoints.MISTRAL, {}),
    "gemma": (checkpoints.GEMMA2, {}),
    "marked": (checkpoints.MARKED, {}),
    "llava": (checkpoints.LLAVA, {}),
    "qwen2_vl": (checkpoints.QWEN2_VL, {"add_vision_id": True}),
    "qwen2_audio": (checkpoints.QWEN2_AUDIO, {}),
    "internvl": (checkpoints.INTERNVL_HF, {}),
    "gemma3": (checkpoints.GEMMA3, {}),
}
LISTS = {"llava", "qwen2_vl", "qwen2_audio", "internvl", "gemma3"}


def said(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, (text,)) for role, text in turns))


TALKS = [
    said(("user", "What is this? "), ("assistant", " A cat\n\n")),
    said(
        ("user", "One?"),
        ("assistant", "1"),
        ("user", "Two {{ 3 }} & <b>?"),
        ("assistant", '"2"\\n'),
    ),
    said(("system", "Be brief."), ("user", "One?"), ("assistant", "1")),
]


def template_of(folder: Path, source: str, **variables: Any) -> Template:
    checkpoints.save(folder, checkpoints.byte_level(checkpoints.LLAMA3), source, **BOS)
    return load_template(ChatFormat(str(folder), variables=variables), load_tokenizer(str(folder)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_the_one_that_transformers_writes(tmp_path: Path, name: str) -> None:
    source, variables = TEMPLATES[name]
    ours = template_of(tmp_path, source, **variables)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.lists == ({"system", "user", "assistant"} if name in LISTS else frozenset())
    compared = 0
    for talk in TALKS:
        messages = ours.messages(talk, WRITTEN)
        for some, prompt in ((messages, False), (messages[:-1], True)):
            try:
                text = theirs.apply_chat_template(
                    some, tokenize=False, add_generation_prompt=prompt, **variables
                )
            except TemplateError as error:
                with pytest.raises(BadSample, match=f"refuses it: {error}"):
                    ours.render(some, prompt)
                continue
            assert ours.render(some, prompt)[0] == text
            compared += 1
    assert compared >= 4


def test_media_stand_in_a_message_as_parts_or_as_what_is_written_for_them(tmp_path: Path) -> None:
    image, clip = MediaPlace("image"), MediaPlace("audio")
    talk = Conversation(
        (Message("user", (image, "Look: ", image, clip, "!")), Message("assistant", ("I see.",)))
    )
    parts = template_of(tmp_path / "a", checkpoints.QWEN2_VL).messages(talk, WRITTEN)[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image", "audio", "text"]
    text = template_of(tmp_path / "b", checkpoints.QWEN2).messages(talk, WRITTEN)[0]["content"]
    assert text == "<image>\nLook: <image>\n<audio>\n!"


def test_a_role_that_must_be_a_string_is_one_where_others_are_lists(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}U:{% for part in m.content %}{{ part.text }}{% endfor %};"
        "{% else %}A:{{ m.content + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    template = template_of(tmp_path, source)
    assert template.lists == {"user"}
    assert template.rendered(template.messages(TALKS[1], WRITTEN)).text.startswith(
        "U:One?;A:1<|eot_id|>U:Two"
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_what_the_assistant_says_and_the_end_of_its_turn(
    tmp_path: Path, name: str
) -> None:
    source, variables = TEMPLATES[name]
    template = template_of(tmp_path, source, **variables)
    messages = template.messages(
        said(("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e")), WRITTEN
    )
    rendered = template.rendered(messages)
    turn = dict.fromkeys(("gemma", "gemma3"), "<end_of_turn>\n")
    ends = {**turn, "llama3": "<|eot_id|>", "mistral": "<|eot_id|>", "llava": " "}
    end = ends.get(name, "<|im_end|>" if name == "marked" else "<|im_end|>\n")
    before = " " if name == "mistral" else ""
    answers = [rendered.text[begin:stop] for begin, stop in rendered.answers]
    assert answers == [f"{before}b c{end}", f"{before}e{end}"]
    last = template.rendered(messages, last_only=True)
    assert last.text == rendered.text
    assert last.answers == rendered.answers[1:]


@pytest.mark.parametrize("name", ["qwen2", "marked"])
def test_an_answer_has_the_weight_of_its_message_and_none_with_weight_zero(
    tmp_path: Path, name: str
) -> None:
    source, variables = TEMPLATES[name]
    template = template_of(tmp_path, source, **variables)
    turns = (
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", "e"),
        ("assistant", "f"),
    )
    messages = template.messages(said(*turns), WRITTEN)
    whole = template.rendered(messages)
    assert whole.weights == (1, 1, 1)
    some = template.rendered(messages, weights=[1, 0, 1, 0.5, 1, 2])
    assert (some.text, some.answers, some.weights) == (whole.text, whole.answers[1:], (0.5, 2))
    assert template.rendered(messages, weights=[1, 0, 1, 0, 1, 0]).answers == ()
    assert template.rendered(messages, weights=[1, 0.5] * 3).weights == (0.5, 0.5, 0.5)
    last = template.rendered(messages, True, [1, 3, 1, 1, 1, 2])
    assert (last.answers, last.weights) == (whole.answers[2:], (2,))


def test_white_space_behind_the_end_of_a_turn_is_no_part_of_an_answer(tmp_path: Path) -> None:
    checkpoints.save(
        tmp_path,
        checkpoints.byte_level(checkpoints.CHATML),
        checkpoints.QWEN2,
        eos_token="<|im_end|>",
    )
    template = load_template(ChatFormat(str(tmp_path)), load_tokenizer(str(tmp_path)))
    rendered = template.rendered(template.messages(TALKS[0], WRITTEN))
    assert [rendered.text[b:e] for b, e in rendered.answers] == [" A cat\n\n<|im_end|>"]
    assert rendered.text.endswith("<|im_end|>\n")


def test_marks_count_wherever_they_stand(tmp_path: Path) -> None:
    """Also in a macro, and with loop controls around them; an empty one marks nothing."""
    source = (
        "{% macro answer(m) %}({% generation %}{{ m.content }}{% endgeneration %}){% endmacro %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% if m.role == 'assistant' %}{{ answer(m) }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% generation %}{% endgeneration %}"
    )
    rendered = template_of(tmp_path, source).rendered(TALK_MESSAGES)
    assert rendered.text == "q(an answer)r(another)"
    assert [rendered.text[b:e] for b, e in rendered.answers] == ["an answer", "another"]


TALK_MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "another"},
]


def test_a_template_that_writes_earlier_answers_otherwise_is_refused(tmp_path: Path) -> None:
    template = template_of(tmp_path, checkpoints.QWEN3_THINKING)
    rendered = template.rendered(TALK_MESSAGES[1:3])
    assert [rendered.text[b:e] for b, e in rendered.answers] == [
        "<think>\n\n</think>\n\nan answer<|im_end|>\n"
    ]
    with pytest.raises(
        UserError,
        match=r"chat_template.jinja writes an answer otherwise.*% generation %.*chat.template",
    ):
        template.rendered(TALK_MESSAGES)


def test_variables_reach_the_template(tmp_path: Path) -> None:
    template = template_of(tmp_path, checkpoints.QWEN3_THINKING, enable_thinking=False)
    rendered = template.rendered(TALK_MESSAGES[1:3])
    assert [rendered.text[b:e] for b, e in rendered.answers] == ["an answer<|im_end|>\n"]


def test_a_date_in_a_text_is_the_same_every_day(tmp_path: Path) -> None:
    checkpoints.save(
        tmp_path, checkpoints.byte_level(checkpoints.LLAMA3), checkpoints.LLAMA3_1, **BOS
    )
    form, tokenizer = ChatFormat(str(tmp_path), date="2024-02-29"), load_tokenizer(str(tmp_path))
    assert (
        "Today Date: 29 Feb 2024" in load_template(form, tokenizer).render(TALK_MESSAGES, False)[0]
    )
    with pytest.raises(UserError, match=r"chat.date='29.2.2024'"):
        load_template(ChatFormat(str(tmp_path), date="29.2.2024"), tokenizer)


def test_json_is_written_as_it_is(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ m.content | tojson }}{{ {'b': 1, 'a': '<é>'} | tojson(indent=1) }}{% endfor %}"
    checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.LLAMA3), source)
    messages = [{"role": "user", "content": "<Ä & 'b'>"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert template_of(tmp_path, source).render(messages, False)[0] == theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__self__.__reduce__() }}",
    ],
)
def test_a_template_can_do_nothing_but_write(tmp_path: Path, source: str) -> None:
    template = template_of(tmp_path, source)
    with pytest.raises(BadSample, match=r"chat_template.jinja fails.*unsafe"):
        template.render(TALK_MESSAGES, False)


def test_a_template_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"chat_template.jinja, line 2: .*mend it"):
        template_of(tmp_path / "a", "{% for m in messages %}\n{{ m. }}{% endfor %}")
    template = template_of(tmp_path / "b", "{{ messages[9].content.upper() }}")
    with pytest.raises(BadSample, match=r"chat_template.jinja fails: .*has no element 9"):
        template.render(TALK_MESSAGES, False)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (LOOPS + "{% endfor %}" * 3, "it takes more than 50,000 loops and calls"),
        (LOOPS + "a{% endfor %}" + "{% endfor %}" * 2, "it takes more than 50,000 loops and calls"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "loops and calls",
        ),
        (
            "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
            "RecursionError: maximum recursion depth",
        ),
        ("{{ 'a' * 10 ** 12 }}", "it makes something longer than 64,000,000 characters"),
        ("{{ [0] * 10 ** 12 }}", "it makes something longer"),
        ("{{ 9 ** (9 ** 9) }}", "it makes something longer"),
        ("{{ '%1000000000000d' % 1 }}", "it makes something longer"),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "something longer",
        ),
        (
            "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "something longer",
        ),
        (
            "{% set x = 'a' * 10 ** 6 %}{% for i in range(99) %}{{ x }}{% endfor %}",
            "it writes more than 64,000,000",
        ),
        ("{{ ('a' * 10 ** 5).replace('a', 'b' * 1000) }}", "something longer"),
        ("{{ ('a' * 10 ** 5) | replace('a', 'b' * 1000) }}", "something longer"),
        ("{{ ('{0}' * 1000).format('x' * 10 ** 5) }}", "something longer"),
        ("{{ '%(a)s' * 1000 % {'a': 'x' * 10 ** 6} }}", "something longer"),
        ("{{ (['a' * 10 ** 6] * 1000) | map('upper') | join }}", "loops and calls"),
        ("{{ 'a'.ljust(10 ** 9) }}{{ 'a' | center(10 ** 9) }}", "with a number beyond 100,000"),
        ("{{ '{:>1000000000}'.format(1) }}", "something longer"),
        (
            "{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "a number of 10,000 bits",
        ),
        (
            "{% set n = namespace(x=()) %}{% for i in range(99) %}{% set n.x = (n.x, n.x) %}{% endfor %}",
            "loops and calls",
        ),
        (
            "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
            "loops and",
        ),
        ("{{ ('ab' * 10 ** 6) | sort | length }}", "loops and calls"),
        ("{{ messages + 1 }}", "TypeError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
    ],
)
def test_a_template_that_would_not_end_or_raises_anything_is_refused_in_one_line(
    tmp_path, monkeypatch, source, reason
):
    monkeypatch.setattr(template_sandbox, "MAX_WORK", 50_000)
    with pytest.raises(BadSample) as refused:
        template_of(tmp_path, source).render(TALK_MESSAGES, False)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_template_that_python_cannot_compile_is_refused_in_one_line(tmp_path: Path) -> None:
    deep = "{% if a %}" * 120 + "{% endif %}" * 120
    for name, source in {
        "a": deep,
        "b": "{{ " + "(" * 4000 + ")" * 4000 + " }}",
        "c": "{{ " + "-" * 9000 + "1 }}",
    }.items():
        with pytest.raises(UserError, match=r"chat_template\.jinja.*mend it") as refused:
            template_of(tmp_path / name, source)
        assert "\n" not in str(refused.value)


def test_counting_loops_changes_nothing_that_a_template_sees(tmp_path: Path) -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if loop.nextitem is defined }}"
        "{{ loop.cycle('x', 'y') }};{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k ~ v ~ none }}"
        "{% endfor %}{% for x in nothing %}{% else %}E{% endfor %}"
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}"
    )
    wanted = (
        Environment(trim_blocks=True, lstrip_blocks=True)
        .from_string(source)
        .render(messages=TALK_MESSAGES)
    )
    assert template_of(tmp_path, source).render(TALK_MESSAGES, False)[0] == wanted
    assert "2/4False" in wanted
    assert wanted.endswith("a1NoneE123")


def test_templates_are_found_where_transformers_looks(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(
        str(checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.LLAMA3)))
    )

    def written(**form: str) -> str:
        return load_template(ChatFormat(str(tmp_path), **form), tokenizer).render(
            TALK_MESSAGES, False
        )[0]

    with pytest.raises(UserError, match=r"no chat template.*chat.template"):
        written()
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": [{"name": "tool_use", "template": "t"}]}')
    with pytest.raises(UserError, match="tool_use and no default"):
        written()
    config.write_text(
        '{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}'
    )
    assert (
        written()
        == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            TALK_MESSAGES, tokenize=False
        )
        == "d"
    )
    config.write_text('{"chat_template": "s"}')
    assert written() == "s"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert written() == "j"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "o"}')
    assert written() == "o"
    (tmp_path / "own.jinja").write_text("own")
    assert written(template=str(tmp_path / "own.jinja")) == "own"
    with pytest.raises(UserError, match="is no file"):
        written(template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    "templates", [5, [5], [{"name": "default"}], {"default": None}, {"default": ["x"]}]
)
def test_a_chat_template_that_is_no_text_is_refused_by_its_file(
    tmp_path: Path, templates: Any
) -> None:
    checkpoints.save(tmp_path, checkpoints.byte_level(checkpoints.LLAMA3), "x", **BOS)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(UserError, match=r"chat_template\.json"):
        load_template(ChatFormat(str(tmp_path)), load_tokenizer(str(tmp_path)))


def test_a_config_with_a_tower_that_is_no_object_has_the_family_of_its_type(tmp_path: Path) -> None:
    for tower in (5, "pixtral", ["a"]):
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llava", "vision_config": tower})
        )
        assert folder_families(tmp_path, {}) == ["llava"]
