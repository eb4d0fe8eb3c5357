"""Many arrays in one: in shared memory every array holds two files open, and a process often may have but 1,024."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np


class Block(NamedTuple):
    """An object whose arrays lie one behind the other."""

    head: bytes  # the object, pickled without what its arrays hold
    ends: tuple[int, ...]  # of each array in `data`
    data: np.ndarray  # uint8 [bytes]


def to_block(value: Any) -> Block:
    """`value`, which can be pickled and has at least one array that is not empty, with a copy of its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [np.asarray(buffer.raw()) for buffer in buffers]
    return Block(head, tuple(np.cumsum([part.size for part in parts]).tolist()), np.concatenate(parts))


def from_block(block: Block) -> Any:
    """What went into `to_block`, each array in memory of its own: JAX may keep one to the end."""
    parts = np.split(np.asarray(block.data), block.ends[:-1])
    return pickle.loads(block.head, buffers=[np.array(part) for part in parts])
