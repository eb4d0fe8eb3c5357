"""For comparison only: the paper's node-wise rearrangement, OrchMLLM section 5.2.2, algorithm 3.

It takes a finished rearrangement and gives its batches to the nodes anew, by an integer linear programme that
minimises what the most loaded rank sends to other nodes. `nodewise` chooses nodes before it balances and beats it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_matrix, csr_matrix, hstack, kron, vstack


@dataclass(frozen=True)
class Permutation:
    """batch_rank: int32 `[ranks]`, the rank that processes each batch. optimal: the solver proved it, in its time."""

    batch_rank: np.ndarray
    optimal: bool


def permute_batches(volume: np.ndarray, ranks_per_node: int, time_limit: float = 30.0) -> Permutation:
    """Find the permutation of batches that minimises the largest rank's volume sent to other nodes.

    volume: `[ranks, ranks]`, tokens from each source rank to each batch. time_limit: seconds. The paper's x has a wrong
    shape; it is `[ranks, nodes]` here, x[j, k] = 1 where node k processes batch j. Out of time, the best permutation
    that was found, or the one with the least total volume, if that is better.
    """
    volume = np.asarray(volume, np.float64)
    ranks = len(volume)
    first = np.append(np.arange(0, ranks, ranks_per_node), ranks)
    guess = _least_total(volume, first)
    if len(first) == 2:
        return Permutation(np.arange(ranks, dtype=np.int32), True)
    x, optimal = _solve(volume, first, time_limit)
    node = guess if x is None or _largest_sent(volume, guess, first) < _largest_sent(volume, x, first) else x
    batch_rank = np.empty(ranks, np.int32)
    batch_rank[np.argsort(node, kind="stable")] = np.arange(ranks)
    return Permutation(batch_rank, optimal)


def _solve(volume: np.ndarray, first: np.ndarray, time_limit: float) -> tuple[np.ndarray | None, bool]:
    """Solve algorithm 3 by HiGHS: the node of each batch, int64 `[ranks]`, or None where time ended before any."""
    ranks = len(volume)
    nodes = len(first) - 1
    # Variables: x row by row, then the largest volume. Sent by rank i of node k: sum_j V[i, j] * (1 - x[j, k]).
    source_node = np.repeat(np.arange(nodes), np.diff(first))
    source, batch = np.nonzero(volume)
    entry = (source, batch * nodes + source_node[source])
    not_sent = coo_matrix((-volume[source, batch], entry), (ranks, ranks * nodes))
    sent = hstack([not_sent, -np.ones((ranks, 1))])
    one_node = hstack([kron(csr_matrix(np.eye(ranks)), np.ones((1, nodes))), csr_matrix((ranks, 1))])
    full_nodes = hstack([kron(np.ones((1, ranks)), csr_matrix(np.eye(nodes))), csr_matrix((nodes, 1))])
    seats = np.append(np.ones(ranks), np.diff(first))  # each batch has one node, each node as many as it has ranks
    solution = milp(
        np.append(np.zeros(ranks * nodes), 1.0),
        integrality=np.append(np.ones(ranks * nodes), 0),
        bounds=Bounds(0, np.append(np.ones(ranks * nodes), np.inf)),
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
