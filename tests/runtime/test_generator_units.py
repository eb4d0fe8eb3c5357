"""Generators behind the LLM as units more: gradients are those of one program, and go no further than is wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import TINY, run
from drawing import PICTURE, UNET, drawing_config
from restarts import steps_of as steps_of_run
from started import finish, launch
from test_executor import assert_same_gradients, make_pipeline, steps_of
from test_pipeline_processes import SHORT
from test_pipeline_processes import assert_same_gradients as assert_gradients_of_runs
from test_unit_runs import assert_stages_and_one_mesh_go_on_from_each_other, go_back
from tiny_run import make_executor

from mmjax.autotune.compile_run import compile_run
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.run_time import simulate_stages, time_stages
from mmjax.config import Config, FunctionSource, MeshConfig, NoGrouping, Samples, Unit
from mmjax.config.validation import validate
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.plan import main as plan_main
from mmjax.planning.hardware import Rates, parse_cluster
from mmjax.planning.remat import MemoryLimit
from mmjax.planning.speed import Speed
from mmjax.runtime.device_batch import ProcessReport
from mmjax.runtime.state import hyperparameters
from mmjax.runtime.units import units_topology

TINY_DRAWING = str(Path(TINY).with_name("tiny_drawing.py"))
APART = {"vision": Unit(), "llm": Unit(pipeline=2), "picture": Unit()}
UNITS = {
    "one stage": APART,
    "two stages": {"vision": Unit(), "llm": Unit(), "picture": Unit(pipeline=2)},
    "unequal ranks": {
        "vision": Unit(data=2),
        "llm": Unit(fsdp=2),
        "picture": Unit(data=2, pipeline=2),
    },
    "with the llm": {
        "vision": Unit(),
        "llm": Unit(modules=("llm", "picture"), pipeline=2, tensor=2),
    },
    "interleaved": {
        "vision": Unit(),
        "llm": Unit(pipeline=2, virtual=2),
        "picture": Unit(pipeline=2),
    },
    "rows over tensor and context": {
        "vision": Unit(context=2),
        "llm": Unit(fsdp=2),
        "picture": Unit(tensor=2, encoders="data", pipeline=2),
    },
    "rows over context": {
        "vision": Unit(),
        "llm": Unit(tensor=2),
        "picture": Unit(context=2, pipeline=2),
    },
    "context before it": {
        "vision": Unit(),
        "llm": Unit(context=2, pipeline=2),
        "picture": Unit(data=2),
    },
    "tokens divided": {
        "vision": Unit(),
        "llm": Unit(tensor=2, sequence_parallel="on"),
        "picture": Unit(tensor=2, sequence_parallel="overlap", pipeline=2),
    },
    # Of two generators, as `two_generators` makes them.
    "a unit each": {"vision": Unit(), "llm": Unit(), "picture": Unit(pipeline=2), "sketch": Unit()},
    "one beside the llm": {
        "vision": Unit(),
        "llm": Unit(modules=("llm", "sketch"), pipeline=2),
        "picture": Unit(pipeline=2),
    },
    "both beside the llm": {
        "vision": Unit(),
        "llm": Unit(modules=("llm", "picture", "sketch"), pipeline=2, tensor=2),
    },
    "one unit of unequal ranks": {
        "vision": Unit(),
        "llm": Unit(fsdp=2, pipeline=2),
        "drawn": Unit(modules=("picture", "sketch"), data=2),
    },
    "two behind chunks": APART | {"llm": Unit(pipeline=2, virtual=2), "sketch": Unit(pipeline=2)},
}


def config_of(units: str, frozen: Sequence[str] = (), **changes: Any) -> Config:
    """The tiny model that draws, with four LLM layers, on these units."""
    config = drawing_config(units=UNITS[units])
    generator = replace(PICTURE, remat="none", **changes)
    vision = config.model.encoders["vision"]

    def part(name: str, module: Any) -> Any:
        connector = replace(module.connector, frozen=f"{name}.connector" in frozen)
        return replace(module, frozen=name in frozen, connector=connector)

    model = replace(
        config.model,
        llm=replace(config.model.llm, layers=4, frozen="llm" in frozen, remat="none"),
        encoders={"vision": part("vision", replace(vision, remat="none"))},
        generators={"picture": part("picture", generator)},
    )
    return replace(config, model=model)


def two_generators(units: str) -> Config:
    """The config with another generator, whose images another source has."""
    config = config_of(units)
    sketch = replace(PICTURE, remat="none", width=16, condition_width=16)
    source = FunctionSource(
        "mmjax.data.toy.drawing:drawings", {"samples": 300, "generator": "sketch", "seed": 1}
    )
    return replace(
        config,
        data=replace(config.data, sources=config.data.sources | {"sketching": source}),
        batch=replace(config.batch, rows=config.batch.rows | {"sketch": 2}),
        model=replace(config.model, generators=config.model.generators | {"sketch": sketch}),
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("units", "schedule"),
    [
        ("a unit each", "1f1b"),
        ("a unit each", "eager"),
        ("a unit each", "gpipe"),
        ("one beside the llm", "1f1b"),
        ("one beside the llm", "eager"),
        ("both beside the llm", "gpipe"),
        ("one unit of unequal ranks", "1f1b"),
        ("two behind chunks", "auto"),
    ],
)
def test_gradients_of_two_generators_are_those_of_one_program(units, schedule, tmp_path):
    config = two_generators(units)
    validate(config)
    pipeline = assert_same_gradients(config, tmp_path, schedule)
    losses = [tower for placed in pipeline.stages for tower in placed.stage.losses]
    assert sorted(losses) == ["llm", "picture", "sketch"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("units", "schedule"),
    [
        ("one stage", "gpipe"),
        ("one stage", "eager"),
        ("two stages", "1f1b"),
        ("unequal ranks", "1f1b"),
        ("with the llm", "1f1b"),
        ("interleaved", "auto"),
        ("rows over tensor and context", "1f1b"),
        ("rows over context", "1f1b"),
        ("context before it", "1f1b"),
        ("tokens divided", "1f1b"),
    ],
)
def test_gradients_are_those_of_one_program(units, schedule, tmp_path):
    assert_same_gradients(config_of(units), tmp_path, schedule)


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", ["one stage", "with the llm"])
def test_a_unet_is_one_stage(units, tmp_path):
    config = config_of(units)
    assert_same_gradients(
        replace(config, model=replace(config.model, generators={"picture": UNET})), tmp_path
    )


CONDITION, IMAGES = "picture.1.condition", "picture.1.images"
CONNECTORS = ("vision.connector", "picture.connector")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("frozen", "backward", "edges"),
    [
        # MMScale's settings, connectors trained: queries too, so that the LLM always passes
        # gradients on.
        (
            ("vision", "llm", "picture"),
            "vision llm picture[0:1] picture[1:2]",
            "vision picture picture.1 condition",
        ),
        (
            ("vision", "picture"),
            "vision llm picture[0:1] picture[1:2]",
            "vision picture picture.1 condition",
        ),
        (
            ("vision", "llm"),
            "vision llm picture[0:1] picture[1:2]",
            "vision picture picture.1 condition images",
        ),
        (("vision", "llm", *CONNECTORS), "picture[0:1] picture[1:2]", "picture.1 condition images"),
        (
            ("llm", "picture", *CONNECTORS),
            "vision llm picture[0:1] picture[1:2]",
            "vision picture picture.1 condition",
        ),
        (
            ("vision", "llm", "picture", "vision.connector"),
            "llm picture[0:1] picture[1:2]",
            "picture picture.1 condition",
        ),
        (("vision", "llm", "picture", *CONNECTORS), "", ""),
    ],
    ids=[
        "connectors",
        "llm",
        "generator",
        "generator alone",
        "encoder",
        "all but its connector",
        "nothing",
    ],
)
def test_gradients_go_where_one_is_wanted(frozen, backward, edges, tmp_path):
    config = config_of("two stages", frozen)
    pipeline = assert_same_gradients(config, tmp_path) if backward else make_pipeline(config)
    runs = [
        stage.name
        for stage, p in zip(pipeline.stages, pipeline.programs, strict=True)
        if p.has_backward
    ]
    assert runs == backward.split()
    named = edges.replace("condition", CONDITION).replace("images", IMAGES).split()
    assert sorted(name for p in pipeline.programs for name in p.gradient_inputs) == sorted(named)


@pytest.mark.exhaustive
def test_microbatches_without_images_to_make_are_part_of_a_step(tmp_path):
    config = config_of("two stages")
    batch = replace(config.batch, size=Samples(12), microbatches=6, grouping=NoGrouping(), shapes=4)
    config = replace(config, batch=batch)
    (batches,) = steps_of(config, tmp_path, 1)
    images = [bool((batch.items["picture"].item >= 0).any()) for batch in batches]
    assert set(images) == {True, False}
    assert_same_gradients(config, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", ["two stages", "with the llm"])
def test_updates_and_reports_are_those_of_one_program(units, tmp_path):
    config = config_of(units)
    steps = steps_of(config, tmp_path, 4)
    one, pipeline = make_executor(config, MeshConfig(1)), make_pipeline(config)
    state, accumulated = one.init(jax.random.key(0)), one.zeros()
    staged, sums = pipeline.init(jax.random.key(0)), pipeline.zeros()
    for number, batches in enumerate(steps):
        hyper = hyperparameters(config, number)
        # One sample with an image could not be read.
        owner = batches[0].items["picture"].owner
        reports = ProcessReport(unreadable=[int(owner[batches[0].items["picture"].item >= 0][0])])
        noise = np.array([0, number], np.uint32)
        put = [one.put(batch) for batch in batches]
        state, accumulated, expected = one.step(state, accumulated, put, hyper, reports, noise)
        put = [pipeline.put(batch) for batch in batches]
        staged, sums, report = pipeline.step(staged, sums, put, hyper, reports, noise)
        np.testing.assert_allclose(
            report.losses.images["picture"], expected.losses.images["picture"], rtol=1e-5
        )
        assert report.losses.images["picture"][1] < sum(
            (b.items["picture"].item >= 0).sum() for b in batches
        )
        np.testing.assert_allclose(report.losses.loss.sum(), expected.losses.loss.sum(), rtol=1e-5)
        np.testing.assert_allclose(report.gradient_norm, expected.gradient_norm, rtol=1e-4)
        assert bool(report.finite & report.agreed)
        assert int(report.unreadable[0]) == reports.unreadable[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("llm", ["pipeline", "context"])
def test_a_process_for_every_stage_has_the_gradients_of_one_mesh_which_goes_on(
    llm, runs, monkeypatch
):
    monkeypatch.setenv("MMJAX_CHECK_TRANSFERS", "1")
    words = (TINY_DRAWING, *SHORT, "training.evaluate_every=0", "batch.microbatches=2")
    words = (*words, "model.llm.layers=2", "model.generators.picture.layers=2")
    one, staged = runs / f"one for {llm}", runs / f"staged by {llm}"
    ended = finish(launch(1, *words, f"run={one}", devices=1))
    assert ended.code == 0, ended
    units = ("units.vision.data=1", f"units.llm.{llm}=2", "units.picture.pipeline=2")
    ended = finish(launch(5, *words, *units, f"run={staged}", devices=1))
    assert ended.code == 0, ended
    assert "; 0 programs compiled after the start" in ended.out
    assert_gradients_of_runs(staged, one)
    assert_same_images(staged, one)
    # On from step 1 on one mesh, and from step 2 with the generator on the LLM's devices.
    go_back(staged, 3, 2)
    assert finish(launch(1, *words, f"run={staged}", "--resume", "units={}", devices=1)).code == 0
    assert_same_images(staged, one)
    go_back(staged, 3)
    units = ("units.vision.data=1", "units.llm.modules=llm,picture", "units.llm.data=2")
    ended = finish(launch(1, *words, *units, f"run={staged}", "--resume", devices=3))
    assert ended.code == 0, ended
    assert_same_images(staged, one)


def assert_same_images(run: Path, expected: Path) -> None:
    wanted = steps_of_run(expected)
    assert list(wanted) == [1, 2, 3]
    for step, record in steps_of_run(run).items():
        for key in ("loss", "image_loss/picture"):
            assert record[key] == pytest.approx(wanted[step][key], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "units",
    [
        "unequal ranks",
        "with the llm",
        "unet",
        "rows over tensor and context",
        "context before it",
        "a unit each",
        "one beside the llm",
    ],
)
def test_every_stage_is_planned_and_compiled_ahead(units, tmp_path):
    two = units in ("a unit each", "one beside the llm")
    config = two_generators(units) if two else config_of("one stage" if units == "unet" else units)
    if units == "unet":
        config = replace(config, model=replace(config.model, generators={"picture": UNET}))
    assert_planned_as_compiled(config, tmp_path)


def assert_planned_as_compiled(config: Config, folder: Path) -> None:
    """The bytes of every stage are about those that the compiler counts, and its passes take time."""
    index = build_index(open_sources(config, "train", folder), config.model.item_modules)
    layout = make_planner(
        index, config, [1.0] * len(config.data.sources), units_topology(config.units)
    )[1]
    speed = Speed(Rates(1e9, 1e9, 1e9))
    plan = plan_run(config, layout, speed, MemoryLimit(math.inf))
    plans = time_stages(config, layout, plan, parse_cluster("h100x8"), speed).stages
    timeline = simulate_stages(config, plans)
    assert timeline.in_flight.tolist() == [plan.in_flight for plan in plans]
    programs = compile_run(config, layout, plan, jax.devices())
    for plan in plans:
        assert plan.forward > 0
        assert plan.backward > plan.forward or config.loss.repeats_forward
        compiled = max(program.bytes for program in programs[plan.name].values())
        assert 0.6 < plan.bytes / compiled < 1.7, (plan.name, plan.bytes / compiled, plan.memory)


SKETCH = "model.generators.sketch"
TWO_GENERATORS = (
    "data.sources.sketching=function",
    "data.sources.sketching.function=mmjax.data.toy.drawing:drawings",
    *(
        f"data.sources.sketching.arguments.{key}={value}"
        for key, value in (("samples", 96), ("held_out", 24))
    ),
    "data.sources.sketching.arguments.generator=sketch",
    f"{SKETCH}=diffusion_transformer",
    *(
        f"{SKETCH}.{key}={value}"
        for key, value in (("layers", 2), ("width", 16), ("heads", 2), ("mlp_width", 32))
    ),
    *(
        f"{SKETCH}.{key}={value}"
        for key, value in (("condition_width", 16), ("queries", 4), ("grid", 4))
    ),
    f"{SKETCH}.latents=pixels",
    f"{SKETCH}.latents.channels=1",
    "batch.rows.sketch=1",
)


@pytest.mark.exhaustive
def test_a_run_of_two_generators_has_the_losses_of_one_mesh_and_each_goes_on_from_the_other(
    runs, capsys, monkeypatch
):
    words = (TINY_DRAWING, *TWO_GENERATORS)
    units = ("units.llm.modules=llm,vision,picture", "units.sketch.pipeline=2")
    folder = assert_stages_and_one_mesh_go_on_from_each_other(
        runs, capsys, monkeypatch, *words, units=units
    )
    for step, record in steps_of_run(folder).items():
        wanted = steps_of_run(runs / "on_1")[step]
        for key in ("image_loss/picture", "image_loss/sketch"):
            assert record[key] == pytest.approx(wanted[key], rel=1e-4)
    planned = run(capsys, plan_main, *words, *units, "cluster=h100x1x3")
    assert planned.code == 0, planned
    assert "sketch[1:2]" in planned.out
