"""Partitions of layers into stages: equal to all of them looked at one by one, and what they are refused for."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from mmjax.benchmarks.baselines.partition import BASELINES
from mmjax.planning.partition import (
    Chain,
    best_partitions,
    fastest_partition,
    iteration_seconds,
    partition,
)


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
    seconds, cut_bytes = (
        rng.integers(0, largest, layers).tolist(),
        rng.integers(0, 4, layers + 1).tolist(),
    )
    return seconds, int(rng.integers(1, layers + 1)), cut_bytes, rng


@pytest.mark.parametrize("limited", [False, True])
def test_a_partition_is_the_best_of_all_that_fit(limited):
    refused = 0
    for seed in range(200):
        seconds, stages, cut_bytes, rng = drawn_chain(seed)
        room = rng.random((stages, len(seconds), len(seconds) + 1)) < 0.6
        fits = (lambda first, end, stage: room[stage, first, end]) if limited else None  # noqa: B023
        options = [
            objective(seconds, cut_bytes, cuts)
            for cuts in all_partitions(len(seconds), stages, fits)
        ]
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
        every = [
            objective(seconds, cut_bytes, cuts) for cuts in all_partitions(len(seconds), stages)
        ]
        for slack in (0.0, 0.5):
            within = sorted(o[1:] for o in every if o[0] <= min(every)[0] * (1 + slack))
            found = best_partitions(seconds, stages, cut_bytes, count=5, slack=slack)
            assert len(set(found)) == len(found)
            assert [objective(seconds, cut_bytes, cuts)[1:] for cuts in found] == within[:5]


def test_rounding_does_not_decide_between_equal_stages():
    # 0.1 + 0.2 is more than 0.3 in floating point; the cut after the first layer sends nothing.
    assert partition([0.3, 0.1, 0.2, 0.3], 3, [0, 0, 9, 0, 0]) == (1, 3)
    assert partition([0.1] * 30, 3) == (10, 20)
    # [2, 3] and [3, 2] are as good but for rounding: the first stage is the smaller one.
    assert partition([1.01] * 5 + [1.0] * 6, 4, [9] * 5 + [0] + [9] * 6) == (2, 5, 8)


def test_more_stages_than_layers_are_refused():
    for stages in (0, 4):
        with pytest.raises(ValueError, match=f"3 layers cannot be cut into {stages} stages"):
            partition([1.0, 1.0, 1.0], stages)


def chain(forward, backward=None, *, towers=(0,), cut_bytes=None, **parts) -> Chain:
    """A chain of 8 microbatches whose backward passes take twice as long unless said."""
    forward = np.asarray(forward, float)
    return Chain(
        parameters=np.ones(len(forward)),
        forward=forward,
        backward=2 * forward if backward is None else np.asarray(backward, float),
        cut_bytes=np.zeros(len(forward) + 1) if cut_bytes is None else np.asarray(cut_bytes),
        towers=towers,
        **{"microbatches": 8, **parts},
    )


def test_a_step_of_equal_stages_takes_the_closed_form_and_transfers_lengthen_it():
    assert iteration_seconds(chain([2.0] * 4), (1, 2, 3)) == (8 + 4 - 1) * 6
    assert iteration_seconds(chain([1.0] * 8), (2, 4, 6)) == (8 + 4 - 1) * 6
    sending, silent = chain([2.0] * 3, cut_bytes=[0, 0, 5, 0], bandwidth=5), chain([2.0] * 3)
    assert iteration_seconds(sending, (1,)) == iteration_seconds(silent, (1,))
    # A second forward and another backward, at least once.
    assert iteration_seconds(sending, (2,)) >= iteration_seconds(silent, (2,)) + 2


def test_encoders_side_by_side_wait_for_nothing_but_the_llm():
    modalities = chain([2.0] * 5, towers=(0, 1, 2), microbatches=16)
    assert iteration_seconds(modalities, (1, 2, 3, 4)) == 120
    assert iteration_seconds(modalities, (1, 2, 3, 4), side_by_side=True) == 114


def test_the_fastest_partition_is_never_slower_than_the_exact_one_nor_than_any_baseline():
    faster = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        model = chain(
            np.concatenate([rng.uniform(0.5, 1.5, 5), rng.uniform(0.5, 4.0, 7)]),
            towers=(0, 5),
            cut_bytes=rng.integers(0, 3, 13),
            bandwidth=10.0,
        )
        seconds = iteration_seconds(model, fastest_partition(model, 4))
        exact = iteration_seconds(
            model, partition(model.forward + model.backward, 4, model.cut_bytes)
        )
        assert seconds <= exact
        faster += seconds < exact
        for baseline in BASELINES.values():
            assert seconds <= iteration_seconds(model, baseline(model, 4)) + 1e-9
    assert faster


def test_frozen_encoders_get_fewer_stages_than_by_their_forward_pass():
    # A forward pass of 9 each; the encoder has no backward pass, the LLM's takes twice as long.
    frozen = chain([1.0] * 18, [0.0] * 9 + [2.0] * 9, towers=(0, 9))
    assert BASELINES["profile"](frozen, 4)[1] < 9
    assert partition(frozen.forward + frozen.backward, 4) == (9, 12, 15)
    assert BASELINES["cornstarch"](frozen, 4) == (9, 12, 15)
