"""Text token by token: the prompt's keys and values are made once and kept, and every new token attends them.

All rows of a batch write their next token into the same column, behind the longest prompt that the batch has room for,
so nothing is scattered; who stands where, and so who sees whom, is said by the mask. Attention, masks, windows, caps
and rotary positions are those of the parallel forward.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mmjax.batch import PADDING, TextBatch
from mmjax.models.attention import MaskSpec
from mmjax.models.decoder import scores
from mmjax.models.layer_runs import Kept
from mmjax.models.multimodal import MultimodalModel

TEXT_KIND = 1  # what is written is text


class Cache(NamedTuple):
    """What is kept of `B` rows' tokens, in `C` columns: the prompts', then one for each token that is to come."""

    layers: Kept  # of the LLM, in the activations' dtype
    mask: MaskSpec  # [B, C]: who stands in each column, those to come among them
    position: Array  # int32 [B]: RoPE position of the next token
    column: Array  # int32 []: of the next token


def prefill(
    model: MultimodalModel, text: TextBatch, features: dict[str, Float[Array, "r m e"]], room: int
) -> tuple[Float[Array, "b v"], Cache]:
    """Float32 logits of the token after each row's prompt, and a cache with room for so many more.

    text: one prompt a row, from its first column on; a row without one is padding. features: as `encode` gives them.
    """
    prompt = text.sample >= 0
    length = prompt.sum(1, dtype=jnp.int32)
    x, add = model.embedded(text, features)
    x, layers = model.llm.layers.kept(x, model.context("llm", text, None), add)
    last = jnp.take_along_axis(x, jnp.maximum(length - 1, 0)[:, None, None], axis=1)
    more = lambda kept: jnp.pad(kept, [(0, 0)] * (kept.ndim - 3) + [(0, room), (0, 0), (0, 0)])  # noqa: E731
    where = text.position if text.position.ndim == 2 else text.position.max(-1)
    position = 1 + jnp.max(jnp.where(prompt, where, -1), axis=1)
    cache = Cache(
        jax.tree.map(more, layers), _mask(text, prompt, length, room), position, jnp.int32(text.token.shape[1])
    )
    return _logits(model, last), cache


def step(model: MultimodalModel, token: Int[Array, " b"], cache: Cache) -> tuple[Float[Array, "b v"], Cache]:
    """Float32 logits of the token after this one of each row, which is written into the cache."""
    here = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, cache.column, 1, axis=1), cache.mask)
    position = cache.position[:, None]
    if sections := model.llm.config.rope_sections:
        position = jnp.broadcast_to(position[..., None], (*position.shape, len(sections)))
    x = model.llm.embedded(token[:, None])
    context = model.llm.context_of(here, position)
    x, layers = model.llm.layers.after(x, context, cache.layers, cache.mask, cache.column)
    return _logits(model, x), Cache(layers, cache.mask, cache.position + 1, cache.column + 1)


def _mask(text: TextBatch, prompt: Bool[Array, "b s"], length: Int[Array, " b"], room: int) -> MaskSpec:
    """The prompts' columns, and behind them those of tokens to come: text, which sees what the prompt's text does."""
    come = jnp.arange(room, dtype=jnp.int32)
    sees = jnp.bitwise_or.reduce(jnp.where(prompt, text.sees, 0), axis=1)
    full = lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.int32), (len(length), room))  # noqa: E731
    later = MaskSpec(full(0), length[:, None] + come, full(0), full(TEXT_KIND), full(sees[:, None]))
    first = MaskSpec(jnp.where(prompt, 0, PADDING), text.pos, text.span, text.kind, text.sees)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, later)


def _logits(model: MultimodalModel, x: Float[Array, "b 1 d"]) -> Float[Array, "b v"]:
    return scores(*model.llm.hidden_and_table(x), model.llm.config.logit_cap)[:, 0]
