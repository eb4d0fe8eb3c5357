"""Rearrangements as composable maps, OrchMLLM section 6: where each item is before and after, and tables to move it.

An item is a run of tokens at an offset of its rank's flat array. A rearrangement becomes integer
tables of fixed shape, so that one padded all-to-all moves the tokens of any plan: `send` says what
goes to each peer, `gather` where each destination position finds its token. Tokens that stay on
their rank never enter the all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Places:
    """Positions of items. rank: int32 `[n]`. offset: int64 `[n]`, position of the item's first token on that rank."""

    rank: np.ndarray
    offset: np.ndarray


@dataclass(frozen=True)
class Rearrangement:
    """Items of `length` tokens, int64 `[n]`, move from `source` to `destination`; both are over the same `ranks`.

    Raises ValueError for places of another size, ranks out of range and lengths or offsets below 0.
    """

    length: np.ndarray
    source: Places
    destination: Places
    ranks: int

    def __post_init__(self) -> None:
        for places in (self.source, self.destination):
            if not len(self.length) == len(places.rank) == len(places.offset):
                raise ValueError("length, rank and offset must have one entry for each item")
            if np.any((places.rank < 0) | (places.rank >= self.ranks)):
                raise ValueError(f"an item is on a rank outside of 0 .. {self.ranks - 1}")
            if np.any(places.offset < 0) or np.any(self.length < 0):
                raise ValueError("lengths and offsets must not be negative")


@dataclass(frozen=True)
class Tables:
    """Index tables of k ranks for one padded all-to-all among g peers.

    send: int32 `[k, g, width]`, positions in the rank's own array that go to each peer; -1 =
    padding.
    gather: int32 `[k, capacity]`, for each position of the destination array its place in the
    received chunks `[g * width]` followed by the rank's own array; -1 = no token.
    """

    send: np.ndarray
    gather: np.ndarray


def pack_places(length: np.ndarray, rank: np.ndarray, ranks: int) -> Places:
    """Pack items one after the other on their ranks, in their order. length, rank: int `[n]`."""
    return Places(
        np.asarray(rank, np.int32), _offsets(np.asarray(length, np.int64), np.asarray(rank), ranks)
    )


def rearrange(
    length: np.ndarray, source: np.ndarray, destination: np.ndarray, ranks: int
) -> Rearrangement:
    """Build the rearrangement from source to destination ranks, items packed in their order on both. All int `[n]`."""
    length = np.asarray(length, np.int64)
    return Rearrangement(
        length, pack_places(length, source, ranks), pack_places(length, destination, ranks), ranks
    )


def inverse(moved: Rearrangement) -> Rearrangement:
    """Return the rearrangement that brings every item back; the backward pass of the forward one."""
    return Rearrangement(moved.length, moved.destination, moved.source, moved.ranks)


def compose(first: Rearrangement, second: Rearrangement) -> Rearrangement:
    """Compose `first`, then `second`, into one all-to-all: the LLM's after an encoder's inverse (OrchMLLM section 6).

    Raises ValueError unless both speak of the same items and `second` starts where `first` ends.
    """
    if first.ranks != second.ranks or not np.array_equal(first.length, second.length):
        raise ValueError(
            "composed rearrangements must have the same ranks and the same item lengths"
        )
    middle = first.destination
    start = second.source
    if not (
        np.array_equal(middle.rank, start.rank) and np.array_equal(middle.offset, start.offset)
    ):
        raise ValueError("the second rearrangement must start where the first one ends")
    return Rearrangement(first.length, first.source, second.destination, first.ranks)


def restrict(moved: Rearrangement, items: np.ndarray) -> Rearrangement:
    """Select these items, in this order, where they were: indices int `[k]` or bool `[n]`."""
    return Rearrangement(
        moved.length[items],
        _take(moved.source, items),
        _take(moved.destination, items),
        moved.ranks,
    )


def restrict_to_parts(
    moved: Rearrangement, item: np.ndarray, offset: np.ndarray, length: np.ndarray
) -> Rearrangement:
    """Build the rearrangement of runs within items, such as one modality's tokens within interleaved samples.

    item: int `[k]`, the item that holds each run; offset: int `[k]`, where in it; length: int
    `[k]`. Raises ValueError where a run is not inside its item.
    """
    offset = np.asarray(offset, np.int64)
    length = np.asarray(length, np.int64)
    if np.any(offset < 0) or np.any(offset + length > moved.length[item]):
        raise ValueError("every run must lie inside its item")
    # A run lies in its item at the same place on both sides.
    places = [
        Places(side.rank[item], side.offset[item] + offset)
        for side in (moved.source, moved.destination)
    ]
    return Rearrangement(length, places[0], places[1], moved.ranks)


def width(moved: Rearrangement) -> int:
    """Return the most tokens that one rank sends to another: the chunk that a padded all-to-all needs."""
    away = np.flatnonzero(moved.source.rank != moved.destination.rank)
    pair = moved.source.rank[away].astype(np.int64) * moved.ranks + moved.destination.rank[away]
    # Only pairs that occur, so memory follows the items and not ranks^2.
    number = np.unique(pair, return_inverse=True)[1]
    return int(sum_by_key(number, moved.length[away], len(away)).max(initial=0))


def tables(
    moved: Rearrangement,
    width: int,
    capacity: int,
    mine: range | None = None,
    peers: range | None = None,
) -> Tables:
    """Build the tables of the ranks `mine` (default: all peers) for an all-to-all among `peers` (default: all ranks).

    Time and memory follow the tokens and tables of `mine`, besides one look at each item, so a
    process builds only its own. peers: the ranks of one node, where nothing leaves it. width:
    tokens per chunk, at least `width(moved)`;
    capacity: positions of the destination array. Raises ValueError where an item does not fit in
    either, leaves the peers, or lands on another one.
    """
    peers = range(moved.ranks) if peers is None else peers
    mine = peers if mine is None else mine
    source = moved.source.rank
    destination = moved.destination.rank
    # Items of no tokens take no place in any table.
    sending = np.flatnonzero(_among(source, mine) & (source != destination) & (moved.length > 0))
    arriving = np.flatnonzero(_among(destination, mine) & (moved.length > 0))
    outside = ~(_among(destination[sending], peers) & _among(source[sending], peers))
    if np.any(outside) or not np.all(_among(source[arriving], peers)):
        raise ValueError(
            f"an item moves between ranks {peers.start} .. {peers.stop - 1} and others"
        )
    # -1 marks padding; everything else is overwritten below.
    send = np.full((len(mine), len(peers), width), -1, np.int32)
    gather = np.full((len(mine), capacity), -1, np.int32)
    _fill_send(send, moved, sending, mine, peers)
    _fill_gather(gather, moved, arriving, mine, peers, width)
    return Tables(send, gather)


def _fill_send(
    send: np.ndarray, moved: Rearrangement, items: np.ndarray, mine: range, peers: range
) -> None:
    length = moved.length[items]
    # The chunk's number in `send`: row of the sending rank among mine, column of the receiving
    # peer.
    pair = (
        (moved.source.rank[items] - mine.start) * np.int64(len(peers))
        + moved.destination.rank[items]
        - peers.start
    )
    # Where an item begins in its chunk: behind the items before it that go the same way.
    slot = _offsets(length, pair, len(mine) * len(peers))
    _check_fits(slot + length, send.shape[2], "pair of ranks exceeds the width")
    # Chunk c begins at c * width of the flat table, and the item's tokens follow each other on both
    # sides.
    send.reshape(-1)[_runs(pair * send.shape[2] + slot, length)] = _runs(
        moved.source.offset[items], length
    )


def _fill_gather(
    gather: np.ndarray,
    moved: Rearrangement,
    items: np.ndarray,
    mine: range,
    peers: range,
    width: int,
) -> None:
    length = moved.length[items]
    source = moved.source.rank[items]
    row = moved.destination.rank[items] - mine.start
    peer = source - np.int64(peers.start)
    # Both sides number a pair's tokens in the order of its items, so they agree without a word
    # about it.
    slot = _offsets(length, row * len(peers) + peer, len(mine) * len(peers))
    stays = source == moved.destination.rank[items]
    _check_fits((slot + length)[~stays], width, "pair of ranks exceeds the width")
    _check_fits(
        moved.destination.offset[items] + length,
        gather.shape[1],
        "destination array exceeds the capacity",
    )
    # What a rank indexes: the chunks of all peers, then its own array.
    origin = np.where(stays, len(peers) * width + moved.source.offset[items], peer * width + slot)
    gather.reshape(-1)[
        _runs(row * np.int64(gather.shape[1]) + moved.destination.offset[items], length)
    ] = _runs(origin, length)
    # Two items on one position would leave fewer positions written than tokens.
    if np.count_nonzero(gather >= 0) != length.sum():
        raise ValueError("two items overlap at their destination")


def _check_fits(end: np.ndarray, limit: int, what: str) -> None:
    if (largest := end.max(initial=0)) > limit:
        raise ValueError(f"a {what}: {largest} tokens, room for {limit}")


def _take(places: Places, items: np.ndarray) -> Places:
    return Places(places.rank[items], places.offset[items])


def _among(rank: np.ndarray, ranks: range) -> np.ndarray:
    return (rank >= ranks.start) & (rank < ranks.stop)


def sum_by_key(key: np.ndarray, length: np.ndarray, keys: int) -> np.ndarray:
    """Sum the lengths that have each key, int64 `[keys]`."""
    # Float sums of whole numbers are exact up to 2^53.
    return np.bincount(key, length, keys).astype(np.int64)


def _offsets(length: np.ndarray, key: np.ndarray, keys: int) -> np.ndarray:
    """Sum the tokens of the items before each one that have its key, int64 `[n]`."""
    order = np.argsort(key, kind="stable")
    preceding = np.cumsum(length[order]) - length[order]
    # Sorted by key, the items before a key's first one are those of all smaller keys.
    first = np.concatenate([[0], np.cumsum(sum_by_key(key, length, keys))[:-1]])
    offset = np.empty(len(length), np.int64)
    offset[order] = preceding - first[key[order]]
    return offset


def _runs(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Concatenate start, start + 1, .. for `length` each: int64 `[sum of lengths]`."""
    # start [7, 3], length [2, 3] -> [7, 8, 3, 4, 5]: the arange has counted 2 when run 1 begins, so
    # 3 - 2 is added.
    return np.arange(length.sum()) + np.repeat(start - np.cumsum(length) + length, length)
