"""Attention of one device over a row whose tokens are spread over the devices of the `context` axis.

Any order of tokens: masks read each token's sample, index and span. Keys and values arrive in pieces, straight from the
devices that hold them, while the kernel works on the piece before (Ring Attention, Liu et al. 2023, but nothing is
passed on); or heads are exchanged for tokens (DeepSpeed-Ulysses, Jacobs et al. 2023). For use inside a `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from mmjax.kernels.flash_attention import BlockPlan
from mmjax.kernels.masks import MaskSpec
from mmjax.parallel.sharding import CONTEXT

MAX_PIECES = 4  # in which keys and values arrive, the own first: each more is one more pass over the output to merge


class ContextPlan(NamedTuple):
    """For each piece of the keys, their mask, or the blocks of them that a kernel visits, each device's own.

    Over all devices, masks and a plan's fields have all tokens on their last axis, and lists of blocks those of all
    devices behind `B`. With `index` all hold several masks, [B, masks, ...], as a BlockPlan's.
    """

    pieces: tuple[MaskSpec | BlockPlan, ...]
    index: Array | None = None

    def of_mask(self) -> ContextPlan:
        """Take the mask at `index`, if there are several."""
        if self.index is None:
            return self
        take = partial(lax.dynamic_index_in_dim, index=self.index, axis=1, keepdims=False)
        return ContextPlan(jax.tree.map(take, self.pieces))


def plan_specs(devices: int, rows: Any, flash: bool, stacked: bool = False) -> ContextPlan:
    """Return how a plan's arrays lie on the mesh. rows: mesh axes of the rows; stacked: with `index`."""
    masks = (None,) * stacked
    piece = by_block = PartitionSpec(rows, *masks, CONTEXT)
    if flash:
        fields = PartitionSpec(rows, *masks, None, CONTEXT)
        piece = BlockPlan(fields, fields, by_block, by_block, by_block)
    return ContextPlan((piece,) * len(pieces(devices)), PartitionSpec() if stacked else None)


class Kernel(NamedTuple):
    """Attention to a piece of the keys: output and log-sum-exp, and gradients, all float32.

    `forward(q, k, v, local, piece)` and `gradients(q, k, v, local, piece, d_out, lse, delta)`, with the plans of the
    device's own keys, which stand for its queries, and of the piece. `exp` and `log` have the base of `lse`.
    """

    forward: Callable[..., tuple[Array, Array]]
    gradients: Callable[..., tuple[Array, Array, Array]]
    exp: Callable[[Array], Array]
    log: Callable[[Array], Array]


def pieces(devices: int) -> list[range]:
    """List the pieces in which keys arrive: by how many devices each of its parts is ahead.

    The first is the device's own. Of 16 devices, each of the others has the tokens of 5.
    """
    devices_a_piece = max(1, -(-(devices - 1) // (MAX_PIECES - 1)))
    return [range(1), *(range(hop, min(hop + devices_a_piece, devices)) for hop in range(1, devices, devices_a_piece))]


def plan_pieces(mask: MaskSpec, make: Callable[[MaskSpec, MaskSpec], MaskSpec | BlockPlan]) -> ContextPlan:
    """Make the plan of each piece from the masks of the device's queries and of the piece's keys."""
    arriving = pieces(lax.axis_size(CONTEXT))
    return ContextPlan(tuple(make(mask, jax.tree.map(partial(_arrive, hops=hops), mask)) for hops in arriving))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_in_pieces(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    plan: ContextPlan,
    kernel: Kernel,
) -> Float[Array, "b t n h"]:
    """Attend from the device's tokens to the whole row, its keys and values arriving piece by piece.

    Backward keeps the device's own arrays alone: keys and values arrive again, and their gradients return in float32.
    """
    return _forward(q, k, v, plan, kernel)[0]


def attend_by_heads(
    function: Callable[..., Array],
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m h"],
    mask: Any,
) -> Float[Array, "b t n h"]:
    """Call `function(q, k, v, mask)` with some of the heads and all tokens of the row; mask: of all tokens."""
    exchange = partial(lax.all_to_all, axis_name=CONTEXT, tiled=True)
    out = function(*(exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v)), mask)
    return exchange(out, split_axis=1, concat_axis=2)


def _arrive(arrays: Any, hops: range) -> Any:
    """Receive the arrays of each device so many ahead, one after the other along the tokens."""

    def received(x: Array) -> Array:
        parts = [_from_device(x, hop) for hop in hops]
        return jnp.concatenate(parts, axis=1) if parts[1:] else parts[0]

    return jax.tree.map(received, arrays)


def _return(arrays: Any, hops: range) -> Any:
    """Transpose `_arrive`: sum what other devices have for this one's tokens."""

    def received(x: Array) -> Array:
        parts = jnp.split(x, len(hops), axis=1)
        return reduce(jnp.add, (_from_device(part, -hop) for part, hop in zip(parts, hops, strict=True)))

    return jax.tree.map(received, arrays)


def _from_device(x: Array, hop: int) -> Array:
    """Receive the array of the device that is `hop` ahead; behind, where that is negative."""
    devices = lax.axis_size(CONTEXT)
    return lax.ppermute(x, CONTEXT, [(i, (i - hop) % devices) for i in range(devices)]) if hop else x


def _over_pieces(work: Callable[..., tuple[Any, Any]], carry: Any, k: Array, v: Array) -> tuple[Any, list[Any]]:
    """Fold `work(carry, number, k, v)` over the pieces; return the carry, and what it made for each piece's owners.

    The next piece arrives, and what was made of the one before returns, while `work` is done. The barriers keep XLA
    from waiting for them earlier, and from having more than two pieces in memory.
    """
    hops = pieces(lax.axis_size(CONTEXT))
    sent = piece = k, v
    leaving: Any = None
    returned = []
    for number in range(len(hops)):
        arriving = _arrive(sent, hops[number + 1]) if number + 1 < len(hops) else None
        returning = _return(leaving, hops[number - 1]) if number else None
        carry, leaving = work(carry, number, *piece)
        carry, leaving, returning, piece, sent = lax.optimization_barrier((carry, leaving, returning, arriving, sent))
        returned.append(returning)
    return carry, [*returned[1:], _return(leaving, hops[-1])]


def _forward(q: Array, k: Array, v: Array, plan: ContextPlan, kernel: Kernel) -> tuple[Array, Array]:
    local, *_ = plans = plan.of_mask().pieces

    def attend(merged: tuple[Array, Array] | None, number: int, k: Array, v: Array) -> tuple[tuple[Array, Array], None]:
        attended = kernel.forward(q, k, v, local, plans[number])
        return attended if merged is None else _merge(kernel, merged, attended), None

    (out, lse), _ = _over_pieces(attend, None, k, v)
    return out.astype(q.dtype), lse


def _merge(kernel: Kernel, first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Merge outputs and log-sum-exps over two sets of keys, by the sums of exponents that outputs were divided by."""
    (out, lse), (other_out, other_lse) = first, second
    largest = jnp.maximum(lse, other_lse)
    base = jnp.where(largest == -jnp.inf, 0, largest)  # -inf - -inf would be NaN
    weight, other_weight = kernel.exp(lse - base), kernel.exp(other_lse - base)
    total = weight + other_weight
    share, other_share = (jnp.moveaxis(w / jnp.where(total == 0, 1, total), 1, 2) for w in (weight, other_weight))
    return out * share[..., None] + other_out * other_share[..., None], base + kernel.log(total)


def _keep(q: Array, k: Array, v: Array, plan: ContextPlan, kernel: Kernel) -> tuple[Array, tuple]:
    out, lse = _forward(q, k, v, plan, kernel)
    # The names that remat policies save, so that these do not run the kernel again.
    out = checkpoint_name(out, "attention_output")
    lse = checkpoint_name(lse, "attention_logsumexp")
    return out, (q, k, v, plan, out, lse)


def _backward(kernel: Kernel, residuals: tuple, d_out: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, plan, out, lse = residuals
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    local, *_ = plans = plan.of_mask().pieces

    def gradients(d_q: Array | None, number: int, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        d_q_part, *of_keys = kernel.gradients(q, k, v, local, plans[number], d_out, lse, delta)
        return d_q_part if d_q is None else d_q + d_q_part, tuple(of_keys)

    d_q, of_keys = _over_pieces(gradients, None, k, v)
    d_k, d_v = reduce(partial(jax.tree.map, jnp.add), of_keys)
    return *(total.astype(x.dtype) for total, x in zip((d_q, d_k, d_v), (q, k, v), strict=True)), None


attend_in_pieces.defvjp(_keep, _backward)
