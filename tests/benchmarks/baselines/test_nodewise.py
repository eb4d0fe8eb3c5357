import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmjax.benchmarks.baselines.nodewise import (
    balance_nodewise,
    inter_node,
    largest_cost,
    permute_batches,
    traffic_bounds,
    volume,
)
from mmjax.benchmarks.baselines.postbalance import balance_packed

# No training runs this: by default the examples of docs/balance.md do.
pytestmark = pytest.mark.exhaustive


def drawn(ranks: int, per_rank: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths as they come, so that ranks and nodes differ by chance alone, and the rank of each item."""
    rng = np.random.default_rng(seed)
    length = np.clip(rng.lognormal(6.0, 0.6, ranks * per_rank), 20, 4096).astype(np.int64)
    return length, np.arange(ranks * per_rank) // per_rank


@st.composite
def problems(draw):
    ranks, ranks_per_node, n = (
        draw(st.integers(1, 12)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 60)),
    )
    length = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
    source = draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n))
    tolerance = draw(st.sampled_from([0.0, 0.002, 0.1]))
    return np.array(length, np.int64), np.array(source, np.int64), ranks, ranks_per_node, tolerance


@settings(max_examples=300)
@given(problems())
@example((np.array([1, 9]), np.array([0, 1]), 2, 1, 0.0))  # whose only cheaper plan is none
def test_every_item_gets_one_rank_and_no_rank_gets_worse_than_the_worst_was(problem):
    length, source, ranks, ranks_per_node, tolerance = problem
    rank = balance_nodewise(length, source, ranks, ranks_per_node, tolerance)
    assert rank.dtype == np.int32
    assert rank.shape == length.shape
    assert np.all((rank >= 0) & (rank < ranks))
    assert np.array_equal(rank, balance_nodewise(length, source, ranks, ranks_per_node, tolerance))
    before, after = (np.bincount(at, length, ranks).max() for at in (source, rank))
    assert after <= max(before, largest_cost(length, ranks, tolerance))


@settings(max_examples=100)
@given(problems())
def test_what_fits_where_it_is_does_not_move(problem):
    length, source, ranks, ranks_per_node, _ = problem
    mean = max(length.sum() / ranks, 1e-9)
    enough = np.bincount(source, length, ranks).max() / mean * 2
    assert np.array_equal(balance_nodewise(length, source, ranks, ranks_per_node, enough), source)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(64, 8), (60, 8), (24, 1), (512, 8)])
def test_costs_are_within_the_tolerance_and_traffic_is_near_its_bounds(ranks, ranks_per_node, seed):
    length, source = drawn(ranks, 60, seed)
    rank = balance_nodewise(length, source, ranks, ranks_per_node)
    allowed = largest_cost(length, ranks, 0.002)
    mean = length.sum() / ranks
    assert np.bincount(rank, length, ranks).max() <= allowed <= 1.002 * mean

    traffic = inter_node(length, source, rank, ranks, ranks_per_node)
    bounds = traffic_bounds(length, source, ranks, ranks_per_node, allowed)
    assert bounds.total <= traffic.total <= bounds.total + 0.01 * length.sum()
    assert bounds.sent <= traffic.sent.max() <= bounds.sent + 0.03 * mean
    assert bounds.received <= traffic.received.max() <= bounds.received + 0.05 * mean


def test_far_less_travels_than_with_post_balancing_alone():
    length, source = drawn(512, 60, 0)
    with_nodes = inter_node(length, source, balance_nodewise(length, source, 512, 8), 512, 8)
    without = inter_node(length, source, balance_packed(length, 512), 512, 8)
    assert with_nodes.total < 0.05 * without.total
    assert with_nodes.sent.max() < 0.15 * without.sent.max()
    assert with_nodes.received.max() < 0.15 * without.received.max()


def test_within_a_node_too_most_items_stay_on_their_rank():
    length, source = drawn(64, 60, 1)
    rank = balance_nodewise(length, source, 64, 8)
    assert length[rank != source].sum() < 0.15 * length.sum()


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_no_assignment_sends_less_than_the_bounds(seed):
    """By all assignments of six items to four ranks in two nodes."""
    rng = np.random.default_rng(seed)
    length, source, largest = rng.integers(1, 9, 6), rng.integers(0, 4, 6), int(rng.integers(8, 30))
    bounds = traffic_bounds(length, source, 4, 2, largest)
    every = np.array(list(itertools.product(range(4), repeat=6)))
    load = np.stack([(length * (every == r)).sum(1) for r in range(4)], 1)
    for rank in every[load.max(1) <= largest][::7]:
        traffic = inter_node(length, source, rank, 4, 2)
        assert traffic.total >= bounds.total
        assert traffic.sent.max() >= bounds.sent
        assert traffic.received.max() >= bounds.received - 1e-9


def sent(volume: np.ndarray, batch_rank: np.ndarray, ranks_per_node: int) -> int:
    node = np.arange(len(volume)) // ranks_per_node
    return (
        np.where(node[:, None] != np.asarray(batch_rank) // ranks_per_node, volume, 0).sum(1).max()
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_programme_finds_the_best_of_all_permutations(seed):
    rng = np.random.default_rng(seed)
    volume = rng.integers(0, 100, (4, 4)) if seed % 2 else rng.integers(0, 100, (5, 5))
    found = permute_batches(volume, 2)
    assert found.optimal
    assert np.array_equal(np.sort(found.batch_rank), np.arange(len(volume)))
    best = min(sent(volume, order, 2) for order in itertools.permutations(range(len(volume))))
    assert sent(volume, found.batch_rank, 2) == best


def test_the_programme_gives_a_permutation_when_its_time_is_over():
    volume = np.random.default_rng(0).integers(0, 1000, (96, 96))
    found = permute_batches(volume, 8, time_limit=0.01)
    assert not found.optimal
    assert np.array_equal(np.sort(found.batch_rank), np.arange(96))
    assert sent(volume, found.batch_rank, 8) <= sent(volume, np.arange(96), 8)


def test_one_node_sends_nothing():
    length, source = drawn(8, 20, 0)
    assert inter_node(length, source, balance_nodewise(length, source, 8, 8), 8, 8).total == 0
    assert permute_batches(np.ones((4, 4)), 4).optimal


def test_items_that_all_start_on_one_rank_are_spread_over_all():
    length = drawn(16, 60, 2)[0]
    rank = balance_nodewise(length, np.zeros(len(length), np.int64), 16, 4)
    assert np.bincount(rank, length, 16).max() <= largest_cost(length, 16, 0.002)


@pytest.mark.parametrize("seed", range(8))
def test_volumes_and_traffic_are_those_of_a_count_item_by_item(seed):
    rng = np.random.default_rng(seed)
    ranks, ranks_per_node = rng.integers(1, 9), rng.integers(1, 5)
    length = rng.integers(0, 50, 30)
    source, destination = rng.integers(0, ranks, (2, 30))
    expected = np.zeros((ranks, ranks), np.int64)
    np.add.at(expected, (source, destination), length)
    assert np.array_equal(volume(length, source, destination, ranks), expected)
    node = np.arange(ranks) // ranks_per_node
    between = np.where(node[:, None] != node, expected, 0)
    traffic = inter_node(length, source, destination, ranks, ranks_per_node)
    assert np.array_equal(traffic.sent, between.sum(1))
    assert np.array_equal(traffic.received, between.sum(0))
    assert traffic.total == between.sum()
