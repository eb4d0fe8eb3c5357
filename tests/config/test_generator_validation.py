"""Generators that cannot work are refused by key, with the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawing import PICTURE, drawing_config

from mmjax.config import (
    ConnectorConfig,
    FlowMatching,
    LoraConfig,
    PixelLatents,
    UnetConfig,
    Unit,
)
from mmjax.config.loading import from_json, to_json
from mmjax.config.validation import validate
from mmjax.errors import UserError

UNET = UnetConfig(
    condition_width=8, widths=(8, 16), heads=(1, 2), attending=(True, False), groups=4, size=(8, 8)
)


def with_generator(generator, name="picture"):
    config = drawing_config()
    rows = {module: n for module, n in config.batch.rows.items() if module != "picture"} | {name: 2}
    model = replace(config.model, generators={name: generator})
    return replace(config, model=model, batch=replace(config.batch, rows=rows))


@pytest.mark.parametrize("generator", [PICTURE, UNET])
def test_a_config_with_a_generator_is_valid_and_is_stored_whole(generator):
    config = with_generator(generator)
    validate(config)
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("generator", "said"),
    [
        (replace(PICTURE, queries=17), r"queries=17: an image of min_patches=16 has fewer patches"),
        (replace(PICTURE, queries=0), r"queries=0: must be at least 1"),
        (replace(PICTURE, width=33), r"width=33 does not divide by heads=2"),
        (replace(PICTURE, width=34), r"width=34: sines and cosines .* use a multiple of 4"),
        (
            replace(PICTURE, micro_conditions=True),
            r"width=32: sines and cosines .* use a multiple of 12",
        ),
        (
            replace(PICTURE, connector=ConnectorConfig(merge=2)),
            r"connector\.merge=2: it reads the hidden state",
        ),
        (
            replace(PICTURE, flow=FlowMatching(condition_dropout=1.0)),
            r"flow\.condition_dropout=1\.0",
        ),
        (
            replace(PICTURE, flow=FlowMatching(weight=0.0)),
            r"flow\.weight=0\.0: must be more than 0",
        ),
        (
            replace(PICTURE, flow=FlowMatching(weight=-1.0)),
            r"flow\.weight=-1\.0: must be more than 0",
        ),
        (
            replace(PICTURE, latents=PixelLatents(std=(0.0,))),
            r"latents\.std=\(0\.0,\): must be more than 0",
        ),
        (
            replace(PICTURE, latents=PixelLatents(3, (0.5, 0.5))),
            r"latents\.mean has 2 values for channels=3",
        ),
        (replace(UNET, heads=(1,)), r"heads names 1 levels, widths 2"),
        (replace(UNET, groups=3), r"groups=3 does not divide the width 8"),
        (
            replace(UNET, size=(8, 9)),
            r"size=\(8, 9\): 2 levels halve it 1 times; use multiples of 2",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_by_key(generator, said):
    with pytest.raises(UserError, match=rf"model\.generators\.picture.*{said}"):
        validate(with_generator(generator))


def test_unets_and_generators_connectors_take_no_adapters():
    for generator, pattern, said in (
        (
            UNET,
            "picture.*",
            r"'picture\.\*': model\.generators\.picture is a UNet, whose blocks take no adapters",
        ),
        (PICTURE, "picture.connector.*", r"'picture\.connector\.\*' matches no linear layer"),
    ):
        config = with_generator(generator)
        lora = {"one": LoraConfig((pattern,), 4)}
        with pytest.raises(UserError, match=rf"model\.lora\.one\.layers: {said}"):
            validate(replace(config, model=replace(config.model, lora=lora)))


def test_names_that_other_modules_have_and_rows_that_are_missing_are_refused():
    with pytest.raises(UserError, match=r"model\.generators\.vision: an encoder has this name"):
        validate(with_generator(PICTURE, "vision"))
    config = drawing_config()
    rows = {"llm": 3, "vision": 1}
    with pytest.raises(UserError, match=r"batch\.rows has no 'picture'"):
        validate(replace(config, batch=replace(config.batch, rows=rows)))


EYES = {"vision": Unit(), "llm": Unit()}


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (EYES, "units: picture has no devices"),
        (
            EYES | {"picture": Unit(expert=2)},
            r"units\.picture\.expert=2: the LLM alone has experts",
        ),
        (
            EYES | {"picture": Unit(pipeline=3)},
            r"units\.picture\.pipeline=3 makes 3 stages of 2 layers",
        ),
        (
            EYES | {"picture": Unit(tensor=4)},
            r"units\.picture\.tensor=4 does not divide model\.generators\.picture",
        ),
        (
            {"items": Unit(modules=("vision", "picture")), "llm": Unit()},
            r"units\.items\.modules: the LLM stands between encoders and model\.generators\.picture",
        ),
    ],
)
def test_units_that_cannot_run_a_generator_are_refused(units, message):
    with pytest.raises(UserError, match=message):
        validate(drawing_config(units=units))


def test_units_cut_no_unet_and_end_in_generators_that_each_have_devices():
    config = drawing_config(units=EYES | {"picture": Unit(tensor=2)})
    with pytest.raises(UserError, match=r"units\.picture\.tensor=2: the blocks of a UNet"):
        validate(replace(config, model=replace(config.model, generators={"picture": UNET})))
    batch = replace(config.batch, rows=config.batch.rows | {"other": 1})
    two = replace(config.model, generators={"picture": PICTURE, "other": PICTURE})
    config = replace(config, model=two, batch=batch)
    for units, message in (
        ({"picture": Unit()}, "units: other has no devices"),
        ({"other": Unit(modules=("vision", "other"))}, r"units\.other\.modules has 'vision'"),
    ):
        with pytest.raises(UserError, match=message):
            validate(replace(config, units=EYES | units))
    for units in (
        {"picture": Unit(), "other": Unit(pipeline=2)},
        {"drawn": Unit(modules=("picture", "other"), pipeline=2)},
    ):
        validate(replace(config, units=EYES | units))
