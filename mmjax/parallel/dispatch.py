"""Encoder outputs from the ranks that made them to the rows that train on them: one padded all-to-all (OrchMLLM 6).

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

from mmjax.parallel.mesh import row_ranks

ROWS = ("data", "fsdp")  # the mesh axes whose product is the ranks


def dispatch(
    tokens: Float[Array, "ranks length width"],
    send: Int[Array, "ranks peers chunk"],
    gather: Int[Array, "ranks capacity"],
    mesh: Mesh,
) -> Float[Array, "ranks capacity width"]:
    """Each rank's tokens as `gather` wants them, zeros where it is -1; one all-to-all among `peers` neighbouring ranks.

    send, gather: as in `balance.rearrangement.Tables`, of all ranks; `peers` divides their number. All arrays lie over
    the ranks of the mesh. Raises ValueError where peers do not divide the ranks.
    """
    ranks, peers = row_ranks(mesh), send.shape[1]
    if ranks % peers:
        raise ValueError(f"{peers} ranks cannot exchange among themselves in a mesh of {ranks}")
    over = PartitionSpec(ROWS)
    exchange = partial(_exchange, groups=_groups(ranks, peers))
    return jax.shard_map(exchange, mesh=mesh, in_specs=over, out_specs=over, check_vma=False)(tokens, send, gather)


def _groups(ranks: int, peers: int) -> list[list[int]] | None:
    return None if peers == ranks else [list(range(first, first + peers)) for first in range(0, ranks, peers)]


def _exchange(tokens: jax.Array, send: jax.Array, gather: jax.Array, groups: list[list[int]] | None) -> jax.Array:
    """One rank's part: leading axes of 1."""
    own, send, gather = tokens[0], send[0], gather[0]
    if send.size:
        received = jax.lax.all_to_all(_pick(own, send), ROWS, 0, 0, axis_index_groups=groups)
        own = jnp.concatenate([received.reshape(-1, own.shape[-1]), own])
    return _pick(own, gather)[None]


def _pick(tokens: jax.Array, at: jax.Array) -> jax.Array:
    """The tokens at these positions, zeros where they are -1."""
    return jnp.where((at >= 0)[..., None], tokens[jnp.maximum(at, 0)], 0)
