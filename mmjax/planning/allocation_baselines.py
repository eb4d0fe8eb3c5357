"""Allocations of the papers and of habit, to compare with: MMScale's, Cornstarch's, and devices by FLOPs.

All have our memory as their constraint, and are judged in the same simulator.
"""

from __future__ import annotations

import numpy as np

from mmjax.planning.allocate import (
    BOUND,
    Allocation,
    Objective,
    OptionTable,
    Scores,
    compatible_ranks,
    encoder_tables,
    make_table,
    search,
    simulate_choice,
)
from mmjax.planning.tower_options import Choice, Problem, TowerOptions, list_options


def _score_mmscale(options: TowerOptions, microbatches: int) -> Scores:
    whole = options.passes.sum(1)
    return Scores(whole, (microbatches - 1) * whole / options.passes.shape[1], np.zeros(len(whole)))


# MMScale, equations 1 and 2: every tower's path as the warm-up, then the slowest of the towers' mean stages.
MMSCALE = Objective(
    _score_mmscale,
    np.add,
    lambda encoders, llm, _: encoders.path + llm.path + np.maximum(encoders.alone, llm.alone),
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
    work = {name: float((c[0].forward + c[0].backward).sum()) * c[0].tensor for name, c in problem.towers.items()}
    budget = {name: max(1, int(problem.cluster.devices * n / sum(work.values()))) for name, n in work.items()}
    best: Allocation | None = None
    for count in problem.microbatches:
        llm = _fastest(problem, "llm", count, budget["llm"], None)
        chosen = {name: _fastest(problem, name, count, budget[name], llm) for name in work if llm and name != "llm"}
        chosen["llm"] = llm
        found = [choice for choice in chosen.values() if choice is not None]
        if len(found) < len(work) or sum(int(o.devices[n]) for o, n in found) > problem.cluster.devices:
            continue
        simulated = simulate_choice(problem, {name: c for name, c in chosen.items() if c is not None}, count)
        best = simulated if best is None or simulated.seconds < best.seconds else best
    return best


def allocate_loosely(problem: Problem) -> Allocation | None:
    """Allocate by Cornstarch's algorithm 1: for each way to run the LLM, the fewest devices that keep up with it.

    An encoder that keeps up in no way has the fastest. The fastest of all candidates in the simulator counts.
    """
    best: Allocation | None = None
    encoders = [name for name in problem.towers if name != "llm"]
    for count in problem.microbatches:
        llm = make_table(list_options(problem, "llm", count), count, BOUND)
        tables: dict[tuple[int, int], list[OptionTable]] = {}
        for choice in llm.choices:
            key = choice[0].passes.shape[1], int(choice[0].ranks[choice[1]])
            if key not in tables:
                tables[key] = encoder_tables(problem, BOUND, count, *key)
            target = float(choice[0].passes[choice[1]].max())
            chosen = {"llm": choice}
            left = problem.cluster.devices - int(choice[0].devices[choice[1]])
            for name, table in zip(encoders, tables[key], strict=True):
                usable = np.flatnonzero(compatible_ranks(table.ranks, choice) & (table.devices <= left))
                if len(usable):
                    slowest = np.array(
                        [options.passes[n].max() for options, n in map(table.choices.__getitem__, usable)]
                    )
                    late = np.maximum(slowest - target, 0.0)
                    chosen[name] = table.choices[usable[np.lexsort((slowest, table.devices[usable], late))[0]]]
                    left -= int(chosen[name][0].devices[chosen[name][1]])
            if len(chosen) == len(problem.towers):
                simulated = simulate_choice(problem, chosen, count)
                best = simulated if best is None or simulated.seconds < best.seconds else best
    return best


def _fastest(problem: Problem, tower: str, count: int, devices: int, llm: Choice | None) -> Choice | None:
    """Return a tower's fastest option on at most so many devices. llm: that an encoder goes with."""
    behind = (0, 1) if llm is None else (llm[0].passes.shape[1], int(llm[0].ranks[llm[1]]))
    table = make_table(list_options(problem, tower, count, *behind), count, BOUND)
    usable = table.devices <= devices
    if llm is not None:
        usable &= compatible_ranks(table.ranks, llm)
    seconds = np.where(usable, table.scores.alone + table.scores.tail, np.inf)
    return table.choices[int(seconds.argmin())] if usable.any() else None
