"""LLaMA-Factory's data sets, with its own names of columns and roles or others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from files_made import picture

from mmjax.config import DatasetInfoSource
from mmjax.data.sample import BadSample, MediaPlace
from mmjax.data.sources.chat_records import parse_chat
from mmjax.data.sources.opening import open_conversations, source_of
from mmjax.errors import UserError

IMAGE = MediaPlace("image")


def opened(folder: Path, info: dict, split="train", **options):
    (folder / "dataset_info.json").write_text(json.dumps({"mine": info}))
    source = DatasetInfoSource(str(folder), **{"entry": "mine"} | options)
    return open_conversations(source, split, folder / "cache", "data.sources.mine")


def texts(conversation) -> list[tuple[str, tuple]]:
    return [(message.role, message.parts) for message in conversation.messages]


def test_sharegpt_by_other_columns_and_tags_with_images_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(colour=3))
    turns = [{"role": "ask", "content": "<image>What?"}, {"role": "reply", "content": "A cat."}]
    (tmp_path / "d.json").write_text(
        json.dumps([{"messages": turns, "pictures": ["a.png"], "rules": "Be brief."}])
    )
    info = {
        "file_name": "d.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "images": "pictures", "system": "rules"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "ask",
            "assistant_tag": "reply",
        },
    }
    got = opened(tmp_path, info)
    assert texts(got.conversation(0)) == [
        ("system", ("Be brief.",)),
        ("user", (IMAGE, "What?")),
        ("assistant", ("A cat.",)),
    ]
    assert got.media(0)[0].read() == picture(colour=3)


def test_a_file_with_several_data_sets_is_asked_for_one_and_no_file_ends_in_a_traceback(
    tmp_path: Path,
) -> None:
    file, cache = tmp_path / "dataset_info.json", tmp_path / "cache"
    file.write_text(json.dumps({"one": {"file_name": "a.json"}, "two": {"file_name": "b.json"}}))
    with pytest.raises(UserError, match=r"^--data .*json#NAME: one, two$"):
        source_of(str(file), "--data", cache)
    assert source_of(f"{file}#two", "--data", cache) == DatasetInfoSource(str(file), "two")
    file.write_text('{"one": {"file_name": "a.json"}}')
    assert source_of(str(file), "--data", cache) == DatasetInfoSource(str(file), "one")
    for text in ("{", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"^--data "):
            source_of(str(file), "--data", cache)
    other = tmp_path / "of#one.json"
    other.write_text('{"one":\n{"file_name": "a.json"}\n}')
    with pytest.raises(UserError, match=r"^--data .* its first record is not JSON"):
        source_of(str(other), "--data", cache)


@pytest.mark.parametrize(
    "name", ["{}/s.jsonl", "../s.jsonl", "http://127.0.0.1:1/s.jsonl", "file://{}/s.jsonl"]
)
def test_files_outside_of_the_folder_are_read_where_the_config_allows_it_alone(
    name: str, tmp_path: Path
) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    (tmp_path / "s.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    (tmp_path / "d").mkdir()
    info = {"file_name": name.replace("{}", str(tmp_path)), "formatting": "sharegpt"}
    with pytest.raises(
        UserError, match=r"dataset_info\.json names '.*s\.jsonl', which is outside of .*d;"
    ):
        opened(tmp_path / "d", info)
    if "://" not in name:
        assert len(opened(tmp_path / "d", info, outside="allow")) == 1
        return
    with pytest.raises(UserError, match="is missing"):
        opened(tmp_path / "d", info, outside="allow")


@pytest.mark.parametrize("name", [["d.json"], {"a": 1}, 7, "pipe:touch PWNED"])
def test_a_file_name_is_the_name_of_a_file(name: object, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for outside in ("refuse", "allow"):
        with pytest.raises(UserError, match=r"is missing|expected a path inside"):
            opened(tmp_path, {"file_name": name}, outside=outside)
    assert not (tmp_path / "PWNED").exists()


def test_sharegpt_and_alpaca_as_they_are_by_default(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    (tmp_path / "s.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    got = opened(
        tmp_path, {"file_name": "s.jsonl", "formatting": "sharegpt", "hf_hub_url": "some/where"}
    )
    assert texts(got.conversation(0)) == [("user", ("Hi",)), ("assistant", ("Hello",))]
    record = {"instruction": "Add", "input": "1 and 2", "output": "3", "past": [["Hi", "Hello"]]}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "d.json").write_text(json.dumps([record]))
    got = opened(tmp_path, {"file_name": "a", "columns": {"history": "past"}}, "test", test="mine")
    assert texts(got.conversation(0)) == [
        ("user", ("Hi",)),
        ("assistant", ("Hello",)),
        ("user", ("Add\n1 and 2",)),
        ("assistant", ("3",)),
    ]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"hf_hub_url": "some/where"}, "has no file_name; fetch its files"),
        ({"file_name": "none.json"}, r"none\.json is missing"),
        (
            {"file_name": "d.json", "columns": {"chosen": "a"}},
            "has columns.chosen, which is not read",
        ),
        (
            {"file_name": "d.json", "formatting": "openai"},
            "formatting='openai'; read are alpaca, sharegpt",
        ),
        (
            {"file_name": "d.json", "columns": {"kto_tag": "label"}},
            "has columns.kto_tag, which is not read",
        ),
        ({"file_name": "d.json", "formating": "sharegpt"}, "has formating, which is not read"),
        (
            {"file_name": "d.parquet"},
            "is no JSON; name Parquet files in a source of the kind parquet",
        ),
    ],
)
def test_what_an_entry_says_and_cannot_be_read_is_refused_in_a_line(
    info, message, tmp_path: Path
) -> None:
    for name in ("d.json", "d.parquet"):
        (tmp_path / name).write_text("[]")
    with pytest.raises(UserError, match=message):
        opened(tmp_path, info)


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(UserError, match=r"has no data set 'mina': did you mean 'mine'\?"):
        opened(tmp_path, {"file_name": "d.json"}, entry="mina")


def test_tools_and_calls_by_their_column_and_tags_are_those_of_messages(tmp_path: Path) -> None:
    call, tool = {"name": "zoom", "arguments": {"by": 2}}, {"name": "zoom", "parameters": {}}
    texts_by_role = {"human": "Zoom", "call": json.dumps(call), "result": "done", "gpt": "Done."}
    turns = [{"from": role, "value": text} for role, text in texts_by_role.items()]
    (tmp_path / "d.json").write_text(json.dumps([{"talk": turns, "functions": json.dumps([tool])}]))
    info = {
        "file_name": "d.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "tools": "functions"},
        "tags": {"function_tag": "call", "observation_tag": "result"},
    }
    messages = [
        {"role": "user", "content": "Zoom"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "done"},
        {"role": "assistant", "content": "Done."},
    ]
    wrapped = [{"type": "function", "function": tool}]
    theirs = parse_chat({"messages": messages, "tools": wrapped}, "messages").conversation
    assert opened(tmp_path, info).conversation(0) == theirs
    (tmp_path / "d.json").write_text(
        json.dumps([{"instruction": "Zoom", "output": "Done.", "functions": [tool]}])
    )
    alpaca = {"file_name": "d.json", "columns": {"tools": "functions"}}
    assert opened(tmp_path, alpaca).conversation(0).messages[0].fields == (
        ("tools", json.dumps(wrapped)),
    )


def test_num_samples_draws_so_many_records_always_the_same_ones_all_before_any_comes_again(
    tmp_path: Path,
) -> None:
    records = [{"instruction": f"{k}?", "output": str(k)} for k in range(10)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    drawn = {}
    for count in (None, 4, 23):
        got = opened(tmp_path, {"file_name": "d.jsonl", "num_samples": count})
        drawn[count] = [int(got.conversation(k).messages[1].parts[0]) for k in range(len(got))]
        assert [got.place(k) for k in range(len(got))] == [
            f"{tmp_path}/d.jsonl:{k + 1}" for k in drawn[count]
        ]
        again = opened(tmp_path, {"file_name": "d.jsonl", "num_samples": count})
        assert [
            int(again.conversation(k).messages[1].parts[0]) for k in range(len(again))
        ] == drawn[count]
        assert (sum(n for _, n in got.files()), again.fingerprint()) == (
            len(got),
            got.fingerprint(),
        )
    assert drawn[None] == list(range(10))
    assert len(set(drawn[4])) == len(drawn[4]) == 4
    assert {drawn[23].count(k) for k in range(10)} == {2, 3}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"num_samples": 0}, "has num_samples=0; give a number of records"),
        ({"num_samples": "5"}, "has num_samples='5'"),
        ({"num_samples": True}, "has num_samples=True"),
        ({"split": "test"}, "has split='test', which its files do not have"),
        ({"ranking": "yes"}, "has ranking='yes'; give true or false"),
        ({"columns": ["prompt"]}, "has columns that are no object of names"),
        ({"columns": {"prompt": 3}}, "has columns that are no object of names"),
        ({"columns": {"prompt": "a", "response": "a"}}, "has 'a' twice in its columns"),
        ({"tags": {"role_tag": "role"}}, "has tags, which are read with formatting=sharegpt alone"),
        (
            {"formatting": "sharegpt", "tags": {"role_tag": "value"}},
            "has 'value' twice in its tags",
        ),
        ({"formatting": "sharegpt", "tags": {"user_tag": "gpt"}}, "has 'gpt' twice in its tags"),
    ],
)
def test_values_of_an_entry_that_mean_nothing_are_refused(
    tmp_path: Path, entry: dict, told: str
) -> None:
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(UserError, match=told):
        opened(tmp_path, {"file_name": "d.json"} | entry)


def test_keys_of_records_that_no_column_names_are_bad_or_counted_and_those_of_messages_read(
    tmp_path: Path,
) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "loss": False}]
    turns += [{"from": "human", "value": "Bye"}, {"from": "gpt", "value": "Goodbye"}]
    records = [
        {"conversations": turns, "note": 1},
        {"conversations": turns, "system": "Be brief."},
        {"conversations": turns, "images": ["a.png"]},
        {"conversations": turns, "label": False},
        {"conversations": [turns[0] | {"role": "assistant"}, *turns[1:]]},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    got = opened(tmp_path, {"file_name": "d.jsonl", "formatting": "sharegpt"})
    assert [m.weight for m in got.conversation(0).messages] == [1, 0, 1, 1]
    assert got.conversation(0).unread == ("note",)
    for index, key in ((1, "system"), (2, "images"), (3, "label")):
        with pytest.raises(BadSample, match=f"has {key}, which"):
            got.conversation(index)
    with pytest.raises(BadSample, match="has a message with role beside its tags from, value"):
        got.conversation(4)
