"""What other stacks obey in a record is read or refused by name, and what nothing reads is counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from files_made import asked, lines

from mmjax.config import LlavaSource
from mmjax.data.sample import BadSample
from mmjax.data.sources.answer_records import KEYS, parse_preference, parse_rollouts
from mmjax.data.sources.answers import FORMS
from mmjax.data.sources.chat_files import resolve_reference
from mmjax.data.sources.chat_records import (
    Record,
    parse_chat,
    parse_manifest_line,
    parse_question_record,
)
from mmjax.data.sources.media_sizes import read_facts
from mmjax.data.sources.opening import describe_unread, open_conversations
from mmjax.data.sources.record_keys import DESCRIPTIONS, READ, REFUSED, unread_keys
from mmjax.data.storage.archives import MediaFolder

PAGE = Path(__file__).parents[3] / "docs" / "data_keys.md"
LLAVA = partial(parse_chat, turns="conversations")
MESSAGES = partial(parse_chat, turns="messages")
QUESTION = partial(parse_question_record, question="question", answer="answer")
MANIFEST = partial(parse_manifest_line, prompt="Transcribe.")
ASKED = {"question": "What?", "answer": "a cat"}
SPOKEN = {"audio_filepath": "a.wav", "text": "hello"}
PAIR = {"prompt": "What?", "chosen": "A cat.", "rejected": "A dog."}
DRAWN = {
    "prompt": "What?",
    "completion_ids": [[7, 8], [9]],
    "logprobs": [[-1.0, -2.0], [-0.5]],
    "advantages": [1, -1],
}


def said(
    user: dict[str, Any] | None = None, assistant: dict[str, Any] | None = None, **beside: Any
) -> dict[str, Any]:
    """A record of messages, with more keys in the user's, in the assistant's, and beside them."""
    turns = [
        {"role": "user", "content": "What?"} | (user or {}),
        {"role": "assistant", "content": "A cat."} | (assistant or {}),
    ]
    return {"messages": turns} | beside


def part(**keys: Any) -> dict[str, Any]:
    return said({"content": [keys, {"type": "text", "text": "What?"}]})


ORDERS: list[tuple[Callable[[Any], Record], dict[str, Any], str]] = [
    # of a record
    (MESSAGES, said(functions=[{"name": "zoom"}]), "functions"),
    (MESSAGES, said(documents=[{"text": "x"}]), "documents"),
    (MESSAGES, said(chat_template_kwargs={"enable_thinking": False}), "chat_template_kwargs"),
    (MESSAGES, said(loss=False), "loss"),
    (LLAVA, asked("What?", weight=0), "weight"),
    (LLAVA, asked("What?", train=False), "train"),
    (LLAVA, asked("What?", mask=[1, 0]), "mask"),
    (MESSAGES, said(label=True), "label"),
    (MESSAGES, said(label=False), "label"),
    (MESSAGES, said(rejected_response="bad"), "rejected_response"),
    (MESSAGES, said(chosen="x", rejected="y"), "chosen"),
    (MESSAGES, said(reasoning_content="because"), "reasoning_content"),
    (MESSAGES, said(history=[["a", "b"]]), "history"),
    (MESSAGES, said(conversations=[{"from": "human", "value": "x"}]), "conversations"),
    (MESSAGES, said(objects={"ref": ["cat"], "bbox": [[0, 0, 1, 1]]}), "objects"),
    (MESSAGES, said(completion_mask=[[1]]), "completion_mask"),
    (MESSAGES, said(input_ids=[1, 2]), "input_ids"),
    (LLAVA, asked("What?", fps=1), "fps"),
    (LLAVA, asked("What?", fps=0), "fps"),
    (LLAVA, asked("What?", start=3.0, end=4.0), "end"),
    (LLAVA, asked("What?", video_start=5, video_end=2), "video_end"),
    (LLAVA, asked("What?", image_path="a.png"), "image_path"),
    (LLAVA, asked("What?", imgs=["a.png"]), "imgs"),
    (LLAVA, asked("What?", Images=["a.png"]), "Images"),
    (LLAVA, asked("What?", vidoes=["a.mp4"]), "vidoes"),
    (LLAVA, asked("What?", video_path="a.mp4"), "video_path"),
    (LLAVA, asked("What?", image_1="a.png"), "list all files under images"),
    (LLAVA, asked("What?", **{"Video-2": "a.mp4"}), "list all files under videos"),
    (LLAVA, asked("What?", img1="a.png"), "img1"),
    (LLAVA, asked("What?", maxPixels=9), "maxPixels"),
    (LLAVA, asked("What?", sample_weights=2), "sample_weights"),
    (LLAVA, asked("What?", system_prompt="Be brief."), "system_prompt"),
    (LLAVA, asked("What?", conversation=[{"from": "human", "value": "x"}]), "conversation"),
    (LLAVA, asked("What?", sytem="Be brief."), "sytem"),
    # of a message
    (MESSAGES, said(assistant={"function_call": {"name": "zoom"}}), "function_call"),
    (MESSAGES, said(assistant={"thinking": "because"}), "thinking"),
    (MESSAGES, said({"reasoning_content": "because"}), "reasoning_content"),
    (MESSAGES, said(assistant={"reasoning_content": ["because"]}), "reasoning_content"),
    (MESSAGES, said(assistant={"prefix": True}), "prefix"),
    (MESSAGES, said(assistant={"loss_mask": 0}), "loss_mask"),
    (
        MESSAGES,
        said(assistant={"train_detail": [{"begin": 0, "end": 3, "train": False}]}),
        "train_detail",
    ),
    (MESSAGES, said({"image": "a.png"}), "image"),
    (MESSAGES, said({"images": ["a.png"]}), "images"),
    (MESSAGES, said({"fps": 2}), "fps"),
    (MESSAGES, said(assistant={"weigth": 0}), "weigth"),
    (MESSAGES, said(assistant={"loss": "false"}), "loss"),
    (MESSAGES, said(assistant={"loss": 0.5}), "loss"),
    (MESSAGES, said({"loss": True}), "loss"),
    (MESSAGES, said(assistant={"train": []}), "train"),
    (MESSAGES, said(assistant={"weight": True}), "weight"),
    (MESSAGES, said(assistant={"weight": "1"}), "weight"),
    (MESSAGES, said(assistant={"weight": float("nan")}), "weight"),
    (MESSAGES, said(assistant={"weight": -1}), "weight"),
    (MESSAGES, said(assistant={"weight": 1, "loss": True}), "weight and loss"),
    (MESSAGES, said(assistant={"masked": True, "train": False}), "train and masked"),
    (MESSAGES, said(assistant={"loss": False}), "weight=0 in every message"),
    (MESSAGES, said(assistant={"role": "Assistant"}), "'Assistant'"),
    (MESSAGES, said(assistant={"name": 7}), "name"),
    (MESSAGES, said(assistant={"eot": False}), "eot"),
    (
        MESSAGES,
        said(system="a") | {"messages": [{"role": "system", "content": "b"}, *said()["messages"]]},
        "system message",
    ),
    # of a part, or of the file that it names
    *(
        (MESSAGES, part(type="video", video="a.mp4", **{key: value}), key)
        for key, value in {
            **{
                "video_start": 3.0,
                "video_end": 4.0,
                "fps": 1.0,
                "nframes": 4,
                "max_pixels": 1024,
                "min_pixels": 16,
            },
            **{
                "total_pixels": 10_000,
                "resized_height": 64,
                "resized_width": 64,
                "max_frames": 8,
                "weight": 0,
            },
        }.items()
    ),
    (MESSAGES, part(type="image", image="a.png", max_pixels=256), "max_pixels"),
    (MESSAGES, part(type="image", image="a.png", text="What?"), "text"),
    (MESSAGES, part(type="text", text="What?", image="a.png"), "image"),
    (MESSAGES, part(type="image", image_path="a.png"), "image_path"),
    (MESSAGES, part(type="image_url", image_url={"url": "a.png", "detail": "low"}), "detail"),
    # of other formats
    (QUESTION, ASKED | {"loss": False}, "loss"),
    (QUESTION, ASKED | {"question": 3}, "question='3', which is a int"),
    (QUESTION, ASKED | {"answer": True}, "answer='True', which is a bool"),
    (partial(parse_question_record, question="ask", answer="answer"), ASKED, "has no ask"),
    (MESSAGES, said() | {"messages": "[]x"}, "messages that are a str, not a list of messages"),
    (QUESTION, ASKED | {"questions": "Who?"}, "questions"),
    (MANIFEST, SPOKEN | {"pnc": "no"}, "pnc"),
    (MANIFEST, SPOKEN | {"target_lang": "de"}, "target_lang"),
    (MANIFEST, SPOKEN | {"_skipme": True}, "_skipme"),
    (MANIFEST, SPOKEN | {"answer": "hello"}, "answer"),
    (MANIFEST, SPOKEN | {"offest": 1.5}, "offest"),
    (MANIFEST, SPOKEN | {"start": 1.5}, "start"),
    (parse_preference, PAIR | {"margin": 0.5}, "margin"),
    (parse_preference, PAIR | {"ref_chosen_logps": 3.0}, "has 3 in ref_chosen_logps"),
    (
        parse_preference,
        PAIR | {"rejected": [{"role": "assistant", "content": "x", "weight": 0.5}]},
        "weight=0.5",
    ),
    (
        parse_preference,
        PAIR | {"prompt": [*said(assistant={"weight": 2})["messages"], *said()["messages"][:1]]},
        "weight=2",
    ),
    (parse_rollouts, DRAWN | {"logprobs": [[0.4, 0.9], [0.2]]}, "has 0.9 in logprobs"),
    (parse_rollouts, DRAWN | {"ref_logprobs": [[-1.0, -0.5], [0.5]]}, "has 0.5 in ref_logprobs"),
    (parse_preference, PAIR | {"reference_chosen_logps": -1.0}, "reference_chosen_logps"),
    (parse_preference, PAIR | {"weight": 0.5}, "weight"),
    (parse_rollouts, DRAWN | {"response_mask": [[1, 0], [1]]}, "response_mask"),
    (
        parse_rollouts,
        DRAWN | {"old_per_token_logps": [[-1.0, -2.0], [-0.5]]},
        "old_per_token_logps",
    ),
    (parse_rollouts, DRAWN | {"completion_mask": [[1], [1]]}, "completion_mask"),
    (parse_rollouts, DRAWN | {"completion_mask": [[1, 2], [1]]}, "completion_mask"),
    (parse_rollouts, DRAWN | {"completion_mask": [[0, 0], [0]]}, "completion_mask"),
    (parse_rollouts, DRAWN | {"completion_ids": [[7, -100], [9]]}, "-100"),
]


@pytest.mark.parametrize(
    ("parse", "record", "key"), ORDERS, ids=[f"{k}-{o[2]}" for k, o in enumerate(ORDERS)]
)
def test_what_other_stacks_obey_is_refused_by_its_name(parse, record, key) -> None:
    with pytest.raises(BadSample) as bad:
        parse(record)
    assert key in str(bad.value)
    assert "\n" not in str(bad.value)


@pytest.mark.parametrize("nothing", [None, "", [], {}, "[]", " {} ", "null"])
@pytest.mark.parametrize("key", ["tools", "images", "system", "label", "fps", "foo"])
def test_a_key_that_says_nothing_is_as_if_it_were_not_there(key: str, nothing: Any) -> None:
    if key == "images" and nothing not in (None, "", []):
        return  # a file of that name
    if key == "system" and not isinstance(nothing, str | None):
        return  # of no text
    record = said(**{key: nothing})
    if key == "system" and nothing and nothing.strip():
        return  # a text
    assert MESSAGES(record) == MESSAGES(said())
    assert MESSAGES(record).conversation.unread == ()


@pytest.mark.parametrize(
    "file",
    [{"path": "a.png", "url": "b.png"}, {"bytes": b"x", "url": "b.png"}, {"data": "", "url": 3}],
)
def test_a_file_that_is_named_twice_or_by_nothing_that_is_read_is_bad(file, tmp_path: Path) -> None:
    folder = MediaFolder(str(tmp_path), "refuse", tmp_path)
    with pytest.raises(BadSample, match=r"has a file with both|expected a path, a URL or bytes"):
        resolve_reference(file, folder)
    assert resolve_reference({"bytes": b"x", "path": "a.png", "url": None}, folder).read() == b"x"


def test_loss_train_and_masked_of_a_message_are_its_weight() -> None:
    for keys, weight in (
        ({"loss": False}, 0.0),
        ({"loss": True}, 1.0),
        ({"loss": 0}, 0.0),
        ({"train": False}, 0.0),
        ({"training": True}, 1.0),
        ({"masked": True}, 0.0),
        ({"masked": False}, 1.0),
        ({"weight": 0.5}, 0.5),
    ):
        first = {"role": "assistant", "content": "A cat."} | keys
        turns = [{"role": "user", "content": "What?"}, first, *said()["messages"]]
        assert MESSAGES({"messages": turns}).conversation.messages[1].weight == weight
    assert MESSAGES(said({"loss": False, "name": "Bob"})).conversation.messages[0].fields == (
        ("name", "Bob"),
    )


def test_descriptions_are_not_counted_and_other_keys_once_a_record(tmp_path: Path) -> None:
    note = {"note": "x"}
    typed = said(
        {
            "content": [
                {"type": "text", "text": "What?", "foo": 1},
                {"type": "text", "text": "!", "foo": 2},
            ]
        }
    )
    assert MESSAGES(said(note, note, id=3, source="web", foo=0)).conversation.unread == (
        "foo",
        "message.note",
    )
    assert MESSAGES(typed).conversation.unread == ("part.foo",)
    assert MANIFEST(SPOKEN | {"mood": "sad", "speaker": "me"}).conversation.unread == ("mood",)
    records = [asked("What?", foo=k, id=k) for k in range(3)] + [
        asked("What?", bar="x"),
        asked("<image>", foo=1),
    ]
    source = LlavaSource(lines(tmp_path / "d.jsonl", records))
    opened = open_conversations(source, "train", tmp_path / "cache", "data.sources.mine")
    facts = read_facts(opened, {}, tmp_path / "cache")
    assert facts.unread == {"bar": 1, "foo": 3}  # the last record is bad
    line = "ignored keys of mine: `bar` in 1 record, `foo` in 3 records"
    assert describe_unread("mine", facts.unread) == [line]


def test_no_key_is_both_read_and_refused_and_none_is_refused_twice_for_one_value() -> None:
    for level, refusals in REFUSED.items():
        keys = [key for refusal in refusals for key in refusal.keys.split()]
        assert len(keys) == len(set(keys)), level
        assert not set(keys) & DESCRIPTIONS[level]
    assert (
        not {key for refusal in REFUSED["message"] for key in refusal.keys.split()}
        & READ["message"]
    )
    assert unread_keys({"fps": None}, "record", READ["llava"]) == []


def page() -> str:
    """The page of the documentation that lists all keys."""
    text = (
        "# Keys of records\n\n"
        "Which keys of a record are read, which are refused, and which only describe it. Made from "
        "`mmjax/data/sources/record_keys.py` and `answers.py`.\n\n"
        "A refused key makes its record bad ([data.md](data.md)); the reason names the key and what to do. A key whose "
        "value says nothing (`null`, empty, or the texts `[]`, `{}`, `null`) is as if it were not there. Nearly the "
        "name of a key that is read is refused too (`vidoes`, `image_1`), and a refused key however it is written "
        "(`maxPixels`). Any other key is ignored, and counted by source: at the "
        "start of training and by `mmjax.index` (`` ignored keys of chat: `foo` in 1,204 records ``), with `--json` "
        'under `"ignored_keys"`. Keys of messages are `message.foo` there, of parts `part.foo`.\n\n'
        "## Read\n\n| of | keys |\n|---|---|\n"
    )
    of_answers = {
        f"{form.source.kind} ({form.key})": KEYS[answers] for answers, form in FORMS.items()
    }
    text += "".join(
        f"| {of} | {' '.join(f'`{key}`' for key in sorted(keys))} |\n"
        for of, keys in (READ | of_answers).items()
    )
    text += (
        "\nOf a message `loss`, `train` and `training` are `true` or `false`: whether it is trained on; `masked` says "
        "the opposite. `reasoning_content`, `name`, `tool_call_id` and `tool_calls` go to the chat template, and so do "
        "`tools` of a record: lists, or their JSON. The content of the role `function_call` is `tool_calls`; a "
        "`dataset_info` names tools in `columns.tools`, and such roles in `function_tag` and `observation_tag`.\n"
    )
    for level, refusals in REFUSED.items():
        text += f"\n## Refused in a {level}\n\n| keys | obeyed by | what to do |\n|---|---|---|\n"
        for refusal in refusals:
            keys = " ".join(f"`{key}`" for key in refusal.keys.split())
            text += f"| {keys} | {refusal.obeyed} | {refusal.remedy} |\n"
    text += "\n## Descriptions\n\nThese change nothing elsewhere either, and are not counted.\n\n"
    text += "| of | keys |\n|---|---|\n"
    return text + "".join(
        f"| {of} | {' '.join(f'`{k}`' for k in sorted(keys))} |\n"
        for of, keys in DESCRIPTIONS.items()
    )


def test_the_documents_list_every_key() -> None:
    assert PAGE.read_text() == page(), f"write it again: {PAGE}"
