"""Place the stages of a model on the meshes of its units, and the rows of every tower on processes and devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from mmjax.batch import TABLES, ItemBatch, Microbatch, TextBatch
from mmjax.config import Config
from mmjax.config.training import unit_layout
from mmjax.data.plan.step_plan import RankLayout
from mmjax.models.model import Model
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import CONTEXT, ShardingRules, make_mesh
from mmjax.planning.schedules import list_stages
from mmjax.runtime.device_batch import TowerRows, put_tower_rows, tables_of, without_tables
from mmjax.runtime.passes import PlacedStage, StagedBatch
from mmjax.runtime.units import UnitRanks, unit_meshes


def place_stages(config: Config, model: Model, devices: Sequence[jax.Device]) -> list[PlacedStage]:
    """Place the stages of a model, built with `stage_cuts`, on the units' meshes; without units, one on one mesh."""
    if not config.units:
        return [
            PlacedStage(
                "all",
                Stage.whole(model),
                make_mesh(config.mesh, devices),
                ShardingRules.of(config.mesh),
            )
        ]
    meshes = unit_meshes(config, devices)
    return [
        PlacedStage(
            placed.name,
            Stage.of_layers(model, placed.pieces),
            meshes[placed.unit][placed.part],
            ShardingRules.of(unit_layout(config.units[placed.unit], config.mesh)),
            placed.copy,
        )
        for placed in list_stages(config)
    ]


def tower_rows(config: Config, layout: RankLayout, ranks: UnitRanks) -> dict[str, TowerRows]:
    """Return which rows of each tower this process packs."""
    # A rank of the LLM has several encoder ranks, whose rows it packs together: 6 rows for each
    # rank of 3 encoder ranks are 2 rows for each of these.
    topology = layout.topology
    rows = {"llm": TowerRows(ranks.ranks, topology.ranks, layout.rows[0])}
    for module, per_rank in zip(config.model.item_modules, layout.rows[1:], strict=True):
        parts = topology.encoders_per_rank
        rows[module] = TowerRows(
            ranks.encoder_ranks[module], topology.ranks * parts, per_rank // parts
        )
    return rows


def put_batch(
    stages: Sequence[PlacedStage],
    batch: Microbatch,
    rows: Mapping[str, TowerRows] | None,
    number: int | None = None,
) -> StagedBatch:
    """Put a packed microbatch on the devices: on each stage's mesh the inputs of its towers.

    rows: which of each tower's rows this process packs; None: all. Stages of other processes get
    shapes alone. number: of the microbatch in its step, which goes to one of the copies of a stage;
    None: to all.
    """
    done: dict[Any, TextBatch | ItemBatch] = {}  # stages that share devices share it

    def put(
        part: TextBatch | ItemBatch, tower: str, placed: PlacedStage, *read: Any
    ) -> TextBatch | ItemBatch:
        mesh = placed.mesh
        key = (mesh, tower, read)
        if key not in done:
            if any(device.process_index == jax.process_index() for device in mesh.devices.flat):
                of_tower = None if rows is None else rows[tower]
                done[key] = put_tower_rows(part, of_tower, mesh, placed.rules)
            else:
                done[key] = _row_shapes(part, tower, rows, mesh.shape[CONTEXT])
        return done[key]

    batches = []
    for placed in stages:
        stage = placed.stage
        # Copies take microbatches in turn: of 2 copies, copy 1 has microbatches 1, 3, 5, ...
        copy, copies = placed.copy
        if number is not None and number % copies != copy:
            batches.append(Microbatch(None, {}))
            continue
        text = None
        if stage.text:
            read = (stage.encoders, stage.embeds_queries, stage.exchanges_states)
            text = put(select_tables(batch.text, stage), "llm", placed, *read)
        towers = [tower for tower in stage.towers if tower != "llm"]
        batches.append(
            Microbatch(text, {tower: put(batch.items[tower], tower, placed) for tower in towers})
        )
    return tuple(batches)


def select_tables(text: TextBatch, stage: Stage) -> TextBatch:
    """Keep only the tables of a text that a stage of the LLM reads.

    The stages that take encoders' tokens place them. Of a generator, the first needs the places of
    queries, the last where their hidden states go.
    """
    modules = dict.fromkeys(TABLES, (*stage.encoders, *stage.exchanges_states))
    modules["slots"] = (*stage.encoders, *stage.embeds_queries)
    tables = {name: getattr(text, name) for name in modules}
    return text._replace(
        **{n: {m: table[m] for m in modules[n] if m in table} for n, table in tables.items()}
    )


def _row_shapes(
    part: TextBatch | ItemBatch, tower: str, rows: Mapping[str, TowerRows], context: int
) -> TextBatch | ItemBatch:
    """Return the shapes of a tower's batch that lies on other processes. context: devices that share a row."""

    def struct(x: np.ndarray, module: str = tower, per_rank: int = 0) -> jax.ShapeDtypeStruct:
        count = (per_rank or rows[module].per_rank) * rows[module].ranks
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)

    if isinstance(part, ItemBatch):
        return jax.tree.map(struct, part)
    # A rank has a table for each of its devices, and one of what goes to a generator.
    tables = {
        table: {
            name: jax.tree.map(
                partial(struct, per_rank=1 if name in part.condition else context), x
            )
            for name, x in arrays.items()
        }
        for table, arrays in tables_of(part).items()
    }
    tables["condition"] = {name: struct(x, name) for name, x in part.condition.items()}
    return jax.tree.map(struct, without_tables(part))._replace(**tables)
