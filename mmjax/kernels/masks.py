"""The pairs of blocks of queries and keys in which an attention mask (`mmjax.batch.MaskSpec`) allows anything.

Kernels visit those of `BlockLists`: full pairs, in which nothing is masked, and partial ones, in
which `mmjax.batch.allowed` is evaluated (as FlexAttention's BlockMask).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from mmjax.batch import PADDING, MaskSpec

Plan = TypeVar("Plan", bound=Any)

_UNLIMITED = 2**30  # a window of more tokens than any row has


def encoder_mask(item: Int[Array, "b t"]) -> MaskSpec:
    """Build the mask of an encoder: full attention inside each item, none for padding (-1)."""
    pos = jnp.broadcast_to(jnp.arange(item.shape[1], dtype=jnp.int32), item.shape)
    ones = jnp.ones_like(item)
    return MaskSpec(sample=item, pos=pos, span=item + 1, kind=ones, sees=ones)


class BlockLists(NamedTuple):
    """For each block of one side, the blocks of the other: those allowed as a whole first, then those in part.

    order: int32 [*B, X, Y]; count: int32 [*B, X, 2], how many are allowed as a whole, and how many
    at all.
    """

    order: Array
    count: Array

    @classmethod
    def of(cls, unmasked: Bool[Array, "*b x y"], live: Bool[Array, "*b x y"]) -> BlockLists:
        """Sort every row of pairs by class. [live, not, whole] gives the order [2, 0, 1] and the counts [1, 2]."""
        order = jnp.argsort(jnp.where(unmasked, 0, jnp.where(live, 1, 2)), axis=-1, stable=True)
        count = jnp.stack([unmasked.sum(-1), live.sum(-1)], axis=-1)
        return cls(order.astype(jnp.int32), count.astype(jnp.int32))


def select_mask(plan: Plan) -> Plan:
    """Take the mask at `index` of a plan of several masks, whose arrays are `[B, masks, ...]`; one of a single, itself.

    plan: a named tuple whose last field is `index`, int32 [] or None.
    """
    if plan.index is None:
        return plan
    take = partial(lax.dynamic_index_in_dim, index=plan.index, axis=1, keepdims=False)
    return type(plan)._make((*jax.tree.map(take, plan[:-1]), None))


def pad_mask(mask: MaskSpec, length: int) -> MaskSpec:
    """Append padding to a mask until rows have this length."""
    extra = ((0, 0), (0, length - mask.pos.shape[1]))
    padded = jax.tree.map(lambda x: jnp.pad(x, extra), mask)
    return padded._replace(sample=jnp.pad(mask.sample, extra, constant_values=PADDING))


def block_pairs(
    q_mask: MaskSpec, k_mask: MaskSpec, q_size: int, k_size: int
) -> tuple[Bool[Array, "b x y"], Bool[Array, "b x y"]]:
    """Find the pairs of blocks that are allowed as a whole, and those that may hold an allowed pair of tokens.

    Both are conservative, as they compare the ranges of the fields in two blocks: a pair that is
    called whole is, one that is not called live holds nothing. q_size and k_size divide the length.
    """
    q = _BlockRanges.of(q_mask, q_size)
    k = _BlockRanges.of(k_mask, k_size)
    same_span = _overlap(q.span, k.span)
    # A causal pair needs a key that is not behind the last query, in its window, and a kind that
    # some query sees.
    causal = k.pos.low[:, None, :] <= q.pos.high[:, :, None]
    causal &= (q.any_sees[:, :, None] & k.any_kind[:, None, :]) != 0
    causal &= k.pos.high[:, None, :] > q.horizon.low[:, :, None]
    same_sample = _overlap(q.sample, k.sample) & (
        (q.any_sample[:, :, None] & k.any_sample[:, None, :]) != 0
    )
    live = same_sample & (same_span | causal)
    # All queries and keys are of one sample, and either of one span, or every query is behind every
    # key.
    one_span = _equal(q.all_span, k.all_span) & (q.all_span.low != 0)[:, :, None]
    all_causal = k.pos.high[:, None, :] <= q.pos.low[:, :, None]
    all_causal &= k.pos.low[:, None, :] > q.horizon.high[:, :, None]
    # One bit that all queries see and all keys have: kinds are single bits, so the keys are of one
    # kind.
    all_causal &= (q.all_sees[:, :, None] & k.all_kind[:, None, :]) != 0
    one_sample = _equal(q.all_sample, k.all_sample) & (q.all_sample.low >= 0)[:, :, None]
    return one_sample & (one_span | all_causal), live


class _Range(NamedTuple):
    low: Array  # [B, blocks]
    high: Array


class _BlockRanges(NamedTuple):
    """Ranges of the fields in each block, without padding; bits, and what begins with `all`, count padding too."""

    sample: _Range
    pos: _Range
    span: _Range  # of tokens that have one
    horizon: _Range  # the last position that a query cannot see any more
    # one bit for each sample, by its number modulo 32: a range may span samples that have no token
    any_sample: Array
    any_sees: Array
    any_kind: Array
    all_sample: _Range
    all_span: _Range
    all_sees: Array  # bits that every token has
    all_kind: Array

    @classmethod
    def of(cls, mask: MaskSpec, size: int) -> _BlockRanges:
        def blocks(x: Array) -> Array:
            return x.reshape(len(x), -1, size)

        def ranges(x: Array, counted: Array | None = None) -> _Range:
            if counted is None:
                return _Range(blocks(x).min(-1), blocks(x).max(-1))
            # A block without any such token gets an empty range, which overlaps nothing.
            limit = jnp.iinfo(jnp.int32).max
            return _Range(
                jnp.where(blocks(counted), blocks(x), limit).min(-1),
                jnp.where(blocks(counted), blocks(x), -limit).max(-1),
            )

        valid = mask.sample >= 0
        reach = _UNLIMITED if mask.reach is None else mask.reach
        return cls(
            sample=ranges(mask.sample, valid),
            pos=ranges(mask.pos, valid),
            span=ranges(mask.span, valid & (mask.span != 0)),
            horizon=ranges(mask.pos - reach, valid),
            any_sample=jnp.bitwise_or.reduce(
                blocks(jnp.where(valid, 1 << (mask.sample & 31), 0)), axis=-1
            ),
            any_sees=jnp.bitwise_or.reduce(blocks(mask.sees), axis=-1),
            any_kind=jnp.bitwise_or.reduce(blocks(mask.kind), axis=-1),
            all_sample=ranges(mask.sample),
            all_span=ranges(mask.span),
            all_sees=jnp.bitwise_and.reduce(blocks(mask.sees), axis=-1),
            all_kind=jnp.bitwise_and.reduce(blocks(mask.kind), axis=-1),
        )


def _overlap(q: _Range, k: _Range) -> Bool[Array, "b x y"]:
    return (q.low[:, :, None] <= k.high[:, None, :]) & (k.low[:, None, :] <= q.high[:, :, None])


def _equal(q: _Range, k: _Range) -> Bool[Array, "b x y"]:
    """Find the blocks whose ranges are one and the same value."""
    single = (q.low == q.high)[:, :, None] & (k.low == k.high)[:, None, :]
    return single & (q.low[:, :, None] == k.low[:, None, :])
