"""Measure the memory of a step by the compiler: the real program is compiled, nothing runs."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.autotune.layer_profile import tower_batch
from mmjax.batch import ItemBatch, Microbatch, TextBatch, WeightedSlots
from mmjax.config import Callbacks, Config, ModelConfig
from mmjax.data.media.anyres_layout import interpolates_tokens
from mmjax.data.sample import CORNERS
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.planning.memory import LOADED, DeviceBatch
from mmjax.runtime.state import make_optimizer
from mmjax.runtime.step import Executor

WHEELS = "jax_cuda13_plugin"
INSTALL = 'pip install -e ".[aot]"'
# An H100 as XLA describes devices (`GpuTargetConfigProto`): limits of compute capability 9.0, and its data sheet.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
"""


def aot_h100(per_node: int, nodes: int = 1) -> list[jax.Device]:
    """Return H100s to compile for, `per_node` on each node. Raises UserError where JAX's CUDA wheels are missing."""
    if importlib.util.find_spec(WHEELS) is None:
        raise UserError(f"compiling for GPUs needs JAX's CUDA wheels, not a GPU; install them with: {INSTALL}")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the wheels would look for a driver
    topology = f"1x{nodes}x{per_node}"
    return list(topologies.get_topology_desc(platform="cuda", target_config=H100, topology=topology).devices)


def compiled_bytes(config: Config, batch: DeviceBatch, devices: list[jax.Device]) -> int:
    """Return the peak bytes of a step on each device, according to the compiler.

    Counted are the program that accumulates gradients and what lies beside it: the optimizer's moments and the batches
    of the steps to come. batch: what each device gets; its exchange sends as much as its widths say. Callbacks are left
    out.
    """
    encoders = {name: replace(e, callbacks=Callbacks()) for name, e in config.model.encoders.items()}
    model = Model.build(replace(config.model, encoders=encoders), jnp.dtype(config.training.precision))
    mesh = make_mesh(config.mesh, devices)
    optimizer = make_optimizer(config.optimizer, model.axes)
    chunks = config.training.loss_chunks or 1
    rules = ShardingRules.of(config.mesh)
    executor = Executor(
        model=model,
        optimizer=optimizer,
        mesh=mesh,
        rules=rules,
        sources=1,
        exchange=config.mesh.exchange,
        loss_chunks=chunks,
        accumulates=batch.microbatches > 1,
    )
    state = jax.tree.map(_struct, executor.abstract, executor.shardings)
    zeros = jax.eval_shape(executor.zeros)
    accumulated = zeros and jax.tree.map(_struct, zeros, executor.sums_shardings)
    arrays = _microbatch(executor, batch, config.model)
    weight = jax.ShapeDtypeStruct((), np.float32)
    lowered = executor.accumulate.lower(state.trainable, state.frozen, accumulated, arrays, weight)
    memory = lowered.compile().memory_analysis()
    # Donated buffers count as arguments and as output, but exist once.
    inside = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The microbatch in the program is one of those that are loaded.
    waiting = (LOADED * batch.microbatches - 1) * _on_one_device(arrays)
    return memory.temp_size_in_bytes + inside + _on_one_device(state.optimizer) + waiting


def _microbatch(executor: Executor, batch: DeviceBatch, model: ModelConfig) -> Microbatch:
    """Return the shapes and shardings of the global microbatch of which each device gets `batch`."""
    mesh = executor.mesh
    rules = executor.rules

    def tower(name: str, axes: tuple[str, ...]) -> TextBatch | ItemBatch:
        rows, length = batch.shape[name]
        shards = math.prod(mesh.shape[axis] for axis in axes)
        structs = tower_batch(model, name, (shards * rows, length))
        return jax.tree.map(lambda x: _struct(x, NamedSharding(mesh, PartitionSpec(axes))), structs)

    text = tower("llm", rules.rows)
    token = text.token
    ranks = math.prod(mesh.shape[axis] for axis in rules.rows)
    slots: dict[str, Any] = {}
    send: dict[str, Any] = {}
    for name, encoder in model.encoders.items():
        slots[name] = token
        if interpolates_tokens(encoder):
            corners = jax.ShapeDtypeStruct((*token.shape, CORNERS), np.int32, sharding=token.sharding)
            slots[name] = WeightedSlots(corners, corners.update(dtype=np.float32))
        # Slots that each rank sends to each of its peers.
        shape = ranks, batch.peers, batch.widths[name]
        send[name] = jax.ShapeDtypeStruct(shape, np.int32, sharding=token.sharding)
    return Microbatch(text._replace(slots=slots, send=send), {e: tower(e, rules.item_rows) for e in model.encoders})


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _on_one_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
