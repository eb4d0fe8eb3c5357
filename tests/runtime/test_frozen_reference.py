"""The frozen reference of DPO and GRPO, the model without its adapters, in pipelines: the gradients of one mesh."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from commands import run
from restarts import steps_of
from started import finish, launch
from test_executor import (
    assert_gradients_of_one_mesh,
    assert_same_gradients,
    config_of,
    deepstack_config_of,
    fill_adapters,
)
from test_generator_units import assert_planned_as_compiled
from test_mixed_stages import CHAIN, make_pipeline
from test_unit_runs import assert_same_losses, assert_stages_and_one_mesh_go_on_from_each_other
from tiny_run import load_steps, one_shape, with_answers, worst_leaf

from mmjax import train
from mmjax.config import Config, EmbeddedSource, Layout, LoraConfig, Samples, Unit
from mmjax.config.losses import Dpo, Grpo
from mmjax.models.stage import REFERENCE

DPO, GRPO = Dpo(0.5), Grpo(beta=0.5)
LLM, VISION, CONNECTOR = "llm.*.attention.*", "vision.*.attention.*", "audio.connector.*"
FROZEN = ("llm", "vision", "audio", "vision.connector", "audio.connector")
RUN = (
    "tiny_dpo",
    "loss.reference=adapters_off",
    "model.lora.all.layers=llm.*",
    "model.encoders.vision.frozen=true",
    "model.encoders.vision.connector.frozen=true",
    "batch.size.count=16",
)
UNITS = ("units.vision.data=1", "units.llm.pipeline=2")
TWO = [
    (Layout(), [("audio", 0, 2), ("vision", 0, 2), ("llm", 0, 2)]),
    (Layout(), [("llm", 2, 4)]),
]


def adapted(config: Config, *layers: str) -> Config:
    """The config with nothing trained but adapters beside these layers."""
    lora = {"adapters": LoraConfig(layers, 4)}
    return one_shape(replace(config, model=replace(config.model, lora=lora)))


def config_with(*layers: str, units: str = "by module", **changes: object) -> Config:
    return adapted(config_of(units, FROZEN, **changes), *layers)


def test_a_text_model_in_stages_with_context_has_the_gradients_of_one_mesh(tmp_path):
    config = config_with("llm.*.attention.query")
    source = EmbeddedSource(modalities=("text",), samples=100)
    config = replace(
        config,
        model=replace(config.model, llm=replace(config.model.llm, layers=2), encoders={}),
        data=replace(config.data, sources={"embedded": source}),
        batch=replace(config.batch, rows={"llm": 1}, size=Samples(8), microbatches=2),
        units={"llm": Unit(pipeline=2, context=2)},
    )
    pipeline = assert_same_gradients(config, tmp_path, loss=Dpo(0.5, "sigmoid_norm"))
    assert pipeline.stages[1].stage.inputs == ("llm.1", "llm.1" + REFERENCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("plan", "layers", "loss", "twins"),
    [
        pytest.param(TWO, (LLM,), DPO, "llm.2", id="two stages"),
        pytest.param(TWO, (LLM, VISION), GRPO, "llm.2", id="two stages, two towers"),
        pytest.param(CHAIN, (LLM,), GRPO, "llm.1 llm.3", id="four stages"),
        pytest.param(
            CHAIN, (LLM, VISION), DPO, "vision.1 llm.1 llm.3", id="four stages, a cut encoder"
        ),
        pytest.param(CHAIN, (CONNECTOR,), DPO, "llm.1 llm.3", id="four stages, a connector"),
    ],
)
def test_mixed_stages_have_the_gradients_of_one_mesh(plan, layers, loss, twins, tmp_path):
    config = config_with(*layers)
    batches = with_answers(load_steps(config, tmp_path, 1)[0][:2], loss)
    config = replace(config, loss=loss)
    pipeline = make_pipeline(config, plan)
    assert_gradients_of_one_mesh(config, pipeline, batches, batches)
    sent = [
        name
        for placed in pipeline.stages
        for name in placed.stage.outputs
        if name.endswith(REFERENCE)
    ]
    assert sent == [name + REFERENCE for name in twins.split()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("units", "layers", "loss", "schedule"),
    [
        ("by module", (LLM, VISION), DPO, "eager"),
        ("all in stages", (LLM,), GRPO, "gpipe"),
        ("unequal ranks", (LLM, CONNECTOR), GRPO, "auto"),
        ("interleaved", (LLM, VISION), DPO, "auto"),
        ("context", (LLM, VISION), DPO, "auto"),
    ],
)
def test_gradients_are_those_of_one_mesh_on_any_units(units, layers, loss, schedule, tmp_path):
    assert_same_gradients(config_with(*layers, units=units), tmp_path, schedule, loss)


@pytest.mark.exhaustive
def test_a_deepstack_with_adapters_has_twins_of_all_that_it_sends(tmp_path):
    config = adapted(deepstack_config_of("deep", frozen=FROZEN), LLM, VISION)
    pipeline = assert_same_gradients(config, tmp_path, loss=DPO)
    edges = {name for placed in pipeline.stages for name in placed.stage.outputs}
    twins = {"vision", "vision.2", *(f"vision.deeper.{n}" for n in range(3)), "llm.1"}
    assert {name for name in edges if name.endswith(REFERENCE)} == {
        name + REFERENCE for name in twins
    }
    assert not {
        name
        for program in pipeline.programs
        for name in program.gradient_inputs
        if name.endswith(REFERENCE)
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", [DPO, GRPO], ids=["dpo", "grpo"])
def test_without_the_reference_gradients_are_others(loss, tmp_path):
    config = config_with(LLM)
    batches = with_answers(load_steps(config, tmp_path, 1)[0][:2], loss)
    gradients = []
    for reference in ("adapters_off", "none"):
        changed = replace(config, loss=replace(loss, reference=reference))
        pipeline = make_pipeline(changed, TWO)
        run = pipeline.gradients(
            fill_adapters(pipeline.init(jax.random.key(0))),
            pipeline.zeros(),
            [pipeline.put(batch) for batch in batches],
            {"llm": np.float32(1)},
            None,
        )
        gradients.append(jax.device_get([sums.gradients for sums in run.sums]))
    assert worst_leaf(*gradients)[0] > 0.1


@pytest.mark.exhaustive
def test_every_stage_is_planned_as_compiled(tmp_path):
    assert_planned_as_compiled(replace(config_with(LLM, VISION), loss=DPO), tmp_path)


@pytest.mark.exhaustive
def test_a_run_in_stages_has_the_losses_of_one_mesh_and_each_goes_on_from_the_other(
    runs, capsys, monkeypatch
):
    assert_stages_and_one_mesh_go_on_from_each_other(runs, capsys, monkeypatch, *RUN, units=UNITS)


@pytest.mark.exhaustive
def test_a_process_for_every_stage_passes_the_reference_on(runs, capsys, monkeypatch):
    monkeypatch.setenv("MMJAX_CHECK_TRANSFERS", "1")
    words = (
        *RUN,
        "model.lora.more.layers=vision.layers.*.query",
        "training.steps=2",
        "batch.microbatches=2",
    )
    words = (*words, "training.evaluate_every=0", "schedule.warmup=0", "data.workers=0")
    monkeypatch.setattr("mmjax.training.loop.choose_devices", lambda device: jax.devices()[:1])
    ended = run(capsys, train.main, *words, f"run={runs}/one")
    assert ended.code == 0, ended
    ended = finish(launch(3, *words, *UNITS, f"run={runs}/staged", devices=1))
    assert ended.code == 0, ended
    assert_same_losses(steps_of(runs / "staged"), steps_of(runs / "one"))
