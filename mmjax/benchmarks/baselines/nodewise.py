"""For comparison only: node-wise rearrangement as the paper has it (OrchMLLM section 5.2.2, algorithm 3), and ours.

The paper takes a finished rearrangement and gives its batches to the nodes anew, by an integer
linear programme that minimises what the most loaded rank sends to other nodes. `balance_nodewise`
chooses the node of each item before its rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from scipy.optimize import Bounds as VariableBounds
from scipy.optimize import LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_matrix, csr_matrix, hstack, kron, vstack

from mmjax.balance.lpt import longest_first, lpt, polish


def sum_by_key(key: np.ndarray, length: np.ndarray, keys: int) -> np.ndarray:
    """Sum the lengths that have each key, int64 `[keys]`."""
    # Float sums of whole numbers are exact up to 2^53.
    return np.bincount(key, length, keys).astype(np.int64)


# Nodes are filled to less than ranks are, since ranks of a full node cannot all be full: parts of
# the tolerance, tried in this order until the ranks fit.
_MARGINS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Bounds:
    """Bound any assignment with this largest cost from below, in tokens between nodes: sent, received a rank; total."""

    sent: float
    received: float
    total: int


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
    `largest_cost`, provided that each has some tens of items. Within a node too only what a rank
    has too much of moves.
    """
    length = np.ascontiguousarray(length, np.int64)
    source = np.ascontiguousarray(source, np.int64)
    largest = largest_cost(length, ranks, tolerance)
    node_of_rank = np.arange(ranks) // ranks_per_node
    size = np.bincount(node_of_rank)
    one_group = np.zeros(len(size), np.int64)
    order = longest_first(length)
    best_rank = source
    smallest = sum_by_key(source, length, ranks).max(initial=0)
    for margin in _MARGINS:
        level = largest - int(margin * (largest - length.sum() / ranks))
        home = node_of_rank[source]
        node = home.copy()
        _level(length, order, source, node, one_group, level * size)
        # Arrivals go to the ranks of their node, which then receive alike.
        rank = source.copy()
        received = np.zeros(ranks, np.int64)
        arrived = order[(node != home)[order]]
        _fill(length, arrived, node[arrived], node_of_rank, received, rank)
        staying = order[(node == home)[order]]
        _level(length, staying, source, rank, node_of_rank, largest - received)
        cost = sum_by_key(rank, length, ranks).max()
        if cost < smallest:
            best_rank, smallest = rank, cost
        if cost <= largest:
            break
    return best_rank.astype(np.int32)


@njit(cache=True)
def _level(length, order, unit, bin_of, group, room):
    """Move what bins have above their room to other bins of their group, then exchange; writes `bin_of`.

    order: the movable items, longest first; unit: int64 [n], the rank each starts on, of which a
    bin sheds alike; group: int64 [bins], ascending.
    """
    excess = -room
    for item in order:
        excess[bin_of[item]] += length[item]
    units = np.zeros(len(room), np.int64)
    last_unit = -1
    by_unit = order[np.argsort(unit[order], kind="mergesort")]
    for item in by_unit:
        units[bin_of[item]] += unit[item] != last_unit
        last_unit = unit[item]
    away = np.zeros(len(length), np.bool_)
    for spread in (True, False):
        # Each unit sheds its part of what is left, and then any unit whatever it takes.
        remaining_units = units.copy()
        quota = 0
        last_unit = -1
        for item in by_unit:
            b = bin_of[item]
            if unit[item] != last_unit:
                last_unit = unit[item]
                quota = excess[b] // remaining_units[b] if spread else excess[b]
                remaining_units[b] -= 1
            if not away[item] and length[item] <= quota:
                away[item] = True
                quota -= length[item]
                excess[b] -= length[item]
    pool = order[away[order]]
    _fill(length, pool, group[bin_of[pool]], group, excess, bin_of)
    # What moves anyway is exchanged first, then the shortest of what has stayed.
    for movable in (pool, order[-(len(order) // 4) :], order[-(len(order) // 2) :], order):
        if excess.max() > 0:
            _exchange(length, movable, group, excess, bin_of)


@njit(cache=True)
def _fill(length, pool, group_of_item, group, load, bin_of):
    """Put each item of the pool, longest first, into the bin of its group with the least load; writes the last two."""
    by_group = pool[np.argsort(group_of_item, kind="mergesort")]
    end = 0
    for g, count in enumerate(np.bincount(group_of_item, minlength=group[-1] + 1)):
        members = by_group[end : end + count]
        end += count
        bins = slice(np.searchsorted(group, g), np.searchsorted(group, g + 1))
        chosen = np.zeros(count, np.int64)
        lpt(length[members], np.arange(count), chosen, load[bins])
        bin_of[members] = bins.start + chosen


@njit(cache=True)
def _exchange(length, movable, group, excess, bin_of):
    """Exchange items between bins of a group until none has an excess or nothing helps; writes the last two."""
    group_of_item = group[bin_of[movable]]
    by_group = movable[np.argsort(group_of_item, kind="mergesort")]
    end = 0
    for g, count in enumerate(np.bincount(group_of_item, minlength=group[-1] + 1)):
        members = by_group[end : end + count]
        end += count
        bins = slice(np.searchsorted(group, g), np.searchsorted(group, g + 1))
        if excess[bins].max() > 0:
            chosen = bin_of[members] - bins.start
            polish(length[members], np.arange(count), chosen, excess[bins], 0)
            bin_of[members] = bins.start + chosen


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
    size = np.bincount(np.arange(ranks) // ranks_per_node)
    node = np.asarray(source) // ranks_per_node
    room = largest * size - sum_by_key(node, np.asarray(length, np.int64), len(size))
    surplus = int(-np.minimum(room, 0).sum())
    sent = float(max((-room / size).max(), 0))
    return Bounds(sent, _water_level(room, size, surplus), surplus)


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
