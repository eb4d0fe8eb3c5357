"""The programs of a pipeline's stages, compiled for arrays that are given by shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.autotune.layer_profile import tower_batch
from mmjax.batch import ItemBatch, TextBatch
from mmjax.models.model import merge
from mmjax.parallel.sharding import replicated, row_ranks, rows_sharding
from mmjax.pipeline.executor import PipelineExecutor
from mmjax.runtime.state import Hyperparameters

Shape = Mapping[str, tuple[int, int]]  # (rows, row length) of every tower, over all devices


def put_shapes(tree: Any, shardings: Any) -> Any:
    """Shapes that lie as `shardings` says, a tree or one for all."""
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def stage_batch(pipeline: PipelineExecutor, number: int, shape: Shape, width: int) -> TextBatch | ItemBatch:
    """A stage's microbatch. width: tokens that each of the LLM's ranks sends to each, of every encoder."""
    _, stage, mesh = pipeline.stages[number]
    config = pipeline.model.config
    batch = tower_batch(config, stage.tower, shape[stage.tower])
    if encoders := stage.encoders:
        ranks = row_ranks(mesh)
        send = jax.ShapeDtypeStruct((ranks, ranks, width), np.int32)
        batch = batch._replace(slots=dict.fromkeys(encoders, batch.token), send=dict.fromkeys(encoders, send))
    return put_shapes(batch, rows_sharding(mesh))


def stage_inputs(pipeline: PipelineExecutor, number: int, shape: Shape, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What a stage gets from those before it."""
    inputs = {}
    for producer in pipeline.graph.producers[number]:
        part, program = pipeline.abstract_parts[producer], pipeline.programs[producer]
        operands = stage_inputs(pipeline, producer, shape, width), stage_batch(pipeline, producer, shape, width)
        output = jax.eval_shape(program.forward_only, merge(part.trainable, part.frozen), *operands, None)
        taken = {name: x for name, x in output.items() if pipeline.passes.consumer[name] == number}
        inputs |= put_shapes(taken, pipeline.programs[number].output)
    return inputs


def compile_stage(
    pipeline: PipelineExecutor, number: int, shape: Shape, width: int, hyper: Hyperparameters | None = None
) -> tuple[dict[str, jax.stages.Compiled], Any]:
    """Compile the programs that a step runs of a stage, the update if `hyper` is given; and its residuals' shapes.

    Embeddings must not be tied: the last stage's copy is not among its own parameters.
    """
    placed, program = pipeline.stages[number], pipeline.programs[number]
    part = pipeline.abstract_parts[number]
    params = part.trainable, part.frozen
    sums = program.sums
    batch, inputs = (f(pipeline, number, shape, width) for f in (stage_batch, stage_inputs))
    on_all = replicated(placed.mesh)
    programs: dict[str, Any] = {}
    residuals: Any = None
    # Newer JAX asks the mesh in use which GPU a kernel is lowered for.
    with jax.sharding.use_abstract_mesh(placed.mesh.abstract_mesh):
        if program.computes_loss:
            weight = jax.ShapeDtypeStruct((), np.float32, sharding=on_all)
            lowered = program.forward_backward.lower(*params, sums, inputs, batch, None, weight)
            programs["forward_backward"] = lowered.compile()
        elif program.has_backward:
            programs["forward"] = program.forward.lower(*params, inputs, batch, None).compile()
            outputs, residuals = jax.eval_shape(program.forward, *params, inputs, batch, None)
            residuals = put_shapes(residuals, programs["forward"].output_shardings[1])
            gradients = put_shapes({name: outputs[name] for name in program.trained & set(outputs)}, program.output)
            programs["backward"] = program.backward.lower(*params, sums, batch, residuals, gradients).compile()
        else:
            programs["forward"] = program.forward_only.lower(merge(*params), inputs, batch, None).compile()
        if hyper is not None:
            scalars = (jax.ShapeDtypeStruct((), dtype, sharding=on_all) for dtype in (jnp.float32, jnp.bool))
            reduced = put_shapes(
                jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), part.trainable), program.shardings[0]
            )
            programs["update"] = pipeline._update[number].lower(part, reduced, hyper, *scalars).compile()
            if program.sums_by_rank:
                programs["reduce"] = program.reduce.lower(sums).compile()
    return programs, residuals
