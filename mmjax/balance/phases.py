"""Place each sample and item of a step so that ranks are equal in every phase (OrchMLLM sections 5, 6).

OrchMLLM balances each phase on its own, after which nearly every encoder output travels to the rank
of its sample. With enough samples a rank that is not needed: an item is encoded on the rank of its
sample, and samples are placed by all their costs at once, the LLM's first. That is near-linear in
samples and ranks and the same on every process, so shapes need no word between processes. Only
where it leaves an encoder uneven do items move, and only within their node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.balance.item_moves import spread_in_nodes
from mmjax.balance.lpt import lpt
from mmjax.balance.node_deal import by_leading_encoder, deal_in_rounds
from mmjax.balance.parts import LLM
from mmjax.balance.vector_lpt import ALL_ALIKE, LLM_FIRST, even_everywhere, longest_first_in_blocks


@dataclass(frozen=True)
class Costs:
    """Costs of a step's samples and their items, in any unit, one for all phases.

    sample: float64 `[n, phases]`, phase 0 is the LLM, an encoder's column is the sum of its items.
    item_sample: int64 `[m]`; item_phase: int32 `[m]`, 1 and on; item_cost: float64 `[m]`.
    item_tokens: int64 `[m]`, LLM tokens that travel where an item is encoded on another rank than
    its sample's. Raises ValueError.
    """

    sample: np.ndarray
    item_sample: np.ndarray
    item_phase: np.ndarray
    item_cost: np.ndarray
    item_tokens: np.ndarray

    def __post_init__(self) -> None:
        if self.sample.ndim != 2 or self.sample.shape[1] < 1:
            raise ValueError("sample costs must be [n, phases], with the LLM's in the first column")
        sizes = {
            len(self.item_sample),
            len(self.item_phase),
            len(self.item_cost),
            len(self.item_tokens),
        }
        if len(sizes) > 1:
            raise ValueError("items must have one sample, phase, cost and number of tokens each")
        n, phases = self.sample.shape
        if np.any((self.item_sample < 0) | (self.item_sample >= n)):
            raise ValueError(f"an item belongs to a sample outside of 0 .. {n - 1}")
        if np.any((self.item_phase <= LLM) | (self.item_phase >= phases)):
            raise ValueError(f"an item belongs to a phase outside of 1 .. {phases - 1}")
        for name, value in (
            ("sample cost", self.sample),
            ("item cost", self.item_cost),
            ("token", self.item_tokens),
        ):
            if not (value.min(initial=0) >= 0 and value.max(initial=0) < np.inf):
                raise ValueError(f"a {name} is negative or not finite")

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def phases(self) -> int:
        """Return the number of phases: the LLM and the encoders."""
        return self.sample.shape[1]


def costs_of(
    llm_cost: np.ndarray,
    item_sample: np.ndarray,
    item_phase: np.ndarray,
    item_cost: np.ndarray,
    item_tokens: np.ndarray,
    phases: int,
) -> Costs:
    """Build the costs of samples whose encoder columns are summed from their items. llm_cost: `[n]`, items `[m]`."""
    n = len(llm_cost)
    # One number for each pair (sample, phase), so that one bincount sums all: with 3 phases, sample
    # 2's audio is 2 * 3 + 2 = 8.
    flat = np.bincount(
        np.asarray(item_sample, np.int64) * phases + item_phase, item_cost, n * phases
    )
    sample = flat.reshape(n, phases)
    # Items are of phases from 1 on, so column 0 was left empty.
    sample[:, LLM] = llm_cost
    return Costs(
        sample=sample,
        item_sample=np.ascontiguousarray(item_sample, np.int64),
        item_phase=np.ascontiguousarray(item_phase, np.int32),
        item_cost=np.ascontiguousarray(item_cost, np.float64),
        item_tokens=np.ascontiguousarray(item_tokens, np.int64),
    )


# ranks that samples are placed on longest first, before they are exchanged between all ranks
_BLOCK = 8
_ROUNDING = 1e-6  # of a number of units
# an encoder's phase whose fullest rank has this share more than the least possible is good enough;
# of the LLM's, three quarters of it
_TOLERANCE = 0.001
# what it costs, as a part of the step's time, to send as many tokens between ranks as the encoders
# make
EXCHANGE = 0.01
MIN_GAIN = 0.002  # of the step's time, that a plan must save to be worth leaving the start
_WORTH_MOVING = 0.004  # of the step's time, that an exchange of an encoder's outputs must save
# of the step's time, that ranks may wait before samples are also placed without putting the LLM
# first
_POOR = 0.1
_LLM_LATER = 0.05  # of the step's time, that must be saved for that


@dataclass(frozen=True)
class PhasePlan:
    """sample_rank: int32 `[n]`, where the LLM runs; item_rank: int32 `[m]`, where the item's encoder does.

    width: int64 `[phases - 1]`, tokens that one rank sends to another one at most, per encoder; 0 =
    nothing travels.
    """

    sample_rank: np.ndarray
    item_rank: np.ndarray
    width: np.ndarray


def place_in_order(costs: Costs, ranks: int) -> PhasePlan:
    """Place samples as they come, equal counts on every rank, items with their sample: the baseline of balancing."""
    _check_ranks(ranks, ranks)
    return _at_home(costs, ranks_in_order(len(costs), ranks))


def ranks_in_order(samples: int, ranks: int) -> np.ndarray:
    """Return the rank of each sample as they come, equal counts on every rank, int32 `[n]`."""
    # 7 samples on 3 ranks: 0 0 0 1 1 2 2.
    return (np.arange(samples) * ranks // max(samples, 1)).astype(np.int32)


def place_by_llm(costs: Costs, ranks: int) -> PhasePlan:
    """Place samples by LPT on the LLM's cost alone, items with their sample: balancing that knows of no encoder."""
    _check_ranks(ranks, ranks)
    return _at_home(costs, _lpt(costs.sample[:, LLM], ranks))


def place_each_phase(costs: Costs, ranks: int) -> PhasePlan:
    """Place every phase by LPT on its own, items on any rank: OrchMLLM sections 5.1 and 6, packed costs.

    The width is that of an all-to-all over all ranks.
    """
    _check_ranks(ranks, ranks)
    sample_rank = _lpt(costs.sample[:, LLM], ranks)
    item_rank = np.zeros(len(costs.item_sample), np.int32)
    width = np.zeros(costs.phases - 1, np.int64)
    for p in range(1, costs.phases):
        items = np.flatnonzero(costs.item_phase == p)
        # Without regard to where its sample is: of r ranks, about 1 / r of the items stay with it
        # by chance.
        item_rank[items] = _lpt(costs.item_cost[items], ranks)
        width[p - 1] = largest_transfer(
            sample_rank[costs.item_sample[items]], item_rank[items], costs.item_tokens[items], ranks
        )
    return PhasePlan(sample_rank, item_rank, width)


def place_jointly(
    costs: Costs,
    ranks: int,
    ranks_per_node: int | None = None,
    widths: Sequence[Sequence[int]] | None = None,
    start: np.ndarray | None = None,
) -> PhasePlan:
    """Place samples by all costs at once, the LLM's first, over all ranks; move items within their node if needed.

    Node k has ranks k * ranks_per_node and on, the last one may be smaller; default: all ranks are
    one node. widths: for each encoder, the sizes that a padded all-to-all may have, tokens from a
    rank to another, ascending from 0;
    default: nothing moves. All nodes have the same width. start: int32 `[n]`, kept where the plan
    gains too little. Raises ValueError. In place of OrchMLLM sections 5 and 6.
    """
    size = _node_sizes(ranks, ranks_per_node)
    widths = _check_widths(widths, costs.phases)
    mean = costs.sample.sum(0) / ranks
    # A phase without any cost is 0 on every rank, whatever it is divided by.
    mean[mean == 0] = 1.0

    def planned(llm_weight: tuple[float, float]) -> tuple[PhasePlan, float]:
        sample_rank = _place_samples(costs, ranks, mean, llm_weight)
        plan = _move_items(costs, sample_rank, size, mean, widths)
        return plan, step_time(costs, plan, ranks, ranks_per_node)

    plan, time = planned(LLM_FIRST)
    if time > 1 + _POOR:  # few samples, or a long one
        alternative, alternative_time = planned(ALL_ALIKE)
        if alternative_time < time * (1 - _LLM_LATER):
            plan = alternative
            time = alternative_time
    # Samples leave the start only where the plan saves at least `MIN_GAIN`.
    if start is not None:
        # An estimate is not worth moving samples for when it promises next to nothing: the start
        # needs no exchange at all.
        start_plan = _at_home(costs, np.asarray(start, np.int32))
        if time > step_time(costs, start_plan, ranks, ranks_per_node) * (1 - MIN_GAIN):
            return start_plan
    return plan


def cost_per_rank(costs: Costs, plan: PhasePlan, ranks: int) -> np.ndarray:
    """Sum each rank's cost of each phase, float64 `[ranks, phases]`, in the unit of the costs."""
    flat = np.bincount(
        plan.item_rank.astype(np.int64) * costs.phases + costs.item_phase,
        costs.item_cost,
        ranks * costs.phases,
    )
    cost = flat.reshape(ranks, costs.phases)
    cost[:, LLM] = np.bincount(plan.sample_rank, costs.sample[:, LLM], ranks)
    return cost


def largest_transfer(
    source: np.ndarray, destination: np.ndarray, tokens: np.ndarray, ranks: int
) -> int:
    """Return the most tokens that items take from one rank to another. source, destination, tokens: int `[m]`."""
    away = np.flatnonzero(source != destination)
    # Only pairs that occur are numbered: a table of all would be ranks^2 long.
    _, pair = np.unique(
        source[away].astype(np.int64) * ranks + destination[away], return_inverse=True
    )
    return int(np.bincount(pair, tokens[away]).max(initial=0))


def candidate_widths(costs: Costs) -> list[tuple[int, ...]]:
    """List the widths that each encoder's all-to-all may have: 0, and parts and multiples of the longest item."""
    longest = int(costs.item_tokens.max(initial=1))
    # From an eighth of the longest item to twice that, each twice the one before.
    return [(0, *sorted({max(1, longest * k // 16) for k in (2, 4, 8, 16, 32)}))] * (
        costs.phases - 1
    )


def wire(width: np.ndarray, ranks: int, ranks_per_node: int | None = None) -> np.ndarray:
    """Count tokens that leave ranks in padded all-to-alls over the ranks of each node, int64 `[phases - 1]`."""
    size = _node_sizes(ranks, ranks_per_node)
    # Each rank of a node sends a chunk to each other one, full or not: 8 ranks send 8 * 7 chunks.
    return np.asarray(width, np.int64) * int((size * (size - 1)).sum())


def step_time(
    costs: Costs,
    plan: PhasePlan,
    ranks: int,
    ranks_per_node: int | None = None,
) -> float:
    """Estimate the step's time, 1 = all ranks equal and nothing sent: phases end when their fullest rank does."""
    cost = cost_per_rank(costs, plan, ranks)
    # Phases follow each other, so their waits add up, each weighted by its part of the step.
    fullest = cost.max(0) / np.maximum(cost.mean(0), np.finfo(float).tiny)
    sent = wire(plan.width, ranks, ranks_per_node).sum() / max(int(costs.item_tokens.sum()), 1)
    return float(_share(costs) @ fullest + EXCHANGE * sent)


def _place_samples(
    costs: Costs, ranks: int, mean: np.ndarray, llm_weight: tuple[float, float]
) -> np.ndarray:
    """Deal samples to blocks, then exchange, near-linear in samples and ranks: the rank of each, int32 `[n]`."""
    rank = np.zeros(len(costs), np.int64)
    if ranks == 1 or len(costs) == 0:
        return rank.astype(np.int32)
    # 20 ranks are blocks of 8, 8 and 4. Longest first compares all ranks for each sample, so in
    # blocks its time is linear.
    size = np.diff(np.append(np.arange(0, ranks, _BLOCK), ranks))
    block = deal_in_rounds(costs.sample, size)
    order = by_leading_encoder(
        costs.sample, block, np.broadcast_to(mean, (len(size), costs.phases))
    )
    start = np.concatenate([[0], np.cumsum(np.bincount(block, minlength=len(size)))])
    relative = np.ascontiguousarray((costs.sample / mean).T)
    longest_first_in_blocks(relative, order, start, size, rank)
    # No placement gets below the longest sample, nor below what whole units force.
    ceiling = np.maximum(relative.max(1), [_whole_units(of_phase) for of_phase in relative])
    even_everywhere(relative, ceiling, _TOLERANCE, ranks, llm_weight, rank)
    return rank.astype(np.int32)


def _whole_units(cost: np.ndarray) -> float:
    """Bound the fullest rank's load from below where all costs `[n]` are multiples of one unit, such as tiles: >= 1.

    The mean over ranks is 1. The multiple is that of the smallest difference between two costs, if
    there is one.
    """
    values = np.unique(cost)
    # Costs 0.3, 0.6 and 1.2 have differences 0.3, 0.3 and 0.6, hence a unit of 0.3. Units above 1,
    # the mean, need no bound: the longest sample is one.
    unit = np.diff(values, prepend=0.0)[values > 0].min(initial=1.0)
    multiples = values / unit
    if np.abs(multiples - np.rint(multiples)).max() > _ROUNDING:
        return 1.0
    # The fullest rank has at least the mean, 1, and a whole number of units: of units of 0.3 it has
    # 4, which is 1.2.
    return max(float(np.ceil(1 / unit - _ROUNDING) * unit), 1.0)


def _move_items(
    costs: Costs,
    sample_rank: np.ndarray,
    size: np.ndarray,
    mean: np.ndarray,
    widths: Sequence[Sequence[int]],
) -> PhasePlan:
    """Choose for each encoder the width that makes the step shortest. size: int64 `[nodes]`, ranks of each."""
    ranks = int(size.sum())
    share = _share(costs)
    plan = _at_home(costs, sample_rank)
    item_rank = plan.item_rank.astype(np.int64)
    chosen = plan.width
    # What one token more of width costs: it is sent between all pairs of ranks of every node.
    per_token = EXCHANGE * int((size * (size - 1)).sum()) / max(int(costs.item_tokens.sum()), 1)
    for p in range(1, costs.phases):
        items = np.flatnonzero(costs.item_phase == p)
        cost = costs.item_cost[items] / mean[p]
        home_rank = item_rank[items]
        load = np.bincount(home_rank, cost, ranks)
        goal = max(1 + _TOLERANCE, float(cost.max(initial=0)))
        # Nothing may move, or nothing needs to.
        if len(widths[p - 1]) == 1 or load.max() <= goal:
            continue
        node = np.repeat(np.arange(len(size)), size)[home_rank]
        # By node, and within a node by falling cost: the order that the kernels want.
        order = np.lexsort((-cost, node))
        items, cost, home_rank, tokens = (
            items[order],
            cost[order],
            home_rank[order],
            costs.item_tokens[items[order]],
        )
        start = np.concatenate([[0], np.cumsum(np.bincount(node, minlength=len(size)))])
        # Even with all items free to go anywhere LPT gets no lower, so moves need not try.
        goal = max(goal, float(_fullest(cost, ranks)))
        # What the phase takes as it is, less what an exchange must save to be worth compiling and
        # running.
        min_time = share[p] * load.max() - _WORTH_MOVING
        for width in widths[p - 1][1:]:
            rank = home_rank.copy()
            new_load = load.copy()
            spread_in_nodes(start, size, home_rank, cost, tokens, width, goal, rank, new_load)
            time = share[p] * new_load.max() + per_token * width
            if time < min_time:
                min_time = time
                item_rank[items] = rank
                chosen[p - 1] = width
            # A wider exchange would only send more padding.
            if new_load.max() <= goal:
                break
    return PhasePlan(sample_rank, item_rank.astype(np.int32), chosen)


def _fullest(cost: np.ndarray, ranks: int) -> float:
    """Return the fullest rank's load of items that LPT deals to any ranks."""
    load = np.zeros(ranks)
    lpt(cost, np.argsort(-cost, kind="stable"), np.zeros(len(cost), np.int32), load)
    return float(load.max())


def _share(costs: Costs) -> np.ndarray:
    """Return each phase's part of all cost, float64 `[phases]`."""
    total = costs.sample.sum(0)
    return total / max(total.sum(), np.finfo(float).tiny)


def _at_home(costs: Costs, sample_rank: np.ndarray) -> PhasePlan:
    return PhasePlan(
        sample_rank, sample_rank[costs.item_sample], np.zeros(costs.phases - 1, np.int64)
    )


def _lpt(cost: np.ndarray, ranks: int) -> np.ndarray:
    rank = np.zeros(len(cost), np.int32)
    lpt(cost, np.argsort(-cost, kind="stable"), rank, np.zeros(ranks))
    return rank


def _node_sizes(ranks: int, ranks_per_node: int | None) -> np.ndarray:
    per_node = ranks if ranks_per_node is None else ranks_per_node
    _check_ranks(ranks, per_node)
    return np.diff(np.append(np.arange(0, ranks, per_node), ranks))


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
