"""Arrays move between meshes whole, whatever the two shardings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mmjax.errors import UserError
from mmjax.runtime.transfer import Links, move, open_carrier, plan_moves

SPECS = [
    PartitionSpec(),
    PartitionSpec("a"),
    PartitionSpec(None, "b"),
    PartitionSpec("a", "b"),
    PartitionSpec(("a", "b")),
]


def mesh(first: int, a: int, b: int) -> Mesh:
    return Mesh(np.array(jax.devices()[first : first + a * b]).reshape(a, b), ("a", "b"))


@pytest.mark.covering(2)
@pytest.mark.parametrize("target", SPECS, ids=str)
@pytest.mark.parametrize("source", SPECS, ids=str)
@pytest.mark.parametrize(
    "meshes", [((0, 2, 2), (4, 2, 2)), ((0, 3, 1), (2, 1, 2)), ((0, 1, 4), (4, 2, 1))], ids=str
)
def test_a_moved_array_is_the_same_on_the_other_mesh(meshes, source, target):
    x = np.arange(12 * 8 * 3, dtype=np.float32).reshape(12, 8, 3)
    x[0, 0, 0] = -0.0
    placed = jax.device_put(x, NamedSharding(mesh(*meshes[0]), source))
    moved = move(placed, NamedSharding(mesh(*meshes[1]), target))
    assert np.array_equal(np.asarray(moved).view(np.uint32), x.view(np.uint32))
    for shard in moved.addressable_shards:
        assert np.array_equal(shard.data, x[shard.index])


def test_every_element_arrives_once_and_from_a_device_that_has_it():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, columns = rng.integers(1, 9, 2)
        source, target = (dict(enumerate(boxes(rng, rows, columns))) for _ in range(2))
        processes = {device: device // 2 for device in range(16)}
        arrived = {device: np.zeros((rows, columns), int) for device in target}
        for moved in plan_moves(source, target, processes):
            (a, b), (c, d) = moved.taken
            r, k = source[moved.source][0][0], source[moved.source][1][0]
            (e, f), (g, h) = moved.placed
            s, t = target[moved.target][0][0], target[moved.target][1][0]
            assert (r + a, r + b, k + c, k + d) == (s + e, s + f, t + g, t + h)
            arrived[moved.target][r + a : r + b, k + c : k + d] += 1
        for device, ((a, b), (c, d)) in target.items():
            assert (arrived[device][a:b, c:d] == 1).all()
            assert arrived[device].sum() == (b - a) * (d - c)


def boxes(rng: np.random.Generator, rows: int, columns: int) -> list:
    """A grid of boxes over all of an array, some of them on several devices."""
    cuts = [
        sorted({0, size, *rng.integers(0, size + 1, rng.integers(0, 2)).tolist()})
        for size in (rows, columns)
    ]
    grid = [((a, b), (c, d)) for a, b in pairwise(cuts[0]) for c, d in pairwise(cuts[1])]
    return [*grid, *(grid[i] for i in rng.integers(0, len(grid), 3))]


def test_a_device_that_has_a_piece_keeps_it():
    box = ((0, 4), (0, 4))
    moves = plan_moves({0: box, 1: box}, {1: box, 2: box}, {0: 0, 1: 1, 2: 0})
    assert [(m.source, m.target) for m in moves] == [(1, 1), (0, 2)]


def test_transfers_of_the_runtime_are_refused_on_cpus():
    with pytest.raises(
        UserError, match=r"pipeline\.carrier=device: CPUs have no transfers of their own; use"
    ):
        open_carrier("device", "cpu")


def test_a_source_that_lacks_a_part_is_refused():
    with pytest.raises(
        ValueError, match=r"8 elements .* on device 1 are on no device of the source"
    ):
        plan_moves({0: ((0, 2), (0, 4))}, {1: ((0, 4), (0, 4))}, {0: 0, 1: 0})


class FaultyServer:
    """Offers pieces 1 and 2 in each other's place, and piece 3 with another value than was sent."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def await_pull(self, number: int, arrays: list[jax.Array]) -> None:
        piece, *words = arrays
        self.server.await_pull({1: 2, 2: 1}.get(number, number), [piece + (number == 3), *words])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_piece_that_comes_in_the_place_of_another_or_changed_is_refused(number, monkeypatch):
    monkeypatch.setenv("MMJAX_CHECK_TRANSFERS", "1")
    links = Links()  # of this process to itself
    links._server, server = FaultyServer(links._server), links._server
    struct = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))
    links._connections[0] = server.connect(server.address())
    pieces = {n: jax.numpy.full(4, n, np.float32) for n in (1, 2, 3, 4)}
    for n, piece in pieces.items():
        links.send(piece, n)
    assert np.array_equal(links.receive(struct, 0, 4, "whole"), pieces[4])
    with pytest.raises(
        RuntimeError, match="transfer broken brought another piece than process 0 sent"
    ):
        links.receive(struct, 0, number, "broken")
