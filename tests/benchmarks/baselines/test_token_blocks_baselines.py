import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance.mask_work import Mask, block_work
from mmjax.balance.token_blocks import excess
from mmjax.benchmarks.baselines.token_blocks import longest_first, random, ring, zigzag

small = given(
    st.lists(st.integers(0, 60), max_size=7).map(lambda x: np.array(x, np.int64)), st.integers(1, 3)
)


def heaviest(work: np.ndarray, rank: np.ndarray, ranks: int) -> int:
    return max(int(work[rank == r].sum()) for r in range(ranks))


def least(work: np.ndarray, ranks: int, equal_counts: bool = False) -> int:
    """The smallest possible work of the heaviest rank, by trying all distributions."""
    found = []
    for rank in map(np.array, itertools.product(range(ranks), repeat=len(work))):
        counts = np.bincount(rank.astype(int), minlength=ranks)
        if not equal_counts or counts.max() - counts.min() <= 1:
            found.append(heaviest(work, rank, ranks))
    return min(found)


@settings(max_examples=60)
@small
def test_longest_first_takes_the_emptiest_rank_and_keeps_grahams_bound(work, ranks):
    load, expected = [0] * ranks, np.zeros(len(work), int)
    for block in np.argsort(-work, kind="stable"):
        expected[block] = load.index(min(load))
        load[expected[block]] += work[block]
    rank = longest_first(work, ranks)
    assert np.array_equal(rank, expected)
    assert heaviest(work, rank, ranks) <= (4 / 3 - 1 / (3 * ranks)) * least(work, ranks) + 1e-9


def test_longest_first_leaves_unequal_counts():
    assert sorted(np.bincount(longest_first(np.array([9, 3, 3, 3]), 2)).tolist()) == [1, 3]


def test_zigzag_is_even_for_a_causal_mask():
    one = np.ones(1024, np.int32)
    work = block_work(Mask(0 * one, np.arange(1024, dtype=np.int32), 0 * one, one, one), 16)
    assert zigzag(8, 2).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert excess(work, zigzag(64, 8), 8) == 0
    assert excess(work, ring(64, 8), 8) > 0.8


@settings(max_examples=60)
@given(st.integers(0, 100), st.integers(1, 9), st.integers(0, 99))
def test_all_blocks_have_a_rank_and_ranks_have_equal_counts(blocks, ranks, seed):
    drawn = random(blocks, ranks, np.random.default_rng(seed))
    for rank, unequal in ((drawn, 1), (ring(blocks, ranks), 1), (zigzag(blocks, ranks), 2)):
        counts = np.bincount(rank, minlength=ranks)
        assert rank.dtype == np.int32
        assert (len(counts), counts.sum()) == (ranks, blocks)
        assert counts.max() - counts.min() <= unequal
    assert np.all(np.diff(ring(blocks, ranks)) >= 0)
    assert np.array_equal(drawn, random(blocks, ranks, np.random.default_rng(seed)))


def test_random_differs_by_seed():
    assert (
        random(64, 8, np.random.default_rng(0)) != random(64, 8, np.random.default_rng(1))
    ).any()


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        longest_first(np.array([1]), 0)
    with pytest.raises(ValueError, match="0 ranks"):
        ring(3, 0)
