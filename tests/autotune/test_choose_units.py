"""Units are chosen among what a config allows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmjax.autotune.choose_units import _is_allowed, _list_layouts, choose_units
from mmjax.config import Config, ExpertsConfig
from mmjax.config.loading import find_config, load
from mmjax.config.training import Unit, unit_devices
from mmjax.config.validation import validate
from mmjax.data.plan.length_files import index_of_lengths, interleaved_corpus, omni_corpus
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.speed import Speed

CLUSTER = parse_cluster("a100x2x4")


def axes(config: Config, tower: str) -> set[tuple[int, int, int]]:
    """Degrees of tensor, context and expert parallelism that are tried."""
    return {(way.tensor, way.context, way.expert) for way in _list_layouts(config, CLUSTER, tower)}


def test_a_tower_has_what_its_heads_and_nodes_allow_and_the_llm_alone_shares_rows():
    config = load(find_config("tiny_omni"))
    assert config.model.llm.heads % 4 == 0 != config.model.llm.kv_heads % 4
    assert axes(config, "llm") == {
        (t, c, 1) for t in (1, 2) for c in (1, 2, 4) if t * c <= CLUSTER.per_node
    }
    assert axes(config, "vision") == {
        (t, 1, 1) for t in (1, 2, 4) if config.model.encoders["vision"].heads % t == 0
    }


def test_experts_are_spread_where_a_model_has_them_over_divisors_of_their_number():
    config = load(find_config("tiny_omni"))
    experts = ExpertsConfig(layers=(1,), count=6, per_token=2, width=16)
    sparse = replace(
        config, model=replace(config.model, llm=replace(config.model.llm, experts=experts))
    )
    assert {e for _, _, e in axes(config, "llm")} == {1}
    assert {e for _, _, e in axes(sparse, "llm")} == {1, 2}


def test_virtual_stages_are_tried_where_the_schedule_may_be_interleaved():
    config = load(find_config("tiny_omni"), ["model.llm.layers=4"])
    unit = Unit(pipeline=2, virtual=2)
    assert _is_allowed(config, "llm", unit)
    assert not _is_allowed(
        replace(config, pipeline=replace(config.pipeline, schedule="gpipe")), "llm", unit
    )


@pytest.mark.exhaustive
def test_units_of_two_generators_are_chosen_and_fit():
    config = load(find_config("tiny_draw"))
    generators = config.model.generators | {"sketch": config.model.generators["picture"]}
    model = replace(config.model, generators=generators)
    config = replace(
        config, model=model, batch=replace(config.batch, rows=config.batch.rows | {"sketch": 2})
    )
    index = index_of_lengths(
        interleaved_corpus(2000, 0, model.item_modules), model.item_modules, model.llm
    )
    speed = Speed(CLUSTER.device.rates(config.training.precision))
    units, _ = choose_units(config, CLUSTER, index, [1.0], lambda _: speed)
    assert len(units) == 2
    for forecast in units:
        validate(forecast.chosen.config)
        plan = forecast.chosen.plan
        assert {"picture", "sketch"} < {tower for stage in plan.stages for tower in stage.layers}
        assert plan.fits


@pytest.mark.exhaustive
def test_encoders_beside_the_llm_are_forecast_on_the_devices_of_the_fastest_chain():
    config = load(find_config("tiny_omni"), ["batch.size.count=64"])
    index = index_of_lengths(omni_corpus(2000, 0), config.model.item_modules, config.model.llm)
    speed = Speed(CLUSTER.device.rates(config.training.precision))
    units, _ = choose_units(config, CLUSTER, index, [1.0], lambda _: speed)
    by_family = {tuple(forecast.chosen.config.units): forecast.chosen for forecast in units}
    assert set(by_family) >= {("all",), ("llm", "vision", "audio")}
    beside, chain = by_family["llm", "vision", "audio"].config, by_family["all",].config
    validate(beside)
    assert unit_devices(beside.units["llm"]) == unit_devices(chain.units["all"])
    assert beside.units["vision"].beside == beside.units["audio"].beside == "llm"
