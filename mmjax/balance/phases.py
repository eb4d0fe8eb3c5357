"""Where each sample and item of a step is processed, so that ranks are equal in every phase (OrchMLLM sections 5, 6).

OrchMLLM balances each phase on its own, after which nearly every encoder output travels to the rank of its sample. With
enough samples a rank that is not needed: an item is encoded on the rank of its sample, and samples are placed by all
their costs at once. Only where a rank can't be relieved like that do items move, and only within their node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.balance.lpt import lpt
from mmjax.balance.node_deal import by_leading_encoder, deal_evenly, longest_parts, node_means
from mmjax.balance.parts import LLM
from mmjax.balance.phase_costs import Costs
from mmjax.balance.vector_lpt import balance, balance_nodes, spread_items

# How much an encoder matters while samples are placed, tried in this order: what is left to items later.
_ENCODER_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.0)


@dataclass(frozen=True)
class Aim:
    """What a joint plan is for.

    tolerance: a phase whose fullest rank has this share more than the least possible is good enough.
    exchange: what it costs, as a part of the step's time, to send as many tokens between ranks as the encoders make.
    least_gain: a plan that saves no more than this part of the step's time is not worth leaving the start.
    share: float64 `[phases]`, each phase's part of the step's time when ranks are equal; default: its part of all cost.
    """

    tolerance: float = 0.002
    exchange: float = 0.005
    least_gain: float = 0.002
    share: np.ndarray | None = None


@dataclass(frozen=True)
class PhasePlan:
    """sample_rank: int32 `[n]`, where the LLM runs; item_rank: int32 `[m]`, where the item's encoder does.

    width: int64 `[phases - 1]`, tokens that one rank sends to another one at most, per encoder; 0 = nothing travels.
    """

    sample_rank: np.ndarray
    item_rank: np.ndarray
    width: np.ndarray


def place_in_order(costs: Costs, ranks: int) -> PhasePlan:
    """Samples as they come, equal counts on every rank; items with their sample. What balancing is measured against."""
    _check_ranks(ranks, ranks)
    return _at_home(costs, ranks_in_order(len(costs), ranks))


def ranks_in_order(samples: int, ranks: int) -> np.ndarray:
    """The rank of each sample as they come, equal counts on every rank, int32 `[n]`."""
    return (np.arange(samples) * ranks // max(samples, 1)).astype(np.int32)


def place_by_llm(costs: Costs, ranks: int) -> PhasePlan:
    """Samples by LPT on the LLM's cost alone, items with their sample: balancing that knows of no encoder."""
    _check_ranks(ranks, ranks)
    return _at_home(costs, _lpt(costs.sample[:, LLM], ranks))


def place_apart(costs: Costs, ranks: int) -> PhasePlan:
    """Every phase by LPT on its own, items on any rank: OrchMLLM sections 5.1 and 6, packed costs.

    The width is that of an all-to-all over all ranks.
    """
    _check_ranks(ranks, ranks)
    sample_rank = _lpt(costs.sample[:, LLM], ranks)
    item_rank, width = np.zeros(len(costs.item_sample), np.int32), np.zeros(costs.phases - 1, np.int64)
    for p in range(1, costs.phases):
        items = np.flatnonzero(costs.item_phase == p)
        item_rank[items] = _lpt(costs.item_cost[items], ranks)
        width[p - 1] = widest(sample_rank[costs.item_sample[items]], item_rank[items], costs.item_tokens[items], ranks)
    return PhasePlan(sample_rank, item_rank, width)


def place_jointly(
    costs: Costs,
    ranks: int,
    ranks_per_node: int | None = None,
    widths: Sequence[Sequence[int]] | None = None,
    start: np.ndarray | None = None,
    aim: Aim | None = None,
) -> PhasePlan:
    """Samples by all costs at once, first to nodes, then to their ranks; items move within the node if they must.

    Node k has ranks k * ranks_per_node and on, the last one may be smaller; default: all ranks are one node. widths:
    for each encoder, the sizes that a padded all-to-all may have, tokens from a rank to another, ascending from 0;
    default: nothing moves. Nodes may choose different widths; the plan's is the largest. start: int32 `[n]`, kept where
    the plan gains too little. Raises ValueError. In place of OrchMLLM sections 5 and 6.
    """
    aim = aim or Aim()
    node = deal_to_nodes(costs, ranks, ranks_per_node, aim.tolerance)
    size = _node_sizes(ranks, ranks_per_node)
    widths = _check_widths(widths, costs.phases)
    plan = _plan_nodes(costs, node, size, widths, aim)
    if start is not None:
        kept = _at_home(costs, np.asarray(start, np.int32))
        before, after = (step_time(costs, at, ranks, ranks_per_node, aim) for at in (kept, plan))
        if after > before * (1 - aim.least_gain):
            return kept
    return plan


def deal_to_nodes(
    costs: Costs, ranks: int, ranks_per_node: int | None = None, tolerance: float = Aim.tolerance
) -> np.ndarray:
    """The node of each sample, int32 `[n]`, the same on every process that knows the costs.

    Samples alike in their encoders are dealt in rounds, the heaviest of a round for the LLM to the node that has least
    of it; nodes that still differ by half of the tolerance exchange samples. Raises ValueError.
    """
    return deal_evenly(costs.sample, _node_sizes(ranks, ranks_per_node), tolerance)


def plan_node(
    costs: Costs, ranks: int, widths: Sequence[Sequence[int]] | None = None, aim: Aim | None = None
) -> PhasePlan:
    """The plan of one node's own samples (`Costs.take` of what is dealt to it), its ranks numbered from 0.

    `place_jointly` does the same for all nodes. So a process may plan its own node alone, where nodes need not agree on
    a width: it is given, or nothing moves.
    """
    _check_ranks(ranks, ranks)
    node = np.zeros(len(costs), np.int32)
    return _plan_nodes(costs, node, np.array([ranks]), _check_widths(widths, costs.phases), aim or Aim())


def cost_per_rank(costs: Costs, plan: PhasePlan, ranks: int) -> np.ndarray:
    """What each rank executes of each phase, float64 `[ranks, phases]`, in the unit of the costs."""
    flat = np.bincount(
        plan.item_rank.astype(np.int64) * costs.phases + costs.item_phase, costs.item_cost, ranks * costs.phases
    )
    cost = flat.reshape(ranks, costs.phases)
    cost[:, LLM] = np.bincount(plan.sample_rank, costs.sample[:, LLM], ranks)
    return cost


def widest(source: np.ndarray, destination: np.ndarray, tokens: np.ndarray, ranks: int) -> int:
    """The most tokens that items take from one rank to another. source, destination, tokens: int `[m]`."""
    away = np.flatnonzero(source != destination)
    _, pair = np.unique(source[away].astype(np.int64) * ranks + destination[away], return_inverse=True)
    return int(np.bincount(pair, tokens[away]).max(initial=0))


def usual_widths(costs: Costs) -> list[tuple[int, ...]]:
    """For each encoder, widths that an all-to-all may have: 0, and parts and multiples of the longest item."""
    longest = int(costs.item_tokens.max(initial=1))
    return [(0, *sorted({max(1, longest * k // 16) for k in (2, 4, 8, 16, 32)}))] * (costs.phases - 1)


def wire(width: np.ndarray, ranks: int, ranks_per_node: int | None = None) -> np.ndarray:
    """Tokens that leave ranks in padded all-to-alls over the ranks of each node, int64 `[phases - 1]`."""
    size = _node_sizes(ranks, ranks_per_node)
    return np.asarray(width, np.int64) * int((size * (size - 1)).sum())


def step_time(
    costs: Costs, plan: PhasePlan, ranks: int, ranks_per_node: int | None = None, aim: Aim | None = None
) -> float:
    """The step's estimated time, 1 = all ranks equal and nothing sent: phases end when their fullest rank does."""
    aim = aim or Aim()
    cost = cost_per_rank(costs, plan, ranks)
    fullest = cost.max(0) / np.maximum(cost.mean(0), np.finfo(float).tiny)
    sent = wire(plan.width, ranks, ranks_per_node).sum() / max(int(costs.item_tokens.sum()), 1)
    return float(_share(costs, aim) @ fullest + aim.exchange * sent)


@dataclass(frozen=True)
class _Node:
    """One node with few samples: relative costs as in `vector_lpt`, and each encoder's items.

    samples: `[phases, n]`. items: per encoder the items' numbers, costs and tokens. goal, share: `[phases]`.
    """

    samples: np.ndarray
    items: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    ceiling: np.ndarray
    goal: np.ndarray
    share: np.ndarray
    tokens: int


def _plan_nodes(
    costs: Costs, node: np.ndarray, size: np.ndarray, widths: Sequence[Sequence[int]], aim: Aim
) -> PhasePlan:
    """The plan of samples that have been dealt to nodes; what a node does depends on its own samples alone."""
    first = np.cumsum(size) - size
    mean = node_means(costs.sample, node, size)
    longest = longest_parts(
        costs.sample[:, LLM], node, node[costs.item_sample], costs.item_phase, costs.item_cost, *mean.shape
    )
    ceiling = np.maximum(longest / mean, 1.0)
    order = by_leading_encoder(costs.sample, node, mean)
    start = np.concatenate([[0], np.cumsum(np.bincount(node, minlength=len(size)))])
    rank = np.zeros(len(costs), np.int32)
    reached = balance_nodes(costs.sample, order, start, size, mean, ceiling, aim.tolerance, rank)
    rank += first[node].astype(np.int32)
    item_rank, width = rank[costs.item_sample], np.zeros(costs.phases - 1, np.int64)
    for k in np.flatnonzero(~reached):
        own = np.flatnonzero(node == k)
        taken, items = costs.take(own)
        plan = _search(taken, int(size[k]), mean[k], ceiling[k], widths, aim)
        rank[own], item_rank[items] = first[k] + plan.sample_rank, first[k] + plan.item_rank
        width = np.maximum(width, plan.width)
    return PhasePlan(rank, item_rank, width)


def _search(
    costs: Costs, ranks: int, mean: np.ndarray, ceiling: np.ndarray, widths: Sequence[Sequence[int]], aim: Aim
) -> PhasePlan:
    """One node where samples alone do not reach the goal: the less encoders matter for them, the more items move.

    The best of several tries by estimated time. What no item can relieve is the LLM, so encoders matter less and less.
    """
    node = _node_of(costs, ranks, mean, ceiling, aim)
    order = by_leading_encoder(costs.sample, np.zeros(len(costs), np.int32), mean[None])
    best, least = None, np.inf
    for weight in _weights(node.share):
        rank, load = balance(node.samples, order, np.ones(ranks), weight, node.ceiling, node.goal)
        plan, time = _move_items(costs, node, rank, load, widths, aim)
        if time < least:
            best, least = plan, time
        if least <= node.share @ node.goal:
            break
    assert best is not None
    return best


def _weights(share: np.ndarray) -> list[np.ndarray]:
    """How much each phase matters while samples are placed, `[phases]` each, in the order to try."""
    less = [np.full(len(share), encoders) for encoders in _ENCODER_WEIGHTS]
    for weight in less:
        weight[LLM] = 1.0
    return [*less, share / max(share.max(), np.finfo(float).tiny)]


def _node_of(costs: Costs, ranks: int, mean: np.ndarray, ceiling: np.ndarray, aim: Aim) -> _Node:
    """A node whose goal, per phase, is what balancing this phase alone reaches, or the tolerance if that is more."""
    items = [np.flatnonzero(costs.item_phase == p) for p in range(1, costs.phases)]
    relative = [costs.item_cost[of] / mean[p] for p, of in enumerate(items, 1)]
    samples = np.ascontiguousarray((costs.sample / mean).T)
    goal = ceiling * (1 + aim.tolerance)
    for p, cost in enumerate((samples[LLM], *relative)):
        longest_first = np.argsort(-cost, kind="stable")
        one = np.ones(1)
        _, load = balance(cost[None], longest_first, np.ones(ranks), one, ceiling[p : p + 1], goal[p : p + 1])
        goal[p] = max(goal[p], load.max())
    tokens = [costs.item_tokens[of] for of in items]
    total = max(int(costs.item_tokens.sum()), 1)
    return _Node(samples, list(zip(items, relative, tokens, strict=True)), ceiling, goal, _share(costs, aim), total)


def _move_items(
    costs: Costs, node: _Node, rank: np.ndarray, load: np.ndarray, widths: Sequence[Sequence[int]], aim: Aim
) -> tuple[PhasePlan, float]:
    """The plan with the width that serves each encoder best, and its estimated time; 1 = all ranks equal."""
    ranks = load.shape[1]
    time = node.share[LLM] * load[LLM].max()
    item_rank, chosen = rank[costs.item_sample].astype(np.int32), np.zeros(costs.phases - 1, np.int64)
    for p, (items, cost, tokens) in enumerate(node.items, 1):
        home, least = rank[costs.item_sample[items]], np.inf
        for width in widths[p - 1]:
            at, after = home.copy(), load[p].copy()
            spread_items(home, cost, tokens, width, node.goal[p], at, after)
            needed = node.share[p] * after.max() + aim.exchange * ranks * (ranks - 1) * width / node.tokens
            if needed < least:
                least, item_rank[items], chosen[p - 1] = needed, at, width
            if after.max() <= node.goal[p]:
                break
        time += least
    return PhasePlan(rank.astype(np.int32), item_rank, chosen), float(time)


def _share(costs: Costs, aim: Aim) -> np.ndarray:
    if aim.share is not None:
        return np.asarray(aim.share, np.float64)
    total = costs.sample.sum(0)
    return total / max(total.sum(), np.finfo(float).tiny)


def _at_home(costs: Costs, sample_rank: np.ndarray) -> PhasePlan:
    return PhasePlan(sample_rank, sample_rank[costs.item_sample], np.zeros(costs.phases - 1, np.int64))


def _lpt(cost: np.ndarray, ranks: int) -> np.ndarray:
    rank = np.zeros(len(cost), np.int32)
    lpt(cost, np.argsort(-cost, kind="stable"), rank, np.zeros(ranks))
    return rank


def _node_sizes(ranks: int, ranks_per_node: int | None) -> np.ndarray:
    each = ranks if ranks_per_node is None else ranks_per_node
    _check_ranks(ranks, each)
    return np.diff(np.append(np.arange(0, ranks, each), ranks))


def _check_ranks(ranks: int, ranks_per_node: int) -> None:
    if ranks < 1 or ranks_per_node < 1:
        raise ValueError(f"{ranks} ranks, {ranks_per_node} a node: at least one of each is needed")


def _check_widths(widths: Sequence[Sequence[int]] | None, phases: int) -> Sequence[Sequence[int]]:
    if widths is None:
        return [(0,)] * (phases - 1)
    if len(widths) != phases - 1:
        raise ValueError(f"widths for {len(widths)} encoders, there are {phases - 1}")
    for allowed in widths:
        if len(allowed) == 0 or allowed[0] != 0 or np.any(np.diff(allowed) <= 0):
            raise ValueError(f"widths {list(allowed)}: they must ascend from 0")
    return widths
