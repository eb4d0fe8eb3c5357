"""Build the tables of an all-to-all: which tokens each rank sends to each peer, and where it finds what it gets.

OrchMLLM section 6. An item is a run of tokens at an offset of its rank's flat array. Its move to another rank becomes
integer tables of fixed shape, so that one padded all-to-all moves the tokens of any plan. Tokens
that stay on their rank never enter the all-to-all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mmjax.balance.parts import offsets_by_key, ranges


class Rearrangement(NamedTuple):
    """Items of `length` tokens: their rank before and after, and the offset of the first token there; all int `[n]`."""

    length: np.ndarray
    source: np.ndarray
    source_offset: np.ndarray
    target: np.ndarray
    target_offset: np.ndarray


def exchange_tables(
    moved: Rearrangement, width: int, capacity: int, mine: range, peers: range
) -> tuple[np.ndarray, np.ndarray]:
    """Build the tables of the ranks `mine` for an all-to-all among `peers`, such as the ranks of one node.

    width: tokens of a chunk, which a rank sends to a peer. capacity: positions of the array after
    it. Returns `send`, int32 `[mine, peers, width]`, the positions in the rank's own array that go
    to each peer, -1 = padding; and `gather`, int32 `[mine, capacity]`, for each position after the
    exchange its place among the received chunks `[peers * width]` followed by the rank's own array,
    -1 = no token. Time and memory follow the tokens and tables of `mine`, besides one look at each
    item.

    Item A has 3 tokens and goes from rank 0 to rank 1, B stays, C goes from rank 1 to rank 0:

        before               sent in chunks of 3          rank 0 finds               after
        rank 0:  A A A B B   to rank 1:  A A A            from rank 0:  0 1 2        rank 0:  B B C
        rank 1:  C           to rank 0:  C . .            from rank 1:  3 4 5  (C)   rank 1:  A A A
                                                          its own:  6 7 8 9 10  (A A A B B)

    >>> moved = Rearrangement(*map(np.array, [[3, 2, 1], [0, 0, 1], [0, 3, 0], [1, 0, 0], [0, 0, 2]]))
    >>> send, gather = exchange_tables(moved, width=3, capacity=3, mine=range(2), peers=range(2))
    >>> send[0].tolist(), send[1].tolist()
    ([[-1, -1, -1], [0, 1, 2]], [[0, -1, -1], [-1, -1, -1]])
    >>> gather.tolist()
    [[9, 10, 3], [0, 1, 2]]

    Raises ValueError where an item does not fit in the width or the capacity, leaves the peers, or
    lands on another one.
    """
    # Items of no tokens take no place in any table.
    sending = _among(moved.source, mine) & (moved.source != moved.target) & (moved.length > 0)
    arriving = _among(moved.target, mine) & (moved.length > 0)
    inside = _among(moved.source, peers) & _among(moved.target, peers)
    if np.any((sending | arriving) & ~inside):
        raise ValueError(
            f"an item moves between ranks {peers.start} .. {peers.stop - 1} and others"
        )
    sent = Rearrangement._make(field[sending] for field in moved)
    arrived = Rearrangement._make(field[arriving] for field in moved)
    return _send_table(sent, width, mine, peers), _gather_table(
        arrived, width, capacity, mine, peers
    )


def _send_table(sent: Rearrangement, width: int, mine: range, peers: range) -> np.ndarray:
    send = np.full((len(mine), len(peers), width), -1, np.int32)
    chunk = (sent.source - mine.start) * np.int64(len(peers)) + sent.target - peers.start
    # Where an item begins in its chunk: behind the items before it that go the same way.
    slot = offsets_by_key(sent.length, chunk)
    _check_fits(slot + sent.length, width, "pair of ranks exceeds the width")
    # Chunk c begins at c * width of the flat table.
    send.reshape(-1)[ranges(chunk * width + slot, sent.length)] = ranges(
        sent.source_offset, sent.length
    )
    return send


def _gather_table(
    arrived: Rearrangement, width: int, capacity: int, mine: range, peers: range
) -> np.ndarray:
    gather = np.full((len(mine), capacity), -1, np.int32)
    row = arrived.target - np.int64(mine.start)
    peer = arrived.source - np.int64(peers.start)
    # Both sides number the tokens of a pair of ranks in the order of its items.
    slot = offsets_by_key(arrived.length, row * len(peers) + peer)
    stays = arrived.source == arrived.target
    end = arrived.target_offset + arrived.length
    _check_fits((slot + arrived.length)[~stays], width, "pair of ranks exceeds the width")
    _check_fits(end, capacity, "destination array exceeds the capacity")
    found = np.where(stays, len(peers) * width + arrived.source_offset, peer * width + slot)
    gather.reshape(-1)[ranges(row * capacity + arrived.target_offset, arrived.length)] = ranges(
        found, arrived.length
    )
    # Two items on one position would leave fewer positions written than tokens.
    if np.count_nonzero(gather >= 0) != arrived.length.sum():
        raise ValueError("two items overlap at their destination")
    return gather


def _check_fits(end: np.ndarray, limit: int, what: str) -> None:
    if (largest := end.max(initial=0)) > limit:
        raise ValueError(f"a {what}: {largest} tokens, room for {limit}")


def _among(rank: np.ndarray, ranks: range) -> np.ndarray:
    return (rank >= ranks.start) & (rank < ranks.stop)
