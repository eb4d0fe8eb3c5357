"""Attention under a mask spec: which token sees which, said in a few integers per token, and two backends that obey it.

Both backends are exact to the bit about what a query may not see: another sample's content enters as a product with an
exact zero, so it can change nothing. Softmax and accumulation are float32 whatever the inputs are.
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
    """How scores are made of queries and keys; numbers, not arrays."""

    scale: float = 0.0  # of the products; 0 = head width ** -0.5
    cap: float = 0.0  # scores are bent by tanh to stay below; 0 = not

    def of(self, products: Array, head_width: int) -> Array:
        """The scores of these products."""
        scores = products * (self.scale or head_width**-0.5)
        return jnp.tanh(scores / self.cap) * self.cap if self.cap else scores

    def slope(self, scores: Array, head_width: int) -> Array | float:
        """The derivative of scores by products, where they have these values."""
        bent = 1 - jnp.square(scores / self.cap) if self.cap else 1.0
        return bent * (self.scale or head_width**-0.5)


PLAIN = Scoring()


class MaskSpec(NamedTuple):
    """Who may attend whom, per token. Every field int32 [B, T]."""

    sample: Array  # which of the row's samples, -1 = padding
    pos: Array  # index in the row before any permutation
    span: Array  # item whose tokens see each other both ways, 0 = none
    kind: Array  # one bit: this token's modality (bit 0 = text)
    sees: Array  # bits of the kinds that this query may attend causally
    reach: Array | None = None  # tokens that it may attend causally, itself the first; None: all before it


def items_mask(item: Int[Array, "b t"]) -> MaskSpec:
    """The mask of an encoder: every token sees all of its own item, -1 sees nothing."""
    pos = jnp.broadcast_to(jnp.arange(item.shape[1], dtype=jnp.int32), item.shape)
    one = jnp.ones_like(item)
    return MaskSpec(sample=item, pos=pos, span=item + 1, kind=one, sees=one)


def allowed(q: MaskSpec, k: MaskSpec) -> Bool[Array, "b q k"]:
    """Whether a query (axis 1) may attend a key (axis 2): same sample, and same item or causally of a kind it sees."""
    q, k = jax.tree.map(lambda x: x[:, :, None], q), jax.tree.map(lambda x: x[:, None, :], k)
    together = (q.span == k.span) & (q.span != 0)
    causally = (k.pos <= q.pos) & ((q.sees & k.kind) != 0)
    if q.reach is not None:
        causally &= k.pos > q.pos - q.reach
    return (q.sample == k.sample) & (q.sample >= 0) & (together | causally)


def attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    mask: MaskSpec,
    backend: Backend,
    scoring: Scoring = PLAIN,
) -> Float[Array, "b t n h"]:
    """Self-attention of `n` query heads over `m` key-value heads (n a multiple of m). What sees nothing gets 0."""
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
    scoring: Scoring = PLAIN,
) -> Float[Array, "b t n h"]:
    """All scores at once: the reference, and the fastest for short rows."""
    b, t, n, h = q.shape
    m = k.shape[2]
    grouped = q.reshape(b, t, m, n // m, h)
    scores = scoring.of(jnp.einsum("btmgh,bsmh->bmgts", grouped, k, preferred_element_type=jnp.float32), h)
    scores = jnp.where(allowed(q_mask, k_mask)[:, None, None], scores, -jnp.inf)
    top = jax.lax.stop_gradient(_finite(jnp.max(scores, axis=-1, keepdims=True)))
    weights = jnp.exp(scores - top)
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
    scoring: Scoring = PLAIN,
) -> Float[Array, "b t n h"]:
    """Scores one block of queries and keys at a time, only where something may be seen; the same values as dense.

    Saves the output and one float per query and head for the backward pass, which computes the scores again.
    Any `t` and `s`: the last blocks are padded inside.
    """
    b, t, n, h = q.shape
    s, m = k.shape[1:3]
    q_block, k_block = min(block, t), min(block, s)
    q_masks, k_masks = _mask_blocks(q_mask, q_block), _mask_blocks(k_mask, k_block)
    heads_first = "c b q m g h -> c b m g q h"
    count = q_masks.pos.shape[0]
    q_blocks = jnp.einsum(heads_first, _blocks(q, q_block).reshape(count, b, q_block, m, n // m, h))
    k_blocks, v_blocks = (jnp.einsum("c b s m h -> c b m s h", _blocks(x, k_block)) for x in (k, v))
    out = _flash(q_blocks, k_blocks, v_blocks, q_masks, k_masks, scoring)
    out = jnp.einsum("c b m g q h -> b c q m g h", out).reshape(b, count * q_block, n, h)
    return out[:, :t]


def _finite(top: Array) -> Array:
    """A row maximum that may be subtracted: 0 where nothing is seen."""
    return jnp.where(top == -jnp.inf, 0, top)


def _blocks(x: Array, size: int, fill: int = 0) -> Array:
    """`[B, T, ...]` as `[blocks, B, size, ...]`, the last block filled up."""
    b, t = x.shape[:2]
    count = -(-t // size)
    x = jnp.pad(x, ((0, 0), (0, count * size - t)) + ((0, 0),) * (x.ndim - 2), constant_values=fill)
    return jnp.moveaxis(x.reshape(b, count, size, *x.shape[2:]), 1, 0)


def _mask_blocks(mask: MaskSpec, size: int) -> MaskSpec:
    """`_blocks` of every field; what fills the last block up is padding."""
    return jax.tree.map(lambda x: _blocks(x, size), mask)._replace(sample=_blocks(mask.sample, size, fill=-1))


def _live_blocks(q: MaskSpec, k: MaskSpec) -> Bool[Array, "q k"]:
    """Block pairs that may hold an allowed pair in some row, from what sample, pos, span, kind and sees are in each."""

    def ranges(x: Array, valid: Array) -> tuple[Array, Array]:
        far = jnp.iinfo(jnp.int32).max
        return jnp.where(valid, x, far).min(-1), jnp.where(valid, x, -far).max(-1)

    def overlap(x_q: Array, valid_q: Array, x_k: Array, valid_k: Array) -> Array:
        (q_low, q_high), (k_low, k_high) = ranges(x_q, valid_q), ranges(x_k, valid_k)
        return (q_low[:, None] <= k_high) & (k_low <= q_high[:, None])

    q_valid, k_valid = q.sample >= 0, k.sample >= 0
    same_sample = overlap(q.sample, q_valid, k.sample, k_valid)
    same_span = overlap(q.span, q_valid & (q.span != 0), k.span, k_valid & (k.span != 0))
    causal = ranges(k.pos, k_valid)[0] <= ranges(q.pos, q_valid)[1][:, None]
    causal &= (jnp.bitwise_or.reduce(q.sees, axis=-1)[:, None] & jnp.bitwise_or.reduce(k.kind, axis=-1)) != 0
    if q.reach is not None:
        causal &= ranges(k.pos, k_valid)[1] > ranges(q.pos - q.reach, q_valid)[0][:, None]
    return jnp.any(same_sample & (same_span | causal), axis=-1)


def _visits(live: Bool[Array, "x y"]) -> tuple[Int[Array, "x y"], Int[Array, " x"]]:
    """For every block on axis 0: its live partners first, and how many they are."""
    order = jnp.argsort(jnp.logical_not(live), axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(live, axis=1, dtype=jnp.int32)


def _at(masks: MaskSpec, i: Array) -> MaskSpec:
    return jax.tree.map(lambda x: x[i], masks)


def _scores(q: Array, k: Array, scoring: Scoring) -> Float[Array, "b m g q s"]:
    """Scores of one pair of blocks, allowed or not."""
    return scoring.of(jnp.einsum("bmgqh,bmsh->bmgqs", q, k, preferred_element_type=jnp.float32), q.shape[-1])


def _masked(scores: Array, q_mask: MaskSpec, k_mask: MaskSpec) -> Float[Array, "b m g q s"]:
    """-inf where not allowed."""
    return jnp.where(allowed(q_mask, k_mask)[:, None, None], scores, -jnp.inf)


def _forward(
    q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring
) -> tuple[Array, Array]:
    """Online softmax: output like `q`, and log-sum-exp `[blocks, B, M, G, q]` (-inf where nothing is seen)."""
    order, count = _visits(_live_blocks(q_masks, k_masks))

    def one_block(q_i: Array, q_mask: MaskSpec, order_i: Array, count_i: Array) -> tuple[Array, Array]:
        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = carry
            j = order_i[step]
            scores = _masked(_scores(q_i, k[j], scoring), q_mask, _at(k_masks, j))
            new_top = jnp.maximum(top, scores.max(-1))
            base = _finite(new_top)
            weights = jnp.exp(scores - base[..., None])
            keep = jnp.exp(top - base)
            seen = jnp.einsum("bmgqs,bmsh->bmgqh", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32)
            return new_top, total * keep + weights.sum(-1), out * keep[..., None] + seen

        top = jnp.full(q_i.shape[:-1], -jnp.inf, jnp.float32)
        start = (top, jnp.zeros_like(top), jnp.zeros(q_i.shape, jnp.float32))
        top, total, out = jax.lax.fori_loop(0, count_i, visit, start)
        out = out / jnp.where(total == 0, 1, total)[..., None]
        return out.astype(q.dtype), _finite(top) + jnp.log(total)

    return jax.lax.map(lambda xs: one_block(*xs), (q, q_masks, order, count))


def _backward(
    scoring: Scoring, residuals: tuple[Array | MaskSpec, ...], d_out: Array
) -> tuple[Array, Array, Array, None, None]:
    """Gradients of q, k and v: for every block of keys, the blocks of queries that see it, scores computed again."""
    q, k, v, q_masks, k_masks, out, lse = residuals
    order, count = _visits(_live_blocks(q_masks, k_masks).T)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # nothing seen: every weight is exp(-inf) = 0
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def one_block(d_q: Array, xs: tuple[Array | MaskSpec, ...]) -> tuple[Array, tuple[Array, Array]]:
        k_j, v_j, k_mask, order_j, count_j = xs

        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            i = order_j[step]
            scores = _scores(q[i], k_j, scoring)
            weights = jnp.exp(_masked(scores, _at(q_masks, i), k_mask) - lse[i][..., None])
            d_v = d_v + product("bmgqs,bmgqh->bmsh", weights.astype(v.dtype), d_out[i])
            d_weights = product("bmgqh,bmsh->bmgqs", d_out[i], v_j)
            slope = scoring.slope(scores, q.shape[-1])
            d_scores = (weights * (d_weights - delta[i][..., None]) * slope).astype(q.dtype)
            d_k = d_k + product("bmgqs,bmgqh->bmsh", d_scores, q[i])
            return d_q.at[i].add(product("bmgqs,bmsh->bmgqh", d_scores, k_j)), d_k, d_v

        zero = jnp.zeros(k_j.shape, jnp.float32)
        d_q, d_k, d_v = jax.lax.fori_loop(0, count_j, visit, (d_q, zero, zero))
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_q, (d_k, d_v) = jax.lax.scan(one_block, jnp.zeros(q.shape, jnp.float32), (k, v, k_masks, order, count))
    return d_q.astype(q.dtype), d_k, d_v, None, None


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring) -> Array:
    """Attention of blocks `[blocks, B, heads, tokens, H]`, differentiated without keeping any scores."""
    return _forward(q, k, v, q_masks, k_masks, scoring)[0]


def _flash_forward(
    q: Array, k: Array, v: Array, q_masks: MaskSpec, k_masks: MaskSpec, scoring: Scoring
) -> tuple[Array, tuple]:
    out, lse = _forward(q, k, v, q_masks, k_masks, scoring)
    out, lse = checkpoint_name(out, "attention_output"), checkpoint_name(lse, "attention_logsumexp")
    return out, (q, k, v, q_masks, k_masks, out, lse)


_flash.defvjp(_flash_forward, _backward)
