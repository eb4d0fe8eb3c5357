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
    Paths,
    Solved,
    carried,
    decays_of,
    dot,
    inverse_of,
    system_of,
    unsolved,
    weighted,
)
from mmjax.kernels.delta_gradients import (
    read_gradients,
    state_gradients,
    token_gradients,
    written_gradients,
)

# The state behind a path, and where samples have branches, that behind its trunk.
States = tuple[Float[Array, "b m k v"], ...]


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
    tokens: Tokens, path: Int[Array, "b t"], states: States, interpret: bool
) -> tuple[Float[Array, "b t m v"], States]:
    """Compute the outputs of every token, in the dtype of the values, and the states after the last one.

    states: float32, of the first token's path, and, where samples may have branches, of its trunk.
    interpret: run as JAX operations, on any device. The rest as in
    `mmjax.models.gated_delta_net.gated_delta_rule`.
    """
    length = path.shape[1]
    extra = -length % CHUNK
    tokens = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)), tokens
    )
    out, states = _delta_rule(tokens, _paths(path, extra), states, interpret)
    return out[:, :length], states


def _paths(path: Int[Array, "b t"], extra: int) -> Paths:
    """Pad paths, and find those of the tokens before all chunks; before a row is what its first token continues."""
    path = jnp.pad(path, ((0, 0), (0, extra)), "edge")
    return Paths(path, jnp.concatenate([path[:, :1], path[:, CHUNK - 1 : -1 : CHUNK]], 1))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _delta_rule(
    tokens: Tokens, paths: Paths, states: States, interpret: bool
) -> tuple[Array, States]:
    solved = _solve(tokens, paths, len(states) > 1, interpret)
    states, new, last = _states(tokens, solved, states, interpret)
    return _outputs(tokens, paths, states, new, interpret), last


def _forward(
    tokens: Tokens, paths: Paths, states: States, interpret: bool
) -> tuple[tuple[Array, States], tuple[Tokens, Paths, States]]:
    return _delta_rule(tokens, paths, states, interpret), (tokens, paths, states)


def _backward(
    interpret: bool, residuals: tuple[Tokens, Paths, States], gradients: tuple[Array, States]
) -> tuple[Tokens, None, States]:
    tokens, paths, first = residuals
    d_out, d_last = gradients
    branched = len(first) > 1
    solved = _solve(tokens, paths, branched, interpret)
    states, new, _ = _states(tokens, solved, first, interpret)
    d_new = written_gradients(tokens, paths, d_out, branched, interpret)
    d_states, d_new, d_first = state_gradients(tokens, solved, d_out, d_new, d_last, interpret)
    d_reads = read_gradients(tokens, paths, states, new, d_out, d_states, interpret)
    d_tokens = token_gradients(tokens, paths, solved.inverse, states, d_new, d_reads, interpret)
    return d_tokens, None, d_first


_delta_rule.defvjp(_forward, _backward)


def _solve(tokens: Tokens, paths: Paths, branched: bool, interpret: bool) -> Solved:
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, paths: Paths, outputs: Solved) -> None:
        place = sizes.place()
        x = place.inputs(tokens)
        decays = decays_of(x.g, place.paths(paths), branched)
        inverse = inverse_of(system_of(dot(x.k, x.k.T), x.beta, decays))
        solved = Solved(inverse, *decays[1:])
        for ref, value in zip(jax.tree.leaves(outputs), jax.tree.leaves(solved), strict=True):
            pltriton.store(ref.at[place.per_chunk], value.astype(ref.dtype))

    count = 1 + branched
    by_state = (sizes.per_chunk(CHUNK),) * count
    outputs = Solved(
        inverse=sizes.per_chunk(CHUNK, CHUNK, dtype=OPERANDS),
        reads=by_state,
        ends=by_state,
        kept=((sizes.per_chunk(),) * count,) * count,
    )
    return run_kernel(kernel, "solve", sizes.grid, (tokens, paths), outputs, interpret)


def _states(
    tokens: Tokens, solved: Solved, states: States, interpret: bool
) -> tuple[States, Array, States]:
    """Compute the states before all chunks, `[B, chunks, M, K, V]`, what is written, and the last states.

    The first two of 2 bytes a number.
    """
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, solved: Solved, states_refs: Any, outputs: Any) -> None:
        stored, new_ref, last_refs = outputs
        first = sizes.part()

        def step(chunk: Array, states: States) -> States:
            place = first._replace(chunk=chunk)
            place.store_states(stored, states)
            x, y = place.inputs(tokens), place.solved(solved)
            reads_of_keys = tuple(dot(x.k, state) for state in states)
            new = dot(y.inverse, unsolved(x.v, reads_of_keys, x.beta, y.reads))
            pltriton.store(new_ref.at[place.per_value], new.astype(new_ref.dtype))
            return tuple(
                carried(kept, states) + dot(x.k.T, ends[:, None] * new)
                for kept, ends in zip(y.kept, y.ends, strict=True)
            )

        whole = first.row, first.head, slice(None), first.values
        states = tuple(pltriton.load(ref.at[whole]) for ref in states_refs)
        states = lax.fori_loop(0, sizes.chunks, step, states)
        for ref, state in zip(last_refs, states, strict=True):
            pltriton.store(ref.at[whole], state)

    outputs = (
        sizes.states(len(states)),
        jax.ShapeDtypeStruct(tokens.v.shape, OPERANDS),
        tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in states),
    )
    inputs = tokens, solved, states
    return run_kernel(kernel, "states", sizes.grid_of_parts, inputs, outputs, interpret)


def _outputs(tokens: Tokens, paths: Paths, states: States, new: Array, interpret: bool) -> Array:
    sizes = Sizes.of(tokens)

    def kernel(tokens: Tokens, paths: Paths, states: Any, new_ref: Any, out_ref: Any) -> None:
        place = sizes.place()
        x = place.inputs(tokens)
        decays = decays_of(x.g, place.paths(paths), len(states) > 1)
        new = pltriton.load(new_ref.at[place.per_value])
        out = weighted(decays.reads, tuple(dot(x.q, state) for state in place.states(states)))
        out += dot(dot(x.q, x.k.T) * decays.between, new)
        pltriton.store(out_ref.at[place.per_value], out.astype(out_ref.dtype))

    inputs = tokens, paths, states, new
    out = jax.ShapeDtypeStruct(tokens.v.shape, tokens.v.dtype)
    return run_kernel(kernel, "outputs", sizes.grid, inputs, out, interpret)
