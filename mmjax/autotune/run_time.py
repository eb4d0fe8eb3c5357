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
from mmjax.config import Config, ModelConfig, UnetConfig
from mmjax.data.plan.placement import MicrobatchPlan, Shape
from mmjax.data.plan.step_plan import RankLayout
from mmjax.planning.exchange_time import ClusterRun
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
) -> RunTime:
    """Estimate the time of steps of these microbatches. config: of units, or `on_one_mesh`."""
    config = replace(
        config, model=resolve_attention(config.model, speed.rates, layout.topology.context)
    )
    stages = _place_stages(config, layout, plan, cluster, speed)
    timed = [
        _PassTimes.of_microbatches(config, layout, stages, microbatches) for microbatches in steps
    ]
    schedule = make_schedule(schedule_name(config), unit_graph(config), config.batch.microbatches)
    timelines = [simulate(schedule, times.of_stages) for times in timed]
    free = [simulate(schedule, replace(times.of_stages, transfer=0.0)) for times in timed]
    makespan, undelayed = (
        float(np.mean([timeline.makespan for timeline in simulated]))
        for simulated in (timelines, free)
    )
    devices = {runs[0].devices: len(runs[0].devices) for runs in stages}
    weights = np.array([len(runs[0].devices) for runs in stages]) / sum(devices.values())
    causes = np.mean([weights @ times.causes for times in timed], axis=0)
    return RunTime(
        plan=plan.with_times(np.mean([times.means for times in timed], axis=0).tolist()),
        step=StepTime(
            *causes.tolist(),
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
                    logits_again=plan.loss_chunks > 1 or not sharded.is_sink,
                    alone=len(stages) == 1,
                )
                for part in sharded.pieces
            ]
        )
    return runs


class _PassTimes(NamedTuple):
    """Times of a step's passes."""

    of_stages: StageTimes
    causes: np.ndarray  # seconds [stages, causes] of all microbatches

    @property
    def means(self) -> np.ndarray:
        """Return the seconds of a mean microbatch's passes, `[stages, 2]`."""
        return np.stack([self.of_stages.forward, self.of_stages.backward], axis=-1).mean(1)

    @classmethod
    def of_microbatches(
        cls,
        config: Config,
        layout: RankLayout,
        stages: Sequence[Sequence[StageRun]],
        microbatches: Sequence[MicrobatchPlan],
    ) -> _PassTimes:
        ranks = _ranks(stages)
        graph, links = unit_graph(config), unit_links(config)
        seconds = np.zeros((2, len(stages), len(microbatches)))
        transfers: Counter[tuple[int, int]] = Counter()
        causes = np.zeros((len(stages), len(PassTime._fields)))
        for i, microbatch in enumerate(microbatches):
            pairs = visited_on_device(config.model, layout, microbatch, ranks)
            for number in range(len(stages)):
                passes = np.sum(
                    _stage_passes(config, layout, stages, number, microbatch.shape, pairs), axis=0
                )
                seconds[:, number, i] = passes.sum(1)
                causes[number] += graph.runs(number, i) * passes.sum(0)
            batch = _batch_of(config, layout, ranks, microbatch.shape)
            for (a, k), (b, j) in links:
                transfers[a, b] += edge_seconds(
                    config.model, stages[a][k], stages[b][j], batch
                ) / len(microbatches)
        # XLA's runtime waits for what it sends.
        return cls(
            StageTimes(seconds[0], seconds[1], transfer=dict(transfers), blocking=True), causes
        )


def _stage_passes(
    config: Config,
    layout: RankLayout,
    stages: Sequence[Sequence[StageRun]],
    number: int,
    shape: Shape,
    pairs: Mapping[str, float],
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
        passes.append(pass_times(config.model, run, replace(batch, pairs=batch.pairs | pairs)))
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
        # devices that share a row attend as much each
        shared = layout.topology.context if k == 0 else 1
        pairs[name] = float(by_row.reshape(ranks[name], -1).sum(1).max()) / shared
    return pairs
