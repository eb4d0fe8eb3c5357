"""The loss of each sample, inside the step: sums over its tokens, which stand side by side in one row.

Nothing is computed twice for it: the losses of the tokens are there. A step keeps the worst of all its ranks' rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mmjax.batch import TextBatch
from mmjax.models.decoder import logits_of
from mmjax.parallel.sharding import active, cut_in_shards


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
    """The logit of each position's target, 0 where it is none of these tokens."""
    # By a product, which is fused with the logits' other uses. Gathering would need them all in memory, and the zeros
    # of a selection are an array as large.
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


MOST_NAMED = 32  # samples of a step


class Worst(NamedTuple):
    """The samples of a step with the highest losses, in order. Zeros where there are not so many."""

    sample: jax.Array  # int32 [MOST_NAMED]: ids in the length index
    loss: jax.Array  # float32 [MOST_NAMED]: mean over the sample's weighted tokens, Inf where it is not finite
    not_finite: jax.Array  # int32 []: how many samples' losses are not


def no_samples() -> Worst:
    """Make the initial accumulator of `worse_of`."""
    return Worst(jnp.zeros(MOST_NAMED, jnp.int32), jnp.zeros(MOST_NAMED), jnp.zeros((), jnp.int32))


def worst_samples(losses: jax.Array, text: TextBatch) -> Worst:
    """The worst samples of a microbatch, by its tokens' weighted losses `[R, T]`."""
    # Each rank names the worst of its own rows, and only these are compared over the ranks: the same for any mesh,
    # since of equal losses the first counts both times.
    rows = (losses, text.weight, text.sample, text.owner)
    on = active()
    if on is None:
        return _worst_of_rows(*rows)
    over = PartitionSpec(on.rules.rows)

    def of_rank(*rows: jax.Array) -> Worst:
        return jax.tree.map(lambda x: x[None], _worst_of_rows(*rows))

    ranks = jax.shard_map(of_rank, mesh=on.mesh, in_specs=over, out_specs=over, check_vma=False)(*rows)
    return _most(ranks.loss.reshape(-1), ranks.sample.reshape(-1), ranks.not_finite.sum(dtype=jnp.int32))


def _worst_of_rows(losses: jax.Array, weights: jax.Array, sample: jax.Array, owner: jax.Array) -> Worst:
    """The worst samples of these rows. sample: numbers in the row, owner: ids in the length index; all `[R, T]`."""
    loss, weight = _totals(losses, weights, sample)
    last = jnp.concatenate([sample[:, 1:] != sample[:, :-1], jnp.ones_like(sample[:, :1], bool)], 1)
    counts = last & (sample >= 0) & (weight > 0)
    mean = jnp.where(counts, loss / weight, 0.0)
    mean = jnp.where(jnp.isfinite(mean), mean, jnp.inf)
    return _most(mean.reshape(-1), owner.reshape(-1), (mean == jnp.inf).sum(dtype=jnp.int32))


def worse_of(a: Worst, b: Worst) -> Worst:
    """The worst samples of both."""
    loss, sample = jnp.concatenate([a.loss, b.loss]), jnp.concatenate([a.sample, b.sample])
    return _most(loss, sample, a.not_finite + b.not_finite)


def _most(loss: jax.Array, sample: jax.Array, not_finite: jax.Array) -> Worst:
    missing = max(0, MOST_NAMED - len(loss))
    loss, order = jax.lax.top_k(jnp.pad(loss, (0, missing)), MOST_NAMED)
    return Worst(jnp.where(loss > 0, jnp.pad(sample, (0, missing))[order], 0), loss, not_finite)


def _totals(losses: jax.Array, weights: jax.Array, sample: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums from each sample's first token up to every position `[R, T]`: at its last, they are the sample's."""
    # A scan, by which NaN does not pass from one sample to the next.
    begins = jnp.concatenate([jnp.ones_like(sample[:, :1], bool), sample[:, 1:] != sample[:, :-1]], axis=1)

    def joined(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return a[0] | b[0], *(jnp.where(b[0], y, x + y) for x, y in zip(a[1:], b[1:], strict=True))

    _, loss, weight = jax.lax.associative_scan(joined, (begins, losses, weights), axis=1)
    return loss, weight
