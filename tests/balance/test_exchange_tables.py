import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import rearrange

from mmjax.balance.exchange import Rearrangement, exchange_tables
from mmjax.balance.parts import offsets_by_key
from mmjax.balance.phases import largest_transfer

EMPTY = -1


def width(moved: Rearrangement) -> int:
    return largest_transfer(moved.source, moved.target, moved.length, 10_000)


def arrays(
    length: np.ndarray, rank: np.ndarray, offset: np.ndarray, ranks: int, capacity: int
) -> np.ndarray:
    """Each rank's array with every item's tokens, all different, at its place: [ranks, capacity]."""
    held = np.full((ranks, capacity), EMPTY)
    name = np.cumsum(length) - length
    for item, tokens in enumerate(length):
        begin = offset[item]
        held[rank[item], begin : begin + tokens] = name[item] + np.arange(tokens)
    return held


def before_and_after(
    moved: Rearrangement, ranks: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    return (
        arrays(moved.length, moved.source, moved.source_offset, ranks, capacity),
        arrays(moved.length, moved.target, moved.target_offset, ranks, capacity),
    )


def exchange(held: np.ndarray, send: np.ndarray, gather: np.ndarray) -> np.ndarray:
    """A padded all-to-all over the first axis of everything."""
    peers, _, chunk = send.shape
    sent = np.where(send >= 0, held[np.arange(peers)[:, None, None], send], EMPTY)
    received = sent.transpose(1, 0, 2).reshape(peers, peers * chunk)
    found = np.concatenate([received, held], axis=1)
    return np.where(gather >= 0, np.take_along_axis(found, np.maximum(gather, 0), axis=1), EMPTY)


def apply(moved: Rearrangement, held: np.ndarray) -> np.ndarray:
    ranks = range(len(held))
    send, gather = exchange_tables(moved, width(moved), held.shape[1], ranks, ranks)
    assert send.dtype == gather.dtype == np.int32
    return exchange(held, send, gather)


@st.composite
def problems(draw, places: int = 2):
    """Lengths, `places` ranks for each item, and how many ranks there are; empty items and ranks are ordinary."""
    ranks = draw(st.integers(1, 6))
    n = draw(st.integers(0, 20))
    length = draw(st.lists(st.integers(0, 7), min_size=n, max_size=n))
    at = [draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n)) for _ in range(places)]
    return np.array(length, np.int64), [np.array(rank, np.int64) for rank in at], ranks


def shuffled(length: np.ndarray, rank: np.ndarray, seed: int) -> np.ndarray:
    """Offsets of items that are packed on their ranks in some order, not that of their numbers."""
    order = np.random.default_rng(seed).permutation(len(length))
    offset = np.empty(len(length), np.int64)
    offset[order] = offsets_by_key(length[order], rank[order])
    return offset


@settings(max_examples=150)
@given(problems(), st.integers(0, 99))
def test_every_token_arrives_at_its_place_and_back_again(problem, seed):
    length, (source, target), ranks = problem
    moved = Rearrangement(
        length=length,
        source=source,
        source_offset=shuffled(length, source, seed),
        target=target,
        target_offset=shuffled(length, target, seed + 1),
    )
    before, after = before_and_after(moved, ranks, int(length.sum()) + 1)
    assert np.array_equal(apply(moved, before), after)
    back = moved._replace(
        source=moved.target,
        source_offset=moved.target_offset,
        target=moved.source,
        target_offset=moved.source_offset,
    )
    assert np.array_equal(apply(back, after), before)


@settings(max_examples=100)
@given(problems(), st.data())
def test_the_tables_of_one_rank_are_its_rows_of_all_tables(problem, data):
    length, (source, destination), ranks = problem
    moved, peers = rearrange(length, source, destination), range(ranks)
    chunk, capacity = width(moved) + 2, int(length.sum())
    send, gather = exchange_tables(moved, chunk, capacity, peers, peers)
    begin = data.draw(st.integers(0, ranks - 1))
    end = data.draw(st.integers(begin + 1, ranks))
    own_send, own_gather = exchange_tables(moved, chunk, capacity, range(begin, end), peers)
    assert np.array_equal(own_send, send[begin:end])
    assert np.array_equal(own_gather, gather[begin:end])


@settings(max_examples=100)
@given(problems(), st.integers(1, 4))
def test_tables_of_a_node_move_what_stays_in_it(problem, ranks_per_node):
    length, (source, destination), ranks = problem
    first = source // ranks_per_node * ranks_per_node
    size = np.minimum(ranks - first, ranks_per_node)
    moved = rearrange(length, source, first + destination % size)
    capacity = int(length.sum())
    held, expected = before_and_after(moved, ranks, capacity)
    for begin in range(0, ranks, ranks_per_node):
        node = range(begin, min(begin + ranks_per_node, ranks))
        send, gather = exchange_tables(moved, width(moved), capacity, node, node)
        assert send.shape == (len(node), len(node), width(moved))
        assert np.array_equal(
            exchange(held[begin : node.stop], send, gather), expected[begin : node.stop]
        )


def test_what_stays_on_its_rank_takes_no_room_in_the_exchange():
    moved = rearrange(np.array([500, 3]), np.array([0, 0]), np.array([0, 1]))
    assert width(moved) == 3
    send, _ = exchange_tables(moved, 3, 500, range(2), range(2))
    assert np.count_nonzero(send >= 0) == 3


def test_one_rank_of_many_builds_its_tables_alone():
    rng = np.random.default_rng(0)
    ranks = 2560
    length, source = rng.integers(1, 9, 8 * ranks), np.repeat(np.arange(ranks), 8)
    moved = rearrange(length, source, rng.integers(0, ranks, len(length)))
    chunk, capacity = width(moved), int(np.bincount(moved.target, length).max())
    send, gather = exchange_tables(moved, chunk, capacity, range(7, 8), range(ranks))
    assert send.shape == (1, ranks, chunk)
    assert np.count_nonzero(gather >= 0) == length[moved.target == 7].sum()
    assert np.count_nonzero(send >= 0) == length[(source == 7) & (moved.target != 7)].sum()


def test_tables_that_do_not_fit_are_refused():
    moved, every = rearrange(np.array([4, 4]), np.array([0, 0]), np.array([1, 1])), range(3)
    with pytest.raises(ValueError, match="exceeds the width: 8 tokens, room for 7"):
        exchange_tables(moved, 7, 8, every, every)
    with pytest.raises(ValueError, match="exceeds the width"):
        exchange_tables(moved, 7, 8, range(1, 2), every)
    with pytest.raises(ValueError, match="exceeds the capacity: 8 tokens, room for 6"):
        exchange_tables(moved, 8, 6, every, every)
    with pytest.raises(ValueError, match=r"between ranks 1 \.\. 2 and others"):
        exchange_tables(moved, 8, 8, range(1, 3), range(1, 3))
    with pytest.raises(ValueError, match=r"between ranks 0 \.\. 0 and others"):
        exchange_tables(moved, 8, 8, range(1), range(1))
    on_top = moved._replace(target_offset=np.array([0, 2]))
    with pytest.raises(ValueError, match="overlap"):
        exchange_tables(on_top, 8, 8, every, every)


@settings(max_examples=100)
@given(problems())
def test_the_width_is_the_most_tokens_that_one_rank_sends_another(problem):
    length, (source, destination), ranks = problem
    sent = np.zeros((ranks, ranks), np.int64)
    for tokens, a, b in zip(length, source, destination, strict=True):
        sent[a, b] += tokens * (a != b)
    assert width(rearrange(length, source, destination)) == sent.max()
