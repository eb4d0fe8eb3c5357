"""`data.limits` decides which images and clips are bad, in every command that reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run
from files_made import asked, clip, lines, picture, write
from llava_folder import save_checkpoint

from mmjax import index, train
from mmjax.config import (
    ArrayRecordSource,
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    LlavaSource,
    MediaLimits,
    Samples,
    TrainingConfig,
)
from mmjax.config.loading import apply_overrides
from mmjax.data.plan.length_index import build_index, index_key
from mmjax.data.sample import BadSample
from mmjax.data.sources.opening import open_sources
from mmjax.errors import BadMedia
from mmjax.hf.families import from_hf

LIMITS = ("data.limits.min_side=12", "data.limits.seconds=0.2")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Edits of a config: images with shorter sides of 10 to 13 pixels, and clips of 0.1 to 0.4 s."""
    write(tmp_path, {f"{i}.png": picture(10 + i, 20) for i in range(4)})
    write(tmp_path, {f"{i}.wav": clip(800 * (1 + i), 8000) for i in range(4)})
    images = lines(
        tmp_path / "images.jsonl", [asked("<image>what?", image=f"{i}.png") for i in range(4)]
    )
    clips = lines(
        tmp_path / "clips.jsonl", [{"audio_filepath": f"{i}.wav", "text": "one"} for i in range(4)]
    )
    sources = ["data.sources.photos=llava", f"data.sources.photos.path={images}"]
    sources += ["data.sources.speech=manifest", f"data.sources.speech.path={clips}"]
    return ["tiny_omni", *sources, f"data.cache={tmp_path}/cache", f"--out={tmp_path}/out"]


def bad_samples(capsys, folder: Path, *words: object) -> dict[str, str]:
    """Run `mmjax.index` and return the reasons of the bad samples that it lists."""
    ended = run(capsys, index.main, *words)
    assert ended.code == 0, ended.err
    listed = (json.loads(line) for line in (folder / "out" / "bad.jsonl").read_text().splitlines())
    return {line["sample"]: line["reason"] for line in listed}


def test_media_beyond_the_limits_are_bad_and_other_limits_read_no_header_again(
    words, tmp_path, capsys, monkeypatch
):
    assert bad_samples(capsys, tmp_path, *words) == {}
    monkeypatch.setattr(index, "PROBES", dict.fromkeys(index.PROBES, None))
    bad = bad_samples(capsys, tmp_path, *words, *LIMITS)
    assert list(bad) == ["photos[0]", "photos[1]", "speech[2]", "speech[3]"]
    assert bad["photos[1]"].endswith(
        "1.png is a bad image file: an image of 11 x 20 pixels has a side of less than 12"
    )
    assert bad["speech[2]"].endswith(
        "2.wav is a bad audio file: a clip of 0.3 s is longer than 0.2 s"
    )
    assert bad_samples(capsys, tmp_path, *words) == {}


def test_limits_apply_to_the_sizes_that_an_arrayrecord_folder_brings(words, tmp_path, capsys):
    bad_samples(capsys, tmp_path, *words, "--to", "arrayrecord", tmp_path / "records")
    stored = [f"data.sources.{name}=arrayrecord" for name in ("photos", "speech")]
    stored += [
        f"data.sources.{name}.path={tmp_path}/records/{name}/train" for name in ("photos", "speech")
    ]
    bad = bad_samples(capsys, tmp_path, "tiny_omni", *stored, *words[-2:], *LIMITS)
    assert list(bad) == ["photos[0]", "photos[1]", "speech[2]", "speech[3]"]
    assert (
        bad["photos[0]"]
        == f"{tmp_path}/records/photos/train/00000.jsonl:1: an image of 10 x 20 pixels has a side of less than 12"
    )


@pytest.mark.parametrize("kind", ["llava", "arrayrecord"])
def test_training_sees_an_image_beyond_the_limits_as_a_bad_sample_and_never_decodes_it(
    kind, words, tmp_path, capsys
):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    source = LlavaSource(f"{tmp_path}/images.jsonl")
    if kind == "arrayrecord":
        bad_samples(capsys, tmp_path, *words, "--to", "arrayrecord", tmp_path / "records")
        source = ArrayRecordSource(f"{tmp_path}/records/photos/train")
    data = DataConfig(
        {"photos": source}, chat=ChatFormat(str(checkpoint)), cache=f"{tmp_path}/cache"
    )
    batch = BatchConfig(Samples(2), {"llm": 2, "vision": 2})
    config = Config("limited", data, batch, from_hf(checkpoint), TrainingConfig(100))
    limited = apply_overrides(config, LIMITS)
    assert limited.data.limits == MediaLimits(min_side=12, seconds=0.2)
    opened = [open_sources(c, "train", tmp_path) for c in (config, limited)]
    assert index_key(opened[0], config.model.encoders) != index_key(
        opened[1], config.model.encoders
    )
    indices = [build_index(sources, config.model.encoders) for sources in opened]
    assert [i.bad.tolist() for i in indices] == [[], [0, 1]]
    assert indices[0].fingerprint() != indices[1].fingerprint()
    photos = opened[1]["photos"]
    with pytest.raises(BadSample, match="an image of 10 x 20 pixels has a side of less than 12"):
        photos.facts(0)
    assert photos.item(2, 0).shape == (16, 16, 3)
    # a file that has changed since its header was read is measured again when it is decoded
    if kind == "llava":
        (tmp_path / "2.png").write_bytes(picture(11, 20))
        with pytest.raises(
            (BadSample, BadMedia), match="an image of 11 x 20 pixels has a side of less than 12"
        ):
            open_sources(limited, "train", tmp_path)["photos"].item(2, 0)


def test_a_limit_that_nothing_can_be_within_is_one_line(capsys):
    ended = run(capsys, train.main, "tiny_omni", "data.limits.aspect=0.5", "--show")
    assert ended.code == 2
    assert ended.err.strip().endswith("data.limits.aspect=0.5: must be at least 1")
