"""Send encoder outputs from the ranks that made them to the rows that train on them: one all-to-all (OrchMLLM 6).

The plan is data: tables of fixed shape, made on the host by `balance.exchange.exchange_tables`, so
another plan compiles nothing. Tokens that stay on their rank never enter the all-to-all, and a
width of 0 leaves no collective at all. The backward pass is the same exchange the other way. Where
a rank is several devices of the tensor axis, which all hold the same tokens, each sends its part of
their width and they gather what arrives: nothing is sent between ranks twice. Where a rank is
several devices of the context axis, each has encoded items of its own and exchanges with its
neighbours on other ranks; a second all-to-all inside the rank brings every token to the device that
holds its position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.config import Exchange
from mmjax.parallel.sharding import CONTEXT, RANKS, TENSOR, row_ranks


def dispatch(
    tokens: Float[Array, "rows length width"],
    send: Int[Array, "devices peers chunk"],
    slots: Int[Array, "text_rows positions *n"],
    mesh: Mesh | None,
    exchange: Exchange = "padded",
    spread: Int[Array, "devices context chunk"] | None = None,
    by_rank: bool = False,
) -> Float[Array, "text_rows positions *n width"]:
    """Bring each position of the text its token as `slots` says, zeros where it is -1.

    send, spread: of all devices that share neither their rows nor their positions, as in
    `TextBatch`; slots index what arrives by `spread`, by `send`, and the device's own tokens. All
    arrays lie over the mesh; without one, they are on one device. exchange: `padded` sends chunks
    of equal size, `ragged` only what is in them (GPU, TPU). by_rank: all devices of a rank have its
    tokens and get all that it is sent, also where they share rows elsewhere. Raises ValueError
    where peers do not divide the ranks, or the mesh has another number of ranks.
    """
    # Rank 0 of 2 has tokens a b c, and sends c to rank 1, which sends d back. Its table `send` is
    # [[-1], [2]] (nothing to itself, token 2 to rank 1), and its slots count in
    #     received from 0, received from 1, own    0 d a b c
    # so a position that takes d has slot 1, and one that takes b has slot 3.
    context = 1 if spread is None else spread.shape[1]
    ranks = len(send) // context
    peers = send.shape[1]
    if ranks % peers:
        raise ValueError(f"{peers} ranks cannot exchange among themselves in a mesh of {ranks}")
    tables = (send,) if spread is None else (send, spread)
    if mesh is None or mesh.size == 1:
        return _on_one_device(tokens, tables, slots)
    if (ranks, context) != (row_ranks(mesh), 1 if by_rank else mesh.shape[CONTEXT]):
        of_context = f" of {context} devices" if context > 1 else ""
        raise ValueError(
            f"a batch made for {ranks} ranks{of_context} cannot run on a mesh of {dict(mesh.shape)}"
        )
    # Static: they decide the program, while tables and slots are its inputs.
    ways = (
        _Way(RANKS, peers, _groups(ranks, peers), exchange, mesh.shape[TENSOR]),
        _Way((CONTEXT,), context, None, exchange, mesh.shape[TENSOR]),
    )
    over = PartitionSpec(RANKS if by_rank else (*RANKS, CONTEXT))
    placed = PartitionSpec(RANKS, None if by_rank else CONTEXT)

    def of_devices(
        part: Callable[..., jax.Array], takes: PartitionSpec, makes: PartitionSpec
    ) -> Callable[..., jax.Array]:
        return jax.shard_map(
            partial(part, ways),
            mesh=mesh,
            in_specs=(takes, over, placed),
            out_specs=makes,
            check_vma=False,
        )

    # By JAX's own rules the devices of a rank would add up their equal gradients in an all-reduce.
    forward = of_devices(_send_tokens, over, placed)
    backward = of_devices(
        partial(_return_gradients, shape=(len(tokens) // len(send), *tokens.shape[1:])),
        placed,
        over,
    )
    moved = jax.custom_vjp(forward)
    moved.defvjp(
        lambda tokens, tables, slots: (forward(tokens, tables, slots), (tables, slots)),
        lambda plan, back: (backward(back, *plan), None, None),
    )
    return moved(tokens, tables, slots)


class _Way(NamedTuple):
    """A way to exchange among `peers` devices along mesh axes.

    groups: of devices that do, None = all together. tensor: devices that hold the same tokens.
    """

    axes: tuple[str, ...]
    peers: int
    groups: list[list[int]] | None
    exchange: Exchange
    tensor: int


def _groups(ranks: int, peers: int) -> list[list[int]] | None:
    """Group neighbouring ranks: [[0, 1], [2, 3]] of 4 ranks with 2 peers; None where all are peers."""
    return (
        None
        if peers == ranks
        else [list(range(first, first + peers)) for first in range(0, ranks, peers)]
    )


def _send_tokens(
    ways: tuple[_Way, ...], tokens: jax.Array, tables: tuple[jax.Array, ...], slots: jax.Array
) -> jax.Array:
    """Run one device's part of the exchanges."""
    local = tokens.reshape(-1, tokens.shape[-1])
    for way, (send,) in zip(ways, tables, strict=False):
        if send.size:
            sizes = (send >= 0).sum(1, dtype=jnp.int32)
            # `send` is `[peers, chunk]`: the tokens for each peer side by side, padded with zeros.
            received = _exchange_chunks(way, _take(local, send), sizes, outward=True)
            # The order that slots count in: what came from the peers, then what was here.
            local = jnp.concatenate([received.reshape(-1, local.shape[-1]), local])
    return _take(local, slots)


def _return_gradients(
    ways: tuple[_Way, ...],
    back: jax.Array,
    tables: tuple[jax.Array, ...],
    slots: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    """Transpose `_send_tokens`: sum the gradients of a device's tokens from its own rows and from its peers."""
    *_, width = shape
    sends = [(way, send) for way, (send,) in zip(ways, tables, strict=False) if send.size]
    length = math.prod(shape[:-1]) + sum(send.size for _, send in sends)
    gradients = _take_transposed(back.reshape(-1, width), slots.reshape(-1), length)
    for way, send in reversed(sends):
        # What the peers' rows say of this device's tokens comes back over the same exchange, and
        # adds up where a token went to several.
        arrived, gradients = (
            gradients[: send.size].reshape(*send.shape, width),
            gradients[send.size :],
        )
        sizes = (send >= 0).sum(1, dtype=jnp.int32)
        gradients += _take_transposed(
            _exchange_chunks(way, arrived, sizes, outward=False), send, len(gradients)
        )
    return gradients.reshape(shape)


def _exchange_chunks(way: _Way, chunks: jax.Array, sizes: jax.Array, outward: bool) -> jax.Array:
    """Exchange chunks `[peers, chunk, width]`: chunk k goes to peer k, and that peer's chunk takes its place.

    sizes: how many tokens it sends to each in the forward pass, int32 `[peers]`; outward: whether
    this is that.
    """
    cut = way.tensor > 1 and chunks.shape[-1] % way.tensor == 0
    part = chunks
    if cut:
        width = chunks.shape[-1] // way.tensor
        # All devices of a rank hold the same tokens: device i sends channels i * width on.
        part = jax.lax.dynamic_slice_in_dim(
            chunks, jax.lax.axis_index(TENSOR) * width, width, axis=-1
        )
    if way.exchange == "ragged":
        received = _exchange_ragged(way, part, sizes, outward)
    else:
        received = jax.lax.all_to_all(part, way.axes, 0, 0, axis_index_groups=way.groups)
    return (
        jax.lax.all_gather(received, TENSOR, axis=received.ndim - 1, tiled=True)
        if cut
        else received
    )


def _exchange_ragged(way: _Way, chunks: jax.Array, sizes: jax.Array, outward: bool) -> jax.Array:
    """Exchange the filled tokens of chunks `[peers, chunk, width]`; they arrive where a padded exchange puts them."""
    arriving = jax.lax.all_to_all(sizes, way.axes, 0, 0, axis_index_groups=way.groups, tiled=True)
    # The backward pass returns to each peer as many tokens as came from it.
    sent, received = (sizes, arriving) if outward else (arriving, sizes)
    peers, chunk, width = chunks.shape
    # Every rank's chunk for peer 2 of 4 begins at 2 * chunk here; at peer 2 it lands at (this rank
    # % 4) * chunk.
    begins = jnp.arange(peers, dtype=jnp.int32) * chunk
    mine = jnp.full(peers, jax.lax.axis_index(way.axes) % peers * chunk, jnp.int32)
    flat = chunks.reshape(peers * chunk, width)
    options = {"axis_name": way.axes, "axis_index_groups": way.groups}
    exchanged = jax.lax.ragged_all_to_all(
        flat, jnp.zeros_like(flat), begins, sent, mine, received, **options
    )
    return exchanged.reshape(chunks.shape)


def _on_one_device(tokens: jax.Array, tables: tuple[jax.Array, ...], slots: jax.Array) -> jax.Array:
    """Exchange with the arrays of all ranks on one device: a transpose of sender and receiver."""
    devices = len(tables[0])
    width = tokens.shape[-1]
    context = tables[1].shape[1] if tables[1:] else 1
    local = tokens.reshape(devices, len(tokens) // devices * tokens.shape[1], width)
    for send, among in zip(tables, (context, 1), strict=False):
        _, peers, chunk = send.shape
        # Peers are `among` apart. [group, sender, device of a rank, receiver, chunk, width]:
        # swapping sender and receiver is the exchange.
        groups = devices // (peers * among)
        chunks = jax.vmap(_take)(local, send).reshape(groups, peers, among, peers, chunk, width)
        received = chunks.swapaxes(1, 3).reshape(devices, peers * chunk, width)
        local = jnp.concatenate([received, local], axis=1)
    # [rank, row, device of a rank, its positions of the row].
    ranks = devices // context
    parts = slots.reshape(
        ranks, len(slots) // ranks, context, slots.shape[1] // context, *slots.shape[2:]
    )
    parts = parts.swapaxes(1, 2)
    placed = jax.vmap(_take)(local, parts.reshape(devices, *parts.shape[2:]))
    return placed.reshape(*parts.shape, width).swapaxes(1, 2).reshape(*slots.shape, width)


def _take(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Pick the tokens at these positions, zeros where they are -1."""
    return jnp.where((positions >= 0)[..., None], tokens[jnp.maximum(positions, 0)], 0)


def _take_transposed(back: jax.Array, positions: jax.Array, length: int) -> jax.Array:
    """Transpose `_take`: each of `length` tokens gets the sum over the positions that took it."""
    tokens = jax.ShapeDtypeStruct((length, back.shape[-1]), back.dtype)
    return jax.linear_transpose(partial(_take, positions=positions), tokens)(back)[0]
