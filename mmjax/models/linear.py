"""Multiply by the weights of linear layers, of several that take the same input at once."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mmjax.models.float8 import float8_products
from mmjax.models.matmul import matmul
from mmjax.models.quantization import Quantized, QuantizedMatrix, dequantize
from mmjax.models.remat import keep_inputs
from mmjax.parallel.collective_matmul import tensor_parallel_products
from mmjax.parallel.sharding import Axes


@keep_inputs
def _product(x: Float[Array, "*b i"], weight: Float[Array, "*parts i o"]) -> Float[Array, "*b o"]:
    """Multiply in the activations' precision, keeping no copy of the weight in it.

    A weight of three dimensions has a copy for every part of the rows, so that each part has a
    gradient of its own.
    """
    weight = weight.astype(x.dtype)
    if weight.ndim == 2:
        return matmul(x, weight)
    parts = x.reshape(len(weight), -1, *x.shape[1:])
    return jnp.einsum("p...i,pio->p...o", parts, weight).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def clip(
    x: Float[Array, "*b d"], lowest: Float[Array, ""], highest: Float[Array, ""]
) -> Float[Array, "*b d"]:
    """Clip to bounds. As in PyTorch's clamp, a value at a bound passes its gradient on; the bounds get none."""
    return jnp.clip(x, lowest.astype(x.dtype), highest.astype(x.dtype))


def _clip_forward(x: Array, lowest: Array, highest: Array) -> tuple[Array, Array]:
    inside = (x >= lowest.astype(x.dtype)) & (x <= highest.astype(x.dtype))
    return clip(x, lowest, highest), inside


def _clip_backward(inside: Array, d_y: Array) -> tuple[Array, None, None]:
    return jnp.where(inside, d_y, 0), None, None


clip.defvjp(_clip_forward, _clip_backward)


class Bounds(nnx.Module):
    """Stored bounds of a linear layer's inputs and outputs, buffers in PyTorch's terms, which get no gradient."""

    def __init__(self) -> None:
        def bound(value: float) -> nnx.Param:
            return nnx.Param(jnp.asarray(value, jnp.float32), axes=())

        self.input_min = bound(-jnp.inf)
        self.input_max = bound(jnp.inf)
        self.output_min = bound(-jnp.inf)
        self.output_max = bound(jnp.inf)


class Linear(nnx.Module):
    """`x @ weight + bias`, initialised normal with variance 1 / fan-in; inputs and outputs may be clipped."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: Axes,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        clipped: bool = False,
    ):
        # Always float32: the cast to the computation's precision is part of the forward pass.
        weight = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32) * inputs**-0.5
        # quantised by `models.model`
        self.weight: nnx.Param | QuantizedMatrix = nnx.Param(weight, axes=axes)
        # A bias along the width is replicated: it is small, and activations are not sharded there.
        self.bias_axis = None if axes[1] == "embed" else axes[1]
        zeros = jnp.zeros(outputs, jnp.float32)
        self.bias = nnx.Param(zeros, axes=(self.bias_axis,)) if bias else None
        self.bounds = Bounds() if clipped else None
        self.axes = axes
        self.lora: nnx.Module | None = nnx.data(None)  # set by `models.lora`
        self.float8 = False  # whether products run in FP8; set by `models.model`

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return apply_linears(x, self)[0]

    def of_padded(self, x: Float[Array, "*b p"], padding: int) -> Float[Array, "*b o"]:
        """Apply to inputs with `padding` channels appended, which are ignored; outputs are not yet `bounded`."""
        if not padding:
            return _unbounded(x, self)[0]
        weight = dequantize(self.weight[...], x.dtype)
        weight = jnp.pad(weight, ((0, 0),) * (weight.ndim - 2) + ((0, padding), (0, 0)))
        (y,) = _products(self.clipped(x), [weight], [self])
        return self.completed(y, x[..., :-padding])

    def clipped(self, x: Float[Array, "*b i"]) -> Float[Array, "*b i"]:
        """Clip inputs, where the layer has bounds."""
        if self.bounds is None:
            return x
        return clip(x, self.bounds.input_min[...], self.bounds.input_max[...])

    def completed(
        self, y: Float[Array, "*b o"], x: Float[Array, "*b i"], padding: int = 0
    ) -> Float[Array, "*b o"]:
        """Add bias and adapter to the product of inputs `x`; `padding` zeros were appended to it."""
        if self.lora is not None and self.lora.magnitude is not None:
            y = checkpoint_name(y + _pad_last(self.lora(self.clipped(x)), padding), "linear")
            scales = self.lora.column_scales(dequantize(self.weight[...], jnp.float32))
            y = (y * _pad_last(scales, padding)).astype(x.dtype)
            bias = None if self.bias is None else self.bias[...].astype(x.dtype)
            return y if bias is None else y + _pad_last(bias, padding)
        if self.bias is not None:
            y = y + _pad_last(self.bias[...].astype(x.dtype), padding)
        if self.lora is not None:
            y = y + _pad_last(self.lora(self.clipped(x)), padding)
        # Named before it is clipped: where a policy saves it, backward can tell what was within
        # bounds.
        return checkpoint_name(y, "linear")

    def bounded(self, y: Float[Array, "*b o"]) -> Float[Array, "*b o"]:
        """Clip outputs, where the layer has bounds."""
        if self.bounds is None:
            return y
        return clip(y, self.bounds.output_min[...], self.bounds.output_max[...])


def apply_linears(
    x: Float[Array, "*b i"], *linears: Linear, padding: int = 0
) -> list[Float[Array, "*b o"]]:
    """Apply linear layers cut alike to the same activations, which tensor parallelism gathers once for all.

    padding: zeros appended to the outputs, by the products themselves.
    """
    outputs = _unbounded(x, *linears, padding=padding)
    return [linear.bounded(y) for linear, y in zip(linears, outputs, strict=True)]


def _unbounded(
    x: Float[Array, "*b i"], *linears: Linear, padding: int = 0
) -> list[Float[Array, "*b o"]]:
    if linears[1:] and any(linear.bounds is not None for linear in linears):
        # Each clips the activations to bounds of its own.
        return [y for linear in linears for y in _unbounded(x, linear, padding=padding)]
    axes = [linear.axes for linear in linears]

    def multiply(x: Array, *weights: Array | Quantized) -> tuple[Array, ...]:
        x = linears[0].clipped(x)
        matrices = [_pad_last(dequantize(w, x.dtype), padding) for w in weights]
        return tensor_parallel_products(x, matrices, axes) or _products(x, matrices, linears)

    weights = [linear.weight[...] for linear in linears]
    # Quantised weights and activations that are clipped are kept for backward as they are, and
    # dequantised or clipped again there.
    again = any(isinstance(w, Quantized) for w in weights) or linears[0].bounds is not None
    products = keep_inputs(multiply) if again else multiply
    return [
        linear.completed(y, x, padding)
        for linear, y in zip(linears, products(x, *weights), strict=True)
    ]


def _products(x: Array, weights: Sequence[Array], linears: Sequence[Linear]) -> tuple[Array, ...]:
    """Multiply by the weights of linear layers, each in its precision."""
    # Those in FP8 are multiplied together, so that the activations are rounded once for all.
    in_float8 = [weight for weight, linear in zip(weights, linears, strict=True) if linear.float8]
    products = iter(float8_products(x, *in_float8) if in_float8 else ())
    return tuple(
        next(products) if linear.float8 else _product(x, weight)
        for weight, linear in zip(weights, linears, strict=True)
    )


def _pad_last(x: Array, padding: int) -> Array:
    """Append `padding` zeros to the last dimension."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, padding),)) if padding else x
