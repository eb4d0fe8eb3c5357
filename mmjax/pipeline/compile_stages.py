"""Measure the memory of a pipeline's stages by the compiler: the real programs are compiled, nothing runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.autotune.compile_memory import table_structs
from mmjax.autotune.memory_plan import apply_memory_plan
from mmjax.batch import ItemBatch, Microbatch, TextBatch
from mmjax.config import Callbacks, Config
from mmjax.config.training import loss_inputs
from mmjax.cost.trace import tower_batch
from mmjax.data.plan.step_plan import RankLayout
from mmjax.models.model import Model, merge
from mmjax.models.quantization import cast_frozen
from mmjax.parallel.sharding import replicated, row_ranks
from mmjax.pipeline.forecast import PipelineForecast
from mmjax.pipeline.stage_plan import memory_plan_of
from mmjax.planning.memory import LOADED
from mmjax.planning.remat import StagePlan
from mmjax.planning.schedules import schedule_name, stage_cuts, stage_times
from mmjax.runtime.compiler_options import compiler_options
from mmjax.runtime.device_batch import batch_shardings
from mmjax.runtime.executor import Executor
from mmjax.runtime.placement import place_stages, select_tables
from mmjax.runtime.stage_program import StageProgram
from mmjax.runtime.state import Hyperparameters, hyperparameters, make_optimizer


class BatchShape(NamedTuple):
    """Shape of a microbatch over all devices."""

    towers: Mapping[str, tuple[int, int]]  # (rows, row length)
    widths: Mapping[str, int]  # of every encoder: tokens that each of the LLM's ranks sends to each


NAMES = re.compile(r'jax\.result_info = "[^"]*"')  # of outputs, with numbers of layers


def compile_pipeline(forecast: PipelineForecast, devices: Sequence[jax.Device]) -> dict[str, dict[str, int]]:
    """Compile the stages of a run as it is planned; return bytes by stage and program, as `compile_stages` does."""
    chunks = forecast.config.training.loss_chunks or 1
    memory = memory_plan_of(forecast.config, forecast.stages, forecast.limit, chunks)
    config = apply_memory_plan(forecast.config, memory.policies, chunks)
    return compile_stages(config, forecast.layout, forecast.stages, devices)


def compile_stages(
    config: Config, layout: RankLayout, plans: Sequence[StagePlan], devices: Sequence[jax.Device]
) -> dict[str, dict[str, int]]:
    """Return the bytes on a device while each program of each stage runs in the longest rows, with what lies beside it.

    config: with the remat policies of the plans. Stages of equal programs are compiled once. Callbacks are left out.
    """
    encoders = {name: replace(encoder, callbacks=Callbacks()) for name, encoder in config.model.encoders.items()}
    model = Model.build(
        replace(config.model, encoders=encoders), jnp.dtype(config.training.precision), stage_cuts(config)
    )
    used = 1 + max(number for plan in plans for number in plan.devices)
    pipeline = Executor(
        model,
        make_optimizer(config.optimizer, model.axes, model.dtype),
        place_stages(config, model, devices[:used]),
        sources=1,
        schedule=schedule_name(config),
        stage_times=stage_times(config),
        loss=config.loss,
        loss_chunks=config.training.loss_chunks or 1,
        compiler_options=compiler_options(config.compiler, devices[0], layout.topology.context),
    )
    hyper = hyperparameters(config, 0)
    compiled: dict[Any, tuple[dict[str, int], int]] = {}
    by_stage = {}
    for number, plan in enumerate(plans):
        shape = _longest_shape(config, layout, pipeline.stages[number].stage.towers)
        key = _program_texts(pipeline, number, shape, hyper)
        if key not in compiled:
            programs, residuals = compile_stage(pipeline, number, shape, hyper)
            compiled[key] = {name: _made_bytes(p) for name, p in programs.items()}, _on_device(residuals)
        by_stage[plan.name] = _stage_bytes(config, pipeline, number, shape, plan.in_flight, *compiled[key])
    return by_stage


def _longest_shape(config: Config, layout: RankLayout, towers: Sequence[str]) -> BatchShape:
    """Return the compiled shape with the longest rows of these towers."""
    names = ("llm", *config.model.item_modules)
    longest = max(layout.shapes, key=lambda shape: sum(shape.lengths[names.index(tower)] for tower in towers))
    rows = (layout.topology.ranks * n for n in layout.rows)
    return BatchShape(
        towers=dict(zip(names, zip(rows, longest.lengths, strict=True), strict=True)),
        widths=dict(zip(names[1:], longest.widths, strict=True)),
    )


def _program_texts(pipeline: Executor, number: int, shape: BatchShape, hyper: Hyperparameters) -> tuple[Any, ...]:
    """Return the first program of a stage's passes and its update in StableHLO: stages that share both are equal."""
    first, update = lower_first(pipeline, number, shape), lower_update(pipeline, number, hyper)
    program = pipeline.programs[number]
    texts = (NAMES.sub("", lowered.as_text()) for lowered in (first, update))
    return (len(program.gradient_inputs), program.has_backward, *texts)


def _stage_bytes(
    config: Config,
    pipeline: Executor,
    number: int,
    shape: BatchShape,
    in_flight: int,
    program_bytes: Mapping[str, int],
    residuals: int,
) -> dict[str, int]:
    """Add to what programs make what lies beside them. program_bytes: bytes of outputs and temporaries, by program."""
    # Also what a program is not given because it does not use it: parameters and sums lie there all the same.
    moments = 0 if pipeline.optimizer.offloads else _on_device(pipeline.abstract_parts[number].optimizer)
    state = _on_device(stage_parameters(pipeline, number)) + _on_device(pipeline.programs[number].sums) + moments
    loaded = LOADED * config.batch.microbatches * _on_device(stage_batch(pipeline, number, shape))
    passing = _on_device(stage_inputs(pipeline, number, shape)) + in_flight * residuals
    total = {}
    for name, bytes_ in program_bytes.items():
        total[name] = bytes_ + state + loaded
        if name in ("forward", "backward", "forward_backward"):
            total[name] += passing
        if name == "forward":
            total[name] -= residuals  # one microbatch's are among what it makes
    return total


def _made_bytes(program: jax.stages.Compiled) -> int:
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _on_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ------------------------------------------------------------------------------------------------- a stage's programs


def stage_parameters(pipeline: Executor, number: int) -> tuple[Any, Any]:
    """Return the shapes of a stage's trainable and frozen parameters, with its copy of a tied embedding."""
    program = pipeline.programs[number]
    trainable, frozen = program.abstract
    frozen = jax.eval_shape(partial(cast_frozen, dtype=pipeline.model.dtype), frozen)
    return put_shapes(trainable, program.shardings[0]), put_shapes(frozen, program.shardings[1])


def stage_batch(pipeline: Executor, number: int, shape: BatchShape) -> Microbatch:
    """Return the shapes of a stage's microbatch."""
    _, stage, mesh, rules, _ = pipeline.stages[number]
    config = pipeline.model.config

    def put(batch: TextBatch | ItemBatch) -> TextBatch | ItemBatch:
        return put_shapes(batch, batch_shardings(batch, mesh, rules))

    text = None
    if stage.text:
        text = tower_batch(config, "llm", shape.towers["llm"])
        modules = config.item_modules
        devices = row_ranks(mesh, rules.token_rows)
        rows = {name: (shape.towers[name][0] // devices, shape.towers[name][1]) for name in modules}
        tables = table_structs(modules, text.token, mesh, rules, rows, shape.widths, row_ranks(mesh))
        inputs = dict.fromkeys(loss_inputs(pipeline.objective.loss), text.weight)
        text = put(select_tables(text._replace(**tables, loss_inputs=inputs), stage))
    towers = [tower for tower in stage.towers if tower != "llm"]
    return Microbatch(text, {tower: put(tower_batch(config, tower, shape.towers[tower])) for tower in towers})


def stage_inputs(pipeline: Executor, number: int, shape: BatchShape) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of what a stage gets from those before it."""
    inputs = {}
    for producer in pipeline.graph.producers[number]:
        program = pipeline.programs[producer]
        operands = stage_inputs(pipeline, producer, shape), stage_batch(pipeline, producer, shape)
        params = merge(*stage_parameters(pipeline, producer))
        operands = *operands, *_scalars(program), program.sums.losses
        output, _ = jax.eval_shape(program.forward_only, params, *operands)
        taken = {name: x for name, x in output.items() if number in pipeline.passes.consumers[name]}
        layouts = pipeline.programs[number].layouts
        inputs |= put_shapes(taken, {name: layouts[name] for name in taken})
    return inputs


def lower_first(pipeline: Executor, number: int, shape: BatchShape) -> jax.stages.Lowered:
    """Lower the first program that a stage runs of a microbatch: forward, or both passes where the loss is."""
    program, mesh = pipeline.programs[number], pipeline.stages[number].mesh
    params = stage_parameters(pipeline, number)
    inputs, batch = (f(pipeline, number, shape) for f in (stage_inputs, stage_batch))
    noise, weights = _scalars(program)
    # Newer JAX asks the mesh in use which GPU a kernel is lowered for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if program.is_sink:
            return program.forward_backward.lower(*params, program.sums, batch, weights, noise, inputs)
        operands = inputs, batch, noise, weights, program.sums.losses
        if program.has_backward:
            return program.forward.lower(*params, *operands)
        return program.forward_only.lower(merge(*params), *operands)


def lower_update(pipeline: Executor, number: int, hyper: Hyperparameters) -> jax.stages.Lowered:
    """Lower the optimizer's update of a stage."""
    on_all = replicated(pipeline.stages[number].mesh)
    part = put_shapes(pipeline.abstract_parts[number], pipeline.states[number].shardings)
    sums = put_shapes(
        jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), part.trainable),
        pipeline.states[number].shardings.trainable,
    )
    scalars = (jax.ShapeDtypeStruct((), dtype, sharding=on_all) for dtype in (jnp.float32, jnp.bool))
    return pipeline.updates[number].lower(part, sums, hyper, *scalars)


def compile_stage(
    pipeline: Executor, number: int, shape: BatchShape, hyper: Hyperparameters | None = None
) -> tuple[dict[str, jax.stages.Compiled], Any]:
    """Compile the programs that a step runs of a stage, the update if `hyper` is given; and its residuals' shapes."""
    program, mesh = pipeline.programs[number], pipeline.stages[number].mesh
    first = lower_first(pipeline, number, shape).compile()
    residuals: Any = None
    programs = {"forward_backward" if program.is_sink else "forward": first}
    if program.has_backward and not program.is_sink:
        params = stage_parameters(pipeline, number)
        sums = program.sums.gradients
        inputs, batch = (f(pipeline, number, shape) for f in (stage_inputs, stage_batch))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            operands = inputs, batch, *_scalars(program), program.sums.losses
            outputs, residuals, _ = jax.eval_shape(program.forward, *params, *operands)
            residuals = put_shapes(residuals, first.output_shardings[1])
            trained = program.trained & set(outputs)
            gradients = put_shapes(*({name: x[name] for name in trained} for x in (outputs, program.layouts)))
            programs["backward"] = program.backward.lower(*params, sums, batch, residuals, gradients).compile()
    if hyper is not None:
        programs["update"] = lower_update(pipeline, number, hyper).compile()
        if program.sums_by_rank:
            programs["reduce"] = program.reduce.lower(program.sums.gradients).compile()
    return programs, residuals


def put_shapes(tree: Any, shardings: Any) -> Any:
    """Return shapes that lie as `shardings` says, a tree or one for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def _scalars(program: StageProgram) -> tuple[np.ndarray | None, dict[str, jax.ShapeDtypeStruct]]:
    """Return the noise and the loss weights that a stage takes."""
    weight = jax.ShapeDtypeStruct((), np.float32, sharding=replicated(program.mesh))
    noise = np.zeros(2, np.uint32) if program.stage.model.is_random else None
    return noise, dict.fromkeys(program.stage.losses, weight)
