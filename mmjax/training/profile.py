"""Costs measured on the device with JAX."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from mmjax.planning.clusters import device_of


def peak_of(devices: Sequence[jax.Device], precision: Literal["bfloat16", "float32"]) -> float:
    """FLOP/s of all `devices` together: the datasheet's where we have it, else measured on one of them.

    The devices of one CPU share its cores, so they count once.
    """
    known = device_of(devices[0].device_kind)
    if known is not None:
        return known.peak(precision) * len(devices)
    return measured_peak(devices[0]) * (1 if devices[0].platform == "cpu" else len(devices))


def measured_peak(device: jax.Device, size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of the best of a few float32 `size`-cubed matrix products: the peak of a device that no table names."""
    a = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        product(a).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
