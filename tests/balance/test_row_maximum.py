import numpy as np
import pytest

from mmjax.balance.budgets import choose_maximum


def full_rows(lengths: np.ndarray, maximum: np.ndarray) -> float:
    """As if samples could be cut: what no grouping goes below."""
    return float((lengths.sum(0) / maximum).max())


def fives(lengths: np.ndarray, maximum: np.ndarray) -> float:
    """Rows for samples of 5 tiles: a row of 9 holds one."""
    return len(lengths) / (maximum[1] // 5)


def test_maxima_hold_the_samples_asked_for_and_are_aligned():
    rng = np.random.default_rng(0)
    lengths = np.stack([rng.integers(10, 200, 500), rng.integers(0, 6, 500)], axis=1)
    maximum = choose_maximum(lengths, (4, 5), full_rows, np.array([16, 1]))
    assert maximum[0] % 16 == 0
    assert 4 <= 500 / full_rows(lengths, maximum) <= 5.1


def test_what_grouping_needs_decides_and_not_the_ratio_of_means():
    lengths = np.tile([[100, 5]], (400, 1))
    maximum = choose_maximum(lengths, (1.5, 2.5), fives)
    assert maximum.tolist() == [200, 10]


def test_no_maximum_is_below_the_longest_sample():
    lengths = np.concatenate([np.full((500, 2), 2), [[50, 1], [1, 40]]])
    assert np.all(choose_maximum(lengths, (2, 3), full_rows) >= [50, 40])


def test_given_maxima_stay_and_the_others_follow():
    lengths = np.random.default_rng(0).integers(1, 9, (300, 3))
    assert choose_maximum(lengths, (4, 5), full_rows, fixed=np.array([30, 20, 25])).tolist() == [
        30,
        20,
        25,
    ]
    maximum = choose_maximum(lengths, (4, 5), full_rows, fixed=np.array([0, 40, 0]))
    assert maximum[1] == 40
    assert np.all(np.abs(maximum / 40 - lengths.mean(0) / lengths[:, 1].mean()) < 0.15)


def test_a_dimension_that_no_sample_uses_gets_one_unit():
    lengths = np.random.default_rng(0).integers(1, 9, (100, 2)) * [1, 0]
    assert choose_maximum(lengths, (4, 5), full_rows, 8)[1] == 8


def test_no_samples_and_samples_that_all_exceed_what_is_given_are_refused():
    with pytest.raises(ValueError, match="no samples"):
        choose_maximum(np.zeros((0, 2), np.int64), (4, 5), full_rows)
    with pytest.raises(ValueError, match="every sample exceeds"):
        choose_maximum(np.full((3, 2), 9), (4, 5), full_rows, fixed=np.array([0, 8]))
