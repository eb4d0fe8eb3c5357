"""For comparison only: the paper's node-wise rearrangement (OrchMLLM section 5.2.2, algorithm 3), and its optimum.

It takes a finished rearrangement and gives its batches to the nodes anew, by an integer linear
programme that minimises what the most loaded rank sends to other nodes. `mmjax.balance.node_deal`
chooses nodes before it balances.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds as VariableBounds
from scipy.optimize import LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_matrix, csr_matrix, hstack, kron, vstack

from mmjax.balance.lpt import longest_first
from mmjax.benchmarks.baselines.moves import (
    ENDLESS,
    by_key,
    even,
    fill,
    polish_bins,
    shed,
    sum_by_key,
)

# Nodes are filled to less than ranks are, since ranks of a full node cannot all be full: parts of
# the tolerance, tried in this order until the ranks fit.
_MARGINS = (0.25, 0.5, 0.75)
# of the room that nodes have to spare, this share lets the emptiest ones receive less
_SPREAD = 0.9


@dataclass(frozen=True)
class Bounds:
    """Bound any assignment with this largest cost from below, in tokens between nodes: sent, received a rank; total."""

    sent: float
    received: float
    total: int


@dataclass(frozen=True)
class _Bins:
    """Hold the bins that costs are evened between: nodes of the cluster, or ranks of a node.

    first_unit: int64 `[b + 1]`, the ranks of each bin. first: int64 `[groups + 1]`, the bins that
    exchange items.
    """

    first_unit: np.ndarray
    first: np.ndarray

    @property
    def size(self) -> np.ndarray:
        return np.diff(self.first_unit)


def balance_nodewise(
    length: np.ndarray,
    source: np.ndarray,
    ranks: int,
    ranks_per_node: int,
    tolerance: float = 0.002,
) -> np.ndarray:
    """Choose the rank of each item, int32 `[n]`, so that costs are equal and few tokens travel between nodes.

    length: int `[n]`, the packed cost of each item; source: int `[n]`, the rank it starts on. Node
    k has ranks k * ranks_per_node and on; the last one may be smaller. No rank costs more than
    `largest_cost`, provided that each has some tens of items: then every node can be divided that
    finely. Sent and received tokens are spread over the ranks of a node, and within a node too only
    what a rank has too much of moves. OrchMLLM section 5.2.2.
    """
    length = np.ascontiguousarray(length, np.int64)
    source = np.ascontiguousarray(source, np.int64)
    largest = largest_cost(length, ranks, tolerance)
    order = longest_first(length)
    best_rank = source
    smallest = sum_by_key(source, length, ranks).max(initial=0)
    for margin in _MARGINS:
        level = largest - int(margin * (largest - length.sum() / ranks))
        rank = _balance(
            length, source, order, ranks, ranks_per_node, largest, level, margin == _MARGINS[-1]
        )
        cost = sum_by_key(rank, length, ranks).max()
        if cost < smallest:
            best_rank, smallest = rank, cost
        if cost <= largest:
            break
    return best_rank.astype(np.int32)


def largest_cost(length: np.ndarray, ranks: int, tolerance: float) -> int:
    """Return what a rank may cost: the mean and this share of it, but no less than ceil(mean) or the longest item."""
    total = int(np.sum(length))
    return max(
        int(total / ranks * (1 + tolerance)), -(-total // ranks), int(np.max(length, initial=0))
    )


def traffic_bounds(
    length: np.ndarray, source: np.ndarray, ranks: int, ranks_per_node: int, largest: int
) -> Bounds:
    """Bound inter-node traffic from below while no rank costs more than `largest`, whatever the algorithm.

    A node must send what it has above its ranks' `largest`; of its received tokens, the emptiest
    nodes can be spared as much as all others have room for. Both are divided by the ranks of the
    node.
    """
    nodes = _nodes(ranks, ranks_per_node)
    load = sum_by_key(
        np.asarray(source) // ranks_per_node, np.asarray(length, np.int64), len(nodes.size)
    )
    room = largest * nodes.size - load
    surplus = int(-np.minimum(room, 0).sum())
    return Bounds(
        float(max((-room / nodes.size).max(), 0)), _water_level(room, nodes.size, surplus), surplus
    )


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
    """Choose the rank of each item, nodes filled to `level` and ranks to `largest`, int64 `[n]`.

    Where costs do not come out even, only the last try moves what a node received from the ranks
    that share it equally.
    """
    nodes = _nodes(ranks, ranks_per_node)
    source_node = source // ranks_per_node
    excess = sum_by_key(source_node, length, len(nodes.size)) - level * nodes.size
    room = np.maximum(-excess, 0)
    surplus = np.maximum(excess, 0).sum()
    max_received = _water_level(room, nodes.size, surplus + (1 - _SPREAD) * (room.sum() - surplus))
    # A longer item would alone make its rank the one that receives most.
    limit = max(int(max_received), 1)
    node = _relieve(length, order, source, source_node, nodes, excess, limit, max_received)

    stays = node == source_node
    node_ranks = _Bins(np.arange(ranks + 1), nodes.first_unit)
    arrivals = order[~stays[order]]
    staying = order[stays[order]]
    rank, received = _spread_arrivals(length, arrivals, node, source, node_ranks)
    excess = received + sum_by_key(source[staying], length[staying], ranks) - largest
    rank = _relieve(length, staying, source, rank, node_ranks, excess, ENDLESS, np.inf)
    excess = sum_by_key(rank, length, ranks) - largest
    for movable in (staying, order) if last else (staying,):
        if excess.max() > 0:
            polish_bins(*by_key(movable, rank, ranks), length, excess, node_ranks.first, rank)
    return rank


def _nodes(ranks: int, ranks_per_node: int) -> _Bins:
    """Return all nodes as bins of one group."""
    first = np.append(np.arange(0, ranks, ranks_per_node), ranks)
    return _Bins(first, np.array([0, len(first) - 1]))


def _spread_arrivals(
    length: np.ndarray, arrived: np.ndarray, node: np.ndarray, source: np.ndarray, within: _Bins
) -> tuple[np.ndarray, np.ndarray]:
    """Spread what nodes receive over their ranks; return the rank of each item, int64 `[n]`, and each rank's receipts.

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
    excess: np.ndarray,
    limit: int,
    max_received: float,
) -> np.ndarray:
    """Move what bins have too much of to the other bins of their group; return each item's bin, int64 `[n]`.

    order: the movable items, longest first; unit: `[n]`, the rank each starts on; excess: `[b]`,
    cost above what a bin may have. Items over `limit` move only where it must be; no bin receives
    over `max_received` per rank if others can.
    """
    bin_of = bin_of.copy()
    excess = excess.copy()
    away = np.zeros(len(length), np.bool_)
    shed(*by_key(order, unit, bins.first_unit[-1]), bins.first_unit, length, excess, limit, away)
    pool = order[away[order]]
    group_of_bin = np.repeat(np.arange(len(bins.first) - 1), np.diff(bins.first))
    items, start = by_key(pool, group_of_bin[bin_of], len(bins.first) - 1)
    # Bins with more room than they shall use look fuller than they are.
    hidden = np.maximum(-np.minimum(max_received * bins.size, ENDLESS).astype(np.int64) - excess, 0)
    excess += hidden
    no_excess = np.zeros(len(bins.first) - 1, np.int64)
    fill(items, start, length, excess, bins.first, bin_of)
    even(*by_key(pool, bin_of, len(excess)), length, excess, bins.first, no_excess, bin_of)
    excess -= hidden
    for longest in (limit, ENDLESS):
        if excess.max() > 0:
            movable = order[length[order] <= longest]
            even(
                *by_key(movable, bin_of, len(excess)), length, excess, bins.first, no_excess, bin_of
            )
    return bin_of


def _water_level(room: np.ndarray, size: np.ndarray, volume: float) -> float:
    """Find the least x such that bins that take up to x per rank, within their room, take `volume` together."""
    depth = np.maximum(room, 0) / size
    order = np.argsort(depth)
    depth = depth[order]
    size = size[order]
    below = np.cumsum(depth * size) - depth * size
    above = np.cumsum(size[::-1])[::-1]
    # Depths 1 and 3 of single ranks: the first level fills both to 1 (volume 2), the next the
    # second to 3 (volume 4).
    taken = below + depth * above
    segment = min(int(np.searchsorted(taken, volume)), len(depth) - 1)
    return float((volume - below[segment]) / above[segment])


@dataclass(frozen=True)
class Permutation:
    """batch_rank: int32 `[ranks]`, the rank that processes each batch. optimal: the solver proved it, in its time."""

    batch_rank: np.ndarray
    optimal: bool


def permute_batches(
    volume: np.ndarray, ranks_per_node: int, time_limit: float = 30.0
) -> Permutation:
    """Find the permutation of batches that minimises the largest rank's volume sent to other nodes.

    volume: `[ranks, ranks]`, tokens from each source rank to each batch. time_limit: seconds. The
    paper's x has a wrong shape; it is `[ranks, nodes]` here, x[j, k] = 1 where node k processes
    batch j. Out of time, the best permutation that was found, or the one with the least total
    volume, if that is better.
    """
    volume = np.asarray(volume, np.float64)
    ranks = len(volume)
    first = np.append(np.arange(0, ranks, ranks_per_node), ranks)
    guess = _least_total(volume, first)
    if len(first) == 2:
        return Permutation(np.arange(ranks, dtype=np.int32), True)
    x, optimal = _solve(volume, first, time_limit)
    node = (
        guess
        if x is None or _largest_sent(volume, guess, first) < _largest_sent(volume, x, first)
        else x
    )
    batch_rank = np.empty(ranks, np.int32)
    batch_rank[np.argsort(node, kind="stable")] = np.arange(ranks)
    return Permutation(batch_rank, optimal)


def _solve(
    volume: np.ndarray, first: np.ndarray, time_limit: float
) -> tuple[np.ndarray | None, bool]:
    """Solve algorithm 3 by HiGHS: the node of each batch, int64 `[ranks]`, or None where time ended before any."""
    ranks = len(volume)
    nodes = len(first) - 1
    # Variables: x row by row, then the largest volume. Sent by rank i of node k: sum_j V[i, j] * (1
    # - x[j, k]).
    source_node = np.repeat(np.arange(nodes), np.diff(first))
    source, batch = np.nonzero(volume)
    entry = (source, batch * nodes + source_node[source])
    not_sent = coo_matrix((-volume[source, batch], entry), (ranks, ranks * nodes))
    sent = hstack([not_sent, -np.ones((ranks, 1))])
    one_node = hstack(
        [kron(csr_matrix(np.eye(ranks)), np.ones((1, nodes))), csr_matrix((ranks, 1))]
    )
    full_nodes = hstack(
        [kron(np.ones((1, ranks)), csr_matrix(np.eye(nodes))), csr_matrix((nodes, 1))]
    )
    # each batch has one node, each node as many as it has ranks
    seats = np.append(np.ones(ranks), np.diff(first))
    solution = milp(
        np.append(np.zeros(ranks * nodes), 1.0),
        integrality=np.append(np.ones(ranks * nodes), 0),
        bounds=VariableBounds(0, np.append(np.ones(ranks * nodes), np.inf)),
        constraints=[
            LinearConstraint(sent.tocsr(), -np.inf, -volume.sum(1)),
            LinearConstraint(vstack([one_node, full_nodes]).tocsr(), seats, seats),
        ],
        options={"time_limit": time_limit},
    )
    if solution.x is None:
        return None, False
    return solution.x[:-1].reshape(ranks, nodes).argmax(1), solution.status == 0


def _least_total(volume: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Assign batches to nodes at the least total volume between nodes: one seat for each rank, int64 `[ranks]`."""
    within = np.add.reduceat(volume, first[:-1], axis=0)
    seat = np.repeat(np.arange(len(first) - 1), np.diff(first))
    batch, taken = linear_sum_assignment(within[seat].T, maximize=True)
    node = np.empty(len(seat), np.int64)
    node[batch] = seat[taken]
    return node


def _largest_sent(volume: np.ndarray, node: np.ndarray, first: np.ndarray) -> float:
    source_node = np.repeat(np.arange(len(first) - 1), np.diff(first))
    return float(np.where(source_node[:, None] != node, volume, 0).sum(1).max())


@dataclass(frozen=True)
class Traffic:
    """Tokens that leave their node. sent, received: int64 `[ranks]`."""

    sent: np.ndarray
    received: np.ndarray

    @property
    def total(self) -> int:
        """Sum the tokens of all ranks."""
        return int(self.sent.sum())


def volume(
    length: np.ndarray, source: np.ndarray, destination: np.ndarray, ranks: int
) -> np.ndarray:
    """Count tokens from rank to rank, int64 `[ranks, ranks]`: V of OrchMLLM section 5.2.2, rows are sources."""
    # Source and destination as one number; int64, since ranks^2 of 50,000 ranks exceeds int32.
    pair = source.astype(np.int64) * ranks + destination
    return sum_by_key(pair, length, ranks**2).reshape(ranks, ranks)


def inter_node(
    length: np.ndarray, source: np.ndarray, destination: np.ndarray, ranks: int, ranks_per_node: int
) -> Traffic:
    """Count tokens that each rank sends to, and receives from, other nodes. length, source, destination: int `[n]`.

    Node k has ranks k * ranks_per_node and on; the last one may be smaller.
    """
    leaves = np.flatnonzero(source // ranks_per_node != destination // ranks_per_node)
    length = length[leaves]
    return Traffic(
        sum_by_key(source[leaves], length, ranks), sum_by_key(destination[leaves], length, ranks)
    )
