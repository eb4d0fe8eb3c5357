import numpy as np
import pytest

from mmjax.balance.parts import (
    dist_ratio,
    fill,
    pad_ratio,
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


def test_sp_ratio_is_the_share_that_sequence_parallel_ranks_wait():
    """Appendix A.8: all images on one of four ranks, or a quarter on each."""
    assert sp_ratio(np.array([[8, 0, 0, 0], [2, 2, 2, 2]])) == pytest.approx((0.75 + 0) / 2)
