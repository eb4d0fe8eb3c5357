"""Commands on a model that also makes images, as a user runs them: trained, asked and scored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import TINY, run
from PIL import Image

from mmjax import evaluate, generate, train

TINY_DRAWING = str(Path(TINY).with_name("tiny_drawing.py"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """Six steps of a tiny model that answers and draws."""
    folder = tmp_path_factory.mktemp("drawn") / "run"
    train.main([TINY_DRAWING, f"run={folder}"])
    return folder


def test_losses_of_answers_and_of_images_are_logged_apart(drawn):
    records = [json.loads(line) for line in (drawn / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "image_loss/picture" in record and "gradient_norm" in record]
    assert len(steps) == 6
    assert all(0 < record["image_loss/picture"] < 20 and record["loss"] > 0 for record in steps)


def test_an_image_is_written_of_the_size_that_is_asked_for(drawn, tmp_path, capsys):
    words = (drawn, "draw 47", "--size", "8x16", "--steps", 2)
    ended = run(capsys, generate.main, *words, "--out", tmp_path / "one.png")
    assert (ended.code, ended.err) == (0, "")
    one = np.asarray(Image.open(tmp_path / "one.png"))
    assert one.shape == (8, 16)
    run(capsys, generate.main, *words, "--count", 3, "--out", tmp_path / "sheet.png")
    assert np.asarray(Image.open(tmp_path / "sheet.png")).shape == (2 * (8 + 2) + 2, 2 * (16 + 2) + 2, 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "8x15"), "--size 8x15: an image to be made of 8 x 15 pixels is not in whole patches of 2 x 2"),
        ((), "--size: the generator makes several sizes; give one as HEIGHTxWIDTH"),
        (("--size", "8x16", "--count", "0"), "--count=0: choose 1 or more"),
        (("--size", "8x16", "--out", "x.nothing"), "--out x.nothing: unknown file extension"),
    ],
)
def test_images_that_cannot_be_made_are_refused_in_one_line(drawn, tmp_path, capsys, words, said):
    ended = run(capsys, generate.main, drawn, "draw 4", "--steps", 1, "--out", tmp_path / "x.png", *words)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_the_images_of_a_split_are_judged_and_written_into_the_run(drawn):
    scores = evaluate.evaluate(drawn, "validation")
    assert 0 <= scores["drawn_as_asked"] <= 1
    assert scores["image_loss/picture"] > 0
    assert "exact_match_image" in scores
    assert [path.name for path in (drawn / "pictures").iterdir()] == ["validation-drawing-6.png"]
    assert set(evaluate.evaluate(drawn, "validation", swap="picture")) == {"step", "drawn_as_asked"}
