"""Share blocks between the kernels of the gated delta rule: where a program stands, what it loads, and sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from mmjax.kernels.delta_chunk import CHUNK, OPERANDS, Chunk, Paths, Solved

_GRADIENT_VALUES = 64
_VALUES = 32  # channels of values whose states one program carries through a row
# Warps and pipeline stages of the kernels.
_SCHEDULES = {
    "solve": (4, 1),
    "states": (4, 2),
    "outputs": (4, 1),
    "written_gradients": (4, 1),
    "state_gradients": (4, 2),
    "read_gradients": (8, 1),
    "token_gradients": (8, 1),
}


class Tokens(NamedTuple):
    """Tokens of all rows: normalised queries and keys `[B, T, N, K]`, values `[B, T, M, V]`, the rest `[B, T, M]`."""

    q: Array
    k: Array
    v: Array
    g: Array  # logarithms of decays, float32
    beta: Array  # float32


class Place(NamedTuple):
    """The place of a program: a row, a chunk, a head of keys and one of values, and channels of the values."""

    row: Array
    chunk: Array
    key_head: Array
    head: Array
    values: Any = slice(None)

    @property
    def span(self) -> Any:
        return pl.ds(self.chunk * CHUNK, CHUNK)

    @property
    def per_chunk(self) -> tuple[Any, ...]:
        """Index arrays `[B, chunks, M, ...]`."""
        return self.row, self.chunk, self.head

    @property
    def per_value(self) -> tuple[Any, ...]:
        """Index arrays `[B, T, M, V]`."""
        return self.row, self.span, self.head, self.values

    @property
    def per_token(self) -> tuple[Any, ...]:
        """Index arrays `[B, T, M]`."""
        return self.row, self.span, self.head

    @property
    def per_key(self) -> tuple[Any, ...]:
        """Index arrays `[B, T, N, K]`."""
        return self.row, self.span, self.key_head

    @property
    def state(self) -> tuple[Any, ...]:
        """Index arrays `[B, chunks, M, K, V]`."""
        return *self.per_chunk, slice(None), self.values

    def inputs(self, tokens: Tokens) -> Chunk:
        """Load one head's tokens of the chunk."""
        indices = self.per_key, self.per_key, self.per_value, self.per_token, self.per_token
        return Chunk._make(pltriton.load(x.at[i]) for x, i in zip(tokens, indices, strict=True))

    def solved(self, arrays: Solved) -> Solved:
        """Load what the chunk needs beside the states."""
        return jax.tree.map(lambda x: pltriton.load(x.at[self.per_chunk]), arrays)

    def paths(self, arrays: Paths) -> Paths:
        """Load the chunk's paths."""
        path = pltriton.load(arrays.path.at[self.row, self.span])
        return Paths(path, pltriton.load(arrays.owner.at[self.row, self.chunk]))

    def states(self, arrays: tuple[Any, ...]) -> tuple[Array, ...]:
        """Load one head's states `[K, V]`, of the place's channels."""
        return tuple(pltriton.load(x.at[self.state]) for x in arrays)

    def store_states(self, refs: tuple[Any, ...], states: tuple[Array, ...]) -> None:
        """Store one head's states."""
        for ref, state in zip(refs, states, strict=True):
            pltriton.store(ref.at[self.state], state.astype(ref.dtype))


def run_kernel(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    inputs: Any,
    outputs: Any,
    interpret: bool,
) -> Any:
    """Run `kernel(*refs of inputs, refs of outputs)` on whole arrays; inputs and outputs may be trees."""

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)

    warps, stages = _SCHEDULES[name]
    leaves, tree = jax.tree.flatten(outputs)
    count = len(inputs)
    results = pl.pallas_call(
        lambda *refs: kernel(*refs[:count], tree.unflatten(refs[count:])),
        grid=grid,
        in_specs=jax.tree.map(whole, inputs),
        out_specs=[whole(x) for x in leaves],
        out_shape=leaves,
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=f"delta_rule_{name}",
    )(*inputs)
    return tree.unflatten(results)


class Sizes(NamedTuple):
    """Sizes of a call."""

    rows: int
    chunks: int
    key_heads: int
    group: int  # heads of values that read the same head of keys
    key_width: int
    value_width: int

    @classmethod
    def of(cls, tokens: Tokens) -> Sizes:
        rows, length, key_heads, key_width = tokens.k.shape
        _, _, heads, value_width = tokens.v.shape
        return cls(
            rows=rows,
            chunks=length // CHUNK,
            key_heads=key_heads,
            group=heads // key_heads,
            key_width=key_width,
            value_width=value_width,
        )

    @property
    def heads(self) -> int:
        return self.key_heads * self.group

    @property
    def parts(self) -> int:
        """Programs that share the channels of a head's values, where states are computed in order."""
        return max(1, self.value_width // _VALUES)

    @property
    def parts_of_values(self) -> int:
        """Parts of a head's values whose gradients one program computes one after the other."""
        return max(1, self.value_width // _GRADIENT_VALUES)

    def part_of_values(self, number: Array) -> Any:
        width = self.value_width // self.parts_of_values
        return pl.ds(number * width, width)

    def per_chunk(self, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.chunks, self.heads, *shape), dtype)

    def states(self, count: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shapes of so many states of all chunks, of 2 bytes a number."""
        return (self.per_chunk(self.key_width, self.value_width, dtype=OPERANDS),) * count

    def place(self) -> Place:
        """Return the place of a program of a grid (heads, chunks, rows)."""
        head, chunk, row = (pl.program_id(axis) for axis in range(3))
        return Place(row, chunk, lax.div(head, jnp.int32(self.group)), head)

    def key_place(self) -> Place:
        """Return the place of a program of a grid (heads of keys, chunks, rows), with its first head of values."""
        head, chunk, row = (pl.program_id(axis) for axis in range(3))
        return Place(row, chunk, head, head * self.group)

    def part(self) -> Place:
        """Return the place of a program of a grid (parts, heads, rows), in the first chunk."""
        width = self.value_width // self.parts
        part, head, row = (pl.program_id(axis) for axis in range(3))
        values = pl.ds(part * width, width)
        return Place(row, jnp.int32(0), lax.div(head, jnp.int32(self.group)), head, values)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.heads, self.chunks, self.rows

    @property
    def key_grid(self) -> tuple[int, int, int]:
        return self.key_heads, self.chunks, self.rows

    @property
    def grid_of_parts(self) -> tuple[int, int, int]:
        return self.parts, self.heads, self.rows
