"""The text decoder: grouped-query attention, rotary positions, RMSNorm, a gated MLP, tied or untied output."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.batch import TextBatch
from mmjax.config import DecoderConfig
from mmjax.models.attention import MaskSpec, Scoring
from mmjax.models.layer_runs import LayerRuns, Run
from mmjax.models.layers import Block, Context, RMSNorm, TransformerLayer
from mmjax.models.rope import text_rotation
from mmjax.parallel.sharding import constrain

ALL = 2**30  # tokens back: more than any row has


class TokenTable(nnx.Module):
    """One vector per token of the vocabulary: embeds tokens, and by `scores` rates them as the next one."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(table, axes=("vocab", "embed"))

    def embed(self, token: Int[Array, "r t"], dtype: jnp.dtype) -> Float[Array, "r t d"]:
        # Said before the lookup, or XLA replicates the looked-up rows of all ("Involuntary full rematerialization").
        table = constrain(self.weight[...].astype(dtype), "vocab", None)
        return constrain(table[token], "rows", "length", "width")


def scores(x: Float[Array, "r t d"], table: Float[Array, "v d"], cap: float = 0.0) -> Float[Array, "r t v"]:
    """Float32 logits of all tokens of an output table, or of the part of one; bent by tanh to stay below a cap."""
    logits = jnp.einsum("rtd,vd->rtv", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
    logits = constrain(logits, "rows", "length", "vocab")
    return jnp.tanh(logits / cap) * cap if cap else logits


def decoder_block(config: DecoderConfig) -> Block:
    """What a decoder's layers are made of."""
    c = config
    return Block(
        width=c.width,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_width=c.head_width,
        mlp_width=c.mlp_width,
        backend=c.attention,
        norm=partial(RMSNorm, eps=c.norm_eps, offset=c.norm_offset),
        activation=c.activation,
        gated=True,
        biases=c.biases,
        head_norm=partial(RMSNorm, eps=c.norm_eps, offset=c.norm_offset) if c.qk_norm == "head" else None,
        post_norms=c.post_norms,
        scoring=Scoring(c.attention_scale, c.attention_cap),
    )


class DecoderHead(nnx.Module):
    """The final norm, and the output table if it is not the input's."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.width, config.norm_eps, config.norm_offset)
        self.table = None if config.tied else TokenTable(config.vocab, config.width, rngs)


class Decoder(nnx.Module):
    """embed -> layers -> head."""

    def __init__(self, config: DecoderConfig, plan: tuple[Run, ...], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embed = TokenTable(config.vocab, config.width, rngs)
        block = decoder_block(config)
        self.layers = LayerRuns(lambda rngs: TransformerLayer(block, rngs), plan, rngs, config.windowed)
        self.head = DecoderHead(config, rngs)
        self.config = config
        self.dropout = config.dropout
        self.dtype = dtype

    def embedded(self, token: Int[Array, "r t"]) -> Float[Array, "r t d"]:
        x, scale = self.embed.embed(token, self.dtype), self.config.embedding_scale
        return x if scale == 1 else x * jnp.asarray(scale, self.dtype)

    def context(self, text: TextBatch) -> Context:
        """The masks and the rotary angles of a batch."""
        return self.context_of(MaskSpec(text.sample, text.pos, text.span, text.kind, text.sees), text.position)

    def context_of(self, mask: MaskSpec, position: Int[Array, "b t *n"]) -> Context:
        """The masks and the rotary angles of tokens with this mask, at these RoPE positions."""
        rotation = text_rotation(self.config, position, mask.sample)
        if not self.config.windowed:
            return Context(mask, rotation)
        near = mask._replace(reach=jnp.full_like(mask.pos, self.config.window))
        return Context(mask._replace(reach=jnp.full_like(mask.pos, ALL)), rotation, near=near)

    def origin(self, text: TextBatch) -> tuple[Int[Array, "r t"], Int[Array, "r t"]]:
        """The sample of every position and its index there."""
        return text.owner, text.offset

    def hidden_and_table(self, x: Float[Array, "r t d"]) -> tuple[Float[Array, "r t d"], Float[Array, "v d"]]:
        """What logits are the scores of: activations after the final norm, and the output table as it is stored."""
        table = self.embed if self.head.table is None else self.head.table
        return self.head.norm(x), table.weight[...]

    def logits(self, x: Float[Array, "r t d"]) -> Float[Array, "r t v"]:
        """Scores of the next token, float32."""
        return scores(*self.hidden_and_table(x), self.config.logit_cap)
