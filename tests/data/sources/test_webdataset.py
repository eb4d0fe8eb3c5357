"""Shards of WebDataset and of Energon: samples by the names of members, read where they lie."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from files_made import clip, picture, served

from mmjax.config import WebDatasetSource
from mmjax.data.sample import BadSample, MediaPlace
from mmjax.data.sources.json_records import MAX_VALUES
from mmjax.data.sources.media_sizes import read_facts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.processors import PROBES
from mmjax.data.storage.files import MAX_TEXT
from mmjax.errors import UserError

IMAGE, AUDIO = MediaPlace("image"), MediaPlace("audio")


def shard(path: Path, members: Mapping[str, bytes | str | dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            if isinstance(content, dict):
                content = json.dumps(content)
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def captions(first: int, count: int) -> dict[str, bytes | str]:
    numbers = range(first, first + count)
    return {
        f"{k:04d}.{name}": content
        for k in numbers
        for name, content in (("jpg", picture(colour=k)), ("txt", f"number {k}\n"))
    }


def opened(path: object, tmp_path: Path, split="train", space: float = 1.0, **options):
    source = WebDatasetSource(str(path), **options)
    return open_conversations(source, split, tmp_path / "cache", "data.sources.mine", space)


def test_images_with_captions_over_many_shards_one_of_them_empty(tmp_path: Path) -> None:
    for k, (first, count) in enumerate([(0, 3), (3, 0), (3, 4)]):
        shard(tmp_path / f"d-{k:03d}.tar", captions(first, count))
    for path in (tmp_path / "d-*.tar", tmp_path / "d-{000..002}.tar"):
        got = opened(path, tmp_path, prompt="What is it?")
        assert got.files() == [
            (str(tmp_path / f"d-{k:03d}.tar"), n) for k, n in enumerate([3, 0, 4])
        ]
        for index in (6, 0, 3, 2):
            user, assistant = got.conversation(index).messages
            assert user.parts == (IMAGE, "What is it?")
            assert assistant.parts == (f"number {index}",)
            [file] = got.media(index)
            assert file.read() == picture(colour=index)
            assert file.name.endswith(f"::{index:04d}.jpg")


def test_shards_that_a_pattern_ignores_are_left_out(tmp_path: Path) -> None:
    for k in range(3):
        shard(tmp_path / f"d-{k:03d}.tar", captions(2 * k, 2))
    got = opened(tmp_path / "d-{000..002}.tar", tmp_path, ignore=("*-001.tar",))
    assert [Path(file).name for file, _ in got.files()] == ["d-000.tar", "d-002.tar"]


def test_a_json_is_a_conversation_or_a_question_and_its_media_are_the_members_in_order(
    tmp_path: Path,
) -> None:
    turns = [
        {"from": "human", "value": "<image> and <image><audio>?"},
        {"from": "gpt", "value": "both"},
    ]
    members = {
        "a/1.json": {"conversations": turns, "image": ["left.png", "right.png"]},
        "a/1.0.png": picture(colour=1),
        "a/1.1.png": picture(colour=2),
        "a/1.wav": clip(),
        "a/1.features.npy": b"not read",
        "b/1.jpg": picture(),
        "b/1.json": {"question": "Which?", "answer": ["red", "dark red"]},
    }
    got = opened(shard(tmp_path / "d.tar", members), tmp_path)
    assert len(got) == 2  # a/1 and b/1
    assert got.conversation(0).messages[0].parts == (IMAGE, " and ", IMAGE, AUDIO, "?")
    assert [file.read() for file in got.media(0)] == [picture(colour=1), picture(colour=2), clip()]
    assert got.conversation(1).messages[0].parts == (IMAGE, "Which?")
    assert got.conversation(1).answers == ("red", "dark red")


def test_shards_behind_a_url_are_read_by_ranges(tmp_path: Path) -> None:
    shard(tmp_path / "served" / "d-0.tar", captions(0, 2))
    shard(tmp_path / "served" / "d-1.tar", captions(2, 2))
    with served(tmp_path / "served") as server:
        got = opened(f"{server.url}/d-{{0..1}}.tar", tmp_path)
        assert [got.conversation(k).messages[1].parts for k in range(4)] == [
            (f"number {k}",) for k in range(4)
        ]
        assert got.media(3)[0].read() == picture(colour=3)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("CaptioningSample", {"image": "jpg", "caption": "json[texts][0]"}),
        ("VQASample", {"context": "q", "answers": "txt"}),
    ],
)
def test_a_folder_that_energon_has_prepared_is_read_by_its_splits_and_fields(
    kind, fields, tmp_path: Path
) -> None:
    folder = tmp_path / "energon"
    for k in range(3):
        members = {
            "0.jpg": picture(colour=k),
            "0.json": {"texts": [f"text {k}"]},
            "0.q": "Why?",
            "0.txt": f"text {k}",
        }
        shard(folder / f"shards/{k}.tar", members)
    (folder / ".nv-meta").mkdir()
    split = {"split_parts": {"train": ["shards/{0..1}.tar"], "val": ["shards/2.tar"], "test": []}}
    (folder / ".nv-meta/split.yaml").write_text(yaml.safe_dump(split))
    sample_type = {"__module__": "megatron.energon", "__class__": kind}
    described = yaml.safe_dump({"sample_type": sample_type, "field_map": fields})
    (folder / ".nv-meta/dataset.yaml").write_text(described)
    train = opened(folder, tmp_path)
    assert [train.conversation(k).messages[1].parts for k in range(2)] == [("text 0",), ("text 1",)]
    question = "Why?" if kind == "VQASample" else "Describe the image."
    assert train.conversation(0).messages[0].parts == (IMAGE, question)
    held_out = opened(folder, tmp_path, "validation", validation=str(folder))
    assert held_out.media(0)[0].read() == picture(colour=2)
    with pytest.raises(UserError, match=r"split\.yaml has no shards of test"):
        opened(folder, tmp_path, "test", test=str(folder))
    (folder / ".nv-meta/dataset.yaml").write_text(described.replace(kind, "OCRSample"))
    with pytest.raises(UserError, match="the sample type 'OCRSample'"):
        opened(folder, tmp_path)


ENERGON = {
    "sample_type": {"__class__": "CaptioningSample"},
    "field_map": {"image": "jpg", "caption": "txt"},
}
VQA = {"sample_type": {"__class__": "VQASample"}}


def prepared(
    folder: Path, described: dict, splits: dict | None = None, members: Mapping | None = None
) -> Path:
    """A folder of one shard as Energon prepares it."""
    shard(folder / "a.tar", members or captions(0, 1))
    (folder / ".nv-meta").mkdir()
    (folder / ".nv-meta/dataset.yaml").write_text(yaml.safe_dump(described))
    parts = {"split_parts": {"train": ["a.tar"]}, "exclude": []} | (splits or {})
    (folder / ".nv-meta/split.yaml").write_text(yaml.safe_dump(parts))
    return folder


@pytest.mark.parametrize(
    ("described", "splits", "message"),
    [
        (
            ENERGON,
            {"exclude": ["a.tar"]},
            r"split\.yaml has exclude, which is not read; prepare a folder without it",
        ),
        (ENERGON, {"blend": 2}, r"split\.yaml has blend, which is not read"),
        (
            ENERGON | {"sample_loader": "x.py:f"},
            {},
            r"dataset\.yaml has sample_loader, which is not read",
        ),
        (
            ENERGON | {"part_filter": "x.py:f"},
            {},
            r"dataset\.yaml has part_filter, which is not read",
        ),
        (
            ENERGON | {"shuffle_over_epochs": 3},
            {},
            r"dataset\.yaml has shuffle_over_epochs, which is not read",
        ),
        (ENERGON | {"sample_type": {"__class__": "OCRSample"}}, {}, r"the sample type 'OCRSample'"),
        (
            ENERGON | {"field_map": {"image": "jpg"}},
            {},
            r"read are CaptioningSample with image, caption",
        ),
        (
            ENERGON | {"field_map": {"image": ["jpg"], "caption": "txt"}},
            {},
            r"with the fields caption, image; read are",
        ),
        (
            VQA | {"field_map": {"context": "q", "answers": "txt", "answer_weights": "w"}},
            {},
            r"answer_weights.*; read are",
        ),
    ],
)
def test_what_energons_files_order_and_is_not_read_is_refused_by_name(
    described, splits, message, tmp_path
) -> None:
    with pytest.raises(UserError, match=message):
        opened(prepared(tmp_path / "energon", described, splits), tmp_path)


def test_energons_image_is_the_member_that_its_field_names_and_others_are_counted(
    tmp_path: Path,
) -> None:
    members = {
        "0.png": picture(colour=1),
        "0.jpg": picture(colour=2),
        "0.txt": "two",
        "1.png": picture(),
        "1.txt": "one",
    }
    got = opened(
        prepared(tmp_path / "jpg", ENERGON | {"subflavors": {"a": 1}}, members=members), tmp_path
    )
    assert [file.read() for file in got.media(0)] == [picture(colour=2)]
    assert got.conversation(0).unread == (".png",)
    with pytest.raises(BadSample, match=r"has no \.jpg; its members are png, txt"):
        got.conversation(1)
    several = ENERGON | {"field_map": {"image": "jpg,png", "caption": "cap,txt"}}
    got = opened(prepared(tmp_path / "both", several, members=members), tmp_path)
    assert [got.media(k)[0].read() for k in range(2)] == [picture(colour=2), picture()]
    assert got.conversation(1).messages[1].parts == ("one",)


def test_files_that_a_json_names_are_members_in_its_order_and_as_many(tmp_path: Path) -> None:
    ask = {"question": "Which?", "answer": "both"}
    members: dict = {}
    for key, names in enumerate(
        (["0.b.png", "0.a.png"], ["x.png"], ["2.a.png", "x.png"], ["data:image/png;base64,A"])
    ):
        members |= {f"{key}.a.png": picture(colour=1)} if key < 3 else {}
        members |= {f"{key}.b.png": picture(colour=2)} if key in (0, 2) else {}
        members[f"{key}.json"] = ask | {"images": names}
    members["4.json"] = '{"question": "Which?", "question": "Who?", "answer": "x"}'
    members["5.json"] = ask | {"answers": ["x"]}
    members["6.json"] = {"question": "Which?", "answers": ["red", "dark red"]}
    got = opened(shard(tmp_path / "d.tar", members), tmp_path)
    assert [file.read() for file in got.media(0)] == [picture(colour=2), picture(colour=1)]
    # by another name that it had
    assert [file.read() for file in got.media(1)] == [picture(colour=1)]
    for index, reason in {
        2: r"names the image file 'x\.png'; its members are 2\.a\.png, 2\.b\.png",
        3: r"names 1 image file\(s\), and has 0 such member\(s\)",
        4: r"d\.tar::4\.json has the key 'question' twice",
        5: "has both answer and answers",
    }.items():
        with pytest.raises(BadSample, match=reason):
            got.conversation(index)
    assert got.conversation(6).answers == ("red", "dark red")


def test_keys_and_members_of_a_shard_that_nothing_reads_are_counted_and_no_image_is_one_of_them(
    tmp_path,
) -> None:
    ask = {"question": "Which?", "answer": "both"}
    members = {"0.png": picture(), "0.json": ask | {"foo": 1, "id": 2}, "0.npy": "x", "0.cls": "3"}
    members |= {
        "1.png": picture(),
        "1.txt": "one",
        "1.json": {},
        "2.AVIF": picture(),
        "2.txt": "two",
    }
    members |= {
        "3.npy": "x",
        "3.txt": "three",
        "4.png": picture(),
        "4.txt": "four",
        "4.caption": "4",
    }
    members |= {
        "5.png": picture(),
        "5.json": ask | {"functions": [{}]},
        "6.svg": "<svg/>",
        "6.txt": "six",
    }
    got = opened(shard(tmp_path / "d.tar", members), tmp_path)
    facts = read_facts(got, PROBES, tmp_path / "cache")
    assert facts.unread == {".cls": 1, ".json": 1, ".npy": 1, "foo": 1}
    reasons = dict(zip(facts.bad.tolist(), facts.reason.tolist(), strict=True))
    for index, reason in {
        3: "has no image, clip or video beside its .txt; its members: npy, txt",
        4: "has both .txt and .caption; keep the one that is meant",
        5: "has functions, which is not read here",
        6: "is a bad image file",
    }.items():
        assert reason in reasons.pop(index)
    assert not reasons


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("pipe:touch PWNED; cat {}/a.tar", r"pipe:touch PWNED; cat .* is missing"),
        ("pipe:touch PWNED; cat a.tar", r"pipe:touch PWNED; cat a\.tar is missing"),
        ("./pipe:touch PWNED; cat a.tar", r"is missing"),
        ("pipe:touch PWNED{0..1}; cat a.tar", r"is missing"),
        (" pipe:touch PWNED; cat a.tar", r"is missing"),
        ("b{0..9999999999}.tar", r"b0\.tar is missing"),  # which as a list would exceed any memory
        ("http://127.0.0.1:1/a.tar", "which is outside of"),
        ("simplecache::http://127.0.0.1:1/a.tar", "which is outside of"),
        ("file:///a.tar", "which is outside of"),
        ("{}/a.tar", "which is outside of"),
        ("/etc/*", "which is outside of"),
        ("../a.tar", "which is outside of"),
        ("shards/../../a.tar", "which is outside of"),
        (["a.tar"], "expected a path inside"),
        ({"pipe": "a.tar"}, "expected a path inside"),
        (3, "expected a path inside"),
        ("a\0.tar", "expected a path inside"),
    ],
)
def test_what_energons_files_name_is_a_file_of_their_folder_and_never_a_command_or_url(
    part, message, tmp_path: Path, monkeypatch
) -> None:
    shard(tmp_path / "a.tar", captions(0, 2))
    folder = tmp_path / "energon"
    shard(folder / "a.tar", captions(0, 2))
    (folder / ".nv-meta").mkdir()
    part = part.replace("{}", str(tmp_path)) if isinstance(part, str) else part
    (folder / ".nv-meta/split.yaml").write_text(yaml.safe_dump({"split_parts": {"train": [part]}}))
    (folder / ".nv-meta/dataset.yaml").write_text("{}")
    monkeypatch.chdir(folder)
    for path in (".", "", str(folder)):
        for window in (0, 4):
            with pytest.raises(UserError, match=message):
                opened(path or "../energon", tmp_path, window=window)
    assert not list(tmp_path.rglob("PWNED*"))
    for parts in ({"split_parts": part}, {"split_parts": {"train": "a.tar"}}, [part]):
        (folder / ".nv-meta/split.yaml").write_text(yaml.safe_dump(parts))
        with pytest.raises(UserError, match=r"split\.yaml"):
            opened(".", tmp_path, window=4)
    (folder / ".nv-meta/split.yaml").write_text("a: " + "[" * 500)
    with pytest.raises(UserError, match=r"split\.yaml is not YAML: "):
        opened(".", tmp_path, window=4)
    (folder / ".nv-meta/split.yaml").write_text(
        yaml.safe_dump({"split_parts": {"train": ["a.tar"]}})
    )
    assert len(opened(".", tmp_path)) == 2


def test_a_file_that_is_called_like_a_command_is_a_file(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    shard(Path("pipe:touch PWNED;.tar"), captions(0, 2))
    for path in ("*.tar", "./*.tar", "./pipe:touch PWNED;.tar"):
        for window in (0, 4):
            got = opened(path, tmp_path, window=window)
            assert got.media(1)[0].read() == picture(colour=1)
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("cut", ["in a member", "between members", "in a header"])
def test_a_shard_that_is_cut_off_is_refused_by_name(cut, tmp_path: Path) -> None:
    path = shard(tmp_path / "d.tar", captions(0, 3))
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1]
    path.write_bytes(
        path.read_bytes()[
            : {"in a member": last.offset_data + 2, "in a header": last.offset + 100}.get(
                cut, last.offset
            )
        ]
    )
    with pytest.raises(UserError, match=r"d\.tar .*(cut off|cannot be read as a \.tar)"):
        opened(path, tmp_path)


def test_what_cannot_be_trained_on_is_said(tmp_path: Path) -> None:
    members = {
        "0.jpg": picture(), "1.json": "{", "2.json": "[1]", "3.txt": b"\xff\xfe\x00", "4.json": {"question": "Why?"},
    }  # fmt: skip
    got = opened(shard(tmp_path / "d.tar", members), tmp_path)
    reasons = [
        "neither a .json nor a .txt; its members are jpg",
        "is not JSON",
        "with a list",
        "is not UTF-8",
        "neither a conversation nor 'answer'; its keys: 'question'",
    ]
    for index, reason in enumerate(reasons):
        with pytest.raises(BadSample, match=reason):
            got.conversation(index)
    with tarfile.open(tmp_path / "d.tar", "w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("0.jpg"), io.BytesIO())
    with pytest.raises(UserError, match=r"has 0\.jpg twice in one sample"):
        opened(tmp_path / "d.tar", tmp_path)
    with pytest.raises(UserError, match=r"\{003\.\.000\} counts down; write \{000\.\.003\}"):
        opened(tmp_path / "d-{003..000}.tar", tmp_path)


def test_a_shard_that_changes_or_goes_in_mid_run_ends_the_run(tmp_path: Path) -> None:
    path = shard(tmp_path / "d.tar", captions(0, 3))
    got = opened(path, tmp_path)
    assert got.media(1)[0].read() == picture(colour=1)
    [file] = got.media(1)
    shard(path, captions(1, 3))
    os.utime(path, ns=(1, 1))
    for read in (file.read, lambda: got.conversation(1)):
        with pytest.raises(
            UserError, match=r"d\.tar has changed since it was opened; .*--new-data"
        ):
            read()
    assert got.place(1) == f"{path}::{file.member.partition('.')[0]}"
    again = opened(path, tmp_path)
    assert again.conversation(0).messages[1].parts == ("number 1",)
    assert again.fingerprint() != got.fingerprint()
    Path(path).unlink()
    with pytest.raises(UserError, match=r"d\.tar is missing; go on with --resume"):
        again.conversation(0)


def streams(folder: Path, url: str) -> dict[str, str]:
    return {
        "a command": f"pipe:cat {folder}/d-{{0..2}}.tar",
        "compressed": f"{folder}/d-*.tar.gz",
        "a URL": f"{url}/d-{{0..2}}.tar",
        "a compressed URL": f"{url}/d-{{0..2}}.tar.gz",
    }


def test_streams_are_read_once_for_texts_and_headers_and_then_through_copies_of_bounded_size(
    tmp_path: Path,
) -> None:
    """Three shards of 10,240 bytes, of which two fit."""
    folder = tmp_path / "shards"
    for k in range(3):
        path = shard(folder / f"d-{k}.tar", captions(3 * k, 3) | {f"{k}.note": "no sample of ours"})
        path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    with served(folder) as server:
        for name, path in streams(folder, server.url).items():
            place = tmp_path / name.replace(" ", "-")
            server.asked.clear()
            got = opened(path, place, space=25e-6, window=1)
            facts = read_facts(got, PROBES, place / "cache")
            assert facts.size.tolist() == [[6, 9]] * 9
            captions_read = [got.conversation(k).messages[1].parts for k in range(12) if k % 4 < 3]
            assert captions_read == [(f"number {k}",) for k in range(9)]
            copies = place / "cache" / "window"
            assert not copies.exists()
            assert server.asked["GET"] == (3 if "URL" in name else 0)
            for k in (0, 1, 4, 8, 9, 10, 0):  # samples of shards 0, 0, 1, 2, 2, 2 and again 0
                assert got.media(k)[0].read() == picture(colour=k - k // 4)
                assert sum(file.stat().st_size for file in copies.iterdir()) <= 25_000
            assert server.asked["GET"] == (7 if "URL" in name else 0)


def test_a_stream_that_is_cut_off_fails_or_does_not_fit_is_named_before_anything_is_trained_on(
    tmp_path: Path,
) -> None:
    path = shard(tmp_path / "d.tar", captions(0, 3))
    end = 3 * 2 * 1024  # of the last member
    for command, message in (
        (f"head -c {end - 700} {path}", r"pipe:head .* (is cut off|cannot be read as a \.tar)"),
        (f"head -c {end} {path}", r"pipe:head .* is cut off"),
        (f"echo text; cat {path}", r"pipe:echo .* cannot be read as a \.tar"),
        (f"cat {tmp_path}/none", r"pipe:cat .* failed: .*No such file"),
    ):
        with pytest.raises(UserError, match=message):
            opened(f"pipe:{command}", tmp_path, window=4)
    with pytest.raises(
        UserError,
        match=r"can only be read from its beginning on; .* data\.sources\.mine\.window=10000",
    ):
        opened(f"pipe:cat {path}", tmp_path)
    with pytest.raises(
        UserError, match=r"pipe:cat .*d\.tar has .* GB, and data\.window_space=5e-06 GB is all"
    ):
        opened(f"pipe:cat {path}", tmp_path, window=4, space=5e-6)
    for k in range(2):
        shard(tmp_path / f"{k}.tar", captions(3 * k, 3))
    with pytest.raises(
        UserError, match=r"mine\.window=4: two windows take .* GB, and data\.window_space=1\.5e-05"
    ):
        opened(f"pipe:cat {tmp_path}/{{0..1}}.tar", tmp_path, window=4, space=15e-6)


def test_a_stream_that_changes_in_mid_run_ends_it_and_is_indexed_again_when_it_stays_so(
    tmp_path: Path,
) -> None:
    path = shard(tmp_path / "d.tar", captions(0, 3))
    command = f"pipe:cat {path}"
    first = opened(command, tmp_path, window=4)
    whole = path.read_bytes()
    for torn in (whole[:5000], whole.replace(b"number 2", b"number 3")):
        got = opened(command, tmp_path, window=4)
        assert got.fingerprint() == first.fingerprint()
        path.write_bytes(torn)
        with pytest.raises(
            UserError, match=r"d\.tar has changed since it was indexed, or is cut off; .*--new-data"
        ):
            got.media(1)[0].read()
        path.write_bytes(whole)
        assert got.media(1)[0].read() == picture(colour=1)  # and goes on where it was mended
        for copy in (tmp_path / "cache" / "window").iterdir():
            copy.unlink()
    path.write_bytes(whole.replace(b"number 2", b"number 3"))
    with pytest.raises(UserError, match="has changed"):
        first.media(1)[0].read()
    again = opened(command, tmp_path, window=4)
    assert again.conversation(2).messages[1].parts == ("number 3",)
    assert again.fingerprint() != first.fingerprint()


def test_what_a_compressed_shard_unpacks_to_is_bounded_member_by_member(tmp_path: Path) -> None:
    members = {
        "0.jpg": picture(),
        "0.txt": "short",
        "1.txt": bytes(MAX_TEXT + 1),
        "2.json": b"[" + b"0," * MAX_VALUES + b"0]",
    }
    path = shard(tmp_path / "d.tar", members)
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    got = opened(tmp_path / "d.tar.gz", tmp_path, window=4)
    assert got.conversation(0).messages[1].parts == ("short",)
    with pytest.raises(
        BadSample, match=r"d\.tar\.gz::1\.txt has 67,108,865 bytes, more than the 67,108,864"
    ):
        got.conversation(1)
    with pytest.raises(BadSample, match=r"has more than 4,194,304 values"):
        got.conversation(2)


@pytest.mark.parametrize(
    ("size", "kind", "message"),
    [
        (1 << 30, tarfile.XHDTYPE, r"it has a header of 1,073,741,824 bytes"),
        (1 << 30, tarfile.GNUTYPE_LONGNAME, r"it has a header of 1,073,741,824 bytes"),
        (-1024, tarfile.REGTYPE, r"has a negative size|cannot be read as a \.tar"),
        (1 << 30, tarfile.GNUTYPE_SPARSE, r"with holes \(tar --sparse\)|cannot be read as a \.tar"),
    ],
    ids=["extended", "long name", "negative", "sparse"],
)
def test_a_tar_header_that_claims_too_much_or_less_than_nothing_is_refused_in_a_line(
    size, kind, message, tmp_path: Path
) -> None:
    header = tarfile.TarInfo("0.txt")
    header.type = kind
    header.size = size
    (tmp_path / "d.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10 * 512))
    with pytest.raises(UserError, match=rf"d\.tar .*({message})"):
        opened(tmp_path / "d.tar", tmp_path)
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress((tmp_path / "d.tar").read_bytes()))
    with pytest.raises(UserError, match=rf"d\.tar\.gz .*({message})"):
        opened(tmp_path / "d.tar.gz", tmp_path, window=4)
