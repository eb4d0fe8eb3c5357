"""Attention under a mask spec as XLA operations: with all scores at once, and block by block."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from mmjax.batch import MaskSpec, allowed
from mmjax.kernels.masks import BlockLists, block_pairs
from mmjax.kernels.tiles import MAX_BLOCK
from mmjax.models.matmul import as_matrix


class Scoring(NamedTuple):
    """Scale and soft cap of attention scores; Python numbers, so that they may be static arguments."""

    scale: float = 0.0  # factor of q . k; 0 = head width ** -0.5
    cap: float = 0.0  # soft cap, `cap * tanh(score / cap)`; 0 = none

    def scores(self, products: Array, head_width: int) -> Array:
        """Scale and cap the dot products of queries and keys."""
        # Scaled before the cap, as Gemma 2 does.
        scores = products * (self.scale or head_width**-0.5)
        return jnp.tanh(scores / self.cap) * self.cap if self.cap else scores

    def derivative(self, scores: Array, head_width: int) -> Array | float:
        """Compute d score / d product at these (capped) scores."""
        # d tanh(x) / dx = 1 - tanh(x)^2, and score / cap is that tanh.
        through_cap = 1 - jnp.square(scores / self.cap) if self.cap else 1.0
        return through_cap * (self.scale or head_width**-0.5)


DEFAULT_SCORING = Scoring()


def dense_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m w"],
    q_mask: MaskSpec,
    k_mask: MaskSpec,
    scoring: Scoring = DEFAULT_SCORING,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b t n w"]:
    """Compute attention with all scores at once: the reference, and the fastest for short rows.

    sinks: a score of each head that takes part in the softmax, and has no value.
    """
    b, t, n, h = q.shape
    m, w = v.shape[2:]
    # b = row, t and s = query and key token, m = key-value head, g = query head of its group, h =
    # channel, w = channel of values.
    grouped = q.reshape(b, t, m, n // m, h)
    products = jnp.einsum("btmgh,bsmh->bmgts", grouped, k, preferred_element_type=jnp.float32)
    scores = _masked(scoring.scores(products, h), q_mask, k_mask)
    # The softmax does not change with what is subtracted, so its gradient need not go through the
    # maximum.
    row_max = jax.lax.stop_gradient(_finite(jnp.max(scores, axis=-1, keepdims=True)))
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(m, n // m, 1, 1)
        row_max = jnp.maximum(row_max, jax.lax.stop_gradient(sink))
    weights = jnp.exp(scores - row_max)
    # A query that attends nothing has weights and total 0: dividing by 1 instead makes its output
    # 0, not NaN.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - row_max)
    out = jnp.einsum(
        "bmgts,bsmw->bmgtw", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    out = jnp.einsum("bmgtw->btmgw", out / jnp.where(total == 0, 1, total)).reshape(b, t, n, w)
    return checkpoint_name(out.astype(q.dtype), "attention_output")


def blockwise_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m w"],
    q_mask: MaskSpec,
    k_mask: MaskSpec,
    block: int = MAX_BLOCK,
    scoring: Scoring = DEFAULT_SCORING,
) -> Float[Array, "b t n w"]:
    """Compute the same values as `dense_attention` block by block, visiting only pairs of blocks with allowed pairs.

    FlashAttention's recomputation (Dao et al. 2022): the backward pass gets the output and one
    float per query and head, and recomputes the scores. Any `t` and `s`: the last blocks are padded
    inside.
    """
    arrays = _to_blocks(q, k, v, q_mask, k_mask, block)
    return _from_query_blocks(_flash(*arrays, scoring), q.shape[1])


def blockwise_forward(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m w"],
    q_mask: MaskSpec,
    k_mask: MaskSpec,
    block: int = MAX_BLOCK,
    scoring: Scoring = DEFAULT_SCORING,
) -> tuple[Float[Array, "b t n w"], Float[Array, "b n t"]]:
    """Compute the float32 output of `blockwise_attention`, and the log-sum-exp of scores (-inf: attends nothing)."""
    out, lse = _forward(*_to_blocks(q, k, v, q_mask, k_mask, block), scoring)
    lse = _from_query_blocks(lse[..., None], q.shape[1])[..., 0]
    return _from_query_blocks(out, q.shape[1]), lse.swapaxes(1, 2)


def blockwise_gradients(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m w"],
    q_mask: MaskSpec,
    k_mask: MaskSpec,
    block: int,
    scoring: Scoring,
    d_out: Float[Array, "b t n w"],
    lse: Float[Array, "b n t"],
    delta: Float[Array, "b n t"],
) -> tuple[Float[Array, "b t n h"], Float[Array, "b s m h"], Float[Array, "b s m w"]]:
    """Compute what these keys contribute to the gradients of q, k and v, float32.

    lse: of the scores over all keys that the queries attend. delta: sum over channels of output *
    its gradient.
    """
    heads = k.shape[2]
    q_size = min(block, q.shape[1])
    d_out = _query_blocks(d_out, q_size, heads)
    lse, delta = (
        _query_blocks(x.swapaxes(1, 2)[..., None], q_size, heads)[..., 0] for x in (lse, delta)
    )
    blocks = _to_blocks(q, k, v, q_mask, k_mask, block)
    d_q, d_k, d_v = _gradients(*blocks, scoring, d_out, lse, delta)
    return (
        _from_query_blocks(d_q, q.shape[1]),
        _from_key_blocks(d_k, k.shape[1]),
        _from_key_blocks(d_v, k.shape[1]),
    )


def _finite(x: Array) -> Array:
    """Replace -inf, the maximum or log-sum-exp of a query that attends nothing, by 0: -inf - -inf would be NaN."""
    return jnp.where(x == -jnp.inf, 0, x)


def _blocks(x: Array, size: int, fill: int = 0) -> Array:
    """Reshape `[B, T, ...]` to `[blocks, B, size, ...]`, the last block filled up."""
    b, t = x.shape[:2]
    count = -(-t // size)  # 300 tokens fill 3 blocks of 128, the last with 84 more of padding
    x = jnp.pad(x, ((0, 0), (0, count * size - t)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    return jnp.moveaxis(x.reshape(b, count, size, *x.shape[2:]), 1, 0)


def _query_blocks(x: Array, size: int, kv_heads: int) -> Float[Array, "c b m g q h"]:
    """Cut `[B, T, N, H]` into blocks of queries, heads grouped by the key-value head that they share."""
    b, _, n, h = x.shape
    return jnp.einsum(
        "cbqmgh->cbmgqh", _blocks(x, size).reshape(-1, b, size, kv_heads, n // kv_heads, h)
    )


def _from_query_blocks(x: Float[Array, "c b m g q h"], length: int) -> Float[Array, "b t n h"]:
    c, b, m, g, q, h = x.shape
    return jnp.einsum("cbmgqh->bcqmgh", x).reshape(b, c * q, m * g, h)[:, :length]


def _from_key_blocks(x: Float[Array, "c b m s h"], length: int) -> Float[Array, "b t m h"]:
    c, b, m, s, h = x.shape
    return jnp.einsum("cbmsh->bcsmh", x).reshape(b, c * s, m, h)[:, :length]


def _to_blocks(
    q: Array, k: Array, v: Array, q_mask: MaskSpec, k_mask: MaskSpec, block: int
) -> tuple[Array, Array, Array, MaskSpec, MaskSpec]:
    """Cut the inputs of attention into blocks of at most `block` queries, and of as many keys."""
    q_size, k_size = min(block, q.shape[1]), min(block, k.shape[1])
    # c = block; the other letters as in `dense_attention`, with q for the query tokens of a block.
    # The block comes first, as the axis that `lax.map` and `lax.scan` go along.
    keys, values = (jnp.einsum("cbsmh->cbmsh", _blocks(x, k_size)) for x in (k, v))
    return (
        _query_blocks(q, q_size, k.shape[2]),
        keys,
        values,
        _mask_blocks(q_mask, q_size),
        _mask_blocks(k_mask, k_size),
    )


def _mask_blocks(mask: MaskSpec, size: int) -> MaskSpec:
    """Apply `_blocks` to every field; what fills the last block up is padding."""
    return jax.tree.map(lambda x: _blocks(x, size), mask)._replace(
        sample=_blocks(mask.sample, size, fill=-1)
    )


def _live_blocks(q: MaskSpec, k: MaskSpec) -> Bool[Array, "q k"]:
    """Find the pairs of blocks (`_mask_blocks`) that may hold an allowed pair in some row."""

    def rows(mask: MaskSpec) -> MaskSpec:
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1), mask)

    return block_pairs(rows(q), rows(k), q.pos.shape[-1], k.pos.shape[-1])[1].any(0)


def _visits(live: Bool[Array, "x y"]) -> tuple[Int[Array, "x y"], Int[Array, " x"]]:
    """List, for every block on axis 0, its live partners first, and count them.

    [[F, T, T], [T, F, F]] gives the order [[1, 2, 0], [0, 1, 2]] and the counts [2, 1].
    """
    lists = BlockLists.of(jnp.zeros_like(live), live)
    return lists.order, lists.count[:, 1]


def _scores(q: Array, k: Array, scoring: Scoring) -> Float[Array, "b m g q s"]:
    """Compute the scores of one pair of blocks, before masking."""
    return scoring.scores(
        jnp.einsum("bmgqh,bmsh->bmgqs", q, k, preferred_element_type=jnp.float32), q.shape[-1]
    )


def _masked(
    scores: Float[Array, "b m g q s"], q_mask: MaskSpec, k_mask: MaskSpec
) -> Float[Array, "b m g q s"]:
    """Set the scores of pairs that are not allowed to -inf."""
    return jnp.where(allowed(q_mask, k_mask)[:, None, None], scores, -jnp.inf)


# Traced once for arrays of these shapes, though every layer and both passes ask for it; a program
# gets its equations.
@partial(jax.jit, static_argnums=5, inline=True)
def _forward(
    q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring
) -> tuple[Array, Array]:
    """Run the online softmax: float32 output as wide as `v`, and log-sum-exp `[blocks, B, M, G, q]`, or -inf."""
    order, count = _visits(_live_blocks(q_masks, k_masks))

    def one_block(
        q_i: Array, q_mask: MaskSpec, order_i: Array, count_i: Array
    ) -> tuple[Array, Array]:
        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            row_max, total, out = carry
            j = order_i[step]
            scores = _masked(
                _scores(q_i, k[j], scoring), q_mask, jax.tree.map(lambda x: x[j], k_masks)
            )
            new_max = jnp.maximum(row_max, scores.max(-1))
            base = _finite(new_max)
            weights = jnp.exp(scores - base[..., None])
            # What was summed so far is relative to the old maximum.
            rescale = jnp.exp(row_max - base)
            values = jnp.einsum(
                "bmgqs,bmsh->bmgqh",
                weights.astype(v.dtype),
                v[j],
                preferred_element_type=jnp.float32,
            )
            return new_max, total * rescale + weights.sum(-1), out * rescale[..., None] + values

        row_max = jnp.full(q_i.shape[:-1], -jnp.inf, jnp.float32)
        start = (
            row_max,
            jnp.zeros_like(row_max),
            jnp.zeros((*row_max.shape, v.shape[-1]), jnp.float32),
        )
        row_max, total, out = jax.lax.fori_loop(0, count_i, visit, start)
        out = out / jnp.where(total == 0, 1, total)[..., None]
        return out, _finite(row_max) + jnp.log(total)

    # One block of queries after the other, so that only the scores of one pair of blocks exist at a
    # time.
    return jax.lax.map(lambda xs: one_block(*xs), (q, q_masks, order, count))


@partial(jax.jit, static_argnums=5, inline=True)
def _gradients(
    q: Array,
    k: Array,
    v: Array,
    q_masks: MaskSpec,
    k_masks: MaskSpec,
    scoring: Scoring,
    d_out: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array]:
    """Compute float32 gradients of q, k and v, recomputing scores: per block of keys, over the blocks that see it."""
    # Transposed: for every block of keys, the blocks of queries that see some of them.
    order, count = _visits(_live_blocks(q_masks, k_masks).T)
    lse = _finite(lse)  # where a query attends nothing, every weight is exp(-inf) = 0 all the same
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one_block(
        d_q: Array, xs: tuple[Array | MaskSpec, ...]
    ) -> tuple[Array, tuple[Array, Array]]:
        k_j, v_j, k_mask, order_j, count_j = xs

        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            i = order_j[step]
            scores = _scores(q[i], k_j, scoring)
            weights = jnp.exp(
                _masked(scores, jax.tree.map(lambda x: x[i], q_masks), k_mask) - lse[i][..., None]
            )
            d_v = d_v + product("bmgqs,bmgqh->bmsh", weights.astype(v.dtype), d_out[i])
            d_weights = product("bmgqh,bmsh->bmgqs", d_out[i], v_j)
            derivative = scoring.derivative(scores, q.shape[-1])
            d_products = (weights * (d_weights - delta[i][..., None]) * derivative).astype(q.dtype)
            d_k = d_k + product("bmgqs,bmgqh->bmsh", d_products, q[i])
            return d_q.at[i].add(product("bmgqs,bmsh->bmgqh", d_products, k_j)), d_k, d_v

        d_k, d_v = (jnp.zeros(x.shape, jnp.float32) for x in (k_j, v_j))
        d_q, d_k, d_v = jax.lax.fori_loop(0, count_j, visit, (d_q, d_k, d_v))
        return d_q, (d_k, d_v)

    # Scanned over blocks of keys: each adds to the gradient of all queries, and yields that of its
    # own keys and values.
    d_q, (d_k, d_v) = jax.lax.scan(
        one_block, jnp.zeros(q.shape, jnp.float32), (k, v, k_masks, order, count)
    )
    return d_q, d_k, d_v


def _backward(
    scoring: Scoring, residuals: tuple[Array | MaskSpec, ...], d_out: Array
) -> tuple[Array, Array, Array, None, None]:
    q, k, v, q_masks, k_masks, out, lse = residuals
    # Softmax backward: d_scores = weights * (d_weights - delta), delta being the sum of weights *
    # d_weights over keys, which is the sum of out * d_out over channels.
    products = as_matrix(out).astype(jnp.float32) * as_matrix(d_out).astype(jnp.float32)
    delta = jnp.sum(products, axis=-1).reshape(out.shape[:-1])
    gradients = _gradients(q, k, v, q_masks, k_masks, scoring, d_out, lse, delta)
    return *(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), None, None


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(
    q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring
) -> Array:
    """Attend over blocks `[blocks, B, heads, tokens, H]`, with a backward pass that needs no saved scores."""
    return _forward(q, k, v, q_masks, k_masks, scoring)[0].astype(q.dtype)


def _flash_forward(
    q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring
) -> tuple[Array, tuple]:
    out, lse = _forward(q, k, v, q_masks, k_masks, scoring)
    out = checkpoint_name(out.astype(q.dtype), "attention_output")
    lse = checkpoint_name(lse, "attention_logsumexp")
    return out, (q, k, v, q_masks, k_masks, out, lse)


_flash.defvjp(_flash_forward, _backward)
