"""Generators are config like any other, and a unit each has devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawing import PICTURE, drawing_config

from mmjax.config import (
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


EYES = {"vision": Unit(), "llm": Unit()}


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
