"""Videos in conversations: every way to name them, samples as long as their headers say, bad ones left out by name."""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from checkpoints import QWEN2_VL, QWEN_VL, byte_level, save
from clips_made import frames_of, write_video
from PIL import Image

from mmjax.config import (
    ChatFormat,
    ConnectorConfig,
    FileSource,
    LlavaSource,
    MessagesSource,
    QuestionsSource,
    Qwen2Video,
    Qwen3Video,
    ShareGptSource,
    VisionConfig,
)
from mmjax.data.media.patches import item_size
from mmjax.data.sample import BadSample, Item, MediaPlace
from mmjax.data.sources.array_record_writing import write_array_records
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.sources.media_sizes import read_facts
from mmjax.data.sources.opening import open_conversations
from mmjax.data.sources.processors import PROBES, text_tokens
from mmjax.data.storage.media_files import FrameFiles
from mmjax.data.text.load_chat import load_chat
from mmjax.errors import UserError

VIDEO = MediaPlace("video")
HOW = Qwen2Video(fps=4.0, min_pixels=64, max_pixels=32 * 32)


tokenizer = cache(partial(byte_level, QWEN_VL))  # trained once


def vision(how=HOW) -> VisionConfig:
    return VisionConfig(1, 8, 1, 8, 4, frames=2, videos=how, connector=ConnectorConfig(merge=2))


def open_source(folder: Path, source: FileSource, how=HOW) -> ChatSource:
    folder.mkdir(exist_ok=True)
    save(folder / "words", tokenizer(), QWEN2_VL, eos_token="<|im_end|>")
    (folder / "words" / "config.json").write_text(
        json.dumps({"model_type": "qwen2_5_vl" if isinstance(how, Qwen2Video) else "qwen3_vl"})
    )
    headers = folder / "cache"
    reopen = partial(open_conversations, source, "train", headers, "data.sources.x")
    return ChatSource(
        reopen, load_chat(ChatFormat(str(folder / "words"))), {"vision": vision(how)}, headers
    )


def write_json(path: Path, records: list[dict]) -> str:
    path.write_text(json.dumps(records))
    return str(path)


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """A folder with a.mp4, b.mkv and the frames of a third video."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "clips"
    folder.mkdir()
    write_video(folder / "a.mp4", frames_of(rng, 20, 32, 48), 10)
    write_video(folder / "b.mkv", frames_of(rng, 9, 40, 32), 8, "libx264")
    for number, pixels in enumerate(frames_of(rng, 5, 32, 32)):
        Image.fromarray(pixels).save(folder / f"f{number}.png")
    return folder


FRAMES = [f"f{number}.png" for number in range(5)]
ANSWER = [{"from": "gpt", "value": "A cat."}]


def asked(text: str, **more: object) -> dict:
    return {"conversations": [{"from": "human", "value": text}, *ANSWER], **more}


def test_videos_are_named_as_data_sets_name_them(clips: Path, tmp_path: Path) -> None:
    records = [
        asked("<video>\nWhat?", video="a.mp4"),
        asked("<image>\nWhat?", video="a.mp4"),  # LLaVA-Video's
        asked("<video>and<video>?", videos=["a.mp4", "b.mkv"]),
        asked("<video>", videos=[FRAMES]),
        asked("<video>", video=FRAMES),
        asked("<image> and <video>", image="f0.png", video="b.mkv"),
    ]
    path = write_json(tmp_path / "d.json", records)
    for kind in (LlavaSource, ShareGptSource):
        source = open_source(tmp_path, kind(path, videos=str(clips), images=str(clips)))
        kinds = [
            [place.kind for place in source.conversations.conversation(k).media()] for k in range(6)
        ]
        assert kinds == [
            ["video"],
            ["video"],
            ["video", "video"],
            ["video"],
            ["video"],
            ["image", "video"],
        ]
        assert isinstance(source.conversations.media(3)[0], FrameFiles)
        assert source.read_headers().bad.tolist() == []
    messages = [
        {"type": "video", "video": "a.mp4"},
        {"type": "video", "path": "b.mkv"},
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
        {"type": "video", "video": FRAMES},
        {"type": "text", "text": "What?"},
    ]
    talk = {
        "messages": [{"role": "user", "content": messages}, {"role": "assistant", "content": "Hm."}]
    }
    source = open_source(
        tmp_path, MessagesSource(write_json(tmp_path / "m.json", [talk]), videos=str(clips))
    )
    assert source.conversations.conversation(0).messages[0].parts == (
        VIDEO,
        VIDEO,
        VIDEO,
        VIDEO,
        "What?",
    )
    question = {"video": "a.mp4", "question": "What?", "answer": "A cat."}
    source = open_source(
        tmp_path, QuestionsSource(write_json(tmp_path / "q.json", [question]), videos=str(clips))
    )
    assert source.conversations.conversation(0).messages[0].parts == (VIDEO, "What?")


@pytest.mark.parametrize("how", [HOW, Qwen3Video(fps=4.0, min_pixels=64, max_pixels=20_000)])
def test_samples_are_as_long_as_their_headers_say_and_the_same_from_array_records(
    how: Qwen2Video | Qwen3Video, clips: Path, tmp_path: Path
) -> None:
    records = [
        asked("<video>\nWhat?", video="a.mp4"),
        asked("What <video><video>", videos=[FRAMES, "b.mkv"]),
    ]
    source = open_source(
        tmp_path, LlavaSource(write_json(tmp_path / "d.json", records), videos=str(clips)), how
    )
    out = tmp_path / "fast"
    write_array_records(
        source.conversations,
        read_facts(source.conversations, PROBES, tmp_path / "cache"),
        out,
        lambda done: None,
    )
    from mmjax.config import ArrayRecordSource

    fast = open_source(tmp_path, ArrayRecordSource(str(out)), how)
    for index in range(2):
        facts, sample = source.facts(index), source.sample(index)
        assert facts == fast.facts(index)
        assert facts.text_tokens == text_tokens(sample)
        places = [segment for segment in sample.segments if isinstance(segment, Item)]
        assert [place.number for place in places] == list(range(len(facts.items)))
        for number, (name, size) in enumerate(facts.items):
            item = source.item(index, number)
            assert item.shape == (*size, 3)
            assert item_size(vision(how), size).tokens == size[1] // 8 * (size[2] // 8)
            assert name == "vision"
            np.testing.assert_array_equal(item, fast.item(index, number))
        if (
            isinstance(how, Qwen2Video) and index == 0
        ):  # all temporal patches of a video begin at one place, at times of their own
            assert [place.patch for place in places][:4] == list(range(4))
            assert places[1].time == int(4.0 * 2 / 4.0)
        else:
            words = source.decode(
                [t for s in sample.segments if not isinstance(s, Item) for t in s.tokens]
            )
            assert words


def test_bad_videos_are_bad_samples_with_a_reason_and_the_others_stay(
    clips: Path, tmp_path: Path
) -> None:
    whole = (clips / "a.mp4").read_bytes()
    (clips / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (clips / "empty.mp4").write_bytes(b"")
    (clips / "text.mp4").write_text("no video")
    frames = frames_of(np.random.default_rng(0), 3, 16, 16)
    write_video(clips / "long.avi", frames, 1, times=[0, 1, 36_000])
    names = ["a.mp4", "cut.mp4", "empty.mp4", "text.mp4", "long.avi", "missing.mp4", "../a.mp4"]
    records = [asked("<video>", video=name) for name in names] + [
        asked("<video>", videos=[[]]),
        asked("<video>"),
    ]
    source = open_source(
        tmp_path, LlavaSource(write_json(tmp_path / "d.json", records), videos=str(clips))
    )
    facts = source.read_headers()
    reasons = dict(zip(facts.bad.tolist(), facts.reason.tolist(), strict=True))
    assert sorted(reasons) == [1, 2, 3, 4, 5, 6, 7, 8], reasons
    for index, reason in {
        1: "truncated MP4", 2: "an empty file", 3: "FFmpeg", 4: "longer than 3600 s", 5: "missing.mp4",
        6: "points outside", 7: "refers to a file by", 8: "has 1 places <video> for 0 video file",
    }.items():  # fmt: skip
        assert reason in reasons[index]
        with pytest.raises(BadSample, match=reason):
            source.facts(index)
    assert len(source.facts(0).items) == 4


def test_a_video_that_turns_out_corrupt_is_named_when_it_is_decoded(
    clips: Path, tmp_path: Path
) -> None:
    content = bytearray(
        write_video(
            clips / "c.mkv", frames_of(np.random.default_rng(0), 60, 32, 32), 10
        ).read_bytes()
    )
    (clips / "c.mkv").write_bytes(content[: len(content) // 2])
    source = open_source(
        tmp_path,
        LlavaSource(
            write_json(tmp_path / "d.json", [asked("<video>", video="c.mkv")]), videos=str(clips)
        ),
    )
    assert source.facts(0).items
    with pytest.raises(ValueError, match="truncated video"):
        source.item(0, 0)


def test_an_encoder_without_videos_and_a_missing_decoder_are_said_in_one_line(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmjax.config import NoVideo

    path = write_json(tmp_path / "d.json", [asked("<video>", video="a.mp4")])
    source = open_source(tmp_path, LlavaSource(path, videos=str(clips)), NoVideo())
    source.read_headers()
    with pytest.raises(
        UserError, match=r"media of the kind video, but no model\.encoders takes them"
    ):
        source.facts(0)
    monkeypatch.setitem(sys.modules, "av", None)  # as where it is not installed
    other = open_source(tmp_path / "other", LlavaSource(path, videos=str(clips)))
    with pytest.raises(
        UserError, match=r'the data has videos, which PyAV decodes: pip install "mmjax\[video\]"'
    ):
        other.read_headers()
