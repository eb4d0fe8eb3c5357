"""Time a planned run on a cluster: its stages' passes, and a step by cause.

A run on one mesh is one stage of all modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from mmjax.autotune.sharded_stages import device_batch, shard_stages
from mmjax.autotune.stage_memory import unsaved_bytes
from mmjax.config import Config, ModelConfig
from mmjax.data.plan.placement import MicrobatchPlan, Shape
from mmjax.data.plan.step_plan import RankLayout
from mmjax.parallel.sharding import loss_parts_are_of_tokens
from mmjax.planning.exchange_time import ClusterRun, attends_in_order
from mmjax.planning.hardware import Cluster
from mmjax.planning.memory import ACTIVATION, DeviceBatch
from mmjax.planning.remat import RunPlan, StagePlan
from mmjax.planning.schedules import (
    list_stages,
    make_schedule,
    schedule_name,
    unit_graph,
    unit_links,
)
from mmjax.planning.simulate import StageTimes, Timeline, simulate
from mmjax.planning.speed import Speed
from mmjax.planning.stage_time import (
    PassTime,
    StageRun,
    edge_seconds,
    pass_times,
    reduce_seconds,
    update_seconds,
)
from mmjax.planning.work import resolve_attention, visited_pairs


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by cause, which add up to it: means over all devices."""

    compute: float  # forward and backward
    recompute: float  # the following six as in `PassTime`
    shards: float
    tensor: float
    exchange: float
    context: float
    # of activations and gradients between stages: what passes would take less without
    transfers: float = 0.0
    idle: float = 0.0  # waiting for other stages
    reduction: float = 0.0  # adding gradients over `data`, where that follows the passes
    update: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return sum(getattr(self, f.name) for f in fields(self))


# Of a microbatch: seconds that forward and backward compute on the slowest device, by tower and first
# layer of a piece.
Computed = Mapping[tuple[str, int], tuple[float, float]]


class RunTime(NamedTuple):
    """Time of planned steps. Means are over these."""

    plan: RunPlan  # with the times of a mean microbatch
    step: StepTime
    bubble: float
    timeline: Timeline  # of the first step


def time_run(
    config: Config,
    layout: RankLayout,
    plan: RunPlan,
    cluster: Cluster,
    speed: Speed,
    steps: Sequence[Sequence[MicrobatchPlan]],
    computed: Sequence[Sequence[Computed]] | None = None,
) -> RunTime:
    """Estimate the time of steps of these microbatches.

    config: of units, or `on_one_mesh`. computed: of every microbatch, what was measured of it.
    """
    computed = computed or [[{}] * len(microbatches) for microbatches in steps]
    config = replace(
        config, model=resolve_attention(config.model, speed.rates, layout.topology.context)
    )
    stages = _place_stages(config, layout, plan, cluster, speed)
    times, causes_of_steps = zip(
        *(
            _time_passes(config, layout, stages, *of_step)
            for of_step in zip(steps, computed, strict=True)
        ),
        strict=True,
    )
    schedule = make_schedule(schedule_name(config), unit_graph(config), config.batch.microbatches)
    timelines = [simulate(schedule, of_step) for of_step in times]
    free = [simulate(schedule, replace(of_step, transfer=0.0)) for of_step in times]
    makespan, undelayed = (
        float(np.mean([timeline.makespan for timeline in simulated]))
        for simulated in (timelines, free)
    )
    devices = {runs[0].devices: len(runs[0].devices) for runs in stages}
    # Means over devices: two stages of 6 and 2 devices weigh .75 and .25; stages that share devices
    # weigh as much each, and add up.
    weights = np.array([len(runs[0].devices) for runs in stages]) / sum(devices.values())
    causes = np.mean([weights @ of_step for of_step in causes_of_steps], axis=0)
    # [stages, 2]: of a mean microbatch.
    means = [np.stack([of_step.forward, of_step.backward], axis=-1).mean(1) for of_step in times]
    return RunTime(
        plan=plan.with_times(np.mean(means, axis=0).tolist()),
        step=StepTime(
            **dict(zip(PassTime._fields, causes.tolist(), strict=True)),
            transfers=makespan - undelayed,
            idle=undelayed - float(causes.sum()) if len(devices) > 1 else 0.0,
            reduction=max(sum(map(reduce_seconds, runs)) for runs in stages),
            update=max(
                sum(update_seconds(config.model, run, config.optimizer) for run in runs)
                for runs in stages
            ),
        ),
        bubble=float(np.mean([timeline.bubble for timeline in timelines])),
        timeline=timelines[0],
    )


def time_stages(
    config: Config, layout: RankLayout, plan: RunPlan, cluster: Cluster, speed: Speed
) -> RunPlan:
    """Return the plan with the times of every stage's passes of a microbatch of the largest shape."""
    stages = _place_stages(config, layout, plan, cluster, speed)
    times = []
    for number, stage in enumerate(plan.stages):
        shape = layout.shapes[stage.largest_shape]
        passes = _stage_passes(config, layout, stages, number, shape, {})
        times.append(
            [sum(passed.total for passed in direction) for direction in zip(*passes, strict=True)]
        )
    return plan.with_times(times)


def simulate_stages(config: Config, plans: Sequence[StagePlan]) -> Timeline:
    """Simulate a step with equal microbatches of the largest shape, transfers not counted."""
    microbatches = config.batch.microbatches
    forward, backward = (
        np.array([[getattr(plan, name)] * microbatches for plan in plans])
        for name in ("forward", "backward")
    )
    schedule = make_schedule(schedule_name(config), unit_graph(config), microbatches)
    return simulate(schedule, StageTimes(forward, backward))


def _place_stages(
    config: Config, layout: RankLayout, plan: RunPlan, cluster: Cluster, speed: Speed
) -> list[list[StageRun]]:
    """Place the pieces of planned stages on the devices of a cluster, in the order of the units."""
    unsaved = unsaved_bytes(config, layout)
    stages = shard_stages(config)
    runs = []
    for listed, sharded, stage in zip(list_stages(config), stages, plan.stages, strict=True):
        machine = ClusterRun(
            cluster=cluster,
            mesh=dict(sharded.mesh.shape),
            sharding=sharded.sharding,
            speed=speed,
            activation=ACTIVATION[config.training.precision],
            context_attention=sharded.layout.context_attention,
            reference=config.loss.repeats_forward,
        )
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
                    # Generators in other stages pass back before the loss's backward pass.
                    logits_again=not sharded.is_sink
                    or (
                        plan.loss_chunks > 1
                        and not loss_parts_are_of_tokens(sharded.mesh.shape, config.loss)
                    ),
                    only_stage=len(stages) == 1,
                )
                for part in sharded.pieces
            ]
        )
    return runs


def _time_passes(
    config: Config,
    layout: RankLayout,
    stages: Sequence[Sequence[StageRun]],
    microbatches: Sequence[MicrobatchPlan],
    computed: Sequence[Computed],
) -> tuple[StageTimes, np.ndarray]:
    """Estimate the time of a step's passes, and the seconds of all microbatches by cause, `[stages, causes]`."""
    ranks = _ranks(stages)
    machine = next(run.machine for runs in stages for run in runs if run.tower == "llm")
    in_order = attends_in_order(config.model.llm, layout.topology.context, machine)
    graph = unit_graph(config)
    links = unit_links(config)
    seconds = np.zeros((2, len(stages), len(microbatches)))
    transfers: Counter[tuple[int, int]] = Counter()
    causes = np.zeros((len(stages), len(PassTime._fields)))
    for i, microbatch in enumerate(microbatches):
        pairs = {
            tower: float(visited.max())
            for tower, visited in visited_by_rank(
                config.model, layout, microbatch, ranks, in_order
            ).items()
        }
        for number in range(len(stages)):
            # [pieces, 2, causes] -> [2, causes]
            passes = np.sum(
                _stage_passes(config, layout, stages, number, microbatch.shape, pairs, computed[i]),
                axis=0,
            )
            seconds[:, number, i] = passes.sum(1)
            causes[number] += graph.runs(number, i) * passes.sum(0)
        batch = _batch_of(config, layout, ranks, microbatch.shape)
        for (a, k), (b, j) in links:
            transfers[a, b] += edge_seconds(config.model, stages[a][k], stages[b][j], batch) / len(
                microbatches
            )
    forward, backward = seconds
    # XLA's runtime waits for what it sends.
    return StageTimes(forward, backward, dict(transfers), blocking=True), causes


def _stage_passes(
    config: Config,
    layout: RankLayout,
    stages: Sequence[Sequence[StageRun]],
    number: int,
    shape: Shape,
    pairs: Mapping[str, float],
    computed: Computed | None = None,
) -> list[tuple[PassTime, PassTime]]:
    """Estimate both passes of every piece of a stage. pairs: that attention visits, where it is known."""
    ranks = _ranks(stages)
    passes = []
    for run in stages[number]:
        # The LLM's devices exchange the tokens of encoders and generators among them.
        received = (
            dict.fromkeys(config.model.item_modules, run.shards) if run.tower == "llm" else {}
        )
        batch = _batch_of(config, layout, ranks | received, shape)
        batch = replace(batch, pairs=batch.pairs | pairs)
        measured = (computed or {}).get((run.tower, run.layers.start))
        passes.append(pass_times(config.model, run, batch, measured))
    return passes


def _ranks(stages: Sequence[Sequence[StageRun]]) -> dict[str, int]:
    """Return over how many ranks each tower's rows lie."""
    return {run.tower: run.ranks for runs in stages for run in runs}


def _batch_of(
    config: Config, layout: RankLayout, ranks: Mapping[str, int], shape: Shape
) -> DeviceBatch:
    """Return the part of a microbatch on each device, where rows lie over these ranks."""
    towers = ("llm", *config.model.item_modules)
    totals = [layout.topology.ranks * rows for rows in layout.rows]
    rows = {tower: total // ranks[tower] for tower, total in zip(towers, totals, strict=True)}
    return device_batch(config, layout, rows, shape)


def visited_by_rank(
    model: ModelConfig,
    layout: RankLayout,
    microbatch: MicrobatchPlan,
    ranks: Mapping[str, int],
    in_order: bool = False,
) -> dict[str, np.ndarray]:
    """Count the pairs in the blocks that attention visits on each rank, `[ranks]` by tower; not of dense attention.

    ranks: over which each tower's rows lie; of devices that share a row the one with most counts.
    in_order: each of these attends by the next part of it, else by as many pairs as the others.
    """
    pairs = {}
    for k, (name, tower) in enumerate(model.towers.items()):
        if not tower.is_stack or tower.attention == "dense":
            continue
        parts = microbatch.module == k
        shared = layout.topology.context if k == 0 else 1
        by_part = visited_pairs(
            tower,
            microbatch.row[parts],
            microbatch.offset[parts],
            microbatch.length[parts],
            layout.topology.ranks * layout.rows[k],
            microbatch.shape.lengths[k],
            shared,
        )
        by_device = by_part.reshape(ranks[name], -1, shared).sum(1)
        pairs[name] = by_device.max(1) if in_order else by_device.mean(1)
    return pairs
