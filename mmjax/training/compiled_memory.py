"""What a step takes of a device's memory, by the compiler: the real program is compiled, nothing runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.batch import ItemBatch, Microbatch, Mixed, TextBatch
from mmjax.config import Callbacks, Config, ModelConfig
from mmjax.data.arrangement import CORNERS, interpolates
from mmjax.models.model import Model
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.planning.memory import LOADED, OnDevice
from mmjax.training.layers_alone import batch_of_tower
from mmjax.training.optimizer import make_optimizer
from mmjax.training.step import Accumulated, Executor


def compiled_bytes(config: Config, batch: OnDevice, devices: list[jax.Device]) -> int:
    """Bytes that the fullest moment of a step takes of each device, by the compiler.

    That of the program which accumulates gradients, with what lies beside it: the optimizer's moments and the batches
    of the steps to come. `batch` is what each device gets; its exchange sends what the widths say. Your own callbacks
    are left out.
    """
    encoders = {name: replace(e, callbacks=Callbacks()) for name, e in config.model.encoders.items()}
    model = Model.build(replace(config.model, encoders=encoders), jnp.dtype(config.training.precision))
    mesh, rules = make_mesh(config.mesh, devices), ShardingRules.of(config.mesh)
    optimizer, chunks = make_optimizer(config.optimizer, model.axes), config.training.loss_chunks or 1
    executor = Executor(model, optimizer, mesh, rules, 1, config.mesh.exchange, chunks)
    held = executor.shardings
    trainable, frozen = _laid(executor.abstract.trainable, held.trainable), _laid(executor.abstract.frozen, held.frozen)
    zeros = jax.eval_shape(executor.zeros)
    whole = NamedSharding(mesh, PartitionSpec())
    rest = jax.tree.map(lambda x: _struct(x, whole), zeros[1:])
    sums = Accumulated(_laid(zeros.gradients, held.trainable), *rest)
    arrays = _microbatch(executor, batch, config.model)
    weight = jax.ShapeDtypeStruct((), np.float32)
    found = executor.accumulate.lower(trainable, frozen, sums, arrays, weight).compile().memory_analysis()
    inside = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    moments = _on_one_device(_laid(executor.abstract.optimizer, held.optimizer))
    waiting = (LOADED * batch.microbatches - 1) * _on_one_device(arrays)
    return found.temp_size_in_bytes + inside + moments + waiting


def _microbatch(executor: Executor, batch: OnDevice, model: ModelConfig) -> Microbatch:
    mesh, rules = executor.mesh, executor.rules
    ranks = math.prod(mesh.shape[axis] for axis in rules.rows)

    def laid(of: TextBatch | ItemBatch, axes: tuple[str, ...]) -> Any:
        return jax.tree.map(lambda x: _struct(x, NamedSharding(mesh, PartitionSpec(axes))), of)

    def tower(name: str, axes: tuple[str, ...]) -> TextBatch | ItemBatch:
        rows, length = batch.shape[name]
        devices = math.prod(mesh.shape[axis] for axis in axes)
        return laid(batch_of_tower(model, name, (devices * rows, length)), axes)

    text = tower("llm", rules.rows)
    slots = {name: _slots(text.token, interpolates(encoder)) for name, encoder in model.encoders.items()}
    send = {e: jax.ShapeDtypeStruct((ranks, batch.peers, batch.widths[e]), np.int32) for e in model.encoders}
    text = text._replace(slots=slots, send={e: _struct(x, text.token.sharding) for e, x in send.items()})
    return Microbatch(text, {e: tower(e, rules.item_rows) for e in model.encoders})


def _slots(token: jax.ShapeDtypeStruct, mixed: bool) -> jax.ShapeDtypeStruct | Mixed:
    if not mixed:
        return token
    several = jax.ShapeDtypeStruct((*token.shape, CORNERS), np.int32)
    return Mixed(*(_struct(several.update(dtype=dtype), token.sharding) for dtype in (np.int32, np.float32)))


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _laid(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(_struct, tree, shardings)


def _on_one_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
