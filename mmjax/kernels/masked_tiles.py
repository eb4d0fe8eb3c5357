"""Blocks that the Hopper kernels visit, and the masks of those that are allowed in part, as bits.

Made once per batch for all layers and heads: a mask's six fields for each column of a block would
not fit in the registers of a thread, one bit does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from mmjax.batch import MaskSpec, allowed
from mmjax.kernels.flash_attention import BlockPlan
from mmjax.kernels.masks import BlockLists, block_pairs, pad_mask

ROWS = 64  # of a tile for one warpgroup: those of a product
COMPUTING = 2  # warpgroups that multiply
TILE = COMPUTING * ROWS  # queries, or keys in the gradients of keys, of a program
KEYS = 128  # of a block that a tile of queries visits
# of a block that a tile of keys visits: its four accumulators leave no registers for more
QUERIES = 64
WORDS = 8  # of bits for each row of a block: a thread holds pairs of columns that are 8 apart
# Blocks that are allowed in part for each tile and 128 columns, for which there is room. Packed
# samples, windows and items of any lengths take at most 6; masks that take more, as kinds that see
# each other at random, run in Triton.
MASKED_BLOCKS = 16
OLDEST_JAX = (0, 11, 2)  # whose Mosaic GPU has all that the kernels use


def unsupported(
    capability: str | None, length: int, head_width: int, itemsize: int, max_block: int
) -> str | None:
    """Say why the Hopper kernels do not run rows of this length on a device of this compute capability, if so."""
    reasons = {
        f"compute capability {capability}": capability != "9.0",
        f"JAX {jax.__version__}": jax.__version_info__[:3] < OLDEST_JAX,
        # wider ones do not fit in registers
        f"heads of {head_width} channels": not 16 <= head_width <= 128,
        f"numbers of {itemsize} bytes": itemsize != 2,
        # of windows, which leave half a tile idle
        f"blocks of {max_block} tokens": max_block < TILE,
        f"rows of {length} tokens": length <= TILE // 2,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class TileLists(NamedTuple):
    """Blocks that each tile visits, and the masks of those that are allowed in part, in the order of the lists.

    bits: int32 [B, capacity, TILE, 8]; bit j of word e of a row is column 8 j + e. first: int32 [B,
    tiles], the first mask of a tile. fits: bool [B], whether there is room for all.
    """

    blocks: BlockLists
    first: Array
    bits: Array
    fits: Array

    @classmethod
    def of(
        cls,
        unmasked: Bool[Array, "b x y"],
        live: Bool[Array, "b x y"],
        columns: int,
        evaluate: Callable[[Array, Array], Array],
    ) -> TileLists:
        """List blocks by class. evaluate: the mask `[B, n, TILE, columns]` of tiles and blocks `[B, n]`."""
        # The masks of all tiles share one list, tile after tile. With 2, 0 and 3 masked blocks: end
        # 2 2 5, first 0 2 2, and masks 0 .. 4 are of tiles 0 0 2 2 2.
        blocks = BlockLists.of(unmasked, live)
        rows, tiles, across = live.shape
        capacity = min(tiles * across, MASKED_BLOCKS * tiles * KEYS // columns)
        masked = blocks.count[..., 1] - blocks.count[..., 0]
        end = jnp.cumsum(masked, axis=1)
        first = end - masked
        number = jnp.arange(capacity, dtype=jnp.int32)
        tile = jax.vmap(partial(jnp.searchsorted, side="right"), (0, None))(end, number)
        tile = jnp.minimum(tile, tiles - 1).astype(jnp.int32)
        take = partial(jnp.take_along_axis, axis=1)
        # A tile's masked blocks stand in `order` behind its unmasked ones. Beyond the last mask the
        # index may be any: nobody reads these bits.
        step = number - take(first, tile) + take(blocks.count[..., 0], tile)
        block = take(blocks.order.reshape(rows, -1), tile * across + jnp.clip(step, 0, across - 1))
        return cls(
            blocks,
            first.astype(jnp.int32),
            pack_bits(evaluate(tile, block)),
            end[:, -1] <= capacity,
        )


class TilePlan(NamedTuple):
    """All that the kernels need of a mask: made once for all layers of a tower.

    triton: for masks with no room for all bits. With `index` all arrays hold several masks, as a
    BlockPlan's.
    """

    by_query: TileLists  # of output and gradient of queries
    by_key: TileLists
    triton: BlockPlan
    index: Array | None = None


def plan_tiles(mask: MaskSpec, triton: BlockPlan) -> TilePlan:
    """List the blocks that the kernels visit under this mask, padded to whole tiles, and make the masks of its parts.

    triton: the plan of the same mask for the other kernel, padded to at least as many tokens.
    """
    mask = pad_mask(mask, triton.q_fields.shape[-1])

    def of_blocks(size: int, index: Array) -> MaskSpec:
        take = lambda x: jnp.take_along_axis(x.reshape(len(x), -1, size), index[..., None], axis=1)  # noqa: E731
        return jax.tree.map(take, mask)

    def by_query(tile: Array, block: Array) -> Array:
        return allowed(of_blocks(TILE, tile), of_blocks(KEYS, block))

    def by_key(tile: Array, block: Array) -> Array:
        return allowed(of_blocks(QUERIES, block), of_blocks(TILE, tile)).swapaxes(-1, -2)

    of_keys = (pairs.swapaxes(1, 2) for pairs in block_pairs(mask, mask, QUERIES, TILE))
    return TilePlan(
        TileLists.of(*block_pairs(mask, mask, TILE, KEYS), KEYS, by_query),
        TileLists.of(*of_keys, QUERIES, by_key),
        triton,
    )


def pack_bits(mask: Bool[Array, "*b r c"]) -> Int[Array, "*b r 8"]:
    """Pack up to 256 columns of each row, in the order in which a thread holds those of an accumulator."""
    # [..., c] -> [..., c / 8, 8]: column 19 = 8 * 2 + 3 is bit 2 of word 3.
    words = mask.reshape(*mask.shape[:-1], -1, WORDS).astype(jnp.uint32)
    shifts = jnp.arange(words.shape[-2], dtype=jnp.uint32)[:, None]
    return lax.bitcast_convert_type((words << shifts).sum(-2, dtype=jnp.uint32), jnp.int32)
