import numpy as np
import pytest

from mmjax.balance.parts import (
    dist_ratio,
    fill,
    overdispersion,
    pad_ratio,
    row_correlation,
    samples_per_row,
    sp_ratio,
)


def test_pad_and_dist_ratio_are_the_papers_equations():
    assert pad_ratio(np.array([4, 2, 1, 1])) == pytest.approx((0 + 2 + 3 + 3) / (4 * 4))
    assert pad_ratio(np.array([[4, 2], [3, 3]])) == pytest.approx([2 / 8, 0])
    assert dist_ratio(np.array([100, 50])) == pytest.approx(50 / 200)
    assert dist_ratio(np.zeros((2, 8))).tolist() == [0, 0]


def test_fill_weighs_steps_by_their_budget():
    assert fill(np.array([[8, 1], [2, 1]]), np.array([10, 2])) == pytest.approx([0.5, 0.5])
    assert fill(np.array([[8], [2]]), np.array([[16], [4]])) == pytest.approx([0.5])


def test_samples_per_row_counts_rows_that_hold_something():
    assert samples_per_row(np.array([0, 0, 7, 7, 7, 9, -1])) == 2
    assert samples_per_row(np.array([-1])) == 0


def test_sp_ratio_is_the_share_that_sequence_parallel_ranks_wait():
    """Appendix A.8: all images on one of four ranks, or a quarter on each."""
    assert sp_ratio(np.array([[8, 0, 0, 0], [2, 2, 2, 2]])) == pytest.approx((0.75 + 0) / 2)


def test_row_correlation_tells_sorted_random_and_complementary_rows_apart():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, 3000)
    row = np.arange(3000) // 2
    assert row_correlation(np.repeat(lengths[:1500], 2), row) == pytest.approx(1)
    assert abs(row_correlation(lengths, row)) < 0.06
    assert row_correlation(np.stack([lengths[:1500], 100 - lengths[:1500]], 1).ravel(), row) == pytest.approx(
        -1, abs=0.01
    )
    assert row_correlation(lengths, np.arange(3000)) == 0
    assert row_correlation(np.array([]), np.array([], int)) == 0


def test_overdispersion_is_one_for_a_shuffle_and_large_for_blocks_of_one_source():
    rng = np.random.default_rng(0)
    source, step = rng.choice(3, 24 * 200, p=[0.6, 0.3, 0.1]), np.repeat(np.arange(200), 24)
    assert 0.8 < overdispersion(source, step) < 1.3
    assert overdispersion(np.sort(source), step) > 15
    alternating = np.tile([0, 0, 1], 8 * 200)
    assert overdispersion(alternating, step) == pytest.approx(0)
    assert overdispersion(np.zeros(48, int), step[:48]) == 0
