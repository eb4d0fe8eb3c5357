"""Send encoder outputs from the ranks that made them to the rows that train on them: one all-to-all (OrchMLLM 6).

The plan is data: tables of fixed shape, made on the host by `balance.rearrangement.tables`, so another plan compiles
nothing. Tokens that stay on their rank never enter the all-to-all, and a width of 0 leaves no collective at all.
The backward pass is the same exchange the other way. Where a rank is several devices of the tensor axis, which all hold
the same tokens, each sends its part of their width and they gather what arrives: nothing is sent between ranks twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.config import Exchange
from mmjax.parallel.sharding import RANKS, TENSOR, row_ranks


def dispatch(
    tokens: Float[Array, "ranks length width"],
    send: Int[Array, "ranks peers chunk"],
    gather: Int[Array, "ranks capacity"],
    mesh: Mesh | None,
    exchange: Exchange = "padded",
) -> Float[Array, "ranks capacity width"]:
    """Bring each rank its tokens as `gather` says, zeros where it is -1, by one all-to-all among `peers` neighbours.

    send, gather: as in `balance.rearrangement.Tables`, of all ranks; `peers` divides their number. All arrays lie over
    the ranks of the mesh; without one, all ranks are on one device. exchange: `padded` sends chunks of equal size,
    `ragged` only what is in them (GPU, TPU). Raises ValueError where peers do not divide the ranks, or the mesh has
    another number of ranks.
    """
    ranks, peers, _ = send.shape
    if ranks % peers:
        raise ValueError(f"{peers} ranks cannot exchange among themselves in a mesh of {ranks}")
    if mesh is None or mesh.size == 1:
        return _on_one_device(tokens, send, gather)
    if ranks != row_ranks(mesh):
        raise ValueError(f"a batch made for {ranks} ranks cannot run on a mesh of {row_ranks(mesh)}")
    # Static: they decide the program, while `send` and `gather` are its inputs.
    way = _Way(_groups(ranks, peers), exchange, mesh.shape[TENSOR])
    length = tokens.shape[1]
    over = PartitionSpec(RANKS)

    def of_ranks(part: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return jax.shard_map(partial(part, way), mesh=mesh, in_specs=over, out_specs=over, check_vma=False)

    # By JAX's own rules the devices of a rank would add up their equal gradients in an all-reduce.
    forward = of_ranks(_bring)
    backward = of_ranks(partial(_return, length=length))
    moved = jax.custom_vjp(forward)
    moved.defvjp(
        lambda tokens, send, gather: (forward(tokens, send, gather), (send, gather)),
        lambda tables, back: (backward(back, *tables), None, None),
    )
    return moved(tokens, send, gather)


class _Way(NamedTuple):
    """A way to exchange. groups: of ranks that do, None = all together. tensor: devices that each rank is."""

    groups: list[list[int]] | None
    exchange: Exchange
    tensor: int


def _groups(ranks: int, peers: int) -> list[list[int]] | None:
    return None if peers == ranks else [list(range(first, first + peers)) for first in range(0, ranks, peers)]


def _bring(way: _Way, tokens: jax.Array, send: jax.Array, gather: jax.Array) -> jax.Array:
    """Run one rank's part of the exchange, on arrays with leading axes of 1."""
    local, send, gather = tokens[0], send[0], gather[0]
    if send.size:
        sizes = (send >= 0).sum(1, dtype=jnp.int32)
        # `send` is `[peers, chunk]`: the tokens for each peer side by side, padded with zeros.
        received = _swap(way, _pick(local, send), sizes, outward=True)
        # The order that `gather` counts in: what came from the peers, then the rank's own.
        local = jnp.concatenate([received.reshape(-1, local.shape[-1]), local])
    return _pick(local, gather)[None]


def _return(way: _Way, back: jax.Array, send: jax.Array, gather: jax.Array, length: int) -> jax.Array:
    """Transpose `_bring`: return what arrives of a rank's `length` tokens' gradients, from its rows and its peers."""
    back, send, gather = back[0], send[0], gather[0]
    width = back.shape[-1]
    arrived = send.size  # tokens from peers, which lie before the rank's `length` tokens as `_bring` puts them
    placed = _unpick(back, gather, arrived + length)
    local = placed[arrived:]
    if arrived:
        sizes = (send >= 0).sum(1, dtype=jnp.int32)
        # What the peers' rows say of this rank's tokens comes back over the same exchange, and adds up where a token
        # went to several.
        local += _unpick(_swap(way, placed[:arrived].reshape(*send.shape, width), sizes, outward=False), send, length)
    return local[None]


def _swap(way: _Way, chunks: jax.Array, sizes: jax.Array, outward: bool) -> jax.Array:
    """Exchange the chunks `[peers, chunk, width]` that this rank has for its peers for those they have for it.

    sizes: how many tokens it sends to each in the forward pass, int32 `[peers]`; outward: whether this is that.
    """
    cut = way.tensor > 1 and chunks.shape[-1] % way.tensor == 0
    part = chunks
    if cut:
        width = chunks.shape[-1] // way.tensor
        # All devices of a rank hold the same tokens: device i sends channels i * width on.
        part = jax.lax.dynamic_slice_in_dim(chunks, jax.lax.axis_index(TENSOR) * width, width, axis=-1)
    if way.exchange == "ragged":
        received = _ragged(part, sizes, way.groups, outward)
    else:
        received = jax.lax.all_to_all(part, RANKS, 0, 0, axis_index_groups=way.groups)
    return jax.lax.all_gather(received, TENSOR, axis=received.ndim - 1, tiled=True) if cut else received


def _ragged(chunks: jax.Array, sizes: jax.Array, groups: list[list[int]] | None, outward: bool) -> jax.Array:
    """Exchange the filled tokens of chunks `[peers, chunk, width]`; they arrive where a padded exchange puts them."""
    arriving = jax.lax.all_to_all(sizes, RANKS, 0, 0, axis_index_groups=groups, tiled=True)
    # The backward pass returns to each peer as many tokens as came from it.
    sent, received = (sizes, arriving) if outward else (arriving, sizes)
    peers, chunk, width = chunks.shape
    # Every rank's chunk for peer 2 of 4 begins at 2 * chunk here; at peer 2 it lands at (this rank % 4) * chunk.
    begins = jnp.arange(peers, dtype=jnp.int32) * chunk
    mine = jnp.full(peers, jax.lax.axis_index(RANKS) % peers * chunk, jnp.int32)
    flat = chunks.reshape(peers * chunk, width)
    options = {"axis_name": RANKS, "axis_index_groups": groups}
    exchanged = jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), begins, sent, mine, received, **options)
    return exchanged.reshape(chunks.shape)


def _on_one_device(tokens: jax.Array, send: jax.Array, gather: jax.Array) -> jax.Array:
    """Exchange with the arrays of all ranks on one device: what rank a sends to b is what b gets from a."""
    ranks, peers, chunk = send.shape
    width = tokens.shape[-1]
    # [group, sender, receiver, chunk, width]; swapping sender and receiver is the exchange.
    chunks = jax.vmap(_pick)(tokens, send).reshape(ranks // peers, peers, peers, chunk, width)
    received = chunks.swapaxes(1, 2).reshape(ranks, peers * chunk, width)
    return jax.vmap(_pick)(jnp.concatenate([received, tokens], axis=1), gather)


def _pick(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Pick the tokens at these positions, zeros where they are -1."""
    return jnp.where((positions >= 0)[..., None], tokens[jnp.maximum(positions, 0)], 0)


def _unpick(back: jax.Array, positions: jax.Array, length: int) -> jax.Array:
    """Transpose `_pick`: each of `length` tokens gets the sum of what its places have."""
    tokens = jax.ShapeDtypeStruct((length, back.shape[-1]), back.dtype)
    return jax.linear_transpose(partial(_pick, positions=positions), tokens)(back)[0]
