from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmjax.balance.lpt import longest_first, lpt, polish
from mmjax.benchmarks.baselines.postbalance import (
    balance_conv,
    balance_packed,
    balance_padded,
    balance_quadratic,
    deal,
    least_largest_load,
    lower_bound,
    rank_costs,
)

# No training runs this: by default the examples of docs/balance.md do.
pytestmark = pytest.mark.exhaustive

LAM = 1e-2
KINDS = ("packed", "padded", "quadratic", "conv")


def balance(kind: str, lam: float = LAM) -> Callable[..., np.ndarray]:
    return {
        "packed": balance_packed,
        "padded": balance_padded,
        "quadratic": partial(balance_quadratic, lam=lam),
        "conv": partial(balance_conv, lam=lam),
    }[kind]


def cost_of_one_rank(kind: str, length: np.ndarray, lam: float) -> float:
    """As the papers write it, for one rank's items."""
    count, longest = len(length), max(length, default=0)
    return {
        "packed": float(sum(length)),
        "padded": float(count * longest),
        "quadratic": sum(length) + lam * sum(length**2),
        "conv": count * longest + lam * count * longest**2,
    }[kind]


def largest(kind: str, length: np.ndarray, rank: np.ndarray, ranks: int, lam: float = LAM) -> float:
    return max(cost_of_one_rank(kind, length[rank == r], lam) for r in range(ranks))


def optimum(kind: str, length: np.ndarray, ranks: int, equal_counts: bool) -> float:
    """The least largest cost over every assignment there is."""
    found = np.inf
    for assignment in product(range(ranks), repeat=len(length)):
        rank = np.array(assignment, int)
        if not equal_counts or np.ptp(np.bincount(rank, minlength=ranks)) <= 1:
            found = min(found, largest(kind, length, rank, ranks))
    return found


def omni_like(samples: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    images = np.where(rng.random(samples) < 0.5, rng.lognormal(5.8, 0.6, samples), 0)
    return np.clip(rng.lognormal(4.9, 0.9, samples) + images, 10, 4096).astype(np.int64)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 3), st.booleans())
@example([8, 7, 6, 5, 4], 2, False)
@example([9, 9, 9, 1, 1, 1], 3, True)
@example([3, 3, 2, 2, 2], 2, False)
def test_a_few_items_are_balanced_as_well_as_by_trying_every_assignment(
    kind, length, ranks, equal_counts
):
    length = np.array(length, np.int64)
    rank = balance(kind)(length, ranks, equal_counts=equal_counts)
    assert largest(kind, length, rank, ranks) == pytest.approx(
        optimum(kind, length, ranks, equal_counts)
    )


def least_contiguous(cost: np.ndarray, ranks: int, fewest: int, most: int) -> float:
    """By dynamic programming over the sorted items; no bisection and no greedy choice."""
    cost = np.sort(cost)[::-1]
    least = np.full(len(cost) + 1, np.inf)
    least[0] = 0
    for _ in range(ranks):
        before, least = least, np.full(len(cost) + 1, np.inf)
        for end in range(len(cost) + 1):
            for count in range(fewest, min(most, end) + 1):
                here = count * cost[end - count] if count else 0
                least[end] = min(least[end], max(before[end - count], here))
    return least[-1]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from([0.0, 1e-6, 0.3]),
    st.booleans(),
)
def test_padded_and_conv_are_the_best_contiguous_splits(length, ranks, lam, equal_counts):
    length = np.array(length)
    n = len(length)
    fewest, most = (n // ranks, -(-n // ranks)) if equal_counts else (0, n)
    cost = length + lam * length.astype(float) ** 2
    rank = balance_conv(length, ranks, lam, equal_counts)
    best = least_contiguous(cost, ranks, fewest, most)
    assert rank_costs("conv", length, rank, ranks, lam).max() == pytest.approx(best)


problems = st.tuples(
    st.lists(st.integers(0, 5000), max_size=200), st.integers(1, 40), st.booleans()
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(problems)
def test_every_item_has_a_rank_and_the_same_one_each_time(kind, problem):
    length, ranks, equal_counts = np.array(problem[0], np.int32), problem[1], problem[2]
    rank = balance(kind)(length, ranks, equal_counts=equal_counts)
    assert rank.dtype == np.int32
    assert rank.shape == length.shape
    assert np.all((rank >= 0) & (rank < ranks))
    count = np.bincount(rank, minlength=ranks)
    assert not equal_counts or np.ptp(count) <= (len(length) % ranks > 0)
    assert np.array_equal(rank, balance(kind)(length, ranks, equal_counts=equal_counts))
    costs = rank_costs(kind, length, rank, ranks, LAM)
    np.testing.assert_allclose(
        costs,
        [cost_of_one_rank(kind, length[rank == r].astype(np.int64), LAM) for r in range(ranks)],
    )
    assert costs.max(initial=0) >= lower_bound(kind, length, ranks, LAM) * (1 - 1e-12)


@settings(max_examples=100)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(30, 3000), st.integers(0, 2**32 - 1))
def test_the_guarantee_of_longest_first_holds_where_the_optimum_is_known(
    ranks, items, capacity, seed
):
    """Ranks of equal capacity, cut into items: 4/3 - 1 / (3 d) of it (Graham 1969, OrchMLLM section 5.1)."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, capacity + 1, (ranks, items - 1)), axis=1)
    length = np.diff(cuts, axis=1, prepend=0, append=capacity).ravel()
    guarantee = (4 / 3 - 1 / (3 * ranks)) * capacity
    assert capacity <= largest("packed", length, balance_packed(length, ranks), ranks) <= guarantee
    assert largest("packed", length, balance_quadratic(length, ranks, 0), ranks) <= guarantee * (
        1 + 1e-12
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("equal_counts", [False, True])
def test_packed_leaves_no_token_above_the_mean_at_sixty_items_a_rank(ranks, seed, equal_counts):
    length = omni_like(ranks * 60, seed)
    rank = balance_packed(length, ranks, equal_counts)
    assert np.bincount(rank, length, ranks).max() == np.ceil(length.sum() / ranks)


@pytest.mark.parametrize(
    ("kind", "ratio"), [("padded", 1.05), ("conv", 1.07), ("quadratic", 1.001)]
)
def test_the_other_kinds_come_near_their_bound_at_sixty_items_a_rank(kind, ratio):
    for seed in range(2):
        length = omni_like(512 * 60, seed)
        rank = balance(kind, 1e-4)(length, 512)
        assert rank_costs(kind, length, rank, 512, 1e-4).max() <= ratio * lower_bound(
            kind, length, 512, 1e-4
        )


def test_lengths_on_a_grid_reach_the_bound_that_the_grid_leaves():
    """Multiples of 8 but for ten items: hardly a rank can hold the mean itself."""
    rng = np.random.default_rng(0)
    length = 8 * rng.integers(40, 129, 64 * 40)
    length[:10] += 3
    rank = balance_packed(length, 64)
    bound = least_largest_load(length, 64)
    assert bound > np.ceil(length.sum() / 64)
    assert np.bincount(rank, length, 64).max() == bound


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), max_size=6), st.integers(1, 3), st.integers(1, 12))
def test_no_assignment_beats_the_bound_from_sums_and_divisibility(length, ranks, unit):
    length = np.array(length, np.int64) * unit
    length[:1] += 1
    assert lower_bound("packed", length, ranks) <= least_largest_load(length, ranks)
    assert least_largest_load(length, ranks) <= optimum("packed", length, ranks, False)


@settings(max_examples=100)
@given(problems, st.booleans())
def test_exchanges_keep_counts_and_never_raise_the_largest_load(problem, real):
    length, ranks, equal_counts = np.array(problem[0], np.int64), problem[1], problem[2]
    weight = length**1.5 if real else length
    rank, load = np.zeros(len(length), np.int32), np.zeros(ranks, weight.dtype)
    (deal if equal_counts else lpt)(weight, longest_first(length), rank, load)
    count, before = np.bincount(rank, minlength=ranks), load.max()
    polish(weight, longest_first(length), rank, load, weight.sum() / ranks)
    assert np.array_equal(np.bincount(rank, minlength=ranks), count)
    np.testing.assert_allclose(np.bincount(rank, weight, ranks), load, atol=1e-6)
    assert load.max() <= before * (1 + 1e-12)


def test_kernels_place_a_part_of_the_items_on_top_of_what_ranks_hold():
    length = np.array([5, 9, 2, 7])
    rank, load = np.full(4, -1, np.int32), np.array([0, 6])
    lpt(length, np.array([3, 0]), rank, load)
    assert rank.tolist() == [1, -1, -1, 0]
    assert load.tolist() == [7, 11]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2**62), max_size=50))
def test_items_are_ordered_longest_first_and_stably_whatever_their_size(length):
    length = np.array(length, np.int64)
    assert np.array_equal(longest_first(length), np.argsort(-length, kind="stable"))


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_extremes(kind):
    nothing = np.zeros(0, np.int64)
    assert balance(kind)(nothing, 4).shape == (0,)
    assert rank_costs(kind, nothing, np.zeros(0, np.int32), 4, LAM).tolist() == [0] * 4
    assert lower_bound(kind, nothing, 4, LAM) == 0
    assert balance(kind)(np.array([3, 1, 2]), 1).tolist() == [0] * 3
    few = balance(kind)(np.array([30, 10, 20]), 8)
    assert len(set(few.tolist())) == 3
    equal = balance(kind)(np.full(60, 7), 12)
    assert (
        rank_costs(kind, np.full(60, 7), equal, 12, LAM).tolist()
        == [rank_costs(kind, [7] * 5, [0] * 5, 1, LAM)[0]] * 12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_is_refused(kind):
    with pytest.raises(ValueError, match="0 ranks"):
        balance(kind)(np.array([1]), 0)
    with pytest.raises(ValueError, match="negative"):
        balance(kind)(np.array([1, -1]), 2)


def test_a_negative_or_endless_lam_is_refused():
    for lam in (-1e-4, np.inf, np.nan):
        with pytest.raises(ValueError, match="lam"):
            balance_quadratic(np.array([1]), 1, lam)
        with pytest.raises(ValueError, match="lam"):
            balance_conv(np.array([1]), 1, lam)
