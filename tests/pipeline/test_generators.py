"""A generator behind the LLM as one more unit: gradients are those of one program, and go no further than is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from drawing import PICTURE, drawing_config
from test_executor import assert_same_gradients, make_pipeline

from mmjax.config import Config, PixelLatents, UnetConfig, Unit

APART = {"vision": Unit(), "llm": Unit(pipeline=2), "picture": Unit()}
UNITS = {
    "one stage": APART,
    "two stages": {"vision": Unit(), "llm": Unit(), "picture": Unit(pipeline=2)},
    "unequal ranks": {"vision": Unit(data=2), "llm": Unit(fsdp=2), "picture": Unit(data=2, pipeline=2)},
    "with the llm": {"vision": Unit(), "llm": Unit(modules=("llm", "picture"), pipeline=2, tensor=2)},
    "interleaved": {"vision": Unit(), "llm": Unit(pipeline=2, virtual=2), "picture": Unit(pipeline=2)},
}
UNET = UnetConfig(
    condition_width=24,
    widths=(16, 32),
    heads=(2, 4),
    attending=(True, False),
    blocks=1,
    groups=8,
    size=(8, 16),
    latents=PixelLatents(channels=1),
    queries=4,
)


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


@pytest.mark.default_cases("two stages-1f1b")
@pytest.mark.parametrize(
    ("units", "schedule"),
    [
        ("one stage", "gpipe"),
        ("one stage", "eager"),
        ("two stages", "1f1b"),
        ("unequal ranks", "1f1b"),
        ("with the llm", "1f1b"),
        ("interleaved", "auto"),
    ],
)
def test_gradients_are_those_of_one_program(units, schedule, tmp_path):
    assert_same_gradients(config_of(units), tmp_path, schedule)


@pytest.mark.exhaustive
def test_a_unet_is_one_stage(tmp_path):
    config = config_of("one stage")
    assert_same_gradients(replace(config, model=replace(config.model, generators={"picture": UNET})), tmp_path)


CONDITION, IMAGES = "picture.1.condition", "picture.1.images"
CONNECTORS = ("vision.connector", "picture.connector")


@pytest.mark.default_cases("all but its connector")
@pytest.mark.parametrize(
    ("frozen", "backward", "edges"),
    [
        # MMScale's settings, connectors trained: queries too, so that the LLM always passes gradients on.
        (("vision", "llm", "picture"), "vision llm picture[0:1] picture[1:2]", "vision picture picture.1 condition"),
        (("vision", "picture"), "vision llm picture[0:1] picture[1:2]", "vision picture picture.1 condition"),
        (("vision", "llm"), "vision llm picture[0:1] picture[1:2]", "vision picture picture.1 condition images"),
        (("vision", "llm", *CONNECTORS), "picture[0:1] picture[1:2]", "picture.1 condition images"),
        (("llm", "picture", *CONNECTORS), "vision llm picture[0:1] picture[1:2]", "vision picture picture.1 condition"),
        (
            ("vision", "llm", "picture", "vision.connector"),
            "llm picture[0:1] picture[1:2]",
            "picture picture.1 condition",
        ),
        (("vision", "llm", "picture", *CONNECTORS), "", ""),
    ],
    ids=["connectors", "llm", "generator", "generator alone", "encoder", "all but its connector", "nothing"],
)
def test_gradients_go_where_one_is_wanted(frozen, backward, edges, tmp_path):
    config = config_of("two stages", frozen)
    pipeline = assert_same_gradients(config, tmp_path) if backward else make_pipeline(config)
    runs = [stage.name for stage, p in zip(pipeline.stages, pipeline.programs, strict=True) if p.has_backward]
    assert runs == backward.split()
    named = edges.replace("condition", CONDITION).replace("images", IMAGES).split()
    assert sorted(name for p in pipeline.programs for name in p.gradient_inputs) == sorted(named)
