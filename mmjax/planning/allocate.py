"""Allocate devices to the towers of a model: tensor parallelism, replicas, shards and stages of each, for least time.

MMScale (section 4.2) minimises a sum of two terms, warm-up and steady state. Here every candidate
has a lower bound, and those that the bound leaves are simulated, best first. The towers may use
fewer devices than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.config import Unit
from mmjax.config.training import unit_devices
from mmjax.planning.schedules import StageGraph, make_schedule
from mmjax.planning.tower_options import (
    Choice,
    Problem,
    TowerOptions,
    first_padded_rows,
    link_bandwidth,
    list_options,
)

SIMULATIONS = 4_000  # at most


@dataclass(frozen=True)
class Allocation:
    """The units of all towers, the microbatches of a step, and the simulated seconds of the step."""

    units: dict[str, Unit]
    microbatches: int
    seconds: float

    @property
    def devices(self) -> int:
        """Count the devices that are used."""
        return sum(map(unit_devices, self.units.values()))


# --------------------------------------------------------------------------------------------------
# simulation


@njit(cache=True)
def orders_1f1b(depth, microbatches):
    """Return the actions of 1F1B, as `makespan` takes them. depth: of every stage, the stages behind it."""
    # Depth 2 with 4 microbatches: F0 F1, then F2 B0, F3 B1, then B2 B3. Action n is in the warm-up
    # (n < 2), in turn (forward where n - 2 is even), or in the rest, whose backward passes are n -
    # 4.
    orders = np.zeros((len(depth), 2 * microbatches, 3), np.int64)
    for stage in range(len(depth)):
        warmup = min(depth[stage], microbatches)
        for n in range(2 * microbatches):
            turn = n - warmup
            kind, number = 1, n - microbatches
            if turn < 0:
                kind, number = 0, n
            elif turn < 2 * (microbatches - warmup):
                kind, number = turn % 2, turn // 2 + (warmup if turn % 2 == 0 else 0)
            orders[stage, n] = kind, stage, number
    ends = 2 * microbatches * np.arange(1, len(depth) + 1)
    return orders.reshape(-1, 3), ends


@lru_cache(maxsize=1024)
def orders_interleaved(
    edges: tuple[tuple[int, int], ...], workers: tuple[int, ...], microbatches: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the actions of stages on these workers in an interleaved schedule, as `makespan` takes them."""
    orders = make_schedule("interleaved", StageGraph(edges, workers), microbatches).orders
    actions = [(a.kind == "backward", a.stage, a.microbatch) for order in orders for a in order]
    return np.array(actions, np.int64), np.cumsum([len(order) for order in orders])


@njit(cache=True)
def makespan(orders, ends, forward, backward, edges, delay, microbatches):
    """Return the seconds of a step with equal microbatches, as `planning.simulate` does with blocking senders.

    orders: int `[actions, 3]`, backward (1) or forward (0), stage and microbatch, of one worker
    behind the other. ends: of each worker's. edges: int `[edges, 2]`, stages that give and take
    activations; delay: seconds of each.
    """
    # Walk the workers round and round, each as far as what it needs is there; `done` is -1 for
    # passes that have not run. Forward results go along an edge and gradients back: of kind 0 the
    # receiver is edges[:, 1] and the sender edges[:, 0], of kind 1 the other way round.
    done = np.full((2, len(forward), microbatches), -1.0)
    free = np.zeros(len(ends))
    position = np.append(0, ends[:-1])
    unfinished = len(ends)
    while unfinished:
        for worker in range(len(ends)):
            while position[worker] < ends[worker]:
                kind, stage, number = orders[position[worker]]
                start = free[worker]
                sent = 0.0
                ready = True
                for n in range(len(edges)):
                    if edges[n, 1 - kind] == stage:
                        arrived = done[kind, edges[n, kind], number]
                        ready = ready and arrived >= 0
                        start = max(start, arrived + delay[n])
                    elif edges[n, kind] == stage:
                        sent = max(sent, delay[n])
                if not ready:
                    break
                done[kind, stage, number] = start + (
                    forward[stage] if kind == 0 else backward[stage]
                )
                free[worker] = done[kind, stage, number] + sent
                position[worker] += 1
                unfinished -= position[worker] == ends[worker]
    return done.max()


def simulate_choice(
    problem: Problem, chosen: Mapping[str, Choice], microbatches: int
) -> Allocation:
    """Simulate a step with equal microbatches. Links of a node count only where the cluster is one node."""
    # Stages are numbered encoders first, tower after tower; each tower has workers of its own.
    generators = [name for name in problem.generators if name in chosen]
    names = [*(name for name in chosen if name not in ("llm", *generators)), "llm", *generators]
    counts = [chosen[name][0].passes.shape[1] for name in names]
    firsts = dict(zip(names, accumulate(counts, initial=0), strict=False))
    llm, k = chosen["llm"]
    last_of_llm = firsts["llm"] + len(llm.cuts)
    forward, backward, workers, depth = [], [], [], []
    edges: dict[tuple[int, int], float] = {}
    for name in names:
        options, n = chosen[name]
        begin = firsts[name]
        stages = options.passes.shape[1]
        forward += options.forward[n].tolist()
        backward += options.backward[n].tolist()
        workers += [len(set(workers)) + stage % options.workers for stage in range(stages)]
        edges |= {(stage, stage + 1): options.edge[n] for stage in range(begin, begin + stages - 1)}
        stages_after = (
            0 if name in generators else bool(generators) + (name != "llm") * (len(llm.cuts) + 1)
        )
        depth += range(stages_after + stages - 1, stages_after - 1, -1)
        if name != "llm":
            # Of a step's bytes, those that a device sends or receives, whichever are more.
            sent = options.share[n] * options.costs.tokens / link_bandwidth(problem.cluster)
            tensor = llm.costs.layout.tensor / options.costs.layout.tensor
            ends = (
                (last_of_llm, begin) if name in generators else (begin + stages - 1, firsts["llm"])
            )
            edges[ends] = sent * max(options.ranks[n] / llm.item_ranks[k], tensor)
    if llm.virtual > 1:
        orders = orders_interleaved(tuple(edges), tuple(workers), microbatches)
    else:
        orders = orders_1f1b(np.array(depth), microbatches)
    times = np.array(forward), np.array(backward)
    arrays = (
        np.array(list(edges), np.int64).reshape(-1, 2),
        np.array(list(edges.values()), np.float64),
    )
    passes = float(makespan(*orders, *times, *arrays, microbatches))
    return Allocation(
        units={name: make_unit(*choice) for name, choice in chosen.items()},
        microbatches=microbatches,
        seconds=passes + max(float(options.tail[n]) for options, n in chosen.values()),
    )


def make_unit(options: TowerOptions, n: int) -> Unit:
    """Make the unit of a tower with one of its options."""
    return Unit(
        data=int(options.data[n]),
        fsdp=int(options.fsdp[n]),
        expert=options.costs.layout.expert,
        context=options.costs.layout.context,
        tensor=options.costs.layout.tensor,
        pipeline=options.workers,
        virtual=options.virtual,
        cuts=options.cuts,
    )


# --------------------------------------------------------------------------------------------------
# search


class Scores(NamedTuple):
    """Scores of options by an objective, `[options]` each."""

    path: np.ndarray  # seconds of one microbatch through all stages
    step: np.ndarray  # seconds of the step, if the other towers took no time
    tail: np.ndarray  # seconds behind the last pass


class Objective(NamedTuple):
    """Rules by which towers are scored, and scores of several make one."""

    score: Callable[[TowerOptions, int], Scores]
    merge_paths: Callable[[np.ndarray, np.ndarray], np.ndarray]  # of two encoders
    total: Callable[[Scores, Scores, int], np.ndarray]  # of encoders and LLM
    generator_path: float = 0.0  # share of a generator's path that counts like an encoder's


def _score_busy(options: TowerOptions, microbatches: int) -> Scores:
    """Bound a step from below by what a tower's devices compute and send, whatever is in flight."""
    passes = options.passes
    stages = passes.shape[1]
    edges = options.edge[:, None]
    number = np.arange(stages)
    # Before a stage begins, its first microbatch passes all before it; behind its end, its last
    # goes back through them.
    earlier = (np.cumsum(passes, axis=1) - passes + 2 * number * edges)[:, : options.workers]
    # A stage sends forwards and back, and waits for both; behind its last pass that no longer
    # counts.
    sends = ((number > 0) * 1 + (number < stages - 1)) * edges
    busy = (
        earlier
        + microbatches * options.by_worker(passes)
        + (microbatches - 1) * options.by_worker(sends)
    )
    path = passes.sum(1) + 2 * (stages - 1) * options.edge
    return Scores(path, busy.max(1), options.tail)


def _score_bound(options: TowerOptions, microbatches: int) -> Scores:
    """Bound as `_score_busy`, and of an LLM by the round trip of as many microbatches as are in flight."""
    scores = _score_busy(options, microbatches)
    if options.costs.tokens or options.virtual > 1:
        return scores
    passes = options.passes
    stages = passes.shape[1]
    edges = options.edge[:, None]
    earlier = np.cumsum(passes, axis=1) - passes + 2 * np.arange(stages) * edges
    # A microbatch enters when that which is `depth + 1` before it has come back from all stages
    # behind. With depth 2, microbatches 3 and 6 wait for 0 and 3: m microbatches make (m - 1) // 3
    # round trips before the last one's own, and the (m - 1) % 3 behind the last of these run
    # forward in between.
    depth = stages - 1 - np.arange(stages)
    rounds, rest = np.divmod(microbatches - 1, depth + 1)
    back = np.cumsum(passes[:, ::-1], axis=1)[:, ::-1] + 2 * depth * edges
    waiting = earlier + (rounds + 1) * back + rest * options.forward
    return scores._replace(step=np.maximum(scores.step, waiting.max(1)))


def _total_bound(encoders: Scores, llm: Scores, _: int) -> np.ndarray:
    return np.maximum(encoders.path + llm.step, encoders.step) + np.maximum(encoders.tail, llm.tail)


# A lower bound: the LLM's stages begin when an encoder's path ends, and the longest path counts. Of
# a generator's none does: while it has a microbatch, the LLM goes on with others.
BOUND = Objective(_score_bound, np.maximum, _total_bound)
BOUND_WITH_GENERATOR = Objective(_score_busy, np.maximum, _total_bound)


class OptionTable(NamedTuple):
    """Options of an encoder in all numbers of stages, `[options]` each."""

    choices: list[Choice]
    devices: np.ndarray
    ranks: np.ndarray
    scores: Scores


def make_table(
    groups: Sequence[TowerOptions], microbatches: int, objective: Objective
) -> OptionTable:
    scores = [objective.score(options, microbatches) for options in groups]
    empty = np.zeros(0)

    def join(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([empty, *columns])

    return OptionTable(
        [(options, n) for options in groups for n in range(len(options.data))],
        join([options.devices for options in groups]),
        join([options.ranks for options in groups]),
        Scores._make(
            (join(columns) for columns in zip(*scores, strict=True))
            if scores
            else (empty, empty, empty)
        ),
    )


def compatible_ranks(ranks: np.ndarray, llm: Choice) -> np.ndarray:
    """Return whether each of these numbers of an encoder's ranks divides the LLM's, or is a multiple of it."""
    of_llm = int(llm[0].item_ranks[llm[1]])
    return (ranks % of_llm == 0) | (of_llm % np.maximum(ranks, 1) == 0)


def encoder_tables(
    problem: Problem, objective: Objective, microbatches: int, in_flight: int, rows: int
) -> list[OptionTable]:
    """Tabulate the options of all encoders before an LLM with so many microbatches in flight, and of generators."""
    tables = []
    for name in problem.towers:
        if name == "llm":
            continue
        table = make_table(
            list_options(problem, name, microbatches, in_flight, rows), microbatches, objective
        )
        if name in problem.generators:
            scores = table.scores._replace(path=objective.generator_path * table.scores.path)
            table = table._replace(scores=scores)
        tables.append(table)
    return tables


def rank_llms(problem: Problem, objective: Objective) -> list[tuple[float, int, OptionTable, int]]:
    """Sort the LLM's options by their score without encoders; each with its microbatches, table and number in it."""
    none = Scores._make(np.zeros(1) for _ in Scores._fields)
    llms = []
    for count in problem.microbatches:
        table = make_table(list_options(problem, "llm", count), count, objective)
        scores = objective.total(none, table.scores, count)
        llms += [(scores[n], count, table, n) for n in range(len(scores))]
    return sorted(llms, key=lambda entry: entry[0])


def search(
    problem: Problem, objective: Objective, limit: Callable[[], float]
) -> Iterator[tuple[float, int, dict[str, Choice]]]:
    """Yield candidates by rising score of their LLM, for each LLM the best and then all, with scores below `limit`.

    limit: called again for every candidate, as it falls.
    """
    encoders = [name for name in problem.towers if name != "llm"]
    llms = rank_llms(problem, objective)
    tables: dict[tuple[int, int, int], list[OptionTable]] = {}
    padded = {count: first_padded_rows(problem, count) for count in problem.microbatches}

    def complete(
        n: int, count: int, llm: OptionTable, ahead: int
    ) -> Iterator[tuple[float, int, dict[str, Choice]]]:
        """Yield candidates with encoders that have so many microbatches in flight behind them."""
        options, k = llm.choices[n]
        rows = int(options.item_ranks[k])
        # No more than all microbatches are in flight, and where rows are full it does not matter
        # how many there are.
        key = count, min(ahead, count), rows if rows >= padded[count] else 1
        if key not in tables:
            tables[key] = encoder_tables(problem, objective, *key)
        return _complete(problem, objective, llm, n, tables[key], encoders, count, limit)

    # First the best of every LLM's, for a limit that leaves little of the others. Tables for few
    # numbers of stages do: before more stages than there are nothing is faster, and before one
    # nothing is slower.
    for first in (True, False):
        for score, count, llm, n in llms:
            if score >= limit():
                break
            ahead = llm.choices[n][0].in_flight
            if first:
                yield from islice(complete(n, count, llm, 1 << (ahead - 1).bit_length()), 1)
            elif next(complete(n, count, llm, 1), None):
                yield from complete(n, count, llm, ahead)


def _complete(
    problem: Problem,
    objective: Objective,
    llm: OptionTable,
    n: int,
    tables: Sequence[OptionTable],
    encoders: Sequence[str],
    count: int,
    limit: Callable[[], float],
) -> Iterator[tuple[float, int, dict[str, Choice]]]:
    """Yield candidates with the LLM's option `n`, and encoders on the devices that are left."""
    remaining = problem.cluster.devices - llm.devices[n]
    llm_scores = Scores._make(column[n] for column in llm.scores)
    devices = np.zeros(1)
    scores = Scores._make(np.zeros(1) for _ in Scores._fields)
    index = np.zeros((1, 0), np.int64)
    # All combinations that fit the remaining devices, encoder by encoder: `index` [combinations,
    # encoders] is of options. Combination 1 of 3 with usable options 0 2 of the next encoder
    # becomes two; a and b are the numbers of both, (0 0 1 1 2 2) and (0 1 0 1 0 1).
    for table in tables:
        divides = compatible_ranks(table.ranks, llm.choices[n])
        seconds = objective.total(table.scores, llm_scores, count)
        usable = np.flatnonzero(divides & (table.devices <= remaining) & (seconds < limit()))
        a, b = (x.ravel() for x in np.indices((len(devices), len(usable))))
        total = devices[a] + table.devices[usable[b]]
        a, b, devices = (
            a[total <= remaining],
            usable[b[total <= remaining]],
            total[total <= remaining],
        )
        scores = Scores(
            objective.merge_paths(scores.path[a], table.scores.path[b]),
            np.maximum(scores.step[a], table.scores.step[b]),
            np.maximum(scores.tail[a], table.scores.tail[b]),
        )
        index = np.column_stack([index[a], b])
    totals = objective.total(scores, llm_scores, count)
    for k in np.argsort(totals, kind="stable"):
        if totals[k] >= limit():
            return
        chosen = {
            name: table.choices[i]
            for name, table, i in zip(encoders, tables, index[k], strict=True)
        }
        yield float(totals[k]), count, {**chosen, "llm": llm.choices[n]}


def allocate(problem: Problem, simulations: int = SIMULATIONS) -> Allocation | None:
    """Find the allocation with the least simulated seconds of a step; None where nothing fits.

    An encoder's ranks divide the LLM's or are a multiple of them; shards are powers of two; stages
    are cut by time, exactly. The result is exact if the bounds leave no more candidates than
    `simulations`.
    """
    best: Allocation | None = None
    bound = BOUND_WITH_GENERATOR if problem.generators else BOUND
    candidates = search(problem, bound, lambda: np.inf if best is None else best.seconds)
    for _, (_, count, chosen) in zip(range(simulations), candidates, strict=False):
        allocation = simulate_choice(problem, chosen, count)
        if best is None or allocation.seconds < best.seconds:
            best = allocation
    return best
