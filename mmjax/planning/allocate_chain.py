"""Allocate devices to the stages of one chain, encoders before the LLM, that is cut anywhere, for least time.

Every stage has as many devices, and cuts make the stages take equally long (OmniBal 4.2). Candidates have a lower
bound, and those that it leaves are cut and simulated, best first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mmjax.planning.allocate import makespan
from mmjax.planning.partition import partition
from mmjax.planning.tower_options import LLM_STAGES, SUMMED, Problem, TowerCosts, link_bandwidth, list_splits

SIMULATIONS = 100  # at most


class ChainAllocation(NamedTuple):
    """Devices of every stage of a chain, where it is cut, and the simulated seconds of a step."""

    towers: tuple[str, ...]
    tensor: int
    data: int
    fsdp: int
    cuts: tuple[int, ...]  # first layers of its stages but the first, counted through all towers
    microbatches: int
    seconds: float


class Candidate(NamedTuple):
    """Stages of a chain that is not cut yet."""

    bound: float  # seconds of a step, at least
    towers: tuple[str, ...]
    costs: list[TowerCosts]
    shares: np.ndarray  # of a step's work, of a rank in a microbatch, by tower
    split: np.ndarray  # as `list_splits` lists them
    stages: int
    microbatches: int


def allocate_chain(problem: Problem, simulations: int = SIMULATIONS) -> ChainAllocation | None:
    """Find the chain of two stages or more with the least simulated seconds of a step; None where none fits."""
    best: ChainAllocation | None = None
    candidates = sorted(list_chains(problem), key=lambda candidate: candidate.bound)
    for candidate in candidates[:simulations]:
        if best is not None and candidate.bound >= best.seconds:
            break
        allocated = simulate_chain(problem, candidate)
        if allocated is not None and (best is None or allocated.seconds < best.seconds):
            best = allocated
    return best


def list_chains(problem: Problem) -> Iterator[Candidate]:
    """Yield every degree of tensor parallelism, split of ranks, number of stages and of microbatches."""
    devices = problem.cluster.devices
    encoders = (tower for tower in problem.towers if tower not in ("llm", problem.generator))
    towers = (*encoders, "llm", *(tower for tower in problem.towers if tower == problem.generator))
    for llm in problem.towers["llm"]:
        by_tower = [next((c for c in problem.towers[t] if c.tensor == llm.tensor), None) for t in towers]
        if None in by_tower:
            continue
        costs = [of_tower for of_tower in by_tower if of_tower is not None]
        layers = sum(len(of_tower.forward) for of_tower in costs)
        splits = list_splits(problem.cluster, llm.tensor, problem.ranks, math.gcd(*(c.width for c in costs)))
        for split in splits:
            ranks = split[0] * split[1]
            most_stages = min(LLM_STAGES, layers, int(devices // (llm.tensor * ranks)))
            for count in (n for n in problem.microbatches if n * ranks <= problem.samples):
                # A microbatch's rows are as long as its longest sample or item, padding included.
                shares = np.maximum(1 / (count * ranks), [of_tower.smallest[count] for of_tower in costs])
                path = sum(share * (c.forward + c.backward).sum() for share, c in zip(shares, costs, strict=True))
                sent = (share * min(c.passed, c.tokens or c.passed) for share, c in zip(shares, costs, strict=True))
                edge = min(sent) / link_bandwidth(problem.cluster)
                for stages in range(2, most_stages + 1):
                    update = sum(c.update.sum() for c in costs) / (stages * split[1])
                    # A stage is busy with all microbatches behind one's passes through the stages before it, so each
                    # may take 1 / count of what is left of the step. What is sent last is not waited for.
                    sends = (count - 1) / count * (2 * stages - 2) * edge
                    bound = (path + sends) / (1 - (1 - 1 / count) ** stages) + update
                    yield Candidate(float(bound), towers, costs, shares, split, stages, count)


def simulate_chain(problem: Problem, candidate: Candidate) -> ChainAllocation | None:
    """Cut a chain and simulate a step; None where it does not fit."""
    _, towers, costs, shares, (data, fsdp, gather, reduce), stages, count = candidate
    tower = np.repeat(np.arange(len(costs)), [len(of_tower.forward) for of_tower in costs])  # of every layer
    share = shares[tower]
    layers = {name: np.concatenate([getattr(of_tower, name) for of_tower in costs]) for name in SUMMED}
    launch = np.array([of_tower.launch for of_tower in costs])[tower]
    forward = share * layers["forward"] + launch[:, 0] + layers["cast_forward"] / fsdp
    backward = share * layers["backward"] + launch[:, 1] + layers["cast_backward"] / fsdp
    backward *= layers["backward"] > 0
    # Sent where the chain is cut before a layer: activations of its tower, or tokens of the tower before.
    passed = np.append(share * np.array([of_tower.passed for of_tower in costs])[tower], 0.0)
    for number in range(1, len(costs)):
        passed[np.argmax(tower == number)] = shares[number - 1] * max(costs[number - 1].tokens, costs[number].tokens)
    state = np.append(0.0, np.cumsum(layers["state"]))
    memory = _ChainMemory(candidate, tower, state, passed, problem.exchanged_items)
    cuts = partition(forward + backward, stages, passed)
    if any(memory.least_bytes(stage, ends) > problem.room for stage, ends in enumerate(_ends(cuts, tower))):
        try:
            allowed = np.stack([memory.least_bytes(stage) <= problem.room for stage in range(stages)])
            cuts = partition(forward + backward, stages, passed, fits=allowed)
        except ValueError:
            return None
    begins = np.array((0, *cuts))
    again = np.array([memory.recomputation(problem.room, stage, ends) for stage, ends in enumerate(_ends(cuts, tower))])
    sums = {name: np.add.reduceat(values, begins) for name, values in layers.items()}
    of_stage = np.maximum(np.add.reduceat(forward, begins), gather * sums["gathered"])
    back = np.add.reduceat(backward, begins)
    back = np.maximum(back + again, gather * (sums["gathered"] + sums["scattered"])) * (back > 0)
    edges = np.append(passed[list(cuts)], 0.0) / link_bandwidth(problem.cluster)
    following = np.append(np.arange(1, stages), -1)
    seconds = makespan(of_stage, back, following, edges, np.arange(stages)[::-1].copy(), count)
    seconds += (2 * reduce * sums["gradients"] / fsdp).max() + (sums["update"] / fsdp).max()
    return ChainAllocation(towers, costs[0].tensor, int(data), int(fsdp), cuts, count, float(seconds))


Ends = tuple[Any, Any]  # of a stage: first layer, and the one behind its last
ALL = (slice(None), slice(None))  # of all that there may be


def _ends(cuts: tuple[int, ...], tower: np.ndarray) -> list[Ends]:
    """Return the ends of every stage."""
    return list(pairwise((0, *cuts, len(tower))))


class _ChainMemory:
    """Memory of a device of the stages of a chain: float64 `[layers, layers + 1]` by first layer and end of a stage."""

    def __init__(
        self, candidate: Candidate, tower: np.ndarray, state: np.ndarray, passed: np.ndarray, exchanged_items: int
    ) -> None:
        """tower: number of every layer's. state: bytes before every layer, unsharded. passed: sent before it."""
        _, towers, self.costs, self.shares, (data, fsdp, *_), self.stages, self.count = candidate
        first, end = np.arange(len(tower))[:, None], np.arange(len(tower) + 1)
        self.state = np.where(end > first, state - state[:-1, None], np.inf) / fsdp
        self.passed = passed + np.append(0.0, passed[1:-1])[:, None]
        # Layers of every tower between these ends.
        layers_before = np.stack([np.append(0, np.cumsum(tower == number)) for number in range(len(towers))])
        self.layers = np.maximum(layers_before[:, None] - layers_before[:, :-1, None], 0)
        # What a rank sends to each, and what it receives of each.
        longest = sum(of_tower.smallest[self.count] * of_tower.tokens for of_tower in self.costs)
        first_of_llm = int(np.argmax(tower == towers.index("llm")))
        self.exchanged = np.where(
            (first <= first_of_llm) & (first_of_llm < end), 2 * data * fsdp * exchanged_items * longest, 0.0
        )

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
