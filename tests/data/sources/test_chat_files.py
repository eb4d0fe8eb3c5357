"""JSON data sets of every style: what they say, what they refer to, and what is wrong with bad ones."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from files_made import asked, clip, lines, picture, served, write
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.config import (
    LlavaSource,
    ManifestSource,
    MessagesSource,
    QuestionsSource,
    ShareGptSource,
)
from mmjax.data.sample import BadSample, Conversation, MediaPlace, Message
from mmjax.data.sources.chat_records import MAX_CHARACTERS
from mmjax.data.sources.json_records import MAX_VALUES, JsonRecords
from mmjax.data.sources.opening import open_conversations
from mmjax.data.storage.files import MAX_TEXT
from mmjax.errors import UserError

IMAGE, AUDIO = MediaPlace("image"), MediaPlace("audio")


def opened(source, tmp_path: Path, split="train"):
    return open_conversations(source, split, tmp_path / "cache", "data.sources.mine")


def reason(call) -> str:
    with pytest.raises(BadSample) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_llava_as_one_array_and_as_lines_say_the_same(tmp_path: Path) -> None:
    write(tmp_path, {"photos/a.png": picture(colour=1), "photos/sub/b.png": picture(colour=2)})
    records = [
        asked("<image>\nWhat?", 'A [cat] "}\\', id="1", image="a.png"),
        asked("<image> and\u2028<image>?", image=["sub/b.png", "a.png"]),
        asked("No image at all {"),
    ]
    (tmp_path / "d.json").write_text(json.dumps(records, indent=2))
    lines(tmp_path / "d.jsonl", records)
    for name in ("d.json", "d.jsonl"):
        got = opened(LlavaSource(str(tmp_path / name), images=str(tmp_path / "photos")), tmp_path)
        assert len(got) == 3
        assert got.conversation(0) == Conversation(
            (Message("user", (IMAGE, "What?")), Message("assistant", ('A [cat] "}\\',)))
        )
        assert got.conversation(1).messages[0].parts == (IMAGE, " and\u2028", IMAGE, "?")
        assert got.conversation(2).messages[0].parts == ("No image at all {",)
        assert [got.media(1)[k].read() for k in (0, 1)] == [picture(colour=2), picture(colour=1)]


def test_files_that_a_pattern_ignores_are_left_out_and_never_all_of_them(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.bak.jsonl", "drafts/b.jsonl", "more/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        lines(tmp_path / name, [asked("What?")])

    def names(*ignore: str) -> list[str]:
        source = LlavaSource(f"{tmp_path}/**/*.jsonl", ignore=ignore)
        files = opened(source, tmp_path).files()
        return [str(Path(file).relative_to(tmp_path)) for file, _ in files]

    assert names("drafts/*", "*.bak.jsonl") == ["a.jsonl", "more/c.jsonl"]
    assert len(names()) == 4
    for ignore, message in (("*.jsonl", "leaves out all 4 files"), ("", "has an empty pattern")):
        with pytest.raises(UserError, match=rf"data\.sources\.mine\.ignore=.*: {message}"):
            names(ignore)


def test_sharegpt_has_images_and_clips_in_the_order_of_their_places(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": picture(colour=1), "b.png": picture(colour=2), "c.wav": clip()})
    record = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "<image>x<audio>y<image>"},
            {"from": "gpt", "value": "one"},
            {"from": "observation", "value": "told"},
            {"from": "gpt", "value": "two"},
        ],
        "images": ["a.png", "b.png"],
        "audios": ["c.wav"],
    }
    got = opened(ShareGptSource(lines(tmp_path / "d.jsonl", [record])), tmp_path)
    messages = got.conversation(0).messages
    assert [m.role for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[1].parts == (IMAGE, "x", AUDIO, "y", IMAGE)
    assert [got.media(0)[k].read() for k in range(3)] == [
        picture(colour=1),
        clip(),
        picture(colour=2),
    ]


def test_messages_take_media_from_parts_from_data_urls_and_from_beside_the_text(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"a.png": picture(), "c.flac": clip(kind="FLAC")})
    inline = base64.b64encode(picture(colour=9)).decode()
    answer = {"role": "assistant", "content": [{"type": "text", "text": "fine"}]}
    parts = [
        {"type": "text", "text": "literally <image>"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{inline}"}},
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(clip()).decode(), "format": "wav"},
        },
        {"type": "image", "path": "a.png", "text": None},
        {"type": "audio", "audio": "c.flac"},
    ]
    strings = {
        "messages": [{"role": "user", "content": "<audio>What?"}, answer],
        "audios": ["c.flac"],
    }
    unnamed = {
        "messages": [{"role": "user", "content": [{"type": "image"}]}, answer],
        "images": ["a.png"],
    }
    path = lines(
        tmp_path / "d.jsonl",
        [{"messages": [{"role": "user", "content": parts}, answer]}, strings, unnamed],
    )
    got = opened(MessagesSource(path), tmp_path)
    assert got.conversation(0).messages[0].parts == (
        "literally <image>",
        IMAGE,
        AUDIO,
        IMAGE,
        AUDIO,
    )
    files = [picture(colour=9), clip(), picture(), clip(kind="FLAC")]
    assert [got.media(0)[k].read() for k in range(4)] == files
    assert got.conversation(1).messages[0].parts == (AUDIO, "What?")
    assert got.media(2)[0].read() == picture()


def test_a_manifest_gives_the_stretch_that_its_line_names(tmp_path: Path) -> None:
    rising, rate = clip(8000), 8000
    write(tmp_path, {"a.wav": rising, "b.flac": clip(8000, kind="FLAC")})
    records = [
        {"audio_filepath": "a.wav", "duration": 1.0, "text": "whole"},
        {
            "audio_filepath": "a.wav",
            "offset": 0.25,
            "duration": 0.5,
            "text": "middle",
            "prompt": "Say <audio> again",
        },
        {"audio_filepath": "b.flac", "offset": 0.5, "text": "rest"},
        {"audio_filepath": "a.wav", "offset": 0.75, "duration": 0.5, "text": "too long"},
        {"audio_filepath": "a.wav", "offset": 2, "text": "behind"},
        {"audio_filepath": "a.wav", "offset": -1, "text": "before"},
        {"audio_filepath": "a.wav", "duration": 0, "text": "empty"},
        {"audio_filepath": "a.wav", "text": "whole", "prompt": 5},
        {"audio_filepath": "a.wav", "text": ["a.png"]},
    ]
    got = opened(ManifestSource(lines(tmp_path / "m.json", records), prompt="Write."), tmp_path)
    assert got.conversation(0).messages[0].parts == (AUDIO, "Write.")
    assert got.conversation(1).messages[0].parts == ("Say ", AUDIO, " again")
    assert got.media(0)[0].read() == rising
    wav, flac = (soundfile.read(tmp_path / name, dtype="int16")[0] for name in ("a.wav", "b.flac"))
    for index, stretch in ((1, wav[2000:6000]), (2, flac[4000:])):
        cut, at = soundfile.read(io.BytesIO(got.media(index)[0].read()), dtype="int16")
        assert at == rate
        assert np.array_equal(cut, stretch)
    assert "is to last 0.5 s from 0.75 s" in reason(lambda: got.media(3)[0].read())
    assert "is to start at 2.0 s" in reason(lambda: got.media(4)[0].read())
    assert "offset=-1" in reason(lambda: got.conversation(5))
    assert "empty clip" in reason(lambda: got.conversation(6))
    assert "has a prompt that is a int, not text" in reason(lambda: got.conversation(7))
    assert "has a text that is a list, not text" in reason(lambda: got.conversation(8))


def test_questions_have_one_answer_or_several_that_are_right(tmp_path: Path) -> None:
    write(tmp_path, {"a.png": picture()})
    records = [
        {"image": "a.png", "question": "What?", "answer": "a cat"},
        {"question": "Why <image>?", "images": ["a.png"], "answers": ["so", "thus"]},
        {"question": "Who?", "answers": [{"answer": "you", "answer_id": 1}, {"answer": "me"}]},
        {"question": "How?"},
        {"question": "How?", "answers": []},
        {"question": "How?", "answer": "so", "answers": ["so", "thus"]},
        {"question": "How?", "answers": ["so", 1]},
    ]
    got = opened(QuestionsSource(lines(tmp_path / "d.jsonl", records)), tmp_path)
    assert got.conversation(0) == Conversation(
        (Message("user", (IMAGE, "What?")), Message("assistant", ("a cat",)))
    )
    assert got.conversation(1).messages[0].parts == ("Why ", IMAGE, "?")
    assert got.conversation(1).answers == ("so", "thus")
    assert got.conversation(2).messages[1].parts == ("you",)
    assert got.conversation(2).answers == ("you", "me")
    assert (
        reason(lambda: got.conversation(3))
        == reason(lambda: got.conversation(4))
        == "has no answer"
    )
    assert "has both answer and answers" in reason(lambda: got.conversation(5))
    assert "has an answer that is a int, not text" in reason(lambda: got.conversation(6))
    own = lines(tmp_path / "own.jsonl", [{"q": "What?", "gold": "a cat"}])
    assert (
        opened(QuestionsSource(own, question="q", answer="gold"), tmp_path).conversation(0).answers
        == ()
    )


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (asked("<image> <image>", image="a.png"), "has 2 places <image> for 1 image file(s)"),
        (asked("<image>", image=["a.png", "a.png"]), "has 1 places <image> for 2 image file(s)"),
        (asked("What?", image="a.png"), "has 0 places <image> for 1 image file(s)"),
        (asked("<image>"), "has 1 places <image> for 0 image file(s)"),
        (asked("<audio>", image="a.png"), "has 0 places <image> for 1 image file(s)"),
        (asked(" \n"), "message 1 (user) is empty"),
        (asked("What?", ""), "message 2 (assistant) is empty"),
        (asked("half \ud800"), "surrogate"),
        (asked("What?", video="a.mp4"), "has 0 places <video> for 1 video file(s)"),
        (
            asked("<image>", image="a.png", images=["b.png"]),
            "has both images and image; keep the one that is meant",
        ),
        (
            asked("What?", tools='[{"name": "search"'),
            "has tools that are no list of functions",
        ),
        (
            asked("What?", system={"text": "Be kind."}),
            "has a system message that is a dict; write text",
        ),
        (
            asked("What?", system=[{"type": "image"}]),
            "has a system message that is a list; write text",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "x", "content": "y"}]},
            "message 1 has both content and value",
        ),
        (
            {"conversations": [{"from": "gpt", "role": "user", "value": "x"}]},
            "message 1 has both role and from",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "x", "tool_calls": [{}]}]},
            "message 1 has tool_calls that are not as OpenAI has them",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "zoom(3)"}]},
            "message 1 (function_call) is no JSON of a call",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "[]"}]},
            "message 1 (function_call) is no JSON of a call",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '{"arguments": {}}'}]},
            "message 1 has tool_calls that are not as OpenAI has them",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": [{"type": "image", "path": "a", "url": "b"}]}
                ]
            },
            "message 1 has a part image with both path and url",
        ),
        ({"conversations": []}, "has no conversations"),
        ({"id": 3}, "has no conversations"),
        ({"conversations": "text"}, "has conversations that are a str, not a list of messages"),
        ({"conversations": ["text"]}, "message 1 is not an object"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "no message of the assistant"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown role 'alien'"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "message 1 has no content"),
        ({"conversations": [{"from": "gpt", "value": [{"type": "pdf"}]}]}, "unknown type 'pdf'"),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "unknown role ['gpt']"),
        (
            {"conversations": [{"from": "gpt", "value": [{"type": {"a": 1}}]}]},
            "unknown type {'a': 1}",
        ),
        ([1, 2], "is a JSON list, not an object"),
    ],
)
def test_a_bad_record_is_named_with_its_reason_and_the_others_are_read(
    tmp_path: Path, record, told
) -> None:
    got = opened(LlavaSource(lines(tmp_path / "d.jsonl", [asked("Fine?"), record])), tmp_path)
    assert told in reason(lambda: got.conversation(1))
    assert told in reason(lambda: got.media(1))
    assert got.conversation(0).messages[0].parts == ("Fine?",)


def test_a_key_that_comes_twice_is_a_bad_record_wherever_it_stands(tmp_path: Path) -> None:
    whole = json.dumps(asked("Fine?"))
    inner = '{"conversations": [{"from": "human", "value": "x", "value": "y"}, {"from": "gpt", "value": "z"}]}'
    (tmp_path / "d.jsonl").write_text("\n".join([whole[:-1] + ', "id": 1, "id": 2}', inner, whole]))
    got = opened(LlavaSource(str(tmp_path / "d.jsonl")), tmp_path)
    assert "has the key 'id' twice" in reason(lambda: got.conversation(0))
    assert "has the key 'value' twice" in reason(lambda: got.conversation(1))
    assert got.conversation(2).messages[0].parts == ("Fine?",)


def test_the_weight_of_an_answer_is_read_and_a_wrong_one_refused(tmp_path: Path) -> None:
    def turns(*weights: Any, of_user: Any = None) -> dict[str, Any]:
        said = [{"role": "user", "content": "x", "weight": of_user}]
        return {
            "messages": said
            + [{"role": "assistant", "content": "y", "weight": weight} for weight in weights]
        }

    records = [turns(0, 1, 0.5, None), turns(0, 0), turns(-1), turns("1"), turns(True), turns(1, of_user=1),
               turns(1, of_user=0), turns(1e9)]  # fmt: skip
    got = opened(MessagesSource(lines(tmp_path / "d.jsonl", records)), tmp_path)
    assert [message.weight for message in got.conversation(0).messages] == [1, 0, 1, 0.5, 1]
    assert "has weight=0 in every message of the assistant" in reason(lambda: got.conversation(1))
    assert "message 2 has weight=-1; give a number from 0 to 1e+06" in reason(
        lambda: got.conversation(2)
    )
    assert "message 2 has weight='1'" in reason(lambda: got.conversation(3))
    assert "message 2 has weight=True" in reason(lambda: got.conversation(4))
    assert "message 1 (user) has weight=1, but only what the assistant says" in reason(
        lambda: got.conversation(5)
    )
    assert len(got.conversation(6).messages) == 2
    assert "message 2 has weight=1000000000.0" in reason(lambda: got.conversation(7))


def test_a_system_message_may_be_a_list_of_text_parts(tmp_path: Path) -> None:
    record = asked(
        "What?",
        system=[{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}],
    )
    got = opened(LlavaSource(lines(tmp_path / "d.jsonl", [record])), tmp_path)
    assert got.conversation(0).messages[0] == Message("system", ("Be kind.", "Be brief."))


def test_a_line_that_is_cut_off_is_one_bad_record_and_blank_lines_are_none(tmp_path: Path) -> None:
    whole = json.dumps(asked("Fine?"))
    (tmp_path / "d.jsonl").write_bytes(
        b"\xef\xbb\xbf" + f"{whole}\r\n\n   \n{whole[:20]}\n{whole}".encode()
    )
    got = opened(LlavaSource(str(tmp_path / "d.jsonl")), tmp_path)
    assert len(got) == 3
    assert got.conversation(0) == got.conversation(2)
    assert (
        "is not JSON: Expecting property name enclosed in double quotes (character 21)"
        in reason(lambda: got.conversation(1))
    )


@pytest.mark.parametrize(
    ("content", "places"),
    [
        ('{"a": 1}\n\n  {"a": 2}\n{', ["b.json:1", "b.json:3", "b.json:4"]),
        ('[{"a": 1}, {"a": 2}]', ["b.json[0]", "b.json[1]"]),
        ('[\n  {\n"a": "\\n"},\n\n  {"a": 2}\n]', ["b.json:2", "b.json:5"]),
    ],
)
def test_a_record_is_named_by_its_file_and_line(
    content: str, places: list[str], tmp_path: Path
) -> None:
    lines(tmp_path / "a.json", [{}, {}])
    (tmp_path / "b.json").write_text(content)
    records = JsonRecords(
        [str(tmp_path / name) for name in ("a.json", "b.json")], tmp_path / "cache"
    )
    named = [records.place(index) for index in range(len(records))]
    assert named == [f"{tmp_path}/{place}" for place in ("a.json:1", "a.json:2", *places)]


@pytest.mark.parametrize("lost", [False, True])
def test_a_file_whose_records_have_moved_or_gone_in_mid_run_ends_it_and_a_longer_one_does_not(
    lost, tmp_path: Path
):
    path = Path(lines(tmp_path / "d.jsonl", [asked("0?"), asked("1?")]))
    got = opened(LlavaSource(str(path)), tmp_path)
    whole = path.read_text()
    path.write_text(whole + whole)
    assert got.conversation(1).messages[0].parts == ("1?",)
    path.unlink() if lost else path.write_text("\n" + whole)
    with pytest.raises(
        UserError, match=r"d\.jsonl (is missing|has changed since it was opened); .*--resume"
    ):
        got.conversation(1)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'[{"a": 1}, {"b": ', "is truncated: its array has 1 whole records and no end"),
        (
            b'[{"a": 1}]\n[{"b": 2}]\n',
            "goes on after its array has ended, at byte 11; name several files",
        ),
        (
            b'\xef\xbb\xbf[{"a": 1}] \n{"b": 2}\n',
            "goes on after its array has ended, at byte 15; name several files",
        ),
        (b'[{"a": 1},,{"b": 2}]', "at byte 10 its array has a comma with no record beside it"),
        (b'[ ,{"a": 1}]', "at byte 2 its array has a comma with no record beside it"),
        (b'[{"a": 1}, ]', "at byte 11 its array has a comma with no record beside it"),
        (b"\x1f\x8b123", "is compressed"),
        (b"image,text\n", "is neither a JSON array nor JSON lines"),
        (
            '{"a": 1}'.encode("utf-16"),
            "is neither a JSON array nor JSON lines: it starts with b'\\xff\\xfe",
        ),
        ('{"a": 1}'.encode("utf-16"), "(UTF-16; save it as UTF-8)"),
        (b"", "holds no records"),
        (b"[]", "holds no records"),
    ],
)
def test_a_file_that_cannot_be_read_at_all_is_fatal(
    tmp_path: Path, content: bytes, told: str
) -> None:
    (tmp_path / "d.json").write_bytes(content)
    with pytest.raises(UserError, match=r"d\.json") as error:
        opened(LlavaSource(str(tmp_path / "d.json")), tmp_path)
    assert told in str(error.value)


def test_missing_files_folders_and_splits_name_their_key(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [asked("Fine?")])
    for source, split, told in (
        (LlavaSource(str(tmp_path / "gone*.json")), "train", "data.sources.mine.path="),
        (LlavaSource(str(tmp_path / "gone.json")), "train", "data.sources.mine.path: "),
        (LlavaSource(path, images=str(tmp_path / "gone")), "train", "data.sources.mine.images="),
        (LlavaSource(path, images=path), "train", "data.sources.mine.images="),
        (LlavaSource(path), "test", "data.sources.mine.test is empty"),
        (
            LlavaSource(path, validation=str(tmp_path / "gone")),
            "validation",
            "data.sources.mine.validation: ",
        ),
    ):
        with pytest.raises(UserError) as error:
            opened(source, tmp_path, split)
        assert told in str(error.value)


def test_several_files_follow_each_other_and_a_changed_one_is_read_again(tmp_path: Path) -> None:
    for k in range(3):
        lines(tmp_path / f"d{k}.jsonl", [asked(f"{k}.{i}?") for i in range(k + 1)])
    source = LlavaSource(str(tmp_path / "d*.jsonl"), test=str(tmp_path / "d2.jsonl"))
    got = opened(source, tmp_path)
    asked_for = [got.conversation(i).messages[0].parts[0] for i in range(len(got))]
    assert asked_for == ["0.0?", "1.0?", "1.1?", "2.0?", "2.1?", "2.2?"]
    assert len(opened(source, tmp_path, "test")) == 3
    assert opened(source, tmp_path).fingerprint() == got.fingerprint()
    lines(tmp_path / "d1.jsonl", [asked("new?")])
    again = opened(source, tmp_path)
    assert len(again) == 5
    assert again.conversation(1).messages[0].parts == ("new?",)
    assert again.fingerprint() != got.fingerprint()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.sampled_from('ab"\\{}[],:é \n'), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.sampled_from('k"]}\\'), max_size=3), inner)
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(
    st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=5),
    st.sampled_from([None, 0, 3]),
)
def test_every_record_of_an_array_is_found_whatever_it_holds(records, indent) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "d.json").write_text(
            json.dumps(records, indent=indent, ensure_ascii=False), "utf-8"
        )
        lines(folder / "d.jsonl", records)
        for file in ("d.json", "d.jsonl"):
            read = JsonRecords([str(folder / file)], folder / "cache")
            assert [read[i] for i in range(len(read))] == records


def test_an_array_of_many_records_is_not_held_in_memory(tmp_path: Path) -> None:
    records = [asked(f"{i} " + "x" * (i % 50)) for i in range(5000)]
    (tmp_path / "d.json").write_text(json.dumps(records))
    got = opened(LlavaSource(str(tmp_path / "d.json")), tmp_path)
    assert len(got) == 5000
    for i in (0, 1234, 4999):
        assert got.conversation(i).messages[0].parts == (records[i]["conversations"][0]["value"],)
    assert isinstance(got._records._spans, np.memmap)


def test_annotations_and_media_behind_http_are_read_like_local_ones(tmp_path: Path) -> None:
    write(tmp_path / "site", {"photos/a b.png": picture(), "photos/c.png": picture(colour=3)})
    records = [
        asked("<image>", image="a b.png"),
        asked("<image>", image="c.png"),
        asked("<image>", image="gone.png"),
    ]
    lines(tmp_path / "site" / "d.jsonl", records)
    with served(tmp_path / "site") as server:
        got = opened(LlavaSource(f"{server.url}/d.jsonl", images=f"{server.url}/photos"), tmp_path)
        assert got.media(0)[0].read() == picture()
        server.broken["/photos/c.png"] = 2
        assert got.media(1)[0].read() == picture(colour=3)
        assert "gone.png is missing" in reason(lambda: got.media(2)[0].read())
        asked_before = server.asked["GET"]
        assert (
            len(
                opened(
                    LlavaSource(f"{server.url}/d.jsonl", images=f"{server.url}/photos"), tmp_path
                )
            )
            == 3
        )
        assert server.asked["GET"] == asked_before


def test_a_record_of_more_bytes_values_or_text_than_is_read_is_bad_and_the_others_are_read(
    tmp_path: Path,
) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write(json.dumps(asked("?", "!")) + "\n")
        file.write('{"conversations": "' + " " * MAX_TEXT + '"}\n')
        file.write('{"conversations": [' + "0," * MAX_VALUES + "0]}\n")
        file.write(json.dumps(asked("?", "a" * (MAX_CHARACTERS + 1))) + "\n")
    got = opened(LlavaSource(str(tmp_path / "a.jsonl")), tmp_path)
    assert got.conversation(0).messages[1].parts == ("!",)
    assert "has 67,108,885 bytes, more than the 67,108,864" in reason(lambda: got.conversation(1))
    assert "has more than 4,194,304 values" in reason(lambda: got.conversation(2))
    assert "characters of text, more than 4,194,304" in reason(lambda: got.conversation(3))
