"""One loss: weighted cross-entropy over all tokens of the step, divided by one global weight."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mmjax.batch import TextBatch
from mmjax.models.decoder import logits_of
from mmjax.parallel.sharding import cut_in_shards


class LossReport(NamedTuple):
    """Sums over one microbatch, to be added over the step's microbatches."""

    loss: jax.Array  # float32 [sources]: weighted loss of each source's tokens
    weight: jax.Array  # float32 [sources]


def token_losses(logits: jax.Array, text: TextBatch) -> jax.Array:
    """Weighted cross-entropy of each position, float32 `[R, T]`; exactly 0 where the weight is 0."""
    logits = logits.astype(jnp.float32)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    picked = _picked(logits, jnp.arange(logits.shape[-1]), text.target)
    return _weighted(log_sum, picked, text)


def losses_in_chunks(hidden: jax.Array, table: jax.Array, text: TextBatch, chunks: int, cap: float = 0.0) -> jax.Array:
    """`token_losses` of the scores of `hidden` and `table`, with the logits of one part of the vocabulary at a time.

    Parts of the vocabulary and not of the positions: each has a part of the table's gradient to itself, so no gradient
    is reduced over the devices more than once. Backward makes each part's logits again. `chunks` must divide a shard of
    the vocabulary. cap: of the logits.
    """
    if chunks == 1:
        return token_losses(logits_of(hidden, table, cap), text)
    # In float32 outside, so that the parts' gradients of the activations add up in float32.
    wide = hidden.astype(jnp.float32)

    # Inside a scan XLA cannot merge the recomputation with the original, so it needs no barrier against that.
    @partial(jax.checkpoint, prevent_cse=False)
    def of_part(wide: jax.Array, part: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(wide.astype(hidden.dtype), part, cap)
        return jax.nn.logsumexp(logits, axis=-1), _picked(logits, token, text.target)

    parts = cut_in_shards(table, chunks, "vocab", "embed"), cut_in_shards(jnp.arange(len(table)), chunks, "vocab")
    _, (log_sums, picked) = jax.lax.scan(lambda _, part: (None, of_part(wide, *part)), None, parts)
    return _weighted(jax.nn.logsumexp(log_sums, axis=0), picked.sum(0), text)


def _picked(logits: jax.Array, token: jax.Array, target: jax.Array) -> jax.Array:
    """The logit of each position's target, 0 where it is none of these tokens.

    By a product, which is fused with the logits' other uses. Gathering would need them all in memory, and the zeros of
    a selection are an array as large.
    """
    return (logits * (token == target[..., None])).sum(-1)


def _weighted(log_sum: jax.Array, picked: jax.Array, text: TextBatch) -> jax.Array:
    """Losses from the log-sum-exp of each position's logits and the logit of its target."""
    return jnp.where(text.weight > 0, text.weight * (log_sum - picked), 0.0)


def step_loss(losses: jax.Array, text: TextBatch, total_weight: Any, sources: int) -> tuple[jax.Array, LossReport]:
    """This microbatch's part of the step's loss: the sum of its tokens' losses / the weight of the whole step.

    `total_weight` is counted on the host over all microbatches and ranks; any split of the same rows gives one sum.
    """
    mine = (text.source[..., None] == jnp.arange(sources)).astype(jnp.float32)
    report = LossReport(jnp.einsum("rt,rts->s", losses, mine), jnp.einsum("rt,rts->s", text.weight, mine))
    return losses.sum() / total_weight, report
