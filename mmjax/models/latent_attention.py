"""Multi-head latent attention (MLA, DeepSeek-V2, 2024, section 2.1), in the place of grouped-query attention.

Keys and values of all heads are made of one latent of a token. Positions are in a few channels beside them: of each
head's query, and of one key that all heads share. A cache holds the latent and that key alone.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config import LatentAttentionConfig
from mmjax.models.attention import Backend, attention, block_limit
from mmjax.models.blockwise_attention import dense_attention
from mmjax.models.kv_cache import KeyValue, KVCacheView
from mmjax.models.layers import Context, LayerConfig, RMSNorm
from mmjax.models.linear import Linear, apply_linears
from mmjax.models.rope import rotate

EPS = 1e-6  # of the norms of latents, whatever the other norms have


class LatentAttention(nnx.Module):
    """Attention whose keys and values are made of a latent, and perhaps its queries of another one.

    rotary: channels of a head that have positions. Tensor parallelism shards the matrices of heads; latents are whole
    on every device.
    """

    def __init__(
        self, config: LatentAttentionConfig, rotary: int, block: LayerConfig, rngs: nnx.Rngs
    ):
        b, c = block, config
        plain = b.head_width - rotary
        queries = b.heads * b.head_width
        biased = "query" in b.biases
        if c.query_rank:
            self.query_down = Linear(b.width, c.query_rank, ("embed", None), rngs, bias=biased)
            self.query_latent_norm = RMSNorm(c.query_rank, EPS)
            self.query = Linear(c.query_rank, queries, ("embed", "heads"), rngs)
        else:
            self.query = Linear(b.width, queries, ("embed", "heads"), rngs, bias=biased)
        # The latent, then the key of positions.
        self.latent = Linear(
            b.width, c.key_rank + rotary, ("embed", None), rngs, bias="key" in b.biases
        )
        self.latent_norm = RMSNorm(c.key_rank, EPS)
        # Of each head the key, then the value.
        self.key_value = Linear(
            c.key_rank, b.heads * (plain + c.value_width), ("embed", "heads"), rngs
        )
        values = b.heads * c.value_width
        self.output = Linear(values, b.width, ("heads", "embed"), rngs, bias="output" in b.biases)
        self.widths = plain, c.value_width
        self.key_rank = c.key_rank
        self.has_query_latent = c.query_rank > 0
        self.heads = b.heads
        self.backend: Backend = b.backend
        self.scoring = b.scoring._replace(scale=b.scoring.scale or b.head_width**-0.5)
        self.window = b.window
        self.rope_neighbours = b.rope_neighbours
        self.has_rope = b.has_rope
        self.grows = b.grows

    def __call__(
        self, x: Float[Array, "b t d"], context: Context, past: KVCacheView | None = None
    ) -> tuple[Float[Array, "b t d"], KeyValue]:
        """Attend among the tokens, or the cache of `past` with them written in; return their latents too.

        In the cache the values are the latents, and the keys are those of positions, of one head.
        """
        if self.has_query_latent:
            query_latent, latent = apply_linears(x, self.query_down, self.latent)
            q = self.query(self.query_latent_norm(query_latent))
        else:
            q = self.query(x)
            latent = self.latent(x)
        plain, _ = self.widths
        q = q.reshape(*x.shape[:2], self.heads, q.shape[-1] // self.heads)
        q, q_rotary = q[..., :plain], q[..., plain:]
        key = latent[..., None, self.key_rank :]
        latent = self.latent_norm(latent[..., : self.key_rank])
        if context.rotation is not None and self.has_rope:
            q_rotary = rotate(q_rotary, context.rotation, self.rope_neighbours)
            key = rotate(key, context.rotation, self.rope_neighbours)
        if context.rotation is not None and self.grows:
            q, q_rotary = map(context.rotation.grown, (q, q_rotary))
        new = KeyValue(key, latent[:, :, None])
        if past is None:
            attn_out = self._attend(q, q_rotary, key, latent, context)
        else:
            attn_out = self._attend_latents(q, q_rotary, past, new, context)
        heads = attn_out.reshape(*x.shape[:2], self.heads * attn_out.shape[-1])
        return self.output(heads), new

    def _attend(
        self, q: Array, q_rotary: Array, key: Array, latent: Array, context: Context
    ) -> Float[Array, "b t n w"]:
        """Attend among the tokens, with keys and values of every head."""
        plain, _ = self.widths
        of_heads = self.key_value(latent)
        of_heads = of_heads.reshape(*q.shape[:3], of_heads.shape[-1] // self.heads)
        k, v = of_heads[..., :plain], of_heads[..., plain:]
        q = jnp.concatenate([q, q_rotary], axis=-1)
        k = jnp.concatenate([k, jnp.broadcast_to(key, q_rotary.shape)], axis=-1)
        heads = self.heads, self.heads
        max_block = block_limit(self.backend, self.window, q.shape[1], heads, q.dtype)
        return attention(q, k, v, context.mask, self.backend, self.scoring, context.plan, max_block)

    def _attend_latents(
        self, q: Array, q_rotary: Array, past: KVCacheView, new: KeyValue, context: Context
    ) -> Float[Array, "b t n w"]:
        """Attend a cache without making keys and values of it: queries and outputs go through the matrices instead.

        A score `q . (latent K)` is `(q K') . latent`, and a sum of values `w . (latents V)` is `(w . latents) V`.
        """
        plain, value_width = self.widths
        # The matrix with its adapter, in whatever form its weight is stored.
        matrix = self.key_value(jnp.eye(self.key_rank, dtype=q.dtype))
        matrix = matrix.reshape(self.key_rank, self.heads, plain + value_width)
        cache = past.cache.updated(new, past.column)
        q = jnp.einsum("btnh,rnh->btnr", q, matrix[..., :plain])
        out = dense_attention(
            jnp.concatenate([q, q_rotary], axis=-1),
            jnp.concatenate([cache.value, cache.key], axis=-1),
            cache.value,
            context.mask,
            past.mask,
            self.scoring,
        )
        return jnp.einsum("btnr,rnw->btnw", out, matrix[..., plain:])
