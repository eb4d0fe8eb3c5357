"""Place the stages of a model on the meshes of its units."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from mmjax.config import Config
from mmjax.config.training import cut_tower, unit_cuts, unit_modules
from mmjax.data.plan.step_plan import RankLayout
from mmjax.models.model import Model
from mmjax.pipeline.executor import TowerRows
from mmjax.pipeline.passes import PlacedStage
from mmjax.planning.schedules import ScheduleName
from mmjax.runtime.units import UnitRanks, unit_meshes


def stage_cuts(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the layers before which each tower is cut."""
    towers = {"llm": config.model.llm, **config.model.encoders}
    cuts = {}
    for name, unit in config.units.items():
        tower = cut_tower(unit_modules(name, unit))
        cuts[tower] = unit_cuts(unit, towers[tower].layers)
    return cuts


def place_stages(config: Config, model: Model, devices: Sequence[jax.Device]) -> list[PlacedStage]:
    """Place the stages of a model, built with `stage_cuts`, on the units' meshes."""
    cuts = stage_cuts(config)
    placed = []
    for (name, unit), meshes in zip(config.units.items(), unit_meshes(config, devices).values(), strict=True):
        modules = unit_modules(name, unit)
        for tower in modules:
            cut = tower == cut_tower(modules)
            stages = model.stages(tower, cuts[tower] if cut else ())
            for number, stage in enumerate(stages):
                # With virtual stages, stage n and stage n + pipeline are on the same devices.
                stage_name = tower if len(stages) == 1 else f"{tower}[{stage.start}:{stage.stop}]"
                placed.append(PlacedStage(stage_name, stage, meshes[number % unit.pipeline if cut else 0]))
    return placed


def tower_rows(config: Config, layout: RankLayout, ranks: UnitRanks) -> dict[str, TowerRows]:
    """Return which rows of each tower this process packs."""
    topology = layout.topology
    rows = {"llm": TowerRows(ranks.ranks, topology.ranks, layout.rows[0])}
    for encoder, per_rank in zip(config.model.encoders, layout.rows[1:], strict=True):
        parts = topology.encoders_per_rank
        rows[encoder] = TowerRows(ranks.encoder_ranks[encoder], topology.ranks * parts, per_rank // parts)
    return rows


def schedule_name(config: Config) -> ScheduleName:
    """Resolve the schedule."""
    schedule = config.pipeline.schedule
    virtual = any(unit.virtual > 1 for unit in config.units.values())
    return schedule if schedule != "auto" else "interleaved" if virtual else "1f1b"
