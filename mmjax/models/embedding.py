"""Look up vectors in a table sharded over devices, with a gradient summed in float32, the same bits every time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.parallel.sharding import Axes, active, partition_spec, sharding, spec_axes


def look_up(
    table: Float[Array, "*p n d"], axes: Axes, index: Int[Array, "r t"], dtype: jnp.dtype
) -> Float[Array, "r t d"]:
    """Return `table[index]` in `dtype`. axes: logical axes of the table; those of `index` are rows and length.

    A table `[p, n, d]` has a copy for every part of the rows, along `data`; each gets the gradient
    of its part.

    No device gathers the table. The ranks that share its columns look up each other's tokens, each
    in its own columns, and an all-to-all gives every rank its tokens whole. Gradients return the
    same way and are summed where they stay.
    """
    # Two ranks with 4 tokens each, and half of the d columns of the table:
    #   all-gather    tokens [4]         -> [8]          both ranks' tokens on each
    #   look up                             [8, d / 2]   each in its own columns
    #   all-to-all    [8, d / 2]         -> [4, d]       a rank's own tokens, all columns
    # Where entries are sharded too, ranks have 0 for tokens that others hold, and sum.
    current = active()
    rows: tuple[str, ...] = ()
    length: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    size = table.shape[-2]  # of a device's part
    if current is not None:
        mesh, rules = current

        def mesh_axes(shape: tuple[int, ...], axes: Axes) -> list[tuple[str, ...]]:
            names = spec_axes(sharding(mesh, rules, shape, axes).spec)
            return [tuple(axis for axis in of_dim if mesh.shape[axis] > 1) for of_dim in names]

        rows, length = mesh_axes(index.shape, ("rows", "length"))
        entries, columns = mesh_axes(table.shape[-2:], axes)
        columns = tuple(axis for axis in columns if axis in (*rows, *length))
        size //= prod(mesh.shape[axis] for axis in entries)
    copies = ("data",) * (table.ndim - 2)
    # Ranks along these have other tokens, and the same part of the table.
    remaining = tuple(axis for axis in (*rows, *length) if axis not in (*columns, *copies))
    table_spec = partition_spec((*copies, entries or None, columns or None))
    index_spec = PartitionSpec(rows or None, length or None)

    def on_devices(
        function: Callable[..., Array], in_specs: tuple[PartitionSpec, ...], out_spec: PartitionSpec
    ):
        if current is None:
            return function
        return jax.shard_map(
            function, mesh=current.mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False
        )

    def local_index(index: Array) -> Array:
        """Gather the tokens of the ranks that share the columns, as entries of this device's part of the table."""
        index = lax.all_gather(index, columns, tiled=True) if columns else index
        return index - lax.axis_index(entries) * size if entries else index

    def forward(table: Array, index: Array) -> Array:
        index = local_index(index)
        x = table.reshape(-1, table.shape[-1])[index].astype(dtype)
        if entries:
            x = lax.psum(jnp.where(((index >= 0) & (index < size))[..., None], x, 0), entries)
        return lax.all_to_all(x, columns, 0, 2, tiled=True) if columns else x

    def backward(d_x: Array, index: Array) -> Array:
        d_x = lax.all_to_all(d_x, columns, 2, 0, tiled=True) if columns else d_x
        d_table = sum_by_index(d_x.reshape(-1, d_x.shape[-1]), local_index(index).reshape(-1), size)
        # Between ranks it travels in the activations' precision, as all gradients do.
        d_table = (
            lax.psum(d_table.astype(dtype), remaining).astype(jnp.float32) if remaining else d_table
        )
        return d_table[None] if copies else d_table

    @jax.custom_vjp
    def gather(table: Array, index: Array) -> Array:
        return on_devices(forward, (table_spec, index_spec), index_spec)(table, index)

    def gather_backward(index: Array, d_x: Array) -> tuple[Array, None]:
        return on_devices(backward, (index_spec, index_spec), table_spec)(d_x, index).astype(
            table.dtype
        ), None

    gather.defvjp(lambda table, index: (gather(table, index), index), gather_backward)
    return gather(table, index)


@jax.custom_vjp
def take_tokens(x: Float[Array, "b t d"], column: Int[Array, "b n"]) -> Float[Array, "b n d"]:
    """Take the tokens of each row at these columns, few of them; several may be one token."""
    return jnp.take_along_axis(x, column[..., None], axis=1)


def _take_forward(x: Array, column: Array) -> tuple[Array, tuple[Array, Array]]:
    # An empty array has the length and the dtype.
    return take_tokens(x, column), (column, x[..., :0])


def _take_backward(saved: tuple[Array, Array], d_taken: Array) -> tuple[Array, None]:
    column, like = saved
    sums = jax.vmap(partial(sum_by_index, size=like.shape[1]))(d_taken, column)
    return sums.astype(like.dtype), None


take_tokens.defvjp(_take_forward, _take_backward)


def sum_by_index(
    vectors: Float[Array, "m d"], index: Int[Array, " m"], size: int
) -> Float[Array, "n d"]:
    """Add up the vectors of each index 0 to `size` (exclusive) in float32; others are left out.

    A scatter would add them as its threads come. Sorted by index, those of one are neighbours: they
    are added up inside blocks, then over the blocks that an index fills, in an order that the
    indices alone decide.
    """
    # About as many blocks as vectors in one, a power of two: 5,000 vectors are 40 blocks of 128.
    width = 1 << -(-(len(index) - 1).bit_length() // 2)
    pad = -len(index) % width
    index = jnp.pad(index, (0, pad), constant_values=size)
    order = jnp.argsort(index)
    blocks = index[order].reshape(-1, width)
    sums = (
        jnp.pad(vectors, ((0, pad), (0, 0)))[order].astype(jnp.float32).reshape(*blocks.shape, -1)
    )
    # Each position has the sum of the last `step` vectors up to itself that are of its index; then
    # of twice as many.
    step = 1
    while step < width:
        same = (blocks[:, step:] == blocks[:, :-step])[..., None]
        sums = jnp.concatenate(
            [sums[:, :step], sums[:, step:] + jnp.where(same, sums[:, :-step], 0)], axis=1
        )
        step *= 2
    # Blocks of 4, sorted: 1 1 2 2 | 2 2 2 2 | 2 5 5 7. Index 2 is the first of blocks 1 and 2, and
    # the last of the blocks before them, so block 2 carries the sums at the ends of blocks 0 and 1.
    number = jnp.arange(len(blocks))
    earlier = (blocks[:, :1] == blocks[:, -1]) & (number[:, None] > number)
    carried = jnp.where(earlier[..., None], sums[:, -1], 0).sum(1)
    entry = jnp.arange(size, dtype=index.dtype)
    # An index is complete at its last position; -1, before the first index, is that of the largest.
    last = jnp.searchsorted(blocks.reshape(-1), entry, side="right", method="scan_unrolled") - 1
    block = last // width
    total = sums.reshape(-1, sums.shape[-1])[last]
    total += jnp.where((blocks[block, 0] == entry)[:, None], carried[block], 0)
    return jnp.where((blocks.reshape(-1)[last] == entry)[:, None], total, 0)
