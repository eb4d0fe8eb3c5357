"""Compute the cross-entropy of tokens, with the logits of the whole vocabulary or of one part after the other."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from mmjax.batch import TextBatch
from mmjax.models.decoder import logits_of
from mmjax.models.matmul import on_one_cpu
from mmjax.parallel.sharding import cut_in_shards


def token_losses(logits: jax.Array, text: TextBatch) -> jax.Array:
    """Compute the weighted cross-entropy of each position, float32 `[R, T]`; exactly 0 where the weight is 0."""
    logits = logits.astype(jnp.float32)
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    target_logits = _target_logits(logits, jnp.arange(logits.shape[-1]), text.target)
    return _weighted(log_sum, target_logits, text)


def losses_in_chunks(
    hidden: jax.Array, table: jax.Array, text: TextBatch, chunks: int, cap: float = 0.0
) -> jax.Array:
    """Compute `token_losses` from `hidden` and `table`, with the logits of one part of the vocabulary at a time.

    Parts of the vocabulary and not of the positions: each has a part of the table's gradient to
    itself, so no gradient is reduced over the devices more than once. Backward makes each part's
    logits again. `chunks` must divide a shard of the vocabulary. cap: of the logits. A table `[p,
    v, d]` has a copy for every part of the rows, along `data`.
    """
    if chunks == 1:
        return token_losses(logits_of(hidden, table, cap), text)
    # In float32 outside, so that the parts' gradients of the activations add up in float32.
    wide = hidden.astype(jnp.float32)

    # Inside a scan XLA cannot merge the recomputation with the original, so it needs no barrier
    # against that.
    @partial(jax.checkpoint, prevent_cse=False)
    def chunk_loss(
        wide: jax.Array, part: jax.Array, token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(wide, part, cap, hidden.dtype)
        return jax.nn.logsumexp(logits, axis=-1), _target_logits(logits, token, text.target)

    def cut(table: jax.Array) -> jax.Array:
        return cut_in_shards(table, chunks, "vocab", "embed")

    # [V, D] -> [chunks, V / chunks, D], each chunk with a part of every device's shard, so that all
    # devices work on every chunk; the token ids [V] are cut alike.
    tables = (
        cut(table) if table.ndim == 2 else jax.vmap(cut, out_axes=1, spmd_axis_name="data")(table)
    )
    parts = tables, cut_in_shards(jnp.arange(table.shape[-2]), chunks, "vocab")
    _, (log_sums, target_logits) = jax.lax.scan(
        lambda _, part: (None, chunk_loss(wide, *part)), None, parts
    )
    # log_sums: [chunks, R, T]. A target's logit is in one chunk and 0 in all others.
    return _weighted(jax.nn.logsumexp(log_sums, axis=0), target_logits.sum(0), text)


def _target_logits(logits: jax.Array, token: jax.Array, target: jax.Array) -> jax.Array:
    """Return the logit of each position's target; 0 where it is none of `token`, a range of consecutive ids."""
    if on_one_cpu():
        return _gathered_logits(logits, token, target)
    # By a product, which is fused with the logits' other uses. Gathering would need them all in
    # memory, and the zeros of a selection are an array as large.
    return (logits * (token == target[..., None])).sum(-1)


@jax.custom_vjp
def _gathered_logits(logits: jax.Array, token: jax.Array, target: jax.Array) -> jax.Array:
    """Compute `_target_logits` by a gather; the gradient is a selection, fused with that of the log-sum-exp."""
    index = target - token[0]  # of tokens 4..7, target 6 is number 2, and 9 is not among them
    in_chunk = (index >= 0) & (index < len(token))
    values = jnp.take_along_axis(logits, jnp.where(in_chunk, index, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(in_chunk, values, 0)


def _gathered_logits_backward(
    residuals: tuple[jax.Array, jax.Array], d_values: jax.Array
) -> tuple[jax.Array, None, None]:
    token, target = residuals
    return jnp.where(token == target[..., None], d_values[..., None], 0), None, None


_gathered_logits.defvjp(
    lambda logits, token, target: (_gathered_logits(logits, token, target), (token, target)),
    _gathered_logits_backward,
)


def _weighted(log_sum: jax.Array, target_logits: jax.Array, text: TextBatch) -> jax.Array:
    """Compute losses from the log-sum-exp of each position's logits and the logit of its target."""
    return jnp.where(text.weight > 0, text.weight * (log_sum - target_logits), 0.0)
