"""The gated delta rule over packed rows, forward and backward, in Pallas for GPUs (Triton).

Chunks of 64 tokens (Yang et al. 2025, section 3.3) in three kernels, as flash-linear-attention has
them: what a chunk needs beside the state, in parallel; the states before all chunks, one after the
other; and the outputs, in parallel. Backward runs the first two again, then the kernels of
`delta_gradients`. Operands of products are of 2 bytes; sums, the state and the inverse are float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from mmjax.kernels.delta_blocks import Sizes, Tokens, run_kernel
from mmjax.kernels.delta_chunk import (
    CHUNK,
    OPERANDS,
    Solved,
    decays_of,
    dot,
    inverse_of,
    last_of,
    system_of,
    unsolved,
)
from mmjax.kernels.delta_gradients import (
    read_gradients,
    state_gradients,
    token_gradients,
    written_gradients,
)


def unsupported(length: int, key_width: int, value_width: int, dtype: jnp.dtype) -> str | None:
    """Say why the kernels do not take rows of this length with heads of these widths, if so."""
    widths = key_width, value_width
    reasons = {
        f"numbers in {jnp.dtype(dtype).name}": dtype != OPERANDS,
        f"rows of {length} tokens": length < CHUNK,
        f"heads of {key_width} and {value_width} channels": any(
            not 16 <= n <= 128 or n & (n - 1) for n in widths
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def delta_rule(
    tokens: Tokens, sample: Int[Array, "b t"], state: Float[Array, "b m k v"], interpret: bool
) -> tuple[Float[Array, "b t m v"], Float[Array, "b m k v"]]:
    """Compute the outputs of every token, in the dtype of the values, and the state after the last one.

    state: float32, of the first token's sample. interpret: run as JAX operations, on any device.
    The rest as in `mmjax.models.gated_delta_net.gated_delta_rule`.
    """
    length = sample.shape[1]
    extra = -length % CHUNK
    tokens = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)), tokens
    )
    start = _sample_starts(jnp.pad(sample, ((0, 0), (0, extra)), "edge"))
    out, state = _delta_rule(tokens, start, state, interpret)
    return out[:, :length], state


def _sample_starts(sample: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Tell for every token where in its chunk its sample begins; -1 if it began in an earlier one.

    In chunks of 4, samples 0 0 0 1 | 1 1 2 2 start at -1 -1 -1 3 | -1 -1 2 2: the state before a
    row is of its first sample.
    """
    rows, length = sample.shape
    previous = jnp.concatenate([sample[:, :1], sample[:, :-1]], 1)
    column = jnp.arange(length, dtype=jnp.int32) % CHUNK
    start = jnp.where(sample != previous, column, -1).reshape(rows, -1, CHUNK)
    return lax.cummax(start, axis=2).reshape(rows, length)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _delta_rule(tokens: Tokens, start: Array, state: Array, interpret: bool) -> tuple[Array, Array]:
    solved = _solve(tokens, start, interpret)
    states, new, last = _states(tokens, solved, state, interpret)
    return _outputs(tokens, start, states, new, interpret), last


def _forward(
    tokens: Tokens, start: Array, state: Array, interpret: bool
) -> tuple[tuple[Array, Array], tuple[Tokens, Array, Array]]:
    return _delta_rule(tokens, start, state, interpret), (tokens, start, state)


def _backward(
    interpret: bool, residuals: tuple[Tokens, Array, Array], gradients: tuple[Array, Array]
) -> tuple[Tokens, None, Array]:
    tokens, start, state = residuals
    d_out, d_last = gradients
    solved = _solve(tokens, start, interpret)
    states, new, _ = _states(tokens, solved, state, interpret)
    d_new = written_gradients(tokens, start, d_out, interpret)
    d_states, d_new, d_first = state_gradients(tokens, solved, d_out, d_new, d_last, interpret)
    d_reads = read_gradients(tokens, start, states, new, d_out, d_states, interpret)
    d_tokens = token_gradients(tokens, start, solved.inverse, states, d_new, d_reads, interpret)
    return d_tokens, None, d_first


_delta_rule.defvjp(_forward, _backward)


def _solve(tokens: Tokens, start: Array, interpret: bool) -> Solved:
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, start_ref: Any, outputs: Solved) -> None:
        place = sizes.place()
        x = place.inputs(tokens)
        decays = decays_of(x.g, place.start(start_ref))
        solved = Solved(
            inverse_of(system_of(dot(x.k, x.k.T), x.beta, decays)), decays.reads, decays.ends
        )
        for ref, value in zip(outputs, solved, strict=True):
            pltriton.store(ref.at[place.per_chunk], value.astype(ref.dtype))

    inverse = sizes.per_chunk(CHUNK, CHUNK, dtype=OPERANDS)
    outputs = Solved(inverse, sizes.per_chunk(CHUNK), sizes.per_chunk(CHUNK))
    return run_kernel(kernel, "solve", sizes.grid, (tokens, start), outputs, interpret)


def _states(
    tokens: Tokens, solved: Solved, state: Array, interpret: bool
) -> tuple[Array, Array, Array]:
    """Compute the states before all chunks, `[B, chunks, M, K, V]`, what is written, and the last state.

    The first two of 2 bytes a number.
    """
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, solved: Solved, state_ref: Any, outputs: Any) -> None:
        states_ref, new_ref, last_ref = outputs
        first = sizes.part()

        def step(chunk: Array, state: Array) -> Array:
            place = first._replace(chunk=chunk)
            pltriton.store(states_ref.at[place.state], state.astype(states_ref.dtype))
            x, y = place.inputs(tokens), place.solved(solved)
            new = dot(y.inverse, unsolved(x.v, dot(x.k, state), x.beta, y.reads))
            pltriton.store(new_ref.at[place.per_value], new.astype(new_ref.dtype))
            return state * last_of(y.reads) + dot(x.k.T, y.ends[:, None] * new)

        whole = first.row, first.head, slice(None), first.values
        state = pltriton.load(state_ref.at[whole])
        pltriton.store(last_ref.at[whole], lax.fori_loop(0, sizes.chunks, step, state))

    outputs = (
        sizes.per_chunk(sizes.key_width, sizes.value_width, dtype=OPERANDS),
        jax.ShapeDtypeStruct(tokens.v.shape, OPERANDS),
        jax.ShapeDtypeStruct(state.shape, jnp.float32),
    )
    inputs = tokens, solved, state
    return run_kernel(kernel, "states", sizes.grid_of_parts, inputs, outputs, interpret)


def _outputs(tokens: Tokens, start: Array, states: Array, new: Array, interpret: bool) -> Array:
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, start_ref: Any, states_ref: Any, new_ref: Any, out_ref: Any) -> None:
        place = sizes.place()
        x = place.inputs(tokens)
        decays = decays_of(x.g, place.start(start_ref))
        state = pltriton.load(states_ref.at[place.per_chunk])
        new = pltriton.load(new_ref.at[place.per_value])
        out = decays.reads[:, None] * dot(x.q, state)
        out += dot(dot(x.q, x.k.T) * decays.between, new)
        pltriton.store(out_ref.at[place.per_value], out.astype(out_ref.dtype))

    inputs = tokens, start, states, new
    out = jax.ShapeDtypeStruct(tokens.v.shape, tokens.v.dtype)
    return run_kernel(kernel, "outputs", sizes.grid, inputs, out, interpret)
