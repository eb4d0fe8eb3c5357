"""Products and reductions over channels, in the shapes that XLA computes fast on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mmjax.parallel.sharding import active, platform

# Rows of a block of `looped_matmul`.
MIN_BLOCK = 8
MAX_BLOCK = 128


def on_one_cpu() -> bool:
    """Return whether activations lie whole on a single CPU device."""
    current = active()
    return platform() == "cpu" and (current is None or current.mesh.size == 1)


def as_matrix(x: Float[Array, "*b c"]) -> Array:
    """Reshape `[..., c]` to `[n, c]` on a single CPU; return it as it is elsewhere.

    XLA's CPU libraries multiply and reduce matrices. Of arrays with more dimensions, be they of
    size 1, backward passes transpose copies first, and reductions take up to 20 times as long
    (docs/measurements/peer.md). On a mesh, merged dimensions could not stay sharded.
    """
    return x.reshape(-1, x.shape[-1]) if on_one_cpu() and x.size else x


def matmul(x: Float[Array, "*b i"], weight: Float[Array, "i o"]) -> Float[Array, "*b o"]:
    """Multiply activations by a matrix."""
    return (as_matrix(x) @ weight).reshape(*x.shape[:-1], weight.shape[-1])


def sum_outer_products(
    x: Float[Array, "n i"], y: Float[Array, "n o"], dtype: DTypeLike | None = None
) -> Float[Array, "i o"]:
    """Compute `x.T @ y`, in the order of operands that is faster on a CPU. dtype: of the sums, by default `x`'s."""
    if x.shape[1] <= y.shape[1]:
        return jnp.matmul(x.T, y, preferred_element_type=dtype)
    # XLA takes up to 1.5 times as long where the product has more rows than columns. The barrier
    # keeps it from turning this one round again.
    return lax.optimization_barrier(jnp.matmul(y.T, x, preferred_element_type=dtype)).T


@jax.custom_vjp
def looped_matmul(
    x: Float[Array, "m i"], weights: Float[Array, "e i o"], sizes: Int[Array, " e"]
) -> Float[Array, "m o"]:
    """Multiply contiguous groups of rows with the group's matrix, one block of rows after the other.

    For CPUs, where XLA's `ragged_dot` multiplies all rows with every matrix. Rows behind the last
    group give zeros.
    """
    return _multiply_groups(x, weights, sizes)


def _multiply_groups(x: Array, weights: Array, sizes: Array, transposed: bool = False) -> Array:
    size, take = _blocks(len(x), len(sizes))

    def multiply(out: Array, group: Array, start: Array, end: Array) -> Array:
        product = take(x, start, end) @ (weights[group].T if transposed else weights[group])
        # A block's rows behind its group are zeros, in whose place the next block then writes its
        # own: `out` is longer than `x` by a block, so that the last one fits.
        return lax.dynamic_update_slice_in_dim(out, product, start, 0)

    out = jnp.zeros((len(x) + size, weights.shape[1 if transposed else 2]), x.dtype)
    return _for_blocks(sizes, size, multiply, out)[: len(x)]


def _looped_forward(
    x: Array, weights: Array, sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _multiply_groups(x, weights, sizes), (x, weights, sizes)


def _looped_backward(
    residuals: tuple[Array, Array, Array], d_out: Array
) -> tuple[Array, Array, None]:
    x, weights, sizes = residuals
    size, take = _blocks(len(x), len(sizes))

    def add(gradients: Array, group: Array, start: Array, end: Array) -> Array:
        rows = take(x, start, end)
        d_rows = take(d_out, start, end)
        return gradients.at[group].add(jnp.dot(rows.T, d_rows, preferred_element_type=jnp.float32))

    gradients = _for_blocks(sizes, size, add, jnp.zeros(weights.shape, jnp.float32))
    return (
        _multiply_groups(d_out, weights, sizes, transposed=True),
        gradients.astype(weights.dtype),
        None,
    )


looped_matmul.defvjp(_looped_forward, _looped_backward)


def _blocks(rows: int, groups: int) -> tuple[int, Callable[[Array, Array, Array], Array]]:
    """Return the rows of a block, about as many as groups have, and a function that takes rows `start` to `end`."""
    size = min(max(1 << (rows // groups).bit_length(), MIN_BLOCK), MAX_BLOCK)

    def take(x: Array, start: Array, end: Array) -> Array:
        block = lax.dynamic_slice_in_dim(jnp.pad(x, ((0, size), (0, 0))), start, size)
        return jnp.where((start + jnp.arange(size) < end)[:, None], block, 0)

    return size, take


def _for_blocks(
    sizes: Array, size: int, body: Callable[[Array, Array, Array, Array], Array], value: Array
) -> Array:
    """Call `value = body(value, group, start, end)` for every block of up to `size` rows of a group, in order."""
    # Groups of 3, 0 and 5 rows end at 3 3 8. In blocks of 4: start 0 is of group 0 and stops at its
    # end 3; start 3 is behind the ends of groups 0 and 1, so of group 2, up to 7; then 7 up to 8.
    ends = jnp.cumsum(sizes)

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        start, value = carry
        group = (ends <= start).sum()
        end = jnp.minimum(start + size, ends[group])
        return end, body(value, group, start, end)

    return lax.while_loop(
        lambda carry: carry[0] < ends[-1], step, (jnp.zeros_like(ends[0]), value)
    )[1]
