"""Layers of a Conformer as in the Universal Speech Model (Zhang et al. 2023, arXiv:2303.01037) and Gemma 4.

Half an MLP, attention among the nearest positions of a clip, a causal convolution, half an MLP.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax.config import AudioConfig
from mmjax.models.kv_cache import KVCacheView
from mmjax.models.layers import ACTIVATIONS, MLP, Context, LayerOutput, RMSNorm
from mmjax.models.linear import Linear, apply_linears
from mmjax.models.remat import keep_inputs
from mmjax.models.rope import sinusoids
from mmjax.models.short_convolution import ChannelFilter, causal_convolution

NORM_EPS = 1e-6  # of the norms around attention and MLPs, whatever the config's
BLOCK = 16  # queries at least that attend together, whose keys are those of all


class HalfMLP(nnx.Module):
    """An MLP between two norms, of whose output a part is added to the stream."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        norm = partial(RMSNorm, c.width, NORM_EPS, limit=c.conformer.limit)
        self.norm = norm()
        self.mlp = MLP(c.width, c.mlp_width, c.width, c.activation, rngs, clipped=c.clipped_linears)
        self.norm_after = norm()
        self.share = c.conformer.mlp_share

    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        return x + self.norm_after(self.mlp(self.norm(x))) * self.share


class LocalAttention(nnx.Module):
    """Attention among a clip's nearest positions, with keys of distances and capped scores (Dai et al. 2019, B)."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        into = partial(Linear, c.width, c.width, ("embed", "heads"), rngs)
        self.query, self.key, self.value = (into(clipped=c.clipped_linears) for _ in range(3))
        self.distance_key = into()
        self.channel_scale = nnx.Param(jnp.zeros(c.head_width, jnp.float32), axes=(None,))
        self.output = Linear(c.width, c.width, ("heads", "embed"), rngs, clipped=c.clipped_linears)
        self.heads = c.heads
        self.config = c.conformer

    def __call__(self, x: Float[Array, "b t d"], item: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        c = self.config
        q, k, v = apply_linears(x, self.query, self.key, self.value)
        # A key for each distance, from the farthest position before to the last one behind.
        distance = c.nearest + jnp.arange(c.past, -c.future - 1, -1)
        keys = self.distance_key(sinusoids(distance[None], x.shape[-1]).astype(x.dtype))[0]
        keys = jnp.where(distance[:, None] >= 0, keys, 0)
        attend = keep_inputs(self._attend)
        attn_out = attend(q, k, v, keys, self.channel_scale[...], item)
        return self.output(checkpoint_name(attn_out, "attention_output"))

    def _attend(
        self, q: Array, k: Array, v: Array, keys: Array, scale: Array, item: Array
    ) -> Array:
        """Attend in float32, in blocks of queries and all keys that these may reach."""
        past, future = self.config.past, self.config.future
        rows, length, width = q.shape
        size = max(BLOCK, past, future)
        extra = -length % size

        def blocks(y: Array, fill: int = 0) -> Array:
            padding = ((0, 0), (0, extra), *((0, 0),) * (y.ndim - 2))
            y = jnp.pad(y, padding, constant_values=fill)
            return y.reshape(rows, (length + extra) // size, size, *y.shape[2:])

        def reached(y: Array, fill: int = 0) -> Array:
            # Of blocks a b c, the keys of b are the last of a, b, and the first of c.
            around = jnp.pad(y, ((0, 0), (1, 1), *((0, 0),) * (y.ndim - 2)), constant_values=fill)
            parts = around[:, :-2, size - past :], y, around[:, 2:, :future]
            return jnp.concatenate(parts, axis=2)

        by_head = lambda y: blocks(  # noqa: E731
            y.astype(jnp.float32).reshape(rows, length, self.heads, width // self.heads)
        )
        # In base 2, with a scale of keys for softplus(1), as JAX's Universal Speech Model has it.
        q_scale = (width // self.heads) ** -0.5 / math.log(2) * jax.nn.softplus(scale)
        q = by_head(q) * q_scale.astype(jnp.float32)
        k = reached(by_head(k) * (math.log(1 + math.e) / math.log(2)))
        keys = keys.astype(jnp.float32).reshape(-1, self.heads, width // self.heads)
        scores = jnp.einsum("rnqhc,rnkhc->rnhqk", q, k) + _shifted(
            jnp.einsum("rnqhc,dhc->rnhqd", q, keys), k.shape[2]
        )
        cap = self.config.score_cap
        # Key j of query i is i + past - j positions before it.
        steps = jnp.arange(k.shape[2]) - jnp.arange(size)[:, None]
        own, others = blocks(item, -1), reached(blocks(item, -1), -1)
        allowed = (own[..., None] == others[:, :, None]) & (steps >= 0) & (steps <= past + future)
        scores = jnp.where(allowed[:, :, None], cap * jnp.tanh(scores / cap), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("rnhqk,rnkhc->rnqhc", weights, reached(by_head(v)))
        return out.reshape(rows, length + extra, width)[:, :length].astype(v.dtype)


def _shifted(scores: Float[Array, "r n h q d"], keys: int) -> Float[Array, "r n h q k"]:
    """Move the scores of query i with distances to its keys, from key i on; what stands elsewhere means nothing.

    Rows of 3 distances and 5 keys are padded to 6, and read again as rows of 5: a b c 0 0 0 | d e f
    0 0 0 | .. becomes a b c 0 0 | 0 d e f 0 | ..
    """
    *outer, queries, distances = scores.shape
    padded = jnp.pad(scores, (*((0, 0),) * (scores.ndim - 1), (0, keys + 1 - distances)))
    rows = padded.reshape(*outer, queries * (keys + 1))
    return rows[..., : queries * keys].reshape(*outer, queries, keys)


class ConvolutionModule(nnx.Module):
    """A gated matrix, a causal convolution of each channel, a norm, and a matrix."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        clipped = c.clipped_linears
        self.norm = RMSNorm(c.width, c.norm_eps)
        self.input = Linear(c.width, 2 * c.width, ("embed", "mlp"), rngs, clipped=clipped)
        self.filter = ChannelFilter(c.conformer.taps, c.width, rngs)
        self.filter_norm = RMSNorm(c.width, c.norm_eps, limit=c.conformer.limit)
        self.output = Linear(c.width, c.width, ("mlp", "embed"), rngs, clipped=clipped)
        self.activation = c.activation
        self.taps = c.conformer.taps

    def __call__(self, x: Float[Array, "b t d"], item: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        @keep_inputs
        def convolved(y: Array, weight: Array) -> Array:
            value, gate = jnp.split(y, 2, axis=-1)
            before = jnp.zeros((len(y), self.taps - 1, value.shape[-1]), y.dtype)
            return causal_convolution(value * jax.nn.sigmoid(gate), weight, item, before)

        y = convolved(self.input(self.norm(x)), self.filter.weight[...])
        return x + self.output(ACTIVATIONS[self.activation](self.filter_norm(y)))


class ConformerLayer(nnx.Module):
    """Half an MLP, attention, a convolution and half an MLP, each added to the stream, then a norm of it."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        norm = partial(RMSNorm, c.width, NORM_EPS, limit=c.conformer.limit)
        self.first = HalfMLP(c, rngs)
        self.attention_norm = norm()
        self.attention = LocalAttention(c, rngs)
        self.attention_after = norm()
        self.convolution = ConvolutionModule(c, rngs)
        self.second = HalfMLP(c, rngs)
        self.norm = norm()

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: KVCacheView | None = None
    ) -> LayerOutput:
        """Apply the layer to packed rows of clips."""
        item = context.mask.sample
        x = self.first(x)
        x = x + self.attention_after(self.attention(self.attention_norm(x), item))
        # The name that the remat policy `attention_mlp` saves (`stack_scan.SAVED`).
        x = self.convolution(checkpoint_name(x, "mlp_input"), item)
        return LayerOutput(self.norm(self.second(x)), None, None)
