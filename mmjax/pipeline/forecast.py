"""Forecast a run whose modules have units on a cluster that is not at hand, beside the same run on one mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmjax.autotune.forecast import needed_flops, visited_on_device
from mmjax.autotune.layer_profile import MeasureSpeed
from mmjax.autotune.memory_plan import check_fits, profiled_shapes
from mmjax.autotune.run_plan import plan_run
from mmjax.autotune.sharded_stages import device_batch, resolve_units, shard_stages
from mmjax.autotune.stage_memory import unsaved_bytes
from mmjax.config import Config
from mmjax.config.training import repeats_forward, unit_devices
from mmjax.data.plan.grouping import make_budget
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import MicrobatchPlan
from mmjax.data.plan.step_plan import RankLayout, make_planner, make_step_planner
from mmjax.errors import UserError
from mmjax.planning.balanced_cuts import with_balanced_cuts
from mmjax.planning.hardware import USABLE, Cluster
from mmjax.planning.memory import ACTIVATION, GB, DeviceBatch
from mmjax.planning.remat import MemoryLimit, RunPlan, StagePlan
from mmjax.planning.schedules import list_stages, make_schedule, schedule_name, unit_graph, unit_links
from mmjax.planning.simulate import StageTimes, Timeline, simulate
from mmjax.planning.stage_time import StageRun, edge_seconds, pass_seconds, reduce_seconds, update_seconds
from mmjax.planning.step_time import ClusterRun, Speed
from mmjax.planning.work import resolve_attention
from mmjax.runtime.units import units_topology

MICROBATCHES, MAX_STEPS = 256, 4  # so many at most are planned and simulated


@dataclass(frozen=True)
class PipelineForecast:
    """Forecast of a run on units. Seconds are means over the planned steps."""

    config: Config
    cluster: Cluster
    layout: RankLayout
    plan: RunPlan  # with the times of a mean microbatch
    passes: float  # seconds from the first pass to the last, transfers between stages included
    transfers: float  # of these, what the passes would take less if transfers took no time
    reduction: float  # seconds of adding gradients over `data`
    update: float
    bubble: float
    fill: dict[str, float]  # of each tower's rows
    samples: float  # per step
    tokens: float  # of the LLM, per step
    needed: float  # FLOPs per step, over all devices
    speed: Speed
    timeline: Timeline  # of the first planned step

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Return the plans of its stages."""
        return self.plan.stages

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.passes + self.reduction + self.update

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation, of all of the cluster's devices."""
        peak = self.cluster.device.peak(self.config.training.precision) * self.cluster.devices
        return self.needed / (self.seconds * peak)


def forecast_pipeline(
    config: Config,
    cluster: Cluster,
    index: LengthIndex,
    weights: Sequence[float],
    measure_speed: MeasureSpeed | None = None,
) -> PipelineForecast:
    """Forecast a run on units whose samples have the lengths of this index. measure_speed: as in `forecast_run`.

    Raises UserError where the units need more devices than the cluster has, or a stage fits under no policies.
    """
    needed = sum(map(unit_devices, config.units.values()))
    if needed > cluster.devices:
        raise UserError(f"the units need {needed} devices and {cluster} has {cluster.devices}")
    topology = units_topology(config.units)
    budget = make_budget(index, config, weights)
    steps = max(1, min(MAX_STEPS, MICROBATCHES // config.batch.microbatches))
    planner, layout = make_planner(index, config, weights, topology, budget, steps)
    if (cut := with_balanced_cuts(config, *layout.rows_and_lengths)) != config:
        config, planner = cut, make_step_planner(planner.grouper, cut, layout)
    config = resolve_units(config, layout, cluster.device)
    speed = Speed(cluster.device.rates(config.training.precision))
    if measure_speed is not None:
        speed = measure_speed(profiled_shapes(config, [layout]))
    limit = MemoryLimit(config.mesh.memory * GB or USABLE * cluster.device.memory, config.mesh.host_memory * GB)
    plan = plan_run(config, layout, speed, limit)
    check_fits(plan)
    runs = _place_stages(config, layout, plan, cluster, speed)
    step_plans = [planner.plan(step) for step in range(steps)]
    timed = [_time_step(config, layout, runs, plan.microbatches) for plan in step_plans]
    samples = np.concatenate([plan.samples() for plan in step_plans])
    forward, backward = (
        np.mean([getattr(times, name).mean(1) for times in timed], axis=0).tolist() for name in ("forward", "backward")
    )
    times = zip(plan.stages, forward, backward, strict=True)
    stages = tuple(replace(stage, forward=f, backward=b) for stage, f, b in times)
    schedule = make_schedule(schedule_name(config), unit_graph(config), config.batch.microbatches)
    timelines = [simulate(schedule, times) for times in timed]
    free = [simulate(schedule, replace(times, transfer=0.0)) for times in timed]
    passes = float(np.mean([timeline.makespan for timeline in timelines]))
    return PipelineForecast(
        config=config,
        cluster=cluster,
        layout=layout,
        plan=replace(plan, stages=stages),
        passes=passes,
        transfers=passes - float(np.mean([timeline.makespan for timeline in free])),
        reduction=max(sum(map(reduce_seconds, stage)) for stage in runs),
        update=max(sum(update_seconds(config.model, run, config.optimizer) for run in stage) for stage in runs),
        bubble=float(np.mean([timeline.bubble for timeline in timelines])),
        fill=_fill(config, layout, index, [m for plan in step_plans for m in plan.microbatches]),
        samples=len(samples) / steps,
        tokens=float(index.llm_tokens[samples].sum()) / steps,
        needed=needed_flops(config, index, samples) / steps,
        speed=speed,
        timeline=timelines[0],
    )


def _fill(
    config: Config, layout: RankLayout, index: LengthIndex, microbatches: Sequence[MicrobatchPlan]
) -> dict[str, float]:
    """Return the useful share of each tower's positions."""
    names = ("llm", *config.model.item_modules)
    useful = sum(np.bincount(m.module, index.useful(m.samples), len(names)) for m in microbatches)
    positions = sum(layout.topology.ranks * np.multiply(layout.rows, m.shape.lengths) for m in microbatches)
    return dict(zip(names, (useful / positions).tolist(), strict=True))


def _place_stages(
    config: Config, layout: RankLayout, plan: RunPlan, cluster: Cluster, speed: Speed
) -> list[list[StageRun]]:
    """Place the pieces of planned stages on the devices of a cluster, in the order of the units."""
    model = resolve_attention(config.model, speed.rates, layout.topology.context)
    unsaved = unsaved_bytes(replace(config, model=model), layout)
    activation = ACTIVATION[config.training.precision]
    runs = []
    for listed, sharded, stage in zip(list_stages(config), shard_stages(config), plan.stages, strict=True):
        mesh = dict(sharded.mesh.shape)
        form, reference = sharded.layout.context_attention, repeats_forward(config.loss)
        machine = ClusterRun(cluster, mesh, sharded.sharding, speed, activation, plan.loss_chunks, form, reference)
        runs.append(
            [
                StageRun(
                    tower=part.piece.tower,
                    layers=stage.layers[part.piece.tower],
                    policies=stage.policies[part.piece.tower],
                    devices=sharded.devices,
                    machine=machine,
                    trainable=part.trainable,
                    frozen=part.frozen,
                    moments=part.moments,
                    has_backward=part.has_backward,
                    unsaved=unsaved[part.piece.tower],
                    experts=part.experts,
                    copies=listed.copy[1],
                )
                for part in sharded.pieces
            ]
        )
    return runs


def _time_step(
    config: Config, layout: RankLayout, stages: Sequence[Sequence[StageRun]], microbatches: Sequence[MicrobatchPlan]
) -> StageTimes:
    """Estimate the seconds of a step's passes on every stage, and of a mean microbatch's transfers."""
    model = resolve_attention(config.model, stages[0][0].machine.speed.rates, layout.topology.context)
    ranks = {run.tower: run.ranks for runs in stages for run in runs}
    towers = ("llm", *model.item_modules)
    totals = [layout.topology.ranks * rows for rows in layout.rows]
    links = unit_links(config)
    seconds = np.zeros((2, len(stages), len(microbatches)))
    transfers: Counter[tuple[int, int]] = Counter()
    for i, microbatch in enumerate(microbatches):
        pairs = visited_on_device(model, layout, microbatch, ranks)

        def on_device(ranks: Mapping[str, int], microbatch: MicrobatchPlan = microbatch) -> DeviceBatch:
            rows = {tower: total // ranks[tower] for tower, total in zip(towers, totals, strict=True)}
            return device_batch(config, layout, rows, microbatch.shape)

        for n, runs in enumerate(stages):
            for run in runs:
                # The LLM's devices exchange the tokens of encoders and generators among them.
                row_counts = ranks | dict.fromkeys(model.item_modules, run.shards) if run.tower == "llm" else ranks
                seconds[:, n, i] += pass_seconds(model, run, replace(on_device(row_counts), pairs=pairs))
        batch = on_device(ranks)
        for (a, k), (b, j) in links:
            transfers[a, b] += edge_seconds(model, stages[a][k], stages[b][j], batch) / len(microbatches)
    # XLA's runtime waits for what it sends.
    return StageTimes(*seconds, transfer=dict(transfers), blocking=True)
