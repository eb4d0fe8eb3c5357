"""Allocation finds what trying everything finds, and is never slower than the papers' ways."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise, product

import numpy as np
import pytest

from mmjax.benchmarks.allocation_baselines import (
    allocate_by_flops,
    allocate_colocated,
    allocate_loosely,
    allocate_mmscale,
    allocate_replicated,
)
from mmjax.planning.allocate import Allocation, allocate
from mmjax.planning.hardware import BANDWIDTH_EFFICIENCY, Cluster, parse_cluster
from mmjax.planning.partition import partition
from mmjax.planning.schedules import StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, simulate
from mmjax.planning.step_time import collective_seconds
from mmjax.planning.tower_options import SUMMED, Problem, TowerCosts

ROOM = 80e9
MICROBATCHES = (2, 5)


def tower(rng: np.random.Generator, layers: int, tensor: int, trained: bool, encoder: bool, busy: float) -> TowerCosts:
    """Costs of equal layers, with an end that takes longer."""
    forward = rng.uniform(0.5, 2) * busy * np.ones(layers) / tensor
    forward[-1] *= rng.uniform(1, 2)
    size = rng.uniform(1e9, 12e9) / tensor
    smallest = float(rng.choice([0.0, 0.02, 0.2]))
    return TowerCosts(
        tensor=tensor,
        width=int(rng.choice([6, 8])),
        forward=forward,
        backward=(2.0 if trained else 0.0) * forward,
        smallest={2: smallest, 5: smallest / 2},
        launch=(1e-3, 2e-3),
        cast_forward=np.full(layers, 1e-3),
        cast_backward=np.full(layers, 2e-3),
        state=np.full(layers, size * (4 if trained else 0.5)),
        gathered=np.full(layers, size / 2),
        scattered=np.full(layers, size / 2 * trained),
        gradients=np.full(layers, size * trained),
        update=np.full(layers, 3e-3 * trained),
        saved=np.array([40e9, 10e9]) / tensor if trained else np.array([0.0]),
        again=np.array([0.0, forward[0]]) if trained else np.array([0.0]),
        peak=(5e9, 9e9),
        passed=2e9,
        tokens=1e9 if encoder else 0.0,
    )


def problem(seed: int, generator: str = "") -> Problem:
    """Towers of a seed. generator: one of a single layer behind the LLM, beside one encoder at most."""
    rng = np.random.default_rng(seed)
    names = ["vision", "audio"][: rng.integers(0, 2 if generator else 3)]
    layers = {name: int(rng.integers(1, 3)) for name in names} | {"llm": int(rng.integers(1, 5))}
    layers |= {generator: 1} if generator else {}
    towers = {
        name: [
            tower(rng, n, t, name == "llm" or rng.random() < 0.7, name != "llm", rng.uniform(0.1, 1)) for t in (1, 2)
        ]
        for name, n in layers.items()
    }
    cluster = Cluster(parse_cluster("h100").device, int(rng.integers(1, 3)), 2 if rng.random() < 0.5 else 4)
    return Problem(towers, cluster, ROOM, (1, 2, 4), MICROBATCHES, generator=generator)


def stage_times(
    of: Problem, costs: TowerCosts, cuts: tuple[int, ...], ranks: tuple[int, int], m: int, behind: tuple[int, int]
):
    """Seconds of every stage of a tower, written out once more, one stage at a time; None where one does not fit."""
    data, fsdp = ranks
    llm_stages, llm_ranks = behind
    share = max(1 / (m * data * fsdp), costs.smallest[m] * max(1, llm_ranks / (data * fsdp)))
    rows, tails = [], [[], []]
    ends = (0, *cuts, len(costs.forward))
    for number, (a, b) in enumerate(pairwise(ends)):
        total = {name: float(getattr(costs, name)[a:b].sum()) for name in SUMMED}
        flight = min(m, llm_stages + len(ends) - 1 - number)
        fixed = total["state"] / fsdp + share * costs.peak[b == len(costs.forward)] + 2 * flight * share * costs.passed
        per_layer = (of.room - fixed) / (flight * share * (b - a))
        if per_layer < costs.saved[-1]:
            return None
        gather = collective_seconds(1.0, fsdp, costs.tensor, of.cluster)
        forward = share * total["forward"] + (b - a) * costs.launch[0] + total["cast_forward"] / fsdp
        backward = share * total["backward"] + (b - a) * costs.launch[1] + total["cast_backward"] / fsdp
        backward += share * (b - a) * float(np.interp(per_layer, costs.saved[::-1], costs.again[::-1]))
        rows.append(
            (
                max(forward, gather * total["gathered"]),
                max(backward, gather * (total["gathered"] + total["scattered"])) if total["backward"] else 0.0,
            )
        )
        reduce = 2 * collective_seconds(1.0, data, costs.tensor * fsdp, of.cluster)
        tails[0].append(reduce * total["gradients"] / fsdp)
        tails[1].append(total["update"] / fsdp)
    return rows, share, max(tails[0]) + max(tails[1])


def try_everything(of: Problem) -> float:
    names = [*(name for name in of.towers if name not in ("llm", of.generator)), "llm"]
    at_llm = len(names) - 1
    names += [of.generator] if of.generator else []
    generators = len(names) - 1 - at_llm
    device = of.cluster.device
    link = BANDWIDTH_EFFICIENCY * (device.link if of.cluster.nodes == 1 else device.network)
    best = np.inf
    for m in of.microbatches:
        ways = [
            [
                (costs, stages, r // f, f)
                for costs in of.towers[name]
                for stages in range(1, len(costs.forward) + 1)
                for r in of.ranks
                for f in (1, 2, 4)
                if r % f == costs.width % f == 0
            ]
            for name in names
        ]
        for chosen in product(*ways):
            if sum(c.tensor * d * f * p for c, p, d, f in chosen) > of.cluster.devices:
                continue
            ranks = [d * f for _, _, d, f in chosen]
            if any(r % ranks[at_llm] and ranks[at_llm] % r for r in ranks):
                continue
            times, edges, delays, tails = [], [], {}, []
            counts = [p for _, p, _, _ in chosen]
            begins = [0, *accumulate(counts)]
            for n, (costs, p, d, f) in enumerate(chosen):
                behind = (generators, 1) if n == at_llm else (counts[at_llm] + generators, ranks[at_llm])
                if n > at_llm:
                    behind = (0, ranks[at_llm])
                found = stage_times(of, costs, partition(costs.forward + costs.backward, p), (d, f), m, behind)
                if found is None:
                    break
                rows, share, tail = found
                times += rows
                tails.append(tail)
                for s in range(begins[n], begins[n + 1] - 1):
                    delays[s, s + 1] = share * costs.passed / link
                if n != at_llm:
                    fan = max(ranks[n] / ranks[at_llm], chosen[at_llm][0].tensor / costs.tensor)
                    edge = (begins[n + 1] - 1, begins[at_llm]) if n < at_llm else (begins[n] - 1, begins[n])
                    delays[edge] = share * costs.tokens * fan / link
            else:
                edges = tuple(delays)
                graph = StageGraph(edges, tuple(range(len(times))))
                forward, backward = (np.array([[t[k]] * m for t in times]) for k in (0, 1))
                timeline = simulate(make_schedule("1f1b", graph, m), StageTimes(forward, backward, delays, True))
                best = min(best, timeline.makespan + max(tails))
    return best


def check(seed: int, generator: str = "") -> bool:
    """Compare with trying everything; return whether anything fits."""
    of = problem(seed, generator)
    found, expected = allocate(of), try_everything(of)
    assert (found is None) == np.isinf(expected)
    if found is None:
        return False
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    assert found.devices <= of.cluster.devices
    for baseline in (allocate_mmscale, allocate_by_flops, allocate_loosely):
        other = baseline(of)
        assert other is None or found.seconds <= other.seconds * (1 + 1e-9)
    return True


def test_allocation_finds_what_trying_everything_finds():
    assert sum(map(check, range(12))) >= 6


def test_allocation_with_a_generator_behind_the_llm_finds_what_trying_everything_finds():
    assert sum(check(seed, "picture") for seed in range(12)) >= 6


@pytest.mark.exhaustive
def test_a_hundred_allocations_with_a_generator_are_those_of_trying_everything():
    assert sum(check(seed, "picture") for seed in range(12, 112)) >= 50


@pytest.mark.exhaustive
def test_two_hundred_allocations_are_those_of_trying_everything():
    assert sum(map(check, range(12, 212))) >= 100


@pytest.mark.parametrize("seed", range(4))
def test_colocated_encoders_are_allocated_like_one_that_does_the_work_of_all(seed):
    of = problem(seed)
    encoder = [tower(np.random.default_rng(seed), 2, t, True, True, 0.5) for t in (1, 2)]
    kinds = (*SUMMED, "saved", "again", "passed", "tokens")
    double = [
        replace(c, launch=tuple(2 * n for n in c.launch), **{kind: 2 * getattr(c, kind) for kind in kinds})
        for c in encoder
    ]
    one, both = ({"vision": costs, "llm": of.towers["llm"]} for costs in (encoder, double))
    for towers, same in ((one, one), (one | {"audio": encoder}, both)):
        found = allocate_colocated(of._replace(towers=towers))
        assert seconds(found) == pytest.approx(seconds(allocate(of._replace(towers=same))), rel=1e-9)


def test_every_stage_runs_replicated_encoders():
    rng, m = np.random.default_rng(0), 5
    free = dict.fromkeys(("cast_forward", "cast_backward", "gradients", "update"), np.zeros(4))
    costs = {
        name: replace(
            tower(rng, 4, 1, True, name != "llm", 1),
            forward=np.full(4, n),
            backward=np.full(4, 2 * n),
            smallest={2: 0.0, 5: 0.0},
            launch=(0.0, 0.0),
            passed=0.0,
            **free,
        )
        for name, n in {"llm": 1.0, "vision": 0.2, "audio": 0.1}.items()
    }
    of = problem(0)._replace(towers={k: [c] for k, c in costs.items()}, room=np.inf, ranks=(1,), microbatches=(m,))
    found = allocate_replicated(of)
    by_stages = {n: (m + n - 1) / m * 3 * (4 / n + 4 * 0.3) for n in (1, 2, 4) if n <= of.cluster.devices}
    assert found.seconds == pytest.approx(min(by_stages.values()))
    assert found.towers["llm"].stages == min(by_stages, key=by_stages.get)
    text = of._replace(towers={"llm": of.towers["llm"]})
    assert seconds(allocate_replicated(text)) == pytest.approx(seconds(allocate(text)), rel=1e-9)


def seconds(found: Allocation | None) -> float:
    return np.inf if found is None else found.seconds
