"""Encoders with a copy beside each stage of the LLM: gradients and updates of one mesh, each parameter owned once."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest
from commands import TINY_MEDIA
from restarts import last
from restarts import steps_of as steps_of_run
from started import finish, launch, process_of, wait_until
from test_executor import (
    assert_same_gradients,
    assert_updates_of_one_mesh,
    config_of,
    deepstack_config_of,
    make_pipeline,
    steps_of,
)
from test_mixtures import mixture
from test_unit_runs import (
    assert_same_losses,
    assert_stages_and_one_mesh_go_on_from_each_other,
    go_back,
    together,
)
from tiny_run import one_shape

from mmjax.config import Config, Unit
from mmjax.config.training import unit_modules
from mmjax.models.model import restrict
from mmjax.runtime.executor import Executor, State
from mmjax.runtime.state import all_parameters, hyperparameters


def in_microbatches(config: Config, count: int) -> Config:
    return replace(config, batch=replace(config.batch, microbatches=count))


@pytest.mark.default_cases("two copies of both")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(one_shape(config_of("beside two", dropout=0.1)), id="two copies of both"),
        pytest.param(config_of("beside", dropout=0.1), id="both"),
        pytest.param(config_of("one beside", remat="full"), id="one of two"),
        pytest.param(
            config_of("beside", ("vision", "audio")), id="frozen, with trained connectors"
        ),
        pytest.param(
            config_of("beside", ("vision", "vision.connector")), id="one without a backward pass"
        ),
        pytest.param(config_of("beside, data", tied=False), id="data parallel"),
        pytest.param(config_of("beside, in parts"), id="in parts"),
        pytest.param(deepstack_config_of("beside"), id="a deepstack"),
        pytest.param(
            deepstack_config_of("beside, in parts", remat="full"), id="a deepstack in parts"
        ),
    ],
)
def test_encoders_beside_the_llm_have_the_gradients_of_one_mesh(config, tmp_path):
    pipeline = assert_same_gradients(in_microbatches(config, 6), tmp_path)
    assert pipeline.schedule == "nested"


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [12, 14])  # context and a reference; experts, and tokens divided
def test_copies_mix_with_every_layout_and_a_frozen_reference(seed, tmp_path):
    config, _, loss = mixture(seed)
    (llm,) = (unit for name, unit in config.units.items() if "llm" in unit_modules(name, unit))
    llm = replace(llm, modules=(), pipeline=2, cuts=())
    beside = {name: Unit(beside="llm") for name in ("vision", "audio")}
    assert_same_gradients(replace(config, units=beside | {"llm": llm}), tmp_path, "auto", loss)


@pytest.mark.exhaustive
def test_twenty_updates_are_those_of_one_mesh_and_every_copy_has_the_owners_bits(tmp_path):
    config = config_of("beside")
    config = replace(config, training=replace(config.training, clip=0.05, steps=20))
    pipeline = make_pipeline(config)
    state = assert_updates_of_one_mesh(config, pipeline, steps_of(config, tmp_path, 20))
    assert_copies_are_equal(pipeline, state)


def assert_copies_are_equal(pipeline: Executor, state: State) -> None:
    """Moments lie with the owner alone, and every copy has its parameters."""
    copied = 0
    for shared, copy in zip(pipeline.shared, state.copies, strict=True):
        assert not jax.tree.leaves(
            restrict(state.stages[shared.holder].trainable, shared.structure)
        )
        owned = restrict(all_parameters(state.stages[shared.owner]), shared.structure)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(owned), jax.device_get(copy))
        copied += len(jax.tree.leaves(copy))
    assert copied


@pytest.mark.exhaustive
def test_a_sample_of_another_copys_microbatch_that_is_not_finite_is_found(tmp_path):
    config = in_microbatches(config_of("beside"), 3)
    pipeline = make_pipeline(config)
    batches = list(steps_of(config, tmp_path, 1)[0])
    audio = batches[2].items["audio"]
    row = int(np.flatnonzero((audio.item >= 0).any(1))[0])
    values = audio.values.copy()
    values[row] = np.nan
    batches[2] = batches[2]._replace(
        items=batches[2].items | {"audio": audio._replace(values=values)}
    )
    put = [pipeline.put(batch, number) for number, batch in enumerate(batches)]
    state = pipeline.init(jax.random.key(0))
    state, _, report = pipeline.step(state, pipeline.zeros(), put, hyperparameters(config, 0))
    assert not bool(report.finite)
    assert_copies_are_equal(pipeline, state)
    found = pipeline.find_bad(state, put, hyperparameters(config, 0), None, [])
    assert set(found) <= set(batches[2].text.owner.ravel().tolist())
    assert set(found) & set(audio.owner[row].tolist())


def test_a_microbatchs_items_go_to_one_copy(tmp_path):
    config = in_microbatches(config_of("beside"), 2)
    pipeline = make_pipeline(config)
    batches = steps_of(config, tmp_path, 1)[0]
    for number, batch in enumerate(batches):
        put = pipeline.put(batch, number)
        having = {
            placed.name
            for placed, part in zip(pipeline.stages, put, strict=True)
            if "vision" in part.items
        }
        assert having == {f"vision copy {number}"}


@pytest.mark.exhaustive
def test_a_run_beside_the_llm_and_one_mesh_go_on_from_each_other(runs, capsys, monkeypatch):
    units = ("units.vision.beside=llm", "units.audio.beside=llm", "units.llm.pipeline=3")
    words = (TINY_MEDIA, "model.llm.layers=3")
    assert_stages_and_one_mesh_go_on_from_each_other(runs, capsys, monkeypatch, *words, units=units)


@pytest.mark.exhaustive
def test_four_processes_beside_each_other_are_killed_and_go_on_as_one_mesh_would_and_on_it(
    runs, monkeypatch
):
    words = (
        *(
            TINY_MEDIA,
            "model.llm.layers=4",
            "training.steps=8",
            "training.checkpoint_every=2",
            "training.keep=4",
        ),
        *("training.evaluate_every=0", "batch.microbatches=4"),
    )
    units = ("units.vision.beside=llm", "units.audio.beside=llm", "units.llm.pipeline=4")
    one, four = runs / "one", runs / "four"
    assert together(1, *words, f"run={one}", devices=1, monkeypatch=monkeypatch).code == 0
    expected = steps_of_run(one)
    launched = launch(4, *words, *units, f"run={four}", devices=1)
    wait_until(lambda: last(four) >= 3, launched)
    os.kill(process_of(four, 1), signal.SIGKILL)
    ended = finish(launched, 120)
    assert ended.code == 137
    assert "process 1 of this run's 4 (vision copy 1, audio copy 1, llm[1:2])" in ended.err
    ended = together(
        4, *words, *units, f"run={four}", "--resume", devices=1, monkeypatch=monkeypatch
    )
    assert ended.code == 0, ended
    assert_same_losses(steps_of_run(four), expected)
    assert [steps_of_run(four)[step]["batch"] for step in expected] == [
        r["batch"] for r in expected.values()
    ]
    for folder, processes, settings in ((four, 1, ("units={}",)), (one, 4, units)):
        go_back(folder, 8, 6)
        ended = together(
            processes,
            *words,
            f"run={folder}",
            "--resume",
            *settings,
            devices=1,
            monkeypatch=monkeypatch,
        )
        assert ended.code == 0, ended
        assert "at step 4" in ended.out
        assert_same_losses(steps_of_run(folder), expected)
