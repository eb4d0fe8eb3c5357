"""Logical axes of arrays and the mesh axes they lie on.

Models name what an axis means (`embed`, `heads`, ...); the executor says where that lies. Nothing here knows a model.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.config import Exchange, MeshConfig
from mmjax.parallel.mesh import RANKS, encoder_axes

Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class ShardingRules:
    """Mesh axes of every logical axis.

    FSDP shards parameters along `embed` and gathers them where they are used; tensor parallelism shards `heads`,
    `mlp` and `vocab`, so activations are whole along `width` between layers. While encoders run (`encoding`), `rows`
    are `item_rows`: where these lie on `tensor` too, encoders are not cut but gathered, as under FSDP.
    """

    rows: tuple[str, ...] = RANKS
    item_rows: tuple[str, ...] = RANKS
    length: tuple[str, ...] = ("context",)
    width: tuple[str, ...] = ()
    embed: tuple[str, ...] = ("fsdp",)
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    mlp: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    fixed: tuple[str, ...] = ()  # of tables that are never trained

    @classmethod
    def of(cls, config: MeshConfig) -> ShardingRules:
        """Make the rules that a config asks for."""
        return cls(item_rows=encoder_axes(config))

    def spec(self, axes: Axes) -> PartitionSpec:
        """Build the partition spec of these logical axes. Raises ValueError for an unknown or a clashing axis."""
        known = {f.name for f in fields(self)}
        used: set[str] = set()
        entries: list[tuple[str, ...] | None] = []
        for axis in axes:
            if axis is not None and axis not in known:
                raise ValueError(f"unknown logical axis {axis!r} in {axes}; known: {', '.join(sorted(known))}")
            mesh_axes = () if axis is None else getattr(self, axis)
            # JAX would refuse it too, but without the name of the logical axes.
            if clash := used.intersection(mesh_axes):
                raise ValueError(f"logical axes {axes} put mesh axis {sorted(clash)[0]!r} on two dimensions")
            used.update(mesh_axes)
            entries.append(mesh_axes or None)
        return PartitionSpec(*entries)


class Active(NamedTuple):
    """The mesh and rules that shard a program's activations, and how encoder tokens travel between its ranks."""

    mesh: Mesh
    rules: ShardingRules
    exchange: Exchange


_active: contextvars.ContextVar[Active | None] = contextvars.ContextVar("active", default=None)


@contextlib.contextmanager
def activations_on(mesh: Mesh, rules: ShardingRules, exchange: Exchange = "padded") -> Iterator[None]:
    """Lay out activations by `constrain` on this mesh while tracing inside, and send encoder tokens over it."""
    token = _active.set(Active(mesh, rules, exchange))
    try:
        yield
    finally:
        _active.reset(token)


@contextlib.contextmanager
def encoding() -> Iterator[None]:
    """Take `rows` for those of encoders while tracing inside."""
    current = _active.get()
    if current is None:
        yield
    else:
        with activations_on(current.mesh, replace(current.rules, rows=current.rules.item_rows), current.exchange):
            yield


def active() -> Active | None:
    """Return what `activations_on` set; None for one device, or a bare call."""
    current = _active.get()
    return None if current is None or current.mesh.size == 1 else current


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay `x` out by its logical axes on the active mesh; without one (one device, or a bare call), `x` itself.

    A dimension that does not divide stays whole, like the parameter it meets, or XLA would replicate one for the other.
    """
    current = active()
    if current is None:
        return x
    return jax.lax.with_sharding_constraint(x, sharding(current.mesh, current.rules, x.shape, axes))


def cut_in_shards(x: jax.Array, parts: int, *axes: str | None) -> jax.Array:
    """Cut `x` `[n, ...]` into `[parts, n / parts, ...]`, each with an equal piece of every shard of the first axis.

    So a scan over the parts moves nothing between devices. `axes` are those of `x`; `parts` must divide a shard.
    """
    current = active()
    shard = len(x) if current is None else sharding(current.mesh, current.rules, x.shape, axes).shard_shape(x.shape)[0]
    # 8 rows in 2 shards, cut in 2 parts: 0 1 2 3 | 4 5 6 7 become 0 1 4 5 and 2 3 6 7.
    pieces = x.reshape(len(x) // shard, parts, shard // parts, *x.shape[1:])
    return constrain(jnp.moveaxis(pieces, 1, 0).reshape(parts, -1, *x.shape[1:]), *axes)


def sharding(mesh: Mesh, rules: ShardingRules, shape: tuple[int, ...], axes: Axes) -> NamedSharding:
    """Return the sharding of an array of this shape; a dimension that its mesh axes do not divide stays whole on them.

    Raises ValueError where there are more axes than dimensions.
    """
    if len(axes) > len(shape):
        raise ValueError(f"logical axes {axes} are more than the dimensions of {shape}")
    axes = (None,) * (len(shape) - len(axes)) + axes  # a leading axis of stacked layers is never sharded
    spec = list(rules.spec(axes))
    for i, entry in enumerate(spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        size = 1
        for name in names:
            size *= mesh.shape[name]
        if shape[i] % size:
            spec[i] = None
    return NamedSharding(mesh, PartitionSpec(*spec))
