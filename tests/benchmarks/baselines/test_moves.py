import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance.lpt import longest_first
from mmjax.benchmarks.baselines.moves import ENDLESS, by_key, even, fill, shed

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12).map(
    lambda found: np.array(found, np.int64)
)


@settings(max_examples=200)
@given(
    lengths,
    st.integers(1, 3),
    st.integers(1, 200),
    st.sampled_from([1, 10, ENDLESS]),
    st.integers(0, 99),
)
def test_a_bin_sheds_what_it_has_too_much_of_and_no_item_more(length, units, quota, limit, seed):
    unit = np.random.default_rng(seed).integers(0, units, len(length))
    quota = min(quota, int(length.sum()))
    away, over = np.zeros(len(length), np.bool_), np.array([quota])
    shed(
        *by_key(longest_first(length), unit, units), np.array([0, units]), length, over, limit, away
    )
    assert over[0] == quota - length[away].sum()
    assert over[0] <= 0
    assert -over[0] < length[away].min()


def test_one_unit_sheds_near_the_least_that_will_do():
    rng = np.random.default_rng(0)
    excess = []
    for _ in range(30):
        length = rng.integers(10, 200, 10)
        quota = int(length.sum() // 3)
        away, over = np.zeros(10, np.bool_), np.array([quota])
        items, start = by_key(longest_first(length), np.zeros(10, np.int64), 1)
        shed(items, start, np.array([0, 1]), length, over, ENDLESS, away)
        sums = np.array(
            [
                length[list(some)].sum()
                for k in range(11)
                for some in itertools.combinations(range(10), k)
            ]
        )
        excess.append(-over[0] - (sums[sums >= quota].min() - quota))
    assert np.mean(excess) < 15  # of items of 105 on average


@settings(max_examples=150)
@given(lengths, st.integers(1, 4), st.integers(-20, 20), st.integers(0, 99))
def test_swaps_never_make_the_worst_bin_worse_and_stay_in_their_group(length, bins, goal, seed):
    rng = np.random.default_rng(seed)
    bin_of = rng.integers(0, 2 * bins, len(length))
    group, before = bin_of // bins, np.bincount(bin_of, minlength=2 * bins)
    base = rng.integers(-50, 0, 2 * bins)
    over = base + np.bincount(bin_of, length, 2 * bins).astype(np.int64)
    worst = over.reshape(2, bins).max(1)
    items, start = by_key(longest_first(length), bin_of, 2 * bins)
    even(items, start, length, over, np.array([0, bins, 2 * bins]), np.full(2, goal), bin_of)
    assert np.array_equal(over, base + np.bincount(bin_of, length, 2 * bins).astype(np.int64))
    assert np.all(over.reshape(2, bins).max(1) <= np.maximum(worst, goal))
    assert np.array_equal(bin_of // bins, group)
    assert np.array_equal(np.bincount(bin_of, minlength=2 * bins), before)
    for b in range(2 * bins):
        assert np.array_equal(np.sort(items[start[b] : start[b + 1]]), np.flatnonzero(bin_of == b))
        assert np.all(np.diff(length[items[start[b] : start[b + 1]]]) <= 0)


@settings(max_examples=100)
@given(lengths, st.integers(1, 4))
def test_bins_are_filled_where_there_is_most_room(length, bins):
    over, bin_of = -10 * np.arange(bins), np.full(len(length), -1)
    expected, to = over.copy(), []
    for item in longest_first(length):
        to.append(int(np.argmin(expected)))
        expected[to[-1]] += length[item]
    items, start = longest_first(length), np.array([0, len(length)])
    fill(items, start, length, over, np.array([0, bins]), bin_of)
    assert np.array_equal(np.sort(over), np.sort(expected))
    assert np.array_equal(
        over, -10 * np.arange(bins) + np.bincount(bin_of, length, bins).astype(np.int64)
    )
