"""Attention of one device over a row whose tokens are spread over the devices of the `context` axis.

Any order of tokens: masks read each token's sample, index and span. Keys and values arrive in
pieces, straight from the devices that hold them, while the kernel works on the piece before (Ring
Attention, Liu et al. 2023, but nothing is passed on); all of them, or those alone that some query
of the receiver may attend. Or heads are exchanged for tokens (DeepSpeed-Ulysses, Jacobs et al.
2023). For use inside a `shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from mmjax.batch import MaskSpec
from mmjax.kernels.flash_attention import BlockPlan
from mmjax.kernels.masks import block_pairs, select_mask
from mmjax.parallel.sharding import CONTEXT

# Pieces in which keys and values arrive, the device's own first. Each one more is another pass over
# the output to merge.
MAX_PIECES = 4
# Slices of a row that one device sends another; where more are needed, the shortest gaps are sent
# too.
MAX_SLICES = 8
QUERY_BLOCK = 128  # queries, at most, for which it is found together which keys they may attend
KEY_BLOCK = 16  # keys, at most, that are found needed, and sent, together


class Slices(NamedTuple):
    """Slices of a row's tokens, int32 [B, devices - 1, slices]: for each device ahead, from the next on; size 0 = none.

    As a sharded array, outside of `shard_map`, the last axis is `devices * slices` long.
    """

    start: Array
    size: Array


class ContextPlan(NamedTuple):
    """A device's plan for every piece of the keys: the keys' mask, or the blocks that a kernel visits.

    As sharded arrays, masks and a plan's fields have all devices' tokens on their last axis, and
    lists of blocks those of all devices behind `B`. With `index` all hold several masks, [B, masks,
    ...], as a BlockPlan's.
    """

    pieces: tuple[MaskSpec | BlockPlan, ...]
    # What the device needs of those ahead, and what it sends to those behind, which need it; None:
    # all tokens are sent.
    needed: Slices | None = None
    sent: Slices | None = None
    index: Array | None = None


def plan_specs(
    devices: int, rows: Any, flash: bool, ragged: bool, stacked: bool = False
) -> ContextPlan:
    """Return the partition specs of a plan's arrays. rows: mesh axes of the rows; stacked: with `index`."""
    spec = partial(PartitionSpec, rows, *(None,) * stacked)
    piece = by_block = spec(CONTEXT)
    if flash:
        fields = spec(None, CONTEXT)
        piece = BlockPlan(fields, fields, by_block, by_block, by_block)
    slices = Slices(spec(None, CONTEXT), spec(None, CONTEXT)) if ragged else None
    return ContextPlan(
        (piece,) * len(pieces(devices)), slices, slices, PartitionSpec() if stacked else None
    )


class Kernel(NamedTuple):
    """Attention to a piece of the keys: output and log-sum-exp, and gradients, all float32.

    `forward(q, k, v, local, piece)` and `gradients(q, k, v, local, piece, d_out, lse, delta)`, with
    the plans of the device's own keys, which stand for its queries, and of the piece. `exp` and
    `log` have the base of `lse`.
    """

    forward: Callable[..., tuple[Array, Array]]
    gradients: Callable[..., tuple[Array, Array, Array]]
    exp: Callable[[Array], Array]
    log: Callable[[Array], Array]


def pieces(devices: int) -> list[range]:
    """List the pieces in which keys arrive: by how many devices each of its parts is ahead.

    The first is the device's own. Of 16 devices, each of the three others has the tokens of 5: hops
    1..5, 6..10 and 11..15.
    """
    devices_a_piece = max(1, -(-(devices - 1) // (MAX_PIECES - 1)))
    return [
        range(1),
        *(
            range(hop, min(hop + devices_a_piece, devices))
            for hop in range(1, devices, devices_a_piece)
        ),
    ]


def plan_pieces(
    mask: MaskSpec, make: Callable[[MaskSpec, MaskSpec], MaskSpec | BlockPlan], ragged: bool = False
) -> ContextPlan:
    """Make the plan of each piece from the masks of the device's queries and of the piece's keys.

    ragged: plan to send only what some query of the receiver may attend.
    """
    devices = lax.axis_size(CONTEXT)
    masks = [_receive(mask, hops) for hops in pieces(devices)]
    plan = ContextPlan(tuple(make(mask, keys) for keys in masks))
    if not ragged:
        return plan
    length = mask.pos.shape[1]
    q_size, k_size = (math.gcd(length, block) for block in (QUERY_BLOCK, KEY_BLOCK))
    # [B, tokens of the other devices / k_size]: which blocks of keys any of this device's queries
    # may attend.
    attended = jnp.concatenate(
        [block_pairs(mask, keys, q_size, k_size)[1].any(1) for keys in masks[1:]], axis=1
    )
    needed = _slices(attended.reshape(len(attended), devices - 1, -1), k_size)
    # `needed[:, hop - 1]` is for the device `hop` ahead, which gets it from the one `hop` behind.
    back = [
        jax.tree.map(lambda x, hop=hop: _from_device(x[:, hop - 1], -hop), needed)
        for hop in range(1, devices)
    ]
    return plan._replace(needed=needed, sent=jax.tree.map(lambda *x: jnp.stack(x, axis=1), *back))


def _slices(attended: Bool[Array, "b h x"], size: int) -> Slices:
    """Cover the attended blocks of tokens by at most MAX_SLICES slices, bridging the shortest gaps."""
    # Blocks 0..9, attended: . x x . . x . x x .   with two slices at most.
    #   previous              - - 1 2 2 2 5 5 7 8   the last attended block in front of each
    #   gaps                  0 0 0 0 0 2 0 1 0 0   in front of each attended one; longest before 5
    #   begin, stop           5 and 3: a slice begins at 5, and the one before ends at 3
    #   first, end            1 and 9: of all attended blocks
    #   sorted                begins 1 5, stops 3 9: slices 1..2 and 5..8, with block 6 sent too
    blocks = attended.shape[-1]
    place = jnp.arange(blocks, dtype=jnp.int32)
    previous = lax.cummax(jnp.where(attended, place, -1), axis=attended.ndim - 1)
    previous = jnp.pad(previous[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=-1)
    gaps = jnp.where(attended & (previous >= 0), place - previous - 1, 0)
    length, begin = lax.top_k(gaps, min(MAX_SLICES - 1, blocks))
    # `blocks` stands for none, and sorts to the end: such slices have size 0.
    begin, stop = (
        jnp.where(length > 0, x, blocks)
        for x in (begin, jnp.take_along_axis(previous, begin, axis=-1) + 1)
    )
    first, end = (
        jnp.where(attended.any(-1), x, blocks)[..., None]
        for x in (attended.argmax(-1), blocks - attended[..., ::-1].argmax(-1))
    )
    begins, stops = (
        jnp.sort(jnp.concatenate(x, axis=-1), axis=-1) for x in ((first, begin), (stop, end))
    )
    return Slices(
        begins.astype(jnp.int32) % blocks * size, (stops - begins).astype(jnp.int32) * size
    )


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_in_pieces(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m w"],
    plan: ContextPlan,
    kernel: Kernel,
    sinks: Float[Array, " n"] | None = None,
) -> Float[Array, "b t n w"]:
    """Attend from the device's tokens to the whole row, its keys and values arriving piece by piece.

    A plan of one piece is of a device that has whole rows. sinks: a score of each head that takes
    part in the softmax, and has no value (gpt-oss). Backward keeps the device's own arrays alone:
    keys and values arrive again, and their gradients return in float32.
    """
    return _forward(q, k, v, plan, kernel, sinks)[0]


def attend_by_heads(
    function: Callable[..., Array],
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t m h"],
    v: Float[Array, "b t m w"],
    mask: Any,
    *sinks: Float[Array, " n"],
) -> Float[Array, "b t n w"]:
    """Call `function(q, k, v, mask, *sinks)` with some of the heads and all tokens of the row; mask: of all tokens."""
    # Over c devices, [B, T / c, N, H] -> [B, T, N / c, H] and back.
    exchange = partial(lax.all_to_all, axis_name=CONTEXT, tiled=True)
    q, k, v = (exchange(x, split_axis=2, concat_axis=1) for x in (q, k, v))
    heads = q.shape[2]
    first = lax.axis_index(CONTEXT) * heads
    out = function(q, k, v, mask, *(lax.dynamic_slice_in_dim(x, first, heads) for x in sinks))
    return exchange(out, split_axis=1, concat_axis=2)


def _receive(arrays: Any, hops: range, plan: ContextPlan | None = None) -> Any:
    """Receive the arrays of the devices at these hops ahead, concatenated along the tokens; tokens not sent are 0.

    plan: says what is sent, where that is not all.
    """

    def received(x: Array) -> Array:
        if plan is not None and plan.needed is not None and 0 not in hops:
            parts = _send_slices(x[None], hops, plan.sent, plan.needed, ahead=True)
            return jnp.moveaxis(parts, 0, 1).reshape(len(x), -1, *x.shape[2:])
        parts = [_from_device(x, hop) for hop in hops]
        return jnp.concatenate(parts, axis=1) if parts[1:] else parts[0]

    return jax.tree.map(received, arrays)


def _return_gradients(arrays: Any, hops: range, plan: ContextPlan) -> Any:
    """Transpose `_receive`: sum the other devices' gradients of this one's tokens."""

    def received(x: Array) -> Array:
        if plan.needed is not None and 0 not in hops:
            parts = jnp.moveaxis(x.reshape(len(x), len(hops), -1, *x.shape[2:]), 1, 0)
            return _send_slices(parts, hops, plan.needed, plan.sent, ahead=False).sum(0)
        parts = jnp.split(x, len(hops), axis=1)
        return reduce(
            jnp.add, (_from_device(part, -hop) for part, hop in zip(parts, hops, strict=True))
        )

    return jax.tree.map(received, arrays)


def _send_slices(x: Array, hops: range, sent: Slices, received: Slices, ahead: bool) -> Array:
    """Receive token slices from the devices at these hops, ahead or behind, zeros between: `[hops, B, T, ...]`.

    x: what each of these gets its slices of, or one for all.
    """
    devices = lax.axis_size(CONTEXT)
    device = lax.axis_index(CONTEXT)
    copies, rows, length = x.shape[:3]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None] * length

    # `ragged_all_to_all` copies along the first axis, so rows and tokens are one: token 5 of row 2
    # is 2 * length + 5. Its four lists are ordered by device, each with as many entries, of size 0
    # for the devices that are not among these hops.
    def by_device(slices: Array, sign: int) -> Array:
        """Order entries of hops by device; [B, hops, slices] becomes [devices * B * slices]."""
        places = jnp.zeros((devices, *slices[:, 0].shape), jnp.int32)
        neighbours = (device + sign * jnp.arange(hops.start, hops.stop)) % devices
        return places.at[neighbours].set(jnp.moveaxis(slices, 1, 0)).ravel()

    def of_hops(slices: Slices) -> Slices:
        return jax.tree.map(lambda field: field[:, hops.start - 1 : hops.stop - 1], slices)

    # The part for the third of these hops begins after two arrays of all rows, here and where it
    # arrives. A sender knows where in the receiver's array its slices go, since hops are the same
    # on all devices and slices keep their places in the row.
    part = jnp.arange(len(hops), dtype=jnp.int32)[:, None] * (rows * length)
    sent = of_hops(sent)
    place = sent.start + row[:, None]
    arrival = place + part
    to = -1 if ahead else 1
    return lax.ragged_all_to_all(
        x.reshape(copies * rows * length, -1),
        jnp.zeros((len(hops) * rows * length, math.prod(x.shape[3:])), x.dtype),
        by_device(place if copies == 1 else arrival, to),
        by_device(sent.size, to),
        by_device(arrival, to),
        by_device(of_hops(received).size, -to),
        axis_name=CONTEXT,
    ).reshape(len(hops), *x.shape[1:])


def _from_device(x: Array, hop: int) -> Array:
    """Receive the array of the device that is `hop` ahead; behind, where that is negative."""
    if hop == 0:
        return x
    devices = lax.axis_size(CONTEXT)
    return lax.ppermute(x, CONTEXT, [(i, (i - hop) % devices) for i in range(devices)])


def _over_pieces(
    work: Callable[..., tuple[Any, Any]], carry: Any, k: Array, v: Array, plan: ContextPlan
) -> tuple[Any, list[Any]]:
    """Fold `work(carry, number, k, v)` over the pieces; return the carry, and the gradients returned to the owners.

    The next piece arrives, and what was made of the one before returns, while `work` is done. The
    barriers keep XLA from waiting for them earlier, and from having more than two pieces in memory.
    """
    # With pieces 0 1 2, what is under way while `work` is done on a piece:
    #   work on 0    piece 1 arrives
    #   work on 1    piece 2 arrives    what 0 made returns
    #   work on 2                       what 1 made returns
    #   (behind)                        what 2 made returns
    hops = pieces(lax.axis_size(CONTEXT) if len(plan.pieces) > 1 else 1)
    sent = piece = k, v
    leaving: Any = None
    returned = []
    for number in range(len(hops)):
        arriving = _receive(sent, hops[number + 1], plan) if number + 1 < len(hops) else None
        returning = _return_gradients(leaving, hops[number - 1], plan) if number else None
        carry, leaving = work(carry, number, *piece)
        carry, leaving, returning, piece, sent = lax.optimization_barrier(
            (carry, leaving, returning, arriving, sent)
        )
        returned.append(returning)
    return carry, [*returned[1:], _return_gradients(leaving, hops[-1], plan)]


def _forward(
    q: Array, k: Array, v: Array, plan: ContextPlan, kernel: Kernel, sinks: Array | None
) -> tuple[Array, Array]:
    plan = select_mask(plan)
    local = plan.pieces[0]

    def attend(
        merged: tuple[Array, Array] | None, number: int, k: Array, v: Array
    ) -> tuple[tuple[Array, Array], None]:
        attended = kernel.forward(q, k, v, local, plan.pieces[number])
        return attended if merged is None else _merge(kernel, merged, attended), None

    (out, lse), _ = _over_pieces(attend, None, k, v, plan)
    if sinks is not None:
        # A key more, of the value 0.
        sink = _of_base(kernel, sinks)
        out, lse = _merge(
            kernel, (out, lse), (jnp.zeros_like(out), jnp.broadcast_to(sink, lse.shape))
        )
    return out.astype(q.dtype), lse


def _of_base(kernel: Kernel, sinks: Array) -> Float[Array, "n 1"]:
    """Convert scores of heads to the base of the kernel's exponents."""
    return (sinks.astype(jnp.float32) * kernel.log(jnp.float32(math.e)))[:, None]


def _merge(
    kernel: Kernel, first: tuple[Array, Array], second: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Merge outputs and log-sum-exps over two sets of keys, by the sums of exponents that outputs were divided by."""
    # Each output is divided by its own sum of exponents, e^lse, so it counts as e^lse of the total.
    # lse is [B, N, T] and outputs are [B, T, N, H].
    (out, lse), (other_out, other_lse) = first, second
    largest = jnp.maximum(lse, other_lse)
    base = jnp.where(largest == -jnp.inf, 0, largest)  # -inf - -inf would be NaN
    weight, other_weight = kernel.exp(lse - base), kernel.exp(other_lse - base)
    total = weight + other_weight
    share, other_share = (
        jnp.moveaxis(w / jnp.where(total == 0, 1, total), 1, 2) for w in (weight, other_weight)
    )
    return out * share[..., None] + other_out * other_share[..., None], base + kernel.log(total)


def _forward_with_residuals(
    q: Array, k: Array, v: Array, plan: ContextPlan, kernel: Kernel, sinks: Array | None
) -> tuple[Array, tuple]:
    out, lse = _forward(q, k, v, plan, kernel, sinks)
    # The names that remat policies save, so that these do not run the kernel again.
    out = checkpoint_name(out, "attention_output")
    lse = checkpoint_name(lse, "attention_logsumexp")
    return out, (q, k, v, plan, sinks, out, lse)


def _backward(kernel: Kernel, residuals: tuple, d_out: Array) -> tuple[Array | None, ...]:
    q, k, v, plan, sinks, out, lse = residuals
    delta = jnp.einsum("btnh,btnh->bnt", out.astype(jnp.float32), d_out.astype(jnp.float32))
    plan = select_mask(plan)
    local = plan.pieces[0]

    def gradients(
        d_q: Array | None, number: int, k: Array, v: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        d_q_part, *of_keys = kernel.gradients(
            q, k, v, local, plan.pieces[number], d_out, lse, delta
        )
        return d_q_part if d_q is None else d_q + d_q_part, tuple(of_keys)

    d_q, of_keys = _over_pieces(gradients, None, k, v, plan)
    d_k, d_v = reduce(partial(jax.tree.map, jnp.add), of_keys)
    d_qkv = (total.astype(x.dtype) for total, x in zip((d_q, d_k, d_v), (q, k, v), strict=True))
    if sinks is None:
        return *d_qkv, None, None
    # The gradient of a score is weight * (d_weight - delta), and the sink's weight is of no value.
    weight = kernel.exp(_of_base(kernel, sinks) - lse)
    d_sinks = -jnp.sum(weight * delta, axis=(0, 2)).astype(sinks.dtype)
    return *d_qkv, None, d_sinks


attend_in_pieces.defvjp(_forward_with_residuals, _backward)
