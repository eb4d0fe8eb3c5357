"""Allocate devices to the stages of one chain, encoders before the LLM, that is cut anywhere, for least time.

Every stage has as many devices, and cuts make the stages take equally long (OmniBal 4.2).
Candidates have a lower bound, and those that it leaves are cut and simulated, best first. A chain
of one stage is a mesh for all modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from mmjax.config import Layout, Unit
from mmjax.planning.allocate import Allocation, makespan, orders_1f1b
from mmjax.planning.partition import partition
from mmjax.planning.tower_options import (
    FEW_STAGES,
    LLM_STAGES,
    Problem,
    StageWork,
    TowerCosts,
    link_bandwidth,
    link_seconds,
    list_splits,
    stage_work,
)

SIMULATIONS = 100  # at most


class Chain(NamedTuple):
    """Towers on a layout that are not cut yet: in which numbers of stages, and seconds of a step at least in each."""

    towers: tuple[str, ...]
    costs: list[TowerCosts]
    layout: Layout  # of a stage
    microbatches: int
    shares: np.ndarray  # of a step's work, of a rank in a microbatch, by tower
    stages: np.ndarray
    bounds: np.ndarray


def allocate_chain(problem: Problem, simulations: int = SIMULATIONS) -> Allocation | None:
    """Find the chain of two stages or more with the least simulated seconds of a step; None where none fits."""
    chains = list(list_chains(problem))
    best: Allocation | None = None
    for bound, chain, stages in _by_bound(chains, simulations):
        if best is not None and bound >= best.seconds:
            break
        allocated = simulate_chain(problem, chain, stages)
        if allocated is not None and (best is None or allocated.seconds < best.seconds):
            best = allocated
    return best


def allocate_meshes(
    problem: Problem, count: int, simulations: int = SIMULATIONS
) -> list[Allocation]:
    """Find meshes of all devices for all modules, the fastest `count` that differ in more than `data` and `fsdp`."""
    problem = problem._replace(microbatches=(1, *problem.microbatches))
    fastest: dict[Layout, Allocation] = {}
    for bound, chain, stages in _by_bound(
        list(list_chains(problem, of_one_stage=True)), simulations
    ):
        kind = replace(chain.layout, data=1, fsdp=1)
        if kind in fastest and bound >= fastest[kind].seconds:
            continue
        allocated = simulate_chain(problem, chain, stages)
        if allocated is not None and (
            kind not in fastest or allocated.seconds < fastest[kind].seconds
        ):
            fastest[kind] = allocated
    return sorted(fastest.values(), key=lambda allocation: allocation.seconds)[:count]


def _by_bound(chains: Sequence[Chain], simulations: int) -> Iterator[tuple[float, Chain, int]]:
    """Yield the chains with their numbers of stages, by rising bound."""
    if not chains:
        return
    bounds = np.concatenate([chain.bounds for chain in chains])
    owners = np.repeat(np.arange(len(chains)), [len(chain.bounds) for chain in chains])
    stages = np.concatenate([chain.stages for chain in chains])
    for n in np.argsort(bounds, kind="stable")[:simulations]:
        yield float(bounds[n]), chains[owners[n]], int(stages[n])


def list_chains(problem: Problem, of_one_stage: bool = False) -> Iterator[Chain]:
    """Yield every layout of a stage, with each number of microbatches. of_one_stage: those of all devices."""
    devices = problem.cluster.devices
    towers = (*problem.encoders, "llm", *problem.generators)
    for costs, way in _list_layouts(problem, towers):
        llm = costs[towers.index("llm")]
        width = math.gcd(*(of_tower.width for of_tower in costs))
        layers = sum(len(of_tower.forward) for of_tower in costs)
        for data, fsdp, *_ in list_splits(problem.cluster, way, problem.ranks, width, llm.experts):
            layout = replace(way, data=int(data), fsdp=int(fsdp))
            if of_one_stage and layout.ranks * llm.devices != devices:
                continue
            stages = np.arange(
                2, min(LLM_STAGES, layers, devices // (layout.ranks * llm.devices)) + 1
            )
            if of_one_stage:
                stages = np.ones(1, np.int64)
            elif way != Layout(tensor=way.tensor):
                stages = stages[np.isin(stages, FEW_STAGES)]
            if not len(stages):
                continue
            for count in (n for n in problem.microbatches if n * layout.ranks <= problem.samples):
                # Encoders split the rows of a rank's devices that they do not share.
                ranks = [
                    layout.ranks * _spread(way, c).context if c is not llm else layout.ranks
                    for c in costs
                ]
                shares = np.array(
                    [
                        c.lengths.row_share(count, np.array(n))
                        for c, n in zip(costs, ranks, strict=True)
                    ]
                )
                path = sum(
                    share * (c.forward + c.backward).sum()
                    for share, c in zip(shares, costs, strict=True)
                )
                sent = (
                    share * min(c.passed, c.tokens or c.passed)
                    for share, c in zip(shares, costs, strict=True)
                )
                edge = min(sent) / link_bandwidth(problem.cluster)
                shards = [layout.fsdp * layout.expert * _spread(way, c).context for c in costs]
                update = (
                    sum(c.update.sum() / n for c, n in zip(costs, shards, strict=True)) / stages
                )
                # A stage is busy with all microbatches behind one's passes through the stages
                # before it, so each may take 1 / count of what is left of the step. What is sent
                # last is not waited for.
                sends = (count - 1) / count * (2 * stages - 2) * edge
                bounds = (path + sends) / (1 - (1 - 1 / count) ** stages) + update
                yield Chain(
                    towers=towers,
                    costs=costs,
                    layout=layout,
                    microbatches=count,
                    shares=shares,
                    stages=stages,
                    bounds=bounds,
                )


def _list_layouts(
    problem: Problem, towers: Sequence[str]
) -> Iterator[tuple[list[TowerCosts], Layout]]:
    """Yield the layouts of the LLM with the costs of all towers on them: encoders are cut like it, or split rows."""
    for llm in problem.towers["llm"]:
        for encoders in (
            ("tensor", "data") if llm.layout.tensor > 1 and len(towers) > 1 else ("tensor",)
        ):
            tensor = llm.layout.tensor if encoders == "tensor" else 1
            costs = [
                llm
                if tower == "llm"
                else next((c for c in problem.towers[tower] if c.layout.tensor == tensor), None)
                for tower in towers
            ]
            if None not in costs:
                yield costs, replace(llm.layout, encoders=encoders)


def _spread(layout: Layout, costs: TowerCosts) -> Layout:
    """Return the layout as a tower has it: one whose rows are split by `tensor` has its shards there too."""
    context = layout.context * layout.tensor // costs.layout.tensor
    return replace(layout, tensor=costs.layout.tensor, context=context)


def simulate_chain(problem: Problem, chain: Chain, stages: int) -> Allocation | None:
    """Cut a chain and simulate a step; None where it does not fit."""
    costs, layout = chain.costs, chain.layout
    count = chain.microbatches
    # layers of towers, and the end of all
    firsts = [0, *accumulate(len(of_tower.forward) for of_tower in costs)]
    links = [
        link_seconds(problem.cluster, _spread(layout, of_tower), of_tower.experts)
        for of_tower in costs
    ]
    shards = [layout.fsdp * layout.expert * _spread(layout, of_tower).context for of_tower in costs]

    def in_tower(places: np.ndarray, number: int) -> np.ndarray:
        return np.clip(places - firsts[number], 0, len(costs[number].forward))

    def work(ends: np.ndarray) -> StageWork:
        of_towers = []
        for n, of_tower in enumerate(costs):
            way = np.array([[chain.shares[n], shards[n], *links[n]]], np.float64)
            of_towers.append(stage_work(of_tower, in_tower(ends, n), *way.T))
        return StageWork._make(sum(column)[0] for column in zip(*of_towers, strict=True))

    # Sent where the chain is cut before a layer: activations of its tower, or tokens of the tower
    # before.
    passed = np.zeros(firsts[-1] + 1)
    for n, of_tower in enumerate(costs):
        passed[firsts[n] : firsts[n + 1]] = chain.shares[n] * of_tower.passed
        if n:
            split = layout.tensor // costs[n - 1].layout.tensor
            passed[firsts[n]] = chain.shares[n - 1] * max(
                split * costs[n - 1].tokens, of_tower.tokens
            )
    layers = work(np.arange(firsts[-1] + 1))
    state = np.append(0.0, np.cumsum(layers.state))
    # What a rank sends to each, on one mesh to those of its node, and what it receives of each.
    longest = sum(of_tower.lengths.longest(count) * of_tower.tokens for of_tower in costs)
    on_node = max(1, problem.cluster.per_node // (layout.context * layout.tensor))
    exchanged = (
        2
        * (layout.ranks if stages > 1 else min(layout.ranks, on_node))
        * problem.exchanged_items
        * longest
    )
    first_of_llm = firsts[chain.towers.index("llm")]

    def memory(
        stage: int, first: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return the bytes with as much computed again as can be, those that it frees, and layers of each tower."""
        in_flight = min(count, stages - stage)
        peak = np.where((first <= first_of_llm) & (first_of_llm < end), exchanged, 0.0)
        minimum = np.where(first < end, state[end] - state[first], np.inf) + in_flight * (
            passed[first] + passed[end]
        )
        freed = np.zeros(np.shape(minimum))
        counts = []
        for n, of_tower in enumerate(costs):
            counts.append(np.maximum(in_tower(end, n) - in_tower(first, n), 0))
            in_flight_share = in_flight * chain.shares[n] * counts[n]
            minimum = minimum + in_flight_share * of_tower.saved[-1]
            freed = freed + in_flight_share * (of_tower.saved[0] - of_tower.saved[-1])
            peak = np.maximum(
                peak, (counts[n] > 0) * chain.shares[n] * of_tower.peak[stage == stages - 1]
            )
        return minimum + peak, freed, counts

    seconds = sum(layers.passes())
    cuts = partition(seconds, stages, passed)
    if any(
        memory(n, *ends)[0] > problem.room
        for n, ends in enumerate(pairwise((0, *cuts, firsts[-1])))
    ):
        tables = np.arange(firsts[-1])[:, None], np.arange(firsts[-1] + 1)
        try:
            allowed = np.stack([memory(n, *tables)[0] <= problem.room for n in range(stages)])
            cuts = partition(seconds, stages, passed, fits=allowed)
        except ValueError:
            return None
    ends = np.array((0, *cuts, firsts[-1]))
    again = np.zeros(stages)
    for stage in range(stages):
        smallest, freed, counts = memory(stage, ends[stage], ends[stage + 1])
        part = np.clip((problem.room - smallest) / max(freed, 1.0), 0, 1)
        for of_tower, share, n in zip(costs, chain.shares, counts, strict=True):
            saved = of_tower.saved[-1] + part * (of_tower.saved[0] - of_tower.saved[-1])
            again[stage] += share * n * np.interp(saved, of_tower.saved[::-1], of_tower.again[::-1])
    of_stages = work(ends)
    orders = orders_1f1b(np.arange(stages)[::-1].copy(), count)
    edges = np.array(list(pairwise(range(stages))), np.int64).reshape(-1, 2)
    delays = passed[ends[1:-1]] / link_bandwidth(problem.cluster)
    names = [
        f"{tower}.{n}"
        for tower, of_tower in zip(chain.towers, costs, strict=True)
        for n in _numbers(of_tower)
    ]
    unit = Unit(
        **vars(layout),
        modules=chain.towers,
        pipeline=stages,
        cuts=tuple(names[cut] for cut in cuts),
    )
    total = makespan(*orders, *of_stages.passes(again), edges, delays, count) + of_stages.tail()
    return Allocation({"all": unit}, count, float(total))


def _numbers(costs: TowerCosts) -> range:
    return range(len(costs.forward))
