"""Lay out units: which devices have which stages, and over which ranks the rows of every module lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mmjax.config import Config
from mmjax.config.training import cut_tower, unit_devices, unit_modules
from mmjax.data.plan.step_plan import RankLayout
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import AXES, local_ranks, owned_ranks
from mmjax.pipeline.executor import TowerRows
from mmjax.pipeline.passes import PlacedStage
from mmjax.planning.schedules import ScheduleName
from mmjax.runtime.devices import units_topology


def stage_cuts(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the layers before which each tower is cut: as configured, or into stages of equally many layers."""
    towers = {"llm": config.model.llm, **config.model.encoders}
    cuts = {}
    for name, unit in config.units.items():
        tower = cut_tower(unit_modules(name, unit))
        stages = unit.pipeline * unit.virtual
        layers = towers[tower].layers
        cuts[tower] = unit.cuts or tuple(round(layers * stage / stages) for stage in range(1, stages))
    return cuts


def unit_meshes(config: Config, devices: Sequence[jax.Device]) -> dict[str, list[Mesh]]:
    """Build the meshes of every unit's stages: units take devices in order, and in them stages.

    The last axis of a mesh, `tensor`, has neighbouring devices. Raises UserError where the units need another number of
    devices than there are.
    """
    needed = sum(map(unit_devices, config.units.values()))
    if needed != len(devices):
        parts = " + ".join(f"{name} {unit_devices(unit)}" for name, unit in config.units.items())
        raise UserError(
            f"the units need {needed} devices ({parts}) and there are {len(devices)}; change data, fsdp, tensor or "
            "pipeline of a unit"
        )
    meshes: dict[str, list[Mesh]] = {}
    first = 0
    for name, unit in config.units.items():
        size = unit_devices(unit) // unit.pipeline
        meshes[name] = []
        for _ in range(unit.pipeline):
            grid = np.asarray(devices[first : first + size]).reshape(unit.data, unit.fsdp, unit.tensor, 1)
            meshes[name].append(Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES)))
            first += size
    return meshes


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
                stage_name = tower if len(stages) == 1 else f"{tower}[{stage.start}:{stage.stop}]"
                placed.append(PlacedStage(stage_name, stage, meshes[number % unit.pipeline if cut else 0]))
    return placed


class UnitRanks(NamedTuple):
    """The ranks whose rows a process loads, as `StepLoader` takes them."""

    ranks: range  # of the LLM's rows
    encoder_ranks: dict[str, range]
    own: tuple[frozenset[int], dict[str, frozenset[int]]]  # of these, whose rows count here


def unit_ranks(config: Config, devices: Sequence[jax.Device]) -> UnitRanks:
    """Return the ranks whose rows the stages of this process take.

    A unit of 2 ranks has the rows of 6 encoder ranks: its rank 0 those of 0 to 2. The rows of a tower lie on each of
    its stages; on the first stage's processes they count.
    """
    topology = units_topology(config.units)
    local: dict[str, range] = {}
    own: dict[str, frozenset[int]] = {}
    for (name, unit), meshes in zip(config.units.items(), unit_meshes(config, devices).values(), strict=True):
        modules = unit_modules(name, unit)
        for tower in modules:
            total = topology.ranks * (1 if tower == "llm" else topology.encoders_per_rank)
            each = total // (unit.data * unit.fsdp)
            stages = meshes if tower == cut_tower(modules) else meshes[:1]
            here = [set(_process_ranks(mesh)) for mesh in stages]
            ranks = set().union(*here)
            local[tower] = range(each * min(ranks), each * (max(ranks) + 1)) if ranks else range(0)
            first = owned_ranks(stages[0]) if here[0] else ()
            own[tower] = frozenset(each * rank + n for rank in first for n in range(each))
    encoders = {tower: ranks for tower, ranks in local.items() if tower != "llm"}
    return UnitRanks(local["llm"], encoders, (own["llm"], {tower: own[tower] for tower in encoders}))


def _process_ranks(mesh: Mesh) -> range:
    """Return the ranks of a mesh on this process's devices, which may be none."""
    return local_ranks(mesh) if mesh.local_devices else range(0)


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
