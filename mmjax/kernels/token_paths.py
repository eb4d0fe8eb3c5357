"""Paths of the tokens of packed rows, for layers that read a sample's tokens in order.

A path is a sample's number, int32, or where samples have branches, the number of a branch: each
continues branch 0 of its sample, the trunk, from where the branch begins, as if no other branch
were there. Tokens of a path other than a trunk are neighbours. -1 is no path.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from mmjax.batch import FIRST_BRANCH_BIT

_BRANCHES = 32  # a power of two, more than a sample has


def paths_of(sample: Int[Array, "b t"], kind: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Number the branches of all samples; -1 where `sample` is."""
    branch = 32 - lax.clz(kind >> FIRST_BRANCH_BIT)
    return jnp.where(sample >= 0, sample * _BRANCHES + branch, -1)


def trunk_of(path: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Return the path of the same sample's branch 0; of -1 a path that no token has."""
    return path & -_BRANCHES


def continues(
    later: Int[Array, "*b"], earlier: Int[Array, "*b"], branched: bool
) -> Bool[Array, "*b"]:
    """Tell whether a later token's path contains an earlier token. branched: samples may have branches."""
    same = later == earlier
    return same | (trunk_of(later) == earlier) if branched else same


def extend_paths(path: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Give padding the path before it, so that the state of this path outlives it."""
    column = jnp.arange(path.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(path, lax.cummax(jnp.where(path >= 0, column, 0), axis=1), axis=1)


def last_in_trunk(path: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return the column of the last token up to each that is in a trunk, of any sample; -1 before the first."""
    column = jnp.arange(path.shape[1], dtype=jnp.int32)
    return lax.cummax(jnp.where(path == trunk_of(path), column, -1), axis=1)


def token_before(path: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return the column of the token before each on its path, -1 where there is none.

    Those of a sample 0 0 A A B B are -1 0 1 2 1 4.
    """
    column = jnp.arange(path.shape[1], dtype=jnp.int32)
    neighbour, latest = (
        jnp.pad(x[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        for x in (path, last_in_trunk(path))
    )
    of_latest = jnp.take_along_axis(path, jnp.maximum(latest, 0), axis=1)
    forked = jnp.where((latest >= 0) & (of_latest == trunk_of(path)), latest, -1)
    return jnp.where((neighbour == path) & (path >= 0), column - 1, forked)


def earlier_tokens(
    previous: Int[Array, "b t"], column: Int[Array, "b n"], count: int
) -> list[Int[Array, "b n"]]:
    """Follow paths back from these columns, `count` times; -1 where a path has begun. previous: `token_before`."""
    columns = []
    for _ in range(count):
        earlier = jnp.take_along_axis(previous, jnp.maximum(column, 0), axis=1)
        column = jnp.where(column >= 0, earlier, -1)
        columns.append(column)
    return columns


def last_trunk_tokens(
    path: Int[Array, "b t"], column: Int[Array, " n"], count: int
) -> Int[Array, "b n c"]:
    """Return the columns of the last `count` tokens of a trunk before each of these, latest first; -1: none."""
    latest = jnp.pad(last_in_trunk(path), ((0, 0), (1, 0)), constant_values=-1)[:, column]
    return jnp.stack([latest, *earlier_tokens(token_before(path), latest, count - 1)], -1)
