"""Commands on a model that also makes images, as a user runs them: trained, asked and scored."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import TINY_DRAWING, run
from llava_folder import save_tokenizer
from PIL import Image
from restarts import steps_of
from started import ROOT

sys.path.append(str(Path(__file__).parent / "data"))
from files_made import lines, picture, write

from mmjax import evaluate, generate, inspect, train
from mmjax.config.loading import load
from mmjax.console import percent
from mmjax.data.toy.drawing import drawings
from mmjax.report import report


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """Six steps of a tiny model that answers and draws."""
    folder = tmp_path_factory.mktemp("drawn") / "run"
    train.main([TINY_DRAWING, f"run={folder}"])
    return folder


def test_losses_of_answers_and_of_images_are_logged_apart(drawn):
    records = [json.loads(line) for line in (drawn / "metrics.jsonl").read_text().splitlines()]
    steps = [
        record for record in records if "image_loss/picture" in record and "gradient_norm" in record
    ]
    assert len(steps) == 6
    assert all(0 < record["image_loss/picture"] < 20 and record["loss"] > 0 for record in steps)


def test_an_image_is_written_of_the_size_that_is_asked_for(drawn, tmp_path, capsys):
    words = (drawn, "draw 47", "--size", "8x16", "--steps", 2)
    ended = run(capsys, generate.main, *words, "--out", tmp_path / "one.png")
    assert (ended.code, ended.err) == (0, "")
    one = np.asarray(Image.open(tmp_path / "one.png"))
    assert one.shape == (8, 16)
    run(capsys, generate.main, *words, "--count", 3, "--out", tmp_path / "sheet.png")
    assert np.asarray(Image.open(tmp_path / "sheet.png")).shape == (
        2 * (8 + 2) + 2,
        2 * (16 + 2) + 2,
        3,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--size", "8x15"),
            "--size 8x15: an image to be made of 8 x 15 pixels is not in whole patches of 2 x 2",
        ),
        ((), "--size: the generator makes several sizes; give one as HEIGHTxWIDTH"),
        (("--size", "8x16", "--count", "0"), "--count=0: choose 1 or more"),
        (("--size", "8x16", "--out", "x.nothing"), "--out x.nothing: unknown file extension"),
    ],
)
def test_images_that_cannot_be_made_are_refused_in_one_line(drawn, tmp_path, capsys, words, said):
    ended = run(
        capsys, generate.main, drawn, "draw 4", "--steps", 1, "--out", tmp_path / "x.png", *words
    )
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_the_images_of_a_split_are_judged_and_written_into_the_run(drawn):
    scores = evaluate.evaluate(drawn, "validation")
    assert 0 <= scores["drawn_as_asked"] <= 1
    assert scores["image_loss/picture"] > 0
    assert "exact_match_image" in scores
    sheet, picture = sorted((drawn / "pictures").iterdir())
    assert [sheet.name, picture.name] == ["validation-drawing-6.json", "validation-drawing-6.png"]
    told = json.loads(sheet.read_text())
    source = drawings("validation", held_out=24)
    assert told["prompts"] == [source.prompt(k) for k in range(24)]
    assert told["drawn_as_asked"] == scores["drawn_as_asked"]
    assert set(evaluate.evaluate(drawn, "validation", swap="picture")) == {"step", "drawn_as_asked"}

    page = report([drawn]).read_text()
    assert (
        f"validation/drawing after step 6: 24 images, {percent(told['drawn_as_asked'])} drawn as asked"
        in page
    )
    assert all(f">{prompt}</li>" in page for prompt in told["prompts"])
    assert "Loss of images: from" in page
    shown = re.search(r'<img class="picture sheet"[^>]*base64,([^"]*)"', page)[1]
    assert np.array_equal(
        np.asarray(Image.open(io.BytesIO(base64.b64decode(shown)))), np.asarray(Image.open(picture))
    )
    picture.unlink()  # an evaluation is under way
    assert "after step 6" not in report([drawn]).read_text()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "model.generators.picture.patch=3",
            "8 x 8 pixels is not in whole patches of 3 x 3; prepare images",
        ),
        (
            "model.generators.picture.min_patches=64",
            "8 x 8 pixels is 16 patches, fewer than the generator's min_patches",
        ),
        (
            "model.generators.picture.weights=/nowhere",
            "/nowhere is no folder; give the folder of a Hugging Face",
        ),
        (
            "model.generators.picture.flow.weight=nan",
            "flow.weight: got 'nan'; expected a finite float",
        ),
        (
            "data.sources.drawing.arguments.generator=pen",
            "an item for module 'pen'; the model's encoders and generators:",
        ),
    ],
)
def test_a_run_that_cannot_draw_is_refused_in_one_line(word, said, tmp_path, capsys):
    ended = run(capsys, train.main, TINY_DRAWING, f"run={tmp_path / 'run'}", word)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1


def test_a_logged_step_is_made_again_with_its_images(drawn, tmp_path, capsys):
    ended = run(capsys, inspect.main, drawn, "--step", 3, f"--out={tmp_path}")
    assert ended.code == 0, ended.err
    assert "as it was logged" in ended.out
    assert "picture" in ended.out


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.data=4",),
        ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
        ("mesh.data=2", "mesh.context=2"),
    ],
)
def test_a_run_goes_on_over_other_devices_with_the_same_images_noise_and_losses(
    drawn, mesh, tmp_path
):
    """Of eight steps three quarters are made again, on a mesh of their own."""
    words = ("training.evaluate_every=0", "training.keep=4", "training.steps=8")
    train.main([TINY_DRAWING, f"run={tmp_path / 'eight'}", *words])
    other = shutil.copytree(tmp_path / "eight", tmp_path / "other")
    for step in (4, 6, 8):
        shutil.rmtree(other / "checkpoints" / str(step))
    devices = jax.devices()[: math.prod(int(word.split("=")[1]) for word in mesh)]
    train.train(
        load(TINY_DRAWING, [f"run={other}", *words, *mesh]), Path(TINY_DRAWING), "resume", devices
    )
    found, wanted = steps_of(other), steps_of(tmp_path / "eight")
    assert list(found) == list(wanted) == list(range(1, 9))
    for step, record in wanted.items():
        assert found[step]["samples"] == record["samples"]
        for loss in ("loss", "image_loss/picture"):
            assert found[step][loss] == pytest.approx(record[loss], rel=1e-5 if step < 6 else 1e-4)


@pytest.mark.exhaustive
def test_pairs_stories_and_questions_of_one_chat_file_are_trained_on_made_and_judged(
    tmp_path, capsys
):
    """The records of docs/data_generation.md, and one whose image is cut off."""
    (records,) = re.findall(
        r"```json\n(\{.*?)```", (ROOT / "docs" / "data_generation.md").read_text(), re.DOTALL
    )
    save_tokenizer(tmp_path / "chat")
    images = {
        "cat.png": picture(16, 24, 90),
        "sea.png": picture(40, 20, 200),
        "cut.png": picture(9, 9)[:-20],
    }
    write(tmp_path, images)
    pair, story, question, redrawn = map(json.loads, records.splitlines())
    lines(
        tmp_path / "train.jsonl", [pair, story, question, redrawn, pair | {"image": "cut.png"}] * 5
    )
    lines(tmp_path / "test.jsonl", [pair, story, question, redrawn])
    resized = ("images=fixed_size", "images.resize=8,8", "images.crop=8,8")
    words = (
        "model.llm.vocab=320",
        *(
            f"model.{module}.{change}"
            for module in ("encoders.vision", "generators.picture")
            for change in resized
        ),
        f"data.chat.folder={tmp_path / 'chat'}",
        "data.chat.placeholders.image.written=<image>",
        "data.sources={}",
        "data.sources.mine=llava",
        *(
            f"data.sources.mine.{key}={tmp_path / name}.jsonl"
            for key, name in (("path", "train"), ("test", "test"))
        ),
        f"data.cache={tmp_path / 'cache'}",
        "data.max_bad_share=0.5",
    )
    training = ("training.steps=4", "training.evaluate_every=0")
    ended = run(capsys, train.main, TINY_DRAWING, f"run={tmp_path / 'run'}", *words, *training)
    assert ended.code == 0, ended.err
    assert re.search(
        r"left out mine\[(4|9|14|19|24)\], which cannot be used: item 0 \(picture\): .*: truncated PNG",
        ended.out,
    )
    assert all(record["image_loss/picture"] > 0 for record in steps_of(tmp_path / "run").values())

    asked = (
        tmp_path / "run",
        "Draw a cat.",
        "--size",
        "8x8",
        "--steps",
        2,
        "--out",
        tmp_path / "cat.png",
    )
    assert run(capsys, generate.main, *asked).code == 0
    assert Image.open(tmp_path / "cat.png").size == (8, 8)
    scores = evaluate.evaluate(tmp_path / "run")
    assert scores["image_loss/picture"] > 0
    assert scores["samples"] > 0
    sheet = json.loads((tmp_path / "run" / "pictures" / "test-mine-4.json").read_text())
    assert [prompt.count("<picture>") for prompt in sheet["prompts"]] == [0, 0, 1, 0]
    assert ["a cat swam" in prompt for prompt in sheet["prompts"]] == [False, False, True, False]
    assert "<vision>" in sheet["prompts"][3]
