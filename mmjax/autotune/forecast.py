"""Forecast a run on a cluster that is not at hand: memory, time and balance, planned from its samples' lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from mmjax.autotune.cuts import cut_units
from mmjax.autotune.layer_profile import MeasureSpeed
from mmjax.autotune.memory_plan import in_units, profiled_shapes, suggest_settings
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.run_time import RunTime, StepTime, time_run
from mmjax.autotune.sharded_stages import choose_sequence_parallel, resolve_units
from mmjax.balance.parts import dist_ratio
from mmjax.balance.waits import Waits, mean_waits
from mmjax.config import (
    Config,
    Layout,
    LlmBalance,
    MeshConfig,
    NoBalance,
    PostBalance,
    Samples,
)
from mmjax.config.model import encoded_once, frozen_modules, stacked_towers
from mmjax.config.training import unit_devices
from mmjax.config.validation import check_layout
from mmjax.data.plan.budget import Budget
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.grouping import StepGrouper
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import Topology, waits_of
from mmjax.data.plan.placer import Balance
from mmjax.data.plan.step_plan import (
    RankLayout,
    StepPlan,
    StepPlanner,
    make_planner,
    make_step_planner,
)
from mmjax.data.plan.wait_advice import ranks_without_rows, waiting_advice
from mmjax.errors import UserError
from mmjax.parallel.sharding import AXES, RANKS, mesh_sizes
from mmjax.planning.flops import model_flops
from mmjax.planning.hardware import BANDWIDTH_EFFICIENCY, USABLE, Cluster
from mmjax.planning.item_encoding import (
    PlannedEncoding,
    batch_seconds,
    encoding_seconds,
    output_bytes,
)
from mmjax.planning.memory import ACTIVATION, GB
from mmjax.planning.prices import pair_costs
from mmjax.planning.remat import MemoryLimit, RunPlan
from mmjax.planning.speed import Speed
from mmjax.planning.work import length_work, resolve_attention
from mmjax.runtime.devices import make_topology
from mmjax.runtime.units import units_topology

SAMPLES = 50_000  # about so many, in 2 to 32 steps, are planned to see what a step is like
DRY_RUN = 100_000  # samples of the first steps, about, by which shapes are chosen
MICROBATCHES = 256  # so many at most are planned and timed
# Of the meshes that are compared: microbatches that are planned, shards, and powers of two of a
# step's microbatches.
COMPARED_MICROBATCHES = 64
FSDP = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_DOUBLINGS = 9


@dataclass(frozen=True)
class Forecast:
    """Forecast of a run on units or on one mesh, under one balancing method. Means are over the planned steps.

    work: of each module, `[steps, ranks]`. Several encoder ranks may share one LLM rank; the LLM's
    work then stands at each of them.
    """

    config: Config  # with cuts, and the resolved `sequence_parallel`
    cluster: Cluster
    mesh: dict[str, int]  # sizes of the axes where there are no units
    layout: RankLayout
    run_time: RunTime
    dist_ratio: dict[str, float]  # by module
    fill: dict[str, float]  # by module: useful share of its rows' positions
    waits: Waits
    work: dict[str, np.ndarray]
    samples: float  # per step
    tokens: float  # of the LLM, per step
    needed: float  # FLOPs per step, over all devices
    speed: Speed  # that the times rest on
    steps: tuple[StepPlan, ...]
    encoding: dict[str, PlannedEncoding]  # by encoder that encodes once

    @property
    def plan(self) -> RunPlan:
        """Return the plan, with the times of a mean microbatch."""
        return self.run_time.plan

    @property
    def time(self) -> StepTime:
        """Return the time of a step."""
        return self.run_time.step

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.time.total

    @property
    def first_seconds(self) -> float:
        """Return the seconds of a step of the first epoch, whose items are encoded before it."""
        return self.seconds + sum(encoding.seconds for encoding in self.encoding.values())

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation, of all of the cluster's devices."""
        peak = self.cluster.device.peak(self.config.training.precision) * self.cluster.devices
        return self.needed / (self.seconds * peak)

    @property
    def basis(self) -> str:
        """Describe the basis of the times."""
        return describe_basis(self.config, self.cluster, self.speed)


@dataclass(frozen=True)
class RunForecast:
    """Forecast of a run on a cluster. by_balance: by kind of `batch.balance`; all plan the same samples."""

    chosen: Forecast  # under the config's own balancing
    by_balance: dict[str, Forecast]
    epoch: int  # samples
    remedy: str = ""  # where it does not fit: the smallest change of settings that would
    longest: str = ""  # the sample that is much longer than the others
    # what makes ranks wait that no placing helps against, and what would help
    waits: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Return the updates of the whole run; approximate where its length is set in epochs."""
        training = self.chosen.config.training
        return training.steps or math.ceil(training.epochs * self.epoch / self.chosen.samples)

    @property
    def hours(self) -> float:
        """Return the hours that the whole run takes."""
        first = min(self.steps, math.ceil(self.epoch / self.chosen.samples))
        encoding = self.chosen.first_seconds - self.chosen.seconds
        return (self.steps * self.chosen.seconds + first * encoding) / 3600


class _Planned(NamedTuple):
    """A run's config, mesh and ranks, and the plans of its first steps."""

    config: Config
    mesh: dict[str, int]
    layout: RankLayout
    planner: StepPlanner
    steps: list[StepPlan]


def forecast_run(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    measure_speed: MeasureSpeed | None = None,
) -> RunForecast:
    """Forecast a run whose samples have the lengths of this index, and what other balancing would change on one mesh.

    measure_speed: measures the devices' speed with rows of these shapes; None: their data sheet's.

    Raises UserError where the mesh or the units do not go with the cluster, or the batch with the
    data.
    """
    # The config's own balance comes last, so that it replaces the default settings of its kind.
    compared: tuple[Balance, ...] = (
        () if config.units else (NoBalance(), LlmBalance(), PostBalance())
    )
    by_kind = {balance.kind: balance for balance in (*compared, config.batch.balance)}
    budget = make_budget(index, config, weights)
    count = int(np.clip(SAMPLES / budget.samples_per_step, 2, 32))
    count = min(count, max(1, MICROBATCHES // config.batch.microbatches))
    planned = {
        kind: _plan_steps(config, balance, cluster, index, weights, budget, count)
        for kind, balance in by_kind.items()
    }
    speed = Speed(cluster.device.rates(config.training.precision))
    if measure_speed is not None:
        speed = measure_speed(profiled_shapes(config, [steps.layout for steps in planned.values()]))
    by_balance = {kind: _forecast(steps, cluster, index, speed) for kind, steps in planned.items()}
    configured = planned[config.batch.balance.kind]
    chosen = by_balance[config.batch.balance.kind]
    remedy = ""
    if not chosen.plan.fits:

        def layouts(changed: Config) -> RankLayout:
            return make_planner(
                index, changed, weights, configured.layout.topology, None, _dry_run_steps(budget)
            )[1]

        remedy = suggest_settings(chosen.config, configured.mesh, layouts, speed, chosen.plan.limit)
    grouper = configured.planner.grouper
    return RunForecast(
        chosen=chosen,
        by_balance=by_balance,
        epoch=grouper.epoch_samples,
        remedy=remedy,
        longest=index.longest(grouper.budget.longest),
        waits=_describe_waits(chosen.config, grouper, configured.layout.topology, speed),
    )


def _dry_run_steps(budget: Budget) -> int:
    """Return the number of first steps by which shapes are chosen."""
    return max(2, int(DRY_RUN / budget.samples_per_step))


def _plan_steps(
    config: Config,
    balance: Balance,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    budget: Budget,
    steps: int,
) -> _Planned:
    """Plan the first steps of a run under one balancing method."""
    config = replace(config, batch=replace(config.batch, balance=balance))
    mesh = dict.fromkeys(AXES, 1)
    if config.units:
        needed = sum(map(unit_devices, config.units.values()))
        if needed > cluster.devices:
            raise UserError(f"the units need {needed} devices and {cluster} has {cluster.devices}")
        topology = units_topology(config.units)
    else:
        mesh = mesh_sizes(config.mesh, cluster.devices)
        check_layout(
            "mesh", replace(config.mesh, **mesh), config.model, alignment=config.batch.alignment
        )
        ranks_on_node = max(1, cluster.per_node // (mesh["tensor"] * mesh["context"]))
        topology = make_topology(
            config.mesh, math.prod(mesh[axis] for axis in RANKS), ranks_on_node, mesh
        )
    planner, layout = make_planner(index, config, weights, topology, budget, _dry_run_steps(budget))
    # Cuts and `sequence_parallel`, where the config leaves them open, depend on the planned rows.
    if config.units:
        cut = cut_units(config, layout, cluster.device, _memory_limit(config, cluster))
        if cut != config:
            config, planner = cut, make_step_planner(planner.grouper, cut, layout)
        config = resolve_units(config, layout, cluster.device)
    else:
        config = choose_sequence_parallel(config, mesh, layout, cluster.device)
    return _Planned(config, mesh, layout, planner, [planner.plan(step) for step in range(steps)])


def _memory_limit(config: Config, cluster: Cluster) -> MemoryLimit:
    """Return the memory that a run may use of each device."""
    return MemoryLimit(
        config.mesh.memory * GB or USABLE * cluster.device.memory, config.mesh.host_memory * GB
    )


def _forecast(planned: _Planned, cluster: Cluster, index: LengthIndex, speed: Speed) -> Forecast:
    config = planned.config
    layout = planned.layout
    limit = _memory_limit(config, cluster)
    on_units = in_units(config, planned.mesh)
    plan = plan_run(on_units, layout, speed, limit)
    run_time = time_run(
        on_units, layout, plan, cluster, speed, [step.microbatches for step in planned.steps]
    )
    model = resolve_attention(config.model, speed.rates, layout.topology.context)
    microbatches = [m for step in planned.steps for m in step.microbatches]
    names = ("llm", *model.item_modules)
    prices = pair_costs(model, speed.rates, frozen_modules(model), config.loss.repeats_forward)
    # [modules, steps, ranks]
    work = np.stack([sum(m.work() for m in step.microbatches) for step in planned.steps], axis=1)
    # [modules]: positions that hold data, of all positions that are computed.
    useful = sum(np.bincount(m.module, index.useful(m.samples), len(names)) for m in microbatches)
    positions = sum(
        layout.topology.ranks * np.multiply(layout.rows, m.shape.lengths) for m in microbatches
    )
    samples = np.concatenate([step.samples() for step in planned.steps])
    return Forecast(
        config=config,
        cluster=cluster,
        mesh=planned.mesh,
        layout=layout,
        run_time=run_time,
        dist_ratio=dict(zip(names, dist_ratio(work).mean(1).tolist(), strict=True)),
        fill=dict(zip(names, (useful / positions).tolist(), strict=True)),
        waits=mean_waits([waits_of(step.microbatches, prices, index) for step in planned.steps]),
        work=dict(zip(names, work, strict=True)),
        samples=len(samples) / len(planned.steps),
        tokens=float(index.llm_tokens[samples].sum()) / len(planned.steps),
        needed=needed_flops(config, index, samples) / len(planned.steps),
        speed=speed,
        steps=tuple(planned.steps),
        encoding=_plan_encoding(planned, cluster, index, speed),
    )


def _plan_encoding(
    planned: _Planned, cluster: Cluster, index: LengthIndex, speed: Speed
) -> dict[str, PlannedEncoding]:
    """Plan what encoders that encode once take; the seconds of a step are the mean of the planned ones."""
    config = planned.config
    model = resolve_attention(config.model, speed.rates, planned.layout.topology.context)
    activation = ACTIVATION[config.training.precision]
    by_encoder = {}
    for name in encoded_once(model):
        number = list(model.item_modules).index(name)
        units = [unit for unit in config.units.values() if name in unit.modules]
        devices = sum(map(unit_devices, units)) or cluster.devices
        processes = -(-devices // cluster.per_node)
        of_batch = cache(partial(batch_seconds, model, name, speed))
        seconds = 0.0
        for step in planned.steps:
            items = items_of(index, step.samples())
            positions = index.item_positions[items][index.item_encoder[items] == number].tolist()
            seconds += encoding_seconds(
                model.encoders[name], positions, of_batch, devices, processes
            )
        positions = index.item_positions[index.item_encoder == number]
        by_encoder[name] = PlannedEncoding(
            items=len(positions),
            size=output_bytes(model.encoders[name], positions, activation),
            seconds=seconds / len(planned.steps),
        )
    return by_encoder


def forecast_best_mesh(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    speed: Speed,
    proposals: Sequence[tuple[Layout, int]] = (),
) -> Forecast | None:
    """Find the mesh on which a run without units is fastest; None where none fits.

    Every module has one row on every rank. Of the least number of microbatches, doubled from 1,
    with which some `mesh.fsdp` fits without tensor parallelism, and of twice as many, the fastest
    counts. proposals: layouts, and numbers of microbatches, that are tried beside these with every
    `fsdp`.
    """
    # More microbatches take less memory and more time. So from one on they are doubled until a run
    # fits; once more, since more memory may spare recomputation; then it only gets slower.
    best: Forecast | None = None
    plain = Layout(expert=config.mesh.expert)
    for doublings in range(MAX_DOUBLINGS):
        size = config.batch.size
        if isinstance(size, Samples) and size.count < cluster.devices * 2**doublings:
            break  # less than a sample for each device
        fastest = _forecast_meshes(config, cluster, index, weights, speed, plain, 2**doublings)
        if best is not None:
            best = min((best, fastest or best), key=lambda f: f.seconds)
            break
        best = fastest
    fastest = [best]
    for proposal in proposals:
        with suppress(UserError):  # such as a number of loss chunks that does not go with `tensor`
            fastest.append(_forecast_meshes(config, cluster, index, weights, speed, *proposal))
    return min(filter(None, fastest), key=lambda f: f.seconds, default=None)


def _forecast_meshes(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    speed: Speed,
    layout: Layout,
    microbatches: int,
) -> Forecast | None:
    """Forecast a run on the fastest mesh with this expert, context and tensor parallelism; None where none fits.

    The LLM has one row on every rank, as encoders and generators have on each of theirs.
    """
    axes = {key: getattr(layout, key) for key in ("expert", "context", "tensor", "encoders")}
    mesh = replace(config.mesh, **axes)
    group = layout.context * layout.tensor
    ranks = cluster.devices // group
    topology = make_topology(
        replace(MeshConfig(), **axes), ranks, max(1, cluster.per_node // group), axes
    )
    rows = {
        tower: ranks * (1 if tower == "llm" else topology.encoders_per_rank)
        for tower in config.batch.rows
    }
    batch = replace(config.batch, microbatches=microbatches, rows=rows)
    config = replace(config, units={}, batch=batch, mesh=mesh)
    # The batches are the same for every `fsdp`, so they are planned once.
    budget = make_budget(index, config, weights)
    steps = max(1, COMPARED_MICROBATCHES // microbatches)
    planner, rank_layout = make_planner(index, config, weights, topology, budget, steps)
    plans = [planner.plan(step) for step in range(min(2, steps))]
    copies = ranks // layout.expert
    forecasts = []
    for fsdp in (n for n in FSDP if copies % n == 0):
        on_mesh = replace(config, mesh=replace(mesh, data=copies // fsdp, fsdp=fsdp))
        sizes = mesh_sizes(on_mesh.mesh, cluster.devices)
        on_mesh = choose_sequence_parallel(on_mesh, sizes, rank_layout, cluster.device)
        forecasts.append(
            _forecast(_Planned(on_mesh, sizes, rank_layout, planner, plans), cluster, index, speed)
        )
    return min((f for f in forecasts if f.plan.fits), key=lambda f: f.seconds, default=None)


def describe_basis(config: Config, cluster: Cluster, speed: Speed) -> str:
    """Describe the basis of forecast times: measured layer times and rates, and assumed shares of the peak."""
    device = cluster.device
    rates = speed.rates
    towers: dict[str, list[str]] = {}  # by where their layers were timed
    for tower in stacked_towers(config.model):
        if tower in speed.measured:
            towers.setdefault(speed.measured[tower].source, []).append(tower)
    everywhere = sum(map(len, towers.values())) == 1 + len(config.model.item_modules)
    if everywhere and len(towers) == 1:
        parts = [f"from layer times measured {next(iter(towers))}"]
    else:
        parts = [
            f"layer times of {', '.join(names)} measured {source}"
            for source, names in towers.items()
        ]
    peak = device.peak(config.training.precision)
    phrases = {"products": f"{rates.flops / peak:.0%} of peak"}
    if not everywhere:  # else layers' attention and kernels are timed with them
        if rates.attention:
            phrases["attention"] = f"{rates.attention / peak:.0%} in attention"
        if rates.launch:
            phrases["launch"] = f"{1e6 * rates.launch:.2g} us a kernel"
    elsewhere = " outside layers" if towers else ""
    stated = [text for key, text in phrases.items() if getattr(device.measured, key) is not None]
    assumed = [text for key, text in phrases.items() if getattr(device.measured, key) is None]
    if stated:
        parts.append(f"measured ({device.measured_in}): {', '.join(stated)}{elsewhere}")
    if assumed:
        parts.append(f"assumes {', '.join(assumed)}{elsewhere}")
    return "; ".join(parts)


def describe_links(cluster: Cluster) -> list[str]:
    """Describe the rates of links and memories that were measured, and those of links that are assumed, on one line."""
    device = cluster.device
    measured = cluster.device.measured
    links = (
        [("between devices of a node", measured.link, device.link)] if cluster.per_node > 1 else []
    )
    if cluster.nodes > 1:
        links.append(("to other nodes", measured.network, device.network))
    memories = (("of the memory", measured.memory), ("to the host", measured.host))
    stated = [f"{rate / 1e9:.3g} GB/s {where}" for where, rate, *_ in (*links, *memories) if rate]
    assumed = [f"{sheet / 1e9:.3g} GB/s {where}" for where, rate, sheet in links if not rate]
    parts = [f"measured ({device.measured_in}): {', '.join(stated)}"] if stated else []
    if assumed:
        share = f"{BANDWIDTH_EFFICIENCY:.0%} of {'either' if len(assumed) > 1 else 'it'}"
        parts.append(
            f"assumes {', '.join(assumed)}, {share}, no latency (--measured FILE states others)"
        )
    return [f"links  {'; '.join(parts)}"] if parts else []


def _describe_waits(
    config: Config, grouper: StepGrouper, topology: Topology, speed: Speed
) -> tuple[str, ...]:
    names = ("llm", *config.model.item_modules)
    model = resolve_attention(config.model, speed.rates, topology.context)
    prices = pair_costs(model, speed.rates, frozen_modules(model), config.loss.repeats_forward)
    advice = waiting_advice(grouper, prices, topology.ranks, names, topology.context)
    return *ranks_without_rows(grouper, topology.ranks, names), *filter(None, [advice])


def items_of(index: LengthIndex, samples: np.ndarray) -> np.ndarray:
    """Return the numbers of all items of these samples in the index, sample after sample."""
    first = index.item_start[samples]
    count = np.diff(index.item_start)[samples]
    # Each sample's run of `arange` is shifted to its first item: first = [7, 2], count = [2, 3] ->
    # arange = [0 1 | 2 3 4] + repeat([7 - 0, 2 - 2]) = [7 8 | 2 3 4].
    return np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)


def needed_flops(config: Config, index: LengthIndex, samples: np.ndarray) -> float:
    """Count the FLOPs that the model needs for these samples, without padding and recomputation."""
    items = items_of(index, samples)
    work = length_work(
        config.model,
        index.llm_tokens[samples],
        index.item_encoder[items],
        index.item_useful[items],
        index.item_tokens[items],
    )
    reference = config.loss.repeats_forward
    flops = model_flops(config.model, work, frozen_modules(config.model), reference)
    return sum(of_module.total for of_module in flops.values())
