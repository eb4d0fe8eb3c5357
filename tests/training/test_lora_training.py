"""Training adapters: only they move, they go on where they stopped, and they begin from another run's parameters."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import TINY
from fine_tuning import LORA, fine_tune, losses, save_checkpoint, tuning

from mmjax.config import MeshConfig
from mmjax.config.loading import from_json, to_json
from mmjax.errors import UserError
from mmjax.models.layer_stacks import key_names
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.run_dir import RunFolder
from mmjax.runtime.saved_parameters import restore_parameters
from mmjax.runtime.state import parameter_shardings
from mmjax.train import train


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(source, tmp_path_factory) -> Path:
    return fine_tune(source, tmp_path_factory.mktemp("runs") / "lora", lora=LORA)


def parameters(run: Path, step: int) -> dict[tuple[str, ...], np.ndarray]:
    folder = RunFolder(run)
    model = Model.build(folder.read_config().model, jnp.float32)
    shardings = parameter_shardings(
        model, make_mesh(MeshConfig(), jax.devices()[:1]), ShardingRules()
    )
    params = restore_parameters(folder.checkpoints, step, model, shardings)
    return {key_names(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def test_adapters_alone_are_trained_at_their_own_rate(tuned):
    first, last = parameters(tuned, 1), parameters(tuned, 3)
    for path in first:
        assert (first[path] != last[path]).any() == ("lora" in path), path
    record = json.loads((tuned / "metrics.jsonl").read_text().splitlines()[0])
    assert record["learning_rate/llm.lora"] == pytest.approx(10 * record["learning_rate/llm"])


@pytest.mark.exhaustive
def test_the_first_loss_is_that_of_the_model_without_adapters(source, tuned, tmp_path):
    plain = fine_tune(source, tmp_path / "plain")
    assert losses(plain)[1] == losses(tuned)[1]
    assert losses(plain)[3] != losses(tuned)[3]


@pytest.mark.exhaustive
def test_a_run_with_adapters_goes_on_where_it_stopped_under_other_runs_of_layers(
    source, tuned, tmp_path
):
    stopped = shutil.copytree(tuned, tmp_path / "stopped")
    for step in ("2", "3"):
        shutil.rmtree(stopped / "checkpoints" / step)
    config = tuning(source, stopped, lora=LORA)
    config = replace(
        config,
        model=replace(config.model, llm=replace(config.model.llm, remat=("none", "full", "full"))),
    )
    train(config, Path(TINY), "resume", devices=jax.devices()[:1])
    assert losses(stopped)[3] == pytest.approx(losses(tuned)[3], rel=1e-6)
    one, other = parameters(tuned, 3), parameters(stopped, 3)
    a = ("llm", "layers", "runs", "0:3", "attention", "query", "lora", "a")
    np.testing.assert_allclose(other[(*a[:3], "1:3", *a[4:])], one[a][1:], rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_train_the_same_on_four_devices(source, tmp_path, dora):
    runs = {"one": (1, MeshConfig()), "four": (4, MeshConfig(1, fsdp=2, tensor=2))}
    for name, (devices, mesh) in runs.items():
        # Inputs are dropped in one of the cases.
        dropout = 0.0 if dora else 0.2
        lora = {key: replace(own, dora=dora, dropout=dropout) for key, own in LORA.items()}
        config = replace(tuning(source, tmp_path / name, lora=lora), mesh=mesh)
        # Adam divides a gradient that is but rounding by itself, so it would make of that a step of
        # full size.
        config = replace(config, optimizer=replace(config.optimizer, eps=1e-3))
        train(config, Path(TINY), devices=jax.devices()[:devices])
    one, four = (losses(tmp_path / name) for name in runs)
    learned = [
        np.abs(x).max()
        for path, x in parameters(tmp_path / "one", 3).items()
        if path[-2:] == ("lora", "b")
    ]
    assert min(learned) > 0
    assert list(four.values()) == pytest.approx(list(one.values()), rel=2e-6)


@pytest.mark.exhaustive
def test_adapters_may_begin_from_the_parameters_of_a_run_without(source, tuned, tmp_path):
    plain = fine_tune(source, tmp_path / "plain")
    config = replace(tuning(source, tmp_path / "second", lora=LORA), init_from=str(plain))
    train(config, Path(TINY), devices=jax.devices()[:1])
    before, after = parameters(plain, 3), parameters(tmp_path / "second", 3)
    assert all((after[path] == x).all() for path, x in before.items())
    assert set(after) > set(before)
    back = replace(tuning(source, tmp_path / "third"), init_from=str(tuned))
    with pytest.raises(
        UserError, match=r"that run has adapters and this model has none: .* mmjax\.export"
    ):
        train(back, Path(TINY), devices=jax.devices()[:1])


def test_a_config_with_adapters_is_stored_and_read_again(source, tmp_path):
    config = tuning(source, tmp_path / "run", lora=LORA)
    assert from_json(to_json(config)) == config
