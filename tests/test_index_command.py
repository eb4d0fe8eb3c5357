"""`python -m mmjax.index`: what data sets of files are like, what is bad in them, and the same data as ArrayRecord."""

from __future__ import annotations

import json
import re
import signal
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from clips_made import frames_of, write_video
from commands import run
from llava_folder import save_checkpoint, save_questions
from PIL import Image
from started import finish, start

sys.path.append(str(Path(__file__).parent / "data"))
from files_made import asked, clip, lines, picture, served, write

from mmjax import index
from mmjax.config import ArrayRecordSource
from mmjax.config.loading import find_config, load
from mmjax.data.sources.array_record_writing import write_array_records
from mmjax.data.sources.array_records import ArrayRecords
from mmjax.data.sources.media_sizes import open_facts, read_facts
from mmjax.data.sources.opening import look_again, notes_of, open_conversations, open_sources
from mmjax.data.sources.token_counts import open_token_counts
from mmjax.errors import UserError
from mmjax.index import PROBES
from mmjax.reporting.data_report import split_place


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A config's edits: photos with two bad records, speech with a validation split, and a folder for facts."""
    write(tmp_path, {f"photos/{i}.png": picture(10 + i, 20) for i in range(20)})
    write(
        tmp_path,
        {"photos/3.png": b"broken", **{f"speech/{i}.wav": clip(800 * (1 + i)) for i in range(5)}},
    )
    records = [asked("<image>what?", image=f"{i}.png") for i in range(21)]
    lines(tmp_path / "photos.jsonl", records)
    said = [{"audio_filepath": f"{i}.wav", "text": f"number {i}"} for i in range(5)]
    lines(tmp_path / "speech.jsonl", said[:4])
    lines(tmp_path / "held.jsonl", said[4:])
    return [
        "tiny_omni",
        "data.sources.photos=llava",
        f"data.sources.photos.path={tmp_path}/photos.jsonl",
        f"data.sources.photos.images={tmp_path}/photos",
        "data.sources.speech=manifest",
        f"data.sources.speech.path={tmp_path}/speech.jsonl",
        f"data.sources.speech.validation={tmp_path}/held.jsonl",
        f"data.sources.speech.audio={tmp_path}/speech",
        f"data.cache={tmp_path}/cache",
        f"--out={tmp_path}/out",
    ]


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    ended = run(capsys, index.main, *words)
    assert ended.code == 0, ended.err
    return ended.out


def test_every_modality_is_counted_and_what_is_bad_is_named(words, tmp_path, capsys) -> None:
    out = told(capsys, *words)
    rows = {tuple(line.split()) for line in out.splitlines()}
    assert ("photos", "21", "2", "19", "0") in rows
    assert ("speech", "4", "0", "0", "4") in rows
    assert ("speech", "validation", "1", "0", "0", "1") in rows
    assert ("photos", "image,", "longer", "side", "19", "20", "20", "27.2", "29", "425") in rows
    assert ("speech", "clip,", "seconds", "4", "0.1", "0.25", "0.37", "0.4", "1") in rows
    bad = [json.loads(line) for line in (tmp_path / "out" / "bad.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in bad] == ["photos[3]", "photos[20]"]
    assert "3.png is a bad image file" in bad[0]["reason"]
    assert "20.png is missing" in bad[1]["reason"]
    drawn = "\n".join(ElementTree.parse(tmp_path / "out" / "lengths.svg").getroot().itertext())
    for text in (
        "image, megapixels",
        "clip, seconds",
        "text, characters",
        "speech validation",
        "26 records",
    ):
        assert text in drawn


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            "max_bad_share=0.01",
            "more than data.max_bad_share=0.01 allows: training refuses .* with data.max_bad=2",
        ),
        (
            "max_bad=1",
            "more than data.max_bad=1 allows: training refuses to start; mend them, or .* with data.max_bad=2",
        ),
        ("max_bad=2", "training leaves them out"),
        ("max_bad_share=0.1", "training leaves them out"),
        (
            "on_bad_sample=raise",
            "data.on_bad_sample=raise: training refuses to start; mend them, or say skip",
        ),
    ],
)
def test_the_last_line_says_what_training_does_about_bad_records(edit, said, words, capsys) -> None:
    *_, last = told(capsys, *words, f"data.{edit}").splitlines()
    assert re.fullmatch(f"train  2 of 25 records are bad(:|,| and)+ {said}", last)


def test_with_a_checkpoints_template_lengths_are_in_tokens_and_training_counts_nothing_again(
    tmp_path, capsys
) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    save_questions(tmp_path / "data", 12)
    records = json.loads((tmp_path / "data" / "data.json").read_text())
    # only the template may write it: known when it is tokenized
    records[5]["conversations"][1]["value"] = "<pad>"
    (tmp_path / "data" / "data.json").write_text(json.dumps(records))
    words = ["llava_style", f"checkpoint={checkpoint}", f"data={tmp_path}/data/data.json"]
    words += [f"images={tmp_path}/data/images", f"data.cache={tmp_path}/cache"]
    out = told(capsys, *words, f"--out={tmp_path}/out")
    rows = {tuple(line.split())[:-1] for line in out.splitlines()}
    assert ("chat", "12", "1", "12") in rows
    config = index.load(find_config("llava_style"), words[1:])
    source = open_sources(config, "train", tmp_path)["chat"]
    lengths = [source.facts(i).text_tokens for i in range(12) if i != 5]
    (text,) = (line.split() for line in out.splitlines() if "text, tokens" in line)
    assert text[3:5] == ["11", str(min(lengths))]
    (image,) = (line.split() for line in out.splitlines() if "vision, tokens" in line)
    assert image[3:] == ["11", "16", "16", "16", "16", "176"]
    assert open_token_counts(source.conversations, source.chat, tmp_path / "cache") is not None
    assert json.loads((tmp_path / "out" / "bad.jsonl").read_text())["sample"] == "chat[5]"
    assert "tokens of a record" in (tmp_path / "out" / "lengths.svg").read_text()


def test_a_second_run_says_the_same_and_probes_nothing(words, capsys, monkeypatch) -> None:
    first = told(capsys, *words)
    monkeypatch.setattr(index, "PROBES", dict.fromkeys(PROBES, None))
    assert told(capsys, *words) == first


def test_all_of_it_as_arrayrecord_is_the_same_data(words, tmp_path, capsys) -> None:
    out = told(capsys, *words, "--to", "arrayrecord", tmp_path / "records")
    assert f"data.sources.speech.validation={tmp_path}/records/speech/validation" in out
    written = open_conversations(
        ArrayRecordSource(f"{tmp_path}/records/photos/train"), "train", tmp_path / "c", "mine"
    )
    assert len(written) == 19
    with pytest.raises(
        UserError, match=r"has no index\.json: .*; name a folder in it: .*/records/photos/train$"
    ):
        open_conversations(
            ArrayRecordSource(f"{tmp_path}/records"), "train", tmp_path / "c", "mine"
        )
    assert [written.media(i)[0].read() for i in (0, 3, 18)] == [
        picture(10 + i, 20) for i in (0, 4, 19)
    ]
    facts = open_facts(written, tmp_path / "c")
    assert facts.size.tolist() == [[10 + i, 20] for i in range(20) if i != 3]
    used = [word.strip() for word in out.partition("train on it with\n")[2].splitlines()]
    again = told(
        capsys, "tiny_omni", *used, f"data.cache={tmp_path}/cache", f"--out={tmp_path}/out2"
    )
    assert ("photos", "19", "0", "19", "0") in {tuple(line.split()) for line in again.splitlines()}
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "records").rglob("*.arrayrecord")
    }
    told(capsys, *words, "--to", "arrayrecord", tmp_path / "records")
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "records").rglob("*.arrayrecord")
    } == before


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--to", "tfrecord", "x"], "say --to arrayrecord x"),
        (["data.sources.photos.path=gone.json"], "data.sources.photos.path: gone.json is missing"),
        (["data.cache=/proc/nowhere"], "data.cache=/proc/nowhere"),
        (["--out=/proc/nowhere"], "--out /proc/nowhere"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(words, capsys, more, error) -> None:
    ended = run(capsys, index.main, *words, *more)
    assert ended.code == 2
    assert error in ended.err
    assert ended.err.count("\n") == 1


def test_a_config_without_files_is_refused(capsys) -> None:
    ended = run(capsys, index.main, "tiny_omni")
    assert ended.code == 2
    assert "data.sources has no source of files" in ended.err


def photos(tmp_path: Path, count: int):
    """Conversations of as many records, and their facts."""
    write(tmp_path, {f"{i}.png": picture(2 + i % 9, 3, i) for i in range(count)})
    path = lines(
        tmp_path / "d.jsonl", [asked(f"<image>{i}", image=f"{i}.png") for i in range(count)]
    )
    source = index.load(
        "tiny_omni", ["data.sources.a=llava", f"data.sources.a.path={path}"]
    ).data.sources["a"]
    opened = open_conversations(source, "train", tmp_path / "cache", "a")
    return opened, read_facts(opened, PROBES, tmp_path / "cache")


@pytest.mark.exhaustive
def test_a_killed_conversion_is_not_whole_and_goes_on_with_the_shards_that_it_lacks(
    tmp_path: Path,
) -> None:
    photos(tmp_path, 6000)
    edits = [
        "data.sources.a=llava",
        f"data.sources.a.path={tmp_path}/d.jsonl",
        f"data.cache={tmp_path}/cache",
    ]
    command = [
        "mmjax.index",
        "tiny_omni",
        *edits,
        f"--out={tmp_path}/out",
        "--to",
        "arrayrecord",
        tmp_path / "to",
    ]
    process, folder = start(*command), tmp_path / "to" / "a" / "train"
    while len(list(folder.glob("*.arrayrecord"))) < 2 and process.poll() is None:
        signal.sigtimedwait([], 0.001)
    process.kill()
    finish(process)
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*.arrayrecord")}
    assert 2 <= len(written) < 6
    with pytest.raises(UserError, match="not written to its end"):
        ArrayRecords(str(folder), tmp_path / "cache")
    assert finish(start(*command)).code == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written
    whole = ArrayRecords(str(folder), tmp_path / "cache")
    assert len(whole) == 6000
    for i in (0, 999, 1000, 3456, 5999):
        assert whole.media(i)[0].read() == picture(2 + i % 9, 3, i)
        assert whole.conversation(i).messages[0].parts[1] == str(i)
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {
        ".arrayrecord",
        ".jsonl",
        ".json",
    }


def test_a_record_that_cannot_be_read_any_more_is_left_out_and_listed(tmp_path: Path) -> None:
    opened, facts = photos(tmp_path, 10)
    (tmp_path / "4.png").unlink()
    write_array_records(opened, facts, tmp_path / "to", lambda done: None)
    whole = ArrayRecords(str(tmp_path / "to"), tmp_path / "cache")
    assert len(whole) == len(open_facts(whole, tmp_path / "cache")) == 9
    left = json.loads((tmp_path / "to" / "left_out.jsonl").read_text())
    assert left["record"] == 4
    assert "4.png is missing" in left["reason"]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    opened, facts = photos(tmp_path / "one", 3)
    other, of_other = photos(tmp_path / "two", 4)
    write_array_records(opened, facts, tmp_path / "to", lambda done: None)
    with pytest.raises(UserError, match="holds another data set"):
        write_array_records(other, of_other, tmp_path / "to", lambda done: None)
    write(tmp_path / "mine", {"letter.txt": b"dear"})
    with pytest.raises(UserError, match="is not empty"):
        write_array_records(opened, facts, tmp_path / "mine", lambda done: None)
    write(tmp_path / "half", {"making.json": b'{"made_from": "else"}'})
    with pytest.raises(UserError, match="a part of another data set"):
        write_array_records(opened, facts, tmp_path / "half", lambda done: None)


def test_parquet_behind_a_server_becomes_arrayrecord(tmp_path: Path, capsys) -> None:
    rows = [{"bytes": picture(3 + i, 4), "path": None} for i in range(7)]
    table = pyarrow.table({"q": [f"{i}?" for i in range(7)], "a": ["!"] * 7, "image": rows})
    (tmp_path / "site").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "site" / "d.parquet", row_group_size=2)
    with served(tmp_path / "site") as server:
        edits = ["path=" + f"{server.url}/d.parquet", "question=q", "answer=a", "images=image"]
        words = [
            "data.sources.a=parquet",
            *(f"data.sources.a.{edit}" for edit in edits),
            f"data.cache={tmp_path}/cache",
        ]
        told(
            capsys,
            "tiny_omni",
            *words,
            f"--out={tmp_path}/out",
            "--to",
            "arrayrecord",
            tmp_path / "to",
        )
    whole = ArrayRecords(str(tmp_path / "to" / "a" / "train"), tmp_path / "cache")
    assert [whole.media(i)[0].read() for i in range(7)] == [row["bytes"] for row in rows]
    assert np.array_equal(open_facts(whole, tmp_path / "cache").size[:, 0], np.arange(3, 10))


def test_data_of_which_nothing_can_be_used_ends_with_2(tmp_path: Path, capsys) -> None:
    (tmp_path / "d.jsonl").write_text('{"messages": []}\n{"messages": 3}\n')
    path = f"data.sources.few.path={tmp_path / 'd.jsonl'}"
    ended = run(
        capsys, index.main, "tiny_vlm", "data.sources.few=messages", path, "--out", tmp_path / "out"
    )
    assert ended.code == 2
    assert f"few: none of its 2 records can be used; see {tmp_path / 'out'}" in ended.err
    assert (tmp_path / "out" / index.BAD).read_text().count("\n") == 2


def test_videos_are_counted_and_their_tokens_told_by_frames_per_second(
    tmp_path: Path, capsys
) -> None:
    write_video(tmp_path / "a.mp4", frames_of(np.random.default_rng(0), 40, 32, 48), 10)
    write_video(
        tmp_path / "b.webm", frames_of(np.random.default_rng(1), 20, 32, 48), 10, "libvpx-vp9"
    )
    records = [asked("<video>What?", video=name) for name in ("a.mp4", "b.webm", "gone.mp4")]
    words = [
        "tiny_vlm",
        "data.sources.clips=llava",
        f"data.sources.clips.path={lines(tmp_path / 'd.jsonl', records)}",
        f"data.cache={tmp_path}/cache",
        f"--out={tmp_path}/out",
    ]
    assert "tokens of a video at fps" not in told(capsys, *words)
    sampling = ["model.encoders.vision.videos=qwen2_video", "model.encoders.vision.frames=2"]
    bounds = [
        f"model.encoders.vision.videos.{name}_pixels={pixels}"
        for name, pixels in (("min", 64), ("max", 1536))
    ]
    out = told(capsys, *words, *sampling, *bounds, "--video-tokens=100")
    at_most = re.findall(r"videos have at most 100 tokens up to videos.fps=(\S+)", out)
    assert len(at_most) == 2
    again = told(
        capsys, *words, *sampling, *bounds, f"model.encoders.vision.videos.fps={at_most[0]}"
    )
    assert (
        max(map(int, re.search(r"\(this config\) +(\d+) +\S+ +\S+ +(\d+)", again).groups())) <= 100
    )
    few = told(capsys, *words, *sampling, *bounds, "--video-tokens=12")
    assert "at no rate all videos have at most 12 tokens" in few
    rows = {tuple(line.split()) for line in out.splitlines()}
    assert ("clips", "3", "1", "0", "0", "2") in rows
    assert ("clips", "video,", "frames", "2", "20", "30", "38", "40", "60") in rows
    assert ("clips", "video,", "seconds", "2", "2", "3", "3.8", "4", "6") in rows
    # 8 and 4 frames in patches of 2, each of 4 x 6 tokens of 8 x 8 pixels.
    assert ("2", "(this", "config)", "48", "72", "91.2", "96", "144") in rows
    assert any(row[:3] == ("8", "192", "288") for row in rows)


def test_json_has_the_bad_records_by_line_and_the_keys_that_nothing_reads_by_source(
    words, tmp_path, capsys
) -> None:
    records = [asked("what?", note=k, mood="x" * (k % 2)) for k in range(4)]
    records += [asked("what?", fps=1), asked("<image>what?", image="3.png", note=1)]
    lines(tmp_path / "photos.jsonl", records)
    held = [
        {"audio_filepath": "4.wav", "text": "four", "note": "y"},
        {"audio_filepath": "none.wav", "text": "x"},
    ]
    lines(tmp_path / "held.jsonl", held)
    found = json.loads(told(capsys, *words, "--json"))
    assert set(found) == {"records", "bad", "ignored_keys"}
    assert found["records"] == 6 + 4 + 2
    assert found["ignored_keys"] == {"photos": {"mood": 2, "note": 5}, "speech": {"note": 1}}
    places = [(Path(bad["file"]).name, bad["line"]) for bad in found["bad"]]
    assert places == [("photos.jsonl", 5), ("photos.jsonl", 6), ("held.jsonl", 2)]
    assert found["bad"][0]["reason"].startswith(
        "has fps, which is not read here (qwen-vl-utils, ms-swift"
    )
    assert "3.png is a bad image file" in found["bad"][1]["reason"]
    again = told(capsys, *words)
    assert "ignored keys of photos: `mood` in 2 records, `note` in 5 records" in again
    for name, place in (("a.json[3]", ("a.json", "[3]")), ("s-0.tar::00012", ("s-0.tar", "00012"))):
        assert split_place(name) == place


def test_training_names_the_keys_that_nothing_reads_before_its_first_step(tmp_path, capsys) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    data = save_questions(tmp_path, 4)
    records = [record | {"note": 1} for record in json.loads(data.read_text())]
    lines(tmp_path / "d.jsonl", records)
    words = [f"checkpoint={checkpoint}", f"data={tmp_path}/d.jsonl", f"images={tmp_path}/images"]
    config = load("llava_style", [*words, f"data.cache={tmp_path}/cache"])
    sources = open_sources(config, "train", tmp_path)
    look_again(sources)
    assert notes_of(sources)[-1] == "ignored keys of chat: `note` in 4 records"


def test_copies_of_photos_are_as_small_as_the_model_uses_them(tmp_path, capsys) -> None:
    """Upright, by the records' names, made once; what is bad is named, and another model's folder refused."""
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "photos" / "a").mkdir(parents=True)
    pixels = Image.fromarray(rng.integers(0, 255, (30, 40, 3), np.uint8)).resize((800, 600))
    pixels.save(tmp_path / "photos" / "a" / "0.jpg", exif=exif)
    pixels.save(tmp_path / "photos" / "1.png")
    write(tmp_path, {"photos/2.png": picture(10, 20)})
    whole = (tmp_path / "photos" / "a" / "0.jpg").read_bytes()
    write(tmp_path, {"photos/3.jpg": whole[: len(whole) // 2]})
    names = ["a/0.jpg", "1.png", "2.png", "3.jpg", "a/0.jpg", f"{tmp_path}/photos/1.png"]
    lines(tmp_path / "r.jsonl", [asked("<image>what?", image=name) for name in names])
    words = [
        "tiny_omni",
        "model.encoders.vision.images=fixed_size",
        "model.encoders.vision.images.resize=64",
        "model.encoders.vision.images.crop=64,64",
        "data.sources={}",
        "data.sources.photos=llava",
        f"data.sources.photos.path={tmp_path}/r.jsonl",
        "data.sources.photos.outside=allow",
        f"data.cache={tmp_path}/cache",
        f"--out={tmp_path}/out",
    ]
    copies = tmp_path / "small"
    originals = f"data.sources.photos.images={tmp_path}/photos"
    out = told(capsys, *words, originals, "--shrink", copies)
    assert "wrote  2 shrunk, 1 as it was, 1 bad of 4 images" in out
    assert "1 images have no path below the source's folder, and no copy: photos" in out
    assert f"data.sources.photos.images={copies}" in out
    assert "3.jpg: corrupt JPEG" in (tmp_path / "out" / "bad.jsonl").read_text()
    assert Image.open(copies / "a" / "0.jpg").size == (64, 85)
    assert Image.open(copies / "1.png").size == (85, 64)
    assert (copies / "2.png").read_bytes() == picture(10, 20)
    stamps = {path: path.stat().st_ino for path in copies.rglob("*.*g")}
    assert "3 there already, 1 bad of 4 images" in told(
        capsys, *words, originals, "--shrink", copies
    )
    assert {path: path.stat().st_ino for path in copies.rglob("*.*g")} == stamps
    words[2] = "model.encoders.vision.images.resize=32"
    ended = run(capsys, index.main, *words, originals, "--shrink", copies)
    assert ended.code == 2
    assert "its copies are for a model that prepares images in another way" in ended.err
