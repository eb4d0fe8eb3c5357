"""What a run will do on a cluster that is not at hand: memory, time and balance, planned from its samples' lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from mmjax.balance.metrics import dist_ratio
from mmjax.config import Config, LlmBalance, MeshConfig, NoBalance, PostBalance
from mmjax.data.budget import make_budget
from mmjax.data.index import LengthIndex
from mmjax.data.layout import RankLayout
from mmjax.data.placement import Balance, Topology
from mmjax.data.plan import StepPlan, make_planner
from mmjax.errors import UserError
from mmjax.parallel.mesh import check_heads, mesh_sizes
from mmjax.planning.clusters import USABLE, Cluster
from mmjax.planning.cost import frozen_modules, needed
from mmjax.planning.fit import Fit, Room
from mmjax.planning.layer_times import Speed
from mmjax.planning.times import Machine, StepTime, step_time
from mmjax.planning.work import length_work
from mmjax.training.compiled_memory import compiled_bytes
from mmjax.training.fitting import ACTIVATION, GB, Tracer, fit_of, nearest, on_device, planned

SAMPLES = 50_000  # of about so many, in 2 to 32 steps, it is seen what a step is like
DRY_RUN = 100_000  # samples of the first steps, about, by which shapes are chosen


@dataclass(frozen=True)
class Way:
    """The run with one way of balancing. By module: dist_ratio and fill, mean over steps; work `[steps, ranks]`.

    Encoders may have several ranks on one of the LLM, which then stands at each of them.
    """

    layout: RankLayout
    fitted: Fit
    time: StepTime  # mean over steps
    dist_ratio: dict[str, float]
    fill: dict[str, float]
    work: dict[str, np.ndarray]


@dataclass(frozen=True)
class Outlook:
    """A run on a cluster. ways: by kind of `batch.balance`; all have the same samples in every step."""

    config: Config
    cluster: Cluster
    mesh: dict[str, int]
    ways: dict[str, Way]
    epoch: int  # samples
    samples: float  # of a step
    tokens: float  # of the LLM, of a step
    needed: float  # FLOPs of a step, over all devices
    nearest: str = ""  # where it does not fit: what would, and changes least
    longest: str = ""  # the sample that is much longer than the others

    @property
    def chosen(self) -> Way:
        """As the config balances."""
        return self.ways[self.config.batch.balance.kind]

    def mfu(self, way: Way) -> float:
        """Model FLOPs utilisation."""
        peak = self.cluster.device.peak(self.config.training.precision) * self.cluster.devices
        return self.needed / (way.time.total * peak)

    @property
    def steps(self) -> int:
        """Updates to the end of the run; where that is said in epochs, about as many."""
        training = self.config.training
        return training.steps or math.ceil(training.epochs * self.epoch / self.samples)

    @property
    def hours(self) -> float:
        """To the end of the run."""
        return self.steps * self.chosen.time.total / 3600


def look_ahead(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    speed_with: Callable[[Sequence[RankLayout]], Speed] | None = None,
) -> Outlook:
    """The outlook of a run whose samples have the lengths of this index.

    speed_with: how fast the devices are with the shapes of these layouts; None: as their data sheet says.

    Raises UserError where the mesh does not go with the cluster, or the batch with the data.
    """
    mesh = mesh_sizes(config.mesh, cluster.devices)
    check_heads(mesh, config.mesh, config.model)
    topology = topology_on(cluster, config.mesh, mesh)
    tracer = Tracer(config)
    budget = make_budget(index, config, weights)
    compared: tuple[Balance, ...] = (NoBalance(), LlmBalance(), PostBalance(), config.batch.balance)
    balances = {balance.kind: balance for balance in compared}  # the config's own, in place of another of its kind
    dry_run = max(2, int(DRY_RUN / budget.samples_per_step))
    steps = int(np.clip(SAMPLES / budget.samples_per_step, 2, 32))
    changed = {k: replace(config, batch=replace(config.batch, balance=balance)) for k, balance in balances.items()}
    made = {k: make_planner(index, c, weights, topology, budget, dry_run) for k, c in changed.items()}
    sheet = Speed(cluster.device.rates(config.training.precision))
    speed = sheet if speed_with is None else speed_with([layout for _, layout in made.values()])
    ways: dict[str, Way] = {}
    for kind, (planner, layout) in made.items():
        plans = [planner.plan(step) for step in range(steps)]
        ways[kind] = _way(changed[kind], cluster, mesh, layout, plans, index, tracer, speed)
    samples = np.concatenate([plan.samples() for plan in plans])
    items = _items(index, samples)
    of_items = (of[items] for of in (index.item_encoder, index.item_useful, index.item_tokens))
    work = length_work(config.model, index.llm_tokens[samples], *of_items)
    flops = sum(f.total for f in needed(config.model, work, frozen_modules(config.model)).values())
    tokens = float(index.llm_tokens[samples].sum())
    smaller = ""
    if not (fitted := ways[config.batch.balance.kind].fitted).fits:

        def layouts(other: Config) -> RankLayout:
            return make_planner(index, other, weights, topology, None, dry_run)[1]

        smaller = nearest(config, mesh, layouts, speed, fitted.room, tracer)
    return Outlook(
        config,
        cluster,
        mesh,
        ways,
        epoch=planner.grouper.epoch_samples,
        samples=len(samples) / steps,
        tokens=tokens / steps,
        needed=flops / steps,
        nearest=smaller,
        longest=index.longest(),
    )


def compiled_way(outlook: Outlook, devices: Sequence[jax.Device]) -> int:
    """Bytes of a device by the compiler for these, of the run as it is planned, in its fullest shape."""
    way, config = outlook.chosen, outlook.config
    batch = on_device(config, way.layout, way.layout.shapes[way.fitted.fullest])
    return compiled_bytes(planned(config, way.fitted.policies, way.fitted.loss_chunks), batch, list(devices))


def topology_on(cluster: Cluster, config: MeshConfig, mesh: Mapping[str, int]) -> Topology:
    """The ranks of a mesh on a cluster, and which of them are on one node."""
    ranks, tensor = mesh["data"] * mesh["fsdp"], mesh["tensor"]
    if config.ranks_per_node and ranks % config.ranks_per_node:
        raise UserError(f"mesh.ranks_per_node={config.ranks_per_node}: choose a divisor of the {ranks} ranks, or 0")
    per_node = math.gcd(ranks, max(1, cluster.per_node // tensor))
    together = config.ranks_per_node or per_node
    return Topology(ranks, together, per_node, tensor if config.encoders == "data" else 1)


def _way(
    config: Config,
    cluster: Cluster,
    mesh: dict[str, int],
    layout: RankLayout,
    plans: Sequence[StepPlan],
    index: LengthIndex,
    tracer: Tracer,
    speed: Speed,
) -> Way:
    precision, device = config.training.precision, cluster.device
    room = Room(config.mesh.memory * GB or USABLE * device.memory, config.mesh.host_memory * GB)
    fitted = fit_of(config, mesh, layout, speed, room, tracer)
    machine = Machine(cluster, mesh, fitted.spread, speed, ACTIVATION[precision], fitted.loss_chunks)
    model = fitted.applied(config.model)
    microbatches = [m for plan in plans for m in plan.microbatches]
    batches = [on_device(config, layout, m.shape) for m in microbatches]
    time = step_time(model, batches, fitted.unsaved, machine, config.optimizer).over(len(plans))
    names = ("llm", *config.model.encoders)
    work = np.stack([sum(m.work() for m in plan.microbatches) for plan in plans], axis=1)
    useful = sum(np.bincount(m.module, index.useful(m.samples), len(names)) for m in microbatches)
    room_of_rows = sum(layout.topology.ranks * np.multiply(layout.rows, m.shape.lengths) for m in microbatches)
    return Way(
        layout,
        fitted,
        time,
        dict(zip(names, dist_ratio(work).mean(1).tolist(), strict=True)),
        dict(zip(names, (useful / room_of_rows).tolist(), strict=True)),
        dict(zip(names, work, strict=True)),
    )


def _items(index: LengthIndex, samples: np.ndarray) -> np.ndarray:
    """The items of these samples, as indices into the index's arrays."""
    start, count = index.item_start[samples], np.diff(index.item_start)[samples]
    first = np.cumsum(count) - count
    return np.arange(count.sum()) + np.repeat(start - first, count)
