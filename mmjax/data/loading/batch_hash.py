"""Hash what a step's rows hold, in a way that does not depend on how many processes they are spread over.

Every row is hashed with its place, and the hashes are added up: each process adds its own rows, and all their sums are
that of the step. A replayed step has the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator

import numpy as np

from mmjax.batch import ItemBatch, Microbatch, TextBatch, WeightedSlots

BITS = 64
HALF = 32

Own = tuple[Container[int], Container[int]]  # ranks and encoder ranks that count


def content_of(batch: Microbatch, number: int, ranks: range, encoder_ranks: range, counted: Own) -> int:
    """Add up the hashes of a microbatch's rows, 64 bits.

    number: of the microbatch in its step. ranks, encoder_ranks: that hold these rows, as many each. counted: of these,
    the ranks whose rows count here.
    """
    total = _rows_content(_arrays(batch.text), ("text", number), ranks, counted[0])
    for encoder, items in batch.items.items():
        total = plus(total, _rows_content(_arrays(items), (encoder, number), encoder_ranks, counted[1]))
    return total


def plus(a: int, b: int) -> int:
    """Add two hashes: each half of 32 bits by itself, as devices add them up."""
    # The low halves add up in (a + b) % 2**HALF; their carry never reaches the high half.
    return ((a >> HALF) + (b >> HALF)) % 2**HALF << HALF | (a + b) % 2**HALF


def spelled(content: int) -> str:
    """Spell a hash as the log has it."""
    return f"{content:0{BITS // 4}x}"


def _arrays(batch: TextBatch | ItemBatch) -> Iterator[np.ndarray]:
    """Iterate over all arrays of a batch, those of encoders in the order of their names, as in a JAX tree."""
    for value in batch:
        for array in (value[k] for k in sorted(value)) if isinstance(value, dict) else (value,):
            yield from array if isinstance(array, WeightedSlots) else (array,)


def _rows_content(arrays: Iterator[np.ndarray], place: tuple[str, int], ranks: range, counted: Container[int]) -> int:
    """Add up the hashes of these ranks; all rows of a rank are hashed together."""
    by_rank = [np.ascontiguousarray(a).reshape(len(ranks), -1) for a in arrays]
    total = 0
    for k, rank in enumerate(ranks):
        if rank in counted:
            digest = hashlib.blake2b(repr((*place, rank)).encode(), digest_size=BITS // 8)
            for array in by_rank:
                digest.update(array[k])
            total = plus(total, int.from_bytes(digest.digest(), "little"))
    return total
