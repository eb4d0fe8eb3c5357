"""Convolutions on images, channels last, group normalisation, and the residual block of diffusers' VAEs and UNets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.models.linear import Linear
from mmjax.models.remat import keep_inputs
from mmjax.parallel.sharding import Axes

LAYOUT = ("NHWC", "HWIO", "NHWC")


class Convolution(nnx.Module):
    """A convolution over 3 x 3 neighbours; with a stride of 2 it halves the sides.

    padding: rows and columns of zeros before and behind the image.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        axes: Axes,
        rngs: nnx.Rngs,
        stride: int = 1,
        padding: tuple[int, int] = (1, 1),
    ):
        weight = (
            jax.random.normal(rngs.params(), (3, 3, inputs, outputs), jnp.float32)
            * (9 * inputs) ** -0.5
        )
        self.weight = nnx.Param(weight, axes=(None, None, *axes))
        self.bias = nnx.Param(
            jnp.zeros(outputs, jnp.float32), axes=(None if axes[1] == "embed" else axes[1],)
        )
        self.stride = stride
        self.padding = padding

    def __call__(self, x: Float[Array, "b h w i"]) -> Float[Array, "b y x o"]:
        @keep_inputs
        def convolved(x: Array, weight: Array) -> Array:
            strides = (self.stride, self.stride)
            padding = (self.padding, self.padding)
            return jax.lax.conv_general_dilated(
                x, weight.astype(x.dtype), strides, padding, dimension_numbers=LAYOUT
            )

        return convolved(x, self.weight[...]) + self.bias[...].astype(x.dtype)


class GroupNorm(nnx.Module):
    """Zero mean and unit variance of each group of an image's channels, then scale and bias; float32 inside."""

    def __init__(self, width: int, groups: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=(None,))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32), axes=(None,))
        self.groups = groups
        self.eps = eps

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        @keep_inputs
        def norm(x: Array, scale: Array, bias: Array) -> Array:
            # [B, H, W, C] -> [B, H, W, groups, C / groups]; the mean is over all but image and
            # group.
            y = x.astype(jnp.float32).reshape(*x.shape[:3], self.groups, x.shape[3] // self.groups)
            y = y - jnp.mean(y, axis=(1, 2, 4), keepdims=True)
            y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=(1, 2, 4), keepdims=True) + self.eps)
            return (
                y.reshape(x.shape) * scale.astype(jnp.float32) + bias.astype(jnp.float32)
            ).astype(x.dtype)

        return norm(x, self.scale[...], self.bias[...])


class ResidualBlock(nnx.Module):
    """Two convolutions beside the residual stream, between which a time's embedding is added where there is one."""

    def __init__(
        self, inputs: int, outputs: int, time_width: int, groups: int, eps: float, rngs: nnx.Rngs
    ):
        """time_width: of the time's embedding; 0: there is none."""
        self.norm1 = GroupNorm(inputs, groups, eps)
        self.conv1 = Convolution(inputs, outputs, ("embed", "mlp"), rngs)
        self.time = (
            Linear(time_width, outputs, ("embed", "mlp"), rngs, bias=True) if time_width else None
        )
        self.norm2 = GroupNorm(outputs, groups, eps)
        self.conv2 = Convolution(outputs, outputs, ("mlp", "embed"), rngs)
        self.shortcut = (
            None if inputs == outputs else Linear(inputs, outputs, ("embed", None), rngs, bias=True)
        )

    def __call__(
        self,
        x: Float[Array, "b h w _"],
        time: Float[Array, "b t"] | None = None,
        skip: Float[Array, "b h w _"] | None = None,
    ) -> Float[Array, "b h w o"]:
        """Apply the block to `x`, or to `x` with the channels of `skip` behind its own.

        time: the embedding, activated.
        """

        # Products' operands are made again in backward from what comes before norms and
        # concatenations.
        @keep_inputs
        def first(x: Array, skip: Array | None) -> Array:
            return self.conv1(jax.nn.silu(self.norm1(_joined(x, skip))))

        @keep_inputs
        def second(hidden: Array) -> Array:
            return self.conv2(jax.nn.silu(self.norm2(hidden)))

        @keep_inputs
        def beside(x: Array, skip: Array | None) -> Array:
            return x if self.shortcut is None else self.shortcut(_joined(x, skip))

        hidden = first(x, skip)
        if self.time is not None:
            hidden = hidden + self.time(time)[:, None, None]
        return beside(x, skip) + second(hidden)


def _joined(
    x: Float[Array, "b h w _"], skip: Float[Array, "b h w _"] | None
) -> Float[Array, "b h w _"]:
    return x if skip is None else jnp.concatenate([x, skip], axis=-1)


def doubled(x: Float[Array, "b h w c"]) -> Float[Array, "b 2*h 2*w c"]:
    """Repeat every pixel in two rows and two columns: the nearest neighbour at twice the resolution."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
