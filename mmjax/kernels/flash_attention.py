"""Flash attention under a mask spec, forward and backward, in Pallas for GPUs (Triton).

FlashAttention-2 (Dao 2023) with lists of blocks as data: `plan_blocks` finds once per batch and
tower which pairs of blocks hold anything, and kernels visit those alone. In pairs that are allowed
as a whole no mask is evaluated. Queries and keys have a kernel each in the backward pass, without
atomic additions, so results are repeatable to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from mmjax.batch import MaskSpec, allowed
from mmjax.kernels.masks import BlockLists, block_pairs, pad_mask, select_mask
from mmjax.kernels.tiles import TILES, KernelTiles, Tiles, padded_width

_LOG2_E = math.log2(math.e)  # exp(x) = exp2(x * log2(e)): GPUs have an instruction for exp2 alone
_FIELDS = 6  # of a mask: see `_pack`
_UNLIMITED = 2**30


class Scores(NamedTuple):
    """Scale and soft cap of attention scores, and how the kernels run; static."""

    scale: float
    cap: float = 0.0  # `cap * tanh(score / cap)`; 0 = none
    tiles: KernelTiles = TILES[128]
    interpret: bool = False  # run as JAX operations, on any device


class BlockPlan(NamedTuple):
    """All that the kernels need of a mask: made once for all layers of a tower.

    q_fields, k_fields: int32 [B, 6, T]; lists of key blocks for each query block of both its
    kernels, and the reverse. With `index` all arrays hold several masks, [B, masks, ...], and the
    kernels take that one: of what backward keeps for each layer only the index is its own.
    """

    q_fields: Array
    k_fields: Array
    forward: BlockLists
    d_query: BlockLists
    d_key: BlockLists
    index: Array | None = None  # int32 []


def plan_blocks(mask: MaskSpec, tiles: KernelTiles, k_mask: MaskSpec | None = None) -> BlockPlan:
    """List the pairs of blocks that the kernels visit under this mask, padded to whole blocks.

    k_mask: of the keys, where they are not the queries' own tokens.
    """
    q_mask = pad_mask(mask, _padded(mask.pos.shape[1], tiles))
    k_mask = q_mask if k_mask is None else pad_mask(k_mask, _padded(k_mask.pos.shape[1], tiles))
    by_query = {
        (t.q, t.k): BlockLists.of(*block_pairs(q_mask, k_mask, t.q, t.k))
        for t in (tiles.forward, tiles.d_query)
    }
    by_key = (
        pairs.swapaxes(1, 2) for pairs in block_pairs(q_mask, k_mask, tiles.d_key.q, tiles.d_key.k)
    )
    forward, d_query = (by_query[t.q, t.k] for t in (tiles.forward, tiles.d_query))
    return BlockPlan(_pack(q_mask), _pack(k_mask), forward, d_query, BlockLists.of(*by_key))


def flash_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    plan: BlockPlan,
    scores: Scores,
) -> Float[Array, "b t n h"]:
    """Compute self-attention of `n` query heads over `m` key-value heads, under the mask that `plan` was made from.

    A query that may attend nothing gets 0. Softmax and sums are float32.
    """
    length = q.shape[1]
    _check_tiles(plan, scores.tiles)
    q, k, v = (_pad(x, plan.q_fields.shape[-1]) for x in (q, k, v))
    return _flash(q, k, v, plan, scores)[:, :length]


def flash_forward(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m h"],
    plan: BlockPlan,
    scores: Scores,
    dtype: jnp.dtype = jnp.float32,
) -> tuple[Float[Array, "b t n h"], Float[Array, "b n t"]]:
    """Compute the output over these keys in `dtype`, and log2 of the sums of exponents (-inf: attends nothing)."""
    length = q.shape[1]
    _check_tiles(plan, scores.tiles)
    q = _pad(q, plan.q_fields.shape[-1])
    k, v = (_pad(x, plan.k_fields.shape[-1]) for x in (k, v))
    out, lse = padded_forward(q, k, v, plan, scores, dtype)
    return out[:, :length], lse[..., :length]


def flash_gradients(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s m h"],
    v: Float[Array, "b s m h"],
    plan: BlockPlan,
    scores: Scores,
    d_out: Float[Array, "b t n h"],
    lse: Float[Array, "b n t"],
    delta: Float[Array, "b n t"],
    dtype: jnp.dtype = jnp.float32,
) -> tuple[Float[Array, "b t n h"], Float[Array, "b s m h"], Float[Array, "b s m h"]]:
    """Compute what these keys contribute to the gradients of q, k and v, in `dtype`.

    lse: over all keys that the queries attend, as of `flash_forward`. delta: sum over channels of
    output * gradient.
    """
    lengths = q.shape[1], k.shape[1]
    q, d_out = (_pad(x, plan.q_fields.shape[-1]) for x in (q, d_out))
    k, v = (_pad(x, plan.k_fields.shape[-1]) for x in (k, v))
    extra = ((0, 0), (0, 0), (0, q.shape[1] - lengths[0]))
    lse, delta = jnp.pad(lse, extra), jnp.pad(delta, extra)
    d_q, d_k, d_v = padded_gradients(q, k, v, d_out, lse, delta, plan, scores, dtype)
    return d_q[:, : lengths[0]], d_k[:, : lengths[1]], d_v[:, : lengths[1]]


def _check_tiles(plan: BlockPlan, tiles: KernelTiles) -> None:
    """Raise ValueError for a plan made for other tiles, under which the kernels would visit other blocks."""
    queries = plan.q_fields.shape[-1]
    keys = plan.k_fields.shape[-1]
    blocks = [(queries // t.q, keys // t.k) for t in (tiles.forward, tiles.d_query)]
    blocks.append((keys // tiles.d_key.k, queries // tiles.d_key.q))
    if blocks != [lists.order.shape[-2:] for lists in (plan.forward, plan.d_query, plan.d_key)]:
        raise ValueError(f"attention was planned for other tiles than {tiles}")


def _pad(x: Array, length: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))


def _padded(length: int, tiles: KernelTiles) -> int:
    # To whole blocks of all three kernels: tiles of 128 x 64 and 64 x 64 pad 1,000 tokens to 1,024.
    block = math.lcm(*(size for t in tiles for size in (t.q, t.k)))
    return -(-length // block) * block


def _pack(mask: MaskSpec) -> Array:
    """Stack a mask's fields, int32 [B, 6, T]; a mask without a window has one that is longer than any row."""
    reach = jnp.full_like(mask.pos, _UNLIMITED) if mask.reach is None else mask.reach
    return jnp.stack([*mask[:5], reach], axis=1)


def _tokens(fields: Any, start: Array, size: int) -> MaskSpec:
    """Load the mask of the block of tokens that begins at `start`."""
    return MaskSpec._make(fields[i, pl.ds(start, size)] for i in range(_FIELDS))


def dot(a: Array, b: Array) -> Array:
    """Multiply matrices into float32; float32 operands exactly, not as TF32."""
    return pltriton.dot(a, b, allow_tf32=False if a.dtype == jnp.float32 else None)


def _loader(width: int, padded: int) -> tuple[Callable[..., Array], Callable[..., None]]:
    """Make functions that load and store `[tokens, padded]` of arrays with `width` channels."""
    if width == padded:
        return pltriton.load, lambda ref, x: pltriton.store(ref, x.astype(ref.dtype))
    inside = (jnp.arange(padded) < width)[None, :]
    return (
        lambda ref: pltriton.load(ref, mask=inside, other=0.0),
        lambda ref, x: pltriton.store(ref, x.astype(ref.dtype), mask=inside),
    )


def _capped(products: Array, scores: Scores) -> tuple[Array, Array | None]:
    """Turn dot products into scores in units of log 2, and into d score / d scaled product where that is not 1."""
    if not scores.cap:
        return products * (scores.scale * _LOG2_E), None
    # score = cap * tanh(scaled / cap), whose derivative by `scaled` is 1 - tanh^2.
    tanh = jnp.tanh(products * (scores.scale / scores.cap))
    return tanh * (scores.cap * _LOG2_E), 1 - tanh * tanh


def _visit(count: Any, body: Callable[[bool, Array, Any], Any], carry: Any) -> Any:
    """Fold `body(masked, step, carry)` over the pairs allowed as a whole, then over those allowed in part."""
    # `order` lists the blocks by class (`BlockLists.of`), so steps 0 .. count[0] - 1 need no mask
    # and count[0] .. count[1] - 1 do. Two loops, so that only the second loads masks.
    carry = lax.fori_loop(0, count[0], partial(body, False), carry)
    return lax.fori_loop(count[0], count[1], partial(body, True), carry)


def _forward_kernel(
    q_ref,
    k_ref,
    v_ref,
    q_fields,
    k_fields,
    order,
    count,
    out_ref,
    lse_ref,
    *,
    scores: Scores,
    width: int,
):
    """Compute the output of a block of queries, and log2 of their sums of exponents; -inf where nothing is attended."""
    tiles = scores.tiles.forward
    load, store = _loader(width, q_ref.shape[-1])
    q = load(q_ref)
    q_mask = _tokens(q_fields, pl.program_id(0) * tiles.q, tiles.q)

    # Online softmax. After some blocks of keys: row_max = m, the largest score so far, total = sum
    # of 2^(s - m), out = sum of 2^(s - m) v. A new block raises m, so both sums shrink by 2^(m -
    # m').
    def body(
        masked: bool, step: Array, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        out, row_max, total = carry
        start = order[step] * tiles.k
        keys = pl.ds(start, tiles.k)
        s, _ = _capped(dot(q, load(k_ref.at[keys, :]).T), scores)
        if masked:
            s = jnp.where(allowed(q_mask, _tokens(k_fields, start, tiles.k)), s, -jnp.inf)
        new_max = jnp.maximum(row_max, s.max(-1))
        # Queries that have seen nothing yet have the maximum -inf, and -inf - -inf would be NaN.
        base = jnp.where(new_max == -jnp.inf, 0.0, new_max) if masked else new_max
        weights = jnp.exp2(s - base[:, None])
        rescale = jnp.exp2(row_max - base)
        v = load(v_ref.at[keys, :])
        out = out * rescale[:, None] + dot(weights.astype(v.dtype), v)
        return out, new_max, total * rescale + weights.sum(-1)

    start = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(tiles.q, -jnp.inf, jnp.float32),
        jnp.zeros(tiles.q, jnp.float32),
    )
    out, row_max, total = _visit(count, body, start)
    # A query that attends nothing has total 0, output 0 / 1 and row_max -inf, which its lse then
    # is.
    total = jnp.where(total > 0, total, 1.0)
    store(out_ref, out / total[:, None])
    pltriton.store(lse_ref, row_max + jnp.log2(total))


def _d_query_kernel(
    q_ref, k_ref, v_ref, q_fields, k_fields, order, count, d_out_ref, lse_ref, delta_ref, d_q_ref,
    *, scores: Scores, width: int,
):  # fmt: skip
    """Compute the gradient of a block of queries."""
    tiles = scores.tiles.d_query
    load, store = _loader(width, q_ref.shape[-1])
    q = load(q_ref)
    d_out = load(d_out_ref)
    lse = pltriton.load(lse_ref)
    delta = pltriton.load(delta_ref)
    q_mask = _tokens(q_fields, pl.program_id(0) * tiles.q, tiles.q)

    def body(masked: bool, step: Array, d_q: Array) -> Array:
        start = order[step] * tiles.k
        k = load(k_ref.at[pl.ds(start, tiles.k), :])
        s, slope = _capped(dot(q, k.T), scores)
        # The softmax itself, by the saved log of its sum. A query that attends nothing has lse -inf
        # and weights inf here, but is in masked pairs alone, where 0 takes their place.
        weights = jnp.exp2(s - lse[:, None])
        if masked:
            weights = jnp.where(allowed(q_mask, _tokens(k_fields, start, tiles.k)), weights, 0.0)
        d_weights = dot(d_out, load(v_ref.at[pl.ds(start, tiles.k), :]).T)
        # d score = weight * (d weight - delta), delta being the sum over keys of weight * d weight
        # = out . d_out.
        d_scores = weights * (d_weights - delta[:, None])
        if slope is not None:
            d_scores = d_scores * slope
        return d_q + dot(d_scores.astype(k.dtype), k)

    store(d_q_ref, _visit(count, body, jnp.zeros(q.shape, jnp.float32)) * scores.scale)


def _d_key_kernel(
    q_ref, k_ref, v_ref, q_fields, k_fields, order, count, d_out_ref, lse_ref, delta_ref, d_k_ref, d_v_ref,
    *, scores: Scores, width: int, group: int,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, over all query heads of their group."""
    tiles = scores.tiles.d_key
    load, store = _loader(width, k_ref.shape[-1])
    k = load(k_ref)
    v = load(v_ref)
    k_mask = _tokens(k_fields, pl.program_id(0) * tiles.k, tiles.k)

    # A program of a key head folds over all its query heads: no other program adds to its
    # gradients.
    def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def body(masked: bool, step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_k, d_v = carry
            start = order[step] * tiles.q
            queries = pl.ds(start, tiles.q)
            q = load(q_ref.at[queries, head, :])
            d_out = load(d_out_ref.at[queries, head, :])
            # Transposed, [keys, queries], so that no product needs a transposed accumulator.
            s, slope = _capped(dot(k, q.T), scores)
            weights = jnp.exp2(s - lse_ref[head, queries][None, :])
            if masked:
                weights = jnp.where(
                    allowed(_tokens(q_fields, start, tiles.q), k_mask).T, weights, 0.0
                )
            d_v = d_v + dot(weights.astype(d_out.dtype), d_out)
            d_scores = weights * (dot(v, d_out.T) - delta_ref[head, queries][None, :])
            if slope is not None:
                d_scores = d_scores * slope
            return d_k + dot(d_scores.astype(q.dtype), q), d_v

        return _visit(count, body, carry)

    zeros = jnp.zeros(k.shape, jnp.float32)
    d_k, d_v = lax.fori_loop(0, group, of_head, (zeros, zeros))
    store(d_k_ref, d_k * scores.scale)
    store(d_v_ref, d_v)


class _Specs(NamedTuple):
    """Block specs for a grid of (blocks of tokens, heads of keys or of queries, rows)."""

    queries_length: int
    keys_length: int
    padded: int  # width of a head
    group: int  # query heads of a key-value head

    def block(self, tokens: int) -> pl.BlockSpec:
        """Return one block of one head, `[tokens, padded]`."""
        return pl.BlockSpec(
            (None, tokens, None, self.padded), lambda i, head, row: (row, i, head, 0)
        )

    def keys(self) -> pl.BlockSpec:
        """Return all keys of a query head's group, `[T, padded]`."""
        shape = (None, self.keys_length, None, self.padded)
        return pl.BlockSpec(shape, lambda i, head, row: (row, 0, lax.div(head, self.group), 0))

    def queries(self) -> pl.BlockSpec:
        """Return all queries of a key head's group, `[T, group, padded]`."""
        return pl.BlockSpec(
            (None, self.queries_length, self.group, self.padded),
            lambda i, head, row: (row, 0, head, 0),
        )

    def per_token(self, tokens: int) -> pl.BlockSpec:
        """Return one number for each token of a block of one head."""
        return pl.BlockSpec((None, None, tokens), lambda i, head, row: (row, head, i))

    def per_query(self) -> pl.BlockSpec:
        """Return one number for each query of a key head's group, `[group, T]`."""
        return pl.BlockSpec(
            (None, self.group, self.queries_length), lambda i, head, row: (row, head, 0)
        )

    def mask(self, lists: BlockLists) -> list[pl.BlockSpec]:
        """Return the mask's fields of the row's queries and keys, and the lists of the block."""
        fields = [
            pl.BlockSpec((None, _FIELDS, length), lambda i, head, row: (row, 0, 0))
            for length in (self.queries_length, self.keys_length)
        ]
        return [
            *fields,
            pl.BlockSpec((None, None, lists.order.shape[2]), lambda i, head, row: (row, i, 0)),
            pl.BlockSpec((None, None, 2), lambda i, head, row: (row, i, 0)),
        ]


def _specs(q: Array, k: Array) -> _Specs:
    return _Specs(q.shape[1], k.shape[1], padded_width(q.shape[3]), q.shape[2] // k.shape[2])


def _launch(tiles: Tiles, scores: Scores, name: str) -> dict[str, Any]:
    params = pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages)
    return {"compiler_params": params, "interpret": scores.interpret, "name": name}


def padded_forward(
    q: Array, k: Array, v: Array, plan: BlockPlan, scores: Scores, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """Compute the output in `dtype`, and float32 `[B, N, T]`, log2 of the sums of exponents."""
    rows, length, heads, width = q.shape
    plan = select_mask(plan)
    specs = _specs(q, k)
    tiles = scores.tiles.forward
    return pl.pallas_call(
        partial(_forward_kernel, scores=scores, width=width),
        grid=(length // tiles.q, heads, rows),
        in_specs=[specs.block(tiles.q), specs.keys(), specs.keys(), *specs.mask(plan.forward)],
        out_specs=[specs.block(tiles.q), specs.per_token(tiles.q)],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
        ],
        **_launch(tiles, scores, "flash_attention_forward"),
    )(q, k, v, plan.q_fields, plan.k_fields, *plan.forward)


def _backward(scores: Scores, residuals: tuple, d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, plan, out, lse = residuals
    delta = output_delta(out, d_out)
    return *padded_gradients(q, k, v, d_out, lse, delta, plan, scores, q.dtype), None


def output_delta(out: Array, d_out: Array) -> Array:
    """Sum output * gradient over channels, float32 `[B, N, T]`."""
    return jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))


def padded_gradients(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    lse: Array,
    delta: Array,
    plan: BlockPlan,
    scores: Scores,
    dtype: jnp.dtype,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of q, k and v in `dtype`."""
    plan = select_mask(plan)
    rows, length, heads, width = q.shape
    specs = _specs(q, k)
    tiles = scores.tiles.d_query
    # A program for each block of queries of each query head, which goes over the keys.
    block, keys, per_token = specs.block(tiles.q), specs.keys(), specs.per_token(tiles.q)
    d_q = pl.pallas_call(
        partial(_d_query_kernel, scores=scores, width=width),
        grid=(length // tiles.q, heads, rows),
        in_specs=[block, keys, keys, *specs.mask(plan.d_query), block, per_token, per_token],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(q.shape, dtype),
        **_launch(tiles, scores, "flash_attention_d_query"),
    )(q, k, v, plan.q_fields, plan.k_fields, *plan.d_query, d_out, lse, delta)
    # A program for each block of keys of each key head, which goes over the queries of its group.
    tiles = scores.tiles.d_key
    block, queries, per_query = specs.block(tiles.k), specs.queries(), specs.per_query()
    d_k, d_v = pl.pallas_call(
        partial(_d_key_kernel, scores=scores, width=width, group=specs.group),
        grid=(k.shape[1] // tiles.k, k.shape[2], rows),
        in_specs=[queries, block, block, *specs.mask(plan.d_key), queries, per_query, per_query],
        out_specs=[block, block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)],
        **_launch(tiles, scores, "flash_attention_d_key"),
    )(q, k, v, plan.q_fields, plan.k_fields, *plan.d_key, d_out, lse, delta)
    return d_q, d_k, d_v


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: Array, k: Array, v: Array, plan: BlockPlan, scores: Scores) -> Array:
    return padded_forward(q, k, v, plan, scores, q.dtype)[0]


def _flash_forward(
    q: Array, k: Array, v: Array, plan: BlockPlan, scores: Scores
) -> tuple[Array, tuple]:
    out, lse = name_outputs(*padded_forward(q, k, v, plan, scores, q.dtype))
    return out, (q, k, v, plan, out, lse)


def name_outputs(out: Array, lse: Array) -> tuple[Array, Array]:
    """Give the names that remat policies save, so that these do not run the kernel again."""
    return checkpoint_name(out, "attention_output"), checkpoint_name(lse, "attention_logsumexp")


_flash.defvjp(_flash_forward, _backward)
