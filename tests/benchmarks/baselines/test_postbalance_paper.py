import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.benchmarks.baselines.postbalance import (
    balance_conv,
    balance_packed,
    balance_padded,
    balance_quadratic,
    paper_conv,
    paper_packed,
    paper_padded,
    paper_quadratic,
    rank_costs,
)

PAPER = {
    "packed": paper_packed,
    "padded": paper_padded,
    "quadratic": lambda length, ranks: paper_quadratic(length, ranks, 50),
    "conv": paper_conv,
}


def greedy_sums(length: np.ndarray, ranks: int) -> list[int]:
    """Algorithm 1 without a heap: the ranks' sums."""
    total = [0] * ranks
    for value in sorted(length.tolist(), reverse=True):
        total[total.index(min(total))] += value
    return sorted(total)


def printed_batches(length: np.ndarray, ranks: int) -> list[list[int]] | None:
    """Algorithm 2, line by line; None where it tries no bound."""
    ascending = sorted(length.tolist())

    def least_batches(bound: int) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for value in ascending:
            if (len(batches[-1]) + 1) * value > bound:
                batches.append([])
            batches[-1].append(value)
        return batches

    left, right, batches = ascending[0], int(ascending[0] * (len(ascending) / ranks + 1)), None
    while left < right:
        middle = (left + right) // 2
        batches = least_batches(middle)
        if len(batches) <= ranks:
            right = middle
        else:
            left = middle + 1
    return batches


problems = st.tuples(st.lists(st.integers(0, 400), min_size=1, max_size=80), st.integers(1, 12))


@pytest.mark.parametrize("kind", PAPER)
@settings(max_examples=60)
@given(problems)
def test_whatever_the_lengths_each_item_gets_one_rank_and_the_same_one_again(kind, problem):
    length, ranks = np.array(problem[0]), problem[1]
    rank = PAPER[kind](length, ranks)
    assert rank.dtype == np.int32
    assert rank.shape == length.shape
    assert np.all((rank >= 0) & (rank < ranks))
    assert np.array_equal(rank, PAPER[kind](length, ranks))


@settings(max_examples=60)
@given(problems)
def test_algorithm_1_is_greedy_over_falling_lengths(problem):
    length, ranks = np.array(problem[0]), problem[1]
    assert sorted(np.bincount(paper_packed(length, ranks), length, ranks)) == greedy_sums(
        length, ranks
    )
    assert sorted(np.bincount(paper_quadratic(length, ranks, 0), length, ranks)) == greedy_sums(
        length, ranks
    )


@settings(max_examples=60)
@given(problems)
def test_algorithm_2_makes_the_printed_batches_and_folds_those_beyond_the_ranks(problem):
    length, ranks = np.array(problem[0]), problem[1]
    batches = printed_batches(length, ranks)
    if batches is None:
        return
    folded = [sorted(value for batch in batches[r::ranks] for value in batch) for r in range(ranks)]
    rank = paper_padded(length, ranks)
    assert [sorted(length[rank == r].tolist()) for r in range(ranks)] == folded


def test_algorithm_2_never_tries_a_large_enough_bound_where_one_item_is_short():
    length = np.concatenate(
        [[1], np.clip(np.random.default_rng(0).lognormal(6, 0.8, 479), 100, 4096)]
    ).astype(int)
    paper, ours = (
        rank_costs("padded", length, m(length, 8), 8).max() for m in (paper_padded, balance_padded)
    )
    assert paper > 2 * ours


def test_algorithm_4_levels_squares_only_where_sums_are_near():
    # after 6 | 5 | 5 the next goes to either 5: the sums tell
    length = np.array([6, 5, 5, 4, 3, 1])
    assert paper_quadratic(length, 3, 0).tolist()[3] in (1, 2)
    near = np.array([60, 30, 30, 5])  # sums 60 | 60: the two thirties have the lesser squares
    rank = paper_quadratic(near, 2, 1)
    assert rank[3] == rank[1] == rank[2] != rank[0]


def test_algorithm_5_fills_batches_up_to_the_largest_sum_and_deals_out_what_remains():
    # algorithm 1: 20 | 19; two of ten within 20, two of eight, then 3 and 2
    length = np.array([10, 9, 8, 7, 3, 2])
    rank = paper_conv(length, 2)
    assert rank[:4].tolist() == [0, 0, 1, 1]
    assert rank[4:].tolist() == [1, 1]


@pytest.mark.exhaustive
def test_the_better_twins_are_never_worse():
    rng = np.random.default_rng(0)
    best = {
        "packed": balance_packed,
        "padded": balance_padded,
        "quadratic": lambda length, ranks: balance_quadratic(length, ranks, 1e-4),
        "conv": lambda length, ranks: balance_conv(length, ranks, 1e-4),
    }
    for ranks in (3, 8, 32):
        length = np.clip(rng.lognormal(6, 0.8, ranks * 30), 10, 4096).astype(int)
        for kind in PAPER:
            paper, ours = (
                rank_costs(kind, length, method(length, ranks), ranks, 1e-4).max()
                for method in (PAPER[kind], best[kind])
            )
            assert ours <= paper


@pytest.mark.parametrize("kind", PAPER)
def test_no_items_are_no_trouble_and_no_ranks_are_refused(kind):
    assert PAPER[kind](np.zeros(0, np.int64), 3).shape == (0,)
    with pytest.raises(ValueError, match="0 ranks"):
        PAPER[kind](np.array([1]), 0)
