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
    Solved,
    decays_of,
    dot,
    last_of,
    system_of,
    unsolved,
)


def written_gradients(tokens: Tokens, start: Array, d_out: Array, interpret: bool) -> Array:
    """Compute what outputs contribute to the gradient of what their own chunk writes, `[B, T, M, V]`."""
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, start_ref: Any, d_out_ref: Any, d_new_ref: Any) -> None:
        place = sizes.place()
        x = place.inputs(tokens)
        decays = decays_of(x.g, place.start(start_ref))
        scores = dot(x.q, x.k.T) * decays.between
        d_new = dot(scores.T, pltriton.load(d_out_ref.at[place.per_value]))
        pltriton.store(d_new_ref.at[place.per_value], d_new.astype(d_new_ref.dtype))

    out = jax.ShapeDtypeStruct(tokens.v.shape, OPERANDS)
    inputs = tokens, start, d_out
    return run_kernel(kernel, "written_gradients", sizes.grid, inputs, out, interpret)


def state_gradients(
    tokens: Tokens, solved: Solved, d_out: Array, d_new: Array, d_last: Array, interpret: bool
) -> tuple[Array, Array, Array]:
    """Compute the gradients of the states after all chunks, of all that is written, and of the first state.

    The first two of 2 bytes a number. d_new: as `written_gradients` returns it.
    """
    sizes = Sizes.of(tokens)

    def kernel(
        tokens: Tokens,
        solved: Solved,
        d_out_ref: Any,
        d_new_ref: Any,
        d_last_ref: Any,
        outputs: Any,
    ) -> None:
        d_states_ref, all_ref, d_first_ref = outputs
        first = sizes.part()

        def step(number: Array, d_state: Array) -> Array:
            place = first._replace(chunk=sizes.chunks - 1 - number)
            pltriton.store(d_states_ref.at[place.state], d_state.astype(d_states_ref.dtype))
            x, y = place.inputs(tokens), place.solved(solved)
            d_out, d_new = (
                pltriton.load(ref.at[place.per_value]).astype(jnp.float32)
                for ref in (d_out_ref, d_new_ref)
            )
            d_new += y.ends[:, None] * dot(x.k, d_state)
            pltriton.store(all_ref.at[place.per_value], d_new.astype(all_ref.dtype))
            d_read = x.beta * y.reads
            d_read = d_read[:, None] * dot(y.inverse.T, d_new)
            by_tokens = dot(x.q.T, y.reads[:, None] * d_out) - dot(x.k.T, d_read)
            return d_state * last_of(y.reads) + by_tokens

        whole = first.row, first.head, slice(None), first.values
        last = pltriton.load(d_last_ref.at[whole])
        pltriton.store(d_first_ref.at[whole], lax.fori_loop(0, sizes.chunks, step, last))

    outputs = (
        sizes.per_chunk(sizes.key_width, sizes.value_width, dtype=OPERANDS),
        jax.ShapeDtypeStruct(tokens.v.shape, OPERANDS),
        jax.ShapeDtypeStruct(d_last.shape, jnp.float32),
    )
    inputs = tokens, solved, d_out, d_new, d_last
    return run_kernel(
        kernel,
        "state_gradients",
        sizes.grid_of_parts,
        inputs,
        outputs,
        interpret,
    )


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


def read_gradients(
    tokens: Tokens,
    start: Array,
    states: Array,
    new: Array,
    d_out: Array,
    d_states: Array,
    interpret: bool,
) -> ReadGradients:
    """Compute gradients by the outputs and the states after the chunks, what is written being given; float32."""
    sizes = Sizes.of(tokens)

    def kernel(
        tokens: Tokens,
        start_ref: Any,
        states_ref: Any,
        new_ref: Any,
        d_out_ref: Any,
        d_states_ref: Any,
        outputs: ReadGradients,
    ) -> None:
        first = sizes.key_place()

        def add_head(number: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            place = first._replace(head=first.head + number)
            x = place.inputs(tokens)
            start = place.start(start_ref)

            # Outputs are reads @ state + scores @ new, and the state after the chunk is that before
            # it times a decay + writes.T @ new.
            def add_values(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                part = place._replace(values=sizes.part_of_values(number))
                state, d_state = (
                    pltriton.load(ref.at[part.state]) for ref in (states_ref, d_states_ref)
                )
                new, d_out = (pltriton.load(ref.at[part.per_value]) for ref in (new_ref, d_out_ref))
                d_decay = jnp.sum(state.astype(jnp.float32) * d_state.astype(jnp.float32))
                terms = dot(d_out, state.T), dot(d_out, new.T), dot(new, d_state.T), d_decay
                return tuple(a + b for a, b in zip(sums, terms, strict=True))

            wide, square = (jnp.zeros((CHUNK, n), jnp.float32) for n in (sizes.key_width, CHUNK))
            zeros = wide, square, wide, jnp.float32(0)
            d_operands = lax.fori_loop(0, sizes.parts_of_values, add_values, zeros)

            def operands(q: Array, products: Array, k: Array, g: Array) -> tuple[Array, ...]:
                decays = decays_of(g, start)
                reads, ends = (y[:, None] for y in (decays.reads, decays.ends))
                return reads * q, products * decays.between, ends * k, last_of(decays.reads)

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
    inputs = tokens, start, states, new, d_out, d_states
    return run_kernel(kernel, "read_gradients", sizes.key_grid, inputs, outputs, interpret)


def token_gradients(
    tokens: Tokens,
    start: Array,
    inverse: Array,
    states: Array,
    d_new: Array,
    d_reads: ReadGradients,
    interpret: bool,
) -> Tokens:
    """Compute the gradients of all tokens' inputs from those of what is written, and those of what is read."""
    sizes = Sizes.of(tokens)

    def kernel(
        tokens: Tokens,
        start_ref: Any,
        inverse_ref: Any,
        states_ref: Any,
        d_new_ref: Any,
        by_reads: ReadGradients,
        outputs: _Gradients,
    ) -> None:
        first = sizes.key_place()

        def add_head(number: Array, sum_of_heads: Array) -> Array:
            place = first._replace(head=first.head + number)
            x = place.inputs(tokens)
            start = place.start(start_ref)
            inverse = pltriton.load(inverse_ref.at[place.per_chunk])
            reads = decays_of(x.g, start).reads

            def add_values(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
                part = place._replace(values=sizes.part_of_values(number))
                state = pltriton.load(states_ref.at[part.state])
                v, d_new = (pltriton.load(y.at[part.per_value]) for y in (tokens.v, d_new_ref))
                inputs = v.astype(jnp.float32), dot(x.k, state), x.beta, reads
                right, backward = jax.vjp(unsolved, *inputs)
                d_v, d_reads_of_keys, d_beta, d_reads = backward(dot(inverse.T, d_new))
                pltriton.store(outputs.v.at[part.per_value], d_v.astype(outputs.v.dtype))
                terms = dot(d_reads_of_keys, state.T), d_beta, d_reads, dot(d_new, right.T)
                return tuple(a + b for a, b in zip(sums, terms, strict=True))

            shapes = x.k.shape, x.beta.shape, reads.shape, inverse.shape
            zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
            sums = lax.fori_loop(0, sizes.parts_of_values, add_values, zeros)
            d_k, d_beta, d_reads, d_inverse = sums
            d_system = -dot(inverse.T, dot(d_inverse, inverse.T))

            def solved(products: Array, g: Array, beta: Array) -> tuple[Array, Array]:
                decays = decays_of(g, start)
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
    inputs = tokens, start, inverse, states, d_new, d_reads
    d = run_kernel(kernel, "token_gradients", sizes.key_grid, inputs, outputs, interpret)
    return Tokens(q=d_reads.q, **d._asdict())
