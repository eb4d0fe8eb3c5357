"""Plan every stage of a pipeline from its config, without its devices: remat policies, memory, times of its passes.

A stage's microbatches in flight must fit beside its parameters. The same plan holds for a run and for a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from mmjax.autotune.memory_plan import ActivationTracer, model_sharding, resolve_sequence_parallel
from mmjax.config import Config, DecoderConfig, Generator, Remat, UnetConfig, Unit
from mmjax.config.generators import image_size
from mmjax.config.model import step_vaes, towers_of
from mmjax.config.towers import Encoder
from mmjax.config.training import repeats_forward, unit_devices, unit_layout, unit_modules
from mmjax.console import size
from mmjax.data.plan.placement import Shape
from mmjax.data.plan.step_plan import RankLayout
from mmjax.errors import UserError
from mmjax.models.layer_stacks import split_scanned
from mmjax.models.model import Model, exclude, modules_of, partition
from mmjax.models.quantization import cast_frozen, parameter_shapes
from mmjax.models.stage import Piece, Stage
from mmjax.parallel.sharding import AXES, ShardingRules, row_ranks, sharding
from mmjax.planning.flops import frozen_modules, layer_policies, recompute_flops, runs_twice, stage_flops
from mmjax.planning.hardware import Device
from mmjax.planning.memory import (
    ACTIVATION,
    LOADED,
    MASTER,
    DeviceBatch,
    ModelSharding,
    SavedBytes,
    batch_bytes,
    divide_by_tensor_parallelism,
    exchange_bytes,
    layer_backward_bytes,
    loss_bytes,
    reordered_elements,
    sent_slots,
    token_bytes,
    unet_bytes,
    vae_bytes,
)
from mmjax.planning.remat import MemoryLimit, MemoryPlan, Option, StagePlan, choose_policies
from mmjax.planning.schedules import Schedule, list_stages, make_schedule, schedule_name, stage_cuts, unit_graph
from mmjax.planning.simulate import StageTimes, Timeline, simulate
from mmjax.planning.step_time import Speed
from mmjax.planning.work import resolve_attention, row_work
from mmjax.runtime.passes import trained_activations
from mmjax.runtime.state import make_optimizer, shardings_with_moments


class ShardedPiece(NamedTuple):
    """Layers of one tower, and what lies of them on each device of their stage."""

    piece: Piece
    parameters: int  # on all devices together
    trainable: float  # bytes on each device; with the last stage's copy of a tied embedding, which another updates
    scanned: float  # of these, bytes of scanned stacks
    frozen: float  # bytes on each device, as `cast_frozen` leaves them
    moments: float  # bytes on each device
    experts: float  # of trainable and frozen, bytes on each device of experts, which others on `expert` have not
    has_backward: bool


class ShardedStage(NamedTuple):
    """A stage on devices that need not be there."""

    name: str
    stage: Stage
    layout: Unit
    mesh: AbstractMesh
    devices: range  # numbers in the order in which units take them; stages that share them have the same
    pieces: tuple[ShardedPiece, ...]

    @property
    def rules(self) -> ShardingRules:
        """Return the rules of its layout."""
        return ShardingRules.of(self.layout)

    @property
    def sharding(self) -> ModelSharding:
        """Return how its arrays are spread over its mesh."""
        return model_sharding(self.layout, self.mesh.shape)


def shard_stages(config: Config) -> list[ShardedStage]:
    """Cut a model into the stages of its units, and its parameters over their meshes."""
    model = Model.build(config.model, jnp.dtype(config.training.precision), stage_cuts(config))
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
        pieces = tuple(_shard_piece(config, model, piece, mesh, rules, trained) for piece in stage.pieces)
        sharded.append(ShardedStage(in_unit.name, stage, unit, mesh, range(first, first + count), pieces))
    return sharded


def _shard_piece(
    config: Config, model: Model, piece: Piece, mesh: AbstractMesh, rules: ShardingRules, trained: frozenset[str]
) -> ShardedPiece:
    select = partial(piece.select, stacks=model.runs[piece.tower])
    abstract = select(model.abstract)
    axes_of = select(model.axes)
    layouts = jax.tree.map(
        lambda axes, leaf: sharding(mesh, rules, leaf.shape, axes),
        axes_of,
        abstract,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    frozen = frozenset(model.frozen) & modules_of(abstract)
    parts, part_layouts = partition(abstract, frozen), partition(layouts, frozen)
    owned, owned_layouts = parts, part_layouts
    if piece.tower == "llm" and model.config.llm.tied and not piece.first:
        # The first stage owns the table and has its moments.
        table = {"llm": {"embed": model.abstract["llm"]["embed"]}}
        owned, owned_layouts = (tuple(exclude(part, table) for part in pair) for pair in (parts, part_layouts))
    optimizer = replace(make_optimizer(config.optimizer, model.axes, model.dtype), offloads=False)
    moments = jax.eval_shape(optimizer.init, owned[0])
    moment_layouts = shardings_with_moments(optimizer, owned[0], *owned_layouts, mesh=mesh).optimizer
    constant = jax.eval_shape(partial(cast_frozen, dtype=model.dtype), parts[1])
    by_axes = jax.tree.leaves(axes_of, is_leaf=lambda x: isinstance(x, tuple))
    of_experts = [n for n, axes in enumerate(by_axes) if "experts" in axes]
    experts = tuple([jax.tree.leaves(tree)[n] for n in of_experts] for tree in (abstract, layouts))
    expert_bytes = _on_device(*experts) * (model.dtype.itemsize / MASTER if "llm" in frozen else 1)
    return ShardedPiece(
        piece=piece,
        parameters=sum(math.prod(shape) for part in owned for shape in parameter_shapes(part).values()),
        trainable=_on_device(parts[0], part_layouts[0]),
        scanned=_on_device(*(split_scanned(tree)[0] for tree in (parts[0], part_layouts[0]))),
        frozen=_on_device(constant, part_layouts[1]),
        moments=_on_device(moments, moment_layouts),
        experts=expert_bytes,
        # A frozen encoder with a frozen connector has no backward pass; a frozen LLM behind something trained has one.
        has_backward=bool(trained & set(piece.inputs) or jax.tree.leaves(parts[0])),
    )


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
        rows = {tower: max(1, n // r) for tower, n, r in zip(_towers(config), totals, ranks, strict=True)}
        batch = device_batch(config, layout, rows, layout.shapes[-1])
        sizes = {axis: getattr(unit, axis) for axis in AXES}
        way = resolve_sequence_parallel(config, unit, sizes, batch, device, unit_modules(name, unit))
        units[name] = replace(unit, sequence_parallel=way)
    return replace(config, units=units)


def plan_stages(config: Config, layout: RankLayout, speed: Speed, limit: MemoryLimit) -> list[StagePlan]:
    """Choose the remat policies of every stage, with the least recomputation that fits its devices.

    Stages that share devices share their memory. Raises UserError where a stage fits under no policies.
    """
    if layout.topology.context > 1:
        config = replace(config, model=resolve_attention(config.model, speed.rates, layout.topology.context))
    stages = shard_stages(config)
    schedule = make_schedule(schedule_name(config), unit_graph(config), config.batch.microbatches)
    tracer = ActivationTracer(config)
    plans: list[StagePlan] = []
    owners: dict[str, StagePlan] = {}
    for number, sharded in enumerate(stages):
        if owner := owners.get(sharded.stage.description):
            # A copy has the policies of its owner, and none of its moments.
            memory = owner.memory | {"optimizer": 0.0}
            devices = tuple(sharded.devices)
            plans.append(replace(owner, name=sharded.name, devices=devices, memory=memory, parameters=0))
            continue
        # Stages of one worker run in turn, but what they hold lies side by side.
        sharing = sum(stage.devices == sharded.devices for stage in stages)
        room = replace(limit, device=limit.device / sharing)
        plans.append(_plan_stage(config, stages, number, layout, speed, room, schedule, tracer))
        owners[sharded.stage.description] = plans[-1]
    return plans


def _plan_stage(
    config: Config,
    stages: Sequence[ShardedStage],
    number: int,
    layout: RankLayout,
    speed: Speed,
    limit: MemoryLimit,
    schedule: Schedule,
    tracer: ActivationTracer,
) -> StagePlan:
    sharded = stages[number]
    copies = (n for n, stage in enumerate(stages) if stage.stage.description == sharded.stage.description)
    in_flight = max(map(schedule.in_flight_bound, copies))
    towers = _towers(config)
    memory: dict[str, float] = {}
    layers, batches, options, policies = {}, {}, {}, {}
    peaks: list[Peaks] = []
    for part in sharded.pieces:
        piece, tower = part.piece, part.piece.tower
        rows = _rows_on_device(config, layout, stages, sharded if tower == "llm" else None)
        batches[tower] = batch = _longest_batch(config, layout, rows, tower)
        saved = _saved_bytes(config, tower, batch, sharded.sharding, tracer)
        # Without a backward pass nothing is kept of a microbatch.
        microbatches_held = in_flight if part.has_backward else 0
        options[tower] = {
            policy: Option(
                microbatches_held * bytes_.device,
                microbatches_held * bytes_.host,
                _recompute_seconds(config, tower, policy, batch, speed),
            )
            for policy, bytes_ in saved.items()
        }
        if isinstance(towers[tower], UnetConfig):
            policies[tower] = tuple(saved)  # it has one
        elif towers[tower].remat != "auto":
            policies[tower] = tuple(layer_policies(towers[tower])[piece.start : piece.stop])
        else:
            layers[tower] = piece.stop - piece.start
        unsaved = next(iter(saved.values())).device
        kinds, peak = _fixed_bytes(config, sharded, part, batch, unsaved, in_flight)
        memory |= {kind: memory.get(kind, 0.0) + bytes_ for kind, bytes_ in kinds.items()}
        peaks.append(peak)
    memory["messages"] += _deepstack_bytes(config, stages, number, layout, schedule)
    # Pieces run in turn.
    before_copies, beside_copies = map(max, zip(*peaks, strict=True))
    memory["transient"] = max(beside_copies, before_copies - memory["copies"])
    # Moments in host memory are loaded when activations are gone.
    moments = sum(part.moments for part in sharded.pieces)
    offloaded = moments if config.optimizer.offload else 0.0
    update = offloaded + memory["parameters"] + memory["gradients"] + memory["batch"]
    if layers:
        stated = [options[tower][policy] for tower in policies for policy in policies[tower]]
        fixed = sum(memory.values()) + sum(option.device for option in stated)
        host = limit.host - sum(option.host for option in stated)
        chosen = choose_policies(layers, {tower: options[tower] for tower in layers}, limit.device - fixed, host)
        if chosen is None or update > limit.device:
            smallest = fixed + sum(
                n * min(option.device for option in options[tower].values()) for tower, n in layers.items()
            )
            raise UserError(
                f"stage {sharded.name} needs {size(max(update, smallest))} of each device and there are "
                f"{size(limit.device)}, with as much computed again as can be; give its unit more devices by fsdp, "
                "tensor or pipeline, raise batch.microbatches, or move layers by its cuts",
                everywhere=True,
            )
        policies |= chosen
    memory["activations"] = sum(options[tower][policy].device for tower in options for policy in policies[tower])
    memory["transient"] += max(0.0, update - sum(memory.values()))
    seconds = [
        _seconds(config, sharded, part, policies[part.piece.tower], batches[part.piece.tower], speed)
        for part in sharded.pieces
    ]
    forward, backward = map(sum, zip(*seconds, strict=True))
    return StagePlan(
        name=sharded.name,
        devices=tuple(sharded.devices),
        mesh={axis: n for axis, n in sharded.mesh.shape.items() if n > 1},
        layers={part.piece.tower: range(part.piece.start, part.piece.stop) for part in sharded.pieces},
        policies={tower: tuple(policies[tower]) for tower in options},
        parameters=sum(part.parameters for part in sharded.pieces),
        in_flight=in_flight,
        memory=memory,
        forward=forward,
        backward=backward,
    )


def _towers(config: Config) -> dict[str, DecoderConfig | Encoder | Generator]:
    return {"llm": config.model.llm, **config.model.item_modules}


def _longest_batch(config: Config, layout: RankLayout, rows: Mapping[str, int], tower: str) -> DeviceBatch:
    """Return a device's part of the compiled shape with a tower's longest rows; memory is planned for it."""
    longest = max(layout.shapes, key=lambda shape: shape.lengths[list(rows).index(tower)])
    return device_batch(config, layout, rows, longest)


def device_batch(config: Config, layout: RankLayout, rows: Mapping[str, int], shape: Shape) -> DeviceBatch:
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
        context=context,
        pairs=pairs,
    )


def _saved_bytes(
    config: Config, tower: str, batch: DeviceBatch, sharding: ModelSharding, tracer: ActivationTracer
) -> dict[Remat, SavedBytes]:
    """Return the bytes that a layer saves of one microbatch on a device, by policy.

    The first policy is none, but of a UNet, which is one layer, its own.
    """
    rows, length = batch.shape[tower]
    if isinstance(unet := _towers(config)[tower], UnetConfig):
        return {unet.remat: SavedBytes(_unet_bytes(config, batch)[0])}
    positions = row_work(config.model, batch.shape)[tower].positions
    tower_config, activation = _towers(config)[tower], ACTIVATION[config.training.precision]
    how = sharding.parts(tower), sharding.sequence_parallel != "off"
    return {
        policy: divide_by_tensor_parallelism(bytes_, tower_config, policy, positions, activation, *how)
        for policy, bytes_ in tracer.saved_bytes(tower, rows, [length])[0].items()
    }


def _unet_bytes(config: Config, batch: DeviceBatch) -> tuple[float, float]:
    """Count the bytes that a UNet keeps of one microbatch, and those of its largest block's backward pass."""
    frozen = frozen_modules(config.model)
    activation = ACTIVATION[config.training.precision]
    saved, peaks = unet_bytes(config.model, row_work(config.model, batch.shape), frozen, activation)
    return saved, sum(peaks)


class Peaks(NamedTuple):
    """Bytes that no other kind covers."""

    before_copies: float  # of the loss and the exchange, when no weights are cast for backward
    beside_copies: float


def _fixed_bytes(
    config: Config, sharded: ShardedStage, part: ShardedPiece, batch: DeviceBatch, unsaved: float, in_flight: int
) -> tuple[dict[str, float], Peaks]:
    """Count the bytes of a stage's piece on each device by kind, apart from saved activations.

    unsaved: bytes that one layer saves without remat.
    """
    piece, sharding, trainable = part.piece, sharded.sharding, part.trainable
    tower = piece.tower
    activation = ACTIVATION[config.training.precision]
    work = row_work(config.model, batch.shape)[tower]
    positions = work.positions
    is_sink = bool(sharded.stage.losses) and not sharded.stage.outputs
    unet = isinstance(_towers(config)[tower], UnetConfig)
    # Gradients of scanned stacks are added to their sums layer by layer, the others behind the backward pass.
    gradients = trainable - part.scanned
    copies = before_copies = transient = tokens = messages = 0.0
    if part.has_backward and unet:
        copies = gradients + (0.0 if activation == MASTER else activation / MASTER * trainable)
        transient = _unet_bytes(config, batch)[1]
    elif part.has_backward:
        reordered = reordered_elements(_towers(config)[tower], piece.stop - piece.start, sharding, tower)
        # Computing in float32 needs no cast copy. The last stage's matrices are reordered before they are cast.
        cast = 0.0 if activation == MASTER else activation / MASTER * part.scanned
        copies = gradients + cast + (MASTER if is_sink else activation) * reordered
        transient = layer_backward_bytes(config.model, tower, unsaved, work, sharding, activation)
    # A connector stands behind its encoder, or before its generator.
    if part.has_backward and tower != "llm" and (piece.first if piece.generates else piece.last):
        tokens = in_flight * token_bytes(config.model, tower, replace(batch, context=1), activation)
    if batch.context > 1 and set(piece.sends_states) & set(sharded.stage.outputs):
        # Each device of a rank has the whole rows that a generator reads, as they came and in order.
        states = 2 * batch.context * positions * config.model.llm.width * activation
        transient = max(transient, states)
    if piece.makes_loss and not piece.generates:
        # Which backward makes when the loss is done with.
        before_copies = loss_bytes(config.model, positions, sharding, activation, config.training.loss_chunks or 1)
    if piece.first and (vae := step_vaes(config.model).get(tower)):
        # One image of each row at a time.
        encoding = vae_bytes(vae, image_size(config.model.generators[tower]), activation)
        before_copies = max(before_copies, batch.shape[tower][0] * encoding)
    # Tables that say which tokens are sent lie where the exchange is, and not with encoders and generators.
    plain, tables = replace(batch, widths={}), 0
    if exchanged := (*piece.encoders, *piece.sends_states):
        exchanging = replace(batch, widths={name: batch.widths[name] for name in exchanged})
        tables = 4 * sum(sent_slots(config.model, exchanging).values())
        # Encoders' tokens are exchanged before copies are made, and their gradients when the layers are done with.
        before_copies = max(before_copies, exchange_bytes(config.model, exchanging, activation))
    # Activations that arrive and leave, for every microbatch in flight one; of a UNet the states that it takes.
    if {*piece.inputs, *piece.outputs} & {*sharded.stage.inputs, *sharded.stage.outputs}:
        width = _towers(config)[tower].width if not unet else config.model.llm.width
        # Those of a frozen reference are kept for no backward pass.
        messages_held = in_flight + (repeats_forward(config.loss) and runs_twice(tower, config.model))
        messages = 2 * messages_held * (positions if not unet else work.tokens) * width * activation
    memory = {
        "parameters": trainable + part.frozen,
        "gradients": trainable,
        "optimizer": 0.0 if config.optimizer.offload else part.moments,
        # Weights cast for the computation and reordered, and a microbatch's gradients.
        "copies": copies,
        "batch": LOADED * config.batch.microbatches * (batch_bytes(config.model, plain, tower) + tables),
        "messages": messages,
        "tokens": tokens,
    }
    return memory, Peaks(before_copies, transient)


def _deepstack_bytes(
    config: Config, stages: Sequence[ShardedStage], number: int, layout: RankLayout, schedule: Schedule
) -> float:
    """Count the bytes of deepstack tokens that wait on each device of an LLM's stage for their layers' outputs."""
    producers = {name: n for n, placed in enumerate(stages) for name in placed.stage.outputs}
    rows = _rows_on_device(config, layout, stages)
    bytes_ = 0.0
    for name in stages[number].stage.inputs:
        encoder, deeper, _ = name.partition(".deeper.")
        if deeper:
            shape = _longest_batch(config, layout, rows, encoder).shape
            ends = stages[producers[name]], stages[number]
            made_on, added_on = (row_ranks(end.mesh, end.rules.token_rows) for end in ends)
            tokens = row_work(config.model, shape)[encoder].tokens * made_on / added_on
            size_of_token = config.model.llm.width * ACTIVATION[config.training.precision]
            # Those of a microbatch come before all stages between, and its maker has it in flight as long.
            bytes_ += schedule.in_flight_bound(producers[name]) * tokens * size_of_token
    return bytes_


def _rows_on_device(
    config: Config, layout: RankLayout, stages: Sequence[ShardedStage], receiver: ShardedStage | None = None
) -> dict[str, int]:
    """Count the rows of every tower on each of its devices; with a receiver, those whose tokens each of its gets."""
    by_tower = {part.piece.tower: receiver or sharded for sharded in stages for part in sharded.pieces}
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


def _seconds(
    config: Config,
    sharded: ShardedStage,
    part: ShardedPiece,
    policies: Sequence[Remat],
    batch: DeviceBatch,
    speed: Speed,
) -> tuple[float, float]:
    """Estimate the seconds of a piece's passes: of its layers as measured, or by their operations."""
    piece = part.piece
    tower, layers = piece.tower, range(piece.start, piece.stop)
    parts = sharded.sharding.parts(tower)
    measured = speed.layer(tower, batch.shape[tower])
    # Layers that were timed are taken out of the operations, and their times added.
    counted = () if measured else tuple(policies)
    chunks, reference = config.training.loss_chunks or 1, repeats_forward(config.loss)
    flops = stage_flops(config.model, tower, layers, counted, batch.shape, chunks, batch.pairs, reference)
    times = [x / parts / speed.rates.flops for x in flops[:2]]
    if measured:
        times[0] += len(layers) * measured["forward"] / parts
        times[1] += sum(measured[policy] - measured["forward"] for policy in policies) / parts
    return times[0], times[1] if part.has_backward else 0.0


def _recompute_seconds(config: Config, tower: str, policy: Remat, batch: DeviceBatch, speed: Speed) -> float:
    """Estimate the seconds that a policy adds to a layer's backward pass."""
    measured = speed.layer(tower, batch.shape[tower])
    if measured and policy in measured:  # offloading is timed only where it may be chosen
        return measured[policy] - measured["none"]
    if isinstance(_towers(config)[tower], UnetConfig):
        return 0.0  # its policy is its config's
    work = row_work(config.model, batch.shape)[tower]
    return recompute_flops(config.model, tower, work, policy) / speed.rates.flops


def simulate_stages(config: Config, plans: Sequence[StagePlan]) -> Timeline:
    """Simulate a step with equal microbatches of the largest shape, transfers not counted."""
    microbatches = config.batch.microbatches
    forward, backward = (
        np.array([[getattr(plan, name)] * microbatches for plan in plans]) for name in ("forward", "backward")
    )
    schedule = make_schedule(schedule_name(config), unit_graph(config), microbatches)
    return simulate(schedule, StageTimes(forward, backward))


def memory_plan_of(config: Config, plans: Sequence[StagePlan], limit: MemoryLimit, loss_chunks: int) -> MemoryPlan:
    """Return the run's memory plan: the policies of all towers, and the bytes of the fullest stage."""
    fullest = max(plans, key=lambda plan: plan.bytes)
    policies: dict[str, tuple[Remat, ...]] = dict.fromkeys(towers_of(config.model), ())
    # Those of copies are the same.
    parts = {(tower, layers.start): plan.policies[tower] for plan in plans for tower, layers in plan.layers.items()}
    # A tower's stages, by their layers, have the policies of the whole tower.
    for (tower, _), chosen in sorted(parts.items()):
        if tower in policies:  # a UNet has no layers
            policies[tower] += chosen
    fixed = {kind: n for kind, n in fullest.memory.items() if kind != "activations"}
    return MemoryPlan(
        policies=policies,
        loss_chunks=loss_chunks,
        fixed=fixed,
        activations={fullest.name: fullest.memory["activations"]},
        unsaved={},
        seconds=0.0,
        lower_bound=0.0,
        recompute_seconds={},
        largest_shape=0,
        sharding=ModelSharding(),
        limit=limit,
    )
