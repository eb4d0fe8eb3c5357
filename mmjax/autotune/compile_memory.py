"""Measure the memory of a step by the compiler: the real program is compiled, nothing runs."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from mmjax.batch import ItemBatch, Microbatch, TextBatch, WeightedSlots
from mmjax.config import Callbacks, Config, Generator, ModelConfig
from mmjax.config.towers import Encoder
from mmjax.config.training import loss_inputs
from mmjax.cost.trace import tower_batch
from mmjax.data.loading.context import tokens_on_device
from mmjax.data.media.anyres_layout import interpolates_tokens
from mmjax.data.sample import CORNERS
from mmjax.errors import UserError
from mmjax.models.model import Model
from mmjax.parallel.sharding import (
    CONTEXT,
    ShardingRules,
    make_mesh,
    replicated,
    row_ranks,
    rows_sharding,
    tokens_sharding,
)
from mmjax.planning.hardware import DEVICES, USABLE, Cluster
from mmjax.planning.memory import LOADED, DeviceBatch
from mmjax.runtime.compiler_options import compiler_options
from mmjax.runtime.device_batch import MAX_UNREADABLE, ProcessReport
from mmjax.runtime.executor import Executor
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import Hyperparameters, TrainState, hyperparameters, make_optimizer
from mmjax.runtime.step_report import loss_weights

WHEELS = "jax_cuda13_plugin"
INSTALL = 'pip install "mmjax[aot]"'
# A GPU as XLA describes devices (`GpuTargetConfigProto`).
TARGET = """
platform_name: "CUDA"
device_description_str: "{name}"
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  fpus_per_core: {fpus_per_core}
  l2_cache_size: {l2_cache_size}
  shared_memory_per_block_optin: {shared_memory_per_block_optin}
  shared_memory_per_core: {shared_memory_per_core}
  shared_memory_per_block: 49152
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
"""
# Limits by compute capability, as in XLA's own descriptions (openxla/xla, gpu/target_config/specs).
LIMITS = {
    80: {
        "fpus_per_core": 64,
        "l2_cache_size": 41_943_040,
        "shared_memory_per_block_optin": 166_912,
        "shared_memory_per_core": 167_936,
    },
    90: {
        "fpus_per_core": 128,
        "l2_cache_size": 52_428_800,
        "shared_memory_per_block_optin": 232_448,
        "shared_memory_per_core": 233_472,
    },
}
# XLA compiles for this share of a target's memory, and on a device for all that JAX's allocator has: a share of USABLE.
XLA_SHARE = 0.8


def aot_devices(cluster: Cluster) -> list[jax.Device]:
    """Return the devices of an absent cluster to compile for.

    Raises UserError for devices that are not described, and where JAX's CUDA wheels are missing.
    """
    device = cluster.device
    target = device.cuda
    if target is None:
        known = ", ".join(device.name for device in DEVICES if device.cuda)
        raise UserError(f"cluster={device.name}: it cannot be compiled for where it is absent, only {known} can")
    if importlib.util.find_spec(WHEELS) is None:
        raise UserError(f"compiling for GPUs needs JAX's CUDA wheels, not a GPU; install them with: {INSTALL}")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the wheels would look for a driver
    text = TARGET.format(
        name=target.name,
        major=target.capability // 10,
        minor=target.capability % 10,
        cores=target.cores,
        clock=target.clock,
        memory=int(USABLE / XLA_SHARE * target.memory),
        bandwidth=int(device.bandwidth),
        **LIMITS[target.capability],
    )
    topology = f"1x{cluster.nodes}x{cluster.per_node}"
    return list(topologies.get_topology_desc(platform="cuda", target_config=text, topology=topology).devices)


class CompiledProgram(NamedTuple):
    """A program of a step, as the compiler made it for each device."""

    bytes: int  # peak, with what lies beside the program
    rematerialized: int  # instructions that XLA computes again by itself, to take less memory
    synchronous: int  # collectives that nothing is computed beside
    text: str  # HLO in the order of execution


@dataclass(frozen=True)
class StepPrograms:
    """The programs of a step on a mesh, and the shapes of their arguments.

    microbatch: as each device gets it. Callbacks are left out.
    """

    executor: Executor
    state: TrainState
    accumulated: Sums | None  # added to; None with one microbatch
    gradients: Sums  # of all microbatches
    microbatch: Microbatch
    microbatches: int
    hyper: Hyperparameters

    @classmethod
    def of(cls, config: Config, batch: DeviceBatch, devices: Sequence[jax.Device]) -> Self:
        """Describe the programs of a step of which each device gets `batch`; its exchange sends as its widths say."""
        encoders = {name: replace(e, callbacks=Callbacks()) for name, e in config.model.encoders.items()}
        model = Model.build(replace(config.model, encoders=encoders), jnp.dtype(config.training.precision))
        mesh = make_mesh(config.mesh, devices)
        executor = Executor.on_mesh(
            model,
            make_optimizer(config.optimizer, model.axes, model.dtype),
            mesh,
            ShardingRules.of(config.mesh),
            sources=1,
            loss_chunks=config.training.loss_chunks or 1,
            loss=config.loss,
            accumulates=batch.microbatches > 1,
            compiler_options=compiler_options(config.compiler, devices[0], mesh.shape[CONTEXT]),
        )
        return cls(
            executor=executor,
            state=jax.tree.map(_struct, executor.abstract_parts[0], executor.states[0].shardings),
            accumulated=executor.sums if executor.accumulates else None,
            gradients=executor.sums,
            microbatch=_microbatch(executor, batch, config.model),
            microbatches=batch.microbatches,
            hyper=hyperparameters(config, 0),
        )

    def compile_gradients(self) -> CompiledProgram:
        """Compile the program that accumulates gradients. Beside it lie the moments and the batches to come.

        Moments in host memory take none of the device's.
        """
        noise = np.zeros(2, np.uint32) if self.executor.model.is_random else None
        weights = loss_weights(self.executor.model.config, jax.ShapeDtypeStruct((), np.float32))
        arguments = self.state.trainable, self.state.frozen, self.accumulated, self.microbatch, weights, noise, {}
        # The microbatch in the program is one of those that are loaded.
        waiting = (LOADED * self.microbatches - 1) * _on_one_device(self.microbatch)
        moments = 0 if self.executor.optimizer.offloads else _on_one_device(self.state.optimizer)
        return self._compile(self.executor.programs[0].forward_backward, arguments, moments + waiting)

    def compile_update(self) -> CompiledProgram:
        """Compile the optimizer's update. Beside it lie the batches of this step and of the next."""
        devices = self.executor.mesh.size

        def report(*shape: int, dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((devices, *shape), dtype, sharding=self.executor.per_device)

        reports = ProcessReport(
            digest=report(2, dtype=np.uint32),
            content=report(2, dtype=np.uint32),
            needed_flops=report(dtype=np.float32),
            batch_seconds=report(dtype=np.float32),
            stop=report(dtype=np.bool_),
            unreadable=report(MAX_UNREADABLE + 1, dtype=np.int32),
        )
        unreadable = jax.tree.map(
            lambda x: _struct(x, replicated(self.executor.mesh)),
            jax.eval_shape(self.executor.merge_unreadable, reports.unreadable),
        )
        weight = jax.ShapeDtypeStruct((), np.float32, sharding=replicated(self.executor.mesh))
        weights = loss_weights(self.executor.model.config, weight)
        arguments = self.state, self.gradients, self.hyper, weights, reports, unreadable
        return self._compile(
            self.executor.update_whole, arguments, LOADED * self.microbatches * _on_one_device(self.microbatch)
        )

    def _compile(self, program: Any, arguments: tuple[Any, ...], beside: int) -> CompiledProgram:
        # Newer JAX asks the mesh in use which GPU a kernel is lowered for.
        with jax.sharding.use_abstract_mesh(self.executor.mesh.abstract_mesh):
            compiled = program.lower(*arguments).compile()
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        # Donated buffers count as arguments and as output, but exist once.
        inside = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return CompiledProgram(
            bytes=memory.temp_size_in_bytes + inside + beside,
            rematerialized=len(re.findall(r"^\s+(?:ROOT )?%\S+\.remat[\d.]* = ", text, re.MULTILINE)),
            synchronous=text.count('"is_sync":true'),
            text=text,
        )


def compiled_bytes(config: Config, batch: DeviceBatch, devices: Sequence[jax.Device]) -> int:
    """Return the peak bytes of a step on each device, according to the compiler: of the fuller of its programs."""
    step = StepPrograms.of(config, batch, devices)
    return max(step.compile_gradients().bytes, step.compile_update().bytes)


def _microbatch(executor: Executor, batch: DeviceBatch, model: ModelConfig) -> Microbatch:
    """Return the shapes and shardings of the global microbatch of which each device gets `batch`."""
    mesh = executor.mesh
    rules = executor.rules

    def tower(name: str, axes: tuple[str, ...], layout: NamedSharding, parts: int = 1) -> TextBatch | ItemBatch:
        rows, length = batch.shape[name]
        structs = tower_batch(model, name, (row_ranks(mesh, axes) * rows, parts * length))
        return jax.tree.map(lambda x: _struct(x, layout), structs)

    text = tower("llm", rules.rows, tokens_sharding(mesh, rules), mesh.shape[CONTEXT])
    items = {m: tower(m, rules.item_rows, rows_sharding(mesh, rules.item_rows)) for m in model.item_modules}
    tables = table_structs(model.item_modules, text.token, mesh, rules, batch.shape, batch.widths, batch.peers)
    inputs = dict.fromkeys(loss_inputs(executor.objective.loss), text.weight)
    return Microbatch(text._replace(**tables, loss_inputs=inputs), items)


def table_structs(
    modules: Mapping[str, Encoder | Generator],
    token: jax.ShapeDtypeStruct,
    mesh: Mesh,
    rules: ShardingRules,
    shape: Mapping[str, tuple[int, int]],
    widths: Mapping[str, int],
    peers: int,
) -> dict[str, dict[str, Any]]:
    """Return the shapes of a text's tables `slots`, `send`, `spread` and `condition`, by their names.

    token: as in the text. shape: rows of every module on a device, and their length. widths: slots that each device
    sends to each of its peers.
    """
    devices = row_ranks(mesh, rules.token_rows)
    by_device, by_rank = (rows_sharding(mesh, axes) for axes in (rules.token_rows, rules.rows))
    context = mesh.shape[CONTEXT]
    tables: dict[str, dict[str, Any]] = {"slots": {}, "send": {}, "spread": {}, "condition": {}}
    for name, module in modules.items():
        tables["slots"][name] = slot_structs(module, token)
        if isinstance(module, Generator):
            # What generators are sent goes from rank to rank.
            rows, length = shape[name]
            columns = module.most_images(length) * module.condition_tokens
            size = row_ranks(mesh, rules.rows), peers, widths[name]
            tables["send"][name] = jax.ShapeDtypeStruct(size, np.int32, sharding=by_rank)
            tables["condition"][name] = jax.ShapeDtypeStruct((devices * rows, columns), np.int32, sharding=by_rank)
            continue
        tables["send"][name] = jax.ShapeDtypeStruct((devices, peers, widths[name]), np.int32, sharding=by_device)
        if context > 1:
            width = tokens_on_device(module, *shape[name], peers, widths[name])
            tables["spread"][name] = jax.ShapeDtypeStruct((devices, context, width), np.int32, sharding=by_device)
    return tables


def slot_structs(module: Encoder | Generator, token: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | WeightedSlots:
    """Return the shapes of the table that places a module's tokens among those of the text."""
    if isinstance(module, Generator) or not interpolates_tokens(module):
        return token
    corners = jax.ShapeDtypeStruct((*token.shape, CORNERS), np.int32, sharding=token.sharding)
    return WeightedSlots(corners, corners.update(dtype=np.float32))


def _struct(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _on_one_device(tree: Any) -> int:
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
