"""The text decoder: grouped-query attention, rotary positions, RMSNorm, SwiGLU, tied or untied output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax.batch import TextBatch
from mmjax.config import DecoderConfig
from mmjax.models.attention import MaskSpec
from mmjax.models.dropout import ATTENTION, MLP, drop
from mmjax.models.layer_runs import LayerRuns, Run
from mmjax.models.layers import Context, RMSNorm, SelfAttention, SwiGLU, rotation_1d
from mmjax.parallel.sharding import constrain


class TokenTable(nnx.Module):
    """One vector per token of the vocabulary: embeds tokens, and by `scores` rates them as the next one."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(table, axes=("vocab", "embed"))

    def embed(self, token: Int[Array, "r t"], dtype: jnp.dtype) -> Float[Array, "r t d"]:
        # Said before the lookup, or XLA replicates the looked-up rows of all ("Involuntary full rematerialization").
        table = constrain(self.weight[...].astype(dtype), "vocab", None)
        return constrain(table[token], "rows", "length", "width")


def scores(x: Float[Array, "r t d"], table: Float[Array, "v d"]) -> Float[Array, "r t v"]:
    """Float32 logits of all tokens of an output table, or of the part of one."""
    logits = jnp.einsum("rtd,vd->rtv", x, table.astype(x.dtype), preferred_element_type=jnp.float32)
    return constrain(logits, "rows", "length", "vocab")


class DecoderLayer(nnx.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = config
        self.attention_norm = RMSNorm(c.width, c.norm_eps)
        self.attention = SelfAttention(c.width, c.heads, c.kv_heads, c.head_width, c.attention, rngs)
        self.mlp_norm = RMSNorm(c.width, c.norm_eps)
        self.mlp = SwiGLU(c.width, c.mlp_width, rngs)

    def __call__(self, x: Float[Array, "r t d"], context: Context) -> Float[Array, "r t d"]:
        x = x + drop(self.attention(self.attention_norm(x), context), context.dropout, ATTENTION)
        x = checkpoint_name(x, "mlp_input")
        return x + drop(self.mlp(self.mlp_norm(x)), context.dropout, MLP)


class DecoderHead(nnx.Module):
    """The final norm, and the output table if it is not the input's."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.table = None if config.tied else TokenTable(config.vocab, config.width, rngs)


class Decoder(nnx.Module):
    """embed -> layers -> head."""

    def __init__(self, config: DecoderConfig, plan: tuple[Run, ...], dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embed = TokenTable(config.vocab, config.width, rngs)
        self.layers = LayerRuns(lambda rngs: DecoderLayer(config, rngs), plan, rngs)
        self.head = DecoderHead(config, rngs)
        self.head_width = config.head_width
        self.rope_theta = config.rope_theta
        self.dropout = config.dropout
        self.dtype = dtype

    def embedded(self, token: Int[Array, "r t"]) -> Float[Array, "r t d"]:
        return self.embed.embed(token, self.dtype)

    def context(self, text: TextBatch) -> Context:
        """The mask and the rotary angles of a batch."""
        mask = MaskSpec(text.sample, text.pos, text.span, text.kind, text.sees)
        return Context(mask, rotation_1d(text.position, self.head_width, self.rope_theta))

    def origin(self, text: TextBatch) -> tuple[Int[Array, "r t"], Int[Array, "r t"]]:
        """The sample of every position and its index there."""
        return text.owner, text.offset

    def hidden_and_table(self, x: Float[Array, "r t d"]) -> tuple[Float[Array, "r t d"], Float[Array, "v d"]]:
        """What logits are the scores of: activations after the final norm, and the output table as it is stored."""
        table = self.embed if self.head.table is None else self.head.table
        return self.head.norm(x), table.weight[...]

    def logits(self, x: Float[Array, "r t d"]) -> Float[Array, "r t v"]:
        """Scores of the next token, float32."""
        return scores(*self.hidden_and_table(x))
