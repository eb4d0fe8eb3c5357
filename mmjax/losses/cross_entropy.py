"""Compute the cross-entropy of tokens, with the logits of all at once or of one part after the other.

Parts are of the tokens where only the mean loss is differentiated and the mesh allows it
(`loss_parts_are_of_tokens`), and else of the vocabulary. Parts of the tokens make their gradients
in the forward pass, and so no logits twice, as Liger Kernel does (Hsu et al. 2024).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.batch import TextBatch
from mmjax.config import CrossEntropy
from mmjax.models.decoder import (
    hidden_gradient,
    logits_of,
    multiply_table,
    soft_cap,
    table_gradient,
)
from mmjax.models.matmul import on_one_cpu
from mmjax.parallel.sharding import (
    active,
    constrain,
    cut_in_shards,
    loss_parts_are_of_tokens,
    row_ranks,
)


def token_losses(logits: jax.Array, text: TextBatch, smoothing: float = 0.0) -> jax.Array:
    """Compute the weighted cross-entropy of each position, float32 `[R, T]`; exactly 0 where the weight is 0.

    smoothing: share of the target's probability that all tokens of the vocabulary get alike (label
    smoothing, Szegedy et al. 2016).
    """
    return _losses(logits.astype(jnp.float32), text.target, text.weight, smoothing)


def mean_loss(losses: jax.Array, total_weight: jax.Array) -> jax.Array:
    """Divide the sum of weighted losses by the weight of a whole step, which may have nothing but images to make."""
    return losses.sum() / jnp.where(total_weight > 0, total_weight, 1)


def mean_loss_in_chunks(
    hidden: jax.Array,
    table: jax.Array,
    text: TextBatch,
    total_weight: jax.Array,
    chunks: int,
    cap: float = 0.0,
    smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Compute `mean_loss` of `losses_in_chunks`, which alone has gradients, and these losses `[R, T]`.

    `chunks` are parts of the tokens where the mesh allows it: a part's gradients are made with its
    logits, those of the table added up over the parts in float32. Where nothing is differentiated,
    none are made. total_weight: over all microbatches and ranks of a step, so that any split of the
    same rows gives one loss.
    """
    current = active()
    gathers = current and not loss_parts_are_of_tokens(current.mesh.shape, CrossEntropy())
    if chunks == 1 or gathers:
        losses = losses_in_chunks(hidden, table, text, chunks, cap, smoothing)
        return mean_loss(losses, total_weight), jax.lax.stop_gradient(losses)
    # Cast outside, so that the sum of the parts' gradients is rounded to this precision, in which
    # devices reduce it.
    table = table.astype(hidden.dtype)
    ranks = 1 if current is None else row_ranks(current.mesh)
    if ranks > 1 and table.ndim == 2:
        # Each rank adds up a gradient of its own, and they are reduced once.
        copies = jnp.broadcast_to(table, (ranks, *table.shape))
        table = constrain(copies, "rows", "vocab", None)
    over_ranks = table.shape[:-2]  # () or (ranks,)

    def cut(x: jax.Array) -> jax.Array:
        # [R, T, ...] -> [chunks, *over_ranks, tokens, ...], the last parts filled up with zeros.
        x = x.reshape(*over_ranks, -1, *x.shape[2:])
        axis = len(over_ranks)
        padding = [(0, 0)] * x.ndim
        padding[axis] = 0, -x.shape[axis] % chunks
        x = jnp.pad(x, padding)
        return jnp.moveaxis(x.reshape(*over_ranks, chunks, -1, *x.shape[axis + 1 :]), axis, 0)

    parts = cut(hidden), cut(text.target), cut(text.weight)
    loss, losses = _loss_of_parts(*parts, table, total_weight, cap, smoothing)
    losses = jnp.moveaxis(losses, 0, -2).reshape(*over_ranks, -1)
    losses = losses[..., : text.target.size // math.prod(over_ranks)]
    return loss, jax.lax.stop_gradient(losses.reshape(text.target.shape))


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _loss_of_parts(
    hidden: jax.Array,
    target: jax.Array,
    weight: jax.Array,
    table: jax.Array,
    total_weight: jax.Array,
    cap: float,
    smoothing: float,
) -> tuple[jax.Array, jax.Array]:
    """Compute the mean loss of parts of the tokens, and the losses, `[chunks, ..., tokens]` as all but the table."""
    losses = jax.lax.map(
        lambda part: _losses(_lay_out(multiply_table(part[0], table), cap), *part[1:], smoothing),
        (hidden, target, weight),
    )
    return mean_loss(losses, total_weight), losses


def _loss_forward(
    hidden: Any,
    target: Any,
    weight: Any,
    table: Any,
    total_weight: Any,
    cap: float,
    smoothing: float,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    matrix = table.value
    d_losses = jax.grad(mean_loss)(weight.value[0], total_weight.value)

    def add_part(
        d_table: jax.Array | None, part: tuple[jax.Array, ...]
    ) -> tuple[jax.Array | None, tuple[jax.Array, jax.Array | None]]:
        x, target, weight = part
        losses, pull_back = jax.vjp(
            lambda products: _losses(_lay_out(products, cap), target, weight, smoothing),
            multiply_table(x, matrix),
        )
        (d_logits,) = pull_back(d_losses)
        # The logits' gradient is float32, and would make both products so.
        d_logits = d_logits.astype(x.dtype)
        if d_table is not None:
            d_table = _as_table(d_table + table_gradient(d_logits, x, matrix, jnp.float32))
        return d_table, (losses, hidden_gradient(d_logits, matrix) if hidden.perturbed else None)

    # A frozen table has no gradient.
    zeros = _as_table(jnp.zeros(matrix.shape, jnp.float32)) if table.perturbed else None
    parts = hidden.value, target.value, weight.value
    d_table, (losses, d_hidden) = jax.lax.scan(add_part, zeros, parts)
    return (mean_loss(losses, total_weight.value), losses), (d_hidden, d_table, matrix[:0])


def _loss_backward(
    cap: float, smoothing: float, residuals: Any, cotangents: tuple[jax.Array, Any]
) -> Any:
    d_hidden, d_table, no_table = residuals
    d_loss = cotangents[0]  # mostly 1; that of the losses is zero
    d_hidden, d_table = jax.tree.map(
        lambda x: (d_loss * x).astype(no_table.dtype), (d_hidden, d_table)
    )
    return d_hidden, None, None, d_table, None


_loss_of_parts.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def _lay_out(products: jax.Array, cap: float) -> jax.Array:
    """Lay out the logits `[tokens, V]` of a part of the tokens, or of one part for every rank, and cap them."""
    return soft_cap(constrain(products, *["rows"] * (products.ndim - 2), None, "vocab"), cap)


def _as_table(x: jax.Array) -> jax.Array:
    return constrain(x, *["rows"] * (x.ndim - 2), "vocab", None)


def losses_in_chunks(
    hidden: jax.Array,
    table: jax.Array,
    text: TextBatch,
    chunks: int,
    cap: float = 0.0,
    smoothing: float = 0.0,
) -> jax.Array:
    """Compute `token_losses` from `hidden` and `table`, with the logits of one part of the vocabulary at a time.

    Parts of the vocabulary and not of the positions: each has a part of the table's gradient to
    itself, so no gradient is reduced over the devices more than once. Backward makes each part's
    logits again. `chunks` must divide a shard of the vocabulary. cap: of the logits. A table `[p,
    v, d]` has a copy for every part of the rows, along `data`.
    """
    if chunks == 1:
        return token_losses(logits_of(hidden, table, cap), text, smoothing)
    # In float32 outside, so that the parts' gradients of the activations add up in float32.
    wide = hidden.astype(jnp.float32)

    # Inside a scan XLA cannot merge the recomputation with the original, so it needs no barrier
    # against that.
    @partial(jax.checkpoint, prevent_cse=False)
    def chunk_loss(
        wide: jax.Array, part: jax.Array, token: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(wide, part, cap, hidden.dtype)
        chosen = _aimed_logits(logits, token, text.target, smoothing, table.shape[-2])
        return jax.nn.logsumexp(logits, axis=-1), chosen

    def cut(table: jax.Array) -> jax.Array:
        return cut_in_shards(table, chunks, "vocab", "embed")

    # [V, D] -> [chunks, V / chunks, D], each chunk with a part of every device's shard, so that all
    # devices work on every chunk; the token ids [V] are cut alike.
    tables = (
        cut(table) if table.ndim == 2 else jax.vmap(cut, out_axes=1, spmd_axis_name="data")(table)
    )
    parts = tables, cut_in_shards(jnp.arange(table.shape[-2]), chunks, "vocab")
    _, (log_sums, aimed_logits) = jax.lax.scan(
        lambda _, part: (None, chunk_loss(wide, *part)), None, parts
    )
    # log_sums: [chunks, R, T]. A target's logit is in one chunk and 0 in all others.
    return _weighted(jax.nn.logsumexp(log_sums, axis=0), aimed_logits.sum(0), text.weight)


def _losses(logits: jax.Array, target: jax.Array, weight: jax.Array, smoothing: float) -> jax.Array:
    """Compute weighted losses of float32 logits of the whole vocabulary."""
    vocab = logits.shape[-1]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    aimed = _aimed_logits(logits, jnp.arange(vocab), target, smoothing, vocab)
    return _weighted(log_sum, aimed, weight)


def _aimed_logits(
    logits: jax.Array, token: jax.Array, target: jax.Array, smoothing: float, vocab: int
) -> jax.Array:
    """Return `_target_logits`, smoothed towards the mean of all logits of the vocabulary."""
    aimed = _target_logits(logits, token, target)
    return (1 - smoothing) * aimed + smoothing / vocab * logits.sum(-1) if smoothing else aimed


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


def _weighted(log_sum: jax.Array, aimed_logits: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute losses from the log-sum-exp of each position's logits and the `_aimed_logits`."""
    return jnp.where(weight > 0, weight * (log_sum - aimed_logits), 0.0)
