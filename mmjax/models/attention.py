"""Attention under a mask spec, which encodes in a few integers per token who attends whom, with two backends.

Both backends mask exactly: another sample's content enters as a product with an exact zero, so it cannot change a bit.
Softmax and accumulation are float32 whatever the inputs are.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

Backend = Literal["dense", "blockwise"]

BLOCK = 256  # tokens of queries and of keys in a block: fastest of 128..1024 on CPU at T = 4096


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


class MaskSpec(NamedTuple):
    """Attention mask in integers per token, every field int32 [B, T]; `allowed` evaluates it."""

    sample: Array  # which of the row's samples, -1 = padding
    pos: Array  # index in the row before any permutation
    span: Array  # item whose tokens attend each other bidirectionally, 0 = none
    kind: Array  # one bit: this token's modality (bit 0 = text)
    sees: Array  # bits of the kinds that this query may attend causally
    reach: Array | None = None  # sliding window: causal keys, the query itself included; None: unlimited


def encoder_mask(item: Int[Array, "b t"]) -> MaskSpec:
    """Build the mask of an encoder: full attention inside each item, none for padding (-1)."""
    pos = jnp.broadcast_to(jnp.arange(item.shape[1], dtype=jnp.int32), item.shape)
    ones = jnp.ones_like(item)
    return MaskSpec(sample=item, pos=pos, span=item + 1, kind=ones, sees=ones)


def allowed(q: MaskSpec, k: MaskSpec) -> Bool[Array, "b q k"]:
    """Evaluate the mask: queries on axis 1, keys on axis 2.

    A query attends keys of its own sample: those of its span, and earlier ones of a kind that it sees, in its window.
    """
    q = jax.tree.map(lambda x: x[:, :, None], q)
    k = jax.tree.map(lambda x: x[:, None, :], k)
    same_span = (q.span == k.span) & (q.span != 0)
    causal = (k.pos <= q.pos) & ((q.sees & k.kind) != 0)
    if q.reach is not None:
        causal &= k.pos > q.pos - q.reach
    return (q.sample == k.sample) & (q.sample >= 0) & (same_span | causal)


def attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    mask: MaskSpec,
    backend: Backend,
    scoring: Scoring = DEFAULT_SCORING,
) -> Float[Array, "b t n h"]:
    """Compute self-attention of `n` query heads over `m` key-value heads (n a multiple of m).

    A query that may attend nothing gets 0. Raises ValueError where m does not divide n.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key-value heads")
    if backend == "blockwise":
        return blockwise_attention(q, k, v, mask, mask, scoring=scoring)
    return dense_attention(q, k, v, mask, mask, scoring)


def dense_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m h"],
    q_mask: MaskSpec,
    k_mask: MaskSpec,
    scoring: Scoring = DEFAULT_SCORING,
) -> Float[Array, "b t n h"]:
    """Compute attention with all scores at once: the reference, and the fastest for short rows."""
    b, t, n, h = q.shape
    m = k.shape[2]
    # b = row, t and s = query and key token, m = key-value head, g = query head of its group, h = channel.
    grouped = q.reshape(b, t, m, n // m, h)
    products = jnp.einsum("btmgh,bsmh->bmgts", grouped, k, preferred_element_type=jnp.float32)
    scores = _masked(scoring.scores(products, h), q_mask, k_mask)
    # The softmax does not change with what is subtracted, so its gradient need not go through the maximum.
    row_max = jax.lax.stop_gradient(_finite(jnp.max(scores, axis=-1, keepdims=True)))
    weights = jnp.exp(scores - row_max)
    # A query that attends nothing has weights and total 0: dividing by 1 instead makes its output 0, not NaN.
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("bmgts,bsmh->bmgth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = jnp.einsum("bmgth->btmgh", out / jnp.where(total == 0, 1, total)).reshape(b, t, n, h)
    return checkpoint_name(out.astype(q.dtype), "attention_output")


def blockwise_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m h"],
    q_mask: MaskSpec,
    k_mask: MaskSpec,
    block: int = BLOCK,
    scoring: Scoring = DEFAULT_SCORING,
) -> Float[Array, "b t n h"]:
    """Compute the same values as `dense_attention` block by block, visiting only pairs of blocks with allowed pairs.

    FlashAttention's recomputation (Dao et al. 2022): the backward pass gets the output and one float per query and
    head, and recomputes the scores. Any `t` and `s`: the last blocks are padded inside.
    """
    b, t, n, h = q.shape
    s, m = k.shape[1:3]
    q_block = min(block, t)
    k_block = min(block, s)
    q_masks = _mask_blocks(q_mask, q_block)
    k_masks = _mask_blocks(k_mask, k_block)
    count = q_masks.pos.shape[0]
    # c = block; the other letters as in `dense_attention`, with q for the query tokens of a block.
    q_blocks = _blocks(q, q_block).reshape(count, b, q_block, m, n // m, h)
    q_blocks = jnp.einsum("c b q m g h -> c b m g q h", q_blocks)
    k_blocks, v_blocks = (jnp.einsum("c b s m h -> c b m s h", _blocks(x, k_block)) for x in (k, v))
    out = _flash(q_blocks, k_blocks, v_blocks, q_masks, k_masks, scoring)
    out = jnp.einsum("c b m g q h -> b c q m g h", out).reshape(b, count * q_block, n, h)
    return out[:, :t]


def _finite(x: Array) -> Array:
    """Replace -inf, the maximum or log-sum-exp of a query that attends nothing, by 0: -inf - -inf would be NaN."""
    return jnp.where(x == -jnp.inf, 0, x)


def _blocks(x: Array, size: int, fill: int = 0) -> Array:
    """Reshape `[B, T, ...]` to `[blocks, B, size, ...]`, the last block filled up."""
    b, t = x.shape[:2]
    count = -(-t // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - t)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    return jnp.moveaxis(x.reshape(b, count, size, *x.shape[2:]), 1, 0)


def _mask_blocks(mask: MaskSpec, size: int) -> MaskSpec:
    """Apply `_blocks` to every field; what fills the last block up is padding."""
    return jax.tree.map(lambda x: _blocks(x, size), mask)._replace(sample=_blocks(mask.sample, size, fill=-1))


def _live_blocks(q: MaskSpec, k: MaskSpec) -> Bool[Array, "q k"]:
    """Find the pairs of blocks that may hold an allowed pair in some row.

    Conservative: it compares the ranges of the fields in the two blocks, as `allowed` compares those of two tokens.
    """

    def ranges(x: Array, valid: Array) -> tuple[Array, Array]:
        # A block without valid tokens gets an empty range, which overlaps nothing.
        limit = jnp.iinfo(jnp.int32).max
        return jnp.where(valid, x, limit).min(-1), jnp.where(valid, x, -limit).max(-1)

    def overlap(x_q: Array, valid_q: Array, x_k: Array, valid_k: Array) -> Array:
        q_low, q_high = ranges(x_q, valid_q)
        k_low, k_high = ranges(x_k, valid_k)
        return (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])

    q_valid = q.sample >= 0
    k_valid = k.sample >= 0
    same_sample = overlap(q.sample, q_valid, k.sample, k_valid)
    same_span = overlap(q.span, q_valid & (q.span != 0), k.span, k_valid & (k.span != 0))
    # Causal pairs need a key that is not behind the last query, and a query that sees the kind of some key.
    causal = ranges(k.pos, k_valid)[0] <= ranges(q.pos, q_valid)[1][:, None]
    causal &= (jnp.bitwise_or.reduce(q.sees, axis=-1)[:, None] & jnp.bitwise_or.reduce(k.kind, axis=-1)) != 0
    if q.reach is not None:
        causal &= ranges(k.pos, k_valid)[1] > ranges(q.pos - q.reach, q_valid)[0][:, None]
    return jnp.any(same_sample & (same_span | causal), axis=-1)


def _visits(live: Bool[Array, "x y"]) -> tuple[Int[Array, "x y"], Int[Array, " x"]]:
    """List, for every block on axis 0, its live partners first, and count them.

    [[F, T, T], [T, F, F]] gives the order [[1, 2, 0], [0, 1, 2]] and the counts [2, 1].
    """
    order = jnp.argsort(jnp.logical_not(live), axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(live, axis=1, dtype=jnp.int32)


def _scores(q: Array, k: Array, scoring: Scoring) -> Float[Array, "b m g q s"]:
    """Compute the scores of one pair of blocks, before masking."""
    return scoring.scores(jnp.einsum("bmgqh,bmsh->bmgqs", q, k, preferred_element_type=jnp.float32), q.shape[-1])


def _masked(scores: Float[Array, "b m g q s"], q_mask: MaskSpec, k_mask: MaskSpec) -> Float[Array, "b m g q s"]:
    """Set the scores of pairs that are not allowed to -inf."""
    return jnp.where(allowed(q_mask, k_mask)[:, None, None], scores, -jnp.inf)


def _forward(
    q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring
) -> tuple[Array, Array]:
    """Run the online softmax: output like `q`, and log-sum-exp `[blocks, B, M, G, q]` (-inf: attends nothing)."""
    order, count = _visits(_live_blocks(q_masks, k_masks))

    def one_block(q_i: Array, q_mask: MaskSpec, order_i: Array, count_i: Array) -> tuple[Array, Array]:
        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            row_max, total, out = carry
            j = order_i[step]
            scores = _masked(_scores(q_i, k[j], scoring), q_mask, jax.tree.map(lambda x: x[j], k_masks))
            new_max = jnp.maximum(row_max, scores.max(-1))
            base = _finite(new_max)
            weights = jnp.exp(scores - base[..., None])
            # What was summed so far is relative to the old maximum.
            rescale = jnp.exp(row_max - base)
            values = jnp.einsum("bmgqs,bmsh->bmgqh", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
            return new_max, total * rescale + weights.sum(-1), out * rescale[..., None] + values

        row_max = jnp.full(q_i.shape[:-1], -jnp.inf, jnp.float32)
        start = (row_max, jnp.zeros_like(row_max), jnp.zeros(q_i.shape, jnp.float32))
        row_max, total, out = jax.lax.fori_loop(0, count_i, visit, start)
        out = out / jnp.where(total == 0, 1, total)[..., None]
        return out.astype(q.dtype), _finite(row_max) + jnp.log(total)

    # One block of queries after the other, so that only the scores of one pair of blocks exist at a time.
    return jax.lax.map(lambda xs: one_block(*xs), (q, q_masks, order, count))


def _backward(
    scoring: Scoring, residuals: tuple[Array | MaskSpec, ...], d_out: Array
) -> tuple[Array, Array, Array, None, None]:
    """Compute the gradients of q, k and v, recomputing scores: per block of keys, over the query blocks that see it."""
    q, k, v, q_masks, k_masks, out, lse = residuals
    order, count = _visits(_live_blocks(q_masks, k_masks).T)
    # Softmax backward: d_scores = weights * (d_weights - delta), delta being the sum of weights * d_weights over keys,
    # which is the sum of out * d_out over channels.
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    lse = _finite(lse)  # where a query attends nothing, every weight is exp(-inf) = 0 all the same
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one_block(d_q: Array, xs: tuple[Array | MaskSpec, ...]) -> tuple[Array, tuple[Array, Array]]:
        k_j, v_j, k_mask, order_j, count_j = xs

        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            i = order_j[step]
            scores = _scores(q[i], k_j, scoring)
            weights = jnp.exp(_masked(scores, jax.tree.map(lambda x: x[i], q_masks), k_mask) - lse[i][..., None])
            d_v = d_v + product("bmgqs,bmgqh->bmsh", weights.astype(v.dtype), d_out[i])
            d_weights = product("bmgqh,bmsh->bmgqs", d_out[i], v_j)
            derivative = scoring.derivative(scores, q.shape[-1])
            d_products = (weights * (d_weights - delta[i][..., None]) * derivative).astype(q.dtype)
            d_k = d_k + product("bmgqs,bmgqh->bmsh", d_products, q[i])
            return d_q.at[i].add(product("bmgqs,bmsh->bmgqh", d_products, k_j)), d_k, d_v

        zero = jnp.zeros(k_j.shape, jnp.float32)
        d_q, d_k, d_v = jax.lax.fori_loop(0, count_j, visit, (d_q, zero, zero))
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    # Scanned over blocks of keys: each adds to the gradient of all queries, and yields that of its own keys and values.
    d_q, (d_k, d_v) = jax.lax.scan(one_block, jnp.zeros(q.shape, jnp.float32), (k, v, k_masks, order, count))
    return d_q.astype(q.dtype), d_k, d_v, None, None


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring) -> Array:
    """Attend over blocks `[blocks, B, heads, tokens, H]`, with a backward pass that needs no saved scores."""
    return _forward(q, k, v, q_masks, k_masks, scoring)[0]


def _flash_forward(
    q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring
) -> tuple[Array, tuple]:
    out, lse = _forward(q, k, v, q_masks, k_masks, scoring)
    out = checkpoint_name(out, "attention_output")
    lse = checkpoint_name(lse, "attention_logsumexp")
    return out, (q, k, v, q_masks, k_masks, out, lse)


_flash.defvjp(_flash_forward, _backward)
