"""One loss: weighted cross-entropy over all tokens of the step, divided by one global weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mmjax.batch import TextBatch


class LossReport(NamedTuple):
    """Sums over one microbatch, to be added over the step's microbatches."""

    loss: jax.Array  # float32 [sources]: weighted loss of each source's tokens
    weight: jax.Array  # float32 [sources]


def token_losses(logits: jax.Array, text: TextBatch) -> jax.Array:
    """Weighted cross-entropy of each position, float32 `[R, T]`; exactly 0 where the weight is 0."""
    logits = logits.astype(jnp.float32)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, text.target[..., None], axis=-1)[..., 0]
    return jnp.where(text.weight > 0, text.weight * (log_sum - picked), 0.0)


def step_loss(logits: jax.Array, text: TextBatch, total_weight: Any, sources: int) -> tuple[jax.Array, LossReport]:
    """This microbatch's part of the step's loss: its weighted sum / the weight of the whole step.

    `total_weight` is counted on the host over all microbatches and ranks; any split of the same rows gives one sum.
    """
    losses = token_losses(logits, text)
    mine = (text.source[..., None] == jnp.arange(sources)).astype(jnp.float32)
    report = LossReport(jnp.einsum("rt,rts->s", losses, mine), jnp.einsum("rt,rts->s", text.weight, mine))
    return losses.sum() / total_weight, report
