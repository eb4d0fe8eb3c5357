"""Move arrays from one stage's mesh to another's, device to device, whatever their shardings.

A static plan intersects the shards of source and target: every piece is cut out on the device that
sends it, moved, and joined on the device that needs it. That covers unequal data, FSDP and tensor
parallelism of two stages, and replicas, without a broker between them (MMScale section 4.2 has
one). This is the only module that moves arrays between meshes.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Hashable, Mapping
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import transfer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mmjax.config.training import Carrier
from mmjax.distributed import coordination
from mmjax.distributed.peer_links import own_address
from mmjax.errors import UserError

Box = tuple[tuple[int, int], ...]  # first and last (exclusive) index along every axis


class Move(NamedTuple):
    """One piece of an array on its way. Boxes are relative to the shards."""

    source: int  # number of the device
    target: int
    taken: Box  # from the source's shard
    placed: Box  # in the target's


def plan_moves(
    source: Mapping[int, Box], target: Mapping[int, Box], processes: Mapping[int, int]
) -> list[Move]:
    """Plan the pieces that fill the target's shards from the source's; boxes by device, processes by device.

    Of replicas, a device that has the piece already sends it, else one of its process, else the one
    that sends least; all processes plan the same moves. Raises ValueError where the source does not
    cover the target.
    """
    replicas: dict[Box, list[int]] = defaultdict(list)
    for device in sorted(source):
        replicas[source[device]].append(device)
    load: dict[int, int] = defaultdict(int)
    moves = []
    for device in sorted(target):
        needed = target[device]
        missing = _size(needed)
        for box in sorted(replicas):
            common = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, needed, strict=True)
            )
            if any(first >= last for first, last in common):
                continue
            # Every process must come to the same sender, or both would wait: so no process prefers
            # what it has itself.
            sender = min(
                replicas[box],
                key=lambda d: (d != device, processes[d] != processes[device], load[d], d),
            )
            load[sender] += _size(common)
            missing -= _size(common)
            moves.append(Move(sender, device, _relative(common, box), _relative(common, needed)))
        if missing:
            raise ValueError(
                f"{missing} elements of {needed} on device {device} are on no device of the source"
            )
    return moves


def _size(box: Box) -> int:
    return prod(last - first for first, last in box)


def _relative(box: Box, shard: Box) -> Box:
    return tuple(
        (first - origin, last - origin)
        for (first, last), (origin, _) in zip(box, shard, strict=True)
    )


def shard_boxes(layout: NamedSharding, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the part of an array that each device holds, by the device's number."""
    return {
        device.id: tuple(
            (s.start or 0, size if s.stop is None else s.stop)
            for s, size in zip(index, shape, strict=True)
        )
        for device, index in layout.devices_indices_map(shape).items()
    }


class Transfer:
    """The transfer of arrays of one shape and dtype between two shardings."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, source: NamedSharding, target: NamedSharding
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.target = target
        self.devices = {
            device.id: device for device in (*source.mesh.devices.flat, *target.mesh.devices.flat)
        }
        self.processes = {number: device.process_index for number, device in self.devices.items()}
        self.source_boxes = shard_boxes(source, shape)
        self.target_boxes = shard_boxes(target, shape)
        self.moves = plan_moves(self.source_boxes, self.target_boxes, self.processes)

    def __call__(self, x: jax.Array, key: Hashable = None) -> jax.Array:
        """Start to move an array; returns at once, like every computation.

        key: names this transfer among all between processes, where both sides must give the same. A
        process that has no shard of `x` passes it without (`without_shards`), and one that needs
        none gets such an array.
        """
        this = jax.process_index()
        shards = {shard.device.id: shard.data for shard in x.addressable_shards}
        pieces: dict[int, list[tuple[jax.Array, Box]]] = defaultdict(list)
        for number, move in enumerate(self.moves):
            sender = self.processes[move.source]
            receiver = self.processes[move.target]
            if this not in (sender, receiver):
                continue
            piece = _cut(shards[move.source], move.taken) if sender == this else None
            target = SingleDeviceSharding(self.devices[move.target])
            if sender == receiver:
                # One call for each piece: a list whose members have other devices may arrive
                # swapped across processes (jaxlib groups them in an order that differs by process;
                # up to 0.12 at least).
                piece = jax.device_put(piece, target)
            else:
                struct = jax.ShapeDtypeStruct(_lengths(move.taken), self.dtype, sharding=target)
                piece = _carry(piece, struct, self.devices[move.source], _number(key, number), key)
            if receiver == this:
                pieces[move.target].append((piece, move.placed))
        # Pieces are copied into the shard in any order: they do not overlap.
        joined = [
            _join(pieces[number], _lengths(box))
            for number, box in self.target_boxes.items()
            if number in pieces
        ]
        return jax.make_array_from_single_device_arrays(
            self.shape, self.target, joined, dtype=self.dtype
        )


def _number(key: Hashable, move: int) -> int:
    """Number a piece of a transfer: 63 bits, the same in every process."""
    digest = hashlib.blake2b(repr((key, move)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_carrier: Carrier = "sockets"


def open_carrier(carrier: Carrier, platform: str) -> None:
    """Choose how pieces travel between processes, all of which call this together.

    With MMJAX_CHECK_TRANSFERS=1 every piece travels with its number and the sum of its bits, which
    the receiver compares. Raises UserError for `device` on CPUs, which have no transfers of their
    own.
    """
    global _carrier
    _carrier = ("sockets" if platform == "cpu" else "device") if carrier == "auto" else carrier
    if _carrier == "device" and platform == "cpu":
        raise UserError(
            "pipeline.carrier=device: CPUs have no transfers of their own; use pipeline.carrier=sockets",
            everywhere=True,
        )
    if _carrier == "sockets":
        links()


def _carry(
    piece: jax.Array | None,
    struct: jax.ShapeDtypeStruct,
    source: jax.Device,
    number: int,
    key: Hashable,
) -> jax.Array | None:
    """Send a piece to another process, or receive it there: the result is the piece with `struct`'s sharding.

    Sockets apart, sender and receiver must carry the same pieces in the same order.
    """
    if _carrier == "sockets":
        if piece is None:
            return links().receive(struct, source.process_index, number, key)
        return links().send(piece, number)
    carry = _carry_by_runtime if _carrier == "device" else _carry_by_collective
    arrived = carry(piece, struct, source)
    if checks_transfers():
        sent = carry(
            None if piece is None else _check_words(piece, number), _words_of(struct), source
        )
        if arrived is not None:
            _compare(arrived, sent, number, source.process_index, key)
    return arrived


def _carry_by_runtime(
    piece: jax.Array | None, struct: jax.ShapeDtypeStruct, source: jax.Device
) -> jax.Array | None:
    """Move a piece by `device_put`, which both processes call."""
    shards = [] if piece is None else [piece]
    assembled = jax.make_array_from_single_device_arrays(
        struct.shape, SingleDeviceSharding(source), shards, dtype=struct.dtype
    )
    arrived = jax.device_put(assembled, struct.sharding)
    return arrived if piece is None else None


def _carry_by_collective(
    piece: jax.Array | None, struct: jax.ShapeDtypeStruct, source: jax.Device
) -> jax.Array | None:
    """Move a piece by a program of both devices."""
    (target,) = struct.sharding.device_set
    mesh = Mesh(np.array([source, target]), "pair", axis_types=(AxisType.Auto,))
    # Each device gives a piece, the target zeros, and the target's are replaced.
    local = jax.device_put(np.zeros(struct.shape, struct.dtype), target) if piece is None else piece
    shape = (2 * struct.shape[0], *struct.shape[1:])
    both = jax.make_array_from_single_device_arrays(
        shape, NamedSharding(mesh, PartitionSpec("pair")), [local]
    )
    (arrived,) = (shard.data for shard in _permute(both, mesh).addressable_shards)
    if source.platform == "cpu":
        arrived.block_until_ready()  # as `Passes.wait` says
    return arrived if piece is None else None


@partial(jax.jit, static_argnames="mesh")
def _permute(both: jax.Array, mesh: Mesh) -> jax.Array:
    """Give the second device's piece the values of the first's."""
    over = PartitionSpec("pair")
    send = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "pair", [(0, 1)]), mesh=mesh, in_specs=over, out_specs=over
    )
    return send(both)


def checks_transfers() -> bool:
    """Return whether every piece is compared where it arrives: for tests, and to find a fault."""
    return os.environ.get("MMJAX_CHECK_TRANSFERS") == "1"


class Links:
    """Sockets to the other processes, over which pieces are pulled by number, in any order.

    Not `device_put`, which across processes of CPUs needs all processes to take part.
    """

    def __init__(self) -> None:
        self._checks = checks_transfers()
        address = f"{own_address(os.environ.get('MMJAX_COORDINATOR', '127.0.0.1:1'))}:0"
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(
            client, address, [address] * jax.local_device_count()
        )
        self._addresses = coordination.gather("transfer addresses", self._server.address())
        self._connections: dict[int, Any] = {}

    def send(self, piece: jax.Array, number: int) -> None:
        """Offer a piece; it is kept until it was pulled."""
        self._server.await_pull(
            number, [piece, _check_words(piece, number)] if self._checks else [piece]
        )

    def receive(
        self, struct: jax.ShapeDtypeStruct, process: int, number: int, key: Hashable
    ) -> jax.Array:
        """Pull a piece that a process offers, now or later; returns at once."""
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        connection = self._connections[process]
        if not self._checks:
            return connection.pull(number, [struct])[0]
        piece, sent = connection.pull(number, [struct, _words_of(struct)])
        _compare(piece, sent, number, process, key)
        return piece


@cache
def links() -> Links:
    """Return the sockets to the other processes, which all open together with their first call."""
    return Links()


def _check_words(piece: jax.Array, number: int) -> jax.Array:
    """Return a piece's number and the sum of its bits, uint32 `[3]`, on its device."""
    return _sum_bits(piece, np.array([number & 0xFFFFFFFF, number >> 32], np.uint32))


def _words_of(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of `_check_words` of a piece."""
    return jax.ShapeDtypeStruct((3,), jnp.uint32, sharding=struct.sharding)


def _compare(piece: jax.Array, sent: jax.Array, number: int, process: int, key: Hashable) -> None:
    """Raise RuntimeError where a piece differs from the one sent; on the host, so that every transfer is waited for."""
    if not np.array_equal(sent, _check_words(piece, number)):
        raise RuntimeError(f"transfer {key} brought another piece than process {process} sent")


@jax.jit
def _sum_bits(piece: jax.Array, number: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[piece.dtype.itemsize]
    bits = piece if piece.dtype == jnp.bool else jax.lax.bitcast_convert_type(piece, unsigned)
    return jnp.concatenate([number, jnp.sum(bits, dtype=jnp.uint32)[None]])


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)


def _starts(box: Box) -> list[np.int32]:
    return [np.int32(first) for first, _ in box]


def _cut(shard: jax.Array, box: Box) -> jax.Array:
    """Cut a box out of a shard; the shard itself where that is all of it."""
    return (
        shard if _lengths(box) == shard.shape else _cut_at(shard, _starts(box), sizes=_lengths(box))
    )


def _join(pieces: list[tuple[jax.Array, Box]], shape: tuple[int, ...]) -> jax.Array:
    """Join pieces to a shard; the piece itself where there is one."""
    if len(pieces) == 1:
        return pieces[0][0]
    return _join_at(
        [piece for piece, _ in pieces], [_starts(box) for _, box in pieces], shape=shape
    )


# Where a piece lies is an argument, so that pieces of equal size share a program.


@partial(jax.jit, static_argnames="sizes")
def _cut_at(shard: jax.Array, starts: list[jax.Array], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(shard, starts, sizes)


@partial(jax.jit, static_argnames="shape")
def _join_at(
    pieces: list[jax.Array], starts: list[list[jax.Array]], shape: tuple[int, ...]
) -> jax.Array:
    shard = jnp.zeros(shape, pieces[0].dtype)
    for piece, start in zip(pieces, starts, strict=True):
        shard = jax.lax.dynamic_update_slice(shard, piece, start)
    return shard


@cache
def _transfer(
    shape: tuple[int, ...], dtype: Any, source: NamedSharding, target: NamedSharding
) -> Transfer:
    return Transfer(shape, dtype, source, target)


def move(x: Any, target: Any, key: Hashable = None) -> Any:
    """Move the arrays of a pytree to other shardings, on any devices: a pytree of them, or one for all."""
    leaves, structure = jax.tree.flatten(x)
    targets = (
        [target] * len(leaves) if isinstance(target, NamedSharding) else jax.tree.leaves(target)
    )
    moved = [
        move_array(leaf, to, (key, n))
        for n, (leaf, to) in enumerate(zip(leaves, targets, strict=True))
    ]
    return jax.tree.unflatten(structure, moved)


def move_array(x: jax.Array, target: NamedSharding, key: Hashable = None) -> jax.Array:
    """Move one array to another sharding. key: as `Transfer` takes it."""
    return x if x.sharding == target else _transfer(x.shape, x.dtype, x.sharding, target)(x, key)


def view(x: jax.Array, target: NamedSharding) -> jax.Array:
    """Return the shards that a replicated array has on some of its devices as an array on these, without a copy."""
    local = {shard.device: shard.data for shard in x.addressable_shards}
    shards = [local[device] for device in target.addressable_devices]
    return jax.make_array_from_single_device_arrays(x.shape, target, shards, dtype=x.dtype)
