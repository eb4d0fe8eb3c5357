"""Attention under a mask spec, which encodes in a few integers per token who attends whom, with three backends.

All mask exactly: another sample's content enters as a product with an exact zero, so it cannot change a bit. Softmax
and accumulation are float32 whatever the inputs are. On a mesh each device computes its own rows and heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from mmjax.kernels.flash_attention import BlockPlan, Scores, flash_attention, plan_blocks
from mmjax.kernels.masks import BlockLists, MaskSpec, allowed, block_pairs, encoder_mask
from mmjax.kernels.tiles import MAX_BLOCK, tiles_for
from mmjax.parallel.sharding import active, platform, sharding

__all__ = ["MaskSpec", "allowed", "attention", "encoder_mask"]

Backend = Literal["dense", "blockwise", "flash", "auto"]

# Tokens of queries and of keys in a block of `blockwise`: fastest of 128..1024 on CPU at T = 4096.
BLOCK = 256


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


def chosen_backend(backend: Backend) -> Backend:
    """Resolve `auto`: the kernel on GPUs, blocks elsewhere."""
    return ("flash" if _on_gpu() else "blockwise") if backend == "auto" else backend


def _on_gpu() -> bool:
    return platform() in ("gpu", "cuda")


def plan_attention(mask: MaskSpec, backend: Backend, head_width: int, max_block: int = MAX_BLOCK) -> BlockPlan | None:
    """List the blocks that the kernel visits under this mask, for all layers of a tower; None where it does not run."""
    if chosen_backend(backend) != "flash":
        return None
    return plan_blocks(mask, tiles_for(head_width, mask.pos.shape[1], max_block))


def attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    mask: MaskSpec,
    backend: Backend,
    scoring: Scoring = DEFAULT_SCORING,
    plan: BlockPlan | None = None,
    max_block: int = MAX_BLOCK,
) -> Float[Array, "b t n h"]:
    """Compute self-attention of `n` query heads over `m` key-value heads (n a multiple of m).

    A query that may attend nothing gets 0. plan: of `plan_attention` with the same `max_block`, else it is made here.
    `flash` runs as a kernel on GPUs, and interpreted elsewhere. Raises ValueError for an unknown backend, and where m
    does not divide n.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} key-value heads")
    match chosen_backend(backend):
        case "dense":
            return dense_attention(q, k, v, mask, mask, scoring)
        case "blockwise":
            return _per_device(partial(_blockwise_rows, scoring=scoring), q, k, v, mask)
        case "flash":
            tiles = tiles_for(q.shape[3], q.shape[1], max_block)
            scale = scoring.scale or q.shape[3] ** -0.5
            scores = Scores(scale, scoring.cap, tiles, interpret=not _on_gpu())
            plan = plan_blocks(mask, tiles) if plan is None else plan
            return _per_device(partial(flash_attention, scores=scores), q, k, v, plan)
    raise ValueError(f"unknown attention backend {backend!r}; known: {', '.join(get_args(Backend))}")


def _per_device(function: Callable[..., Array], q: Array, k: Array, v: Array, tokens: Any) -> Array:
    """Call `function(q, k, v, tokens)` on each device with its rows and heads, `tokens` being arrays `[rows, ...]`.

    SPMD would give each device the blocks that any device must visit, and it cannot partition a kernel.
    """
    current = active()
    if current is None:
        return function(q, k, v, tokens)

    def spec(x: Array, *axes: str | None) -> PartitionSpec:
        return sharding(current.mesh, current.rules, x.shape, axes).spec

    # Heads of queries are cut only where those of keys are too, so that a group stays together.
    heads = "kv_heads" if spec(k, None, None, "kv_heads", None)[2] else None
    q_spec = spec(q, "rows", None, heads, None)
    k_spec = spec(k, "rows", None, heads, None)
    # Gradients are summed over the axes that a spec leaves out; those of one device are named, to need no all-reduce.
    named = {axis for entry in q_spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    single = tuple(axis for axis, size in current.mesh.shape.items() if size == 1 and axis not in named)
    q_spec, k_spec = (PartitionSpec(x[0], x[1], x[2], single or None) for x in (q_spec, k_spec))
    token_specs = jax.tree.map(lambda x: spec(x, *("rows", *(None,) * x.ndim)[: x.ndim]), tokens)
    return jax.shard_map(
        function, mesh=current.mesh, in_specs=(q_spec, k_spec, k_spec, token_specs), out_specs=q_spec, check_vma=False
    )(q, k, v, tokens)


def _blockwise_rows(q: Array, k: Array, v: Array, mask: MaskSpec, scoring: Scoring) -> Array:
    """Apply `blockwise_attention` to one row after the other, each of which visits its own blocks alone."""
    if len(q) == 1:
        return blockwise_attention(q, k, v, mask, mask, scoring=scoring)
    rows = jax.tree.map(lambda x: x[:, None], (q, k, v, mask))
    return jax.lax.map(lambda row: blockwise_attention(*row, row[3], scoring=scoring), rows)[:, 0]


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
