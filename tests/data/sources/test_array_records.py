"""ArrayRecord folders: what was written is read, and what is not whole is never taken for whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from files_made import served

from mmjax.config import ArrayRecordSource
from mmjax.data.sample import BadSample, Conversation, MediaPlace, Message
from mmjax.data.sources.array_records import (
    INDEX,
    FolderIndex,
    decode_record,
    encode_record,
    open_shard,
    to_header,
)
from mmjax.data.sources.opening import open_conversations
from mmjax.disk import json_lines
from mmjax.errors import UserError

TALK = Conversation(
    (
        Message("system", ("é \ud800",)),
        Message("user", (MediaPlace("image"), "and", MediaPlace("audio"), "?")),
        Message("assistant", ("yes",), 0.5),
    )
)


def opened(folder: Path | str, tmp_path: Path):
    return open_conversations(
        ArrayRecordSource(str(folder)), "train", tmp_path / "cache", "data.sources.mine"
    )


def make(folder: Path, counts: tuple[int, ...] = (3, 2)) -> Path:
    folder.mkdir(parents=True)
    for number, count in enumerate(counts):
        headers = []
        with open_shard(folder / f"{number:05d}.arrayrecord") as shard:
            for k in range(count):
                media = [b"image" * (k + 1), bytes([number, k])]
                headers.append(to_header(TALK, [len(m) for m in media]))
                shard.write(encode_record(headers[-1], media))
        (folder / f"{number:05d}.jsonl").write_text(json_lines(headers))
    FolderIndex(counts, "nothing").write(folder)
    return folder


def test_a_record_holds_a_conversation_and_its_media() -> None:
    record = encode_record(to_header(TALK, [5, 0]), [b"image", b""])
    assert decode_record(record) == (TALK, (b"image", b""))
    several = replace(TALK, answers=("a cat", "a kitten"))
    assert decode_record(encode_record(to_header(several, [5, 0]), [b"image", b""]))[0] == several


@pytest.mark.parametrize(
    "spoil", [lambda r: r[:-1], lambda r: r + b"x", lambda r: b"PICK" + r[4:], lambda r: r[:6]]
)
def test_a_record_that_is_not_whole_is_bad(spoil) -> None:
    with pytest.raises(BadSample):
        decode_record(spoil(encode_record(to_header(TALK, [5, 0]), [b"image", b""])))


@pytest.mark.parametrize(
    "spoiled", [{"records": [3, {}]}, {"records": []}, {"records": [-3, 6]}, {"made_from": 3}, []]
)
def test_an_index_that_says_what_cannot_be_is_refused(spoiled, tmp_path: Path) -> None:
    FolderIndex((3,), "nothing").write(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(
        json.dumps(index | spoiled if isinstance(spoiled, dict) else spoiled)
    )
    with pytest.raises(UserError, match=rf"{INDEX} is not whole: .*; write the folder again"):
        FolderIndex.read(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("media", [["image", 5.0], ["audio", 0]]),
        ("media", [["image", -5], ["audio", 10]]),
        ("media", [["image", "5"], ["audio", 0]]),
        ("media", [["imagf", 5], ["audio", 0]]),
        ("media", [[["image"], 5], ["audio", 0]]),
        ("media", 5),
        ("messages", [[["user"], ["What?"]]]),
        ("messages", [["user", [7]]]),
    ],
)
def test_a_header_that_says_what_cannot_be_is_bad(key, value) -> None:
    header = to_header(TALK, [5, 0]) | {key: value}
    with pytest.raises(BadSample, match="not of this format"):
        decode_record(encode_record(header, [b"image", b""]))


def test_records_of_all_shards_are_read_in_any_order(tmp_path: Path) -> None:
    got = opened(make(tmp_path / "set"), tmp_path)
    assert len(got) == 5
    for index, (number, k) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        assert got.conversation(index) == TALK
        assert got.media(index)[0].read() == b"image" * (k + 1)
        assert got.media(index)[1].read() == bytes([number, k])
    with pytest.raises(IndexError):
        got.media(5)


def test_shards_behind_http_are_copied_when_they_are_needed(tmp_path: Path) -> None:
    make(tmp_path / "site" / "set")
    with served(tmp_path / "site") as server:
        got = opened(f"{server.url}/set", tmp_path)
        assert got.conversation(4) == TALK
        copies = tmp_path / "cache" / "copies"
        assert not list(copies.glob("*.arrayrecord"))
        assert got.media(4)[1].read() == bytes([1, 1])
        assert len(list(copies.glob("*.arrayrecord"))) == 1


def test_a_folder_without_its_index_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "set")
    (folder / INDEX).unlink()
    with pytest.raises(UserError, match=r"was not written to its end"):
        opened(folder, tmp_path)
    (folder / INDEX).write_text('{"format": "other"}')
    with pytest.raises(UserError, match="this version reads"):
        opened(folder, tmp_path)


def test_a_shard_that_was_cut_off_is_a_bad_sample_not_a_crash(tmp_path: Path) -> None:
    folder = make(tmp_path / "set")
    shard = folder / "00001.arrayrecord"
    shard.write_bytes(shard.read_bytes()[:100])
    got = opened(folder, tmp_path)
    assert got.media(0)[0].read() == b"image"
    with pytest.raises(BadSample, match="cannot be read"):
        got.media(4)[0].read()


def test_a_record_holds_what_the_template_gets_and_the_line_breaks_beside_markers() -> None:
    image = MediaPlace("image", "", "\n")
    thought = Message("assistant", ("yes",), fields=(("reasoning_content", "It is."),))
    talk = Conversation(
        (Message("user", (image, "what?")), thought), rejected=replace(thought, parts=("no",))
    )
    read, _ = decode_record(encode_record(to_header(talk, [5]), [b"image"]))
    assert read == talk
    assert (read.messages[0].parts[0].before, read.messages[0].parts[0].after) == ("", "\n")


def test_a_shard_that_is_compressed_is_refused_since_it_may_unpack_to_anything(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "d", (1,))
    writer = ArrayRecordWriter(str(folder / "00000.arrayrecord"), "group_size:1,zstd")
    writer.write(encode_record(to_header(TALK, [5, 2]), [b"image", bytes(2)]))
    writer.close()
    with pytest.raises(
        UserError, match=r"00000\.arrayrecord is compressed \(.*zstd.*\); write the folder again"
    ):
        opened(folder, tmp_path).media(0)
    (folder / "00000.jsonl").write_text(json_lines([to_header(TALK, [1 << 30, 0])]))
    with pytest.raises(
        BadSample, match=r"00000\.jsonl:1 has 1,073,741,824 bytes, more than the 536,870,912"
    ):
        opened(folder, tmp_path).media(0)
