"""Products of groups of rows with a matrix each, forward and backward, in Pallas for GPUs (Triton).

As MegaBlocks (Gale et al. 2022) has it: groups of any size lie one behind the other, and a list of pairs says which
tile of rows meets which group. A tile that several groups share is visited once for each, and each writes its own rows.
The gradient of a matrix has its programs to itself, without atomic additions, so results are repeatable to the bit.
`jax.lax.ragged_dot` is the same, for which XLA has no kernel on GPUs: it computes all groups of all rows there.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int


class GroupTiles(NamedTuple):
    """Tiles of the kernels, and how these run; static."""

    rows: int = 128
    columns: int = 128
    inner: int = 64  # of what is summed over
    warps: int = 8
    stages: int = 3
    interpret: bool = False  # run as JAX operations, on any device

    def launch(self, name: str) -> dict[str, Any]:
        """Return how `pallas_call` runs a kernel."""
        params = pltriton.CompilerParams(num_warps=self.warps, num_stages=self.stages)
        return {"compiler_params": params, "interpret": self.interpret, "name": name}


TILES = GroupTiles()


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x: Float[Array, "m k"], weight: Float[Array, "g k n"], sizes: Int[Array, " g"], tiles: GroupTiles = TILES
) -> Float[Array, "m n"]:
    """Multiply rows by the matrices of their groups, summing in float32.

    sizes: rows of each group, the first group's first. What stands in rows behind the last group is not defined.
    """
    return _product(x, weight, sizes, tiles, turned=False)


def _forward(x: Array, weight: Array, sizes: Array, tiles: GroupTiles) -> tuple[Array, Any]:
    return grouped_matmul(x, weight, sizes, tiles), (x, weight, sizes)


def _backward(tiles: GroupTiles, residuals: Any, gradient: Array) -> tuple[Array, Array, None]:
    x, weight, sizes = residuals
    return _product(gradient, weight, sizes, tiles, turned=True), _weight_gradient(x, gradient, sizes, tiles), None


grouped_matmul.defvjp(_forward, _backward)


class Pairs(NamedTuple):
    """Which tile of rows meets which group, and which of all rows are the group's; int32, one for each program."""

    group: Array
    tile: Array
    start: Array
    stop: Array  # as `start` where there is no pair


def list_pairs(sizes: Int[Array, " g"], rows: int, tile: int) -> Pairs:
    """List the pairs of tiles and groups that share rows; their number is static, and what is left over is empty.

    Tiles of 4 rows and groups of 3, 0 and 6 rows: tile 0 with group 0, then tiles 0, 1 and 2 with group 2.
    """
    stop = jnp.cumsum(sizes)
    start = stop - sizes
    first = start // tile
    counts = jnp.where(sizes > 0, (stop - 1) // tile - first + 1, 0)
    last = jnp.cumsum(counts)
    number = jnp.arange(-(-rows // tile) + len(sizes))
    group = jnp.minimum((last[:, None] <= number).sum(0), len(sizes) - 1)
    exists = number < last[-1]
    position = first[group] + number - (last - counts)[group]
    pairs = (group, jnp.where(exists, position, 0), start[group], jnp.where(exists, stop[group], start[group]))
    return Pairs(*(array.astype(jnp.int32) for array in pairs))


def _dot(a: Array, b: Array) -> Array:
    """Multiply matrices into float32; float32 operands exactly, not as TF32."""
    return pltriton.dot(a, b, allow_tf32=False if a.dtype == jnp.float32 else None)


def _rows_of(ref: Any, start: Array, size: int, columns: Any, first: Array, stop: Array) -> Array:
    """Load the tile of rows that begins at `start`, with zeros in place of rows outside of `first` to `stop`."""
    number = start + jnp.arange(size)
    inside = ((number >= first) & (number < stop))[:, None]
    return pltriton.load(ref.at[pl.ds(start, size), columns], mask=inside, other=0.0)


def _product_kernel(
    x_ref, weight_ref, group, tile, start, stop, out_ref, *, tiles: GroupTiles, inner: int, turned: bool
):  # fmt: skip
    """Compute one tile of the products of one group."""
    pair = pl.program_id(0)
    columns = pl.ds(pl.program_id(1) * tiles.columns, tiles.columns)
    first, last, matrix = start[pair], stop[pair], group[pair]
    begin = tile[pair] * tiles.rows

    def body(step: Array, total: Array) -> Array:
        across = pl.ds(step * tiles.inner, tiles.inner)
        x = _rows_of(x_ref, begin, tiles.rows, across, first, last)
        if turned:
            return total + _dot(x, pltriton.load(weight_ref.at[matrix, columns, across]).T)
        return total + _dot(x, pltriton.load(weight_ref.at[matrix, across, columns]))

    # Bounds are of one type, as Triton wants them.
    steps = jnp.where(last > first, jnp.int32(inner // tiles.inner), jnp.int32(0))
    total = lax.fori_loop(jnp.int32(0), steps, body, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    number = begin + jnp.arange(tiles.rows)
    inside = ((number >= first) & (number < last))[:, None]
    pltriton.store(out_ref.at[pl.ds(begin, tiles.rows), columns], total.astype(out_ref.dtype), mask=inside)


def _weight_kernel(x_ref, gradient_ref, start, stop, out_ref, *, tiles: GroupTiles):
    """Compute one tile of the gradient of one group's matrix: the sum over its rows."""
    matrix = pl.program_id(0)
    inner = pl.ds(pl.program_id(1) * tiles.columns, tiles.columns)
    columns = pl.ds(pl.program_id(2) * tiles.columns, tiles.columns)
    first, last = start[matrix], stop[matrix]
    # Fewer rows at a time than a tile of the products has: this sum is over rows.
    size = tiles.inner

    def body(step: Array, total: Array) -> Array:
        x = _rows_of(x_ref, step * size, size, inner, first, last)
        gradient = _rows_of(gradient_ref, step * size, size, columns, first, last)
        return total + _dot(x.T, gradient)

    begin = lax.div(first, jnp.int32(size))
    end = jnp.where(last > first, lax.div(last + size - 1, jnp.int32(size)), begin)
    total = lax.fori_loop(begin, end, body, jnp.zeros((tiles.columns, tiles.columns), jnp.float32))
    pltriton.store(out_ref.at[matrix, inner, columns], total.astype(out_ref.dtype))


def _pad(x: Array, *multiples: int) -> Array:
    """Pad the last dimensions with zeros to multiples."""
    sizes = x.shape[x.ndim - len(multiples) :]
    extra = [(0, -size % multiple) for size, multiple in zip(sizes, multiples, strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(multiples)) + extra)


def _product(x: Array, weight: Array, sizes: Array, tiles: GroupTiles, turned: bool) -> Array:
    """Multiply rows by the matrices of their groups, or by these matrices turned."""
    rows, columns = len(x), weight.shape[1 if turned else 2]
    x = _pad(x, tiles.rows, tiles.inner)
    weight = _pad(weight, *((tiles.columns, tiles.inner) if turned else (tiles.inner, tiles.columns)))
    pairs = list_pairs(sizes, rows, tiles.rows)
    width = columns + -columns % tiles.columns
    out = pl.pallas_call(
        partial(_product_kernel, tiles=tiles, inner=x.shape[1], turned=turned),
        grid=(len(pairs.group), width // tiles.columns),
        out_shape=jax.ShapeDtypeStruct((len(x), width), x.dtype),
        **tiles.launch("grouped_matmul"),
    )(x, weight, *pairs)
    return out[:rows, :columns]


def _weight_gradient(x: Array, gradient: Array, sizes: Array, tiles: GroupTiles) -> Array:
    inner, columns = x.shape[1], gradient.shape[1]
    x, gradient = (_pad(y, tiles.inner, tiles.columns) for y in (x, gradient))
    stop = jnp.cumsum(sizes, dtype=jnp.int32)
    shape = (len(sizes), x.shape[1], gradient.shape[1])
    out = pl.pallas_call(
        partial(_weight_kernel, tiles=tiles),
        grid=(len(sizes), x.shape[1] // tiles.columns, gradient.shape[1] // tiles.columns),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        **tiles.launch("grouped_matmul_weight_gradient"),
    )(x, gradient, stop - sizes.astype(jnp.int32), stop)
    return out[:, :inner, :columns]
