"""Choose the units of a run for a cluster: costs of its towers' layers by config and data, then the allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mmjax.autotune.forecast import (
    Forecast,
    RunForecast,
    forecast_best_mesh,
    forecast_run,
    items_of,
)
from mmjax.autotune.layer_profile import MeasureSpeed
from mmjax.autotune.sharded_stages import model_sharding, resolve_sequence_parallel
from mmjax.config import Config, Layout, MeshConfig, ModelConfig, Remat, Unit
from mmjax.config.model import encoded_once, frozen_modules, with_changes
from mmjax.config.validation import validate
from mmjax.cost.table import module_parameters, parameters
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.length_index import LengthIndex
from mmjax.errors import UserError
from mmjax.parallel.sharding import AXES, loss_parts_are_of_tokens
from mmjax.planning.allocate import Allocation, allocate
from mmjax.planning.allocate_chain import allocate_chain, allocate_meshes
from mmjax.planning.exchange_time import ClusterRun
from mmjax.planning.flops import needed_gradients, recompute_flops
from mmjax.planning.hardware import USABLE, Cluster
from mmjax.planning.memory import (
    ACTIVATION,
    GB,
    MASTER,
    DeviceBatch,
    SavedBytes,
    divide_by_tensor_parallelism,
    layer_backward_bytes,
    loss_bytes,
    moment_bytes,
    parameter_bytes,
    saved_bytes_per_layer,
    token_bytes,
    unet_bytes,
)
from mmjax.planning.speed import Speed
from mmjax.planning.stage_time import StageRun, elementwise_update_seconds, pass_times
from mmjax.planning.tower_options import Problem, RowLengths, TowerCosts
from mmjax.planning.work import Work, resolve_attention, row_work, visited_pairs
from mmjax.runtime.units import units_topology

# Shares of the memory that are tried, since costs of layers leave details out, and
# `Problem.exchanged_items`.
ROOMS = ((1.0, 1), (0.95, 1), (0.9, 2), (0.8, 2), (0.7, 4))
LINEAR = 4096  # positions of a traced row: long enough that no block of attention is half empty
WHOLE = 256  # a multiple of all that lengths of rows are rounded to
MICROBATCHES = tuple(2**k for k in range(1, 9))
TENSOR = CONTEXT = (1, 2, 4, 8)
EXPERT = tuple(2**k for k in range(1, 7))
VIRTUAL = (2, 4)
BESIDE_PARTS = 4  # of an encoder beside the LLM, at most
MESHES = 2  # beside those without tensor parallelism, that are forecast
LONG = 0.95  # quantile of lengths that a row whose layers are traced and timed holds
DRAWN = 20_000  # samples at most, by which a step's work is counted


def choose_units(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    measure_speed: MeasureSpeed,
) -> tuple[list[RunForecast], Forecast | None]:
    """Find the fastest units and the fastest mesh of a run, and forecast it on them.

    Returns a forecast for each family of units that fits, the fastest first: units of one tower
    each, one chain of all towers, and encoders beside the LLM; and that of one mesh for all
    modules. The config's own units do not matter. The search counts with mean microbatches; the
    forecast plans the data's.

    measure_speed: as in `forecast_run`. Raises UserError for a config that units do not go with.
    """
    for name in encoded_once(config.model):
        raise UserError(
            f"units=auto divides devices by what each module computes in a step, and model.encoders.{name}.encode=once "
            f"leaves {name} its connector; leave units=auto out, or use encode=step"
        )
    problem = allocation_problem(config, cluster, index, weights, measure_speed)

    def forecast_fitting(planned: Config) -> RunForecast | None:
        with suppress(UserError):  # such as a number of rows that does not go with the units
            validate(planned)
            forecast = forecast_run(planned, cluster, index, weights, measure_speed)
            return forecast if forecast.chosen.plan.fits else None
        return None

    def fastest(allocate: Callable[[Problem], Allocation | None]) -> RunForecast | None:
        # What the search takes to fit may not fit as it is planned: then it has less room.
        for share, items in ROOMS:
            allocation = allocate(
                problem._replace(room=share * problem.room, exchanged_items=items)
            )
            if allocation is None:
                return None
            if forecast := forecast_fitting(with_units(config, allocation)):
                return forecast
        return None

    apart = fastest(allocate)
    chain = fastest(allocate_chain)
    families = [apart, chain]
    if chain and problem.encoders and not problem.generators:
        families.append(forecast_fitting(_with_encoders_beside(chain.chosen.config, problem)))
    units = sorted(filter(None, families), key=lambda forecast: forecast.chosen.seconds)
    speed = units[0].chosen.speed if units else measure_speed({})
    meshes = [
        (unit, mesh.microbatches)
        for mesh in allocate_meshes(problem, MESHES)
        for unit in mesh.units.values()
    ]
    return units, forecast_best_mesh(config, cluster, index, weights, speed, meshes)


def allocation_problem(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    measure_speed: MeasureSpeed,
) -> Problem:
    """Count the costs of every tower's layers in a step of this data, under each layout.

    Layers are measured on a row that holds almost any sample or item, and take as long for a
    position of any row.
    """
    rates = cluster.device.rates(config.training.precision)
    config = replace(config, model=resolve_attention(config.model, rates))
    model = config.model
    # A step's work is counted on up to 20,000 samples drawn from the index, and scaled to a step's.
    samples = int(make_budget(index, config, weights).samples_per_step)
    drawn = np.random.default_rng(config.seed).integers(0, len(index), min(DRAWN, 4 * samples))
    lengths = _lengths(model, index, drawn)
    share = samples / len(drawn)
    works = {tower: _step_work(model, tower, n, share) for tower, n in lengths.items()}
    row = {tower: _whole_blocks(work.long) for tower, work in works.items()}
    speed = measure_speed(
        {tower: (1, [n]) for tower, n in row.items() if not model.towers[tower].is_generator}
    )
    # Of a grid of lengths only one stays, so that every row takes its time per position.
    measured = {
        tower: times._replace(seconds={row[tower]: times.interpolate(row[tower])})
        for tower, times in speed.measured.items()
    }
    speed = replace(speed, measured=measured)
    # A config that goes with no units at all is an error, rather than one without layouts.
    validate(_on_units(config, {tower: Unit() for tower in works}, 2))
    return Problem(
        towers={
            tower: [
                _tower_costs(config, cluster, tower, layout, works, speed)
                for layout in _list_layouts(config, cluster, tower)
            ]
            for tower in (*model.encoders, "llm", *model.towers_behind("llm"))
        },
        cluster=cluster,
        room=config.mesh.memory * GB or USABLE * cluster.device.memory,
        ranks=tuple(n for n in range(1, min(samples, cluster.devices) + 1) if samples % n == 0),
        microbatches=MICROBATCHES,
        samples=samples,
        generators=model.towers_behind("llm"),
        virtual=(
            1,
            *(n for n in VIRTUAL if _is_allowed(config, "llm", Unit(pipeline=2, virtual=n))),
        ),
        one_stage=() if _is_allowed(config, "llm", Unit(pipeline=2)) else ("llm",),
    )


def _list_layouts(config: Config, cluster: Cluster, tower: str) -> list[Layout]:
    """List the layouts that a config allows: tensor parallelism and, for the LLM, context and expert parallelism."""
    layouts = [Layout(tensor=tensor) for tensor in TENSOR]
    if tower == "llm":
        layouts += [
            Layout(tensor=tensor, context=context) for tensor in TENSOR for context in CONTEXT[1:]
        ]
        layouts += [Layout(tensor=tensor, expert=expert) for tensor in TENSOR for expert in EXPERT]
    return [
        layout
        for layout in layouts
        if cluster.per_node % (layout.tensor * layout.context) == 0
        and layout.expert <= cluster.devices
        and _is_allowed(config, tower, Unit(**vars(layout)))
    ]


def _is_allowed(config: Config, tower: str, unit: Unit) -> bool:
    """Return whether a config allows these units of a tower."""
    units = {name: Unit() for name in ("llm", *config.model.item_modules)} | {tower: unit}
    try:
        validate(_on_units(config, units, 2))
    except UserError:
        return False
    return True


def _lengths(model: ModelConfig, index: LengthIndex, samples: np.ndarray) -> dict[str, np.ndarray]:
    """Return the lengths of samples in the LLM and of their items in encoders, in positions of rows."""
    items = items_of(index, samples)
    lengths = {"llm": index.llm_tokens[samples].astype(np.int64)}
    for k, name in enumerate(model.item_modules):
        lengths[name] = index.item_useful[items][index.item_encoder[items] == k].astype(np.int64)
    return {tower: n if len(n) else np.ones(1, np.int64) for tower, n in lengths.items()}


class StepWork(NamedTuple):
    """Work of a tower in a step, in positions of rows and pairs of attention."""

    positions: float
    pairs: float
    long: float  # positions that hold almost any sample or item
    lengths: RowLengths


def _step_work(model: ModelConfig, tower: str, lengths: np.ndarray, share: float) -> StepWork:
    """Count the work of a step with these lengths. share: of the drawn samples, in a step."""
    positions = float(lengths.sum()) * share
    return StepWork(
        positions=positions,
        pairs=_pairs(model, tower, lengths) * share,
        long=float(np.quantile(lengths, LONG)),
        lengths=RowLengths(np.sort(lengths) / max(1.0, positions), len(lengths) * share),
    )


def _whole_blocks(length: float) -> int:
    """Round a row's length up to what strides, merged patches and blocks of attention divide."""
    return -(-int(length) // WHOLE) * WHOLE


def _pairs(model: ModelConfig, tower: str, lengths: np.ndarray) -> float:
    """Count the pairs that attention visits, every sample or item at the beginning of a row."""
    config = model.towers[tower]
    if not config.is_stack or config.attention == "dense":
        return float((lengths**2).sum())
    longest = _whole_blocks(float(lengths.max()))
    rows = np.arange(len(lengths))
    return float(
        visited_pairs(config, rows, np.zeros_like(rows), lengths, len(rows), longest).sum()
    )


def _tower_costs(
    config: Config,
    cluster: Cluster,
    tower: str,
    layout: Layout,
    works: Mapping[str, StepWork],
    speed: Speed,
) -> TowerCosts:
    model = resolve_attention(config.model, speed.rates, layout.context)
    activation = ACTIVATION[config.training.precision]
    chunks = config.training.loss_chunks or 1
    mesh = {axis: getattr(layout, axis) for axis in AXES}
    of_tokens = loss_parts_are_of_tokens(mesh, config.loss)
    tower_config = model.towers[tower]
    layers = tower_config.layers
    frozen = frozen_modules(model)
    has_backward = bool(needed_gradients(tower, model, frozen))
    # Devices of a rank share the LLM's rows.
    parts = {name: layout.context if name == "llm" else 1 for name in works}
    shape = {name: (1, max(1, int(work.positions / parts[name]))) for name, work in works.items()}
    pairs = {name: work.pairs / parts[name] for name, work in works.items()}
    batch = DeviceBatch(shape, {}, pairs=pairs, context=layout.context)
    work = row_work(model, shape, pairs)[tower]
    way = resolve_sequence_parallel(
        replace(config, model=model), layout, mesh, batch, cluster.device, (tower,)
    )
    machine = ClusterRun(
        cluster,
        mesh,
        model_sharding(replace(layout, sequence_parallel=way), mesh),
        speed,
        activation,
        reference=config.loss.repeats_forward,
    )
    # Bytes that layers save and seconds of their recomputation by policy, of a step's whole work.
    if not tower_config.is_stack:
        amounts = {tower: work}
        saved, peaks = unet_bytes(model, amounts, frozen, activation)
        plain = with_changes(model, {tower: {"remat": "none"}})
        unsaved = unet_bytes(plain, amounts, frozen, activation)[0]
        peak = sum(peaks)
        sizes = np.array([saved])
        again = np.zeros(1)
    else:
        length = _whole_blocks(works[tower].long) if tower_config.attention == "dense" else LINEAR
        by_policy = saved_bytes_per_layer(model, tower, (1, length), config.training.precision)
        traced = row_work(model, {tower: (1, length)})[tower].positions
        per_position = {
            policy: saved.device / traced
            for policy, saved in by_policy.items()
            if policy != "offload"
        }
        sizes = again = np.zeros(1)
        if has_backward:
            sizes, again = _policies(model, tower, machine, per_position, work)
        unsaved = per_position["none"] * work.positions
        peak = layer_backward_bytes(
            model, tower, float(sizes.max()), work, machine.sharding, activation
        )
    # Layers 0, 1 and the last are timed: the first and the last have what stands around the layers,
    # and those between are like layer 1. Each once more with next to no work.
    passes = []
    empty = []
    nothing = replace(batch, shape=dict.fromkeys(shape, (1, 1)), pairs=dict.fromkeys(pairs, 0.0))
    for layer in range(layers):
        if 1 < layer < layers - 1:
            passes.append(passes[1])
            empty.append(empty[1])
            continue
        run = StageRun(
            tower=tower,
            layers=range(layer, layer + 1),
            policies=("none",),
            devices=range(layout.tensor * layout.context),
            machine=machine,
            trainable=0.0,
            frozen=0.0,
            moments=0.0,
            has_backward=has_backward,
            unsaved=unsaved / work.positions,
            logits_again=model.makes_images or (chunks > 1 and not of_tokens),
        )
        passes.append([passed.total for passed in pass_times(model, run, batch)])
        empty.append([passed.total for passed in pass_times(model, run, nothing)])
    # What a pass takes however little it computes.
    launch = np.mean(empty, axis=0)
    forward, backward = np.maximum(np.array(passes) - empty, 0).T
    if tower != "llm":
        # What the connector keeps of tokens is spread over the layers.
        sizes = (
            sizes
            + has_backward
            * token_bytes(model, tower, replace(batch, context=1), activation)
            / layers
        )
    loss = 0.0
    if tower == "llm":
        loss = loss_bytes(model, work.positions, machine.sharding, activation, chunks, of_tokens)
    trained, untrained, moments = (
        elements / layout.tensor for elements in _elements(config, tower)
    )
    resident = 0.0 if config.optimizer.offload else moments
    cast = 0 if activation == MASTER else MASTER + activation
    return TowerCosts(
        layout=layout,
        width=tower_config.width,
        forward=forward,
        backward=backward,
        lengths=works[tower].lengths,
        launch=(float(launch[0]), float(launch[1])),
        cast_forward=cast * trained / speed.rates.memory,
        cast_backward=(cast + 2 * activation + 2 * MASTER) * trained / speed.rates.memory,
        # Parameters, gradients, and copies in the precision of the computation.
        state=(2 * MASTER + activation) * trained + activation * untrained + resident,
        gathered=activation * (trained + untrained),
        scattered=activation * trained,
        gradients=MASTER * trained,
        update=elementwise_update_seconds(MASTER * trained, moments, config.optimizer, machine),
        saved=sizes,
        again=again,
        peak=(peak * has_backward, max(peak * has_backward, loss)),
        passed=float(work.positions * getattr(tower_config, "width", 0) * activation),
        tokens=0.0 if tower == "llm" else float(max(work.tokens, 1) * model.llm.width * activation),
        experts=module_parameters(model)[tower].experts / parameters(model)[tower],
    )


def _policies(
    model: ModelConfig,
    tower: str,
    machine: ClusterRun,
    per_position: Mapping[Remat, float],
    work: Work,
) -> tuple[np.ndarray, np.ndarray]:
    """Return saved bytes and recomputation seconds of a layer for the remat policies on their convex hull."""
    tower_config = model.towers[tower]
    parts = machine.sharding.parts(tower)
    how = machine.activation, parts, machine.sharding.sequence_parallel != "off"
    measured = machine.speed.layer(tower, (1, work.inputs or work.positions))

    def seconds(policy: Remat) -> float:
        if measured:
            return (measured[policy] - measured["none"]) / parts
        return recompute_flops(model, tower, work, policy) / machine.speed.rates.flops / parts

    points = sorted(
        (
            seconds(policy),
            divide_by_tensor_parallelism(
                SavedBytes(n * work.positions), tower_config, policy, work.positions, *how
            ).device,
        )
        for policy, n in per_position.items()
    )
    # Points rise in seconds; on the hull bytes fall, by less and less for each second more. Of (0
    # s, 10 GB), (1 s, 8 GB) and (2 s, 2 GB) the second drops out: half of the layers with each of
    # the others take 1 s and 6 GB.
    hull: list[tuple[float, float]] = []
    for again, size in points:
        if hull and size >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (again - hull[-1][0]) >= (
            size - hull[-1][1]
        ) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((again, size))
    return np.array([size for _, size in hull]), np.array([again for again, _ in hull])


def _elements(config: Config, tower: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count every layer's trained and frozen parameters and bytes of moments, with embedding, head and connector."""
    model = config.model
    frozen = frozen_modules(model)
    counts = parameters(model)
    moments = moment_bytes(model, frozen, config.optimizer)
    depth = model.towers[tower].layers
    layers = np.full(depth, module_parameters(model)[tower].layers / depth)
    # What is outside the layers stands at the first and the last: of the LLM the embedding in
    # front, the output table behind; of the others all in front.
    ends = counts[tower] - layers.sum()
    table = model.llm.vocab * model.llm.width if tower == "llm" else ends
    layers[0] += table
    layers[-1] += ends - table
    trained, untrained, moved = (np.zeros(depth) for _ in range(3))
    (untrained if tower in frozen else trained)[:] += layers
    if tower in frozen:  # quantised, they take the bytes of fewer
        activation = ACTIVATION[config.training.precision]
        untrained -= (
            counts[tower] - parameter_bytes(model, frozen, activation)[tower] / activation
        ) / depth
    else:
        moved += moments[tower] * layers / layers.sum()
    for module, count in counts.items():
        if module == f"{tower}.connector":
            (untrained if module in frozen else trained)[-1] += count
            moved[-1] += moments.get(module, 0.0)
        elif module.endswith(".lora") and module.split(".")[0] == tower:
            trained += count / depth
            moved += moments.get(module, 0.0) / depth
    return trained, untrained, moved


def with_units(config: Config, allocation: Allocation) -> Config:
    """Return the config with the units of an allocation, and rows and microbatches for them."""
    # Larger groups come first, so that each lies within a node.
    units = sorted(allocation.units.items(), key=lambda item: -item[1].tensor * item[1].context)
    return _on_units(config, dict(units), allocation.microbatches)


def _with_encoders_beside(chain: Config, problem: Problem) -> Config:
    """Return the config with the LLM on all stages of a chain, and a copy of every encoder on each of them.

    Encoders are cut into parts that take at most half as long as a stage of the LLM, 4 at most.
    """
    (unit,) = chain.units.values()
    units = {"llm": replace(unit, modules=(), cuts=())}
    seconds = {tower: costs[0].forward.sum() for tower, costs in problem.towers.items()}
    for name in problem.encoders:
        parts = math.ceil(2 * unit.pipeline * seconds[name] / seconds["llm"])
        units[name] = Unit(
            beside="llm", virtual=min(parts, BESIDE_PARTS, len(problem.towers[name][0].forward))
        )
    return _on_units(chain, units, chain.batch.microbatches)


def _on_units(config: Config, units: dict[str, Unit], microbatches: int) -> Config:
    topology = units_topology(units)
    items = topology.ranks * topology.encoders_per_rank
    rows = {tower: topology.ranks if tower == "llm" else items for tower in config.batch.rows}
    mesh = replace(MeshConfig(), memory=config.mesh.memory, host_memory=config.mesh.host_memory)
    batch = replace(config.batch, rows=rows, microbatches=microbatches)
    return replace(config, units=units, batch=batch, mesh=mesh)
