"""Costs measured on the device with JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mmjax.planning.clusters import Rates, device_of


def peak_of(devices: Sequence[jax.Device], precision: Literal["bfloat16", "float32"]) -> float:
    """FLOP/s of all `devices` together: the datasheet's where we have it, else measured on one of them.

    The devices of one CPU share its cores, so they count once.
    """
    known = device_of(devices[0].device_kind)
    if known is not None:
        return known.peak(precision) * len(devices)
    return measured_peak(devices[0]) * (1 if devices[0].platform == "cpu" else len(devices))


def memory_used(mesh: Mesh) -> int | None:
    """Bytes, at most so far, of this process's fullest device; None where its backend does not count them."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in mesh.local_devices]
    return max((peak for peak in peaks if peak is not None), default=None)


def rates_of(device: jax.Device, precision: Literal["bfloat16", "float32"]) -> Rates:
    """What a device reaches: of its data sheet where we have it, else measured."""
    known = device_of(device.device_kind)
    if known is None:
        moving = measured_bandwidth(device)
        return Rates(measured_peak(device), moving, moving)
    return known.rates(precision)


def measured_bandwidth(device: jax.Device, size: int = 2**25, repeats: int = 3) -> float:
    """Bytes per second, read and written, of the best of a few passes over `size` bytes."""
    x = jax.device_put(jnp.ones(size // 4, jnp.float32), device)
    return 2 * size / _best_seconds(jax.jit(lambda x: x + 1), x, repeats)


@cache
def measured_peak(device: jax.Device, size: int = 1024, repeats: int = 5) -> float:
    """FLOP/s of the best of a few float32 `size`-cubed matrix products: the peak of a device that no table names."""
    a = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    return 2 * size**3 / _best_seconds(jax.jit(lambda a: a @ a), a, repeats)


def _best_seconds(program: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int) -> float:
    program(x).block_until_ready()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        program(x).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return best
