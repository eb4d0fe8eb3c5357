"""The recipes for checkpoints train what they say, from folders as transformers saves them."""

from __future__ import annotations

import json
import re

import audio_folder
import jax
import pytest
from commands import run
from llava_folder import save_checkpoint, save_parts, save_questions
from started import ROOT

from mmjax import generate, train
from mmjax.config.loading import find_config, load
from mmjax.evaluate import evaluate
from mmjax.evaluate import main as evaluate_command
from mmjax.models.model import module_of

SMALL = (
    "training.steps=3",
    "training.precision=float32",
    "training.evaluate_every=0",
    "training.checkpoint_every=0",
    "schedule.warmup=1",
    "batch.size.count=8",
    "batch.shapes=1",
    "batch.rows.llm=1",
    "mesh.fsdp=1",
    "device=cpu",
    "data.workers=0",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("recipes")
    save_checkpoint(place / "llava")
    save_questions(place / "data", 16)
    save_parts(place)
    return place


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["llava_style", "llava_lora", "llava_alignment"])
def test_a_recipe_trains_what_it_says(place, recipe, tmp_path):
    given = {"checkpoint": place / "llava"}
    if recipe == "llava_alignment":
        given = {"tower": place / "tower", "llm": place / "llm", "image": "<image>"}
    given |= {"data": place / "data" / "data.json", "images": place / "data" / "images"}
    words = [f"{name}={value}" for name, value in given.items()]
    words += ["batch.rows.vision=1", *(["model.lora.llm.rank=4"] if recipe == "llava_lora" else [])]
    config = load(
        recipe, [*words, *SMALL, f"run={tmp_path / 'run'}", f"data.cache={place / 'cache'}"]
    )
    trainer = train.train(config, find_config(recipe), devices=jax.devices()[:1])
    trainable = trainer.executor.states[0].abstract.trainable
    modules = {
        module_of(tuple(key.key for key in path))
        for path, _ in jax.tree.leaves_with_path(trainable)
    }
    llm = {"llava_style": {"llm"}, "llava_lora": {"llm"}, "llava_alignment": set()}[recipe]
    assert modules == llm | {"vision.connector"}
    if recipe == "llava_lora":
        names = {tuple(key.key for key in path) for path, _ in jax.tree.leaves_with_path(trainable)}
        assert all("lora" in name for name in names if name[0] == "llm")
    losses = [
        line
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert len(losses) == 3


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    place = tmp_path_factory.mktemp("sounds")
    audio_folder.save_checkpoint(place / "qwen")
    audio_folder.save_clips(place / "data", 16)
    return place


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["speech.py", "llava_style", "llava_lora"])
def test_an_audio_checkpoint_is_trained_by_the_documented_config_and_the_recipes(
    recipe, sounds, tmp_path, capsys
):
    if recipe == "speech.py":
        documented = (ROOT / "docs" / "data_media.md").read_text()
        (tmp_path / recipe).write_text(
            re.search(r"<!-- file: speech.py -->\n```python\n(.*?)```", documented, re.S)[1]
        )
    named = str(tmp_path / recipe) if recipe == "speech.py" else recipe
    data = sounds / "data" / ("manifest.jsonl" if recipe == "speech.py" else "llava.json")
    words = [
        f"checkpoint={sounds / 'qwen'}",
        f"data={data}",
        f"audio={sounds / 'data' / 'clips'}",
        *SMALL,
    ]
    words += [f"test={data}"] if recipe == "speech.py" else []
    words += ["batch.rows.audio=2", *(["model.lora.llm.rank=4"] if recipe == "llava_lora" else [])]
    config = load(named, [*words, f"run={tmp_path / 'run'}", f"data.cache={sounds / 'cache'}"])
    train.train(config, find_config(named), devices=jax.devices()[:1])
    losses = [
        line
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert len(losses) == 3
    assert (
        config.model.encoders["audio"].frozen,
        config.model.encoders["audio"].connector.frozen,
    ) == (True, False)
    clip = str(next((sounds / "data" / "clips").iterdir()))
    ended = run(
        capsys, generate.main, str(tmp_path / "run"), "--audio", clip, "What?", "--max-tokens=4"
    )
    assert ended.code == 0, ended.err
    if recipe == "speech.py":
        ended = run(capsys, evaluate_command, str(tmp_path / "run"), "--json")
        assert ended.code == 0, ended.err
        assert json.loads(ended.out)["speech"]["wer"] > 0


@pytest.mark.exhaustive
def test_tiny_video_learns_where_digits_move_and_cannot_tell_from_shuffled_frames(tmp_path):
    run = tmp_path / "run"
    config = load("tiny_video", [f"run={run}", "device=cpu", "training.evaluate_every=0"])
    train.train(config, find_config("tiny_video"), devices=jax.devices()[:1])
    assert evaluate(run, "test")["exact_match_video"] >= 0.9
    shuffled = evaluate(run, "test", overrides=["data.sources.clips.arguments.shuffled=true"])
    assert shuffled["exact_match_video"] <= 0.5 + 0.1
