"""Runs beside quantised weights: they learn as with adapters alone, go on where they stopped, and answer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from commands import TINY
from fine_tuning import losses, save_checkpoint, tuning

from mmjax import export
from mmjax.config import LoraConfig, Samples
from mmjax.config.loading import find_config, load
from mmjax.errors import UserError
from mmjax.hf.families import from_hf
from mmjax.train import train

LORA = {"llm": LoraConfig(("llm.layers.*",), 16, 32.0)}
SIZES = {"hidden_size": 64, "intermediate_size": 128}
LEARNT, TUNED = 75, 250  # steps of the checkpoint, and of its adapters
TOLERANCE = 0.02


def quantized(source: Path, folder: Path, how: str):
    llm = replace(from_hf(source).llm, quantize=how)
    return tuning(source, folder, lora=LORA, llm=llm)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder, **SIZES)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["nf4", "fp8"])
def test_a_run_goes_on_where_it_stopped_under_other_stacks_and_begins_another_that_quantises_alike(
    how, source, tmp_path
):
    config = quantized(source, tmp_path / "run", how)
    train(config, Path(TINY), devices=jax.devices()[:1])
    stopped = shutil.copytree(tmp_path / "run", tmp_path / "stopped")
    for step in ("2", "3"):
        shutil.rmtree(stopped / "checkpoints" / step)
    llm = replace(config.model.llm, remat=("none", "full", "full"))
    again = replace(config, model=replace(config.model, llm=llm), run=str(stopped))
    train(again, Path(TINY), "resume", devices=jax.devices()[:1])
    assert losses(stopped)[3] == pytest.approx(losses(tmp_path / "run")[3], rel=1e-6)
    second = replace(config, run=str(tmp_path / "second"), init_from=str(tmp_path / "run"))
    train(second, Path(TINY), devices=jax.devices()[:1])
    assert losses(tmp_path / "second")[1] < losses(tmp_path / "run")[1]
    other = replace(quantized(source, tmp_path / "other", "int8"), init_from=str(tmp_path / "run"))
    with pytest.raises(
        UserError, match=r"that run quantises other weights than this model: .* mmjax\.export"
    ):
        train(other, Path(TINY), devices=jax.devices()[:1])


def accuracy(folder: Path) -> float:
    """The share of the test split's questions that a run answers in its own words."""
    scores = json.loads((folder / "test.json").read_text())
    return scores["exact_match_text"]


def learning(source: Path, folder: Path, steps: int, **changes):
    """The config of a run on the embedded texts from a checkpoint."""
    base = load("tiny_text")
    training = replace(
        base.training, steps=steps, checkpoint_every=0, evaluate_every=0, evaluate_samples=256
    )
    model = replace(from_hf(source), **changes)
    batch = replace(base.batch, size=Samples(24))
    return replace(base, model=model, training=training, batch=batch, run=str(folder))


@pytest.mark.exhaustive
def test_a_checkpoint_learns_beside_quantised_weights_as_beside_its_own(tmp_path):
    save_checkpoint(tmp_path / "random", **SIZES)
    path = find_config("tiny_text")
    train(
        learning(tmp_path / "random", tmp_path / "whole", LEARNT), path, devices=jax.devices()[:1]
    )
    export.export(tmp_path / "whole", tmp_path / "learnt")
    found = {"whole": accuracy(tmp_path / "whole")}
    for how in ("none", "nf4", "int8", "fp8"):
        llm = replace(from_hf(tmp_path / "learnt").llm, quantize=how)
        config = learning(tmp_path / "learnt", tmp_path / how, TUNED, lora=LORA, llm=llm)
        train(config, path, devices=jax.devices()[:1])
        found[how] = accuracy(tmp_path / how)
    assert found["none"] > found["whole"] + TOLERANCE
    assert abs(found["nf4"] - found["none"]) <= TOLERANCE
    assert abs(found["int8"] - found["none"]) <= TOLERANCE
    assert abs(found["fp8"] - found["none"]) <= TOLERANCE
