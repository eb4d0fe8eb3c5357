"""Balancing that keeps traffic inside nodes, OrchMLLM section 5.2: the node is chosen before the rank.

The paper permutes a finished rearrangement over the nodes, when most items have left their node already. Here an item
stays where it is unless its node, and within the node its rank, has more than its share; only that surplus moves.
Its volume is then close to the least that any plan with the same largest cost can have (`traffic_bounds`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmjax.balance.baselines.moves import ENDLESS, by_key, even, fill, polish_bins, shed
from mmjax.balance.lpt import longest_first

# Nodes are filled to less than ranks are, since ranks of a full node cannot all be full: parts of the tolerance, tried
# in this order until the ranks fit.
_MARGINS = (0.25, 0.5, 0.75)
_SPREAD = 0.9  # of the room that nodes have to spare, this share lets the emptiest ones receive less


@dataclass(frozen=True)
class Bounds:
    """What no assignment with this largest cost gets below, in tokens between nodes: per rank sent, received; total."""

    sent: float
    received: float
    total: int


@dataclass(frozen=True)
class _Bins:
    """What costs are evened between: nodes of the cluster, or ranks of a node.

    first_unit: int64 `[b + 1]`, the ranks of each bin. first: int64 `[groups + 1]`, the bins that exchange items.
    """

    first_unit: np.ndarray
    first: np.ndarray

    @property
    def size(self) -> np.ndarray:
        return np.diff(self.first_unit)


def balance_nodewise(
    length: np.ndarray, source: np.ndarray, ranks: int, ranks_per_node: int, tolerance: float = 0.002
) -> np.ndarray:
    """The rank of each item, int32 `[n]`, so that costs are equal and few tokens travel between nodes.

    length: int `[n]`, the packed cost of each item; source: int `[n]`, the rank it starts on. Node k has ranks
    k * ranks_per_node and on; the last one may be smaller. No rank costs more than `largest_cost`, provided that each
    has some tens of items: then every node can be divided that finely. Sent and received tokens are spread over the
    ranks of a node, and within a node too only what a rank has too much of moves. OrchMLLM section 5.2.2.
    """
    length, source = np.ascontiguousarray(length, np.int64), np.ascontiguousarray(source, np.int64)
    largest = largest_cost(length, ranks, tolerance)
    order = longest_first(length)
    best, least = source, _totals(source, length, ranks).max(initial=0)
    for margin in _MARGINS:
        level = largest - int(margin * (largest - length.sum() / ranks))
        rank = _balance(length, source, order, ranks, ranks_per_node, largest, level, margin == _MARGINS[-1])
        cost = _totals(rank, length, ranks).max()
        if cost < least:
            best, least = rank, cost
        if cost <= largest:
            break
    return best.astype(np.int32)


def largest_cost(length: np.ndarray, ranks: int, tolerance: float) -> int:
    """What a rank may cost: the mean and this share of it, but no less than ceil(mean) or the longest item."""
    total = int(np.sum(length))
    return max(int(total / ranks * (1 + tolerance)), -(-total // ranks), int(np.max(length, initial=0)))


def traffic_bounds(length: np.ndarray, source: np.ndarray, ranks: int, ranks_per_node: int, largest: int) -> Bounds:
    """Lower bounds of inter-node traffic while no rank costs more than `largest`, whatever the algorithm.

    A node must send what it has above its ranks' `largest`; of its received tokens, the emptiest nodes can be spared
    as much as all others have room for. Both are divided by the ranks of the node.
    """
    nodes = _nodes(ranks, ranks_per_node)
    load = _totals(np.asarray(source) // ranks_per_node, np.asarray(length, np.int64), len(nodes.size))
    room = largest * nodes.size - load
    surplus = int(-np.minimum(room, 0).sum())
    return Bounds(float(max((-room / nodes.size).max(), 0)), _water_level(room, nodes.size, surplus), surplus)


def _balance(
    length: np.ndarray,
    source: np.ndarray,
    order: np.ndarray,
    ranks: int,
    ranks_per_node: int,
    largest: int,
    level: int,
    last: bool,
) -> np.ndarray:
    """The rank of each item, nodes filled to `level` and ranks to `largest`, int64 `[n]`.

    Where costs do not come out even, only the last try moves what a node received from the ranks that share it equally.
    """
    nodes = _nodes(ranks, ranks_per_node)
    home = source // ranks_per_node
    over = _totals(home, length, len(nodes.size)) - level * nodes.size
    room, surplus = np.maximum(-over, 0), np.maximum(over, 0).sum()
    most = _water_level(room, nodes.size, surplus + (1 - _SPREAD) * (room.sum() - surplus))
    # A longer item would alone make its rank the one that receives most.
    limit = max(int(most), 1)
    node = _relieve(length, order, source, home, nodes, over, limit, most)

    stays = node == home
    within = _Bins(np.arange(ranks + 1), nodes.first_unit)
    arrived, kept = order[~stays[order]], order[stays[order]]
    rank, received = _spread_arrivals(length, arrived, node, source, within)
    over = received + _totals(source[kept], length[kept], ranks) - largest
    rank = _relieve(length, kept, source, rank, within, over, ENDLESS, np.inf)
    over = _totals(rank, length, ranks) - largest
    for movable in (kept, order) if last else (kept,):
        if over.max() > 0:
            polish_bins(*by_key(movable, rank, ranks), length, over, within.first, rank)
    return rank


def _nodes(ranks: int, ranks_per_node: int) -> _Bins:
    """All nodes as bins of one group."""
    first = np.append(np.arange(0, ranks, ranks_per_node), ranks)
    return _Bins(first, np.array([0, len(first) - 1]))


def _spread_arrivals(
    length: np.ndarray, arrived: np.ndarray, node: np.ndarray, source: np.ndarray, within: _Bins
) -> tuple[np.ndarray, np.ndarray]:
    """What nodes receive, evenly over their ranks: the rank of each item, int64 `[n]`, and what each rank received.

    Items that have not moved are on their source rank.
    """
    rank = source.copy()
    received = np.zeros(len(within.size), np.int64)
    items, start = by_key(arrived, node, len(within.first) - 1)
    fill(items, start, length, received, within.first, rank)
    mean = -(-np.add.reduceat(received, within.first[:-1]) // np.diff(within.first))
    even(*by_key(arrived, rank, len(received)), length, received, within.first, mean, rank)
    return rank, received


def _relieve(
    length: np.ndarray,
    order: np.ndarray,
    unit: np.ndarray,
    bin_of: np.ndarray,
    bins: _Bins,
    over: np.ndarray,
    limit: int,
    most: float,
) -> np.ndarray:
    """Move what bins have too much of to the other bins of their group: the bin of each item, int64 `[n]`.

    order: the movable items, longest first; unit: `[n]`, the rank each starts on; over: `[b]`, cost above what a bin
    may have. Items over `limit` move only where it must be; no bin receives over `most` per rank if others can.
    """
    bin_of, over = bin_of.copy(), over.copy()
    away = np.zeros(len(length), np.bool_)
    shed(*by_key(order, unit, bins.first_unit[-1]), bins.first_unit, length, over, limit, away)
    pool = order[away[order]]
    group = np.repeat(np.arange(len(bins.first) - 1), np.diff(bins.first))
    items, start = by_key(pool, group[bin_of], len(bins.first) - 1)
    # Bins with more room than they shall use look fuller than they are.
    hidden = np.maximum(-np.minimum(most * bins.size, ENDLESS).astype(np.int64) - over, 0)
    over += hidden
    none = np.zeros(len(bins.first) - 1, np.int64)
    fill(items, start, length, over, bins.first, bin_of)
    even(*by_key(pool, bin_of, len(over)), length, over, bins.first, none, bin_of)
    over -= hidden
    for longest in (limit, ENDLESS):
        if over.max() > 0:
            short = order[length[order] <= longest]
            even(*by_key(short, bin_of, len(over)), length, over, bins.first, none, bin_of)
    return bin_of


def _water_level(room: np.ndarray, size: np.ndarray, volume: float) -> float:
    """The least x such that bins that take up to x per rank, and no more than their room, take `volume` together."""
    depth = np.maximum(room, 0) / size
    order = np.argsort(depth)
    depth, size = depth[order], size[order]
    below = np.cumsum(depth * size) - depth * size
    above = np.cumsum(size[::-1])[::-1]
    taken = below + depth * above
    at = min(int(np.searchsorted(taken, volume)), len(depth) - 1)
    return float((volume - below[at]) / above[at])


def _totals(key: np.ndarray, length: np.ndarray, keys: int) -> np.ndarray:
    return np.bincount(key, length, keys).astype(np.int64)
