import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.benchmarks.baselines.bounds import configuration_bound, martello_toth, rows_lower_bound


def fewest_rows(lengths: list[tuple[int, int]], budget: tuple[int, int]) -> int:
    """By trying every assignment."""

    def search(i: int, rows: list[tuple[int, int]], best: int) -> int:
        if len(rows) >= best:
            return best
        if i == len(lengths):
            return len(rows)
        a, b = lengths[i]
        for j, (x, y) in enumerate(rows):
            if x + a <= budget[0] and y + b <= budget[1]:
                best = search(i + 1, [*rows[:j], (x + a, y + b), *rows[j + 1 :]], best)
        return search(i + 1, [*rows, (a, b)], best)

    return search(0, [], len(lengths) + 1)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 7)), max_size=7))
def test_lower_bound_never_exceeds_the_fewest_rows_and_is_at_least_the_total(lengths):
    budget = np.array([10, 7])
    bound = rows_lower_bound(np.array(lengths).reshape(-1, 2), budget)
    assert bound <= fewest_rows(lengths, (10, 7))
    assert bound >= np.ceil(np.array(lengths).reshape(-1, 2).sum(0) / budget).max()


def test_lower_bound_counts_long_samples_and_not_only_positions():
    # 18 positions would fit two rows
    assert rows_lower_bound(np.array([[6], [6], [6]]), np.array([10])) == 3
    # no 4 fits beside an 8 or a 7
    assert rows_lower_bound(np.array([[8], [7], [4], [4], [4]]), np.array([10])) == 4
    with pytest.raises(ValueError, match="sample 1 is longer"):
        rows_lower_bound(np.array([[3], [11]]), np.array([10]))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 9)), min_size=1, max_size=6))
def test_lower_bound_holds_where_lengths_are_rounded_to_levels(lengths):
    budget = (700, 9)
    assert configuration_bound(np.array(lengths), np.array(budget)) <= fewest_rows(lengths, budget)


def test_two_dimensions_together_need_more_rows_than_either_alone():
    """Long texts of one tile leave no room for the tiles of others: 20 rows, though either total fits 12."""
    lengths = np.array([(90, 1)] * 10 + [(20, 9)] * 10)
    budget = np.array([100, 9])
    assert max(martello_toth(column, b) for column, b in zip(lengths.T, budget, strict=True)) == 12
    assert rows_lower_bound(lengths, budget) == 20


def test_dimensions_beyond_two_are_bounded_in_pairs():
    lengths = np.array([(90, 0, 1)] * 10 + [(20, 0, 9)] * 10)
    assert rows_lower_bound(lengths, np.array([100, 5, 9])) == 20
    assert rows_lower_bound(np.zeros((0, 3), np.int64), np.array([100, 5, 9])) == 0
    assert rows_lower_bound(np.zeros((4, 2), np.int64), np.array([100, 5])) == 0
