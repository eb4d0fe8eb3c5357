"""Decoding with a KV cache: `prefill` runs the prompts once, `step` adds one token per row.

All rows of a batch write their next token into the same column, behind the longest prompt that the batch has room for,
so nothing is scattered; the mask says which columns a row may attend. Masks, windows, caps and rotary positions are
those of the parallel forward pass.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.batch import PADDING, TextBatch
from mmjax.models.attention import MaskSpec
from mmjax.models.decoder import logits_of
from mmjax.models.layer_stacks import KVCache
from mmjax.models.layers import KVCacheView
from mmjax.models.multimodal import MultimodalModel

TEXT_KIND = 1  # generated tokens are text


class Cache(NamedTuple):
    """Decoding state of `B` rows in `C` columns: the prompts', then one for each token to be generated."""

    layers: KVCache  # of the LLM, in the activations' dtype
    mask: MaskSpec  # [B, C], of the columns still to be written as well
    position: Array  # int32 [B]: RoPE position of the next token
    column: Array  # int32 []: of the next token


def prefill(
    model: MultimodalModel, text: TextBatch, features: dict[str, Float[Array, "r m e"]], room: int
) -> tuple[Float[Array, "b v"], Cache]:
    """Run the prompts; return float32 logits of each row's next token, and a cache with `room` more columns.

    text: one prompt per row, from its first column on; a row without one is padding. features: as `encode` gives them.
    """
    prompt = text.sample >= 0
    length = prompt.sum(1, dtype=jnp.int32)
    x, add = model.embedded(text, features)
    x, layers = model.llm.layers.forward_with_kv(x, model.context("llm", text, None), add)
    last = jnp.take_along_axis(x, jnp.maximum(length - 1, 0)[:, None, None], axis=1)
    # Of a layer [B, S, heads, width], of a stack [layers, B, S, heads, width]: room goes behind the third last axis.
    grown = jax.tree.map(lambda kv: jnp.pad(kv, [(0, 0)] * (kv.ndim - 3) + [(0, room), (0, 0), (0, 0)]), layers)
    # With (t, y, x) positions, the next token follows the largest of all three, as in HF's Qwen-VL.
    rope_position = text.position if text.position.ndim == 2 else text.position.max(-1)
    next_position = 1 + jnp.max(jnp.where(prompt, rope_position, -1), axis=1)
    cache = Cache(grown, _cache_mask(text, prompt, length, room), next_position, jnp.int32(text.token.shape[1]))
    return _logits(model, last), cache


def step(model: MultimodalModel, token: Int[Array, " b"], cache: Cache) -> tuple[Float[Array, "b v"], Cache]:
    """Write one token per row into the cache and return float32 logits of the next."""
    query_mask = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, cache.column, 1, axis=1), cache.mask)
    position = cache.position[:, None]
    if sections := model.llm.config.rope_sections:
        position = jnp.broadcast_to(position[..., None], (*position.shape, len(sections)))
    x = model.llm.embedded(token[:, None])
    context = model.llm.context_of(query_mask, position)
    past = KVCacheView(cache.layers, cache.mask, cache.column)
    x, layers = model.llm.layers.forward_with_kv(x, context, past=past)
    return _logits(model, x), Cache(layers, cache.mask, cache.position + 1, cache.column + 1)


def _cache_mask(text: TextBatch, prompt: Bool[Array, "b s"], length: Int[Array, " b"], room: int) -> MaskSpec:
    """Build the mask of all columns: generated tokens are text, and see the kinds that the prompt's text sees."""

    def filled(value: Array | int) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (len(length), room))

    sees = jnp.bitwise_or.reduce(jnp.where(prompt, text.sees, 0), axis=1)
    new = MaskSpec(
        sample=filled(0),
        pos=length[:, None] + jnp.arange(room, dtype=jnp.int32),
        span=filled(0),
        kind=filled(TEXT_KIND),
        sees=filled(sees[:, None]),
    )
    old = MaskSpec(jnp.where(prompt, 0, PADDING), text.pos, text.span, text.kind, text.sees)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)


def _logits(model: MultimodalModel, x: Float[Array, "b 1 d"]) -> Float[Array, "b v"]:
    return logits_of(*model.llm.hidden_and_table(x), model.llm.config.logit_cap)[:, 0]
