"""Sum the bits of arrays, so that storage which returns zeros or noise for what was saved is noticed.

On accelerators programs sum; what lies on CPUs is the host's memory already, and NumPy does, so
nothing is compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Sums = dict[str, int]  # checksum of every array by its name, see `bit_sums`


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their names, "a.b.c"."""
    return {
        jax.tree_util.keystr(p, simple=True, separator="."): x
        for p, x in jax.tree.leaves_with_path(tree)
    }


def _mix(x: Any) -> Any:
    """Mix the bits of 32-bit integers one to one (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def bit_sums(tree: Any) -> dict[str, jax.Array]:
    """Sum every array's mixed bits modulo 2^32, by name: exact, so the same in any sharding."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}

    def bit_sum(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, unsigned[x.dtype.itemsize]).astype(jnp.uint32)
        # The index in the flat array: element (1, 2) of [3, 4] is 1 * 4 + 2. Not `arange` in
        # another shape: iotas stay in the array's own sharding.
        position = jnp.zeros(x.shape, jnp.uint32)
        for axis, size in enumerate(x.shape):
            position = position * np.uint32(size) + jax.lax.broadcasted_iota(
                jnp.uint32, x.shape, axis
            )
        # Mixed with their positions, so that two changes cancel in the sum no more than by chance.
        return jnp.sum(_mix(bits ^ _mix(position)), dtype=jnp.uint32)

    return {name: bit_sum(x) for name, x in leaves_by_name(tree).items()}


_CHUNK = 2**16  # elements; three buffers of so many stay in a core's cache


def host_bit_sum(x: np.ndarray) -> int:
    """Sum an array's bits like `bit_sums`, in the host's memory."""
    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
    # In place and chunk by chunk: plain NumPy expressions would go through memory for every
    # operation. The first chunk's positions are mixed once for all arrays, of which most have no
    # second one.
    buffers = np.empty((2, min(bits.size, _CHUNK)), np.uint32)
    positions, first_mixed = _chunk_positions()
    total = 0
    for start in range(0, bits.size, _CHUNK):
        chunk = bits[start : start + _CHUNK]
        mixed, shifted = buffers[:, : chunk.size]
        if start:
            np.add(positions[: chunk.size], np.uint32(start % 2**32), out=mixed)
            _mix_in_place(mixed, shifted)
            mixed ^= chunk
        else:
            np.bitwise_xor(first_mixed[: chunk.size], chunk, out=mixed)
        _mix_in_place(mixed, shifted)
        total += int(mixed.sum(dtype=np.uint32))  # modulo 2^32 too
    return total % 2**32


@cache
def _chunk_positions() -> tuple[np.ndarray, np.ndarray]:
    """Return the positions in a chunk, and these mixed: few arrays have a second chunk."""
    positions = np.arange(_CHUNK, dtype=np.uint32)
    mixed = positions.copy()
    _mix_in_place(mixed, np.empty_like(mixed))
    return positions, mixed


def _mix_in_place(x: np.ndarray, shifted: np.ndarray) -> None:
    """Mix like `_mix`, with a buffer of the same size."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= np.right_shift(x, shift, out=shifted)
        x *= np.uint32(factor)
    x ^= np.right_shift(x, 16, out=shifted)


def as_ints(sums: dict[str, jax.Array]) -> Sums:
    """Bring sums from the devices."""
    return {name: int(x) for name, x in jax.device_get(sums).items()}


def find_damaged(tree: Any, saved: Sums) -> str | None:
    """Return the name of the first array whose checksum is not the saved one; None where all agree."""
    sums: Sums = {}
    by_mesh: dict[Any, dict[str, Any]] = {}  # a program runs on one mesh
    for name, x in leaves_by_name(tree).items():
        if isinstance(x, np.ndarray):
            sums[name] = host_bit_sum(x)
        else:
            by_mesh.setdefault(x.sharding.mesh, {})[name] = x
    for arrays in by_mesh.values():
        sums |= as_ints(jax.jit(bit_sums)(arrays))
    return next((name for name, value in sums.items() if saved.get(name) != value), None)
