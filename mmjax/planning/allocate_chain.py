"""Allocate devices to the stages of one chain, encoders before the LLM, that is cut anywhere, for least time.

Every stage has as many devices, and cuts make the stages take equally long (OmniBal 4.2). Candidates have a lower
bound, and those that it leaves are cut and simulated, best first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmjax.planning.allocate import makespan
from mmjax.planning.partition import partition
from mmjax.planning.tower_options import LLM_STAGES, SUMMED, Problem, TowerCosts, link_bandwidth, list_splits

SIMULATIONS = 600  # at most


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
        found = simulate_chain(problem, candidate)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
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
                for stages in range(2, most_stages + 1):
                    update = sum(c.update.sum() for c in costs) / (stages * split[1])
                    # A stage is busy with all microbatches behind one's passes through the stages before it, so each
                    # may take 1 / count of what is left of the step.
                    bound = path / (1 - (1 - 1 / count) ** stages) + update
                    yield Candidate(float(bound), towers, costs, shares, split, stages, count)


def simulate_chain(problem: Problem, candidate: Candidate) -> ChainAllocation | None:
    """Cut a chain and simulate a step; None where a stage does not fit."""
    _, towers, costs, shares, (data, fsdp, gather, reduce), stages, count = candidate
    tower = np.repeat(np.arange(len(costs)), [len(of_tower.forward) for of_tower in costs])  # of every layer
    share = shares[tower]
    layers = {name: np.concatenate([getattr(of_tower, name) for of_tower in costs]) for name in SUMMED}
    launch = np.array([of_tower.launch for of_tower in costs])[tower]
    forward = share * layers["forward"] + launch[:, 0] + layers["cast_forward"] / fsdp
    backward = share * layers["backward"] + launch[:, 1] + layers["cast_backward"] / fsdp
    backward *= layers["backward"] > 0
    # Sent where the chain is cut before a layer: activations of its tower, or tokens of the tower before.
    passed = share * np.array([of_tower.passed for of_tower in costs])[tower]
    for number in range(1, len(costs)):
        passed[np.argmax(tower == number)] = shares[number - 1] * max(costs[number - 1].tokens, costs[number].tokens)
    cuts = partition(forward + backward, stages, np.append(passed, 0.0))
    begins = np.array((0, *cuts))
    sums = {name: np.add.reduceat(values, begins) for name, values in layers.items()}
    # As many microbatches as stages follow, and one.
    in_flight = np.minimum(count, np.arange(stages, 0, -1))
    # What a rank sends to each has room for the longest item, and what it receives of each.
    longest = sum(costs[n].smallest[count] * costs[n].tokens for n in range(len(costs)))
    exchanged = 2 * data * fsdp * longest
    first_of_llm = int(np.argmax(tower == towers.index("llm")))
    again = np.zeros(stages)
    for stage, (start, stop) in enumerate(pairwise((*begins, len(tower)))):
        held = np.bincount(tower[start:stop], minlength=len(costs)) * shares * in_flight[stage]
        present = [n for n in range(len(costs)) if held[n]]
        peak = max(shares[n] * costs[n].peak[stage == stages - 1] for n in present)
        if start <= first_of_llm < stop:
            peak = max(peak, exchanged)
        fixed = sums["state"][stage] / fsdp + peak + 2 * in_flight[stage] * float(passed[start:stop].max())
        least, most = (sum(held[n] * costs[n].saved[end] for n in present) for end in (-1, 0))
        if fixed + least > problem.room:
            return None
        part = 1.0 if most <= least else min(1.0, (problem.room - fixed - least) / (most - least))
        for n in present:
            saved = costs[n].saved[-1] + part * (costs[n].saved[0] - costs[n].saved[-1])
            seconds = np.interp(saved, costs[n].saved[::-1], costs[n].again[::-1])
            again[stage] += held[n] / in_flight[stage] * seconds
    of_stage = np.maximum(np.add.reduceat(forward, begins), gather * sums["gathered"])
    back = np.add.reduceat(backward, begins)
    back = np.maximum(back + again, gather * (sums["gathered"] + sums["scattered"])) * (back > 0)
    edges = np.append(passed[list(cuts)], 0.0) / link_bandwidth(problem.cluster)
    following = np.append(np.arange(1, stages), -1)
    seconds = makespan(of_stage, back, following, edges, np.arange(stages)[::-1].copy(), count)
    seconds += (2 * reduce * sums["gradients"] / fsdp).max() + (sums["update"] / fsdp).max()
    return ChainAllocation(towers, costs[0].tensor, int(data), int(fsdp), cuts, count, float(seconds))
