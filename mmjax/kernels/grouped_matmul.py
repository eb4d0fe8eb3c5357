"""Products of groups of rows with a matrix of their own, for experts: a Pallas kernel for GPUs (Triton).

`jax.lax.ragged_dot` computes the same, but XLA for GPUs multiplies all rows with every group's
matrix. A program here multiplies one tile of one group's rows; which rows is data, so that group
sizes need no padding and no capacity.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from mmjax.kernels.flash_attention import dot


class MatmulTiles(NamedTuple):
    """Rows, outputs and summed channels of a tile, and the warps and pipeline stages that Triton runs it with."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# TILES of outputs and gradients of rows; GRADIENT_TILES of gradients of matrices, where rows are
# summed (`k`). The fastest on an H200 of those tried (docs/measurements/gpu.md).
TILES = MatmulTiles(128, 256, 64, 8, 3)
GRADIENT_TILES = MatmulTiles(128, 256, 64, 8, 3)
# of all kernels: Triton unrolls float32 products, slow to compile
FLOAT32_TILES = MatmulTiles(32, 32, 32, 4, 2)


class Visits(NamedTuple):
    """Tiles of rows: whose group, and their first and end rows; int32 `[tiles]`.

    The rows behind the last group are tiles of a group `E`, and have no product; tiles that are not
    needed are empty.
    """

    group: Array
    start: Array
    end: Array

    @classmethod
    def of(cls, sizes: Int[Array, " e"], rows: int, size: int) -> Visits:
        """Cut groups of these sizes into tiles of at most `size` rows.

        Sizes (3, 5) of 9 rows in tiles of 4: groups (0, 1, 1, 2), starts (0, 3, 7, 8), ends (3, 7,
        8, 9).
        """
        # As in the example: sizes 3 5 1 (the last are the rows behind the groups), ends 3 8 9,
        # tiles 1 2 1 of the groups, tile_ends 1 3 4. Tile 2 is the second one of group 1, so it
        # begins at the group's start 3 + 1 * 4 = 7. Each group has at most one tile that is not
        # full, which bounds their number: ceil(9 / 4) + 2 = 5, of which the last is empty.
        sizes = jnp.append(sizes, rows - sizes.sum())
        ends = jnp.cumsum(sizes)
        tiles = -(-sizes // size)
        tile_ends = jnp.cumsum(tiles)
        tile = jnp.arange(-(-rows // size) + len(sizes) - 1, dtype=jnp.int32)
        group = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), len(sizes) - 1)
        start = (ends - sizes)[group] + (tile - (tile_ends - tiles)[group]) * size
        end = jnp.minimum(start + size, ends[group])
        return cls(*(x.astype(jnp.int32) for x in (group, start, end)))


def takes(width: int, output: int) -> bool:
    """Return whether the kernel takes matrices of this width and these outputs: whole tiles of 32 channels or more."""
    return width % 32 == 0 and output % 32 == 0


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x: Float[Array, "t k"],
    weights: Float[Array, "e k n"],
    sizes: Int[Array, " e"],
    interpret: bool = False,
) -> Float[Array, "t n"]:
    """Multiply contiguous groups of rows with the group's matrix, in the dtype of `x`; sums are float32.

    Rows behind the last group give zeros. interpret: run as JAX operations, on any device. `k` and
    `n` are multiples of 32 (`takes`).
    """
    return _multiply(x, weights, sizes, False, interpret)


def _forward(
    x: Array, weights: Array, sizes: Array, interpret: bool
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _multiply(x, weights, sizes, False, interpret), (x, weights, sizes)


def _backward(
    interpret: bool, residuals: tuple[Array, Array, Array], d_out: Array
) -> tuple[Array, Array, None]:
    x, weights, sizes = residuals
    d_x = _multiply(d_out, weights, sizes, True, interpret)
    return d_x, _weight_gradients(x, d_out, sizes, weights.dtype, interpret), None


grouped_matmul.defvjp(_forward, _backward)


def _divisor(size: int, tile: int) -> int:
    """Halve a tile until it divides a size."""
    # 96 channels in tiles of 64 are cut into tiles of 32; the sizes are multiples of 32 (`takes`).
    while size % tile:
        tile //= 2
    return tile


def _rows_in_bounds(x: Array, tile: int, interpret: bool) -> Array:
    """Append a tile of rows where slices are interpreted, which would move a slice that ends behind the last row."""
    return jnp.pad(x, ((0, tile), (0, 0))) if interpret else x


def _whole(x: jax.ShapeDtypeStruct | Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _multiply(x: Array, weights: Array, sizes: Array, transposed: bool, interpret: bool) -> Array:
    """Multiply groups of rows with their matrices, or with these transposed."""
    rows, width = x.shape
    experts = len(weights)
    output = weights.shape[1 if transposed else 2]
    tiles = FLOAT32_TILES if x.dtype == jnp.float32 else TILES
    tiles = tiles._replace(n=_divisor(output, tiles.n), k=_divisor(width, tiles.k))
    visits = Visits.of(sizes, rows, tiles.m)

    def kernel(group_ref, start_ref, end_ref, x_ref, weights_ref, out_ref):
        tile = pl.program_id(0)
        group, start, end = group_ref[tile], start_ref[tile], end_ref[tile]
        # A tile may reach into the next group's rows, and behind the last row: these are neither
        # read nor written. Rows behind all groups have group E and no product, and store zeros.
        inside = (start + jnp.arange(tiles.m) < end)[:, None]
        window = pl.ds(start, tiles.m)
        outputs = pl.ds(pl.program_id(1) * tiles.n, tiles.n)
        matrix = jnp.minimum(group, experts - 1)

        def body(step: Array, total: Array) -> Array:
            channels = pl.ds(step * tiles.k, tiles.k)
            a = pltriton.load(x_ref.at[window, channels], mask=inside, other=0.0)
            if transposed:
                return total + dot(a, pltriton.load(weights_ref.at[matrix, outputs, channels]).T)
            return total + dot(a, pltriton.load(weights_ref.at[matrix, channels, outputs]))

        # Of int32, as the first step is: a loop of Triton has bounds of one type.
        steps = jnp.where(group < experts, jnp.int32(width // tiles.k), jnp.int32(0))
        total = lax.fori_loop(0, steps, body, jnp.zeros((tiles.m, tiles.n), jnp.float32))
        pltriton.store(out_ref.at[window, outputs], total.astype(out_ref.dtype), mask=inside)

    x = _rows_in_bounds(x, tiles.m, interpret)
    out = jax.ShapeDtypeStruct((len(x), output), x.dtype)
    inputs = (*visits, x, weights)
    multiplied = pl.pallas_call(
        kernel,
        grid=(len(visits.group), output // tiles.n),
        in_specs=[_whole(x) for x in inputs],
        out_specs=_whole(out),
        out_shape=out,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="grouped_matmul",
    )(*inputs)
    return multiplied[:rows]


def _weight_gradients(
    x: Array, d_out: Array, sizes: Array, dtype: jnp.dtype, interpret: bool
) -> Array:
    """Compute the gradient of every group's matrix: over its rows, the sum of x' d_out; zeros where it has none."""
    (_, width), output = x.shape, d_out.shape[1]
    experts = len(sizes)
    tiles = FLOAT32_TILES if x.dtype == jnp.float32 else GRADIENT_TILES
    tiles = tiles._replace(m=_divisor(width, tiles.m), n=_divisor(output, tiles.n))
    ends = jnp.cumsum(sizes).astype(jnp.int32)

    def kernel(start_ref, end_ref, x_ref, d_out_ref, out_ref):
        group = pl.program_id(2)
        start = start_ref[group]
        end = end_ref[group]
        channels = pl.ds(pl.program_id(0) * tiles.m, tiles.m)
        outputs = pl.ds(pl.program_id(1) * tiles.n, tiles.n)

        def body(step: Array, total: Array) -> Array:
            first = start + step * tiles.k
            inside = (first + jnp.arange(tiles.k) < end)[:, None]
            window = pl.ds(first, tiles.k)
            a = pltriton.load(x_ref.at[window, channels], mask=inside, other=0.0)
            b = pltriton.load(d_out_ref.at[window, outputs], mask=inside, other=0.0)
            return total + dot(a.T, b)

        # The sum runs over the group's rows; one without rows has no step and stores zeros.
        steps = lax.div(end - start + tiles.k - 1, tiles.k)
        total = lax.fori_loop(0, steps, body, jnp.zeros((tiles.m, tiles.n), jnp.float32))
        pltriton.store(out_ref.at[group, channels, outputs], total.astype(out_ref.dtype))

    x, d_out = (_rows_in_bounds(y, tiles.k, interpret) for y in (x, d_out))
    out = jax.ShapeDtypeStruct((experts, width, output), dtype)
    inputs = (ends - sizes.astype(jnp.int32), ends, x, d_out)
    return pl.pallas_call(
        kernel,
        grid=(width // tiles.m, output // tiles.n, experts),
        in_specs=[_whole(x) for x in inputs],
        out_specs=_whole(out),
        out_shape=out,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="grouped_matmul_gradients",
    )(*inputs)
