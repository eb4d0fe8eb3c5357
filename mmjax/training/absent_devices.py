"""Compile the real train step for GPUs that are not there, and ask the compiler what it takes of their memory.

Wants JAX's CUDA wheels (the extra `aot`), but no GPU and no driver.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from mmjax.batch import ItemBatch, Microbatch, TextBatch
from mmjax.config import Config
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.mesh import make_mesh
from mmjax.parallel.sharding import ShardingRules
from mmjax.planning.memory import LOADED, OnDevice
from mmjax.training.layers_alone import batch_of_tower
from mmjax.training.optimizer import make_optimizer
from mmjax.training.step import Accumulated, Executor

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


def absent_h100(count: int) -> list[jax.Device]:
    """One node of so many H100, to compile for. Raises UserError where JAX's CUDA wheels are not installed."""
    if importlib.util.find_spec(WHEELS) is None:
        raise UserError(f"compiling for GPUs needs JAX's CUDA wheels, not a GPU; install them with: {INSTALL}")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # they would look for a driver
    return list(topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x1x{count}").devices)


def compiled_bytes(config: Config, batch: OnDevice, devices: list[jax.Device]) -> int:
    """Bytes that the fullest moment of a step takes of each device, by the compiler.

    That of the program which accumulates gradients, with what lies beside it: the optimizer's moments and the batches
    of the steps to come. `batch` is what each device gets; its exchange sends what the widths say.
    """
    model = Model.build(config.model, jnp.dtype(config.training.precision))
    mesh, rules = make_mesh(config.mesh, devices), ShardingRules.of(config.mesh)
    optimizer, chunks = make_optimizer(config.optimizer, model.axes), config.training.loss_chunks or 1
    executor = Executor(model, optimizer, mesh, rules, 1, config.mesh.exchange, chunks)
    held = executor.shardings
    trainable, frozen = _laid(executor.abstract.trainable, held.trainable), _laid(executor.abstract.frozen, held.frozen)
    zeros = jax.eval_shape(executor.zeros)
    whole = NamedSharding(mesh, PartitionSpec())
    sums = Accumulated(_laid(zeros.gradients, held.trainable), jax.tree.map(lambda x: _struct(x, whole), zeros.report))
    arrays = _microbatch(executor, batch)
    weight = jax.ShapeDtypeStruct((), np.float32)
    found = executor.accumulate.lower(trainable, frozen, sums, arrays, weight).compile().memory_analysis()
    inside = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    moments = _on_one_device(_laid(executor.abstract.optimizer, held.optimizer))
    waiting = (LOADED * batch.microbatches - 1) * _on_one_device(arrays)
    return found.temp_size_in_bytes + inside + moments + waiting


def _microbatch(executor: Executor, batch: OnDevice) -> Microbatch:
    mesh, rules, model = executor.mesh, executor.rules, executor.model.config
    ranks = math.prod(mesh.shape[axis] for axis in rules.rows)

    def laid(of: TextBatch | ItemBatch, axes: tuple[str, ...]) -> Any:
        return jax.tree.map(lambda x: _struct(x, NamedSharding(mesh, PartitionSpec(axes))), of)

    def tower(name: str, axes: tuple[str, ...]) -> TextBatch | ItemBatch:
        rows, length = batch.shape[name]
        devices = math.prod(mesh.shape[axis] for axis in axes)
        return laid(batch_of_tower(model, name, (devices * rows, length)), axes)

    text = tower("llm", rules.rows)
    slots = dict.fromkeys(model.encoders, text.token)
    send = {e: jax.ShapeDtypeStruct((ranks, batch.peers, batch.widths[e]), np.int32) for e in model.encoders}
    text = text._replace(slots=slots, send={e: _struct(x, text.token.sharding) for e, x in send.items()})
    return Microbatch(text, {e: tower(e, rules.item_rows) for e in model.encoders})


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _laid(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(_struct, tree, shardings)


def _on_one_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
