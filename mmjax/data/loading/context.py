"""Spread the tokens of packed rows over the devices of context parallelism, with as much attention for each.

Blocks of tokens are dealt so that each device has as many and their queries attend as many keys
(Cornstarch section 4.3.2), and so that samples stay on few devices, short ones on one. Which these
are is data, as everything that says where a token is: other rows compile nothing.
"""

from __future__ import annotations

import numpy as np

from mmjax.balance.mask_work import Mask, block_work
from mmjax.balance.token_blocks import block_samples, distribute_samples, token_order
from mmjax.batch import PADDING, TOKEN_FIELDS, Microbatch, TextBatch, WeightedSlots
from mmjax.config import Encoder
from mmjax.data.loading.text_rows import BatchLayout
from mmjax.data.plan.placement import MicrobatchPlan

MAX_BLOCK = 128  # tokens that stay together: a block of the attention kernel
MIN_BLOCKS = 8  # of a device, so that they can be balanced


def context_block(length: int, context: int) -> int:
    """Choose how many tokens of a row stay together on one of so many devices; a power of two, or 1."""
    block = MAX_BLOCK
    while block > 1 and (length // context % block or length // context < MIN_BLOCKS * block):
        block //= 2
    return block


def tokens_on_device(encoder: Encoder, rows: int, length: int, peers: int, width: int) -> int:
    """Count the slots of a device: `width` tokens of each peer, and those of its rows of so many positions."""
    return peers * width + rows * (
        length // encoder.positions_per_token + encoder.connector.newline
    )


def spread_over_context(
    batch: Microbatch, plan: MicrobatchPlan, layout: BatchLayout, balanced: bool = True
) -> Microbatch:
    """Put the tokens of every row in the order of the devices that get them, and plan how encoder tokens reach these.

    The slots of `batch` index the arrays of all devices of a rank, one after the other; those of
    the result its own.
    balanced: by attention; else, and where a gated delta net reads the tokens in order, every device
    gets the next part of the row. Raises ValueError where the devices cannot have as many tokens
    each.
    """
    context = plan.topology.context
    if context == 1:
        return batch
    text = batch.text
    if (length := text.token.shape[1]) % context:
        raise ValueError(f"rows of {length} tokens cannot be spread over {context} devices")
    if balanced and not layout.in_order:
        orders = [_balanced_order(text, row, context) for row in range(len(text.token))]
        text = _reorder(text, np.array(orders, np.int64).reshape(-1, length))
    slots, spread = dict(text.slots), {}
    for k, (name, encoder) in enumerate(layout.modules.items(), start=1):
        if encoder.is_generator:  # whose conditions go from rank to rank
            continue
        old = text.slots[name]
        indices = old.slot if isinstance(old, WeightedSlots) else old
        sizes = (
            plan.rows[k] // context,
            plan.shape.lengths[k],
            plan.topology.peers,
            plan.shape.widths[k - 1],
        )
        newline = (
            sizes[2] * sizes[3] + sizes[1] // encoder.positions_per_token
            if layout.newline(name)
            else PADDING
        )
        ranks = len(text.send[name]) // context
        local_slots, spread[name] = _spread(
            indices, ranks, context, tokens_on_device(encoder, *sizes), newline
        )
        slots[name] = (
            old._replace(slot=local_slots) if isinstance(old, WeightedSlots) else local_slots
        )
    return batch._replace(text=text._replace(slots=slots, spread=spread))


def _balanced_order(text: TextBatch, row: int, context: int) -> np.ndarray:
    """Order a row's tokens by device, which all attend as many keys, cutting few samples: int32 `[T]`."""
    mask = Mask._make(getattr(text, field)[row] for field in Mask._fields)
    length = len(mask.sample)
    block = context_block(length, context)
    rank = distribute_samples(block_work(mask, block), block_samples(mask, block), context)
    return token_order(rank, length, block)[0]


def _reorder(text: TextBatch, order: np.ndarray) -> TextBatch:
    """Take every row's tokens in this order, int `[R, T]`."""
    rows = np.arange(len(order))[:, None]
    taken = {f: getattr(text, f)[rows, order] for f in TOKEN_FIELDS}
    slots = {
        name: WeightedSlots._make(x[rows, order] for x in old)
        if isinstance(old, WeightedSlots)
        else old[rows, order]
        for name, old in text.slots.items()
    }
    inputs = {name: values[rows, order] for name, values in text.loss_inputs.items()}
    return TextBatch(
        **taken, slots=slots, send=text.send, condition=text.condition, loss_inputs=inputs
    )


def _spread(
    slots: np.ndarray, ranks: int, context: int, tokens: int, newline: int
) -> tuple[np.ndarray, np.ndarray]:
    """Plan what each device of a rank sends to the others, and where the positions of these find it.

    slots: `[R, T, ...]` of these ranks, `device * tokens + index`, -1 = nothing. newline: index of
    a token that every device has. Returns the slots of each device, and int32 `[ranks * context,
    context, tokens]` of what is sent.
    """
    shape = ranks, len(slots) // max(1, ranks), context, slots.shape[1] // context, *slots.shape[2:]
    parts = slots.reshape(shape)
    sent = np.full((ranks, context, context, tokens), PADDING, np.int32)
    local_slots = np.full(parts.shape, PADDING, np.int32)
    for rank, receiver in np.ndindex(ranks, context):
        indices = parts[rank, :, receiver]
        valid = indices >= 0
        device, index = np.divmod(indices[valid], tokens)
        device = np.where(index == newline, receiver, device)
        place = context * tokens + index  # of what is here already: behind all that may arrive
        for sender in range(context):
            if sender != receiver and (from_sender := device == sender).any():
                # A token that several positions want, as interpolated images do, is sent once.
                needed, which = np.unique(index[from_sender], return_inverse=True)
                sent[rank, sender, receiver, : len(needed)] = needed
                place[from_sender] = sender * tokens + which
        local_slots[rank, :, receiver][valid] = place
    return local_slots.reshape(slots.shape), sent.reshape(ranks * context, context, tokens)
