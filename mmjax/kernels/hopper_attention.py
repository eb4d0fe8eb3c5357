"""Flash attention under a mask spec for NVIDIA Hopper, forward and backward, in Pallas Mosaic GPU.

As FlashAttention-3 (Shah et al. 2024): one warpgroup streams blocks into shared memory (TMA), two
others multiply (wgmma), taking turns, so that one's softmax hides behind the other's products. As
in `flash_attention` lists of blocks are data and results are repeatable to the bit. Blocks that are
allowed in part carry their mask as bits, made once per batch for all layers and heads: six fields
for each column would not fit in a thread's registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from mmjax.kernels.flash_attention import (
    Scores,
    name_outputs,
    output_delta,
    padded_forward,
    padded_gradients,
)
from mmjax.kernels.hopper_blocks import (
    LOG2_E,
    PER_COLUMN,
    PER_ROW,
    TILED,
    Program,
    Ring,
    across,
    add_product,
    cap_scores,
    divide_work,
    filled,
    hopper_kernel,
    product,
    ring_slot,
    score_gradients,
    shared_blocks,
    softmax_weights,
    stream,
    stream_keys,
    unpack_bits,
)
from mmjax.kernels.masked_tiles import COMPUTING, KEYS, QUERIES, ROWS, TILE, TileLists, TilePlan
from mmjax.kernels.masks import select_mask

# of a block in the gradient of queries: a half of what is listed, for its accumulators' sake
_D_KEYS = 64


def hopper_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    plan: TilePlan,
    scores: Scores,
) -> Float[Array, "b t n h"]:
    """Compute self-attention of `n` query heads over `m` key-value heads, under the mask that `plan` was made from.

    q, k, v: of 2 bytes a number, at most 128 channels a head. A query that may attend nothing gets
    0. Softmax and sums are float32. scores.tiles: of the Triton kernel, which takes masks that
    leave no room for their bits.
    """
    length, width = q.shape[1], q.shape[3]
    plan = select_mask(plan)
    return _attend(*_pad(plan, q, k, v), plan, scores)[:, :length, :, :width]


def hopper_forward(
    q: Array, k: Array, v: Array, plan: TilePlan, scores: Scores
) -> tuple[Array, Array]:
    """Compute the output, and float32 `[B, N, T]`, log2 of the sums of exponents."""
    length, width = q.shape[1], q.shape[3]
    out, lse = _run(_forward, padded_forward, plan, scores, *_pad(plan, q, k, v))
    return out[:, :length, :, :width], lse[..., :length]


def hopper_gradients(
    q: Array,
    k: Array,
    v: Array,
    plan: TilePlan,
    scores: Scores,
    d_out: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, ...]:
    """Compute the gradients of q, k and v. lse: as of `hopper_forward`. delta: as of `output_delta`."""
    length, width = q.shape[1], q.shape[3]
    arrays = _pad(plan, q, k, v, d_out)
    extra = ((0, 0), (0, 0), (0, arrays[0].shape[1] - length))
    lse, delta = (jnp.pad(x, extra) for x in (lse, delta))
    gradients = _run(_gradients, padded_gradients, plan, scores, *arrays, lse, delta)
    return tuple(x[:, :length, :, :width] for x in gradients)


def _pad(plan: TilePlan, *arrays: Array) -> list[Array]:
    """Pad tokens to those of the plan, and channels to a multiple of 16, as products take them."""
    _, length, _, width = arrays[0].shape
    tokens = plan.triton.q_fields.shape[-1] - length
    return [jnp.pad(x, ((0, 0), (0, tokens), (0, 0), (0, -width % 16))) for x in arrays]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, plan: TilePlan, scores: Scores) -> Array:
    return _run(_forward, padded_forward, plan, scores, q, k, v)[0]


def _attend_forward(
    q: Array, k: Array, v: Array, plan: TilePlan, scores: Scores
) -> tuple[Array, tuple]:
    out, lse = name_outputs(*_run(_forward, padded_forward, plan, scores, q, k, v))
    return out, (q, k, v, plan, out, lse)


def _attend_backward(
    scores: Scores, residuals: tuple, d_out: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, plan, out, lse = residuals
    delta = output_delta(out, d_out)
    return *_run(_gradients, padded_gradients, plan, scores, q, k, v, d_out, lse, delta), None


_attend.defvjp(_attend_forward, _attend_backward)


def _run(
    kernel: Callable[..., Any],
    triton: Callable[..., Any],
    plan: TilePlan,
    scores: Scores,
    *arrays: Array,
) -> tuple[Array, ...]:
    """Run the kernel, or Triton's where the bits of some row have no room."""
    dtype = arrays[0].dtype
    hopper = partial(kernel, plan=plan, scores=scores)
    lists = plan.by_query, plan.by_key
    if all(x.bits.shape[1] == math.prod(x.blocks.order.shape[1:]) for x in lists):
        return hopper(*arrays)  # room for all there can be
    fits = (plan.by_query.fits & plan.by_key.fits).all()
    return lax.cond(
        fits, hopper, partial(triton, plan=plan.triton, scores=scores, dtype=dtype), *arrays
    )


# --------------------------------------------------------------------------------------------------
# kernels


def _forward(
    q: Array, k: Array, v: Array, *, plan: TilePlan, scores: Scores
) -> tuple[Array, Array]:
    """Compute the output, and float32 `[B, N, T]`, log2 of the sums of exponents; -inf where nothing is attended."""
    rows, length, heads, width = q.shape
    group = heads // k.shape[2]
    dtype = q.dtype
    pairs = (ROWS, KEYS)

    def body(q_ref, k_ref, v_ref, order, count, first, bits, out_ref, lse_ref, *scratch):
        q_smem, lse_smem, q_loaded, keys, values, turn = scratch
        program = Program.of(order, count, first, bits)
        row, head, live = program.row, program.head, program.live

        # Between its products of scores and those of the next block a warpgroup has the turn for
        # its softmax, while the tensor cores work for the other one:
        #   warpgroup 0   QK  softmax  PV QK          softmax
        #   warpgroup 1            QK  softmax  PV QK
        def next_turn() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def compute() -> None:
            warpgroup = program.warpgroup
            q_tile = q_smem.at[warpgroup]
            plgpu.copy_gmem_to_smem(
                q_ref.at[row, program.rows(), head], q_tile, q_loaded.at[warpgroup]
            )
            plgpu.barrier_wait(q_loaded.at[warpgroup])

            @pl.when(live > 0)
            def _() -> None:
                plgpu.barrier_wait(keys.loaded.at[0])

            pl.when(warpgroup == 1)(next_turn)

            def visit(
                masked: bool, step: Array, carry: tuple[Array, Array, Array]
            ) -> tuple[Array, Array, Array]:
                out, row_max, total = carry
                slot = ring_slot(step)

                def multiply(ref: Any) -> tuple[Array, Array | None]:
                    plgpu.wgmma(ref, q_tile, keys.blocks.at[slot].transpose((1, 0)))
                    words = program.words(step, KEYS) if masked else None
                    next_turn()
                    return ref[...], words

                products, words = pl.run_scoped(multiply, plgpu.ACC(pairs, jnp.float32))
                plgpu.barrier_arrive(keys.free.at[slot])
                s, factor, _ = cap_scores(products, scores)
                if masked:
                    s = jnp.where(unpack_bits(words, KEYS, scores.interpret), s, -jnp.inf)
                new_max = jnp.maximum(row_max, s.max(axis=1) * factor)
                # Queries that have seen nothing yet have the maximum -inf, and -inf - -inf would be
                # NaN.
                base = jnp.where(new_max == -jnp.inf, 0.0, new_max) if masked else new_max
                rescale = jnp.exp2(row_max - base)
                weights = jnp.exp2(s * factor - across(base, pairs))
                out = out * across(rescale, out.shape)
                total = total * rescale + weights.sum(axis=1)
                weights = weights.astype(dtype)
                if not scores.interpret:  # all of this in this warpgroup's turn
                    out, total, new_max, weights = lax.optimization_barrier(
                        (out, total, new_max, weights)
                    )
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(values.loaded.at[slot])
                plgpu.barrier_wait(turn)

                def await_keys() -> None:
                    @pl.when(step + 1 < live)
                    def _() -> None:
                        plgpu.barrier_wait(keys.loaded.at[ring_slot(step + 1)])

                out = add_product(
                    out, weights, values.blocks.at[slot], scores.interpret, await_keys
                )
                plgpu.barrier_arrive(values.free.at[slot])
                return out, new_max, total

            start = (
                filled((ROWS, width), TILED),
                filled((ROWS,), PER_ROW, -jnp.inf),
                filled((ROWS,), PER_ROW),
            )
            out, row_max, total = program.visit(visit, start)
            pl.when(warpgroup == 0)(next_turn)
            total = jnp.where(total > 0, total, 1.0)
            q_tile[...] = (out * across(1.0 / total, out.shape)).astype(dtype)
            lse_smem[warpgroup] = row_max + jnp.log(total) * LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, out_ref.at[row, program.rows(), head])
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_ref.at[row, head, program.rows()])
            plgpu.wait_smem_to_gmem(0)

        load = partial(stream_keys, program, KEYS, group, (keys, k_ref), (values, v_ref))
        divide_work(program, compute, load)

    ring = Ring.types(KEYS, width, dtype)
    return hopper_kernel(
        body,
        "hopper_attention_forward",
        (heads, length // TILE, rows),
        scores,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
        ),
        scratch_types=[
            shared_blocks(COMPUTING, ROWS, width, dtype),
            plgpu.SMEM((COMPUTING, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=COMPUTING),
            ring,
            ring,
            plgpu.Barrier(num_arrivals=COMPUTING),
        ],
    )(q, k, v, *_operands(plan.by_query))


def _operands(lists: TileLists) -> tuple[Array, ...]:
    return *lists.blocks, lists.first, lists.bits


def _gradients(*arrays: Array, plan: TilePlan, scores: Scores) -> tuple[Array, Array, Array]:
    """Compute the gradients of q, k and v. arrays: these, and d_out, lse and delta."""
    return _d_query(*arrays, plan.by_query, scores), *_d_key(*arrays, plan.by_key, scores)


def _d_query(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    lse: Array,
    delta: Array,
    lists: TileLists,
    scores: Scores,
) -> Array:
    """Compute the gradient of queries."""
    rows, length, heads, width = q.shape
    group = heads // k.shape[2]
    dtype = q.dtype
    pairs = (ROWS, _D_KEYS)

    def body(
        q_ref,
        k_ref,
        v_ref,
        order,
        count,
        first,
        bits,
        d_out_ref,
        lse_ref,
        delta_ref,
        d_q_ref,
        *scratch,
    ):
        q_smem, d_out_smem, tile_loaded, keys, values = scratch
        program = Program.of(order, count, first, bits, KEYS // _D_KEYS)
        row, head = program.row, program.head

        def compute() -> None:
            warpgroup = program.warpgroup
            q_tile = q_smem.at[warpgroup]
            d_out_tile = d_out_smem.at[warpgroup]
            index = row, program.rows(), head
            for ref, tile in ((q_ref, q_tile), (d_out_ref, d_out_tile)):
                plgpu.copy_gmem_to_smem(ref.at[index], tile, tile_loaded.at[warpgroup])
            lse, delta = (
                plgpu.load(ref.at[row, head, program.rows()], layout=PER_ROW, optimized=False)
                for ref in (lse_ref, delta_ref)
            )
            plgpu.barrier_wait(tile_loaded.at[warpgroup])

            def visit(masked: bool, step: Array, d_q: Array) -> Array:
                slot = ring_slot(step)
                plgpu.barrier_wait(keys.loaded.at[slot])

                def multiply(products: Any, d_weights: Any) -> tuple[Array, Array, Array | None]:
                    plgpu.wgmma(products, q_tile, keys.blocks.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(values.loaded.at[slot])
                    plgpu.wgmma(d_weights, d_out_tile, values.blocks.at[slot].transpose((1, 0)))
                    words = program.words(step, _D_KEYS) if masked else None
                    first = (
                        products[...]
                        if scores.interpret
                        else plgpu.wgmma_accumulator_load(products, wait_n=1)
                    )
                    return first, d_weights[...], words

                accumulator = plgpu.ACC(pairs, jnp.float32)
                products, d_weights, words = pl.run_scoped(multiply, accumulator, accumulator)
                plgpu.barrier_arrive(values.free.at[slot])
                weights, slope = softmax_weights(products, lse, words, scores)
                d_scores = score_gradients(weights, d_weights, delta, slope)
                d_q = add_product(
                    d_q, d_scores.astype(dtype), keys.blocks.at[slot], scores.interpret
                )
                plgpu.barrier_arrive(keys.free.at[slot])
                return d_q

            d_q = program.visit(visit, filled((ROWS, width), TILED))
            q_tile[...] = (d_q * scores.scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, d_q_ref.at[index])
            plgpu.wait_smem_to_gmem(0)

        load = partial(stream_keys, program, _D_KEYS, group, (keys, k_ref), (values, v_ref))
        divide_work(program, compute, load)

    tile = shared_blocks(COMPUTING, ROWS, width, dtype)
    ring = Ring.types(_D_KEYS, width, dtype)
    return hopper_kernel(
        body,
        "hopper_attention_d_query",
        (heads, length // TILE, rows),
        scores,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=[
            tile,
            tile,
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTING),
            ring,
            ring,
        ],
    )(q, k, v, *_operands(lists), d_out, lse, delta)


def _d_key(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    lse: Array,
    delta: Array,
    lists: TileLists,
    scores: Scores,
) -> tuple[Array, Array]:
    """Compute the gradients of keys and values, over all query heads of their group."""
    rows, length, heads, width = q.shape
    group = heads // k.shape[2]
    dtype = q.dtype
    pairs = (ROWS, QUERIES)  # transposed, so that no product needs a transposed accumulator

    def body(
        q_ref,
        k_ref,
        v_ref,
        order,
        count,
        first,
        bits,
        d_out_ref,
        lse_ref,
        delta_ref,
        d_k_ref,
        d_v_ref,
        *scratch,
    ):
        k_smem, v_smem, tile_loaded, queries, gradients = scratch
        program = Program.of(order, count, first, bits)
        row, live = program.row, program.live

        def compute() -> None:
            warpgroup = program.warpgroup
            k_tile = k_smem.at[warpgroup]
            v_tile = v_smem.at[warpgroup]
            index = row, program.rows(), program.head
            for ref, tile in ((k_ref, k_tile), (v_ref, v_tile)):
                plgpu.copy_gmem_to_smem(ref.at[index], tile, tile_loaded.at[warpgroup])
            plgpu.barrier_wait(tile_loaded.at[warpgroup])

            def of_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                def visit(
                    masked: bool, step: Array, carry: tuple[Array, Array]
                ) -> tuple[Array, Array]:
                    d_k, d_v = carry
                    slot = ring_slot(head * live + step)
                    plgpu.barrier_wait(queries.loaded.at[slot])

                    def multiply(ref: Any) -> tuple[Array, Array | None, Array]:
                        plgpu.wgmma(ref, k_tile, queries.blocks.at[slot].transpose((1, 0)))
                        words = program.words(step, QUERIES) if masked else None
                        lse = plgpu.load(queries.numbers.at[slot], layout=PER_COLUMN)
                        return ref[...], words, lse

                    products, words, lse = pl.run_scoped(multiply, plgpu.ACC(pairs, jnp.float32))
                    weights, slope = softmax_weights(products, lse, words, scores, axis=1)
                    plgpu.barrier_wait(gradients.loaded.at[slot])
                    d_v, d_weights = add_and_multiply(
                        d_v, weights.astype(dtype), gradients.blocks.at[slot]
                    )
                    delta = plgpu.load(gradients.numbers.at[slot], layout=PER_COLUMN)
                    d_scores = score_gradients(weights, d_weights, delta, slope, axis=1)
                    plgpu.barrier_arrive(gradients.free.at[slot])
                    d_k = add_product(
                        d_k, d_scores.astype(dtype), queries.blocks.at[slot], scores.interpret
                    )
                    plgpu.barrier_arrive(queries.free.at[slot])
                    return d_k, d_v

                return program.visit(visit, carry)

            def add_and_multiply(d_v: Array, weights: Array, d_out: Any) -> tuple[Array, Array]:
                """Add to the gradient of values, and compute that of the weights, at the same time."""
                if scores.interpret:
                    d_weights = product(v_tile, d_out.transpose((1, 0)), pairs)
                    return add_product(d_v, weights, d_out, interpret=True), d_weights

                def multiply(refs: tuple[Any, Any]) -> None:
                    plgpu.wgmma(refs[1], v_tile, d_out.transpose((1, 0)))
                    plgpu.wgmma(refs[0], weights, d_out)

                return pl.run_state(multiply)(
                    (plgpu.ACC.init(d_v), plgpu.ACC.init(filled(pairs, TILED)))
                )

            zeros = filled((ROWS, width), TILED)
            d_k, d_v = lax.fori_loop(0, group, of_head, (zeros, zeros))
            k_tile[...] = (d_k * scores.scale).astype(dtype)
            v_tile[...] = d_v.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_tile, d_k_ref.at[index])
            plgpu.copy_smem_to_gmem(v_tile, d_v_ref.at[index])
            plgpu.wait_smem_to_gmem(0)

        def load() -> None:
            def of(ref: Any, numbers: Any) -> Callable[[Array], tuple[Any, ...]]:
                def source(step: Array) -> tuple[Any, ...]:
                    head = lax.div(step, live)
                    tokens = pl.ds(program.block(step - head * live) * QUERIES, QUERIES)
                    head = program.head * group + head
                    return ref.at[row, tokens, head], numbers.at[row, head, tokens]

                return source

            stream(
                group * live, (queries, of(q_ref, lse_ref)), (gradients, of(d_out_ref, delta_ref))
            )

        divide_work(program, compute, load)

    tile = shared_blocks(COMPUTING, ROWS, width, dtype)
    ring = Ring.types(QUERIES, width, dtype, numbers=True)
    return hopper_kernel(
        body,
        "hopper_attention_d_key",
        (k.shape[2], length // TILE, rows),
        scores,
        out_type=(jax.ShapeDtypeStruct(k.shape, dtype), jax.ShapeDtypeStruct(v.shape, dtype)),
        scratch_types=[
            tile,
            tile,
            plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTING),
            ring,
            ring,
        ],
    )(q, k, v, *_operands(lists), d_out, lse, delta)
