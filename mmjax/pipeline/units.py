"""Place the stages of a model on the meshes of its units, and the rows of every tower on processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from mmjax.config import Config
from mmjax.data.plan.step_plan import RankLayout
from mmjax.models.model import Model
from mmjax.pipeline.passes import PlacedStage
from mmjax.planning.schedules import list_stages, stage_cuts
from mmjax.runtime.units import UnitRanks, unit_meshes


class TowerRows(NamedTuple):
    """The rows of a tower's batches that this process packs."""

    local: range  # ranks whose rows they are
    ranks: int  # in all
    per_rank: int  # rows


def place_stages(config: Config, model: Model, devices: Sequence[jax.Device]) -> list[PlacedStage]:
    """Place the stages of a model, built with `stage_cuts`, on the units' meshes."""
    cuts = stage_cuts(config)
    towers = ("llm", *config.model.encoders)
    stages = {(tower, stage.start): stage for tower in towers for stage in model.stages(tower, cuts.get(tower, ()))}
    meshes = unit_meshes(config, devices)
    return [
        PlacedStage(placed.name, stages[placed.tower, placed.layers.start], meshes[placed.unit][placed.part])
        for placed in list_stages(config)
    ]


def tower_rows(config: Config, layout: RankLayout, ranks: UnitRanks) -> dict[str, TowerRows]:
    """Return which rows of each tower this process packs."""
    topology = layout.topology
    rows = {"llm": TowerRows(ranks.ranks, topology.ranks, layout.rows[0])}
    for encoder, per_rank in zip(config.model.encoders, layout.rows[1:], strict=True):
        parts = topology.encoders_per_rank
        rows[encoder] = TowerRows(ranks.encoder_ranks[encoder], topology.ranks * parts, per_rank // parts)
    return rows
