"""Allocate devices to the stages of one chain, encoders before the LLM, that is cut anywhere, for least time.

Every stage has as many devices, and cuts make the stages take equally long (OmniBal 4.2). Candidates have a lower
bound, and those that it leaves are cut and simulated, best first. A chain of one stage is a mesh for all modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mmjax.config import Layout, Unit
from mmjax.planning.allocate import Allocation, makespan, orders_1f1b
from mmjax.planning.partition import partition
from mmjax.planning.tower_options import (
    FEW_STAGES,
    LLM_STAGES,
    SUMMED,
    Problem,
    TowerCosts,
    link_bandwidth,
    link_seconds,
    list_splits,
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

    def spread(self, tower: int) -> Layout:
        """Return the layout as a tower has it: one whose rows are split by `tensor` has its shards there too."""
        return _spread(self.layout, self.costs[tower])


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


def allocate_meshes(problem: Problem, count: int, simulations: int = SIMULATIONS) -> list[Allocation]:
    """Find meshes of all devices for all modules, the fastest `count` that differ in more than `data` and `fsdp`."""
    problem = problem._replace(microbatches=(1, *problem.microbatches))
    fastest: dict[Layout, Allocation] = {}
    for bound, chain, stages in _by_bound(list(list_chains(problem, of_one_stage=True)), simulations):
        kind = replace(chain.layout, data=1, fsdp=1)
        if kind in fastest and bound >= fastest[kind].seconds:
            continue
        allocated = simulate_chain(problem, chain, stages)
        if allocated is not None and (kind not in fastest or allocated.seconds < fastest[kind].seconds):
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
            stages = np.arange(2, min(LLM_STAGES, layers, devices // (layout.ranks * llm.devices)) + 1)
            if of_one_stage:
                stages = np.ones(1, np.int64)
            elif way != Layout(tensor=way.tensor):
                stages = stages[np.isin(stages, FEW_STAGES)]
            if not len(stages):
                continue
            for count in (n for n in problem.microbatches if n * layout.ranks <= problem.samples):
                # Encoders split the rows of a rank's devices that they do not share.
                ranks = [layout.ranks * _spread(way, c).context if c is not llm else layout.ranks for c in costs]
                shares = np.array([c.lengths.row_share(count, np.array(n)) for c, n in zip(costs, ranks, strict=True)])
                path = sum(share * (c.forward + c.backward).sum() for share, c in zip(shares, costs, strict=True))
                sent = (share * min(c.passed, c.tokens or c.passed) for share, c in zip(shares, costs, strict=True))
                edge = min(sent) / link_bandwidth(problem.cluster)
                shards = [layout.fsdp * layout.expert * _spread(way, c).context for c in costs]
                update = sum(c.update.sum() / n for c, n in zip(costs, shards, strict=True)) / stages
                # A stage is busy with all microbatches behind one's passes through the stages before it, so each may
                # take 1 / count of what is left of the step. What is sent last is not waited for.
                sends = (count - 1) / count * (2 * stages - 2) * edge
                bounds = (path + sends) / (1 - (1 - 1 / count) ** stages) + update
                yield Chain(towers, costs, layout, count, shares, stages, bounds)


def _list_layouts(problem: Problem, towers: Sequence[str]) -> Iterator[tuple[list[TowerCosts], Layout]]:
    """Yield the layouts of the LLM with the costs of all towers on them: encoders are cut like it, or split rows."""
    for llm in problem.towers["llm"]:
        for encoders in ("tensor", "data") if llm.layout.tensor > 1 and len(towers) > 1 else ("tensor",):
            tensor = llm.layout.tensor if encoders == "tensor" else 1
            costs = [
                llm if tower == "llm" else next((c for c in problem.towers[tower] if c.layout.tensor == tensor), None)
                for tower in towers
            ]
            if None not in costs:
                yield costs, replace(llm.layout, encoders=encoders)


def _spread(layout: Layout, costs: TowerCosts) -> Layout:
    context = layout.context * layout.tensor // costs.layout.tensor
    return replace(layout, tensor=costs.layout.tensor, context=context)


def simulate_chain(problem: Problem, chain: Chain, stages: int) -> Allocation | None:
    """Cut a chain and simulate a step; None where it does not fit."""
    costs = chain.costs
    count = chain.microbatches
    tower = np.repeat(np.arange(len(costs)), [len(of_tower.forward) for of_tower in costs])  # of every layer
    links = [link_seconds(problem.cluster, chain.spread(n), of_tower.experts) for n, of_tower in enumerate(costs)]
    gather, reduce = np.array(links)[tower].T
    share = chain.shares[tower]
    shards = np.array([chain.layout.fsdp * chain.layout.expert * chain.spread(n).context for n in range(len(costs))])
    layers = {name: np.concatenate([getattr(of_tower, name) for of_tower in costs]) for name in SUMMED}
    sharded = {name: layers[name] / shards[tower] for name in ("state", "gradients", "update")}
    launch = np.array([of_tower.launch for of_tower in costs])[tower]
    forward = share * layers["forward"] + launch[:, 0] + layers["cast_forward"] / shards[tower]
    backward = share * layers["backward"] + launch[:, 1] + layers["cast_backward"] / shards[tower]
    backward *= layers["backward"] > 0
    # Sent where the chain is cut before a layer: activations of its tower, or tokens of the tower before.
    passed = np.append(share * np.array([of_tower.passed for of_tower in costs])[tower], 0.0)
    for number in range(1, len(costs)):
        before = costs[number - 1]
        split = chain.layout.tensor // before.layout.tensor
        sent = chain.shares[number - 1] * max(split * before.tokens, costs[number].tokens)
        passed[np.argmax(tower == number)] = sent
    memory = _ChainMemory(problem, chain, stages, tower, sharded["state"], passed)
    cuts = partition(forward + backward, stages, passed)
    if any(memory.least_bytes(stage, ends) > problem.room for stage, ends in enumerate(_ends(cuts, tower))):
        try:
            allowed = np.stack([memory.least_bytes(stage) <= problem.room for stage in range(stages)])
            cuts = partition(forward + backward, stages, passed, fits=allowed)
        except ValueError:
            return None
    begins = np.array((0, *cuts))

    def by_stage(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, begins)

    again = np.array([memory.recomputation(problem.room, stage, ends) for stage, ends in enumerate(_ends(cuts, tower))])
    gathered, scattered = (by_stage(gather * layers[name]) for name in ("gathered", "scattered"))
    back = by_stage(backward)
    times = np.maximum(by_stage(forward), gathered), np.maximum(back + again, gathered + scattered) * (back > 0)
    edges = np.array(list(pairwise(range(stages))), np.int64).reshape(-1, 2)
    delays = passed[list(cuts)] / link_bandwidth(problem.cluster)
    seconds = makespan(*orders_1f1b(np.arange(stages)[::-1].copy(), count), *times, edges, delays, count)
    seconds += by_stage(2 * reduce * sharded["gradients"]).max() + by_stage(sharded["update"]).max()
    names = [
        f"{name}.{n}" for name, of_tower in zip(chain.towers, costs, strict=True) for n in range(len(of_tower.forward))
    ]
    unit = Unit(**vars(chain.layout), modules=chain.towers, pipeline=stages, cuts=tuple(names[cut] for cut in cuts))
    return Allocation({"all": unit}, count, float(seconds))


Ends = tuple[Any, Any]  # of a stage: first layer, and the one behind its last
ALL = (slice(None), slice(None))  # of all that there may be


def _ends(cuts: tuple[int, ...], tower: np.ndarray) -> list[Ends]:
    """Return the ends of every stage."""
    return list(pairwise((0, *cuts, len(tower))))


class _ChainMemory:
    """Memory of a device of the stages of a chain: float64 `[layers, layers + 1]` by first layer and end of a stage."""

    def __init__(
        self, problem: Problem, chain: Chain, stages: int, tower: np.ndarray, state: np.ndarray, passed: np.ndarray
    ) -> None:
        """tower: number of every layer's. state: its bytes. passed: sent before it."""
        self.costs = chain.costs
        self.shares = chain.shares
        self.stages = stages
        self.count = chain.microbatches
        first = np.arange(len(tower))[:, None]
        end = np.arange(len(tower) + 1)
        before = np.append(0.0, np.cumsum(state))
        self.state = np.where(end > first, before - before[:-1, None], np.inf)
        self.passed = passed + np.append(0.0, passed[1:-1])[:, None]
        # Layers of every tower between these ends.
        layers_before = np.stack([np.append(0, np.cumsum(tower == number)) for number in range(len(self.costs))])
        self.layers = np.maximum(layers_before[:, None] - layers_before[:, :-1, None], 0)
        # What a rank sends to each, and what it receives of each.
        longest = sum(of_tower.lengths.longest(self.count) * of_tower.tokens for of_tower in self.costs)
        first_of_llm = int(np.argmax(tower == chain.towers.index("llm")))
        # On one mesh, to those of its node.
        on_node = max(1, problem.cluster.per_node // (chain.layout.context * chain.layout.tensor))
        peers = chain.layout.ranks if stages > 1 else min(chain.layout.ranks, on_node)
        sent = 2 * peers * problem.exchanged_items * longest
        self.exchanged = np.where((first <= first_of_llm) & (first_of_llm < end), sent, 0.0)

    def _in_flight(self, stage: int) -> int:
        """Return as many microbatches as stages follow, and one."""
        return min(self.count, self.stages - stage)

    def _saved(self, stage: int, ends: Ends, policy: int) -> np.ndarray:
        """Return the bytes that layers save; policy 0: without remat, -1: with the most of it."""
        saved = self.shares * [of_tower.saved[policy] for of_tower in self.costs]
        return self._in_flight(stage) * np.tensordot(saved, self.layers[:, *ends], 1)

    def least_bytes(self, stage: int, ends: Ends = ALL) -> np.ndarray:
        """Return the bytes of a stage with as much computed again as can be."""
        peaks = self.exchanged[ends]
        for layers, share, of_tower in zip(self.layers, self.shares, self.costs, strict=True):
            peaks = np.maximum(peaks, (layers[ends] > 0) * share * of_tower.peak[stage == self.stages - 1])
        fixed = self.state[ends] + peaks + self._in_flight(stage) * self.passed[ends]
        return fixed + self._saved(stage, ends, -1)

    def recomputation(self, room: float, stage: int, ends: Ends) -> float:
        """Return the seconds in which a stage computes again what it has no room for."""
        spread = self._saved(stage, ends, 0) - self._saved(stage, ends, -1)
        part = np.clip((room - self.least_bytes(stage, ends)) / np.maximum(spread, 1.0), 0, 1)
        seconds = 0.0
        for layers, share, of_tower in zip(self.layers, self.shares, self.costs, strict=True):
            saved = of_tower.saved[-1] + part * (of_tower.saved[0] - of_tower.saved[-1])
            seconds += share * layers[ends] * np.interp(saved, of_tower.saved[::-1], of_tower.again[::-1])
        return seconds
