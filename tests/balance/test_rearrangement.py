import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.balance.rearrangement import (
    Places,
    Rearrangement,
    compose,
    inverse,
    pack_places,
    rearrange,
    restrict,
    restrict_to_parts,
    tables,
    width,
)

EMPTY = -1


def arrays(moved: Rearrangement, places: Places, capacity: int) -> np.ndarray:
    """Each rank's array with every item's tokens, all different, at its place: [ranks, capacity]."""
    held = np.full((moved.ranks, capacity), EMPTY)
    name = np.cumsum(moved.length) - moved.length
    for item, length in enumerate(moved.length):
        begin = places.offset[item]
        held[places.rank[item], begin : begin + length] = name[item] + np.arange(length)
    return held


def exchange(held: np.ndarray, send: np.ndarray, gather: np.ndarray) -> np.ndarray:
    """A padded all-to-all over the first axis of everything."""
    peers, _, chunk = send.shape
    sent = np.where(send >= 0, held[np.arange(peers)[:, None, None], send], EMPTY)
    received = sent.transpose(1, 0, 2).reshape(peers, peers * chunk)
    found = np.concatenate([received, held], axis=1)
    return np.where(gather >= 0, np.take_along_axis(found, np.maximum(gather, 0), axis=1), EMPTY)


def apply(moved: Rearrangement, held: np.ndarray) -> np.ndarray:
    made = tables(moved, width(moved), held.shape[1])
    assert made.send.dtype == made.gather.dtype == np.int32
    return exchange(held, made.send, made.gather)


@st.composite
def problems(draw, places: int = 2):
    """Lengths, `places` ranks for each item, and how many ranks there are; empty items and ranks are ordinary."""
    ranks = draw(st.integers(1, 6))
    n = draw(st.integers(0, 20))
    length = draw(st.lists(st.integers(0, 7), min_size=n, max_size=n))
    at = [draw(st.lists(st.integers(0, ranks - 1), min_size=n, max_size=n)) for _ in range(places)]
    return np.array(length, np.int64), [np.array(rank, np.int64) for rank in at], ranks


def shuffled(length: np.ndarray, rank: np.ndarray, ranks: int, seed: int) -> Places:
    """Items packed on their ranks in some order, not that of their numbers."""
    order = np.random.default_rng(seed).permutation(len(length))
    packed = pack_places(length[order], rank[order], ranks)
    offset = np.empty(len(length), np.int64)
    offset[order] = packed.offset
    return Places(rank.astype(np.int32), offset)


@settings(max_examples=150)
@given(problems(), st.integers(0, 99))
def test_every_token_arrives_at_its_place_and_the_inverse_brings_it_back(problem, seed):
    length, (source, destination), ranks = problem
    moved = Rearrangement(
        length,
        shuffled(length, source, ranks, seed),
        shuffled(length, destination, ranks, seed + 1),
        ranks,
    )
    capacity = int(length.sum()) + 1
    held = arrays(moved, moved.source, capacity)
    arrived = apply(moved, held)
    assert np.array_equal(arrived, arrays(moved, moved.destination, capacity))
    assert np.array_equal(apply(inverse(moved), arrived), held)


@settings(max_examples=100)
@given(problems(3))
def test_composition_is_one_exchange_that_does_what_two_do(problem):
    """An encoder's inverse, then the LLM's rearrangement: both start from where the samples were loaded."""
    length, (loaded, encoded, wanted), ranks = problem
    encoder, llm = (
        rearrange(length, loaded, encoded, ranks),
        rearrange(length, loaded, wanted, ranks),
    )
    composed = compose(inverse(encoder), llm)
    held = arrays(encoder, encoder.destination, int(length.sum()))
    assert np.array_equal(apply(composed, held), apply(llm, apply(inverse(encoder), held)))
    back = compose(encoder, inverse(encoder))
    assert np.array_equal(back.source.rank, back.destination.rank)
    assert np.array_equal(back.source.offset, back.destination.offset)


@settings(max_examples=100)
@given(problems(), st.data())
def test_the_tables_of_one_rank_are_its_rows_of_all_tables(problem, data):
    length, (source, destination), ranks = problem
    moved = rearrange(length, source, destination, ranks)
    chunk, capacity = width(moved) + 2, int(length.sum())
    every = tables(moved, chunk, capacity)
    begin = data.draw(st.integers(0, ranks - 1))
    end = data.draw(st.integers(begin + 1, ranks))
    own = tables(moved, chunk, capacity, mine=range(begin, end))
    assert np.array_equal(own.send, every.send[begin:end])
    assert np.array_equal(own.gather, every.gather[begin:end])


@settings(max_examples=100)
@given(problems(), st.integers(1, 4))
def test_tables_of_a_node_move_what_stays_in_it(problem, ranks_per_node):
    length, (source, destination), ranks = problem
    first = source // ranks_per_node * ranks_per_node
    size = np.minimum(ranks - first, ranks_per_node)
    moved = rearrange(length, source, first + destination % size, ranks)
    capacity = int(length.sum())
    held, expected = (
        arrays(moved, moved.source, capacity),
        arrays(moved, moved.destination, capacity),
    )
    for begin in range(0, ranks, ranks_per_node):
        node = range(begin, min(begin + ranks_per_node, ranks))
        made = tables(moved, width(moved), capacity, peers=node)
        assert made.send.shape == (len(node), len(node), width(moved))
        assert np.array_equal(
            exchange(held[begin : node.stop], made.send, made.gather), expected[begin : node.stop]
        )


def test_what_stays_on_its_rank_takes_no_room_in_the_exchange():
    moved = rearrange(np.array([500, 3]), np.array([0, 0]), np.array([0, 1]), 2)
    assert width(moved) == 3
    made = tables(moved, 3, 500)
    assert np.count_nonzero(made.send >= 0) == 3


def test_restriction_keeps_items_where_they_were():
    rng = np.random.default_rng(0)
    length, source, destination = (
        rng.integers(1, 9, 30),
        rng.integers(0, 4, 30),
        rng.integers(0, 4, 30),
    )
    moved = rearrange(length, source, destination, 4)
    some = rng.choice(30, 11, replace=False)
    part = restrict(moved, some)
    held = arrays(part, part.source, int(length.sum()))
    assert np.array_equal(apply(part, held), arrays(part, part.destination, int(length.sum())))
    assert np.array_equal(part.destination.offset, moved.destination.offset[some])
    assert np.array_equal(restrict(moved, np.arange(30) < 5).length, length[:5])


def test_a_modality_moves_to_its_runs_within_the_samples():
    """Encoded tokens go from their encoder's rank straight into the interleaved sequence, where text leaves room."""
    samples = rearrange(np.array([10, 6, 8]), np.array([0, 0, 1]), np.array([1, 0, 1]), 2)
    item_sample, item_offset, item_length = (
        np.array([0, 0, 2]),
        np.array([1, 5, 0]),
        np.array([3, 4, 8]),
    )
    images = restrict_to_parts(samples, item_sample, item_offset, item_length)
    encoder = Rearrangement(
        item_length, images.source, pack_places(item_length, np.array([1, 0, 0]), 2), samples.ranks
    )
    composed = compose(inverse(encoder), images)
    arrived = apply(composed, arrays(composed, composed.source, 18))
    expected = np.full((2, 18), EMPTY)
    expected[1, 1:4], expected[1, 5:9], expected[1, 10:18] = (
        [0, 1, 2],
        [3, 4, 5, 6],
        np.arange(7, 15),
    )
    assert np.array_equal(arrived, expected)


def test_one_rank_of_many_builds_its_tables_alone():
    rng = np.random.default_rng(0)
    ranks = 2560
    length, source = rng.integers(1, 9, 8 * ranks), np.repeat(np.arange(ranks), 8)
    moved = rearrange(length, source, rng.integers(0, ranks, len(length)), ranks)
    chunk, capacity = width(moved), int(np.bincount(moved.destination.rank, length).max())
    made = tables(moved, chunk, capacity, mine=range(7, 8))
    assert made.send.shape == (1, ranks, chunk)
    assert np.count_nonzero(made.gather >= 0) == length[moved.destination.rank == 7].sum()
    assert (
        np.count_nonzero(made.send >= 0)
        == length[(source == 7) & (moved.destination.rank != 7)].sum()
    )


def test_tables_that_do_not_fit_are_refused():
    moved = rearrange(np.array([4, 4]), np.array([0, 0]), np.array([1, 1]), 3)
    with pytest.raises(ValueError, match="exceeds the width: 8 tokens, room for 7"):
        tables(moved, 7, 8)
    with pytest.raises(ValueError, match="exceeds the width"):
        tables(moved, 7, 8, mine=range(1, 2))
    with pytest.raises(ValueError, match="exceeds the capacity: 8 tokens, room for 6"):
        tables(moved, 8, 6)
    with pytest.raises(ValueError, match=r"between ranks 1 \.\. 2 and others"):
        tables(moved, 8, 8, peers=range(1, 3))
    with pytest.raises(ValueError, match=r"between ranks 0 \.\. 0 and others"):
        tables(moved, 8, 8, peers=range(1))
    on_top = Rearrangement(
        moved.length, moved.source, Places(moved.destination.rank, np.array([0, 2])), 3
    )
    with pytest.raises(ValueError, match="overlap"):
        tables(on_top, 8, 8)


def test_maps_that_make_no_sense_are_refused():
    two = np.array([4, 4])
    moved = rearrange(two, np.array([0, 1]), np.array([1, 0]), 2)
    with pytest.raises(ValueError, match=r"outside of 0 \.\. 1"):
        rearrange(two, np.array([0, 1]), np.array([1, 2]), 2)
    with pytest.raises(ValueError, match="one entry for each item"):
        Rearrangement(two[:1], moved.source, moved.destination, 2)
    with pytest.raises(ValueError, match="negative"):
        Rearrangement(-two, moved.source, moved.destination, 2)
    with pytest.raises(ValueError, match="same item lengths"):
        compose(moved, rearrange(two + 1, np.array([1, 0]), np.array([0, 1]), 2))
    with pytest.raises(ValueError, match="start where the first one ends"):
        compose(moved, moved)
    with pytest.raises(ValueError, match="inside its item"):
        restrict_to_parts(moved, np.array([0]), np.array([1]), np.array([4]))


@settings(max_examples=100)
@given(problems())
def test_the_width_is_the_most_tokens_that_one_rank_sends_another(problem):
    length, (source, destination), ranks = problem
    sent = np.zeros((ranks, ranks), np.int64)
    for tokens, a, b in zip(length, source, destination, strict=True):
        sent[a, b] += tokens * (a != b)
    assert width(rearrange(length, source, destination, ranks)) == sent.max()
