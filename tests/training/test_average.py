"""A run that keeps a moving average of its parameters evaluates, exports and resumes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY, run
from restarts import steps_of
from safetensors.numpy import load_file

from mmjax import export, train
from mmjax.config import MeshConfig
from mmjax.errors import UserError
from mmjax.models.layer_stacks import key_names
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings

WORDS = (
    TINY,
    "optimizer.ema=0.75",
    "training.evaluated=average",
    "training.steps=3",
    "training.checkpoint_every=1",
    "training.keep=3",
    "training.evaluate_every=0",
    "data.workers=0",
)


def parameters(folder: Path, step: int, evaluated: str) -> dict[tuple[str, ...], np.ndarray]:
    read = RunFolder(folder)
    model = Model.build(read.stored_config().model, jnp.float32)
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    layouts = parameter_shardings(model, mesh, ShardingRules())
    params = restore_parameters(read.checkpoints, step, model, layouts, evaluated)
    return {key_names(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def trained(runs: Path, capsys, *words: str) -> Path:
    ended = run(capsys, train.main, *WORDS, *words, f"run={runs}")
    assert ended.code == 0, ended
    return runs


@pytest.fixture
def averaged(tmp_path, capsys, monkeypatch) -> Path:
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:1])
    return trained(tmp_path / "run", capsys)


def assert_average(folder: Path) -> None:
    for step in (2, 3):
        average, before = (parameters(folder, n, "average") for n in (step, step - 1))
        for name, x in parameters(folder, step, "trained").items():
            wanted = 0.75 * before[name] + 0.25 * x
            np.testing.assert_allclose(average[name], wanted, rtol=1e-6, atol=1e-7)


def test_a_run_scores_and_exports_the_average_that_it_keeps(averaged, capsys):
    assert_average(averaged)
    of_average = json.loads((averaged / "test.json").read_text())
    (averaged / "test.json").unlink()
    trained(averaged, capsys, "--resume", "training.evaluated=trained")
    assert json.loads((averaged / "test.json").read_text()) != of_average
    average, last = (parameters(averaged, 3, name) for name in ("average", "trained"))
    for name, wanted in (("average", average), ("trained", last)):
        out = averaged.with_name(name)
        export.export(averaged, out, weights=name)
        written = load_file(out / "llm" / "model.safetensors")
        np.testing.assert_array_equal(written["embed.weight"], wanted["llm", "embed", "weight"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [("mesh.fsdp=2", "mesh.data=2"), ("units.llm.pipeline=2", "batch.microbatches=2")],
    ids=["fsdp", "units"],
)
@pytest.mark.parametrize("more", ["optimizer.offload=true", "optimizer.over_data=true", ""])
def test_on_any_layout_it_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    layout, more, tmp_path, capsys, monkeypatch
):
    count = 4 if "fsdp" in layout[0] else 2
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:count])
    words = [*layout, *filter(None, [more])]
    folder = trained(tmp_path / "run", capsys, *words)
    assert_average(folder)
    wanted = parameters(folder, 3, "average"), steps_of(folder)
    shutil.rmtree(folder / "checkpoints" / "3")
    shutil.rmtree(folder / "checkpoints" / "2")
    trained(folder, capsys, *words, "--resume")
    found = parameters(folder, 3, "average")
    for name, x in wanted[0].items():
        np.testing.assert_array_equal(found[name], x)
    assert steps_of(folder)[3]["loss"] == wanted[1][3]["loss"]


@pytest.mark.exhaustive
def test_a_run_without_an_average_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:1])
    words = (
        "optimizer.ema=0",
        "training.evaluated=trained",
        "training.steps=1",
        "schedule.warmup=0",
    )
    folder = trained(tmp_path / "run", capsys, *words)
    with pytest.raises(UserError, match="it has no moving average; its run has none"):
        export.export(folder, tmp_path / "out", weights="average")
