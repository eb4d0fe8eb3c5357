"""Cut units where their config does not, into stages that take equally long and fit the memory of their devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import resolve_units
from mmjax.config import Config, Unit
from mmjax.data.plan.step_plan import RankLayout
from mmjax.planning.balanced_cuts import name_cuts, with_balanced_cuts, with_stage_times
from mmjax.planning.hardware import Device
from mmjax.planning.remat import MemoryLimit, RunPlan, bytes_together
from mmjax.planning.schedules import list_stages
from mmjax.planning.speed import Speed


def cut_units(
    config: Config,
    layout: RankLayout,
    device: Device,
    limit: MemoryLimit,
    resumed: Mapping[str, Unit] | None = None,
) -> Config:
    """Return the config with cuts of every unit of several stages that names none, and times for a nested schedule.

    Stages take equally long, unless one does not fit even where it recomputes all that it can: then
    layers move to the stages that have room, one by one. Where that does not help, stages take
    equally long.

    resumed: units with which the run went on so far; those that are as they were are cut as they
    were.
    """
    balanced = with_balanced_cuts(config, *layout.rows_and_lengths, resumed)
    chosen = [
        name
        for name, unit in balanced.units.items()
        if unit != config.units[name] and unit != (resumed or {}).get(name) and not unit.beside
    ]
    speed = Speed(device.rates(config.training.precision))
    moved = balanced
    largest = np.inf  # bytes of a device, the least so far
    # With a memory limit of 0 the plan recomputes all that it can, so it says what a run needs at
    # least. It is made anew after every move, until it fits or no move makes it smaller.
    while chosen and np.isfinite(limit.device):
        plan = plan_run(
            resolve_units(moved, layout, device), layout, speed, MemoryLimit(0.0, limit.host)
        )
        if plan.predicted <= limit.device:
            break
        if (
            plan.predicted >= largest
            or np.mean([*map(bytes_together, plan.on_devices)]) > limit.device
        ):
            moved = balanced
            break
        largest = plan.predicted
        moved = _move_layers(moved, chosen, plan)
    return moved if moved == balanced else with_stage_times(moved, *layout.rows_and_lengths)


def _move_layers(config: Config, names: Sequence[str], plan: RunPlan) -> Config:
    """Move a layer from the fullest stage of each of these units to its emptiest, by way of the stages between."""
    used = {
        stage: bytes_together(stages) for stages in plan.on_devices for stage in map(id, stages)
    }
    listed = list(zip(list_stages(config), plan.stages, strict=True))
    units = dict(config.units)
    for name in names:
        parts = [
            (stage, used[id(of_plan)])
            for stage, of_plan in listed
            if stage.unit == name and stage.copy[1] == 1
        ]
        # Stages of 8 8 8 8 layers that take 70 60 50 40 GB become 7 8 8 9, so the cuts 8 16 24 move
        # to 7 15 23. A stage of one layer keeps it.
        sizes = np.array([sum(len(piece.layers) for piece in stage.pieces) for stage, _ in parts])
        stage_bytes = np.array([used_bytes for _, used_bytes in parts])
        sizes[np.where(sizes > 1, stage_bytes, 0).argmax()] -= 1
        sizes[stage_bytes.argmin()] += 1
        units[name] = replace(units[name], cuts=name_cuts(config, name, np.cumsum(sizes)[:-1]))
    return replace(config, units=units)
