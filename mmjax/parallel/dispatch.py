"""Encoder outputs from the ranks that made them to the rows that train on them: one all-to-all (OrchMLLM 6).

The plan is data: tables of fixed shape, made on the host by `balance.rearrangement.tables`, so another plan compiles
nothing. Tokens that stay on their rank never enter the all-to-all, and a width of 0 leaves no collective at all.
The backward pass is the same exchange the other way, by JAX's own rules.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from mmjax.config import Exchange
from mmjax.parallel.mesh import RANKS, row_ranks


def dispatch(
    tokens: Float[Array, "ranks length width"],
    send: Int[Array, "ranks peers chunk"],
    gather: Int[Array, "ranks capacity"],
    mesh: Mesh | None,
    exchange: Exchange = "padded",
) -> Float[Array, "ranks capacity width"]:
    """Each rank's tokens as `gather` wants them, zeros where it is -1; one all-to-all among `peers` neighbouring ranks.

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
    over = PartitionSpec(RANKS)
    part = partial(_exchange, groups=_groups(ranks, peers), exchange=exchange)
    return jax.shard_map(part, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)(tokens, send, gather)


def _groups(ranks: int, peers: int) -> list[list[int]] | None:
    return None if peers == ranks else [list(range(first, first + peers)) for first in range(0, ranks, peers)]


def _exchange(
    tokens: jax.Array, send: jax.Array, gather: jax.Array, groups: list[list[int]] | None, exchange: Exchange
) -> jax.Array:
    """One rank's part: leading axes of 1."""
    own, send, gather = tokens[0], send[0], gather[0]
    if send.size:
        chunks = _pick(own, send)
        if exchange == "ragged":
            received = _ragged(chunks, (send >= 0).sum(1, dtype=jnp.int32), groups)
        else:
            received = jax.lax.all_to_all(chunks, RANKS, 0, 0, axis_index_groups=groups)
        own = jnp.concatenate([received.reshape(-1, own.shape[-1]), own])
    return _pick(own, gather)[None]


def _ragged(chunks: jax.Array, sizes: jax.Array, groups: list[list[int]] | None) -> jax.Array:
    """The first `sizes` `[peers]` tokens of every chunk `[peers, chunk, width]`, where a padded exchange puts them."""
    arriving = jax.lax.all_to_all(sizes, RANKS, 0, 0, axis_index_groups=groups, tiled=True)

    def send(chunks: jax.Array, sizes: jax.Array, arriving: jax.Array) -> jax.Array:
        peers, chunk, width = chunks.shape
        begins = jnp.arange(peers, dtype=jnp.int32) * chunk
        mine = jnp.full(peers, jax.lax.axis_index(RANKS) % peers * chunk, jnp.int32)
        flat = chunks.reshape(peers * chunk, width)
        options = {"axis_name": RANKS, "axis_index_groups": groups}
        found = jax.lax.ragged_all_to_all(flat, jnp.zeros_like(flat), begins, sizes, mine, arriving, **options)
        return found.reshape(chunks.shape)

    # JAX's own rule forgets the groups. What came from a peer goes back to it: the same exchange, the sizes swapped.
    exchange = jax.custom_vjp(send)
    exchange.defvjp(
        lambda chunks, sizes, arriving: (send(chunks, sizes, arriving), (sizes, arriving)),
        lambda kept, back: (send(back, kept[1], kept[0]), None, None),
    )
    return exchange(chunks, sizes, arriving)


def _on_one_device(tokens: jax.Array, send: jax.Array, gather: jax.Array) -> jax.Array:
    """The same with the arrays of all ranks at hand: what rank a sends to b is what b gets from a."""
    ranks, peers, chunk = send.shape
    width = tokens.shape[-1]
    chunks = jax.vmap(_pick)(tokens, send).reshape(ranks // peers, peers, peers, chunk, width)
    received = chunks.swapaxes(1, 2).reshape(ranks, peers * chunk, width)
    return jax.vmap(_pick)(jnp.concatenate([received, tokens], axis=1), gather)


def _pick(tokens: jax.Array, at: jax.Array) -> jax.Array:
    """The tokens at these positions, zeros where they are -1."""
    return jnp.where((at >= 0)[..., None], tokens[jnp.maximum(at, 0)], 0)
