"""The parts every tower is made of: matrices, norms, MLPs, self-attention, and the layer that they make.

Every matrix is 2-D (`[in, out]`, heads flattened into one axis) and says by `axes` what its dimensions mean to
`mmjax.parallel.sharding`. Weights are cast to the activations' dtype where they are used; norms compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax.config import Activation, Biased
from mmjax.models.attention import PLAIN, Backend, MaskSpec, Scoring, attention, dense_attention
from mmjax.models.dropout import ATTENTION, MLP_SITE, Dropout, drop
from mmjax.models.rope import Rotation, rotate
from mmjax.parallel.sharding import Axes, constrain


class KeysValues(NamedTuple):
    """Rotated keys, and values, of a layer's tokens `[B, C, M, H]`; of a run of layers, with these in front."""

    key: Array
    value: Array


class Past(NamedTuple):
    """What tokens attend that come one after the other: a column for each, those of later ones among them."""

    kept: KeysValues  # of the layer at hand
    mask: MaskSpec  # who stands in each column, [B, C]
    at: Array  # int32 []: the column of the first of the tokens at hand


class Context(NamedTuple):
    """What every layer of a tower reads beside its activations."""

    mask: MaskSpec
    rotation: Rotation | None = None
    dropout: Dropout | None = None  # None: nothing is dropped
    near: MaskSpec | None = None  # the mask of those layers that see only what is near


class Linear(nnx.Module):
    """`x @ weight + bias`, born normal with variance 1 / fan-in."""

    def __init__(self, inputs: int, outputs: int, axes: Axes, rngs: nnx.Rngs, *, bias: bool = False):
        weight = jax.random.normal(rngs.params(), (inputs, outputs), jnp.float32) * inputs**-0.5
        self.weight = nnx.Param(weight, axes=axes)
        # A bias along the width stays whole: it is small, and activations are whole there.
        bias_axis = None if axes[1] == "embed" else axes[1]
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=(bias_axis,)) if bias else None
        self.lora: nnx.Module | None = nnx.data(None)  # what is added to it (`models.lora`)

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        y = x @ self.weight[...].astype(x.dtype)
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)
        if self.lora is not None:
            y = y + self.lora(x)
        return checkpoint_name(y, "linear")


class PositionTable(nnx.Module):
    """A learned vector per row, column or time of a merged token, along one dimension."""

    def __init__(self, size: int, width: int, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (size, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(table, axes=(None, "embed"))

    def __call__(self, index: Int[Array, "r m"], dtype: jnp.dtype) -> Float[Array, "r m d"]:
        return constrain(self.weight[...].astype(dtype), None, None)[index]


class FixedTable(nnx.Module):
    """A vector per position that comes with the weights: it gets no gradient, and no weight decay."""

    def __init__(self, table: Float[Array, "n d"]):
        self.weight = nnx.Param(table, axes=("fixed", "embed"))

    def __call__(self, index: Int[Array, "r m"], dtype: jnp.dtype) -> Float[Array, "r m d"]:
        table = constrain(jax.lax.stop_gradient(self.weight[...]).astype(dtype), None, None)
        return table[jnp.minimum(index, len(table) - 1)]


class RMSNorm(nnx.Module):
    """Divides by the root mean square of each position, times `offset + scale`; float32 inside."""

    def __init__(self, width: int, eps: float, offset: float = 0.0):
        self.scale = nnx.Param(jnp.full(width, 1 - offset, jnp.float32), axes=(None,))
        self.eps, self.offset = eps, offset

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


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


ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """`down(f(up(x)))`, or gated `down(f(gate(x)) * up(x))`."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        activation: Activation,
        rngs: nnx.Rngs,
        *,
        gated: bool = False,
        biases: tuple[Biased, ...] = (),
    ):
        self.gate = Linear(inputs, hidden, ("embed", "mlp"), rngs, bias="gate" in biases) if gated else None
        self.up = Linear(inputs, hidden, ("embed", "mlp"), rngs, bias="up" in biases)
        self.down = Linear(hidden, outputs, ("mlp", "embed"), rngs, bias="down" in biases)
        self.activation: Activation = activation

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        f = ACTIVATIONS[self.activation]
        return self.down(f(self.up(x)) if self.gate is None else f(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class Block:
    """What a layer of a tower is made of."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    backend: Backend
    norm: Callable[[int], nnx.Module]  # of a width
    activation: Activation
    gated: bool
    biases: tuple[Biased, ...]
    head_norm: Callable[[int], nnx.Module] | None = None  # of the queries and keys of each head
    width_norm: Callable[[int], nnx.Module] | None = None  # of the queries and keys of all heads together
    post_norms: bool = False  # of what attention and the MLP give
    layer_scale: bool = False  # learned scales of it
    scoring: Scoring = PLAIN


class SelfAttention(nnx.Module):
    """Grouped-query self-attention under a mask spec, with rotary positions where the context has them."""

    def __init__(self, block: Block, rngs: nnx.Rngs):
        b, queries, keys = block, block.heads * block.head_width, block.kv_heads * block.head_width
        self.query = Linear(b.width, queries, ("embed", "heads"), rngs, bias="query" in b.biases)
        self.key = Linear(b.width, keys, ("embed", "kv_heads"), rngs, bias="key" in b.biases)
        self.value = Linear(b.width, keys, ("embed", "kv_heads"), rngs, bias="value" in b.biases)
        self.output = Linear(queries, b.width, ("heads", "embed"), rngs, bias="output" in b.biases)
        norms = [(b.head_norm, b.head_width, b.head_width), (b.width_norm, queries, keys)]
        norm, of_query, of_key = next((n for n in norms if n[0] is not None), (None, 0, 0))
        self.query_norm, self.key_norm = (None, None) if norm is None else (norm(of_query), norm(of_key))
        self.norm_heads = b.head_norm is not None
        self.heads, self.kv_heads, self.head_width = b.heads, b.kv_heads, b.head_width
        self.backend: Backend = b.backend
        self.scoring = b.scoring

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: Past | None = None
    ) -> tuple[Float[Array, "b t d"], KeysValues]:
        """What the tokens see of each other, or of what `past` keeps and of themselves; and their keys and values."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and not self.norm_heads:
            q, k = self.query_norm(q), self.key_norm(k)
        q = q.reshape(*x.shape[:2], self.heads, self.head_width)
        k, v = (y.reshape(*x.shape[:2], self.kv_heads, self.head_width) for y in (k, v))
        if self.query_norm is not None and self.norm_heads:
            q, k = self.query_norm(q), self.key_norm(k)
        if context.rotation is not None:
            q, k = rotate(q, context.rotation), rotate(k, context.rotation)
        if past is None:
            seen = attention(q, k, v, context.mask, self.backend, self.scoring)
        else:
            # Of one token there is no block of queries: all scores at once.
            keys = jax.lax.dynamic_update_slice_in_dim(past.kept.key, k, past.at, axis=1)
            values = jax.lax.dynamic_update_slice_in_dim(past.kept.value, v, past.at, axis=1)
            seen = dense_attention(q, keys, values, context.mask, past.mask, self.scoring)
        return self.output(seen.reshape(*x.shape[:2], self.heads * self.head_width)), KeysValues(k, v)


class LayerScale(nnx.Module):
    """A learned scale of every channel."""

    def __init__(self, width: int):
        self.scale = nnx.Param(jnp.full(width, 0.1, jnp.float32), axes=(None,))

    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        return x * self.scale[...].astype(x.dtype)


def _after(block: Block) -> nnx.Module | None:
    """What is done to what attention or the MLP give, before it is added."""
    if block.post_norms:
        return block.norm(block.width)
    return LayerScale(block.width) if block.layer_scale else None


class TransformerLayer(nnx.Module):
    """Pre-norm attention, then a pre-norm MLP, each added to the residual stream."""

    def __init__(self, block: Block, rngs: nnx.Rngs):
        b = block
        self.attention_norm = b.norm(b.width)
        self.attention = SelfAttention(b, rngs)
        self.attention_after = _after(b)
        self.mlp_norm = b.norm(b.width)
        self.mlp = MLP(b.width, b.mlp_width, b.width, b.activation, rngs, gated=b.gated, biases=b.biases)
        self.mlp_after = _after(b)

    def __call__(self, x: Float[Array, "b t d"], context: Context) -> Float[Array, "b t d"]:
        return self.kept(x, context)[0]

    def kept(
        self, x: Float[Array, "b t d"], context: Context, past: Past | None = None
    ) -> tuple[Float[Array, "b t d"], KeysValues]:
        """As a call, after `past` if there is one; with the keys and values that later tokens attend."""
        seen, kept = self.attention(self.attention_norm(x), context, past)
        if self.attention_after is not None:
            seen = self.attention_after(seen)
        x = x + drop(seen, context.dropout, ATTENTION)
        x = checkpoint_name(x, "mlp_input")
        thought = self.mlp(self.mlp_norm(x))
        if self.mlp_after is not None:
            thought = self.mlp_after(thought)
        return x + drop(thought, context.dropout, MLP_SITE), kept
