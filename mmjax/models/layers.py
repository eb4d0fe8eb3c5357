"""The parts every tower is made of: matrices, norms, MLPs, rotary positions, self-attention.

Every matrix is 2-D (`[in, out]`, heads flattened into one axis) and says by `axes` what its dimensions mean to
`mmjax.parallel.sharding`. Weights are cast to the activations' dtype where they are used; norms compute in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax.models.attention import Backend, MaskSpec, attention
from mmjax.models.dropout import ATTENTION, MLP, Dropout, drop
from mmjax.parallel.sharding import Axes


class Rotation(NamedTuple):
    """Cosines and sines by which rotary positions turn queries and keys. Both float32 [B, T, H/2]."""

    cos: Array
    sin: Array


class Context(NamedTuple):
    """What every layer of a tower reads beside its activations."""

    mask: MaskSpec
    rotation: Rotation | None = None
    dropout: Dropout | None = None  # None: nothing is dropped


class Linear(nnx.Module):
    """`x @ weight + bias`, born normal with variance 1 / fan-in."""

    def __init__(self, inputs: int, outputs: int, axes: Axes, rngs: nnx.Rngs, *, bias: bool = False):
        weight = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32) * inputs**-0.5
        self.weight = nnx.Param(weight, axes=axes)
        # A bias along the width stays whole: it is small, and activations are whole there.
        bias_axis = None if axes[1] == "embed" else axes[1]
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=(bias_axis,)) if bias else None

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        y = x @ self.weight[...].astype(x.dtype)
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        return checkpoint_name(y, "linear")


class RMSNorm(nnx.Module):
    """Divides by the root mean square of each position; float32 inside."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Zero mean and unit variance of each position, then scale and bias; float32 inside."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=(None,))
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32), axes=(None,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.gate = Linear(width, hidden, ("embed", "mlp"), rngs)
        self.up = Linear(width, hidden, ("embed", "mlp"), rngs)
        self.down = Linear(hidden, width, ("mlp", "embed"), rngs)

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class GeluMLP(nnx.Module):
    """`down(gelu(up(x)))` with biases; `outputs` may differ from `inputs`."""

    def __init__(self, inputs: int, hidden: int, outputs: int, rngs: nnx.Rngs):
        self.up = Linear(inputs, hidden, ("embed", "mlp"), rngs, bias=True)
        self.down = Linear(hidden, outputs, ("mlp", "embed"), rngs, bias=True)

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return self.down(jax.nn.gelu(self.up(x)))


def rotation_1d(position: Int[Array, "b t"], head_width: int, theta: float) -> Rotation:
    """Rotary angles of positions on a line: channel pair i turns by position * theta^(-2i / head_width)."""
    return _rotation(position[..., None], head_width, theta)


def rotation_2d(coordinates: Int[Array, "b t 2"], head_width: int, theta: float) -> Rotation:
    """Rotary angles of (y, x): the first half of the channel pairs turns with y, the other half with x."""
    return _rotation(coordinates, head_width, theta)


def _rotation(coordinates: Int[Array, "b t n"], head_width: int, theta: float) -> Rotation:
    dimensions = coordinates.shape[-1]
    if head_width % (2 * dimensions):
        raise ValueError(f"a head of {head_width} channels does not split into pairs for {dimensions} coordinate(s)")
    pairs = head_width // (2 * dimensions)
    frequencies = theta ** -(jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angles = coordinates.astype(jnp.float32)[..., None] * frequencies
    angles = angles.reshape(*coordinates.shape[:-1], head_width // 2)
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "b t n h"], rotation: Rotation) -> Float[Array, "b t n h"]:
    """Turn channel pairs (i, i + H/2) of every head; float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class SelfAttention(nnx.Module):
    """Grouped-query self-attention under a mask spec, with rotary positions where the context has them."""

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        backend: Backend,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
    ):
        self.query = Linear(width, heads * head_width, ("embed", "heads"), rngs, bias=bias)
        self.key = Linear(width, kv_heads * head_width, ("embed", "kv_heads"), rngs)  # no bias, as in Whisper
        self.value = Linear(width, kv_heads * head_width, ("embed", "kv_heads"), rngs, bias=bias)
        self.output = Linear(heads * head_width, width, ("heads", "embed"), rngs, bias=bias)
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.backend = backend

    def __call__(self, x: Float[Array, "b t d"], context: Context) -> Float[Array, "b t d"]:
        q = self.query(x).reshape(*x.shape[:2], self.heads, self.head_width)
        k, v = (y.reshape(*x.shape[:2], self.kv_heads, self.head_width) for y in (self.key(x), self.value(x)))
        if context.rotation is not None:
            q, k = rotate(q, context.rotation), rotate(k, context.rotation)
        seen = attention(q, k, v, context.mask, self.backend)
        return self.output(seen.reshape(*x.shape[:2], self.heads * self.head_width))


class EncoderLayer(nnx.Module):
    """A pre-LN transformer layer: LayerNorm, full attention, LayerNorm, GELU MLP; with biases."""

    def __init__(self, width: int, heads: int, mlp_width: int, eps: float, backend: Backend, rngs: nnx.Rngs):
        if width % heads:
            raise ValueError(f"a width of {width} does not divide into {heads} heads")
        self.attention_norm = LayerNorm(width, eps)
        self.attention = SelfAttention(width, heads, heads, width // heads, backend, rngs, bias=True)
        self.mlp_norm = LayerNorm(width, eps)
        self.mlp = GeluMLP(width, mlp_width, width, rngs)

    def __call__(self, x: Float[Array, "b t d"], context: Context) -> Float[Array, "b t d"]:
        x = x + drop(self.attention(self.attention_norm(x), context), context.dropout, ATTENTION)
        x = checkpoint_name(x, "mlp_input")
        return x + drop(self.mlp(self.mlp_norm(x)), context.dropout, MLP)
