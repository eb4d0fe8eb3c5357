"""Gradients of the gated delta rule over packed rows, in Pallas for GPUs (Triton).

Of what a chunk's tokens write, by its outputs, in parallel; of all states, in reverse order; then of
the tokens, in parallel again, in two kernels for want of registers: by what they read and by what
they write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from mmjax.kernels.delta_blocks import Sizes, Tokens, run_kernel
from mmjax.kernels.delta_chunk import (
    CHUNK,
    OPERANDS,
    Paths,
    Solved,
    carried,
    decays_of,
    dot,
    system_of,
    unsolved,
    weighted,
)


def written_gradients(
    tokens: Tokens, paths: Paths, d_out: Array, branched: bool, interpret: bool
) -> Array:
    """Compute what outputs contribute to the gradient of what their own chunk writes, `[B, T, M, V]`."""
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, paths: Paths, d_out_ref: Any, d_new_ref: Any) -> None:
        place = sizes.place()
        x = place.inputs(tokens)
        decays = decays_of(x.g, place.paths(paths), branched)
        scores = dot(x.q, x.k.T) * decays.between
        d_new = dot(scores.T, pltriton.load(d_out_ref.at[place.per_value]))
        pltriton.store(d_new_ref.at[place.per_value], d_new.astype(d_new_ref.dtype))

    out = jax.ShapeDtypeStruct(tokens.v.shape, OPERANDS)
    inputs = tokens, paths, d_out
    return run_kernel(kernel, "written_gradients", sizes.grid, inputs, out, interpret)


def state_gradients(
    tokens: Tokens,
    solved: Solved,
    d_out: Array,
    d_new: Array,
    d_last: tuple[Array, ...],
    interpret: bool,
) -> tuple[tuple[Array, ...], Array, tuple[Array, ...]]:
    """Compute the gradients of the states after all chunks, of all that is written, and of the first states.

    The first two of 2 bytes a number. d_new: as `written_gradients` returns it.
    """
    sizes = Sizes.of(tokens)
    count = len(d_last)

    def kernel(
        tokens: Tokens,
        solved: Solved,
        d_out_ref: Any,
        d_new_ref: Any,
        d_last_refs: Any,
        outputs: Any,
    ) -> None:
        d_states_refs, all_ref, d_first_refs = outputs
        first = sizes.part()

        def step(number: Array, d_states: tuple[Array, ...]) -> tuple[Array, ...]:
            place = first._replace(chunk=sizes.chunks - 1 - number)
            place.store_states(d_states_refs, d_states)
            x, y = place.inputs(tokens), place.solved(solved)
            d_out, d_new = (
                pltriton.load(ref.at[place.per_value]).astype(jnp.float32)
                for ref in (d_out_ref, d_new_ref)
            )
            d_new += weighted(y.ends, tuple(dot(x.k, d_state) for d_state in d_states))
            pltriton.store(all_ref.at[place.per_value], d_new.astype(all_ref.dtype))
            d_right = x.beta[:, None] * dot(y.inverse.T, d_new)
            return tuple(
                carried(tuple(kept[s] for kept in y.kept), d_states)
                + (dot(x.q.T, reads * d_out) - dot(x.k.T, reads * d_right))
                for s, reads in enumerate(reads[:, None] for reads in y.reads)
            )

        whole = first.row, first.head, slice(None), first.values
        d_states = tuple(pltriton.load(ref.at[whole]) for ref in d_last_refs)
        d_states = lax.fori_loop(0, sizes.chunks, step, d_states)
        for ref, d_state in zip(d_first_refs, d_states, strict=True):
            pltriton.store(ref.at[whole], d_state)

    outputs = (
        sizes.states(count),
        jax.ShapeDtypeStruct(tokens.v.shape, OPERANDS),
        tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in d_last),
    )
    inputs = tokens, solved, d_out, d_new, d_last
    return run_kernel(kernel, "state_gradients", sizes.grid_of_parts, inputs, outputs, interpret)


class ReadGradients(NamedTuple):
    """Gradients of queries, keys and decays, by what is read."""

    q: Array
    k: Array
    g: Array


class _Gradients(NamedTuple):
    """Gradients of all but queries."""

    k: Array
    v: Array
    g: Array
    beta: Array


class _Operands(NamedTuple):
    """Operands of a chunk's outputs and of the states behind it, and their gradients; by state."""

    reads: tuple[Array, ...]  # [C, K]
    scores: Array  # [C, C]
    writes: tuple[Array, ...]  # [C, K]
    kept: tuple[tuple[Array, ...], ...]  # scalars


def _inner(a: Array, b: Array) -> Array:
    return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32))


def read_gradients(
    tokens: Tokens,
    paths: Paths,
    states: tuple[Array, ...],
    new: Array,
    d_out: Array,
    d_states: tuple[Array, ...],
    interpret: bool,
) -> ReadGradients:
    """Compute gradients by the outputs and the states after the chunks, what is written being given; float32."""
    sizes = Sizes.of(tokens)
    count = len(states)

    def kernel(
        tokens: Tokens,
        paths: Paths,
        states: Any,
        new_ref: Any,
        d_out_ref: Any,
        d_states: Any,
        outputs: ReadGradients,
    ) -> None:
        first = sizes.key_place()

        def add_head(number: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            place = first._replace(head=first.head + number)
            x = place.inputs(tokens)
            chunk_paths = place.paths(paths)

            # Outputs are reads @ states + scores @ new, and a state after the chunk is those before
            # it times decays + writes.T @ new.
            def add_values(number: Array, sums: _Operands) -> _Operands:
                part = place._replace(values=sizes.part_of_values(number))
                before, d_after = part.states(states), part.states(d_states)
                new, d_out = (pltriton.load(ref.at[part.per_value]) for ref in (new_ref, d_out_ref))
                terms = _Operands(
                    reads=tuple(dot(d_out, state.T) for state in before),
                    scores=dot(d_out, new.T),
                    writes=tuple(dot(new, d_state.T) for d_state in d_after),
                    kept=tuple(tuple(_inner(x, y) for x in before) for y in d_after),
                )
                return jax.tree.map(jnp.add, sums, terms)

            wide, square = (jnp.zeros((CHUNK, n), jnp.float32) for n in (sizes.key_width, CHUNK))
            zeros = _Operands(
                (wide,) * count, square, (wide,) * count, ((jnp.float32(0),) * count,) * count
            )
            d_operands = lax.fori_loop(0, sizes.parts_of_values, add_values, zeros)

            def operands(q: Array, products: Array, k: Array, g: Array) -> _Operands:
                decays = decays_of(g, chunk_paths, count > 1)
                return _Operands(
                    reads=tuple(reads[:, None] * q for reads in decays.reads),
                    scores=products * decays.between,
                    writes=tuple(ends[:, None] * k for ends in decays.ends),
                    kept=decays.kept,
                )

            q, k = (y.astype(jnp.float32) for y in (x.q, x.k))
            _, backward = jax.vjp(operands, q, dot(x.q, x.k.T), k, x.g)
            d_q, d_products, d_k, d_g = backward(d_operands)
            d_q += dot(d_products, x.k)
            d_k += dot(d_products.T, x.q)
            pltriton.store(outputs.g.at[place.per_token], d_g)
            return sums[0] + d_q, sums[1] + d_k

        zeros = jnp.zeros((CHUNK, sizes.key_width), jnp.float32)
        d_q, d_k = lax.fori_loop(0, sizes.group, add_head, (zeros, zeros))
        pltriton.store(outputs.q.at[first.per_key], d_q.astype(outputs.q.dtype))
        pltriton.store(outputs.k.at[first.per_key], d_k)

    k, g = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (tokens.k, tokens.g))
    outputs = ReadGradients(jax.ShapeDtypeStruct(tokens.q.shape, tokens.q.dtype), k, g)
    inputs = tokens, paths, states, new, d_out, d_states
    return run_kernel(kernel, "read_gradients", sizes.key_grid, inputs, outputs, interpret)


def token_gradients(
    tokens: Tokens,
    paths: Paths,
    inverse: Array,
    states: tuple[Array, ...],
    d_new: Array,
    d_reads: ReadGradients,
    interpret: bool,
) -> Tokens:
    """Compute the gradients of all tokens' inputs from those of what is written, and those of what is read."""
    sizes = Sizes.of(tokens)
    branched = len(states) > 1

    def kernel(
        tokens: Tokens,
        paths: Paths,
        inverse_ref: Any,
        states: Any,
        d_new_ref: Any,
        by_reads: ReadGradients,
        outputs: _Gradients,
    ) -> None:
        first = sizes.key_place()

        def add_head(number: Array, sum_of_heads: Array) -> Array:
            place = first._replace(head=first.head + number)
            x = place.inputs(tokens)
            chunk_paths = place.paths(paths)
            inverse = pltriton.load(inverse_ref.at[place.per_chunk])
            reads = decays_of(x.g, chunk_paths, branched).reads

            def add_values(number: Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
                part = place._replace(values=sizes.part_of_values(number))
                before = part.states(states)
                v, d_new = (pltriton.load(y.at[part.per_value]) for y in (tokens.v, d_new_ref))
                reads_of_keys = tuple(dot(x.k, state) for state in before)
                inputs = v.astype(jnp.float32), reads_of_keys, x.beta, reads
                right, backward = jax.vjp(unsolved, *inputs)
                d_v, d_reads_of_keys, d_beta, d_reads = backward(dot(inverse.T, d_new))
                pltriton.store(outputs.v.at[part.per_value], d_v.astype(outputs.v.dtype))
                first, *others = (
                    dot(d, state.T) for d, state in zip(d_reads_of_keys, before, strict=True)
                )
                terms = sum(others, first), d_beta, d_reads, dot(d_new, right.T)
                return jax.tree.map(jnp.add, sums, terms)

            shapes = x.k, x.beta, reads, inverse
            zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, jnp.float32), shapes)
            sums = lax.fori_loop(0, sizes.parts_of_values, add_values, zeros)
            d_k, d_beta, d_reads, d_inverse = sums
            d_system = -dot(inverse.T, dot(d_inverse, inverse.T))

            def solved(products: Array, g: Array, beta: Array) -> tuple[Any, Array]:
                decays = decays_of(g, chunk_paths, branched)
                return decays.reads, system_of(products, beta, decays)

            _, backward = jax.vjp(solved, dot(x.k, x.k.T), x.g, x.beta)
            d_products, d_g, d_beta_of_system = backward((d_reads, d_system))
            d_k_of_system = dot(d_products + d_products.T, x.k)
            d_g += pltriton.load(by_reads.g.at[place.per_token])
            pltriton.store(outputs.g.at[place.per_token], d_g)
            pltriton.store(outputs.beta.at[place.per_token], d_beta + d_beta_of_system)
            return sum_of_heads + d_k + d_k_of_system

        d_k = pltriton.load(by_reads.k.at[first.per_key])
        d_k = lax.fori_loop(0, sizes.group, add_head, d_k)
        pltriton.store(outputs.k.at[first.per_key], d_k.astype(outputs.k.dtype))

    outputs = _Gradients._make(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tokens[1:])
    inputs = tokens, paths, inverse, states, d_new, d_reads
    d = run_kernel(kernel, "token_gradients", sizes.key_grid, inputs, outputs, interpret)
    return Tokens(q=d_reads.q, **d._asdict())
