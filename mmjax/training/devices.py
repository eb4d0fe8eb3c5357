"""Which devices a run uses, how they are neighbours, and that no GPU is left idle by a missing package."""

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
from mmjax.parallel.mesh import held_ranks, row_ranks
from mmjax.planning.clusters import USABLE

INSTALL_CUDA = 'pip install -e ".[cuda13]"'


def use_most_memory() -> None:
    """Let JAX's allocator have as much of a GPU as plans count on, where nobody said how much; before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(USABLE))


def choose_devices(
    device: Literal["auto", "cpu", "gpu", "tpu"], nvidia: Path = Path("/proc/driver/nvidia/version")
) -> list[jax.Device]:
    """The devices of this host to train on.

    Raises UserError where the machine has an NVIDIA GPU that JAX cannot use (unless device=cpu or JAX_PLATFORMS=cpu
    says so), and where there is no device of the kind asked for. `nvidia` is the file that the NVIDIA driver makes.
    """
    if device != "auto":
        try:
            return jax.devices(device)
        except RuntimeError as error:
            remedy = f"; for NVIDIA GPUs install {INSTALL_CUDA}" if device == "gpu" else ""
            raise UserError(f"device={device}: JAX finds no {device} here{remedy}, or use device=auto") from error
    devices = jax.devices()
    meant = jax.config.jax_platforms == "cpu"
    if devices[0].platform == "cpu" and nvidia.exists() and not meant:
        raise UserError(
            f"this machine has an NVIDIA GPU that JAX cannot use; install it with: {INSTALL_CUDA}  (device=cpu to "
            "train on the CPU all the same)"
        )
    return devices


def topology_of(mesh: Mesh, config: MeshConfig) -> Topology:
    """The ranks of a mesh and which of them are on one host; encoder outputs travel among these.

    Raises UserError where `mesh.ranks_per_node` does not divide the ranks.
    """
    ranks, mine = row_ranks(mesh), len(held_ranks(mesh))
    given = config.ranks_per_node
    if given < 0 or (given and ranks % given):
        raise UserError(f"mesh.ranks_per_node={given}: choose a divisor of the {ranks} ranks, or 0 for those of a host")
    per_node = math.gcd(ranks, mine * processes.per_host())
    return Topology(ranks, given or per_node, per_node, mesh.shape["tensor"] if config.encoders == "data" else 1)
