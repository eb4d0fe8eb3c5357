"""Dealing samples to nodes so that all nodes have the same of every phase, before each node places them on its ranks.

Only what stays inside a node is free of the network between nodes (OrchMLLM section 5.2). `cost` is
float64 `[n, phases]`, the LLM's first; `size` int64 `[nodes]`, how many ranks each has; `mean`
float64 `[nodes, phases]`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from mmjax.balance.vector_lpt import even

_SHARE = 0.5  # of the tolerance, that nodes may have above the mean
_VALUES = 1 << 20  # values that a sort tells apart


def deal_evenly(cost: np.ndarray, size: np.ndarray, tolerance: float) -> np.ndarray:
    """Deal samples to nodes in rounds, then exchange from nodes above half of the tolerance: int32 `[n]`."""
    node = deal_in_rounds(cost, size)
    if len(size) == 1 or len(cost) == 0:
        return node
    mean = node_means(cost, np.zeros_like(node), size.sum(keepdims=True))
    # 1 is what a rank has on average; `even` divides by each node's number of ranks.
    relative = np.stack([column / m for column, m in zip(cost.T, mean[0], strict=True)])
    ones = np.ones(cost.shape[1])
    even(relative, size.astype(np.float64), ones, ones, ones * (1 + _SHARE * tolerance), node)
    return node


def deal_in_rounds(cost: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Deal samples to nodes in rounds: the node of each, int32 `[n]`.

    Samples alike in their encoders are dealt in rounds, the heaviest of a round for the LLM to the
    node that has least of it.
    """
    node = np.zeros(len(cost), np.int32)
    if len(size) == 1 or len(cost) == 0:
        return node
    # All samples as one node with all ranks: `node` is still 0 everywhere.
    mean = node_means(cost, node, size.sum(keepdims=True))
    order = by_leading_encoder(cost, node, mean)
    start = _rounds(size, len(cost))
    llm = cost[order, 0]
    # The round is the group, and the LLM's cost x, squeezed into 0 .. 1 by x / (mean + x), the
    # value.
    heaviest_first = _sorted_by(
        np.repeat(np.arange(len(start) - 1), np.diff(start)), llm / (mean[0, 0] + llm)
    )
    _deal(llm[heaviest_first], order[heaviest_first], start, size, node)
    return node


def by_leading_encoder(cost: np.ndarray, node: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Sort samples by node, then by the encoder that they cost most of, longest first; those without any come last."""
    return _sorted_by(*_lead(cost, node, mean))


@njit(cache=True)
def node_means(cost, node, size):
    """Average each node's cost over its ranks in each phase, float64 [nodes, phases]; 1 where there is nothing."""
    mean = np.zeros((len(size), cost.shape[1]))
    for s in range(len(cost)):
        for p in range(cost.shape[1]):
            mean[node[s], p] += cost[s, p]
    for k in range(len(size)):
        for p in range(cost.shape[1]):
            mean[k, p] = mean[k, p] / size[k] if mean[k, p] > 0 else 1.0
    return mean


def _sorted_by(group: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Sort indices by group `[n]`, then by falling value `[n]` in 0 .. 1, to about one in a million, stably."""
    # Key = (group, falling value, index) from the high bits to the low: with bits = 3, the index is
    # key & 0b111. Enough bits for the index of every sample.
    bits = max(len(group) - 1, 1).bit_length()
    key = (group * _VALUES + ((1.0 - value) * (_VALUES - 1)).astype(np.int64)) << bits
    # NumPy sorts plain numbers with SIMD
    return np.sort(key + np.arange(len(group))) & ((1 << bits) - 1)


@njit(cache=True)
def _lead(cost, node, mean):
    """Return the sort keys of `by_leading_encoder`: a group int64 [n] and a value in 0 .. 1 that falls, float64 [n]."""
    n, phases = cost.shape
    group = np.empty(n, np.int64)
    value = np.empty(n)
    for s in range(n):
        k = node[s]
        # Stands for no encoder, and sorts behind all of them.
        lead = phases
        max_cost = 0.0
        for p in range(1, phases):
            relative = cost[s, p] / mean[k, p]
            if relative > max_cost:
                lead = p
                max_cost = relative
        if lead == phases:
            max_cost = cost[s, 0] / mean[k, 0]
        group[s] = k * phases + lead - 1
        # Monotone from 0 .. inf to 0 .. 1, as `_sorted_by` wants it.
        value[s] = max_cost / (1 + max_cost)
    return group, value


@njit(cache=True)
def _rounds(size, n):
    """Find where each round of a deal begins, int64 [rounds + 1]: each node gets one sample, a smaller one at times."""
    # A round has at least one sample, that of the largest node, so there are at most n rounds.
    start = np.zeros(n + 2, np.int64)
    position = rounds = 0
    largest = size.max()
    # A node with fewer ranks than the largest sits out some rounds, so counts stay in proportion to
    # ranks.
    while position < n:
        for k in range(len(size)):
            position += _takes_part(size[k], largest, rounds)
        rounds += 1
        start[rounds] = min(position, n)
    return start[: rounds + 1]


@njit(cache=True)
def _deal(cost, sample, start, size, node):
    """Deal each round's heaviest sample to the node that has least, by one cost [n]; writes node.

    cost, sample: rounds as `_rounds` cuts them, each heaviest first.
    """
    load = np.zeros(len(size))
    among = np.empty(len(size), np.int64)
    largest = size.max()
    for r in range(len(start) - 1):
        count = 0
        for k in range(len(size)):
            if _takes_part(size[k], largest, r):
                among[count] = k
                count += 1
        # The heaviest sample of the round goes to the lightest node, the next one to the next.
        lightest = np.argsort(load[among[:count]])
        for i in range(start[r + 1] - start[r]):
            k = among[lightest[i]]
            position = start[r] + i
            node[sample[position]] = k
            load[k] += cost[position] / size[k]


@njit(cache=True)
def _takes_part(size, largest, rounds):
    """Return 1 in as many of the rounds as this node's ranks are of the largest one's, else 0."""
    # The difference of floor((r + 1) s / l) and floor(r s / l): with s = 3 of l = 8 it is 1 in
    # rounds 2, 5 and 7.
    return 1 if size == largest else (rounds + 1) * size // largest - rounds * size // largest
