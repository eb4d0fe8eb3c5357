"""Plan every stage of a pipeline: remat policies with which its microbatches in flight fit, and its passes' times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mmjax.autotune.memory_plan import ActivationTracer
from mmjax.config import Config, DecoderConfig, Remat
from mmjax.config.model import Encoder
from mmjax.console import size
from mmjax.data.plan.step_plan import RankLayout
from mmjax.errors import UserError
from mmjax.parallel.sharding import TENSOR, row_ranks
from mmjax.pipeline.executor import PipelineExecutor
from mmjax.planning.flops import layer_policies, recompute_flops, stage_flops
from mmjax.planning.memory import (
    ACTIVATION,
    LOADED,
    MASTER,
    DeviceBatch,
    ModelSharding,
    SavedBytes,
    batch_bytes,
    divide_by_tensor_parallelism,
    layer_backward_bytes,
    loss_bytes,
    token_bytes,
)
from mmjax.planning.remat import MemoryLimit, MemoryPlan, Option, StagePlan, choose_policies
from mmjax.planning.schedules import Schedule, make_schedule
from mmjax.planning.simulate import StageTimes, Timeline, simulate
from mmjax.planning.step_time import Speed
from mmjax.planning.work import row_work


def plan_stages(
    config: Config, executor: PipelineExecutor, layout: RankLayout, speed: Speed, limit: MemoryLimit
) -> list[StagePlan]:
    """Choose the remat policies of every stage, with the least recomputation that fits its devices.

    executor: of the same config, with any policies. Stages that share devices share their memory. Raises UserError
    where a stage fits under no policies.
    """
    schedule = make_schedule(executor.schedule, executor.graph, config.batch.microbatches)
    tracer = ActivationTracer(config)
    plans: list[StagePlan] = []
    for number, placed in enumerate(executor.stages):
        # Stages of one worker run in turn, but what they hold lies side by side.
        sharing = sum(stage.mesh == placed.mesh for stage in executor.stages)
        room = replace(limit, device=limit.device / sharing)
        plans.append(_plan_stage(config, executor, number, layout, speed, room, schedule, tracer))
    return plans


def _plan_stage(
    config: Config,
    executor: PipelineExecutor,
    number: int,
    layout: RankLayout,
    speed: Speed,
    limit: MemoryLimit,
    schedule: Schedule,
    tracer: ActivationTracer,
) -> StagePlan:
    placed = executor.stages[number]
    stage, mesh = placed.stage, placed.mesh
    tower = stage.tower
    batch = _longest_batch(config, layout, executor, tower)
    saved = _saved_bytes(config, tower, batch, mesh.shape[TENSOR], tracer)
    in_flight = schedule.in_flight_bound(number)
    memory = _fixed_bytes(config, executor, number, batch, saved["none"].device, in_flight)
    memory["messages"] += _deepstack_bytes(config, executor, number, layout, schedule)
    # Without a backward pass nothing is kept of a microbatch.
    microbatches_held = in_flight if executor.programs[number].has_backward else 0
    options = {
        policy: Option(
            microbatches_held * bytes_.device,
            microbatches_held * bytes_.host,
            _recompute_seconds(config, tower, policy, batch, speed),
        )
        for policy, bytes_ in saved.items()
    }
    part = executor.abstract_parts[number]
    # Moments in host memory are loaded when activations are gone.
    offloaded = _on_device(part.optimizer) if executor.optimizer.offloads else 0.0
    update = offloaded + memory["parameters"] + memory["gradients"] + memory["batch"]
    policies = layer_policies(_towers(config)[tower])[stage.start : stage.stop]
    if _towers(config)[tower].remat == "auto":
        fixed = sum(memory.values())
        layers = {tower: stage.stop - stage.start}
        chosen = choose_policies(layers, {tower: options}, limit.device - fixed, limit.host)
        if chosen is None or update > limit.device:
            smallest = max(update, min(option.device for option in options.values()) * layers[tower] + fixed)
            raise UserError(
                f"stage {placed.name} needs {size(smallest)} of each device and there are {size(limit.device)}, with "
                "as much computed again as can be; give its unit more devices by fsdp, tensor or pipeline, or raise "
                "batch.microbatches",
                everywhere=True,
            )
        policies = chosen[tower]
    memory["activations"] = sum(options[policy].device for policy in policies)
    memory["transient"] += max(0.0, update - sum(memory.values()))
    forward, backward = _seconds(config, executor, number, policies, batch, speed)
    # Numbers in the order in which units take devices, for people; a device's own id may be anything.
    devices = {device: n for n, device in enumerate(executor.mesh.devices.flat)}
    return StagePlan(
        name=placed.name,
        devices=tuple(devices[device] for device in mesh.devices.flat),
        mesh={axis: n for axis, n in mesh.shape.items() if n > 1},
        layers=range(stage.start, stage.stop),
        parameters=sum(leaf.size for leaf in jax.tree.leaves((part.trainable, part.frozen))),
        policies=tuple(policies),
        in_flight=in_flight,
        memory=memory,
        forward=forward,
        backward=backward,
    )


def _towers(config: Config) -> dict[str, DecoderConfig | Encoder]:
    return {"llm": config.model.llm, **config.model.encoders}


def _longest_batch(config: Config, layout: RankLayout, executor: PipelineExecutor, tower: str) -> DeviceBatch:
    """Return a device's part of the compiled shape with a tower's longest rows; memory is planned for it."""
    rows = _rows_on_device(config, layout, executor)
    shapes = (dict(zip(rows, zip(rows.values(), shape.lengths, strict=True), strict=True)) for shape in layout.shapes)
    return DeviceBatch(max(shapes, key=lambda shape: shape[tower][1]), {}, 1)


def _saved_bytes(
    config: Config, tower: str, batch: DeviceBatch, parts: int, tracer: ActivationTracer
) -> dict[Remat, SavedBytes]:
    """Return the bytes that a layer saves of one microbatch on a device, by policy. parts: of tensor parallelism."""
    rows, length = batch.shape[tower]
    positions = row_work(config.model, batch.shape)[tower].positions
    activation = ACTIVATION[config.training.precision]
    return {
        policy: divide_by_tensor_parallelism(bytes_, _towers(config)[tower], policy, positions, activation, parts)
        for policy, bytes_ in tracer.saved_bytes(tower, rows, [length])[0].items()
    }


def _fixed_bytes(
    config: Config, executor: PipelineExecutor, number: int, batch: DeviceBatch, unsaved: float, in_flight: int
) -> dict[str, float]:
    """Count the bytes of a stage on each device by kind, apart from saved activations.

    unsaved: bytes that one layer saves without remat.
    """
    placed = executor.stages[number]
    tower, mesh = placed.stage.tower, placed.mesh
    activation = ACTIVATION[config.training.precision]
    positions = row_work(config.model, batch.shape)[tower].positions
    parts = mesh.shape[TENSOR]
    sharding = ModelSharding(mesh.shape["fsdp"] * parts, parts, parts)
    program = executor.programs[number]
    # With the last stage's copy of a tied embedding, which is not among the parameters that it updates.
    trainable, frozen = (
        _on_device(jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), *part))
        for part in zip(program.abstract, program.shardings, strict=True)
    )
    transient = tokens = 0.0
    if program.has_backward:
        transient = layer_backward_bytes(config.model, tower, unsaved, positions, sharding, activation)
        if tower != "llm" and placed.stage.last:
            tokens = in_flight * token_bytes(config.model, tower, batch, activation)
    if number == executor.graph.sink:
        # A microbatch's gradients, in the precision of the computation, are made when the loss is done with.
        loss = loss_bytes(config.model, positions, sharding, activation, executor.loss_chunks)
        transient = max(transient, loss - activation / MASTER * trainable)
    return {
        "parameters": trainable + activation / MASTER * frozen,
        "gradients": trainable,
        "optimizer": 0.0 if executor.optimizer.offloads else _on_device(executor.abstract_parts[number].optimizer),
        # Weights cast for the computation, and a microbatch's gradients before they are added to those of the others.
        "copies": trainable,
        "batch": LOADED * config.batch.microbatches * batch_bytes(config.model, batch, tower),
        # Activations that arrive and leave, for every microbatch in flight one.
        "messages": 2 * in_flight * positions * _towers(config)[tower].width * activation,
        "tokens": tokens,
        "transient": transient,
    }


def _deepstack_bytes(
    config: Config, executor: PipelineExecutor, number: int, layout: RankLayout, schedule: Schedule
) -> float:
    """Count the bytes of deepstack tokens that wait on each device of an LLM's stage for their layers' outputs."""
    placed = executor.stages[number]
    bytes_ = 0.0
    for name in placed.stage.inputs:
        producer = executor.passes.producer[name]
        _, source, mesh = executor.stages[producer]
        # Beside activations and the embeddings of an encoder's tokens.
        if source.tower not in (placed.stage.tower, name):
            shape = _longest_batch(config, layout, executor, source.tower).shape
            tokens = row_work(config.model, shape)[source.tower].tokens * row_ranks(mesh) / row_ranks(placed.mesh)
            size_of_token = config.model.llm.width * ACTIVATION[config.training.precision]
            # Those of a microbatch come before all stages between, and its maker has it in flight as long.
            bytes_ += schedule.in_flight_bound(producer) * tokens * size_of_token
    return bytes_


def _rows_on_device(config: Config, layout: RankLayout, executor: PipelineExecutor) -> dict[str, int]:
    """Count the rows of every tower on each of its devices."""
    meshes = {placed.stage.tower: placed.mesh for placed in executor.stages}
    totals = [layout.topology.ranks * rows for rows in layout.rows]
    return {
        name: total // row_ranks(meshes[name])
        for name, total in zip(("llm", *config.model.encoders), totals, strict=True)
    }


def _on_device(tree: Any) -> float:
    """Count the bytes on each device of arrays given by shape, dtype and sharding."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def _seconds(
    config: Config,
    executor: PipelineExecutor,
    number: int,
    policies: Sequence[Remat],
    batch: DeviceBatch,
    speed: Speed,
) -> tuple[float, float]:
    """Estimate the seconds of a stage's passes: of its layers as measured, or by their operations."""
    stage = executor.stages[number].stage
    tower, count = stage.tower, stage.stop - stage.start
    parts = executor.stages[number].mesh.shape[TENSOR]
    measured = speed.layer(tower, batch.shape[tower])
    # Layers that were timed are taken out of the operations, and their times added.
    counted = () if measured else tuple(policies)
    layers = range(stage.start, stage.stop)
    flops = stage_flops(config.model, tower, layers, counted, batch.shape, executor.loss_chunks)
    times = [x / parts / speed.rates.flops for x in flops[:2]]
    if measured:
        times[0] += count * measured["forward"] / parts
        times[1] += sum(measured[policy] - measured["forward"] for policy in policies) / parts
    return times[0], times[1] if executor.programs[number].has_backward else 0.0


def _recompute_seconds(config: Config, tower: str, policy: Remat, batch: DeviceBatch, speed: Speed) -> float:
    """Estimate the seconds that a policy adds to a layer's backward pass."""
    if measured := speed.layer(tower, batch.shape[tower]):
        return measured[policy] - measured["none"]
    towers = _towers(config)
    work = row_work(config.model, batch.shape)[tower]
    return recompute_flops(towers[tower], work, policy) / speed.rates.flops


def simulate_stages(executor: PipelineExecutor, plans: Sequence[StagePlan], microbatches: int) -> Timeline:
    """Simulate a step with equal microbatches of the largest shape, transfers not counted."""
    forward, backward = (
        np.array([[getattr(plan, name)] * microbatches for plan in plans]) for name in ("forward", "backward")
    )
    schedule = make_schedule(executor.schedule, executor.graph, microbatches)
    return simulate(schedule, StageTimes(forward, backward))


def memory_plan_of(config: Config, plans: Sequence[StagePlan], limit: MemoryLimit, loss_chunks: int) -> MemoryPlan:
    """Return the run's memory plan: the policies of all towers, and the bytes of the fullest stage."""
    fullest = max(plans, key=lambda plan: plan.bytes)
    towers = _towers(config)
    policies: dict[str, tuple[Remat, ...]] = dict.fromkeys(towers, ())
    # A tower's stages, by their layers, have the policies of the whole tower.
    for plan in sorted(plans, key=lambda plan: plan.layers.start):
        policies[plan.name.partition("[")[0]] += plan.policies
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
