"""Hash the rows of a microbatch, so that the log shows whether two runs, or two starts, loaded the same."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np

from mmjax.batch import ItemBatch, Microbatch, TextBatch, WeightedSlots

BITS = 64
HALF = 32

EncoderRanks = range | Mapping[str, range]  # of all encoders, or by encoder
# ranks and encoder ranks that count
Own = tuple[Container[int], Container[int] | Mapping[str, Container[int]]]


def batch_hash(
    batch: Microbatch,
    number: int,
    ranks: range,
    encoder_ranks: EncoderRanks,
    counted: Own,
    encoded_once: Container[str] = (),
) -> int:
    """Add up the hashes of a microbatch's rows, 64 bits.

    number: of the microbatch in its step. ranks, encoder_ranks: that hold these rows, as many each.
    counted: of these, the ranks whose rows count here. encoded_once: encoders whose rows may hold
    items, their outputs, or room for these, which makes no difference.
    """
    total = _rows_hash(_arrays(batch.text), ("text", number), ranks, counted[0])
    for encoder, items in batch.items.items():
        local, counted_ranks = (
            ranks_of_encoder(encoder_ranks, encoder),
            ranks_of_encoder(counted[1], encoder),
        )
        arrays = _arrays(items)
        if encoder in encoded_once:
            next(arrays)  # the values
        total = add_hashes(total, _rows_hash(arrays, (encoder, number), local, counted_ranks))
    return total


def ranks_of_encoder(ranks: Any, encoder: str) -> Any:
    """Return an encoder's ranks from those of all, or by encoder."""
    return ranks[encoder] if isinstance(ranks, Mapping) else ranks


def add_hashes(a: int, b: int) -> int:
    """Add two hashes: each half of 32 bits by itself, as devices add them up."""
    # The low halves add up in (a + b) % 2**HALF; their carry never reaches the high half.
    return ((a >> HALF) + (b >> HALF)) % 2**HALF << HALF | (a + b) % 2**HALF


def hex_hash(content: int) -> str:
    """Format a hash as the log has it."""
    return f"{content:0{BITS // 4}x}"


def _arrays(batch: TextBatch | ItemBatch) -> Iterator[np.ndarray]:
    """Iterate over all arrays of a batch, those of encoders in the order of their names, as in a JAX tree."""
    for value in batch:
        for array in (value[k] for k in sorted(value)) if isinstance(value, dict) else (value,):
            if array is not None:  # what only a generator's items have
                yield from array if isinstance(array, WeightedSlots) else (array,)


def _rows_hash(
    arrays: Iterator[np.ndarray], place: tuple[str, int], ranks: range, counted: Container[int]
) -> int:
    """Add up the hashes of these ranks; all rows of a rank are hashed together."""
    # A process without stages of this module has none of its rows.
    if not ranks:
        return 0
    by_rank = [np.ascontiguousarray(a).reshape(len(ranks), -1) for a in arrays]
    total = 0
    for k, rank in enumerate(ranks):
        if rank in counted:
            digest = hashlib.blake2b(repr((*place, rank)).encode(), digest_size=BITS // 8)
            for array in by_rank:
                digest.update(array[k])
            total = add_hashes(total, int.from_bytes(digest.digest(), "little"))
    return total
