"""Move arrays from one stage's mesh to another's, device to device, whatever their shardings.

A static plan intersects the shards of source and target: every piece is cut out on the device that sends it, moved, and
joined on the device that needs it. That covers unequal data, FSDP and tensor parallelism of two stages, and replicas,
without a broker between them (MMScale section 4.2 has one). This is the only module that moves arrays between meshes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

Box = tuple[tuple[int, int], ...]  # first and last (exclusive) index along every axis


class Move(NamedTuple):
    """One piece of an array on its way. Boxes are relative to the shards."""

    source: int  # number of the device
    target: int
    taken: Box  # from the source's shard
    placed: Box  # in the target's


def plan_moves(source: Mapping[int, Box], target: Mapping[int, Box], processes: Mapping[int, int]) -> list[Move]:
    """Plan the pieces that fill the target's shards from the source's; boxes by device, processes by device.

    Of replicas, a device that has the piece already sends it, else one of its process, else the one that sends least;
    all processes plan the same moves. Raises ValueError where the source does not cover the target.
    """
    replicas: dict[Box, list[int]] = defaultdict(list)
    for device in sorted(source):
        replicas[source[device]].append(device)
    load: dict[int, int] = defaultdict(int)
    moves = []
    for device in sorted(target):
        wanted = target[device]
        missing = _size(wanted)
        for box in sorted(replicas):
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, wanted, strict=True))
            if any(first >= last for first, last in common):
                continue
            sender = min(replicas[box], key=lambda d: (d != device, processes[d] != processes[device], load[d], d))
            load[sender] += _size(common)
            missing -= _size(common)
            moves.append(Move(sender, device, _relative(common, box), _relative(common, wanted)))
        if missing:
            raise ValueError(f"{missing} elements of {wanted} on device {device} are on no device of the source")
    return moves


def _size(box: Box) -> int:
    return prod(last - first for first, last in box)


def _relative(box: Box, shard: Box) -> Box:
    return tuple((first - origin, last - origin) for (first, last), (origin, _) in zip(box, shard, strict=True))


def shard_boxes(layout: NamedSharding, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the part of an array that each device holds, by the device's number."""
    return {
        device.id: tuple(
            (s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True)
        )
        for device, index in layout.devices_indices_map(shape).items()
    }


class Transfer:
    """The transfer of arrays of one shape and dtype between two shardings."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, source: NamedSharding, target: NamedSharding) -> None:
        self.shape = shape
        self.dtype = dtype
        self.target = target
        self.devices = {device.id: device for device in (*source.mesh.devices.flat, *target.mesh.devices.flat)}
        processes = {number: device.process_index for number, device in self.devices.items()}
        self.source_boxes = shard_boxes(source, shape)
        self.target_boxes = shard_boxes(target, shape)
        self.moves = plan_moves(self.source_boxes, self.target_boxes, processes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Start to move an array; returns at once, like every computation."""
        shards = {shard.device.id: shard.data for shard in x.addressable_shards}
        pieces: dict[int, list[tuple[jax.Array, Box]]] = defaultdict(list)
        for move in self.moves:
            piece = _cut(shards[move.source], move.taken)
            # One call for each piece: a list whose members have other devices may arrive swapped across processes
            # (jaxlib groups them in an order that differs by process; up to 0.12 at least).
            piece = jax.device_put(piece, SingleDeviceSharding(self.devices[move.target]))
            pieces[move.target].append((piece, move.placed))
        joined = [_join(pieces[number], _lengths(box)) for number, box in self.target_boxes.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self.target, joined, dtype=self.dtype)


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)


def _starts(box: Box) -> list[np.int32]:
    return [np.int32(first) for first, _ in box]


def _cut(shard: jax.Array, box: Box) -> jax.Array:
    """Cut a box out of a shard; the shard itself where that is all of it."""
    return shard if _lengths(box) == shard.shape else _cut_at(shard, _starts(box), sizes=_lengths(box))


def _join(pieces: list[tuple[jax.Array, Box]], shape: tuple[int, ...]) -> jax.Array:
    """Join pieces to a shard; the piece itself where there is one."""
    if len(pieces) == 1:
        return pieces[0][0]
    return _join_at([piece for piece, _ in pieces], [_starts(box) for _, box in pieces], shape=shape)


# Where a piece lies is an argument, so that pieces of equal size share a program.


@partial(jax.jit, static_argnames="sizes")
def _cut_at(shard: jax.Array, starts: list[jax.Array], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(shard, starts, sizes)


@partial(jax.jit, static_argnames="shape")
def _join_at(pieces: list[jax.Array], starts: list[list[jax.Array]], shape: tuple[int, ...]) -> jax.Array:
    shard = jnp.zeros(shape, pieces[0].dtype)
    for piece, start in zip(pieces, starts, strict=True):
        shard = jax.lax.dynamic_update_slice(shard, piece, start)
    return shard


@cache
def _transfer(shape: tuple[int, ...], dtype: Any, source: NamedSharding, target: NamedSharding) -> Transfer:
    return Transfer(shape, dtype, source, target)


def move(x: Any, target: Any) -> Any:
    """Move arrays to other shardings, given as one or as a pytree of the same structure, on any devices."""
    if isinstance(target, NamedSharding):
        return jax.tree.map(partial(move_array, target=target), x)
    return jax.tree.map(move_array, x, target)


def move_array(x: jax.Array, target: NamedSharding) -> jax.Array:
    """Move one array to another sharding."""
    return x if x.sharding == target else _transfer(x.shape, x.dtype, x.sharding, target)(x)


def view(x: jax.Array, target: NamedSharding) -> jax.Array:
    """Return the shards that a replicated array has on some of its devices as an array on these, without a copy."""
    local = {shard.device: shard.data for shard in x.addressable_shards}
    shards = [local[device] for device in target.addressable_devices]
    return jax.make_array_from_single_device_arrays(x.shape, target, shards, dtype=x.dtype)
