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

from mmjax.kernels.token_paths import extend_paths, last_in_trunk, token_before, trunk_of
from mmjax.parallel.sharding import CONTEXT, active, sharding

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
    before: Array


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
    reach = len(filters[0]) - 1
    # With branches the last tokens are apart from those of the trunk before them.
    if inputs.q.shape[1] // current.mesh.shape[CONTEXT] < reach:
        raise ValueError(
            f"a row of {inputs.q.shape[1]} tokens has fewer than {reach} on each of "
            f"{current.mesh.shape[CONTEXT]} devices of `context`, which a convolution of {reach + 1} taps reads"
        )

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
        own, last = _compose(factors, offsets, ends)
        out, _ = rule(q, k, v, *rest, own)
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
            (PartitionSpec(rows, heads, None, None),) * (1 + branched),
        ),
        check_vma=False,
    )(inputs, list(filters), path)


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
    """Receive the last tokens of all devices before, each behind the last of its trunk before these."""
    *_, path = arrays
    before = token_before(path)
    # Latest first; the columns of a trunk that has no more tokens are -1.
    columns = (
        [last_in_trunk(path)[:, -reach - 1]] if path.shape[1] > reach else [path[:, 0] * 0 - 1]
    )
    for _ in range(reach - 1):
        column = columns[-1][:, None]
        found = jnp.take_along_axis(before, jnp.maximum(column, 0), axis=1)
        columns.append(jnp.where(column >= 0, found, -1)[:, 0])
    column = jnp.stack(columns[::-1], 1)

    def sent(x: Array) -> Array:
        index = jnp.maximum(column, 0).reshape(*column.shape, *(1,) * (x.ndim - 2))
        trunk = jnp.take_along_axis(x, index, axis=1)
        gathered = lax.all_gather(jnp.concatenate([trunk, x[:, -reach:]], 1), CONTEXT)
        # Those of the device before come once more, next to this device's own.
        last = lax.dynamic_index_in_dim(gathered, device - 1, keepdims=False)[:, reach:]
        gathered = jnp.moveaxis(gathered, 0, 1)
        return jnp.concatenate([gathered.reshape(len(x), -1, *x.shape[2:]), last], 1)

    device = jnp.maximum(lax.axis_index(CONTEXT), 1)
    *inputs, path = (sent(x) for x in arrays)
    known = lax.all_gather(column >= 0, CONTEXT)  # [devices, B, reach]
    number = jnp.arange(len(known), dtype=jnp.int32)[:, None, None]
    own = lax.axis_index(CONTEXT)
    known = jnp.concatenate(
        [known & (number < own), jnp.broadcast_to(number < own - 1, known.shape)], 2
    )
    known = jnp.moveaxis(known, 0, 1).reshape(len(path), -1)
    known = jnp.pad(known, ((0, 0), (0, reach)), constant_values=True) & (own > 0)
    return [*inputs, jnp.where(known, path, _NO_PATH)]


def _compose(
    factors: tuple[Array, ...], offsets: tuple[Array, ...], ends: _Ends
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Compose the devices' maps: the states that reach this device, and those behind the last."""
    gathered = lax.all_gather((factors, offsets), CONTEXT)
    matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

    def select(where: Array, x: Array, other: Array | float = 0.0) -> Array:
        return jnp.where(where[:, None, None, None], x, other)

    states = own = tuple(jnp.zeros_like(x) for x in offsets)
    for number in range(lax.axis_size(CONTEXT)):
        # First those of the first token's path and of its trunk, then those of the last one's.
        first, last, before = (x[number] for x in ends)
        continued, *trunk = states
        if trunk:
            trunk = [select(trunk_of(first) == trunk_of(before), *trunk)]
        continued = select(first == before, continued, *trunk)
        states = continued, *trunk
        here = lax.axis_index(CONTEXT) == number
        own = tuple(jnp.where(here, x, y) for x, y in zip(states, own, strict=True))
        read = [select(last == first, continued, *trunk), *trunk] if trunk else [continued]
        (factors, offsets) = jax.tree.map(lambda x, n=number: x[n], gathered)
        states = tuple(matmul(a, x) + b for a, x, b in zip(factors, read, offsets, strict=True))
    return own, states
