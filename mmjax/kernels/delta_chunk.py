"""Compute parts of one chunk of one head of the gated delta rule, for the kernels.

Kernels multiply matrices, forward and backward; gradients of all else are JAX's of these functions.

With decays D within the chunk, those of the state, r, and those until its end, e (section 3.3 of
Yang et al. 2025, "Gated Delta Networks"): A is the strictly lower part of diag(beta) K K' * D,
(1 + A) N = diag(beta) (V - diag(r) K S), the outputs are diag(r) Q S + (Q K' * D) N, and the next
state is r_last S + K' diag(e) N. Where samples have branches there are two states, that behind the
path of the last token and that behind its trunk; every token reads one of them, and each next state
has its own e.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mmjax.kernels.token_paths import continues, trunk_of

CHUNK = 64  # tokens
BLOCK = 16  # tokens of a chunk whose system is solved row by row
OPERANDS = jnp.bfloat16  # of products
SMALLEST = -104.0  # logarithm of a decay that is 0 in float32


class Chunk(NamedTuple):
    """The tokens of a chunk, of one head."""

    q: Array  # [C, K], normalised
    k: Array  # [C, K], normalised
    v: Array  # [C, V]
    g: Array  # [C], logarithms of decays, float32
    beta: Array  # [C], float32


class Paths(NamedTuple):
    """Paths of tokens (`mmjax.kernels.token_paths`), and of the token before a chunk, whose states reach it."""

    path: Array  # of a chunk [C]
    owner: Array  # of a chunk a scalar


class Decays(NamedTuple):
    """Decays within a chunk, float32, by state; 0 where a state or another token is not on a token's path."""

    between: Array  # [C, C], from column to row
    reads: tuple[Array, ...]  # [C], from a state before the chunk to each token
    ends: tuple[Array, ...]  # [C], from each token to a state behind the chunk
    kept: tuple[tuple[Array, ...], ...]  # scalars, from each state before it, by state behind it


class Solved(NamedTuple):
    """The operands of a chunk beside its tokens and the states before it."""

    inverse: Array  # [C, C], of 1 + A
    reads: tuple[Array, ...]  # these as of Decays
    ends: tuple[Array, ...]
    kept: tuple[tuple[Array, ...], ...]


def dot(a: Array, b: Array) -> Array:
    """Multiply matrices, rounded to 2 bytes a number, into float32."""
    return lax.dot(*(x.astype(OPERANDS) for x in (a, b)), preferred_element_type=jnp.float32)


def precise_dot(a: Array, b: Array) -> Array:
    """Multiply float32 matrices, of which the first 16 bits count."""
    # Products of the first and of the last 8 bits, but for that of the last with the last.
    (a, a_rest), (b, b_rest) = _parts(a), _parts(b)
    return dot(a, b) + (dot(a, b_rest) + dot(a_rest, b))


def _parts(x: Array) -> tuple[Array, Array]:
    first = x.astype(OPERANDS)
    return first, x - first.astype(jnp.float32)


def indices(*shape: int) -> list[Array]:
    """Return the index of every element along each axis."""
    return [lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape))]


def decays_of(g: Array, paths: Paths, branched: bool) -> Decays:
    """Compute decays from their logarithms. branched: samples may have branches."""
    path, owner = paths
    row, column = indices(CHUNK, CHUNK)
    low = continues(path[:, None], path[None, :], branched) & (row >= column)
    # Sums over the tokens of a path alone: with those before it in the chunk they would round as
    # these are. What is below the smallest float32 would only round the differences.
    g = jnp.maximum(g, SMALLEST)
    since = jnp.sum(jnp.where(low, g[None, :], 0.0), 1)
    # Masked before the exponential too: above the diagonal it overflows, and gradients were NaN.
    between = jnp.where(low, since[:, None] - since[None, :], -jnp.inf)
    between = jnp.exp(between)
    read = jnp.exp(since)
    on_path = path == owner
    (number,) = indices(CHUNK)
    reads = (jnp.where(on_path, read, 0.0),)
    ends = (number == CHUNK - 1,)
    untouched = None
    if branched:
        of_sample = trunk_of(path) == trunk_of(owner)
        reads += (jnp.where(of_sample & ~on_path, read, 0.0),)
        last = jnp.sum(jnp.where(ends[0], path, 0))
        # The last token of the trunk that the last token is of, or continues.
        end = jnp.max(jnp.where(path == trunk_of(last), number, -1))
        ends += (number == end,)
        # Without one in the chunk the state of the trunk stays what it is.
        untouched = (end < 0) & (trunk_of(last) == trunk_of(owner))
    kept = [tuple(jnp.sum(jnp.where(at, x, 0.0)) for x in reads) for at in ends]
    if branched:
        kept[1] = kept[1][0], jnp.where(untouched, 1.0, kept[1][1])
    return Decays(
        between=between,
        reads=reads,
        ends=tuple(jnp.sum(jnp.where(at[:, None], between, 0.0), 0) for at in ends),
        kept=tuple(kept),
    )


def system_of(products: Array, beta: Array, decays: Decays) -> Array:
    """Compute A, strictly lower triangular `[C, C]`. products: of keys, K K'."""
    row, column = indices(CHUNK, CHUNK)
    return jnp.where(row > column, products * decays.between * beta[:, None], 0.0)


def inverse_of(system: Array) -> Array:
    """Invert `1 + system`, strictly lower triangular `[C, C]`: row by row in blocks of 16, which are then merged.

    (A product of `1 + (-system)^(2^n)` overflows where keys repeat.)
    """
    blocks = CHUNK // BLOCK
    number, _, other, _ = indices(blocks, BLOCK, blocks, BLOCK)
    diagonal = number == other
    # [C, C] -> the blocks on its diagonal, [blocks, 16, 16].
    low = jnp.sum(jnp.where(diagonal, system.reshape(diagonal.shape), 0.0), 2)
    _, row, column = indices(blocks, BLOCK, BLOCK)

    # Row i of the inverse is the unit's, less row i of `low` times the rows above, which are done.
    def solve(i: Array, inverse: Array) -> Array:
        coefficients = jnp.sum(jnp.where(row == i, low, 0.0), 1)  # [blocks, 16]
        above = jnp.sum(coefficients[:, :, None] * inverse, 1)
        return jnp.where(row == i, inverse - above[:, None, :], inverse)

    inverse = lax.fori_loop(1, BLOCK, solve, jnp.where(row == column, 1.0, 0.0))
    whole = jnp.where(diagonal, inverse[:, :, None, :], 0.0).reshape(system.shape)
    row, column = indices(CHUNK, CHUNK)
    size = BLOCK
    while size < CHUNK:
        # [[a, 0], [x, d]] has the inverse [[a', 0], [-d' x a', d']].
        corner = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        whole = whole - precise_dot(precise_dot(whole, jnp.where(corner, system, 0.0)), whole)
        size *= 2
    return whole


def unsolved(
    v: Array, reads_of_keys: tuple[Array, ...], beta: Array, reads: tuple[Array, ...]
) -> Array:
    """Compute the right side of the system that N solves, float32 `[C, V]`. reads_of_keys: K S, by state."""
    return beta[:, None] * (v - weighted(reads, reads_of_keys))


def weighted(factors: tuple[Array, ...], terms: tuple[Array, ...]) -> Array:
    """Add up `[C, n]` of all states, each times its factors `[C]`."""
    first, *others = (x[:, None] * y for x, y in zip(factors, terms, strict=True))
    return sum(others, first)


def carried(factors: tuple[Array, ...], states: tuple[Array, ...]) -> Array:
    """Add up states, each times its factor."""
    first, *others = (x * y for x, y in zip(factors, states, strict=True))
    return sum(others, first)
