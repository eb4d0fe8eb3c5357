"""Greedy decoding of packed prompts, all of a batch at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mmjax.batch import Microbatch
from mmjax.models.model import Model

Params = dict[str, Any]


def greedy(model: Model, params: Params, batch: Microbatch) -> jax.Array:
    """Tokens int32 `[R, T]` with every answer written in: the positions with a loss weight predict it.

    Repeats one parallel pass in which every position writes its most likely next token, until nothing changes.
    Attention is causal, so pass k makes the k-th answer token final: the fixed point is exactly what decoding token by
    token gives.
    """
    features = model.encode(params, batch.items)
    text = batch.text
    writes = jnp.pad(text.weight[:, :-1] > 0, ((0, 0), (1, 0)))  # the token after a weighted position

    def passes(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, _ = carry
        best = jnp.argmax(model.decode(params, text._replace(token=tokens), features), axis=-1).astype(jnp.int32)
        written = jnp.where(writes, jnp.pad(best[:, :-1], ((0, 0), (1, 0))), tokens)
        return written, jnp.any(written != tokens)

    return jax.lax.while_loop(lambda carry: carry[1], passes, (text.token, jnp.bool_(True)))[0]
