"""Lay out units on devices: the meshes of their stages, and the ranks over which the rows of every module lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from mmjax.config import Config, Unit
from mmjax.config.training import unit_devices, unit_modules
from mmjax.data.plan.placement import Topology
from mmjax.errors import UserError
from mmjax.parallel.sharding import ShardingRules, local_ranks, make_mesh, owned_ranks, row_ranks
from mmjax.planning.schedules import list_stages


def units_topology(units: Mapping[str, Unit]) -> Topology:
    """Return the ranks of units: the LLM's, and for encoders a multiple of these that the ranks of all units divide."""
    llm = next(unit for name, unit in units.items() if "llm" in unit_modules(name, unit))
    encoder_ranks = math.lcm(*(unit.encoder_ranks for unit in units.values()))
    return Topology(llm.ranks, llm.ranks, llm.ranks, encoder_ranks // llm.ranks, llm.context)


def unit_meshes(config: Config, devices: Sequence[jax.Device]) -> dict[str, list[Mesh]]:
    """Build the meshes of every unit's stages: units take devices in order, and in them stages.

    The last axis of a mesh, `tensor`, has neighbouring devices. Raises UserError where the units
    need another number of devices than there are.
    """
    needed = sum(map(unit_devices, config.units.values()))
    if needed != len(devices):
        parts = " + ".join(
            f"{name} {unit_devices(unit)}" for name, unit in config.units.items() if not unit.beside
        )
        raise UserError(
            f"the units need {needed} devices ({parts}) and there are {len(devices)}; change data, fsdp, context, "
            "tensor or pipeline of a unit"
        )
    meshes: dict[str, list[Mesh]] = {}
    first = 0
    for name, unit in config.units.items():
        if unit.beside:
            continue
        size = unit_devices(unit) // unit.pipeline
        meshes[name] = []
        for _ in range(unit.pipeline):
            meshes[name].append(make_mesh(unit, devices[first : first + size], f"units.{name}"))
            first += size
    return meshes


class UnitRanks(NamedTuple):
    """The ranks whose rows a process loads, as `StepLoader` takes them."""

    ranks: range  # of the LLM's rows
    encoder_ranks: dict[str, range]
    own: tuple[frozenset[int], dict[str, frozenset[int]]]  # of these, whose rows count here
    # Encoder ranks and those that count by microbatch in turn, where encoders have copies: one has
    # its items.
    copies: tuple[
        tuple[dict[str, range], tuple[frozenset[int], dict[str, frozenset[int]]]], ...
    ] = ()


def unit_ranks(config: Config, devices: Sequence[jax.Device]) -> UnitRanks:
    """Return the ranks whose rows the stages of this process take.

    A unit of 2 ranks has the rows of 6 encoder ranks: its rank 0 those of 0 to 2. The rows of a
    tower lie on each of its stages; on the first stage's processes they count.
    """
    count = max(stage.copy[1] for stage in list_stages(config))
    *by_copy, of_all = (_ranks_of_copy(config, devices, copy) for copy in (*range(count), None))
    if count == 1:
        return of_all
    # Where a process has devices of several copies it loads for each the ranks that it has of any.
    copies = [
        (
            {
                e: of_all.encoder_ranks[e] if has else has
                for e, has in of_copy.encoder_ranks.items()
            },
            of_copy.own,
        )
        for of_copy in by_copy
    ]
    return of_all._replace(copies=tuple(copies))


def _ranks_of_copy(config: Config, devices: Sequence[jax.Device], copy: int | None) -> UnitRanks:
    """Return the ranks of `unit_ranks` where of encoders with copies there is this one alone; None: all of them."""
    topology = units_topology(config.units)
    local: dict[str, range] = {}
    own: dict[str, frozenset[int]] = {}
    meshes = unit_meshes(config, devices)
    stages = list_stages(config)
    for tower in ("llm", *config.model.item_modules):
        # The LLM's tokens are packed with their rows, whichever of the context devices they go to.
        named = next(
            name for name, unit in config.units.items() if tower in unit_modules(name, unit)
        )
        rules = ShardingRules.of(config.units[config.units[named].beside or named])
        axes = rules.rows if tower == "llm" else rules.item_rows
        total = topology.ranks * (1 if tower == "llm" else topology.encoders_per_rank)
        # Of the stages that have layers of the tower, from its first on.
        on = [
            meshes[stage.unit][stage.part]
            for stage in stages
            if copy in (None, stage.copy[0]) or stage.copy[1] == 1
            for piece in stage.pieces
            if piece.tower == tower
        ]
        per_rank = total // row_ranks(on[0], axes)
        by_stage = [set(local_ranks(mesh, axes) if mesh.local_devices else ()) for mesh in on]
        # One range for all stages that are here, since a tower's rows are packed once for them.
        ranks = set().union(*by_stage)
        local[tower] = (
            range(per_rank * min(ranks), per_rank * (max(ranks) + 1)) if ranks else range(0)
        )
        first = owned_ranks(on[0], axes) if by_stage[0] else ()
        own[tower] = frozenset(per_rank * rank + n for rank in first for n in range(per_rank))
    encoders = {tower: ranks for tower, ranks in local.items() if tower != "llm"}
    return UnitRanks(
        local["llm"], encoders, (own["llm"], {tower: own[tower] for tower in encoders})
    )
