"""Gated delta nets over rows that several devices share: states travel, and no tokens but a convolution's few.

Every device has the next part of a row. Its tokens map the state before them affinely, S -> A S + B:
A is the state behind them that starts as the identity and is written by no value, B that of a state
that starts at zero. Devices exchange both once, whatever the length of a row, and each composes the
maps of those before it (as LASP-2, Sun et al. 2025, for other recurrences). Where another sample
begins in a device's part, A is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.parallel.sharding import CONTEXT, active, sharding

# (q, k, v, g, beta, sample, state) -> outputs and the state after the last token
Rule = Callable[..., tuple[Array, Array]]


class DeltaInputs(NamedTuple):
    """Inputs of convolutions `[B, T, heads * width]`, and decays' logarithms and betas, float32 `[B, T, M]`."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


def extend_samples(sample: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Give padding the sample before it, so that this sample's state outlives it."""
    index = jnp.where(sample >= 0, jnp.arange(sample.shape[1], dtype=jnp.int32), 0)
    return jnp.take_along_axis(sample, lax.cummax(index, axis=1), axis=1)


def shares_rows(length: int) -> bool:
    """Tell whether several devices have parts of rows of this length."""
    current = active()
    if current is None or CONTEXT not in current.rules.length:
        return False
    context = current.mesh.shape[CONTEXT]
    return context > 1 and length % context == 0


def delta_over_context(
    inputs: DeltaInputs,
    filters: Sequence[Array],
    sample: Int[Array, "b t"],
    convolve: Callable[..., tuple[Array, Array, Array]],
    rule: Rule,
) -> tuple[Float[Array, "b t m v"], Float[Array, "b m k v"]]:
    """Compute convolutions and the gated delta rule of rows in order, each device's part of them on it.

    Returns the outputs, and the state behind the last token. convolve: `(inputs, filters, sample,
    previous inputs, their samples)` to queries, keys and values `[B, T, heads, width]`. Raises
    ValueError where a device has fewer tokens than a convolution reaches back.
    """
    current = active()
    taps = len(filters[0])
    if inputs.q.shape[1] // current.mesh.shape[CONTEXT] < taps - 1:
        raise ValueError(
            f"a row of {inputs.q.shape[1]} tokens has fewer than {taps - 1} on each of "
            f"{current.mesh.shape[CONTEXT]} devices of `context`, which a convolution of {taps} taps reads"
        )

    def of_device(
        inputs: DeltaInputs, filters: Sequence[Array], sample: Array
    ) -> tuple[Array, Array]:
        device = lax.axis_index(CONTEXT)
        sample, before = _extend_over_devices(sample)
        previous, previous_sample = _from_device_before(
            [x[:, 1 - taps :] for x in (*inputs[:3], sample)]
        )
        # The first device has none before it, and -2 is no sample.
        previous_sample = jnp.where(device > 0, previous_sample, -2)
        q, k, v = convolve(inputs[:3], filters, sample, previous, previous_sample)
        rest = inputs.g, inputs.beta, sample
        rows, _, heads, value_width = v.shape
        key_width = k.shape[-1]
        zeros = jnp.zeros((rows, heads, key_width, value_width), jnp.float32)
        unit = jnp.broadcast_to(jnp.eye(key_width), (rows, heads, key_width, key_width))
        _, offset = rule(q, k, v, *rest, zeros)
        _, factor = rule(q, k, jnp.zeros((*v.shape[:3], key_width), v.dtype), *rest, unit)
        reads = (sample[:, 0] == before)[:, None, None, None]
        own, last = _compose(jnp.where(reads, factor, 0.0), offset)
        out, _ = rule(q, k, v, *rest, jnp.where(reads, own, 0.0))
        return out, last

    def spec(x: Array, *axes: str | None) -> PartitionSpec:
        return sharding(current.mesh, current.rules, x.shape, axes).spec

    tokens = DeltaInputs._make(spec(x, "rows", "length", "heads") for x in inputs)
    rows, length, heads = tokens.v
    return jax.shard_map(
        of_device,
        mesh=current.mesh,
        in_specs=(tokens, [spec(x, None, "heads") for x in filters], PartitionSpec(rows, length)),
        out_specs=(
            PartitionSpec(rows, length, heads, None),
            PartitionSpec(rows, heads, None, None),
        ),
        check_vma=False,
    )(inputs, list(filters), sample)


def _extend_over_devices(sample: Array) -> tuple[Array, Array]:
    """Extend samples over padding, and return that of the token before the device's first, -1 if there is none."""
    sample = extend_samples(sample)
    lasts = lax.all_gather(sample[:, -1], CONTEXT)  # [devices, B]
    # Of samples 0 0 | . . | . 1 on three devices, where dots are padding before any token of the
    # device, the lasts are 0 . 1: before the third device's first token is sample 0.
    number = jnp.arange(len(lasts), dtype=jnp.int32)[:, None]
    known = (number < lax.axis_index(CONTEXT)) & (lasts >= 0)
    latest = jnp.max(jnp.where(known, number, -1), 0)
    before = jnp.take_along_axis(lasts, jnp.maximum(latest, 0)[None], 0)[0]
    before = jnp.where(latest >= 0, before, -1)
    return jnp.where(sample >= 0, sample, before[:, None]), before


def _from_device_before(arrays: Sequence[Array]) -> tuple[list[Array], Array]:
    """Receive these arrays from the device before, zeros on the first; the last of them apart."""
    devices = lax.axis_size(CONTEXT)
    pairs = [(i, i + 1) for i in range(devices - 1)]
    *inputs, sample = (lax.ppermute(x, CONTEXT, pairs) for x in arrays)
    return inputs, sample


def _compose(factor: Array, offset: Array) -> tuple[Array, Array]:
    """Compose the devices' maps: the state that reaches this device, and the one behind the last."""
    factors, offsets = lax.all_gather((factor, offset), CONTEXT)
    device = lax.axis_index(CONTEXT)
    state = jnp.zeros_like(offset)
    own = state
    for number in range(len(factors)):
        own = jnp.where(number == device, state, own)
        moved = jnp.matmul(factors[number], state, precision=lax.Precision.HIGHEST)
        state = moved + offsets[number]
    return own, state
