"""Look up vectors in a table that is sharded over devices, with a gradient summed in float32 that repeats bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.parallel.sharding import Axes, active, sharding


def look_up(table: Float[Array, "n d"], axes: Axes, index: Int[Array, "r t"], dtype: jnp.dtype) -> Float[Array, "r t d"]:
    """Return `table[index]` in `dtype`. axes: logical axes of the table; those of `index` are rows and length.

    No device gathers the table. The ranks that share its columns look up each other's tokens, each in its own columns,
    and an all-to-all gives every rank its tokens whole. Gradients return the same way, and sum up where they are stored.
    """
    current = active()
    rows: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    size = len(table)  # of a device's part
    if current is not None:
        mesh, rules, _ = current

        def mesh_axes(shape: tuple[int, ...], axes: Axes) -> list[tuple[str, ...]]:
            spec = sharding(mesh, rules, shape, axes).spec
            named = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
            return [tuple(axis for axis in entry if mesh.shape[axis] > 1) for entry in named]

        rows = mesh_axes(index.shape, ("rows", None))[0]
        entries, columns = mesh_axes(table.shape, axes)
        columns = tuple(axis for axis in columns if axis in rows)
        size //= prod(mesh.shape[axis] for axis in entries)
    # Ranks along these have other tokens, and the same part of the table.
    others = tuple(axis for axis in rows if axis not in columns)
    table_spec = PartitionSpec(entries or None, columns or None)
    index_spec = PartitionSpec(rows or None)

    def on_devices(function: Callable[..., Array], in_specs: tuple[PartitionSpec, ...], out_spec: PartitionSpec):
        if current is None:
            return function
        return jax.shard_map(function, mesh=current.mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)

    def local_index(index: Array) -> Array:
        """Gather the tokens of the ranks that share the columns, as entries of this device's part of the table."""
        index = lax.all_gather(index, columns, tiled=True) if columns else index
        return index - lax.axis_index(entries) * size if entries else index

    def forward(table: Array, index: Array) -> Array:
        index = local_index(index)
        x = table[index].astype(dtype)
        if entries:
            x = lax.psum(jnp.where(((index >= 0) & (index < size))[..., None], x, 0), entries)
        return lax.all_to_all(x, columns, 0, 2, tiled=True) if columns else x

    def backward(d_x: Array, index: Array) -> Array:
        d_x = lax.all_to_all(d_x, columns, 2, 0, tiled=True) if columns else d_x
        d_table = sum_by_index(d_x.reshape(-1, d_x.shape[-1]), local_index(index).reshape(-1), size)
        # Between ranks it travels in the activations' precision, as all gradients do.
        return lax.psum(d_table.astype(dtype), others).astype(jnp.float32) if others else d_table

    @jax.custom_vjp
    def gather(table: Array, index: Array) -> Array:
        return on_devices(forward, (table_spec, index_spec), index_spec)(table, index)

    def gather_backward(index: Array, d_x: Array) -> tuple[Array, None]:
        return on_devices(backward, (index_spec, index_spec), table_spec)(d_x, index).astype(table.dtype), None

    gather.defvjp(lambda table, index: (gather(table, index), index), gather_backward)
    return gather(table, index)


def sum_by_index(vectors: Float[Array, "m d"], index: Int[Array, " m"], size: int) -> Float[Array, "n d"]:
    """Add up the vectors of each index 0 to `size` (exclusive) in float32; others are left out.

    Sorted, those of an index are neighbours, whose sums are made in an order that nothing but the indices decides: a
    scatter would add them as its threads come.
    """
    order = jnp.argsort(index)
    index = index[order]
    begins = jnp.concatenate([jnp.ones(1, bool), index[1:] != index[:-1]])[:, None]

    def combine(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] | b[0], jnp.where(b[0], b[1], a[1] + b[1])

    _, sums = lax.associative_scan(combine, (begins, vectors[order].astype(jnp.float32)))
    entry = jnp.arange(size, dtype=index.dtype)
    # The sums of an index are whole at its last neighbour; -1, before the first index, is the largest one.
    last = jnp.searchsorted(index, entry, side="right", method="scan_unrolled") - 1
    return jnp.where((index[last] == entry)[:, None], sums[last], 0)
