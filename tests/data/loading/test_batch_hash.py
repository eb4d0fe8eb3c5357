"""The hash of a step's rows: the same however they are spread, another where anything in them differs."""

from __future__ import annotations

from functools import reduce

import jax
import numpy as np
import pytest
from made import load, random_samples

from mmjax.data.loading.batch_hash import add_hashes, batch_hash, hex_hash
from mmjax.data.plan.placement import Topology

TOPOLOGY = Topology(4, 4, 4)
SAMPLES = random_samples(60, seed=5)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return load(SAMPLES, tmp_path_factory.mktemp("whole"), TOPOLOGY, range(4), microbatches=2)(0)


@pytest.mark.parametrize(
    "shares", [[range(0, 1), range(1, 4)], [range(k, k + 1) for k in range(4)]]
)
def test_the_shares_of_processes_add_up_to_the_whole(whole, shares, tmp_path):
    found = 0
    for share in shares:
        found = add_hashes(
            found,
            int(
                load(SAMPLES, tmp_path / str(share.start), TOPOLOGY, share, microbatches=2)(
                    0
                ).content
            ),
        )
    assert found == int(whole.content) > 0


def test_a_row_that_two_processes_hold_counts_once(whole):
    ranks, none = range(4), ((), ())
    for number, batch in enumerate(whole.microbatches):
        assert batch_hash(batch, number, ranks, ranks, none) == 0
    halves = [((0, 1), (0, 1, 2)), ((2, 3), (3,))]
    found = [
        batch_hash(b, m, ranks, ranks, own)
        for own in halves
        for m, b in enumerate(whole.microbatches)
    ]
    assert reduce(add_hashes, found) == int(whole.content)


def test_every_number_of_every_array_counts(whole):
    ranks = range(4)
    leaves, structure = jax.tree.flatten(whole.microbatches[0])
    batch = whole.microbatches[0]
    before = batch_hash(batch, 0, ranks, ranks, (ranks, ranks))
    assert (
        batch_hash(jax.tree.unflatten(structure, leaves), 0, ranks, ranks, (ranks, ranks)) == before
    )
    filled = [(k, leaf) for k, leaf in enumerate(leaves) if leaf.size]
    assert len(filled) > 20
    for k, leaf in filled:
        changed = leaf.copy()
        changed.reshape(-1)[leaf.size // 2] += 1
        other = jax.tree.unflatten(structure, [*leaves[:k], changed, *leaves[k + 1 :]])
        assert batch_hash(other, 0, ranks, ranks, (ranks, ranks)) != before
    assert batch_hash(batch, 1, ranks, ranks, (ranks, ranks)) != before


def test_halves_add_up_as_on_devices_without_a_carry():
    assert add_hashes(0xFFFFFFFF, 1) == 0
    assert add_hashes(0xFFFFFFFF_00000003, 0x00000002_FFFFFFFF) == 0x00000001_00000002


def test_it_is_spelled_with_sixteen_digits():
    assert hex_hash(255) == "00000000000000ff"
    assert np.uint64(int(hex_hash(2**64 - 1), 16)) == 2**64 - 1
