"""Choose the units of a run for a cluster: costs of its towers' layers by config and data, then the allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mmjax.autotune.layer_profile import MeasureSpeed
from mmjax.config import Config, MeshConfig, ModelConfig, Remat, UnetConfig, Unit
from mmjax.config.model import layers_of, towers_of
from mmjax.config.towers import head_counts
from mmjax.config.training import repeats_forward
from mmjax.cost.table import module_parameters, parameters
from mmjax.data.plan.grouping import make_budget
from mmjax.data.plan.length_index import LengthIndex
from mmjax.errors import UserError
from mmjax.pipeline.forecast import PipelineForecast, forecast_pipeline
from mmjax.planning.allocate import Allocation, allocate
from mmjax.planning.allocate_chain import ChainAllocation, allocate_chain
from mmjax.planning.flops import executed, frozen_modules, needed_gradients, recompute_flops
from mmjax.planning.hardware import USABLE, Cluster
from mmjax.planning.memory import (
    ACTIVATION,
    GB,
    MASTER,
    DeviceBatch,
    ModelSharding,
    SavedBytes,
    divide_by_tensor_parallelism,
    layer_backward_bytes,
    loss_bytes,
    moment_bytes,
    parameter_bytes,
    saved_bytes_per_layer,
    token_bytes,
)
from mmjax.planning.stage_time import StageRun, pass_seconds
from mmjax.planning.step_time import BACKWARD_KERNELS, FORWARD_KERNELS, PASSES, ClusterRun, Speed
from mmjax.planning.tower_options import TENSOR, Problem, TowerCosts
from mmjax.planning.unet import unet_blocks, unet_saved_bytes, unets
from mmjax.planning.work import Work, resolve_attention, row_work, visited_pairs

# Shares of the memory that are tried, since costs of layers leave details out, and `Problem.exchanged_items`.
ROOMS = ((1.0, 1), (0.95, 1), (0.9, 2), (0.8, 2), (0.7, 4))
LINEAR = 4096  # positions of a traced row: long enough that no block of attention is half empty
WHOLE = 256  # a multiple of all that lengths of rows are rounded to
MICROBATCHES = tuple(2**k for k in range(1, 9))
LONG = 0.95  # quantile of lengths that a row whose layers are traced and timed holds
DRAWN = 20_000  # samples at most, by which a step's work is counted


def choose_units(
    config: Config, cluster: Cluster, index: LengthIndex, weights: Sequence[float], measure_speed: MeasureSpeed
) -> list[PipelineForecast]:
    """Find the fastest units of a run of each family that fits, and forecast it on them; the fastest first.

    Families are units of one tower each, and one chain of all towers. The config's own units do not matter. The search
    counts with mean microbatches; the forecast plans the data's.
    measure_speed: as in `forecast_run`. Raises UserError for several generators.
    """
    if len(generators := config.model.generators) > 1:
        raise UserError(f"units=auto: {len(generators)} generators stand behind the LLM; keep one, or write the units")
    problem = allocation_problem(config, cluster, index, weights, measure_speed)

    def fastest(
        allocate: Callable[[Problem], Any], configure: Callable[[Config, Any], Config]
    ) -> PipelineForecast | None:
        for share, items in ROOMS:
            allocation = allocate(problem._replace(room=share * problem.room, exchanged_items=items))
            if allocation is None:
                return None
            try:
                forecast = forecast_pipeline(configure(config, allocation), cluster, index, weights, measure_speed)
            except UserError:  # a stage does not fit
                continue
            # Stages whose remat the config states are forecast as they are.
            if all(stage.bytes <= forecast.plan.limit.device for stage in forecast.stages):
                return forecast
        return None

    families = fastest(allocate, with_units), fastest(allocate_chain, with_chain)
    return sorted(filter(None, families), key=lambda forecast: forecast.seconds)


def allocation_problem(
    config: Config, cluster: Cluster, index: LengthIndex, weights: Sequence[float], measure_speed: MeasureSpeed
) -> Problem:
    """Count what every tower's layers cost in a step of this data, at each degree of tensor parallelism.

    Layers are measured on a row that holds almost any sample or item, and take as long for a position of any row.
    """
    rates = cluster.device.rates(config.training.precision)
    config = replace(config, model=resolve_attention(config.model, rates))
    samples = int(make_budget(index, config, weights).samples_per_step)
    drawn = np.random.default_rng(config.seed).integers(0, len(index), min(DRAWN, 4 * samples))
    lengths = _lengths(config.model, index, drawn)
    share = samples / len(drawn)
    works = {tower: _step_work(config.model, tower, n, share) for tower, n in lengths.items()}
    row = {tower: _whole_blocks(work.long) for tower, work in works.items()}
    speed = measure_speed({tower: (1, [n]) for tower, n in row.items() if tower not in config.model.generators})
    measured = {
        tower: times._replace(seconds={row[tower]: times.interpolate(row[tower])})
        for tower, times in speed.measured.items()
    }
    speed = replace(speed, measured=measured)
    towers = towers_of(config.model)
    costs: dict[str, list[TowerCosts]] = {
        tower: [
            _tower_costs(config, cluster, tower, t, works, speed)
            for t in TENSOR
            if t <= cluster.per_node and all(count % t == 0 for count in head_counts(towers[tower]))
        ]
        for tower in (*config.model.encoders, "llm", *(name for name in towers if name in config.model.generators))
    }
    costs |= {name: [_unet_costs(config, name, works, speed)] for name in unets(config.model)}
    ranks = tuple(n for n in range(1, min(samples, cluster.devices) + 1) if samples % n == 0)
    room = config.mesh.memory * GB or USABLE * cluster.device.memory
    generator = next(iter(config.model.generators), "")
    return Problem(costs, cluster, room, ranks, MICROBATCHES, samples, generator)


def _lengths(model: ModelConfig, index: LengthIndex, samples: np.ndarray) -> dict[str, np.ndarray]:
    """Return the lengths of samples in the LLM and of their items in encoders, in positions of rows."""
    first, count = index.item_start[samples], np.diff(index.item_start)[samples]
    items = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    lengths = {"llm": index.llm_tokens[samples].astype(np.int64)}
    for k, name in enumerate(model.item_modules):
        lengths[name] = index.item_useful[items][index.item_encoder[items] == k].astype(np.int64)
    return {tower: n if len(n) else np.ones(1, np.int64) for tower, n in lengths.items()}


class StepWork(NamedTuple):
    """Work of a tower in a step, in positions of rows and pairs of attention."""

    positions: float
    pairs: float
    long: float  # positions that hold almost any sample or item
    longest: dict[int, float]  # of a microbatch, as expected, by how many microbatches a step has


def _step_work(model: ModelConfig, tower: str, lengths: np.ndarray, share: float) -> StepWork:
    """Count the work of a step with these lengths. share: of the drawn samples, in a step."""
    # The longest of n draws is expected to be longer than n of n + 1.
    longest = {count: float(np.quantile(lengths, 1 - 1 / (len(lengths) * share / count + 1))) for count in MICROBATCHES}
    return StepWork(
        positions=float(lengths.sum()) * share,
        pairs=_pairs(model, tower, lengths) * share,
        long=float(np.quantile(lengths, LONG)),
        longest=longest,
    )


def _whole_blocks(length: float) -> int:
    """Round a row's length up to what strides, merged patches and blocks of attention divide."""
    return -(-int(length) // WHOLE) * WHOLE


def _pairs(model: ModelConfig, tower: str, lengths: np.ndarray) -> float:
    """Count the pairs that attention visits, every sample or item at the beginning of a row."""
    config = {"llm": model.llm, **model.item_modules}[tower]
    if isinstance(config, UnetConfig) or config.attention == "dense":
        return float((lengths**2).sum())
    longest = _whole_blocks(float(lengths.max()))
    rows = np.arange(len(lengths))
    return float(visited_pairs(config, rows, np.zeros_like(rows), lengths, len(rows), longest).sum())


def _tower_costs(
    config: Config,
    cluster: Cluster,
    tower: str,
    tensor: int,
    works: Mapping[str, StepWork],
    speed: Speed,
) -> TowerCosts:
    model = config.model
    activation = ACTIVATION[config.training.precision]
    tower_config = towers_of(model)[tower]
    shape = {name: (1, max(1, int(work.positions))) for name, work in works.items()}
    batch = DeviceBatch(shape, {}, pairs={name: work.pairs for name, work in works.items()})
    work = row_work(model, shape, batch.pairs)[tower]
    sharding = ModelSharding(tensor, tensor, tensor)
    machine = ClusterRun(
        cluster,
        {"data": 1, "fsdp": 1, "tensor": tensor},
        sharding,
        speed,
        activation,
        config.training.loss_chunks or 1,
        reference=repeats_forward(config.loss),
    )
    length = _whole_blocks(works[tower].long) if tower_config.attention == "dense" else LINEAR
    by_policy = saved_bytes_per_layer(model, tower, (1, length), config.training.precision)
    traced = row_work(model, {tower: (1, length)})[tower].positions
    per_position = {policy: saved.device / traced for policy, saved in by_policy.items() if policy != "offload"}
    has_backward = bool(needed_gradients(tower, model, frozen_modules(model)))
    measured = speed.layer(tower, shape[tower])  # launches included
    launches = [0.0 if measured else n * speed.rates.launch for n in (FORWARD_KERNELS, BACKWARD_KERNELS)]
    passes = []
    for layer in range(tower_config.layers):
        if 1 < layer < tower_config.layers - 1:
            passes.append(passes[1])
            continue
        run = StageRun(
            tower=tower,
            layers=range(layer, layer + 1),
            policies=("none",),
            devices=range(tensor),
            machine=machine,
            trainable=0.0,
            frozen=0.0,
            moments=0.0,
            has_backward=has_backward,
            unsaved=per_position["none"],
        )
        passes.append(pass_seconds(model, run, batch))
    forward, backward = (
        np.maximum(np.array(column) - n, 0) for column, n in zip(zip(*passes, strict=True), launches, strict=True)
    )
    saved, again = _policies(config, tower, tensor, per_position, work, speed, has_backward)
    if tower != "llm":
        # What the connector keeps of tokens is spread over the layers.
        saved = saved + has_backward * token_bytes(model, tower, batch, activation) / tower_config.layers
    unsaved = float(saved.max())
    gathered = layer_backward_bytes(model, tower, unsaved, work, sharding, activation) * has_backward
    loss = loss_bytes(model, work.positions, sharding, activation, machine.loss_chunks) if tower == "llm" else 0.0
    trained, frozen, moments = _elements(config, tower)
    trained, frozen, moments = trained / tensor, frozen / tensor, moments / tensor
    memory = speed.rates.memory
    cast = 0 if activation == MASTER else MASTER + activation
    update = (5 * MASTER * trained + 2 * moments) / memory
    if config.optimizer.offload:
        update = update + 2 * moments / speed.rates.host
    return TowerCosts(
        tensor=tensor,
        width=tower_config.width,
        forward=forward,
        backward=backward * has_backward,
        smallest={count: n / shape[tower][1] for count, n in works[tower].longest.items()},
        launch=(launches[0], launches[1] * has_backward),
        cast_forward=cast * trained / memory,
        cast_backward=(cast + 2 * activation + 2 * MASTER) * trained / memory,
        # Parameters, gradients, and copies in the precision of the computation.
        state=(2 * MASTER + activation) * trained
        + activation * frozen
        + (0.0 if config.optimizer.offload else moments),
        gathered=activation * (trained + frozen),
        scattered=activation * trained,
        gradients=MASTER * trained,
        update=update,
        saved=saved,
        again=again,
        peak=(gathered, max(gathered, loss)),
        passed=float(work.positions * tower_config.width * activation),
        tokens=0.0 if tower == "llm" else float(max(work.tokens, 1) * model.llm.width * activation),
    )


def _unet_costs(config: Config, name: str, works: Mapping[str, StepWork], speed: Speed) -> TowerCosts:
    """Count what a UNet costs in a step: one stage, since blocks on the way up take what those on the way down made."""
    model = config.model
    unet = model.generators[name]
    rates = speed.rates
    activation = ACTIVATION[config.training.precision]
    frozen = frozen_modules(model)
    shape = {tower: (1, max(1, int(work.positions))) for tower, work in works.items()}
    work = row_work(model, shape)[name]
    images = work.tokens // unet.queries
    flops, connector = (executed(model, shape, frozen)[module] for module in (name, f"{name}.connector"))
    saved, largest = unet_saved_bytes(unet, images, activation, name not in frozen)
    unsaved = unet_saved_bytes(replace(unet, remat="none"), images, activation, name not in frozen)[0]
    has_backward = bool(needed_gradients(name, model, frozen))
    # The kernel's operations, of both passes together, are divided like the others.
    slower = flops.attention / flops.total * (1 / (rates.attention or rates.flops) - 1 / rates.flops)
    forward, backward = (
        flops_of_pass * (1 / rates.flops + slower) + of_connector / rates.flops + passes * unsaved / rates.memory
        for flops_of_pass, of_connector, passes in (
            (flops.forward, connector.forward, 1),
            (flops.backward, connector.backward, PASSES - 1),
        )
    )
    counts, moments = parameters(model), moment_bytes(model, frozen, config.optimizer)
    modules = (name, f"{name}.connector")
    trained = np.array([float(sum(counts[module] for module in modules if module not in frozen))])
    fixed = np.array([float(sum(counts[module] for module in modules if module in frozen))])
    moved = np.array([float(sum(moments.get(module, 0.0) for module in modules))])
    memory = rates.memory
    cast = 0 if activation == MASTER else MASTER + activation
    blocks = len(unet_blocks(unet))
    # Moments in host memory are loaded for the update.
    resident, loaded = (0.0, 2 * moved / rates.host) if config.optimizer.offload else (moved, 0.0)
    return TowerCosts(
        tensor=1,
        width=unet.widths[0],
        forward=np.array([forward]),
        backward=np.array([backward * has_backward]),
        smallest={count: n / shape[name][1] for count, n in works[name].longest.items()},
        launch=(FORWARD_KERNELS * rates.launch * blocks, BACKWARD_KERNELS * rates.launch * blocks * has_backward),
        cast_forward=cast * trained / memory,
        cast_backward=(cast + 2 * activation + 2 * MASTER) * trained / memory,
        state=(2 * MASTER + activation) * trained + activation * fixed + resident,
        gathered=activation * (trained + fixed),
        scattered=activation * trained,
        gradients=MASTER * trained,
        update=(5 * MASTER * trained + 2 * moved) / memory + loaded,
        saved=np.array([saved]),
        again=np.zeros(1),
        peak=(largest, largest),
        passed=0.0,
        tokens=float(max(work.tokens, 1) * model.llm.width * activation),
    )


def _policies(
    config: Config,
    tower: str,
    tensor: int,
    per_position: Mapping[Remat, float],
    work: Work,
    speed: Speed,
    has_backward: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that a layer saves and its seconds of recomputation, by policy: those on the convex hull."""
    if not has_backward:
        return np.zeros(1), np.zeros(1)
    tower_config = towers_of(config.model)[tower]
    activation = ACTIVATION[config.training.precision]
    measured = speed.layer(tower, (1, work.inputs or work.positions))
    points = sorted(
        (
            (
                measured[policy] - measured["none"]
                if measured
                else recompute_flops(config.model, tower, work, policy) / speed.rates.flops
            )
            / tensor,
            divide_by_tensor_parallelism(
                SavedBytes(n * work.positions), tower_config, policy, work.positions, activation, tensor
            ).device,
        )
        for policy, n in per_position.items()
    )
    hull: list[tuple[float, float]] = []
    for seconds, size in points:
        if hull and size >= hull[-1][1]:
            continue
        # Of three points, the middle one stays if it saves more bytes a second than the last would.
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (seconds - hull[-1][0]) >= (size - hull[-1][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((seconds, size))
    return np.array([size for _, size in hull]), np.array([seconds for seconds, _ in hull])


def _elements(config: Config, tower: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count every layer's trained and frozen parameters and its bytes of moments, with what is at the ends."""
    model = config.model
    frozen = frozen_modules(model)
    counts = parameters(model)
    moments = moment_bytes(model, frozen, config.optimizer)
    tower_config = towers_of(model)[tower]
    layers = np.full(tower_config.layers, module_parameters(model)[tower].layers / tower_config.layers)
    ends = counts[tower] - layers.sum()
    table = model.llm.vocab * model.llm.width if tower == "llm" else ends
    layers[0] += table
    layers[-1] += ends - table
    trained, untrained, moved = (
        np.zeros(tower_config.layers),
        np.zeros(tower_config.layers),
        np.zeros(tower_config.layers),
    )
    (untrained if tower in frozen else trained)[:] += layers
    if tower in frozen:  # quantised, they take the bytes of fewer
        activation = ACTIVATION[config.training.precision]
        untrained -= (
            counts[tower] - parameter_bytes(model, frozen, activation)[tower] / activation
        ) / tower_config.layers
    else:
        moved += moments[tower] * layers / layers.sum()
    for module, count in counts.items():
        if module == f"{tower}.connector":
            (untrained if module in frozen else trained)[-1] += count
            moved[-1] += moments.get(module, 0.0)
        elif module.endswith(".lora") and module.split(".")[0] == tower:
            trained += count / tower_config.layers
            moved += moments.get(module, 0.0) / tower_config.layers
    return trained, untrained, moved


def with_units(config: Config, allocation: Allocation) -> Config:
    """Return the config with the units of an allocation, and rows and microbatches for them."""
    # Larger tensor-parallel groups come first, so that each lies within a node.
    order = sorted(allocation.towers, key=lambda tower: -allocation.towers[tower].tensor)
    units = {
        tower: Unit(data=t.data, fsdp=t.fsdp, tensor=t.tensor, pipeline=t.stages, cuts=t.cuts)
        for tower, t in ((tower, allocation.towers[tower]) for tower in order)
    }
    ranks = {tower: t.data * t.fsdp for tower, t in allocation.towers.items()}
    every = math.lcm(*ranks.values())
    rows = {tower: ranks["llm"] if tower == "llm" else every for tower in ranks}
    return _on_units(config, units, rows, allocation.microbatches)


def with_chain(config: Config, allocation: ChainAllocation) -> Config:
    """Return the config with the unit of a chain, and rows and microbatches for it."""
    layers = [f"{tower}.{n}" for tower in allocation.towers for n in range(layers_of(config.model, tower))]
    unit = Unit(
        modules=allocation.towers,
        data=allocation.data,
        fsdp=allocation.fsdp,
        tensor=allocation.tensor,
        pipeline=len(allocation.cuts) + 1,
        cuts=tuple(layers[cut] for cut in allocation.cuts),
    )
    rows = dict.fromkeys(allocation.towers, allocation.data * allocation.fsdp)
    return _on_units(config, {"all": unit}, rows, allocation.microbatches)


def _on_units(config: Config, units: dict[str, Unit], rows: Mapping[str, int], microbatches: int) -> Config:
    batch = replace(config.batch, rows={tower: rows[tower] for tower in config.batch.rows}, microbatches=microbatches)
    mesh = replace(MeshConfig(), memory=config.mesh.memory, host_memory=config.mesh.host_memory)
    return replace(config, units=units, batch=batch, mesh=mesh)
