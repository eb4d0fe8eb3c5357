"""Tile sizes of attention by blocks, by head width: plain numbers, which planning reads too."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Tokens of a block of queries and of keys, and the warps and pipeline stages that Triton runs it with."""

    q: int
    k: int
    warps: int
    stages: int


class KernelTiles(NamedTuple):
    """Tiles of the three kernels: output, gradient of queries, gradients of keys and values."""

    forward: Tiles
    d_query: Tiles
    d_key: Tiles


# Tokens of a block, also of attention in XLA operations. On a CPU core rows of several samples take
# .4 to .65 of the time with 256, and a long sample .85 to 1.1 of it
# (docs/measurements/first_run.md).
MAX_BLOCK = 128
# In float32, whose products Triton unrolls into single additions, larger blocks take the compiler
# minutes.
MAX_FLOAT32_BLOCK = 32
# By head width up to and including. The fastest on an H200 of those tried
# (docs/measurements/gpu.md) up to 128.
TILES = {
    128: KernelTiles(Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    256: KernelTiles(Tiles(64, 64, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
}


def tiles_for(
    head_width: int, length: int, max_block: int = MAX_BLOCK, itemsize: int = 2
) -> KernelTiles:
    """Choose tiles for heads of this width, of at most `max_block` tokens (16 or more), in short rows the row's.

    itemsize: bytes of a number of the queries and keys.
    """
    widths = [width for width in TILES if head_width <= width]
    if not widths:
        raise ValueError(
            f"heads of {head_width} channels are wider than the kernel takes, {max(TILES)}"
        )
    limit = max(
        16, min(padded_width(length), max_block, MAX_FLOAT32_BLOCK if itemsize > 2 else MAX_BLOCK)
    )
    return KernelTiles._make(
        t._replace(q=min(t.q, limit), k=min(t.k, limit)) for t in TILES[min(widths)]
    )


def window_block(window: int) -> int:
    """Choose the longest block, in tokens, of a tower whose layers attend by lists in windows of at most so many."""
    # A block of more tokens than a window has would hold several, each of which sees a part of the
    # block's keys. Windows of 8 x 8 get blocks of 64; those of 14 x 14 = 196 get 128.
    return min(1 << window.bit_length() - 1, MAX_BLOCK)


def padded_width(width: int) -> int:
    """Return the power of two, at least 16, to which Triton's products pad so many channels or tokens."""
    return max(16, 1 << (width - 1).bit_length())
