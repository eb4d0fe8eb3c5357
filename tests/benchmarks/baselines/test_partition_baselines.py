"""Partitions as others make them: each evens out what it is named after, as its paper has it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from test_partition import chain

from mmjax.benchmarks.baselines.partition import BASELINES
from mmjax.planning.partition import Chain


def test_baselines_even_out_what_they_are_named_after():
    model = Chain(
        parameters=np.array([1, 1, 1, 1, 4, 4.0]),
        forward=np.array([3, 1, 1, 1, 1, 1.0]),
        backward=np.array([9, 0, 0, 0, 0, 0.0]),
        cut_bytes=np.zeros(7),
        towers=(0, 4),
        microbatches=4,
    )
    assert BASELINES["parameters"](model, 3) == (4, 5)
    assert BASELINES["layers"](model, 4) == (2, 4, 5)
    assert BASELINES["profile"](model, 3) in {(1, 4), (1, 3)}


def test_omnibal_finds_the_first_of_all_partitions_around_its_anchor():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        model = chain(rng.uniform(1e-3, 9e-3, 14), cut_bytes=rng.integers(0, 40, 15) * 10**6)
        prefix = np.concatenate([[0], np.cumsum(model.forward)])
        anchor = [int(np.argmin(np.abs(prefix - prefix[-1] * k / 4))) for k in (1, 2, 3)]

        def rank(cuts, model=model):
            stages = 1e3 * np.add.reduceat(model.forward, (0, *cuts))
            return float(
                ((stages - stages.mean()) ** 2).sum() + model.cut_bytes[list(cuts)].sum() / 1e6
            )

        jittered = product(*((cut - 1, cut, cut + 1) for cut in anchor))
        candidates = [cuts for cuts in jittered if 0 < cuts[0] < cuts[1] < cuts[2] < 14]
        assert rank(BASELINES["omnibal"](model, 4)) == pytest.approx(min(map(rank, candidates)))


def test_algorithm_1_gives_encoders_stages_that_keep_up_with_the_llm():
    # LLM stages of 4 layers of 3 take 12; the audio encoder of 24 needs two of them, the vision
    # encoder of 6 one.
    model = chain([1.0] * 2 + [2.0] * 4 + [1.0] * 8, towers=(0, 2, 6))
    cuts = BASELINES["cornstarch"](model, 5)
    assert cuts == (2, 4, 6, 10)
    # With no more stages than towers each has one.
    assert BASELINES["cornstarch"](model, 3) == (2, 6)
