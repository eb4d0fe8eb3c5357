"""Choose a run's devices, find out which are on one host, and refuse to leave a GPU idle for a missing package."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from mmjax.config import MeshConfig
from mmjax.data.placement import Topology
from mmjax.errors import UserError
from mmjax.parallel import processes
from mmjax.parallel.mesh import local_ranks, row_ranks
from mmjax.planning.clusters import USABLE

INSTALL_CUDA = 'pip install -e ".[cuda13]"'


def set_gpu_memory_fraction() -> None:
    """Let JAX's allocator use as much of a GPU as plans assume, unless the user says otherwise; before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(USABLE))


def choose_devices(
    device: Literal["auto", "cpu", "gpu", "tpu"], nvidia: Path = Path("/proc/driver/nvidia/version")
) -> list[jax.Device]:
    """Return the devices to train on.

    nvidia: a file that exists where the NVIDIA driver is loaded. Raises UserError where the machine has an NVIDIA GPU
    that JAX cannot use (unless device=cpu or JAX_PLATFORMS=cpu), or no device of the requested kind.
    """
    if device != "auto":
        try:
            return jax.devices(device)
        except RuntimeError as error:
            remedy = f"; for NVIDIA GPUs install {INSTALL_CUDA}" if device == "gpu" else ""
            raise UserError(f"device={device}: JAX finds no {device} here{remedy}, or use device=auto") from error
    devices = jax.devices()
    if devices[0].platform == "cpu" and nvidia.exists() and jax.config.jax_platforms != "cpu":
        raise UserError(
            f"this machine has an NVIDIA GPU that JAX cannot use; install it with: {INSTALL_CUDA}  (device=cpu to "
            "train on the CPU all the same)"
        )
    return devices


def mesh_topology(mesh: Mesh, config: MeshConfig) -> Topology:
    """Return the ranks of a mesh and how many of them are on one host; encoder outputs are exchanged among these.

    Raises UserError where `mesh.ranks_per_node` does not divide the ranks.
    """
    return make_topology(config, row_ranks(mesh), len(local_ranks(mesh)) * processes.per_host(), mesh.shape["tensor"])


def make_topology(config: MeshConfig, ranks: int, ranks_on_host: int, tensor: int) -> Topology:
    """Return the topology of so many ranks. Raises UserError where `mesh.ranks_per_node` does not divide them."""
    peers = config.ranks_per_node
    if peers < 0 or (peers and ranks % peers):
        raise UserError(f"mesh.ranks_per_node={peers}: choose a divisor of the {ranks} ranks, or 0 for those of a host")
    # The gcd, since groups of ranks must be equal even where the ranks of a host do not divide all of them.
    per_node = math.gcd(ranks, ranks_on_host)
    encoders_per_rank = tensor if config.encoders == "data" else 1
    return Topology(ranks, peers or per_node, per_node, encoders_per_rank)
