"""Gated delta nets over rows that several devices share: states travel, and no tokens but a convolution's few.

Every device has the next part of a row. Its tokens map the state before them affinely, S -> A S + B:
A is the state behind them that starts as the identity and is written by no value, B that of a state
that starts at zero. Devices exchange both once, whatever the length of a row, and each composes the
maps of those before it (as LASP-2, Sun et al. 2025, for other recurrences). Where another sample
begins in a device's part, A is zero. With branches the state of the trunk goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.kernels.token_paths import extend_paths, last_trunk_tokens, trunk_of
from mmjax.models.short_convolution import causal_convolution
from mmjax.parallel.sharding import CONTEXT, active, active_spec

# (q, k, v, g, beta, path, states) -> outputs and the states after the last token
Rule = Callable[..., tuple[Array, tuple[Array, ...]]]
_NO_PATH = -2  # of a token that stands for none


class DeltaInputs(NamedTuple):
    """Inputs of convolutions `[B, T, heads * width]`, and decays' logarithms and betas, float32 `[B, T, M]`."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array


class _Ends(NamedTuple):
    """Paths of a device's first and last token, and of the one before, int32 `[B]`; -1: there is none."""

    first: Array
    last: Array
    previous: Array


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
    path: Int[Array, "b t"],
    branched: bool,
    convolve: Callable[..., tuple[Array, Array, Array]],
    rule: Rule,
) -> tuple[Float[Array, "b t m v"], tuple[Float[Array, "b m k v"], ...]]:
    """Compute convolutions and the gated delta rule of rows in order, each device's part of them on it.

    Returns the outputs, and the states behind the last token. path, branched: as `gated_delta_rule`
    takes them. convolve: `(inputs, filters, path, previous inputs, their paths, branched=)` to
    queries, keys and values `[B, T, heads, width]`. Raises ValueError where a device has fewer
    tokens than a convolution reaches back.
    """
    current = active()
    reach = _reach(filters[0], inputs.q.shape[1])

    def of_device(
        inputs: DeltaInputs, filters: Sequence[Array], path: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        path, ends = _extend_over_devices(path)
        received = _trunks_before if branched else _tokens_before
        *previous, previous_path = received([*inputs[:3], path], reach)
        q, k, v = convolve(inputs[:3], filters, path, previous, previous_path, branched=branched)
        rest = inputs.g, inputs.beta, path
        rows, _, heads, value_width = v.shape
        key_width = k.shape[-1]
        count = 1 + branched
        zeros = jnp.zeros((rows, heads, key_width, value_width), jnp.float32)
        unit = jnp.broadcast_to(jnp.eye(key_width), (rows, heads, key_width, key_width))
        _, offsets = rule(q, k, v, *rest, (zeros,) * count)
        no_values = jnp.zeros((*v.shape[:3], key_width), v.dtype)
        _, factors = rule(q, k, no_values, *rest, (unit,) * count)
        incoming, last = _compose(factors, offsets, ends)
        out, _ = rule(q, k, v, *rest, incoming)
        return out, last

    tokens = DeltaInputs._make(active_spec(x, "rows", "length", "heads") for x in inputs)
    rows, length, heads = tokens.v
    return jax.shard_map(
        of_device,
        mesh=current.mesh,
        in_specs=(
            tokens,
            [active_spec(x, None, "heads") for x in filters],
            PartitionSpec(rows, length),
        ),
        out_specs=(
            PartitionSpec(rows, length, heads, None),
            (PartitionSpec(rows, heads, None, None),) * (1 + branched),
        ),
        check_vma=False,
    )(inputs, list(filters), path)


def convolve_over_context(
    x: Float[Array, "b t c"],
    weight: Float[Array, "n c"],
    path: Int[Array, "b t"],
    branched: bool,
) -> Float[Array, "b t c"]:
    """Compute `causal_convolution` of rows in order, each device's part of them on it. Raises ValueError as above."""
    reach = _reach(weight, x.shape[1])

    def of_device(x: Array, weight: Array, path: Array) -> Array:
        path, _ = _extend_over_devices(path)
        received = _trunks_before if branched else _tokens_before
        previous, previous_path = received([x, path], reach)
        return causal_convolution(x, weight, path, previous, previous_path, branched=branched)

    spec = active_spec(x, "rows", "length", "heads")
    return jax.shard_map(
        of_device,
        mesh=active().mesh,
        in_specs=(spec, active_spec(weight, None, "heads"), PartitionSpec(*spec[:2])),
        out_specs=spec,
        check_vma=False,
    )(x, weight, path)


def _reach(weight: Array, length: int) -> int:
    """Return how many tokens before its own a filter reads. Raises ValueError where a device has fewer of a row."""
    reach = len(weight) - 1
    devices = active().mesh.shape[CONTEXT]
    if length // devices < reach:
        raise ValueError(
            f"a row of {length} tokens has fewer than {reach} on each of {devices} devices of `context`, which a "
            f"convolution of {reach + 1} taps reads"
        )
    return reach


def _extend_over_devices(path: Array) -> tuple[Array, _Ends]:
    """Extend paths over padding; return the ends of all devices too, `[devices, B]` each."""
    path = extend_paths(path)
    lasts = lax.all_gather(path[:, -1], CONTEXT)  # [devices, B]
    # Of paths 0 0 | . . | . 1 on three devices, where dots are padding before any token of the
    # device, the lasts are 0 . 1: before the third device's first token is path 0.
    lasts = extend_paths(lasts.T).T
    befores = jnp.pad(lasts[:-1], ((1, 0), (0, 0)), constant_values=-1)
    path = jnp.where(path >= 0, path, befores[lax.axis_index(CONTEXT)][:, None])
    return path, _Ends(lax.all_gather(path[:, 0], CONTEXT), lasts, befores)


def _tokens_before(arrays: Sequence[Array], reach: int) -> list[Array]:
    """Receive the last tokens of the device before: arrays `[B, reach, ...]`, of which the last are paths."""
    pairs = [(i, i + 1) for i in range(lax.axis_size(CONTEXT) - 1)]
    *inputs, path = (lax.ppermute(x[:, -reach:], CONTEXT, pairs) for x in arrays)
    return [*inputs, jnp.where(lax.axis_index(CONTEXT) > 0, path, _NO_PATH)]


def _trunks_before(arrays: Sequence[Array], reach: int) -> list[Array]:
    """Receive the last tokens of all devices before, each device's behind the last of its trunk before these."""
    *_, path = arrays
    end = jnp.array([path.shape[1] - reach], jnp.int32)
    trunk = last_trunk_tokens(path, end, reach)[:, 0, ::-1]  # [B, reach]
    device = lax.axis_index(CONTEXT)

    def received(x: Array) -> Array:
        """Gather `[B, devices * 2 * reach + reach, ...]`."""
        index = jnp.maximum(trunk, 0).reshape(*trunk.shape, *(1,) * (x.ndim - 2))
        sent = [jnp.take_along_axis(x, index, axis=1), x[:, -reach:]]
        of_devices = lax.all_gather(jnp.concatenate(sent, 1), CONTEXT)
        # Those of the device before come once more, next to this device's own.
        last = lax.dynamic_index_in_dim(of_devices, jnp.maximum(device - 1, 0), keepdims=False)
        of_devices = jnp.moveaxis(of_devices, 0, 1).reshape(len(x), -1, *x.shape[2:])
        return jnp.concatenate([of_devices, last[:, reach:]], 1)

    *inputs, paths = (received(x) for x in arrays)
    # On no path: trunks of fewer tokens, what is not before this device, and the neighbours' first copy.
    lacking = lax.all_gather(jnp.pad(trunk < 0, ((0, 0), (0, reach))), CONTEXT)
    lacking = jnp.moveaxis(lacking, 0, 1).reshape(len(path), -1)
    number, place = jnp.divmod(jnp.arange(lacking.shape[1], dtype=jnp.int32), 2 * reach)
    lacking |= number + (place >= reach) >= device
    lacking = jnp.concatenate([lacking, jnp.broadcast_to(device == 0, (len(path), reach))], 1)
    return [*inputs, jnp.where(lacking, _NO_PATH, paths)]


def _compose(
    factors: tuple[Array, ...], offsets: tuple[Array, ...], ends: _Ends
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Compose the devices' maps: the states that reach this device, and those behind the last."""
    gathered = lax.all_gather((factors, offsets), CONTEXT)
    matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def select(where: Array, x: Array, other: Array | float = 0.0) -> Array:
        return jnp.where(where[:, None, None, None], x, other)

    zeros = tuple(jnp.zeros_like(x) for x in offsets)
    states, incoming = zeros, zeros
    for number in range(lax.axis_size(CONTEXT)):
        # The states behind the token before become those of the first token's path and its trunk.
        first, last, previous = (x[number] for x in ends)
        trunks = [select(trunk_of(first) == trunk_of(previous), x) for x in states[1:]]
        states = (select(first == previous, states[0], *trunks), *trunks)
        is_device = lax.axis_index(CONTEXT) == number
        incoming = tuple(jnp.where(is_device, x, y) for x, y in zip(states, incoming, strict=True))
        # The last token's path goes on from the first one's, or from the trunk.
        read = (select(last == first, *states), *trunks) if trunks else states
        maps = jax.tree.map(lambda x, n=number: x[n], gathered)
        states = tuple(matmul(a, x) + b for a, b, x in zip(*maps, read, strict=True))
    return incoming, states
