"""Units that do not say where they are cut fit the memory of their devices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mmjax.autotune.cuts import cut_units
from mmjax.autotune.run_plan import plan_run
from mmjax.config import Config, Unit
from mmjax.config.loading import find_config, load
from mmjax.data.plan.length_index import build_index
from mmjax.data.plan.step_plan import RankLayout, make_planner
from mmjax.data.sources.opening import open_sources
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.remat import MemoryLimit
from mmjax.planning.schedules import list_stages
from mmjax.planning.speed import Speed
from mmjax.runtime.units import units_topology

DEVICE = parse_cluster("h100x4").device


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, RankLayout]:
    words = ("model.llm.layers=12", "model.llm.remat=auto", "batch.microbatches=8")
    config = load(find_config("tiny_omni"), words)
    unit = Unit(modules=("vision", "audio", "llm"), pipeline=4)
    config = replace(
        config,
        units={"all": unit},
        batch=replace(config.batch, rows=dict.fromkeys(config.batch.rows, 1)),
    )
    index = build_index(
        open_sources(config, "train", tmp_path_factory.mktemp("run")),
        config.model.encoders,
        config.model.llm,
    )
    return config, make_planner(index, config, [1.0], units_topology(config.units))[1]


def largest(config: Config, layout: RankLayout, limit: float) -> float:
    return plan_run(config, layout, Speed(DEVICE.rates("float32")), MemoryLimit(limit)).device


def test_layers_move_to_stages_with_room_until_all_fit_and_no_further(run):
    config, layout = run
    balanced = cut_units(config, layout, DEVICE, MemoryLimit(math.inf))
    needed = largest(balanced, layout, 0)  # where all that can be is recomputed
    assert cut_units(config, layout, DEVICE, MemoryLimit(needed)) == balanced
    moved = cut_units(config, layout, DEVICE, MemoryLimit(needed - 1))
    assert moved.units["all"].cuts != balanced.units["all"].cuts
    assert largest(moved, layout, needed - 1) <= needed - 1
    before, after = (
        [sum(len(p.layers) for p in s.pieces) for s in list_stages(c)] for c in (balanced, moved)
    )
    assert sum(before) == sum(after)
    assert after[0] < before[0]  # the first has most microbatches in flight


def test_stages_take_equally_long_where_no_cuts_fit_or_a_run_has_begun_with_them(run):
    config, layout = run
    balanced = cut_units(config, layout, DEVICE, MemoryLimit(math.inf))
    assert cut_units(config, layout, DEVICE, MemoryLimit(1.0)) == balanced
    needed = largest(balanced, layout, 0)
    assert cut_units(config, layout, DEVICE, MemoryLimit(needed - 1), balanced.units) == balanced
