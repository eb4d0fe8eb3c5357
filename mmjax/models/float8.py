"""Products of linear layers in FP8: activations and weights in e4m3, gradients in e5m2, sums in float32.

A tensor has one scale, from its largest value at the time (current scaling), so that no history is
kept. Scales are powers of two: all values but those 15 binades below the largest are rounded alike
whatever the scale, so what else lies in a row, a microbatch or on a device matters to those alone.
Master weights and the sums of their gradients are as without FP8 (Micikevicius et al. 2022, "FP8
Formats for Deep Learning").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from mmjax.parallel.sharding import platform

FORWARD = jnp.float8_e4m3fn
GRADIENT = jnp.float8_e5m2
# the largest value of each is 1.75 times 2 to this power: 448 and 57,344
MAX_EXPONENT = {FORWARD: 8, GRADIENT: 15}
NO_FP8_ALGORITHMS = (0, 12)  # JAX from which on algorithms of FP8 cannot be written for its plugin
MIN_SCALE_EXPONENT = -63  # exponent of a scale: a product of two scales is still a normal float32


class Scaled(NamedTuple):
    """A tensor, divided by its scale."""

    values: Array  # float8
    scale: Float[Array, ""]  # float32, a power of two


def scale_of(x: Float[Array, "*b"], dtype: Any) -> Float[Array, ""]:
    """Return the least power of two, divided by which the largest value of `x` fits a float8 type."""
    # 1.75 * 2^8 = 448 is the largest e4m3: 450 = 1.7578 * 2^8 is above, so its scale is 2, and that
    # of 448 is 1. Read from the bits of the float32 (exponent 23..30, mantissa 0..22): exact,
    # unlike log2.
    largest = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    above = (bits & 0x7FFFFF) > 0x600000  # its mantissa is above 1.75
    return _power_of_two(
        jnp.maximum((bits >> 23) - 127 - MAX_EXPONENT[dtype] + above, MIN_SCALE_EXPONENT)
    )


def _power_of_two(exponent: Array) -> Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def to_float8(x: Float[Array, "*b"], dtype: Any, scale: Array | None = None) -> Scaled:
    """Round to a float8 type. scale: default: `scale_of` it."""
    scale = scale_of(x, dtype) if scale is None else scale
    return Scaled((x * (1 / scale).astype(x.dtype)).astype(dtype), scale)


def _weight_to_float8(weight: Array, scale: Array | None = None) -> Scaled:
    weight8 = to_float8(weight, FORWARD, scale)
    if platform() in ("gpu", "cuda"):
        # Hopper sums over the last axis alone. Without this XLA would turn the float32 weights of
        # all layers before a scan over them; so it turns those of a layer, as it rounds them.
        in_order = Layout(tuple(range(weight.ndim)))
        weight8 = weight8._replace(values=with_layout_constraint(weight8.values, in_order))
    return weight8


def float8_products(
    x: Float[Array, "*b i"], *weights: Float[Array, "*parts i _"]
) -> tuple[Float[Array, "*b _"], ...]:
    """Multiply activations by each of these matrices.

    Weights of three dimensions have a copy for every part of the rows, as those of `layers.Linear`.
    """
    rows = x if weights[0].ndim == 2 else x.reshape(len(weights[0]), -1, *x.shape[1:])
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in _products(rows, *weights))


@jax.custom_vjp
def _products(x: Array, *weights: Array) -> tuple[Array, ...]:
    x8 = to_float8(x, FORWARD)
    return tuple(_product(x8, _weight_to_float8(weight), x.dtype) for weight in weights)


def _product(x8: Scaled, weight8: Scaled, dtype: Any) -> Array:
    contracted = (x8.values.ndim - 1,), (weight8.values.ndim - 2,)
    return _multiply(x8, weight8, contracted, weight8.values.ndim == 3, dtype)


def _multiply(
    a: Scaled,
    b: Scaled,
    contracted: tuple[Sequence[int], Sequence[int]],
    by_part: bool,
    dtype: Any,
    exact: bool = False,
) -> Array:
    """Sum products over these axes of both. by_part: for each index of the first axis, which both have."""
    batch = ((0,), (0,)) if by_part else ((), ())
    # Hopper's units add up 14 bits unless told otherwise: enough for activations, too few for
    # gradients.
    precision: Any = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    if platform() in ("gpu", "cuda") and jax.__version_info__ < NO_FP8_ALGORITHMS:
        # An algorithm by name is cuBLASLt's. Without, compiling tries hundreds of kernels of XLA's
        # own.
        preset = lax.DotAlgorithmPreset
        precision = preset.ANY_F8_ANY_F8_F32 if exact else preset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    # Rounded by the product itself: a power of two then changes no bit but the exponent's.
    product = lax.dot_general(a.values, b.values, (contracted, batch), precision, dtype)
    return product * (a.scale * b.scale).astype(dtype)


def _products_forward(x: Any, *weights: Any) -> tuple[tuple[Array, ...], Any]:
    x8 = to_float8(x.value, FORWARD)
    weights8 = [_weight_to_float8(weight.value) for weight in weights]
    # Each is needed for the gradient of the other alone, which a frozen one lacks. Weights, which
    # are kept anyway, are rounded once more. Empty slices tell the dtypes.
    saved_x = x8 if any(weight.perturbed for weight in weights) else None
    saved_weights = [
        (
            weight.value if x.perturbed else None,
            weight8.scale,
            weight.value[:0] if weight.perturbed else None,
        )
        for weight, weight8 in zip(weights, weights8, strict=True)
    ]
    return tuple(_product(x8, weight8, x.value.dtype) for weight8 in weights8), (
        saved_x,
        saved_weights,
        x.value[:0],
    )


def _products_backward(residuals: Any, d_outputs: tuple[Any, ...]) -> tuple[Array | None, ...]:
    x8, weights, no_x = residuals
    d_x = None
    d_weights = []
    for (weight, scale, no_weight), d_y in zip(weights, d_outputs, strict=True):
        d_weight = None
        if not isinstance(d_y, SymbolicZero):
            d_y8 = to_float8(d_y, GRADIENT)
            last = d_y.ndim - 1
            if weight is not None:
                contracted = (last,), (weight.ndim - 1,)
                weight8 = _weight_to_float8(weight, scale)
                product = _multiply(
                    d_y8, weight8, contracted, weight.ndim == 3, no_x.dtype, exact=True
                )
                d_x = product if d_x is None else d_x + product
            if no_weight is not None:
                by_part = no_weight.ndim == 3
                rows = tuple(range(by_part, last))
                # Rounded like the gradients of all weights, so that ranks reduce it in this
                # precision.
                d_weight = _multiply(
                    x8, d_y8, (rows, rows), by_part, no_x.dtype, exact=True
                ).astype(no_weight.dtype)
        d_weights.append(d_weight)
    return d_x, *d_weights


_products.defvjp(_products_forward, _products_backward, symbolic_zeros=True)
