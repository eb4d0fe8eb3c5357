"""Which devices a run uses, and the check that a GPU in the machine is not left idle by a missing package."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax

from mmjax.errors import UserError

INSTALL_CUDA = 'pip install -e ".[cuda13]"'


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
