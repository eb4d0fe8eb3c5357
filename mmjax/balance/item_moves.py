"""Moving items of one encoder between the ranks of a node, where samples alone leave a rank with too much of it.

An item is then encoded on another rank than its sample's, and its tokens travel (OrchMLLM section
6). Kernels work on plain arrays. Items are sorted by falling cost; `home_rank` int64 `[m]` is the
rank of an item's sample, `rank` where it is encoded (at first its home), `tokens` what travels if
these differ. `load`: float64 `[ranks]`, 1 = mean.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

_LEAST_RELIEF = 1e-9  # of the fullest rank
_PARTNERS = 32  # ranks that the fullest one tries, the lightest first
_TRIES = 16  # moves for each rank of a node
# items a rank, from which on most of what must go is shed before moves are chosen one by one
_MANY = 64


class _Node(NamedTuple):
    """The items on each rank as linked lists, longest first: head `[ranks]`, follower `[m]`, -1 = the end.

    sent: int64 `[ranks, ranks]`, tokens from an item's home to where it is encoded.
    """

    head: np.ndarray
    follower: np.ndarray
    sent: np.ndarray


@njit(cache=True)
def spread_in_nodes(start, size, home_rank, cost, tokens, width, goal, rank, load):
    """Move or swap items off each node's fullest rank until it is at the goal or nothing helps; writes rank and load.

    start: int64 [nodes + 1], the items of each node; size: int64 [nodes], its ranks, which are
    numbered through all nodes. From no rank to another one travel more than `width` tokens. Time is
    linear in items for each move.
    """
    first = 0
    for k in range(len(size)):
        end = first + size[k]
        if load[first:end].max() > goal:
            a = start[k]
            b = start[k + 1]
            # Ranks are numbered from 0 inside the node, and shifted back afterwards.
            local = rank[a:b] - first
            spread_items(
                home_rank[a:b] - first, cost[a:b], tokens[a:b], width, goal, local, load[first:end]
            )
            rank[a:b] = local + first
        first = end


@njit(cache=True)
def spread_items(home_rank, cost, tokens, width, goal, rank, load):
    """Spread the items of one node, like `spread_in_nodes`, over its ranks, numbered from 0."""
    ranks = len(load)
    sent = np.zeros((ranks, ranks), np.int64)
    if len(home_rank) > _MANY * ranks:
        _shed(home_rank, cost, tokens, width, goal, rank, load, sent)
    node = _Node(np.full(ranks, -1, np.int64), np.full(len(home_rank), -1, np.int64), sent)
    # Inserted at the head from the cheapest on, so that each list runs from the most expensive
    # item.
    for item in range(len(home_rank) - 1, -1, -1):
        node.follower[item] = node.head[rank[item]]
        node.head[rank[item]] = item
    for _ in range(_TRIES * ranks):
        full = np.argmax(load)
        if load[full] <= goal:
            break
        out, back, to = _best_move(node, home_rank, cost, tokens, width, goal, load, full)
        if out < 0:
            break
        _send(node, home_rank, tokens, rank, out, to)
        load[full] -= cost[out]
        load[to] += cost[out]
        if back >= 0:
            _send(node, home_rank, tokens, rank, back, full)
            load[full] += cost[back]
            load[to] -= cost[back]


@njit(cache=True)
def _shed(home_rank, cost, tokens, width, goal, rank, load, sent):
    """Move items, longest first, from ranks above the goal to the lightest that may take them.

    No rank that sheds ends below 1, the mean: what is left to go is for shorter items.
    """
    for item in range(len(home_rank)):
        r = rank[item]
        if r != home_rank[item] or load[r] <= goal or load[r] - cost[item] < 1:
            continue
        to = -1
        for k in range(len(load)):
            if (to < 0 or load[k] < load[to]) and k != r and sent[r, k] + tokens[item] <= width:
                to = k
        if to >= 0 and load[to] + cost[item] <= goal:
            load[r] -= cost[item]
            load[to] += cost[item]
            sent[r, to] += tokens[item]
            rank[item] = to


@njit(cache=True)
def _best_move(node, home_rank, cost, tokens, width, goal, load, full):
    """Return the item to move off the fullest rank, the one that returns or -1, and the other rank; -1 = none helps."""
    min_load = load[full] - _LEAST_RELIEF
    best_out = best_back = best_to = -1
    for to in np.argsort(load)[:_PARTNERS]:
        # Even equal loads on these two ranks would not beat the best move so far.
        if to == full or max((load[full] + load[to]) / 2, goal) >= min_load:
            continue
        new_load, out, back = _best_swap(
            node, home_rank, cost, tokens, width, goal, load, full, to, min_load
        )
        if new_load < min_load:
            min_load = new_load
            best_out = out
            best_back = back
            best_to = to
            if min_load <= goal:
                break
    return best_out, best_back, best_to


@njit(cache=True)
def _best_swap(node, home_rank, cost, tokens, width, goal, load, full, to, min_load):
    """Return the larger of two ranks' loads after the best move or swap, at least the goal; and the items, -1 = none.

    An item may come to a rank if that is its home, or if its home's tokens to there stay within the
    width. The ideal change halves the difference, or reaches the goal: both lists fall, so one pass
    over them finds the items whose difference is nearest to it on either side.
    """
    ideal = min((load[full] - load[to]) / 2, load[full] - goal)
    best_out = best_back = -1
    # fitting: the first that may come and costs no more than it should; passed: the last before it.
    passed = -1
    fitting = node.head[to]
    out = node.head[full]
    while out >= 0:
        if _may_go(node, home_rank, tokens, width, out, to):
            while fitting >= 0:
                may_come = _may_go(node, home_rank, tokens, width, fitting, full)
                if may_come and cost[fitting] <= cost[out] - ideal:
                    break
                if may_come and cost[fitting] < cost[out]:
                    passed = fitting
                fitting = node.follower[fitting]
            # Try the items on either side of the ideal change; without a fitting one the first is a
            # move, no swap.
            for k in range(2):
                back = fitting if k == 0 else passed
                if k == 0 or passed >= 0:
                    change = cost[out] - (cost[back] if back >= 0 else 0.0)
                    new_load = larger_load(load[full], load[to], change, goal)
                    if new_load < min_load:
                        min_load = new_load
                        best_out = out
                        best_back = back
        out = node.follower[out]
    return min_load, best_out, best_back


@njit(cache=True)
def larger_load(source, target, change, goal):
    """Return the larger of two bins' loads once `change` has gone from source to target: at least the goal."""
    # Below the goal loads count as equal, so that no move is made that helps nobody.
    return max(source - change, target + change, goal)


@njit(cache=True)
def _may_go(node, home_rank, tokens, width, item, to):
    """Check that the item may be encoded on this rank: its home, or one to which the home may still send as much."""
    return home_rank[item] == to or node.sent[home_rank[item], to] + tokens[item] <= width


@njit(cache=True)
def _send(node, home_rank, tokens, rank, item, to):
    """Encode an item on another rank."""
    previous = node.head[rank[item]]
    if previous == item:
        node.head[rank[item]] = node.follower[item]
    else:
        while node.follower[previous] != item:
            previous = node.follower[previous]
        node.follower[previous] = node.follower[item]
    # An item on its home rank sends nothing; elsewhere its tokens count for the pair (home, rank).
    if rank[item] != home_rank[item]:
        node.sent[home_rank[item], rank[item]] -= tokens[item]
    if to != home_rank[item]:
        node.sent[home_rank[item], to] += tokens[item]
    rank[item] = to
    if node.head[to] < 0 or node.head[to] > item:
        node.follower[item] = node.head[to]
        node.head[to] = item
        return
    previous = node.head[to]
    while node.follower[previous] >= 0 and node.follower[previous] < item:
        previous = node.follower[previous]
    node.follower[item] = node.follower[previous]
    node.follower[previous] = item
