from itertools import product

import numpy as np
import pytest
from synthetic import corpus

from mmjax.balance.place import fits, place


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_each_part_has_a_row_of_its_samples_microbatch_and_need_is_the_fullest(microbatches, wide):
    parts = corpus(200, 0, wide)
    rows = np.array([4, 2, 3])
    order = np.random.default_rng(0).permutation(200)[:48]
    placement = place(parts, order, rows, microbatches)

    inside = np.isin(parts.sample(), order)
    assert np.array_equal(placement.row >= 0, inside)
    microbatch = placement.row // rows[parts.module]
    assert np.array_equal(microbatch, microbatch[parts.sample_start[:-1]][parts.sample()])
    use = np.zeros((3, 4 * microbatches), np.int64)
    np.add.at(use, (parts.module[inside], placement.row[inside]), parts.length[inside])
    assert np.array_equal(use.max(1), placement.need)
    assert np.all(use.sum(1) == parts.totals(3)[order].sum(0))
    for k in range(3):
        assert np.all(use[k, rows[k] * microbatches :] == 0)


def test_fullest_rows_are_within_four_thirds_of_the_bound_in_one_microbatch():
    """Graham: LPT is at most 4/3 - 1/(3 rows) of the best, which is at least the mean and the longest part."""
    rows = np.array([4, 2, 3])
    for seed in range(20):
        parts = corpus(24, seed, wide=True)
        bound = np.maximum(parts.totals(3).sum(0) / rows, parts.largest(3))
        assert np.all(place(parts, np.arange(24), rows).need <= (4 / 3 - 1 / (3 * rows)) * bound * 1.1)


def test_microbatches_are_nearly_as_equal_as_the_best_assignment():
    ratios = []
    for seed in range(10):
        parts = corpus(9, seed)
        totals = parts.totals(3)
        share = totals * 2 / totals.sum(0)
        best = min(
            max(share[chosen].sum(0).max(), share[~chosen].sum(0).max())
            for chosen in np.array(list(product([False, True], repeat=9)))
        )
        llm_rows = place(parts, np.arange(9), np.array([1, 1, 1]), 2).row[parts.sample_start[:-1]]
        got = max(share[llm_rows == m].sum(0).max() for m in range(2))
        assert got >= best - 1e-12
        ratios.append(got / best)
    assert np.mean(ratios) < 1.12
    assert max(ratios) < 1.35


def test_equal_samples_are_spread_evenly():
    parts = corpus(1, 0).take(np.zeros(12, np.int64))
    rows = place(parts, np.arange(12), np.array([2, 2, 2]), 3).row[parts.sample_start[:-1]]
    assert np.bincount(rows).tolist() == [2] * 6


def test_a_placement_fits_rows_at_least_as_long_as_its_needs():
    assert fits(np.array([5, 0]), np.array([5, 8]))
    assert not fits(np.array([5, 9]), np.array([5, 8]))
