"""Partitions of layers into stages: equal to all of them looked at one by one, and what they are refused for."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from mmjax.planning.partition import best_partitions, partition


def objective(seconds, cut_bytes, cuts):
    ends = (0, *cuts, len(seconds))
    sums = [sum(seconds[a:b]) for a, b in pairwise(ends)]
    return max(sums), sum(cut_bytes[c] for c in cuts), sum(s * s for s in sums)


def all_partitions(layers, stages, fits=None):
    """Every partition that fits, as the first layers of stages 2, 3, ..."""
    for cuts in combinations(range(1, layers), stages - 1):
        ends = enumerate(pairwise((0, *cuts, layers)))
        if fits is None or all(fits(first, end, stage) for stage, (first, end) in ends):
            yield cuts


def drawn_chain(seed):
    """Whole times and sizes with many ties, zeros among them."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 11))
    largest = int(rng.choice([3, 50]))
    seconds, cut_bytes = rng.integers(0, largest, layers).tolist(), rng.integers(0, 4, layers + 1).tolist()
    return seconds, int(rng.integers(1, layers + 1)), cut_bytes, rng


@pytest.mark.parametrize("limited", [False, True])
def test_a_partition_is_the_best_of_all_that_fit(limited):
    refused = 0
    for seed in range(200):
        seconds, stages, cut_bytes, rng = drawn_chain(seed)
        room = rng.random((stages, len(seconds), len(seconds) + 1)) < 0.6
        fits = (lambda first, end, stage: room[stage, first, end]) if limited else None  # noqa: B023
        options = [objective(seconds, cut_bytes, cuts) for cuts in all_partitions(len(seconds), stages, fits)]
        if not options:
            refused += 1
            with pytest.raises(ValueError, match=r"no partition of .* fits the stages' memory"):
                partition(seconds, stages, cut_bytes, fits=fits)
            continue
        cuts = partition(seconds, stages, cut_bytes, fits=fits)
        assert cuts in set(all_partitions(len(seconds), stages, fits))
        assert objective(seconds, cut_bytes, cuts) == min(options)
    assert (refused > 10) == limited


def test_the_best_partitions_within_a_slack_are_the_first_of_all():
    for seed in range(100):
        seconds, stages, cut_bytes, _ = drawn_chain(seed)
        every = [objective(seconds, cut_bytes, cuts) for cuts in all_partitions(len(seconds), stages)]
        for slack in (0.0, 0.5):
            within = sorted(o[1:] for o in every if o[0] <= min(every)[0] * (1 + slack))
            found = best_partitions(seconds, stages, cut_bytes, count=5, slack=slack)
            assert len(set(found)) == len(found)
            assert [objective(seconds, cut_bytes, cuts)[1:] for cuts in found] == within[:5]


def test_rounding_does_not_decide_between_equal_stages():
    # 0.1 + 0.2 is more than 0.3 in floating point; the cut after the first layer sends nothing.
    assert partition([0.3, 0.1, 0.2, 0.3], 3, [0, 0, 9, 0, 0]) == (1, 3)
    assert partition([0.1] * 30, 3) == (10, 20)


def test_more_stages_than_layers_are_refused():
    for stages in (0, 4):
        with pytest.raises(ValueError, match=f"3 layers cannot be cut into {stages} stages"):
            partition([1.0, 1.0, 1.0], stages)
