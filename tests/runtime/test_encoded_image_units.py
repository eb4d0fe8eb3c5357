"""Images that a VAE encodes in the step of a pipeline, other generators beside: gradients and losses of one mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest
from commands import run
from drawing import PICTURE
from test_encoded_images import encoding_config, encoding_words
from test_executor import assert_same_gradients
from test_generator_units import assert_planned_as_compiled
from test_unit_runs import assert_stages_and_one_mesh_go_on_from_each_other

from mmjax import generate
from mmjax.config import Config, FunctionSource, Unit
from mmjax.config.model import with_changes
from mmjax.config.validation import validate

UNITS = {
    "whole": {"llm": Unit(), "picture": Unit()},
    "two generators": {"llm": Unit(), "picture": Unit(pipeline=2), "sketch": Unit()},
    "three stages": {"llm": Unit(), "picture": Unit(pipeline=3)},
    "unequal ranks": {"llm": Unit(fsdp=2), "picture": Unit(data=2, pipeline=2)},
    "with the llm": {"llm": Unit(modules=("llm", "picture"), pipeline=2)},
}


def with_sketches(config: Config) -> Config:
    """The config with another generator, of small images, which another source has."""
    source = FunctionSource(
        "mmjax.data.toy.drawing:drawings", {"samples": 20, "generator": "sketch"}
    )
    generators = config.model.generators | {
        "sketch": replace(PICTURE, width=16, condition_width=16)
    }
    return replace(
        config,
        data=replace(config.data, sources=config.data.sources | {"sketches": source}),
        batch=replace(config.batch, rows=config.batch.rows | {"sketch": 2}, microbatches=1),
        model=replace(config.model, generators=generators),
    )


@pytest.mark.default_cases("two generators-transformer")
@pytest.mark.parametrize(
    ("units", "kind"),
    [
        ("whole", "transformer"),
        ("whole", "unet"),
        ("two generators", "transformer"),
        ("three stages", "transformer"),
        ("unequal ranks", "transformer"),
        ("with the llm", "transformer"),
        ("with the llm", "unet"),
    ],
)
def test_gradients_are_those_of_one_mesh(units, kind, tmp_path):
    config = encoding_config(tmp_path, kind)
    layers = {"picture": {"layers": 3}} if kind == "transformer" else {}
    config = replace(config, model=with_changes(config.model, layers), units=UNITS[units])
    config = replace(
        config, batch=replace(config.batch, rows={"llm": 2, "picture": 2}, microbatches=2)
    )
    config = with_sketches(config) if units == "two generators" else config
    validate(config)
    pipeline = assert_same_gradients(config, tmp_path)
    sent = {
        name
        for placed in pipeline.stages
        for name in placed.stage.outputs
        if name.endswith(".clean")
    }
    assert sent == (set() if units in ("whole", "with the llm") else {"picture.clean"})
    assert not sent & pipeline.programs[0].trained


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", ["whole", "three stages"])
def test_every_stage_is_planned_as_compiled(units, tmp_path):
    config = encoding_config(tmp_path, "transformer")
    config = replace(
        config, model=with_changes(config.model, {"picture": {"layers": 3}}), units=UNITS[units]
    )
    assert_planned_as_compiled(config, tmp_path)


@pytest.mark.exhaustive
def test_a_run_in_stages_has_the_losses_of_one_mesh_goes_on_on_it_and_draws(
    runs, capsys, monkeypatch
):
    words = [word for word in encoding_words(runs, "transformer") if not word.endswith("test=")]
    words += ["model.generators.picture.layers=2", "data.max_bad_share=0.5"]
    units = ("units.llm.data=1", "units.picture.pipeline=2")
    folder = assert_stages_and_one_mesh_go_on_from_each_other(
        runs, capsys, monkeypatch, "tiny_text", *words, units=units
    )
    ended = run(capsys, generate.main, folder, "draw 1", "--size=8x12", f"--out={runs}/1.png")
    assert ended.code == 0, ended.err
