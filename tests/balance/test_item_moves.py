"""Moving items between the ranks of a node: within the width, until the fullest is at the goal, in near-linear time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance.item_moves import spread_in_nodes, spread_items


def spread(home, cost, tokens, width, goal, ranks):
    """Where the items are, and the load; they start at home."""
    order = np.argsort(-cost, kind="stable")
    home, cost, tokens = home[order], cost[order], tokens[order]
    at, load = home.copy(), np.bincount(home, cost, ranks)
    spread_items(home, cost, tokens, width, goal, at, load)
    np.testing.assert_allclose(load, np.bincount(at, cost, ranks), atol=1e-9)
    sent = np.zeros((ranks, ranks), np.int64)
    np.add.at(sent, (home[at != home], at[at != home]), tokens[at != home])
    assert sent.max(initial=0) <= width
    return at, load


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=30), st.integers(0, 60))
def test_the_fullest_rank_never_gets_fuller_and_pairs_stay_within_the_width(items, width):
    home, size = np.array(items, np.int64).reshape(-1, 2).T.copy()
    cost = size / max(size.sum() / 4, 1)
    before = np.bincount(home, cost, 4).max(initial=0)
    _, load = spread(home, cost, -(-size // 4), width, 1.0, 4)
    assert load.max() <= before + 1e-9


def test_a_swap_is_found_where_no_move_helps():
    _, load = spread(
        np.array([0, 0, 1]), np.array([5.0, 4.0, 3.0]), np.ones(3, np.int64), 9, 6.0, 2
    )
    assert load.max() == 7
    _, load = spread(
        np.array([0, 0, 1, 1]), np.array([6.0, 5.0, 4.0, 3.0]), np.ones(4, np.int64), 9, 9.0, 2
    )
    assert load.tolist() == [9, 9]


def test_nothing_moves_without_a_width():
    at, _ = spread(np.zeros(8, np.int64), np.ones(8), np.ones(8, np.int64), 0, 2.0, 4)
    assert not at.any()


def test_items_of_each_node_stay_in_it():
    rng = np.random.default_rng(0)
    size, home = np.array([4, 2, 3]), np.repeat([0, 4, 6], [40, 20, 30])
    cost = np.concatenate([np.sort(rng.uniform(0, 0.2, n))[::-1] for n in (40, 20, 30)])
    at, load = home.copy(), np.bincount(home, cost, 9)
    spread_in_nodes(
        np.array([0, 40, 60, 90]), size, home, cost, np.ones(90, np.int64), 30, 1.1, at, load
    )
    for first, ranks, a, b in ((0, 4, 0, 40), (4, 2, 40, 60), (6, 3, 60, 90)):
        assert at[a:b].min() == first
        assert at[a:b].max() == first + ranks - 1
        assert load[first : first + ranks].max() <= max(
            1.1, 1.02 * load[first : first + ranks].mean()
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [100, 10_000, 1_000_000])
def test_a_hundred_thousand_heavy_tailed_items_are_spread(width):
    """With a mover that looks at all pairs this does not end."""
    rng = np.random.default_rng(0)
    length = (100 * (rng.pareto(1.5, 100_000) + 1)).astype(np.int64)
    home = (8 * rng.random(100_000) ** 2).astype(np.int64)
    cost = length / (length.sum() / 8)
    before = np.bincount(home, cost, 8).max()
    _, load = spread(home, cost, -(-length // 4), width, 1.002, 8)
    assert load.max() < before
    assert width < 1_000_000 or load.max() <= 1.002
