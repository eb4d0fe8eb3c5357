"""Devices to compile the real train step for ahead of time, on a machine without GPUs.

This needs JAX's CUDA wheels (the extra `aot`), but no GPU and no driver.
"""

from __future__ import annotations

import importlib.util
import os

import jax
from jax.experimental import topologies

from mmjax.errors import UserError

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
