"""Allocation finds what trying everything finds, and is never slower than the papers' ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np
import pytest

from mmjax.benchmarks.baselines.allocation import (
    allocate_by_flops,
    allocate_colocated,
    allocate_loosely,
    allocate_mmscale,
    allocate_replicated,
)
from mmjax.config import Layout
from mmjax.planning.allocate import Allocation, allocate
from mmjax.planning.exchange_time import collective_seconds
from mmjax.planning.hardware import BANDWIDTH_EFFICIENCY, Cluster, parse_cluster
from mmjax.planning.partition import partition
from mmjax.planning.schedules import StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, simulate
from mmjax.planning.tower_options import (
    SUMMED,
    Problem,
    RowLengths,
    TowerCosts,
    interleaved_in_flight,
)

ROOM = 80e9
MICROBATCHES = (2, 4)


def tower(
    rng: np.random.Generator,
    layers: int,
    layout: Layout,
    trained: bool,
    encoder: bool,
    busy: float,
    lengths: RowLengths,
) -> TowerCosts:
    """Costs of equal layers, with an end that takes longer."""
    tensor = layout.tensor * layout.context
    forward = rng.uniform(0.5, 2) * busy * np.ones(layers) / tensor
    forward[-1] *= rng.uniform(1, 2)
    size = rng.uniform(1e9, 12e9) / tensor
    return TowerCosts(
        layout=layout,
        width=int(rng.choice([6, 8])),
        forward=forward,
        backward=(2.0 if trained else 0.0) * forward,
        lengths=lengths,
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
        experts=0.0 if encoder else 0.5,
    )


LAYOUTS = (Layout(), Layout(tensor=2))
OF_LLM = (*LAYOUTS, Layout(context=2), Layout(expert=2))


def row_lengths(rng: np.random.Generator) -> RowLengths:
    """Few long parts, or many short ones."""
    parts = rng.uniform(0.5, 1.5, int(rng.choice([6, 40, 400])))
    return RowLengths(np.sort(parts) / parts.sum(), len(parts))


def problem(seed: int, *generators: str) -> Problem:
    """Towers of a seed. generators: of a single layer behind the LLM, beside one encoder at most."""
    rng = np.random.default_rng(seed)
    names = ["vision", "audio"][: rng.integers(0, max(1, 3 - len(generators)))]
    layers = {name: int(rng.integers(1, 3)) for name in names} | {"llm": int(rng.integers(1, 5))}
    layers |= dict.fromkeys(generators, 1)
    lengths = [row_lengths(rng) for _ in layers]
    towers = {
        name: [
            tower(
                rng,
                n,
                layout,
                name == "llm" or rng.random() < 0.7,
                name != "llm",
                rng.uniform(0.1, 1),
                rows,
            )
            for layout in (OF_LLM if name == "llm" else LAYOUTS)
        ]
        for (name, n), rows in zip(layers.items(), lengths, strict=True)
    }
    cluster = Cluster(
        parse_cluster("h100").device, int(rng.integers(1, 3)), 2 if rng.random() < 0.5 else 4
    )
    return Problem(
        towers, cluster, ROOM, (1, 2, 4), MICROBATCHES, generators=generators, virtual=(1, 2)
    )


def row_share(lengths: RowLengths, microbatches: int, rows: int) -> float:
    """Share of a step's work in the fullest row of a microbatch, at least, written out once more."""
    falling = lengths.shares[::-1]
    last = len(falling) - 1
    parts = lengths.count / microbatches
    fullest = [1 / (microbatches * rows), falling[last - round((1 - 1 / (parts + 1)) * last)]]
    fullest += [
        (n + 1) * falling[last - round((1 - n * rows / parts) * last)]
        for n in range(1, 8)
        if n * rows < parts
    ]
    return max(fullest)


class Way(NamedTuple):
    """One way to run a tower."""

    costs: TowerCosts
    workers: int
    virtual: int
    data: int
    fsdp: int

    @property
    def ranks(self) -> int:
        return self.data * self.fsdp * self.costs.layout.expert

    @property
    def item_ranks(self) -> int:
        return self.ranks * self.costs.layout.context

    @property
    def devices(self) -> int:
        return self.item_ranks * self.costs.layout.tensor * self.workers

    @property
    def stages(self) -> int:
        return self.workers * self.virtual


def ways_of(of: Problem, name: str, m: int) -> list[Way]:
    """All ways to run a tower, also those for which there is no room."""
    numbers = [
        (workers, virtual, costs)
        for costs in of.towers[name]
        for workers in range(1, len(costs.forward) + 1)
        for virtual in (1, 2)
        if workers in (1, 2, 4) or costs.layout in LAYOUTS
        if virtual == 1
        or (
            (name == "llm" and costs.layout in LAYOUTS and workers in (2, 4) and m % workers == 0)
            and workers * virtual <= len(costs.forward)
        )
    ]
    return [
        Way(costs, workers, virtual, r // (f * costs.layout.expert), f)
        for workers, virtual, costs in numbers
        for r in of.ranks
        for f in (1, 2, 4)
        if r % (f * costs.layout.expert) == 0
        and costs.width % (f * costs.layout.expert * costs.layout.context) == 0
    ]


def stage_times(
    of: Problem, way: Way, cuts: tuple[int, ...], m: int, flights: Sequence[int], rows: int
):
    """Seconds of every stage of a tower, written out once more, one stage at a time; None where one does not fit."""
    costs, layout = way.costs, way.costs.layout
    most = max(rows, way.ranks)
    share = row_share(costs.lengths, m, most) * most / way.ranks
    shards = way.fsdp * layout.expert * layout.context
    gather = (1 - costs.experts) * collective_seconds(1.0, shards, layout.tensor, of.cluster)
    gather += costs.experts * collective_seconds(
        1 / layout.expert, way.fsdp * layout.context, layout.tensor * layout.expert, of.cluster
    )
    reduce = 2 * collective_seconds(1.0, way.data, layout.tensor * shards, of.cluster)
    ends = (0, *cuts, len(costs.forward))
    stages = list(pairwise(ends))
    totals = [{name: float(getattr(costs, name)[a:b].sum()) for name in SUMMED} for a, b in stages]
    per_layer = []
    for worker in range(way.workers):
        of_worker = range(worker, way.stages, way.workers)
        fixed = sum(totals[s]["state"] for s in of_worker) / shards
        fixed += share * costs.peak[worker == way.workers - 1]
        fixed += sum(2 * flights[s] * share * costs.passed for s in of_worker)
        layers = sum(flights[s] * (stages[s][1] - stages[s][0]) for s in of_worker)
        per_layer.append((of.room - fixed) / (layers * share))
    if min(per_layer) < costs.saved[-1]:
        return None
    rows_ = []
    for number, ((a, b), total) in enumerate(zip(stages, totals, strict=True)):
        forward = (
            share * total["forward"] + (b - a) * costs.launch[0] + total["cast_forward"] / shards
        )
        backward = (
            share * total["backward"] + (b - a) * costs.launch[1] + total["cast_backward"] / shards
        )
        saved = per_layer[number % way.workers]
        backward += share * (b - a) * float(np.interp(saved, costs.saved[::-1], costs.again[::-1]))
        rows_.append(
            (
                max(forward, gather * total["gathered"]),
                max(backward, gather * (total["gathered"] + total["scattered"]))
                if total["backward"]
                else 0.0,
            )
        )
    tails = [
        sum(totals[s][name] for s in range(worker, way.stages, way.workers)) / shards
        for name in ("gradients", "update")
        for worker in range(way.workers)
    ]
    return rows_, share, reduce * max(tails[: way.workers]) + max(tails[way.workers :])


def try_everything(of: Problem) -> float:
    names = [*of.encoders, "llm", *of.generators]
    at_llm = names.index("llm")
    device = of.cluster.device
    link = BANDWIDTH_EFFICIENCY * (device.link if of.cluster.nodes == 1 else device.network)
    best = np.inf
    for m in of.microbatches:
        for chosen in product(*(ways_of(of, name, m) for name in names)):
            llm = chosen[at_llm]
            if sum(way.devices for way in chosen) > of.cluster.devices:
                continue
            if any(way.ranks % llm.item_ranks and llm.item_ranks % way.ranks for way in chosen):
                continue
            seconds = simulate_ways(of, chosen, m, link, at_llm)
            best = min(best, np.inf if seconds is None else seconds)
    return best


def simulate_ways(
    of: Problem, chosen: Sequence[Way], m: int, link: float, at_llm: int
) -> float | None:
    """Seconds of a step in the simulator; None where a tower does not fit."""
    llm, generators = chosen[at_llm], len(of.generators)
    behind = min(1, generators)
    ahead = llm.stages + behind
    if llm.virtual > 1:
        of_llm = interleaved_in_flight(llm.workers, llm.virtual, m, behind)
        ahead = int(of_llm[0])
    times, delays, tails, workers = [], {}, [], []
    begins = [0, *accumulate(way.stages for way in chosen)]
    for n, way in enumerate(chosen):
        depth = ahead if n < at_llm else behind if n == at_llm else 0
        flights = [min(m, depth + way.stages - s) for s in range(way.stages)]
        if n == at_llm and llm.virtual > 1:
            flights = np.minimum(m, of_llm)
        cuts = partition(way.costs.forward + way.costs.backward, way.stages)
        found = stage_times(of, way, cuts, m, flights, 1 if n == at_llm else llm.item_ranks)
        if found is None:
            return None
        rows, share, tail = found
        times += rows
        tails.append(tail)
        workers += [len(set(workers)) + s % way.workers for s in range(way.stages)]
        for s in range(begins[n], begins[n + 1] - 1):
            delays[s, s + 1] = share * way.costs.passed / link
        if n != at_llm:
            fan = max(way.ranks / llm.item_ranks, llm.costs.layout.tensor / way.costs.layout.tensor)
            edge = (
                (begins[n + 1] - 1, begins[at_llm])
                if n < at_llm
                else (begins[at_llm + 1] - 1, begins[n])
            )
            delays[edge] = share * way.costs.tokens * fan / link
    graph = StageGraph(tuple(delays), tuple(workers))
    forward, backward = (np.array([[t[k]] * m for t in times]) for k in (0, 1))
    name = "interleaved" if llm.virtual > 1 else "1f1b"
    timeline = simulate(make_schedule(name, graph, m), StageTimes(forward, backward, delays, True))
    return timeline.makespan + max(tails)


def check(seed: int, *generators: str) -> bool:
    """Compare with trying everything; return whether anything fits."""
    of = problem(seed, *generators)
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
    assert sum(map(check, range(3))) >= 1


def test_allocation_with_a_generator_behind_the_llm_finds_what_trying_everything_finds():
    assert sum(check(seed, "picture") for seed in range(3)) >= 1


@pytest.mark.exhaustive
def test_a_hundred_allocations_with_a_generator_are_those_of_trying_everything():
    assert sum(check(seed, "picture") for seed in range(3, 103)) >= 50


@pytest.mark.exhaustive
def test_two_hundred_allocations_are_those_of_trying_everything():
    assert sum(map(check, range(3, 203))) >= 100


@pytest.mark.parametrize("seed", range(4))
def test_colocated_encoders_are_allocated_like_one_that_does_the_work_of_all(seed):
    of = problem(seed)
    lengths = row_lengths(np.random.default_rng(seed))
    encoder = [
        tower(np.random.default_rng(seed), 2, layout, True, True, 0.5, lengths)
        for layout in LAYOUTS
    ]
    kinds = (*SUMMED, "saved", "again", "passed", "tokens")
    double = [
        replace(
            c,
            launch=tuple(2 * n for n in c.launch),
            **{kind: 2 * getattr(c, kind) for kind in kinds},
        )
        for c in encoder
    ]
    one, both = ({"vision": costs, "llm": of.towers["llm"]} for costs in (encoder, double))
    for towers, same in ((one, one), (one | {"audio": encoder}, both)):
        found = allocate_colocated(of._replace(towers=towers))
        assert seconds(found) == pytest.approx(
            seconds(allocate(of._replace(towers=same))), rel=1e-9
        )


def test_every_stage_runs_replicated_encoders():
    rng, m = np.random.default_rng(0), 5
    free = dict.fromkeys(("cast_forward", "cast_backward", "gradients", "update"), np.zeros(4))
    costs = {
        name: replace(
            tower(rng, 4, Layout(), True, name != "llm", 1, RowLengths(np.full(1000, 1e-3), 1e3)),
            forward=np.full(4, n),
            backward=np.full(4, 2 * n),
            launch=(0.0, 0.0),
            passed=0.0,
            **free,
        )
        for name, n in {"llm": 1.0, "vision": 0.2, "audio": 0.1}.items()
    }
    of = problem(0)._replace(
        towers={k: [c] for k, c in costs.items()}, room=np.inf, ranks=(1,), microbatches=(m,)
    )
    found = allocate_replicated(of)
    by_stages = {
        n: (m + n - 1) / m * 3 * (4 / n + 4 * 0.3) for n in (1, 2, 4) if n <= of.cluster.devices
    }
    assert found.seconds == pytest.approx(min(by_stages.values()))
    assert found.units["llm"].pipeline == min(by_stages, key=by_stages.get)
    text = of._replace(towers={"llm": of.towers["llm"]})
    assert seconds(allocate_replicated(text)) == pytest.approx(seconds(allocate(text)), rel=1e-9)


def seconds(found: Allocation | None) -> float:
    return np.inf if found is None else found.seconds


@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("behind", [0, 1])
def test_virtual_stages_have_as_many_microbatches_in_flight_as_their_schedule_says(virtual, behind):
    for workers, groups in product((2, 3, 4), (1, 2, 3)):
        parts = workers * virtual
        stages = range(parts + behind)
        numbers = tuple(n % workers if n < parts else n - parts + workers for n in stages)
        schedule = make_schedule(
            "interleaved", StageGraph(tuple(pairwise(stages)), numbers), groups * workers
        )
        counted = interleaved_in_flight(workers, virtual, groups * workers, behind)
        assert counted.tolist() == [schedule.in_flight_bound(stage) for stage in range(parts)]
