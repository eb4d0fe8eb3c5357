"""Share blocks between the Hopper kernels: those that a warpgroup visits, rings in shared memory, and products."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from mmjax.kernels.flash_attention import Scores
from mmjax.kernels.masked_tiles import COMPUTING, ROWS, TILE, WORDS

LOG2_E = math.log2(math.e)
STAGES = 2  # of a ring of blocks in shared memory
TILED = plgpu.Layout.WGMMA  # of an accumulator over the threads of a warpgroup
PER_ROW = TILED.reduce(1)
PER_COLUMN = TILED.reduce(0)


class Program(NamedTuple):
    """The work of a warpgroup: row, head and tile of the grid, its number, and the blocks that the tile visits."""

    row: Array
    head: Array
    tile: Array
    warpgroup: Array
    lists: Any  # refs of a TileLists
    parts: int  # in which a listed block is visited
    unmasked: Array  # parts that are allowed as a whole
    live: Array  # and all

    @classmethod
    def of(cls, order: Any, count: Any, first: Any, bits: Any, parts: int = 1) -> Program:
        row, head, tile, warpgroup = (
            lax.axis_index(name) for name in ("row", "head", "tile", "warpgroup")
        )
        unmasked, live = (parts * count[row, tile, i] for i in range(2))
        return cls(row, head, tile, warpgroup, (order, first, bits), parts, unmasked, live)

    def block(self, step: Array) -> Array:
        """Return which block of the size of a part is visited in this step."""
        listed = self.lists[0][self.row, self.tile, lax.div(step, jnp.int32(self.parts))]
        return self.parts * listed + lax.rem(step, jnp.int32(self.parts))

    def rows(self) -> Any:
        """Slice the rows of this warpgroup out of a row of tokens."""
        return pl.ds(self.tile * TILE + self.warpgroup * ROWS, ROWS)

    def words(self, step: Array, columns: int) -> Array:
        """Load the bits of this warpgroup's rows of a block that is allowed in part."""
        _, first, bits = self.lists
        number = first[self.row, self.tile] + lax.div(step - self.unmasked, jnp.int32(self.parts))
        index = (self.row, number, pl.ds(self.warpgroup * ROWS, ROWS))
        words = plgpu.load(bits.at[index], layout=TILED, optimized=False)
        if self.parts == 1:
            return words
        return lax.shift_right_logical(
            words, lax.rem(step, jnp.int32(self.parts)) * (columns // WORDS)
        )

    def visit(self, body: Callable[[bool, Array, Any], Any], carry: Any) -> Any:
        """Fold `body(masked, step, carry)` over the blocks allowed as a whole, then over those allowed in part."""
        carry = lax.fori_loop(0, self.unmasked, partial(body, False), carry)
        return lax.fori_loop(self.unmasked, self.live, partial(body, True), carry)


class Ring(NamedTuple):
    """Blocks in shared memory, each in turn filled by the loading warpgroup and used by the others."""

    # Of two slots, time from left to right; L: filled, then `loaded` is signalled; U: used, then
    # `free` is, once by each of the warpgroups that multiply:
    #   slot 0   L0  U0......  L2  U2......  L4
    #   slot 1       L1  U1......  L3  U3......

    blocks: Any
    loaded: Any  # barriers
    free: Any
    numbers: Any = None  # float32, one for each token of a block

    @classmethod
    def types(cls, tokens: int, width: int, dtype: jnp.dtype, numbers: bool = False) -> Ring:
        """Describe a ring of blocks of so many tokens, in shared memory."""
        loaded = plgpu.Barrier(num_arrivals=1 + numbers, num_barriers=STAGES)
        free = plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=STAGES)
        per_token = plgpu.SMEM((STAGES, tokens), jnp.float32) if numbers else None
        return cls(shared_blocks(STAGES, tokens, width, dtype), loaded, free, per_token)

    def load(self, slot: Array, block: Any, numbers: Any = None) -> None:
        """Begin to fill a block."""
        plgpu.copy_gmem_to_smem(block, self.blocks.at[slot], self.loaded.at[slot])
        if numbers is not None:
            plgpu.copy_gmem_to_smem(numbers, self.numbers.at[slot], self.loaded.at[slot])


def ring_slot(step: Array) -> Array:
    return lax.rem(step, jnp.int32(STAGES))


def stream(steps: Array, *rings: tuple[Ring, Callable[[Array], tuple[Any, ...]]]) -> None:
    """Fill a block of every ring in each step, as soon as it is free, from what a function of the step names."""
    plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, steps)
    def _(step: Array) -> None:
        slot = ring_slot(step)
        for ring, source in rings:

            @pl.when(step >= STAGES)
            def _(ring: Ring = ring) -> None:
                plgpu.barrier_wait(ring.free.at[slot])

            ring.load(slot, *source(step))

    # a barrier must not be left behind with an arrival that nobody waited for
    for slot in range(STAGES):

        @pl.when(steps > slot)
        def _(slot: int = slot) -> None:
            for ring, _ in rings:
                plgpu.barrier_wait(ring.free.at[slot])


def stream_keys(program: Program, size: int, group: int, *rings: tuple[Ring, Any]) -> None:
    """Fill rings with the blocks of keys and of values, of this size, that a tile of queries visits."""

    def of(ref: Any) -> Callable[[Array], tuple[Any, ...]]:
        head = lax.div(program.head, jnp.int32(group))
        return lambda step: (ref.at[program.row, pl.ds(program.block(step) * size, size), head],)

    stream(program.live, *((ring, of(ref)) for ring, ref in rings))


def unpack_bits(words: Array, columns: int, interpret: bool) -> Array:
    """Unpack the bits of rows into a mask, laid out as an accumulator."""
    shape = (ROWS, columns)
    if interpret:
        shifts = jnp.arange(columns // WORDS)[None, :, None]
        return (((words[:, None, :] >> shifts) & 1) != 0).reshape(shape)

    @plgpu.inline_mgpu(
        arg_types=(TILED,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.bool_, TILED)
    )
    def unpack(_: Any, words: Any) -> Any:
        registers = np.empty(TILED.to_mgpu().registers_shape(shape), dtype=object)
        for bit in range(columns // WORDS):
            registers[:, bit] = ((words & (1 << bit)) != 0).registers[:, 0]
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=False)

    return unpack(words)


def product(a: Any, b: Any, shape: tuple[int, int]) -> Array:
    """Multiply matrices in shared memory into a new accumulator."""

    def multiply(ref: Any) -> Array:
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def add_product(
    total: Array, a: Array, b: Any, interpret: bool, meanwhile: Callable[[], None] = lambda: None
) -> Array:
    """Add to an accumulator the product of a matrix in registers with one in shared memory.

    meanwhile: is done while it is computed.
    """
    if interpret:
        meanwhile()
        return total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)

    def multiply(ref: Any) -> None:
        plgpu.wgmma(ref, a, b)
        meanwhile()

    return pl.run_state(multiply)(plgpu.ACC.init(total))


def filled(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def across(x: Array, shape: tuple[int, int], axis: int = 0) -> Array:
    """Repeat a number of each row, or with axis 1 of each column."""
    return lax.broadcast_in_dim(x, shape, [axis])


def cap_scores(products: Array, scores: Scores) -> tuple[Array, float, Array | None]:
    """Return scores over a factor, that factor, in units of log 2, and d score / d scaled product if not 1."""
    if not scores.cap:
        return products, scores.scale * LOG2_E, None
    # The hardware's tanh has 11 bits.
    bent = 1.0 - 2.0 / (jnp.exp2(products * (2 * LOG2_E * scores.scale / scores.cap)) + 1.0)
    return bent, scores.cap * LOG2_E, 1.0 - bent * bent


def softmax_weights(
    products: Array, lse: Array, words: Array | None, scores: Scores, axis: int = 0
) -> tuple[Array, Array | None]:
    """Compute the weights of a block again in the backward pass, and what `cap_scores` returns last.

    lse: of each row, or with axis 1 of each column. words: None where all of the block is allowed.
    """
    s, factor, slope = cap_scores(products, scores)
    weights = jnp.exp2(s * factor - across(lse, products.shape, axis))
    if words is not None:
        allowed = unpack_bits(words, products.shape[1], scores.interpret)
        weights = jnp.where(allowed, weights, 0.0)
    return weights, slope


def score_gradients(
    weights: Array, d_weights: Array, delta: Array, slope: Array | None, axis: int = 0
) -> Array:
    """Compute the gradients of scaled products. slope: as `softmax_weights` returns it."""
    d_scores = weights * (d_weights - across(delta, weights.shape, axis))
    return d_scores if slope is None else d_scores * slope


def divide_work(program: Program, compute: Callable[[], None], load: Callable[[], None]) -> None:
    """Let two warpgroups compute, with the registers that the third, which loads, leaves to them."""

    @pl.when(program.warpgroup < COMPUTING)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        compute()

    pl.when(program.warpgroup == COMPUTING)(load)


def shared_blocks(blocks: int, rows: int, width: int, dtype: jnp.dtype) -> Any:
    """Describe blocks in shared memory, in the order in which products and TMA read and write them."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * width * itemsize)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(
        (blocks, rows, width), dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle))
    )


def hopper_kernel(
    body: Callable[..., None], name: str, grid: tuple[int, ...], scores: Scores, **types: Any
) -> Callable:
    """Make a kernel of a grid of (heads, tiles, rows), each of two warpgroups that multiply and one that loads."""
    return plgpu.kernel(
        body,
        **types,
        grid=grid,
        grid_names=("head", "tile", "row"),
        num_threads=COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        # JAX's interpreter of these kernels, of its versions that have one.
        **({"interpret": plgpu.InterpretGPUParams()} if scores.interpret else {}),
    )
