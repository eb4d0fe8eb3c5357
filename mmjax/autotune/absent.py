"""Describe absent devices to the compiler, which then compiles for a cluster without any of its GPUs."""

from __future__ import annotations

import importlib.util
import os

import jax
from jax.experimental import topologies

from mmjax.errors import UserError
from mmjax.planning.hardware import DEVICES, USABLE, Cluster

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
# XLA compiles for this share of a target's memory, and on a device for all that JAX's allocator
# has: a share of USABLE.
XLA_SHARE = 0.8


def aot_devices(cluster: Cluster) -> list[jax.Device]:
    """Return the devices of an absent cluster to compile for.

    Raises UserError for devices that are not described, and where JAX's CUDA wheels are missing.
    """
    device = cluster.device
    target = device.cuda
    if target is None:
        known = ", ".join(device.name for device in DEVICES if device.cuda)
        raise UserError(
            f"cluster={device.name}: it cannot be compiled for where it is absent, only {known} can"
        )
    if importlib.util.find_spec(WHEELS) is None:
        raise UserError(
            f"compiling for GPUs needs JAX's CUDA wheels, not a GPU; install them with: {INSTALL}"
        )
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
    return list(
        topologies.get_topology_desc(platform="cuda", target_config=text, topology=topology).devices
    )
