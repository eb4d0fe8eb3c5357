"""The chain that is found has the least simulated seconds, and fits."""

from __future__ import annotations

import pytest
from test_allocate import problem

from mmjax.planning.allocate_chain import allocate_chain, list_chains, simulate_chain


@pytest.mark.parametrize("generators", [(), ("picture",)])
def test_no_chain_is_faster_than_the_one_that_is_found_or_than_its_bound(generators):
    found = 0
    for seed in range(20):
        of = problem(seed, *generators)
        chains = [
            (bound, simulate_chain(of, chain, int(stages)))
            for chain in list_chains(of)
            for stages, bound in zip(chain.stages, chain.bounds, strict=True)
        ]
        assert all(ran.seconds >= bound * (1 - 1e-9) for bound, ran in chains if ran)
        seconds = [ran.seconds for _, ran in chains if ran]
        best = allocate_chain(of)
        assert (best and best.seconds) == (min(seconds) if seconds else None)
        if best:
            found += 1
            layers = sum(len(costs[0].forward) for costs in of.towers.values())
            assert 1 < best.units["all"].pipeline == len(set(best.units["all"].cuts)) + 1 <= layers
            assert best.devices <= of.cluster.devices
    assert found > 5


def test_chains_hold_no_more_than_there_is_room_for():
    of = next(of for of in map(problem, range(20)) if allocate_chain(of))
    assert allocate_chain(of._replace(room=0.1 * of.room)) is None
