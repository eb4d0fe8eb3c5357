import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance.mask_work import block_work
from mmjax.balance.token_blocks import distribute, excess, token_order
from mmjax.benchmarks.baselines.token_blocks import KINDS, longest_first

# No training runs this: by default the examples of docs/balance.md do.
pytestmark = pytest.mark.exhaustive

works = st.lists(st.one_of(st.integers(0, 50), st.integers(0, 2**40)), max_size=40).map(
    lambda x: np.array(x, np.int64)
)


def loads(work: np.ndarray, rank: np.ndarray, ranks: int) -> np.ndarray:
    return np.array([work[rank == r].sum() for r in range(ranks)], np.int64)


def least_of_equal_counts(work: np.ndarray, ranks: int) -> int:
    """The smallest possible work of the heaviest rank, by trying all distributions."""
    best = int(work.sum())
    for rank in itertools.product(range(ranks), repeat=len(work)):
        counts = np.bincount(rank, minlength=ranks)
        if counts.max() - counts.min() <= 1:
            best = min(best, int(loads(work, np.array(rank), ranks).max()))
    return best


@settings(max_examples=200)
@given(works, st.integers(1, 12))
def test_every_rank_gets_as_many_blocks_and_no_more_work_than_the_bound(work, ranks):
    rank = distribute(work, ranks)
    assert rank.dtype == np.int32
    assert rank.shape == work.shape
    counts = np.bincount(rank, minlength=ranks)
    assert len(counts) == ranks
    assert counts.max() - counts.min() <= 1
    # Dealt in rounds, ranks differ by no more than the blocks of one round; exchanges never raise
    # the heaviest.
    rounds = np.sort(np.pad(work, (0, -len(work) % ranks)))[::-1].reshape(-1, ranks)
    load = loads(work, rank, ranks)
    assert load.max() - work.sum() / ranks <= (rounds[:, 0] - rounds[:, -1]).max(initial=0)
    assert np.array_equal(rank, distribute(work.copy(), ranks))


@settings(max_examples=60)
@given(works.filter(lambda work: len(work) > 1), st.integers(2, 5))
def test_no_exchange_of_one_or_two_blocks_of_the_heaviest_rank_is_left(work, ranks):
    rank = distribute(work, ranks)
    load = loads(work, rank, ranks)
    if load.max() <= work.sum() / ranks * (1 + 1e-5):
        return
    heavy = int(load.argmax())
    for size, other in itertools.product((1, 2), range(ranks)):
        given_away = [sum(x) for x in itertools.combinations(work[rank == heavy].tolist(), size)]
        taken = [sum(x) for x in itertools.combinations(work[rank == other].tolist(), size)]
        for mine, theirs in itertools.product(given_away, taken if other != heavy else []):
            assert max(load[heavy] - mine + theirs, load[other] + mine - theirs) >= load[heavy]


@settings(max_examples=60)
@given(
    st.integers(1, 3).flatmap(
        lambda g: st.tuples(st.just(g), st.lists(st.integers(0, 99), max_size=2 * g))
    )
)
def test_up_to_two_blocks_a_rank_are_distributed_as_well_as_any_way(problem):
    ranks, work = problem[0], np.array(problem[1], np.int64)
    assert loads(work, distribute(work, ranks), ranks).max() == least_of_equal_counts(work, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_blocks_come_within_a_hundredth_of_the_best_distribution(ranks):
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(25):
        work = np.round(rng.lognormal(8, 1, 9 if ranks == 3 else 10)).astype(np.int64)
        ratios.append(
            loads(work, distribute(work, ranks), ranks).max() / least_of_equal_counts(work, ranks)
        )
    assert min(ratios) == 1
    assert np.mean(ratios) < 1.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_million_tokens_are_even_to_a_ten_thousandth_on_64_ranks(kind, seed):
    work = block_work(KINDS[kind](1 << 20, np.random.default_rng(seed)), 128)
    rank = distribute(work, 64)
    assert np.bincount(rank).tolist() == [128] * 64
    assert excess(work, rank, 64) <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [8, 16, 32])
@pytest.mark.parametrize("ranks", [8, 16, 32, 64])
def test_equal_counts_cost_no_balance_against_plain_longest_first(kind, blocks, ranks):
    for seed in range(3):
        work = block_work(KINDS[kind](128 * blocks * ranks, np.random.default_rng(seed)), 128)
        rank = distribute(work, ranks)
        assert np.bincount(rank).tolist() == [blocks] * ranks
        assert excess(work, rank, ranks) <= max(
            1e-5, excess(work, longest_first(work, ranks), ranks)
        )
        assert excess(work, rank, ranks) < {8: 1e-3, 16: 2e-4, 32: 5e-5}[blocks]


def test_more_ranks_than_blocks_and_no_work_at_all_are_ordinary():
    assert sorted(distribute(np.array([5, 0, 3]), 8).tolist()) == [0, 1, 2]
    assert distribute(np.zeros(0, np.int64), 3).shape == (0,)
    assert np.bincount(distribute(np.zeros(12, np.int64), 4)).tolist() == [3] * 4
    assert distribute(np.array([4, 2]), 1).tolist() == [0, 0]
    assert excess(np.zeros(3, np.int64), np.array([0, 1, 0]), 2) == 0


def test_excess_is_the_largest_share_over_the_mean_less_one():
    assert excess(np.array([3, 1, 2]), np.array([0, 1, 0]), 3) == pytest.approx(5 / 2 - 1)


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="0 ranks"):
        distribute(np.array([1]), 0)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 200), st.integers(1, 20), st.integers(1, 6))
def test_order_puts_each_ranks_tokens_together_and_its_inverse_puts_them_back(
    seed, tokens, block, ranks
):
    rank = np.random.default_rng(seed).integers(0, ranks, -(-tokens // block))
    order, inverse = token_order(rank, tokens, block)
    assert order.dtype == inverse.dtype == np.int32
    token = np.arange(tokens)
    assert order.tolist() == sorted(token, key=lambda t: (rank[t // block], t))
    assert np.array_equal(token[order][inverse], token)
