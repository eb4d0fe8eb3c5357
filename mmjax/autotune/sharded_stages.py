"""Spread a run over devices that need not be there: its stages and their parameters, and the rows on each device.

A run on one mesh is one stage of all modules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from mmjax.config import (
    Config,
    Layout,
    ModelConfig,
    NoBalance,
    SequenceParallel,
    Unit,
)
from mmjax.config.model import stacked_towers
from mmjax.config.training import unit_devices, unit_layout, unit_modules
from mmjax.data.plan.placement import Shape, Topology
from mmjax.data.plan.step_plan import RankLayout
from mmjax.models.layer_stacks import key_names, split_scanned
from mmjax.models.model import Model, exclude, modules_of, parameter_group, partition
from mmjax.models.piece import Piece
from mmjax.models.quantization import cast_frozen, parameter_shapes
from mmjax.models.stage import Stage
from mmjax.parallel.sharding import AXES, RANKS, ShardingRules, row_ranks, tree_shardings
from mmjax.planning.exchange_time import ClusterRun, overlap_pays
from mmjax.planning.hardware import Cluster, Device
from mmjax.planning.memory import (
    ACTIVATION,
    MASTER,
    DeviceBatch,
    ModelSharding,
)
from mmjax.planning.remat import (
    with_policies,
)
from mmjax.planning.schedules import list_stages, stage_cuts, unit_graph
from mmjax.planning.speed import Speed
from mmjax.planning.work import row_work
from mmjax.runtime.passes import trained_activations
from mmjax.runtime.state import Optimizer, make_optimizer, shardings_with_moments


class ShardedPiece(NamedTuple):
    """Layers of one tower, and the bytes of their parameters and moments on each device of their stage."""

    piece: Piece
    parameters: int  # on all devices together
    # bytes on each device; with the last stage's copy of a tied embedding, which another updates
    trainable: float
    scanned: float  # of these, bytes of scanned stacks
    frozen: float  # bytes on each device, as `cast_frozen` leaves them
    moments: float  # bytes on each device
    # of trainable and frozen, bytes on each device of experts, which others on `expert` have not
    experts: float
    elements: Counter[str]  # of each module, on all devices together
    stored: Counter[str]  # of these, on each device
    has_backward: bool


class ShardedStage(NamedTuple):
    """A stage on devices that need not be there."""

    name: str
    stage: Stage
    layout: Unit
    mesh: AbstractMesh
    # numbers in the order in which units take them; stages that share them have the same
    devices: range
    pieces: tuple[ShardedPiece, ...]

    @property
    def rules(self) -> ShardingRules:
        """Return the rules of its layout."""
        return ShardingRules.of(self.layout)

    @property
    def sharding(self) -> ModelSharding:
        """Return how its arrays are spread over its mesh."""
        elements = sum((piece.elements for piece in self.pieces), Counter())
        stored = sum((piece.stored for piece in self.pieces), Counter())
        shares = {module: stored[module] / count for module, count in elements.items()}
        return replace(model_sharding(self.layout, self.mesh.shape), shares=shares)

    @property
    def is_sink(self) -> bool:
        """Return whether both passes are one program, since nothing goes on from it."""
        return bool(self.stage.losses) and not self.stage.outputs

    @property
    def is_whole(self) -> bool:
        """Return whether it is all of the model."""
        return self.is_sink and not self.stage.inputs


_sharded: dict[str, tuple[ShardedStage, ...]] = {}  # by all that they depend on
MAX_SHARDED = 16


def shard_stages(config: Config) -> tuple[ShardedStage, ...]:
    """Cut a model into the stages of its units, and its parameters over their meshes."""
    # Whatever its policies: a plan that is made again with those that it chose must be the same.
    without_remat = with_policies(
        config.model, dict.fromkeys(stacked_towers(config.model), ("none",))
    )
    key = (
        f"{replace(config, model=without_remat, batch=replace(config.batch, balance=NoBalance()))}"
    )
    if key not in _sharded:
        while len(_sharded) >= MAX_SHARDED:
            _sharded.pop(next(iter(_sharded)))
        _sharded[key] = _shard_stages(config, without_remat)
    return _sharded[key]


def _shard_stages(config: Config, without_remat: ModelConfig) -> tuple[ShardedStage, ...]:
    model = Model.build(without_remat, jnp.dtype(config.training.precision), stage_cuts(config))
    placed = list_stages(config)
    stages = [Stage.of_layers(model, stage.pieces) for stage in placed]
    trained = trained_activations([stages[number] for number in unit_graph(config).topological])
    counts = [unit_devices(unit) for unit in config.units.values()]
    firsts = dict(zip(config.units, accumulate(counts, initial=0), strict=False))
    sharded = []
    for in_unit, stage in zip(placed, stages, strict=True):
        unit = unit_layout(config.units[in_unit.unit], config.mesh)
        rules = ShardingRules.of(unit)
        count = unit_devices(unit) // unit.pipeline
        mesh = AbstractMesh(tuple(getattr(unit, axis) for axis in AXES), AXES)
        first = firsts[in_unit.unit] + in_unit.part * count
        pieces = tuple(
            _shard_piece(config, model, piece, mesh, rules, trained) for piece in stage.pieces
        )
        if in_unit.copy[0]:  # the first copy alone has the moments
            pieces = tuple(piece._replace(parameters=0, moments=0.0) for piece in pieces)
        sharded.append(
            ShardedStage(
                name=in_unit.name,
                stage=stage,
                layout=unit,
                mesh=mesh,
                devices=range(first, first + count),
                pieces=pieces,
            )
        )
    return tuple(sharded)


def _shard_piece(
    config: Config,
    model: Model,
    piece: Piece,
    mesh: AbstractMesh,
    rules: ShardingRules,
    trained: frozenset[str],
) -> ShardedPiece:
    select = partial(piece.select, stacks=model.runs[piece.tower])
    abstract = select(model.abstract)
    axes_of = select(model.axes)
    layouts = tree_shardings(mesh, rules, abstract, axes_of)
    frozen = frozenset(model.frozen) & modules_of(abstract)
    parts = partition(abstract, frozen)
    part_layouts = partition(layouts, frozen)
    owned = parts
    owned_layouts = part_layouts
    if piece.tower == "llm" and model.config.llm.tied and not piece.first:
        # The first stage owns the table and has its moments.
        table = {"llm": {"embed": model.abstract["llm"]["embed"]}}
        owned, owned_layouts = (
            tuple(exclude(part, table) for part in pair) for pair in (parts, part_layouts)
        )
    optimizer = replace(make_optimizer(config.optimizer, model.axes, model.dtype), offloads=False)
    moments = _abstract_moments(
        f"{model.description} {config.optimizer} {piece}", optimizer, owned[0]
    )
    moment_layouts = shardings_with_moments(
        optimizer, owned[0], *owned_layouts, mesh=mesh
    ).optimizer
    constant = jax.eval_shape(partial(cast_frozen, dtype=model.dtype), parts[1])
    # Axes are tuples, and so are leaves only where we say so. Both trees list leaves in one order.
    by_axes = jax.tree.leaves(axes_of, is_leaf=lambda x: isinstance(x, tuple))
    of_experts = [n for n, axes in enumerate(by_axes) if "experts" in axes]
    experts = tuple([jax.tree.leaves(tree)[n] for n in of_experts] for tree in (abstract, layouts))
    expert_bytes = _on_device(*experts) * (model.dtype.itemsize / MASTER if "llm" in frozen else 1)
    elements: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    leaves = jax.tree.leaves_with_path(abstract)
    # What a mesh axis does not divide is whole on every device: `stored` may be more than 1 /
    # shards.
    for (path, leaf), layout in zip(leaves, jax.tree.leaves(layouts), strict=True):
        module = parameter_group(key_names(path))
        elements[module] += math.prod(leaf.shape)
        stored[module] += math.prod(layout.shard_shape(leaf.shape))
    return ShardedPiece(
        piece=piece,
        parameters=sum(
            math.prod(shape) for part in owned for shape in parameter_shapes(part).values()
        ),
        trainable=_on_device(parts[0], part_layouts[0]),
        scanned=_on_device(*(split_scanned(tree)[0] for tree in (parts[0], part_layouts[0]))),
        frozen=_on_device(constant, part_layouts[1]),
        moments=_on_device(moments, moment_layouts),
        experts=expert_bytes,
        elements=elements,
        stored=stored,
        # A frozen encoder with a frozen connector has no backward pass; a frozen LLM behind
        # something trained has one.
        has_backward=bool(trained & set(piece.inputs) or jax.tree.leaves(parts[0])),
    )


# shapes of moments, by all that they depend on: meshes are tried with the same ones
_moments: dict[str, Any] = {}
MAX_MOMENTS = 256


def _abstract_moments(key: str, optimizer: Optimizer, params: Any) -> Any:
    if key not in _moments:
        while len(_moments) >= MAX_MOMENTS:
            _moments.pop(next(iter(_moments)))
        _moments[key] = jax.eval_shape(optimizer.init, params)
    return _moments[key]


def device_batch(
    config: Config, layout: RankLayout, rows: Mapping[str, int], shape: Shape
) -> DeviceBatch:
    """Return the part of a microbatch of this shape that each device of a tower gets. rows: of every tower."""
    context = layout.topology.context
    lengths = shape.lengths[0] // context, *shape.lengths[1:]
    pairs = {}
    if context > 1:  # a device's queries attend the keys of the others too
        whole_rows = row_work(config.model, {"llm": (rows["llm"], shape.lengths[0])})
        pairs["llm"] = whole_rows["llm"].pairs / context
    return DeviceBatch(
        shape=dict(zip(rows, zip(rows.values(), lengths, strict=True), strict=True)),
        widths=dict(zip(config.model.item_modules, shape.widths, strict=True)),
        peers=layout.topology.peers,
        microbatches=config.batch.microbatches,
        context=context,
        pairs=pairs,
    )


def stage_batch(
    config: Config,
    layout: RankLayout,
    stages: Sequence[ShardedStage],
    number: int,
    shape: Shape,
    tower: str = "",
) -> DeviceBatch:
    """Return the part of a microbatch that each device of a stage gets; of the LLM, with the tokens that it takes."""
    rows = rows_on_device(config, layout, stages, stages[number] if tower == "llm" else None)
    return device_batch(config, layout, rows, shape)


def rows_on_device(
    config: Config,
    layout: RankLayout,
    stages: Sequence[ShardedStage],
    receiver: ShardedStage | None = None,
) -> dict[str, int]:
    """Count every tower's rows on each of its devices; with a receiver, those whose tokens a device of it gets."""
    by_tower = {
        part.piece.tower: receiver or sharded for sharded in stages for part in sharded.pieces
    }
    totals = [layout.topology.ranks * rows for rows in layout.rows]
    rows = {}
    for name, total in zip(("llm", *config.model.item_modules), totals, strict=True):
        rules = by_tower[name].rules
        axes = rules.rows if name == "llm" else rules.token_rows if receiver else rules.item_rows
        rows[name] = total // row_ranks(by_tower[name].mesh, axes)
    return rows


def _on_device(tree: Any, layouts: Any) -> float:
    """Count the bytes on each device of arrays given by shape and dtype, with these shardings."""
    return sum(
        int(np.prod(layout.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf, layout in zip(jax.tree.leaves(tree), jax.tree.leaves(layouts), strict=True)
    )


def on_one_mesh(config: Config, mesh: Mapping[str, int]) -> Config:
    """Return the config with all modules in one unit, whose layout is that of the mesh with axes of these sizes."""
    layout = (
        {f.name: getattr(config.mesh, f.name) for f in fields(Layout)}
        | dict.fromkeys(AXES, 1)
        | dict(mesh)
    )
    return replace(config, units={"all": Unit(modules=tuple(config.model.towers), **layout)})


def layout_of_rows(
    config: Config,
    mesh: Mapping[str, int],
    shapes: Sequence[Mapping[str, tuple[int, int]]],
    widths: Mapping[str, int] | None = None,
    peers: int = 1,
) -> RankLayout:
    """Lay out rows of these numbers and lengths on each rank of a mesh, for plans without data.

    shapes: (rows, row length) by tower. widths: tokens that a rank sends to each of its peers, by
    module.
    """
    topology = Topology(math.prod(mesh[axis] for axis in RANKS), peers, context=mesh["context"])
    towers = tuple(config.model.towers)
    sent = tuple((widths or {}).get(name, 0) for name in towers[1:])
    compiled = tuple(Shape(tuple(shape[tower][1] for tower in towers), sent) for shape in shapes)
    return RankLayout(topology, tuple(shapes[0][tower][0] for tower in towers), compiled)


def model_sharding(config: Layout, mesh: Mapping[str, int]) -> ModelSharding:
    """Return the sharding of a model on a mesh whose axes have these sizes."""
    tensor = mesh["tensor"]
    way = "off" if config.sequence_parallel == "auto" else config.sequence_parallel
    experts = mesh.get("expert", 1)
    # Every axis but `data`, along which parameters have copies.
    shards = mesh["fsdp"] * experts * mesh["context"] * tensor
    encoders = 1 if config.encoders == "data" else tensor
    return ModelSharding(shards, tensor, encoders, way, experts=experts)


def device_microbatch(config: Config, layout: RankLayout, shape: Shape) -> DeviceBatch:
    """Return the part of a microbatch of this shape that each device of one mesh gets."""
    per_rank = layout.topology.encoders_per_rank
    rows = {"llm": layout.rows[0]}
    rows |= {
        name: n // per_rank
        for name, n in zip(config.model.item_modules, layout.rows[1:], strict=True)
    }
    return device_batch(config, layout, rows, shape)


def choose_sequence_parallel(
    config: Config, mesh: Mapping[str, int], layout: RankLayout, device: Device | None
) -> Config:
    """Decide `mesh.sequence_parallel=auto` by the device's data sheet: `overlap` where it pays, else `off`.

    On CPUs, on devices without a data sheet, and where rows do not divide, it is `off`.
    """
    batch = device_microbatch(config, layout, layout.shapes[-1])
    way = resolve_sequence_parallel(
        config, config.mesh, mesh, batch, device, tuple(stacked_towers(config.model))
    )
    return replace(config, mesh=replace(config.mesh, sequence_parallel=way))


def resolve_sequence_parallel(
    config: Config,
    layout: Layout,
    mesh: Mapping[str, int],
    batch: DeviceBatch,
    device: Device | None,
    towers: Sequence[str],
) -> SequenceParallel:
    """Return a layout's `sequence_parallel`, decided as `choose_sequence_parallel` does for these towers on it."""
    if layout.sequence_parallel != "auto":
        return layout.sequence_parallel
    known = device is not None and device.platform != "cpu"
    if not known or mesh["tensor"] == 1 or config.batch.alignment % mesh["tensor"]:
        return "off"
    activation = ACTIVATION[config.training.precision]
    speed = Speed(device.rates(config.training.precision))
    # Tensor-parallel neighbours are taken to be on one node.
    machine = ClusterRun(Cluster(device), mesh, model_sharding(layout, mesh), speed, activation)
    return "overlap" if overlap_pays(config.model, batch, machine, towers) else "off"


def resolve_units(config: Config, layout: RankLayout, device: Device | None) -> Config:
    """Decide every unit's `sequence_parallel=auto` by the device's data sheet, as of a mesh for its own towers.

    Units that are not tensor-parallel have nothing to decide.
    """
    totals = [layout.topology.ranks * rows for rows in layout.rows]
    units = dict(config.units)
    for name, unit in config.units.items():
        if unit.tensor == 1:
            continue
        ranks = [unit.ranks, *[unit.encoder_ranks] * len(config.model.item_modules)]
        rows = {
            tower: max(1, n // r)
            for tower, n, r in zip(config.model.towers, totals, ranks, strict=True)
        }
        batch = device_batch(config, layout, rows, layout.shapes[-1])
        sizes = {axis: getattr(unit, axis) for axis in AXES}
        way = resolve_sequence_parallel(
            config, unit, sizes, batch, device, unit_modules(name, unit)
        )
        units[name] = replace(unit, sequence_parallel=way)
    return replace(config, units=units)
