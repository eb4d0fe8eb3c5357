"""Allocations of the papers and of habit, to compare with: MMScale's, Cornstarch's, and devices by FLOPs.

All have our memory as their constraint, and are judged in the same simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmjax.planning.allocate import (
    BOUND,
    Allocation,
    Objective,
    OptionTable,
    Scores,
    allocate,
    compatible_ranks,
    encoder_tables,
    make_table,
    rank_llms,
    search,
    simulate_choice,
)
from mmjax.planning.partition import partition
from mmjax.planning.tower_options import (
    ENCODER_STAGES,
    LLM_STAGES,
    SUMMED,
    Choice,
    Problem,
    TowerCosts,
    TowerOptions,
    list_options,
    stage_options,
)


def _score_mmscale(options: TowerOptions, microbatches: int) -> Scores:
    seconds = options.passes.sum(1)
    return Scores(seconds, (microbatches - 1) * seconds / options.workers, np.zeros(len(seconds)))


# MMScale, equations 1 and 2: every tower's path as the warm-up, then the slowest of the towers'
# mean stages.
MMSCALE = Objective(
    _score_mmscale,
    np.add,
    lambda encoders, llm, _: encoders.path + llm.path + np.maximum(encoders.step, llm.step),
    generator_path=1.0,
)


def allocate_mmscale(problem: Problem) -> Allocation | None:
    """Allocate by MMScale's objective (section 4.2, equations 1 and 2), with our memory as its constraint."""
    best: tuple[float, int, dict[str, Choice]] | None = None
    candidates = search(problem, MMSCALE, lambda: np.inf if best is None else best[0])
    for candidate in candidates:
        if best is None or candidate[0] < best[0]:
            best = candidate
    return None if best is None else simulate_choice(problem, best[2], best[1])


def allocate_by_flops(problem: Problem) -> Allocation | None:
    """Give every tower devices in proportion to its work, and the way to use them that is fastest for it alone."""
    work = {
        name: float((c[0].forward + c[0].backward).sum()) * c[0].devices
        for name, c in problem.towers.items()
    }
    budget = {
        name: max(1, int(problem.cluster.devices * n / sum(work.values())))
        for name, n in work.items()
    }
    best: Allocation | None = None
    for count in problem.microbatches:
        llm = _fastest(problem, "llm", count, budget["llm"], None)
        chosen = {
            name: _fastest(problem, name, count, budget[name], llm)
            for name in work
            if llm and name != "llm"
        }
        chosen["llm"] = llm
        choices = [choice for choice in chosen.values() if choice is not None]
        if (
            len(choices) < len(work)
            or sum(int(o.devices[n]) for o, n in choices) > problem.cluster.devices
        ):
            continue
        simulated = simulate_choice(
            problem, {name: c for name, c in chosen.items() if c is not None}, count
        )
        best = _faster(best, simulated)
    return best


def _score_slowest(options: TowerOptions, microbatches: int) -> Scores:
    return Scores(options.passes.sum(1), options.by_worker(options.passes).max(1), options.tail)


# Cornstarch, algorithm 1: an encoder's slowest stage counts alone.
SLOWEST = Objective(
    _score_slowest, np.maximum, lambda encoders, llm, _: np.maximum(encoders.step, llm.step)
)


def allocate_loosely(problem: Problem) -> Allocation | None:
    """Allocate by Cornstarch's algorithm 1: for each way to run the LLM, the fewest devices that keep up with it.

    An encoder that keeps up in no way has the fastest. The fastest of all candidates in the
    simulator counts; those whose LLM alone takes longer are left out.
    """
    best: Allocation | None = None
    encoders = [name for name in problem.towers if name != "llm"]
    tables: dict[tuple[int, int, int], list[OptionTable]] = {}
    for bound, count, llms, n in rank_llms(problem, BOUND):
        if best is not None and bound >= best.seconds:
            break
        llm = llms.choices[n]
        key = count, llm[0].in_flight, int(llm[0].item_ranks[llm[1]])
        if key not in tables:
            tables[key] = encoder_tables(problem, SLOWEST, *key)
        target = float(llm[0].passes[llm[1]].max())
        chosen = {"llm": llm}
        free = problem.cluster.devices - int(llms.devices[n])
        for name, table in zip(encoders, tables[key], strict=True):
            usable = np.flatnonzero(compatible_ranks(table.ranks, llm) & (table.devices <= free))
            if len(usable):
                slowest = table.scores.step[usable]
                late = np.maximum(slowest - target, 0.0)
                fewest = usable[np.lexsort((slowest, table.devices[usable], late))[0]]
                chosen[name] = table.choices[fewest]
                free -= int(table.devices[fewest])
        if len(chosen) == len(problem.towers):
            simulated = simulate_choice(problem, chosen, count)
            best = _faster(best, simulated)
    return best


def allocate_colocated(problem: Problem) -> Allocation | None:
    """Allocate with encoders-colocated stages (Cornstarch, section 2.2), the fastest in the simulator.

    All encoders are cut into as many stages and share their devices: a stage runs a part of each in
    turn, and the pipeline is a chain. The allocation has them as one tower, `encoders`.
    """
    encoders = [name for name in problem.towers if name != "llm"]
    if not encoders:
        return allocate(problem)
    fused = []
    for towers in _by_layout(problem, encoders):
        max_stages = min(ENCODER_STAGES, *(len(costs.forward) for costs in towers))
        fused += [
            _fuse([(costs, _cut_evenly(costs, n)) for costs in towers], n)
            for n in range(1, max_stages + 1)
        ]
    return allocate(problem._replace(towers={"encoders": fused, "llm": problem.towers["llm"]}))


def allocate_replicated(problem: Problem) -> Allocation | None:
    """Allocate with encoders-replicated stages (Cornstarch, section 2.2), the fastest in the simulator.

    The LLM alone is cut into stages, and every stage runs all encoders itself, in both passes.
    """
    encoders = [name for name in problem.towers if name != "llm"]
    best: Allocation | None = None
    for llm, *towers in _by_layout(problem, ["llm", *encoders]):
        for stages in range(
            1, min(LLM_STAGES, len(llm.forward), problem.cluster.devices // llm.devices) + 1
        ):
            fused = _fuse(
                [(llm, _cut_evenly(llm, stages)), *((costs, None) for costs in towers)], stages
            )
            for count in problem.microbatches:
                options = stage_options(problem, fused, stages, count)
                bounds = BOUND.score(options, count)
                for n in np.argsort(bounds.step + bounds.tail):
                    if best is not None and bounds.step[n] + bounds.tail[n] >= best.seconds:
                        break
                    simulated = simulate_choice(problem, {"llm": (options, n)}, count)
                    best = _faster(best, simulated)
    return best


def _faster(best: Allocation | None, simulated: Allocation) -> Allocation:
    return simulated if best is None or simulated.seconds < best.seconds else best


def _by_layout(problem: Problem, towers: Sequence[str]) -> list[tuple[TowerCosts, ...]]:
    """Return the costs of towers on the same devices, with each layout that all can have."""
    by_layout = [{costs.layout: costs for costs in problem.towers[name]} for name in towers]
    return [
        tuple(costs[way] for costs in by_layout)
        for way in by_layout[0]
        if all(way in costs for costs in by_layout)
    ]


def _cut_evenly(costs: TowerCosts, stages: int) -> tuple[int, ...]:
    return partition(costs.forward + costs.backward, stages)


def _fuse(towers: Sequence[tuple[TowerCosts, tuple[int, ...] | None]], stages: int) -> TowerCosts:
    """Join towers that share their stages' devices into one, which has a layer for each stage.

    towers: with their cuts; None: every stage has all of the tower. What is sent behind is what the
    first tower sends, and where it sends tokens, those of all.
    """
    sums: dict[str, Any] = dict.fromkeys(SUMMED, np.zeros(stages))
    launch, smaller = np.zeros(2), []
    saved = again = 0.0
    for costs, cuts in towers:
        layers = len(costs.forward) / (1 if cuts is None else stages)  # of a stage, on average
        for name in SUMMED:
            values = getattr(costs, name)
            sums[name] = sums[name] + (
                values.sum() if cuts is None else np.add.reduceat(values, (0, *cuts))
            )
        launch += layers * np.array(costs.launch)
        saved, again = saved + layers * costs.saved[0], again + layers * costs.again[0]
        steps = np.diff([costs.again, costs.saved]).T
        smaller += [(layers * more, -layers * less) for more, less in steps]
    # The steps of all towers' policies, those that free the most bytes a second first: convex as
    # each tower's are.
    smaller.sort(key=lambda step: step[0] / step[1])
    seconds, bytes_ = np.array([(0.0, 0.0), *smaller]).T
    first = towers[0][0]
    return replace(
        first,
        **sums,
        width=math.gcd(*(costs.width for costs, _ in towers)),
        lengths=max((costs.lengths for costs, _ in towers), key=lambda lengths: lengths.shares[-1]),
        launch=tuple(launch.tolist()),
        saved=saved - np.cumsum(bytes_),
        again=again + np.cumsum(seconds),
        # They run in turn.
        peak=tuple(max(costs.peak[k] for costs, _ in towers) for k in (0, 1)),
        passed=sum(costs.passed for costs, cuts in towers if cuts is not None),
        tokens=sum(costs.tokens for costs, _ in towers) if first.tokens else 0.0,
    )


def _fastest(
    problem: Problem, tower: str, count: int, devices: int, llm: Choice | None
) -> Choice | None:
    """Return a tower's fastest option on at most so many devices. llm: that an encoder goes with."""
    behind = (0, 1) if llm is None else (llm[0].in_flight, int(llm[0].item_ranks[llm[1]]))
    table = make_table(list_options(problem, tower, count, *behind), count, BOUND)
    usable = table.devices <= devices
    if llm is not None:
        usable &= compatible_ranks(table.ranks, llm)
    seconds = np.where(usable, table.scores.step + table.scores.tail, np.inf)
    return table.choices[int(seconds.argmin())] if usable.any() else None
