"""The order of samples: epochs are permutations, mixtures keep their weights, and what is excluded never comes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import config, index_of, random_texts

from mmjax.data.stream import Pool, chunk_samples, drawn, pools_of
from mmjax.errors import UserError

NONE = np.zeros(0, np.int64)


def pools(*sizes: int) -> list[Pool]:
    stops = np.cumsum(sizes).tolist()
    return [Pool(stop - size, stop, NONE) for size, stop in zip(sizes, stops, strict=True)]


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 1000))
@settings(max_examples=25)
def test_every_epoch_holds_every_sample_once(samples, size, seed):
    chunks = -(-3 * samples // size)
    order = np.concatenate([chunk_samples(pools(samples), [1], size, seed, c) for c in range(chunks)])
    in_chunk = np.arange(len(order)) // size
    for epoch in range(3):
        whole = set(in_chunk[epoch * samples : (epoch + 1) * samples])
        around = order[np.isin(in_chunk, list(whole))]
        assert set(around.tolist()) == set(range(samples))
    assert max(Counter(order.tolist()).values()) <= 1 + -(-len(order) // samples)


def test_whole_epochs_of_one_chunk_are_exact_and_differ():
    epochs = [chunk_samples(pools(1000), [1], 1000, 0, chunk) for chunk in range(3)]
    assert all(sorted(epoch.tolist()) == list(range(1000)) for epoch in epochs)
    assert all(np.mean(a == b) < 0.02 for a, b in ((epochs[0], epochs[1]), (epochs[1], epochs[2])))


def test_a_chunk_is_a_pure_function_of_seed_and_number():
    first = chunk_samples(pools(100, 50), [1, 2], 64, 7, 5)
    np.testing.assert_array_equal(first, chunk_samples(pools(100, 50), [1, 2], 64, 7, 5))
    assert not np.array_equal(first, chunk_samples(pools(100, 50), [1, 2], 64, 8, 5))
    assert not np.array_equal(first, chunk_samples(pools(100, 50), [1, 2], 64, 7, 6))


def test_shuffling_favours_no_sample():
    first = [int(chunk_samples(pools(10), [1], 10, seed, 0)[0]) for seed in range(1000)]
    pairs = Counter(tuple(chunk_samples(pools(3), [1], 3, seed, 0).tolist()) for seed in range(1500))
    counts = np.bincount(first, minlength=10)
    assert ((counts - 100) ** 2 / 100).sum() < 33.7  # chi-square of 9 degrees, one in ten thousand
    assert len(pairs) == 6
    assert min(pairs.values()) > 190


def test_neighbours_in_a_large_source_are_spread():
    order = chunk_samples(pools(10_000_000), [1], 4096, 0, 0)
    assert len(set(order.tolist())) == 4096
    assert np.abs(np.bincount(order * 16 // 10_000_000, minlength=16) - 256).max() < 80


@given(st.lists(st.sampled_from([0.0, 0.001, 0.3, 1.0, 7.0]), min_size=1, max_size=6), st.integers(1, 500))
@settings(max_examples=40)
def test_every_chunk_holds_the_shares_rounded_and_their_mean_is_exact(weights, size):
    if not sum(weights):
        weights = [*weights, 1.0]
    share = np.array(weights) / sum(weights) * size
    counts = np.diff([drawn(weights, size, c) for c in range(60)], axis=0)
    assert np.all(counts.sum(1) == size)
    assert np.all(np.abs(counts - share) < 1 + 1e-9)
    assert np.all(np.abs(counts.sum(0) - 59 * share) < 4)


def test_weights_hold_whatever_the_sizes_of_the_sources():
    order = np.concatenate([chunk_samples(pools(10, 1000, 40), [3, 1, 0], 200, 0, c) for c in range(20)])
    source = np.searchsorted([10, 1010, 1050], order, side="right")
    np.testing.assert_array_equal(np.bincount(source, minlength=3), [3000, 1000, 0])
    assert set(Counter(order[source == 0].tolist()).values()) == {300}
    assert set(Counter(order[source == 1].tolist()).values()) == {1}


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [np.nan, 1], [np.inf, 1]])
def test_weights_that_make_no_mixture_are_refused(weights):
    with pytest.raises(UserError, match=r"the weights of data\.sources"):
        chunk_samples(pools(5, 5), weights, 10, 0, 0)


def test_excluded_samples_are_never_drawn_and_all_others_are():
    excluded = np.array([100, 103, 104, 119])
    pool = Pool(100, 120, excluded)
    assert len(pool) == 16
    order = chunk_samples([pool], [1], 16, 3, 0)
    assert sorted(order.tolist()) == sorted(set(range(100, 120)) - set(excluded.tolist()))


def test_a_source_without_a_usable_sample_is_refused_by_name_unless_its_weight_is_zero():
    index = index_of(random_texts([5, 6]), config())
    every = np.arange(2)
    with pytest.raises(UserError, match=r"data\.sources\.made: none of its 2 samples .* the shortest has 5 LLM tokens"):
        pools_of(index, [1.0], every)
    assert len(pools_of(index, [0.0], every)[0]) == 0
