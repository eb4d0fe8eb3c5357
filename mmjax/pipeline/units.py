"""Lay out units: which devices have which stages, and over which ranks the rows of every module lie."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mmjax.config import Config
from mmjax.config.training import cut_tower, unit_devices, unit_modules
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import AXES
from mmjax.pipeline.executor import PlacedStage
from mmjax.planning.schedules import ScheduleName


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


def place_stages(config: Config, model: Model, devices: Sequence[jax.Device]) -> list[PlacedStage]:
    """Place the stages of a model, built with `stage_cuts`: units take devices in order, and in them stages.

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
    cuts = stage_cuts(config)
    placed = []
    first = 0
    for name, unit in config.units.items():
        size = unit_devices(unit) // unit.pipeline
        meshes = []
        for stage in range(unit.pipeline):
            grid = np.asarray(devices[first + stage * size : first + (stage + 1) * size])
            shape = (unit.data, unit.fsdp, unit.tensor, 1)
            meshes.append(Mesh(grid.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES)))
        modules = unit_modules(name, unit)
        for tower in modules:
            cut = tower == cut_tower(modules)
            stages = model.stages(tower, cuts[tower] if cut else ())
            for number, stage in enumerate(stages):
                stage_name = tower if len(stages) == 1 else f"{tower}[{stage.start}:{stage.stop}]"
                placed.append(PlacedStage(stage_name, stage, meshes[number % unit.pipeline if cut else 0]))
        first += unit_devices(unit)
    return placed


def schedule_name(config: Config) -> ScheduleName:
    """Resolve the schedule."""
    schedule = config.pipeline.schedule
    virtual = any(unit.virtual > 1 for unit in config.units.values())
    return schedule if schedule != "auto" else "interleaved" if virtual else "1f1b"
