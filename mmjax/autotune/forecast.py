"""Forecast a run on a cluster that is not at hand: memory, time and balance, planned from its samples' lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import jax
import numpy as np

from mmjax.autotune.compile_run import Programs, compile_run
from mmjax.autotune.layer_profile import MeasureSpeed
from mmjax.autotune.memory_plan import apply_memory_plan, profiled_shapes, suggest_settings
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import choose_sequence_parallel, device_microbatch, on_one_mesh
from mmjax.autotune.stage_memory import unsaved_bytes
from mmjax.balance.parts import dist_ratio
from mmjax.balance.waits import Waits, mean_waits
from mmjax.config import (
    Config,
    Layout,
    LlmBalance,
    MeshConfig,
    ModelConfig,
    NoBalance,
    PostBalance,
    Samples,
    UnetConfig,
)
from mmjax.config.model import towers_of
from mmjax.config.training import repeats_forward
from mmjax.config.validation import check_layout
from mmjax.data.plan.grouping import Budget, StepGrouper, make_budget
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import Balance, MicrobatchPlan, Topology, waits_of
from mmjax.data.plan.step_plan import RankLayout, StepPlan, make_planner
from mmjax.data.plan.wait_advice import ranks_without_rows, waiting_advice
from mmjax.errors import UserError
from mmjax.parallel.sharding import RANKS, mesh_sizes
from mmjax.planning.flops import frozen_modules, model_flops, pair_costs
from mmjax.planning.hardware import BANDWIDTH_EFFICIENCY, USABLE, Cluster
from mmjax.planning.memory import ACTIVATION, GB
from mmjax.planning.remat import MemoryLimit, RunPlan
from mmjax.planning.step_time import ClusterRun, Speed, StepTime, step_time
from mmjax.planning.work import length_work, resolve_attention, visited_pairs
from mmjax.runtime.devices import make_topology

SAMPLES = 50_000  # about so many, in 2 to 32 steps, are planned to see what a step is like
DRY_RUN = 100_000  # samples of the first steps, about, by which shapes are chosen
# Of the meshes that are compared with a pipeline: microbatches that are planned, shards, and powers of two of a step's
# microbatches.
MICROBATCHES = 64
FSDP = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_DOUBLINGS = 9


@dataclass(frozen=True)
class BalanceForecast:
    """Forecast of the run under one balancing method. By module: dist_ratio and fill, means over steps, and work.

    work: `[steps, ranks]`. Several encoder ranks may share one LLM rank; the LLM's work then stands at each of them.
    """

    layout: RankLayout
    memory_plan: RunPlan
    time: StepTime  # mean over steps
    dist_ratio: dict[str, float]
    fill: dict[str, float]
    waits: Waits
    work: dict[str, np.ndarray]


@dataclass(frozen=True)
class RunForecast:
    """Forecast of a run on a cluster.

    by_balance: by kind of `batch.balance`; all have the same samples in every step.
    """

    config: Config
    cluster: Cluster
    mesh: dict[str, int]
    by_balance: dict[str, BalanceForecast]
    epoch: int  # samples
    samples: float  # per step
    tokens: float  # of the LLM, per step
    needed: float  # FLOPs per step, over all devices
    speed: Speed  # that the times rest on
    nearest: str = ""  # where it does not fit: the smallest change of settings that would
    longest: str = ""  # the sample that is much longer than the others
    waits: tuple[str, ...] = ()  # what makes ranks wait that no placing helps against, and what would help

    @property
    def chosen(self) -> BalanceForecast:
        """Return the forecast under the config's own balancing."""
        return self.by_balance[self.config.batch.balance.kind]

    def mfu(self, chosen: BalanceForecast) -> float:
        """Return the model FLOPs utilisation."""
        peak = self.cluster.device.peak(self.config.training.precision) * self.cluster.devices
        return self.needed / (chosen.time.total * peak)

    @property
    def basis(self) -> str:
        """Describe what the times rest on."""
        return describe_basis(self.config, self.cluster, self.speed)

    @property
    def steps(self) -> int:
        """Return the updates of the whole run; approximate where its length is set in epochs."""
        training = self.config.training
        return training.steps or math.ceil(training.epochs * self.epoch / self.samples)

    @property
    def hours(self) -> float:
        """Return the hours that the whole run takes."""
        return self.steps * self.chosen.time.total / 3600


def dry_run_steps(budget: Budget) -> int:
    """Return the number of first steps by which shapes are chosen."""
    return max(2, int(DRY_RUN / budget.samples_per_step))


@dataclass(frozen=True)
class MeshForecast:
    """Forecast of a run on the best of several meshes for all modules."""

    config: Config  # with this mesh, and rows and microbatches for it
    memory_plan: RunPlan
    time: StepTime  # mean over steps
    mfu: float


def forecast_best_mesh(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    speed: Speed,
    proposals: Sequence[tuple[Layout, int]] = (),
) -> MeshForecast | None:
    """Find the mesh on which a run without units is fastest; None where none fits.

    Every module has one row on every rank. Of the least number of microbatches, doubled from 1, with which some
    `mesh.fsdp` fits without tensor parallelism, and of twice as many, the fastest counts. proposals: layouts, and
    numbers of microbatches, that are tried beside these with every `fsdp`.
    """
    best: MeshForecast | None = None
    plain = Layout(expert=config.mesh.expert)
    for doublings in range(MAX_DOUBLINGS):
        if _has_too_few_samples(config, cluster.devices * 2**doublings):
            break
        fastest = _forecast_mesh(config, cluster, index, weights, speed, plain, 2**doublings)
        if best is not None:
            best = min((best, fastest or best), key=lambda f: f.time.total)
            break
        best = fastest
    fastest = [best]
    for proposal in proposals:
        with suppress(UserError):  # such as a number of loss chunks that does not go with `tensor`
            fastest.append(_forecast_mesh(config, cluster, index, weights, speed, *proposal))
    return min(filter(None, fastest), key=lambda f: f.time.total, default=None)


def _has_too_few_samples(config: Config, count: int) -> bool:
    return isinstance(config.batch.size, Samples) and config.batch.size.count < count


def _forecast_mesh(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    speed: Speed,
    layout: Layout,
    microbatches: int,
) -> MeshForecast | None:
    """Forecast a run on the fastest mesh with this expert, context and tensor parallelism; None where none fits.

    The LLM has one row on every rank, as encoders and generators have on each of theirs.
    """
    axes = {key: getattr(layout, key) for key in ("expert", "context", "tensor", "encoders")}
    mesh = replace(config.mesh, **axes)
    group = layout.context * layout.tensor
    ranks = cluster.devices // group
    topology = make_topology(replace(MeshConfig(), **axes), ranks, max(1, cluster.per_node // group), axes)
    rows = {tower: ranks * (1 if tower == "llm" else topology.encoders_per_rank) for tower in config.batch.rows}
    batch = replace(config.batch, microbatches=microbatches, rows=rows)
    config = replace(config, units={}, batch=batch, mesh=mesh)
    budget = make_budget(index, config, weights)
    steps = max(1, MICROBATCHES // microbatches)
    planner, rank_layout = make_planner(index, config, weights, topology, budget, steps)
    plans = [planner.plan(step) for step in range(min(2, steps))]
    needed = needed_flops(config, index, np.concatenate([plan.samples() for plan in plans])) / len(plans)
    peak = cluster.device.peak(config.training.precision) * cluster.devices
    copies = ranks // layout.expert
    fitting = []
    for fsdp in (n for n in FSDP if copies % n == 0):
        on_mesh = replace(config, mesh=replace(mesh, data=copies // fsdp, fsdp=fsdp))
        sizes = mesh_sizes(on_mesh.mesh, cluster.devices)
        on_mesh = choose_sequence_parallel(on_mesh, sizes, rank_layout, cluster.device)
        forecast = _forecast(on_mesh, cluster, sizes, rank_layout, plans, index, speed)
        if forecast.memory_plan.fits:
            mfu = needed / (forecast.time.total * peak)
            fitting.append(MeshForecast(on_mesh, forecast.memory_plan, forecast.time, mfu))
    return min(fitting, key=lambda f: f.time.total, default=None)


def describe_basis(config: Config, cluster: Cluster, speed: Speed) -> str:
    """Describe what times rest on: layer times and rates that were measured, and the shares of the peak assumed."""
    device = cluster.device
    rates = speed.rates
    towers: dict[str, list[str]] = {}  # by where their layers were timed
    for tower in towers_of(config.model):
        if tower in speed.measured:
            towers.setdefault(speed.measured[tower].source, []).append(tower)
    everywhere = sum(map(len, towers.values())) == 1 + len(config.model.item_modules)
    if everywhere and len(towers) == 1:
        parts = [f"from layer times measured {next(iter(towers))}"]
    else:
        parts = [f"layer times of {', '.join(names)} measured {source}" for source, names in towers.items()]
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
    device, measured = cluster.device, cluster.device.measured
    links = [("between devices of a node", measured.link, device.link)] if cluster.per_node > 1 else []
    if cluster.nodes > 1:
        links.append(("to other nodes", measured.network, device.network))
    memories = (("of the memory", measured.memory), ("to the host", measured.host))
    stated = [f"{rate / 1e9:.3g} GB/s {where}" for where, rate, *_ in (*links, *memories) if rate]
    assumed = [f"{sheet / 1e9:.3g} GB/s {where}" for where, rate, sheet in links if not rate]
    parts = [f"measured ({device.measured_in}): {', '.join(stated)}"] if stated else []
    if assumed:
        share = f"{BANDWIDTH_EFFICIENCY:.0%} of {'either' if len(assumed) > 1 else 'it'}"
        parts.append(f"assumes {', '.join(assumed)}, {share}, no latency (--measured FILE states others)")
    return [f"links  {'; '.join(parts)}"] if parts else []


def forecast_run(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    measure_speed: MeasureSpeed | None = None,
) -> RunForecast:
    """Forecast a run whose samples have the lengths of this index.

    measure_speed: measures the devices' speed with rows of these shapes; None: their data sheet's.

    Raises UserError where the mesh does not go with the cluster, or the batch with the data.
    """
    mesh = mesh_sizes(config.mesh, cluster.devices)
    check_layout("mesh", replace(config.mesh, **mesh), config.model, alignment=config.batch.alignment)
    ranks_on_node = max(1, cluster.per_node // (mesh["tensor"] * mesh["context"]))
    topology = make_topology(config.mesh, math.prod(mesh[axis] for axis in RANKS), ranks_on_node, mesh)
    rates = cluster.device.rates(config.training.precision)
    budget = make_budget(index, config, weights)
    # The config's own balance comes last, so that it replaces the default settings of its kind.
    balances: tuple[Balance, ...] = (NoBalance(), LlmBalance(), PostBalance(), config.batch.balance)
    configs = {b.kind: replace(config, batch=replace(config.batch, balance=b)) for b in balances}
    dry_run = dry_run_steps(budget)
    steps = int(np.clip(SAMPLES / budget.samples_per_step, 2, 32))
    planners = {k: make_planner(index, c, weights, topology, budget, dry_run) for k, c in configs.items()}
    layout = planners[config.batch.balance.kind][1]
    config = choose_sequence_parallel(config, mesh, layout, cluster.device)
    configs = {kind: replace(c, mesh=config.mesh) for kind, c in configs.items()}
    speed = Speed(rates)
    if measure_speed is not None:
        speed = measure_speed(profiled_shapes(config, [layout for _, layout in planners.values()]))
    by_balance: dict[str, BalanceForecast] = {}
    for kind, (planner, layout) in planners.items():
        plans = [planner.plan(step) for step in range(steps)]
        by_balance[kind] = _forecast(configs[kind], cluster, mesh, layout, plans, index, speed)
    # Plans of all balances have the same samples, so those of the last one stand for all.
    samples = np.concatenate([plan.samples() for plan in plans])
    remedy = ""
    memory_plan = by_balance[config.batch.balance.kind].memory_plan
    if not memory_plan.fits:

        def layouts(changed: Config) -> RankLayout:
            return make_planner(index, changed, weights, topology, None, dry_run)[1]

        remedy = suggest_settings(config, mesh, layouts, speed, memory_plan.limit)
    return RunForecast(
        config=config,
        cluster=cluster,
        mesh=mesh,
        by_balance=by_balance,
        epoch=planner.grouper.epoch_samples,
        samples=len(samples) / steps,
        tokens=float(index.llm_tokens[samples].sum()) / steps,
        needed=needed_flops(config, index, samples) / steps,
        speed=speed,
        nearest=remedy,
        longest=index.longest(planner.grouper.budget.longest),
        waits=_describe_waits(config, planner.grouper, topology, speed),
    )


def _describe_waits(config: Config, grouper: StepGrouper, topology: Topology, speed: Speed) -> tuple[str, ...]:
    names = ("llm", *config.model.item_modules)
    model = resolve_attention(config.model, speed.rates, topology.context)
    prices = pair_costs(model, speed.rates, frozen_modules(model), repeats_forward(config.loss))
    advice = waiting_advice(grouper, prices, topology.ranks, names, topology.context)
    return *ranks_without_rows(grouper, topology.ranks, names), *filter(None, [advice])


def compile_forecast(forecast: RunForecast, devices: Sequence[jax.Device]) -> Programs:
    """Compile the run as it is planned, in its fullest shape: its programs, "gradients" and "update"."""
    plan = forecast.chosen.memory_plan
    config = apply_memory_plan(forecast.config, plan.policies, plan.loss_chunks)
    (programs,) = compile_run(config, forecast.chosen.layout, plan, devices).values()
    return {"gradients": programs["forward_backward"], "update": programs["update"]}


def _forecast(
    config: Config,
    cluster: Cluster,
    mesh: dict[str, int],
    layout: RankLayout,
    plans: Sequence[StepPlan],
    index: LengthIndex,
    speed: Speed,
) -> BalanceForecast:
    """Forecast the run under one balancing method from the plans of its first steps."""
    room = MemoryLimit(config.mesh.memory * GB or USABLE * cluster.device.memory, config.mesh.host_memory * GB)
    memory_plan = plan_run(on_one_mesh(config, mesh), layout, speed, room)
    activation = ACTIVATION[config.training.precision]
    machine = ClusterRun(
        cluster,
        mesh,
        memory_plan.stages[0].sharding,
        speed,
        activation,
        loss_chunks=memory_plan.loss_chunks,
        context_attention=config.mesh.context_attention,
        reference=repeats_forward(config.loss),
    )
    model = resolve_attention(config.model, speed.rates, layout.topology.context)
    microbatches = [m for plan in plans for m in plan.microbatches]
    topology = layout.topology
    ranks = {"llm": topology.ranks} | dict.fromkeys(model.item_modules, topology.ranks * topology.encoders_per_rank)
    batches = [
        replace(device_microbatch(config, layout, m.shape), pairs=visited_on_device(model, layout, m, ranks))
        for m in microbatches
    ]
    unsaved = unsaved_bytes(replace(config, model=model), layout)
    time = step_time(memory_plan.applied(model), batches, unsaved, machine, config.optimizer)
    names = ("llm", *config.model.item_modules)
    prices = pair_costs(model, speed.rates, frozen_modules(model), repeats_forward(config.loss))
    work = np.stack([sum(m.work() for m in plan.microbatches) for plan in plans], axis=1)
    useful = sum(np.bincount(m.module, index.useful(m.samples), len(names)) for m in microbatches)
    positions = sum(layout.topology.ranks * np.multiply(layout.rows, m.shape.lengths) for m in microbatches)
    return BalanceForecast(
        layout=layout,
        memory_plan=memory_plan,
        time=time.mean_over(len(plans)),
        dist_ratio=dict(zip(names, dist_ratio(work).mean(1).tolist(), strict=True)),
        fill=dict(zip(names, (useful / positions).tolist(), strict=True)),
        waits=mean_waits([waits_of(plan.microbatches, prices, index) for plan in plans]),
        work=dict(zip(names, work, strict=True)),
    )


def visited_on_device(
    model: ModelConfig, layout: RankLayout, microbatch: MicrobatchPlan, ranks: Mapping[str, int]
) -> dict[str, float]:
    """Count the pairs in the blocks that attention visits on the device with most, by tower; not of dense attention.

    ranks: over which each tower's rows lie.
    """
    pairs = {}
    for k, (name, tower) in enumerate({"llm": model.llm, **model.item_modules}.items()):
        if isinstance(tower, UnetConfig) or tower.attention == "dense":
            continue
        parts = microbatch.module == k
        by_row = visited_pairs(
            tower,
            microbatch.row[parts],
            microbatch.offset[parts],
            microbatch.length[parts],
            layout.topology.ranks * layout.rows[k],
            microbatch.shape.lengths[k],
        )
        shared = layout.topology.context if k == 0 else 1  # devices that share a row attend as much each
        pairs[name] = float(by_row.reshape(ranks[name], -1).sum(1).max()) / shared
    return pairs


def needed_flops(config: Config, index: LengthIndex, samples: np.ndarray) -> float:
    """Count the FLOPs that the model needs for these samples, without padding and recomputation."""
    first = index.item_start[samples]
    count = np.diff(index.item_start)[samples]
    # Indices of all items of these samples, as one array. Each sample's run of `arange` is shifted to its first item:
    # first = [7, 2], count = [2, 3] -> arange = [0 1 | 2 3 4] + repeat([7 - 0, 2 - 2]) = [7 8 | 2 3 4].
    items = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
    work = length_work(
        config.model,
        index.llm_tokens[samples],
        index.item_encoder[items],
        index.item_useful[items],
        index.item_tokens[items],
    )
    reference = repeats_forward(config.loss)
    flops = model_flops(config.model, work, frozen_modules(config.model), reference)
    return sum(of_module.total for of_module in flops.values())
