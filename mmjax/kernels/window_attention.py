"""Attention of tokens in closed windows of at most 64, forward and backward, in Pallas for GPUs (Triton).

A program holds a block of whole windows, so all that its queries attend is in it: a plain softmax
without lists and running maxima, and one kernel for all gradients, which needs neither output nor
sums of exponents. (Remat policies keep the output all the same, for the projection behind it.)

Blocks begin where a window does, wherever that is: each takes the windows that follow it as long as
they fit. Windows that an image's edge cuts to 48 or 36 patches so need no padding, which would make
rows longer than planned, for all other products of the layers too: first-fit into blocks at
multiples of 64, rows of images of 256 to 6,400 patches are .3 to 1 % longer, 1 to 4 ms of a 7B step
in which the kernel saves 7. Here 2.2 % more blocks are visited.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from mmjax.batch import MaskSpec
from mmjax.kernels.flash_attention import Scores, dot, name_outputs, output_delta
from mmjax.kernels.tiles import padded_width

BLOCK = 64  # tokens that a program holds at once
WARPS = 4


class WindowPlan(NamedTuple):
    """The windows of rows, and the blocks of whole ones: made once for all layers of a tower.

    window: int32 [B, T], each token's; 0 = attends nothing. start: int32 [B, 2 X + 1], the first
    token of each block, T behind the last one; X blocks of 64 tokens cover a row.
    """

    window: Array
    start: Array


class MixedPlan(NamedTuple):
    """The plans of layers without and with a window, of which a scan over both takes one by index (1: the windows')."""

    full: Any  # of the kernel by lists
    window: WindowPlan
    index: Array | None = None  # int32 []


class ListKernel(NamedTuple):
    """A kernel by lists: `(q, k, v, plan, scores)` to output and lse, and with `(d_out, lse, delta)` to gradients."""

    forward: Callable[..., tuple[Array, Array]]
    gradients: Callable[..., tuple[Array, ...]]


def unsupported(window: int, itemsize: int) -> str | None:
    """Say why windows of at most so many tokens do not run in the kernel of windows, if so."""
    if window > BLOCK:
        return f"windows of {window} tokens"
    # whose products Triton unrolls into single additions
    return f"numbers of {itemsize} bytes" if itemsize > 2 else None


def plan_windows(mask: MaskSpec) -> WindowPlan:
    """List blocks of whole windows: runs of tokens of one span, none longer than a block, in any order."""
    # Windows of 48, 36 and 20 tokens, then padding: borders lie before 0, 48, 84, 104 and each token
    # of the padding. From token 0 the last border within 64 is 48, from there 48 + 56 = 104 ..
    rows, length = mask.span.shape
    tokens = jnp.arange(length + 1, dtype=jnp.int32)
    valid = mask.sample >= 0
    last = jnp.max(jnp.where(valid, tokens[:-1], -1), axis=1, keepdims=True)
    begins = jnp.diff(mask.span, axis=1, prepend=mask.span[:, :1]) != 0
    border = jnp.pad(begins | (tokens[:-1] > last), ((0, 0), (0, 1)), constant_values=True)
    nearest = lax.cummax(jnp.where(border, tokens, 0), axis=1)
    # The block behind the one that begins at a token begins at `following`; to find the j-th, go
    # 1, 2, 4, .. blocks on by the bits of j. Two that follow each other are longer than one has
    # room for, so that twice as many are enough.
    following = nearest[:, jnp.minimum(tokens + BLOCK, length)]
    blocks = 2 * pl.cdiv(length, BLOCK)
    number = jnp.arange(blocks + 1)
    start = jnp.zeros((rows, blocks + 1), jnp.int32)
    for bit in range(blocks.bit_length()):
        further = jnp.take_along_axis(following, start, axis=1)
        start = jnp.where(number >> bit & 1, further, start)
        following = jnp.take_along_axis(following, following, axis=1)
    window = jnp.where(valid, 1 + jnp.cumsum(begins, axis=1, dtype=jnp.int32), 0)
    return WindowPlan(window, start)


def window_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t n h"],
    v: Float[Array, "b t n h"],
    plan: WindowPlan,
    scale: float,
    interpret: bool = False,
) -> Float[Array, "b t n h"]:
    """Compute self-attention inside the windows that `plan` was made from. interpret: on any device.

    A query that may attend nothing gets 0. Softmax and sums are float32.
    """
    return checkpoint_name(_attention(q, k, v, plan, scale, interpret), "attention_output")


def _weights(q: Array, k: Array, window: Array, scale: float) -> tuple[Array, Array]:
    """Compute the softmax of a block, `[queries, keys]`, times its sums, `[queries, 1]`: the largest is 1."""
    s = dot(q, k.T) * (scale * math.log2(math.e))
    seen = (window[:, None] == window[None, :]) & (window[:, None] != 0)
    s = jnp.where(seen, s, -jnp.inf)
    row_max = s.max(-1)
    # Tokens that attend nothing have the maximum -inf, and -inf - -inf would be NaN.
    weights = jnp.exp2(s - jnp.where(row_max == -jnp.inf, 0.0, row_max)[:, None])
    total = weights.sum(-1)[:, None]
    return weights, jnp.where(total > 0, total, 1.0)


def _output(scale: float, window: Array, q: Array, k: Array, v: Array) -> tuple[Array]:
    weights, total = _weights(q, k, window, scale)
    return (dot(weights.astype(v.dtype), v) / total,)


def _gradients(
    scale: float, window: Array, q: Array, k: Array, v: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    weights, total = _weights(q, k, window, scale)
    weights = weights / total
    d_v = dot(weights.astype(d_out.dtype).T, d_out)
    d_weights = dot(d_out, v.T)
    delta = (weights * d_weights).sum(-1)[:, None]
    d_scores = (weights * (d_weights - delta) * scale).astype(q.dtype)
    return dot(d_scores, k), dot(d_scores.T, q), d_v


def _kernel(*refs: Any, compute: Callable[..., tuple[Array, ...]], outputs: int, width: int):
    """Compute the blocks of a program, of one head: the one of its number, and one behind all programs' if there is."""
    window_ref, start_ref, *inputs = refs[:-outputs]
    length, padded = inputs[0].shape
    channels = (jnp.arange(padded) < width)[None, :]
    programs = (start_ref.shape[0] - 1) // 2
    program = pl.program_id(0)

    def block(turn: Array, carry: None) -> None:
        number = program + turn * programs
        start = start_ref[number]
        # A block near the row's end is loaded with tokens before it, which are masked like those
        # behind it.
        first = jnp.minimum(start, length - BLOCK)
        tokens = first + jnp.arange(BLOCK)
        inside = (tokens >= start) & (tokens < start_ref[number + 1])
        mask = inside[:, None] & channels
        place = pl.ds(first, BLOCK)
        window = pltriton.load(window_ref.at[place], mask=inside, other=0)
        arrays = [pltriton.load(ref.at[place, :], mask=mask, other=0.0) for ref in inputs]
        for ref, x in zip(refs[-outputs:], compute(window, *arrays), strict=True):
            pltriton.store(ref.at[place, :], x.astype(ref.dtype), mask=mask)

    # Without cut windows as many blocks as programs cover a row.
    turns = 1 + (start_ref[program + programs] < start_ref[2 * programs]).astype(jnp.int32)
    lax.fori_loop(0, turns, block, None)


def _call(
    compute: Callable[..., tuple[Array, ...]],
    arrays: Sequence[Array],
    plan: WindowPlan,
    outputs: int,
    interpret: bool,
) -> list[Array]:
    tokens = arrays[0].shape[1]
    # a program holds a whole block
    extra = ((0, 0), (0, max(BLOCK - tokens, 0)), (0, 0), (0, 0))
    arrays = [jnp.pad(x, extra) for x in arrays]
    plan = plan._replace(window=jnp.pad(plan.window, extra[:2]))
    rows, length, heads, width = arrays[0].shape
    padded = padded_width(width)
    of_head = pl.BlockSpec((None, length, None, padded), lambda i, head, row: (row, 0, head, 0))
    of_row = [pl.BlockSpec((None, x.shape[1]), lambda i, head, row: (row, 0)) for x in plan]
    results = pl.pallas_call(
        partial(_kernel, compute=compute, outputs=outputs, width=width),
        grid=(plan.start.shape[1] // 2, heads, rows),
        in_specs=[*of_row, *[of_head] * len(arrays)],
        out_specs=[of_head] * outputs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:outputs]],
        compiler_params=pltriton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="window_attention_forward" if outputs == 1 else "window_attention_backward",
    )(*plan, *arrays)
    return [x[:, :tokens] for x in results]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(
    q: Array, k: Array, v: Array, plan: WindowPlan, scale: float, interpret: bool
) -> Array:
    return _call(partial(_output, scale), (q, k, v), plan, 1, interpret)[0]


def _forward(
    q: Array, k: Array, v: Array, plan: WindowPlan, scale: float, interpret: bool
) -> tuple[Array, tuple]:
    return _attention(q, k, v, plan, scale, interpret), (q, k, v, plan)


def _backward(scale: float, interpret: bool, residuals: tuple, d_out: Array) -> tuple:
    *arrays, plan = residuals
    return *_call(partial(_gradients, scale), (*arrays, d_out), plan, 3, interpret), None


_attention.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def mixed_attention(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t n h"],
    v: Float[Array, "b t n h"],
    plan: MixedPlan,
    scores: Scores,
    kernel: ListKernel,
) -> Float[Array, "b t n h"]:
    """Attend by the plan at `plan.index`: with the kernel of windows, or with that by lists."""
    return _mixed_forward(q, k, v, plan, scores, kernel)[0]


def _mixed_forward(
    q: Array, k: Array, v: Array, plan: MixedPlan, scores: Scores, kernel: ListKernel
) -> tuple[Array, tuple]:
    def in_windows(*arrays: Array) -> tuple[Array, Array]:
        (out,) = _call(partial(_output, scores.scale), arrays, plan.window, 1, scores.interpret)
        # which layers with lists have
        rows, length, heads, _ = out.shape
        return out, jnp.zeros((rows, heads, length), jnp.float32)

    def by_lists(*arrays: Array) -> tuple[Array, Array]:
        return kernel.forward(*arrays, plan.full, scores)

    out, lse = name_outputs(*lax.cond(plan.index == 1, in_windows, by_lists, q, k, v))
    return out, (q, k, v, plan, out, lse)


def _mixed_backward(
    scores: Scores, kernel: ListKernel, residuals: tuple, d_out: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, plan, out, lse = residuals

    def in_windows(q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, ...]:
        arrays = (q, k, v, d_out)
        compute = partial(_gradients, scores.scale)
        return tuple(_call(compute, arrays, plan.window, 3, scores.interpret))

    def by_lists(q: Array, k: Array, v: Array, d_out: Array) -> tuple[Array, ...]:
        delta = output_delta(out, d_out)
        return kernel.gradients(q, k, v, plan.full, scores, d_out, lse, delta)

    return *lax.cond(plan.index == 1, in_windows, by_lists, q, k, v, d_out), None


mixed_attention.defvjp(_mixed_forward, _mixed_backward)
