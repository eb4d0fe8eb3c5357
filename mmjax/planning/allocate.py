"""Allocate devices to the towers of a model: tensor parallelism, replicas, shards and stages of each, for least time.

MMScale (section 4.2) minimises a sum of two terms, warm-up and steady state. Here every candidate has a lower bound,
and those that the bound leaves are simulated, best first. The towers may use fewer devices than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.planning.tower_options import Choice, Problem, TowerOptions, link_bandwidth, list_options

SIMULATIONS = 4_000  # at most


class TowerAllocation(NamedTuple):
    """Devices of a tower."""

    tensor: int
    data: int
    fsdp: int
    cuts: tuple[int, ...]  # first layers of its stages but the first

    @property
    def stages(self) -> int:
        """Count its stages."""
        return len(self.cuts) + 1

    @property
    def devices(self) -> int:
        """Count its devices."""
        return self.tensor * self.data * self.fsdp * self.stages


@dataclass(frozen=True)
class Allocation:
    """The devices of all towers, the microbatches of a step, and the simulated seconds of the step."""

    towers: dict[str, TowerAllocation]
    microbatches: int
    seconds: float
    bubble: float

    @property
    def devices(self) -> int:
        """Count the devices that are used."""
        return sum(tower.devices for tower in self.towers.values())


# ----------------------------------------------------------------------------------------------------- simulation


@njit(cache=True)
def makespan(forward, backward, following, edge, depth, microbatches):
    """Return the seconds of a step in 1F1B with equal microbatches, as `planning.simulate` does with blocking senders.

    following: int `[stages]`, the stage that takes what a stage makes, -1 for the last; a stage stands behind those
    that it takes from. edge: seconds of that transfer. depth: stages behind.
    """
    stages = len(forward)
    ends = np.full((2, stages, microbatches), -1.0)
    free = np.zeros(stages)
    position = np.zeros(stages, np.int64)
    received = np.zeros(stages)  # the longest transfer into each stage, which its backward pass makes in return
    for s in range(stages):
        if following[s] >= 0:
            received[following[s]] = max(received[following[s]], edge[s])
    unfinished = stages
    while unfinished:
        for s in range(stages):
            warmup = min(depth[s], microbatches)
            while position[s] < 2 * microbatches:
                turn = position[s] - warmup
                kind, number = 1, position[s] - microbatches
                if turn < 0:
                    kind, number = 0, position[s]
                elif turn < 2 * (microbatches - warmup):
                    kind, number = turn % 2, turn // 2 + (warmup if turn % 2 == 0 else 0)
                start = free[s]
                ready = True
                if kind == 0:
                    for producer in range(s):
                        if following[producer] == s:
                            ready = ready and ends[0, producer, number] >= 0
                            start = max(start, ends[0, producer, number] + edge[producer])
                elif following[s] >= 0:
                    ready = ends[1, following[s], number] >= 0
                    start = max(start, ends[1, following[s], number] + edge[s])
                if not ready:
                    break
                ends[kind, s, number] = start + (forward[s] if kind == 0 else backward[s])
                sent = received[s] if kind == 1 else (edge[s] if following[s] >= 0 else 0.0)
                free[s] = ends[kind, s, number] + sent
                position[s] += 1
                if position[s] == 2 * microbatches:
                    unfinished -= 1
    return ends.max()


def simulate_choice(problem: Problem, chosen: Mapping[str, Choice], microbatches: int) -> Allocation:
    """Simulate a step with equal microbatches. Links of a node count only where the cluster is one node."""
    last = [problem.generator] if problem.generator in chosen else []
    names = [*(name for name in chosen if name not in ("llm", *last)), "llm", *last]
    counts = [len(chosen[name][0].cuts) + 1 for name in names]
    at_llm = names.index("llm")
    first_of_llm = sum(counts[:at_llm])
    behind_llm = sum(counts[at_llm + 1 :])
    forward, backward, following, edge, depth = [], [], [], [], []
    llm, k = chosen["llm"]

    def transfer(name: str) -> float:
        """Return the seconds in which tokens travel between the LLM and another tower."""
        options, n = chosen[name]
        sent = options.share[n] * options.costs.tokens / link_bandwidth(problem.cluster)
        return sent * max(options.ranks[n] / llm.ranks[k], llm.costs.tensor / options.costs.tensor)

    for number, (name, stages) in enumerate(zip(names, counts, strict=True)):
        options, n = chosen[name]
        begin = len(forward)
        forward += options.forward[n].tolist()
        backward += options.backward[n].tolist()
        following += range(begin + 1, begin + stages)
        # Of a step's bytes, those that a device sends or receives, whichever are more.
        edge += [options.edge[n]] * (stages - 1)
        downstream = counts[at_llm] + behind_llm if number < at_llm else behind_llm if name == "llm" else 0
        depth += range(downstream + stages - 1, downstream - 1, -1)
        # Encoders send to the LLM, the LLM to the generator, and the last of both to nobody.
        is_last = number == len(names) - 1
        following.append(-1 if is_last else first_of_llm if number < at_llm else begin + stages)
        edge.append(0.0 if is_last else transfer(name if number < at_llm else names[-1]))
    arrays = [np.array(column, np.float64) for column in (forward, backward, edge)]
    following_, depth_ = np.array(following, np.int64), np.array(depth, np.int64)
    passes = float(makespan(arrays[0], arrays[1], following_, arrays[2], depth_, microbatches))
    busy = microbatches * float(arrays[0].sum() + arrays[1].sum())
    return Allocation(
        towers={
            name: TowerAllocation(options.costs.tensor, int(options.data[n]), int(options.fsdp[n]), options.cuts)
            for name, (options, n) in chosen.items()
        },
        microbatches=microbatches,
        seconds=passes + max(float(options.tail[n]) for options, n in chosen.values()),
        bubble=1 - busy / (len(forward) * passes),
    )


# --------------------------------------------------------------------------------------------------------- search


class Scores(NamedTuple):
    """Scores of options by an objective, `[options]` each."""

    path: np.ndarray  # seconds of one microbatch through all stages
    alone: np.ndarray  # seconds of the step, if the other towers took no time
    tail: np.ndarray


class Objective(NamedTuple):
    """Rules by which towers are scored, and scores of several make one."""

    score: Callable[[TowerOptions, int], Scores]
    merge_paths: Callable[[np.ndarray, np.ndarray], np.ndarray]  # of two encoders
    total: Callable[[Scores, Scores, int], np.ndarray]  # of encoders and LLM
    generator_path: float = 0.0  # share of a generator's path that counts like an encoder's


def _score_bound(options: TowerOptions, microbatches: int) -> Scores:
    passes, stages = options.passes, options.passes.shape[1]
    edges = options.edge[:, None]
    number = np.arange(stages)
    # Before a stage begins, its first microbatch passes all before it; behind its end, its last goes back through them.
    before = np.cumsum(passes, axis=1) - passes + 2 * number * edges
    # A stage sends forwards and back, and waits for both; behind its last pass that no longer counts.
    sends = ((number > 0) * 1 + (number < stages - 1)) * edges
    busy = before + microbatches * passes + (microbatches - 1) * sends
    # A microbatch enters when that which is `depth + 1` before it has come back from all stages behind.
    depth = stages - 1 - number
    rounds, rest = np.divmod(microbatches - 1, depth + 1)
    back = np.cumsum(passes[:, ::-1], axis=1)[:, ::-1] + 2 * depth * edges
    waiting = before + (rounds + 1) * back + rest * options.forward
    alone = busy if options.costs.tokens else np.maximum(busy, waiting)
    return Scores(passes.sum(1) + 2 * (stages - 1) * options.edge, alone.max(1), options.tail)


def _score_busy(options: TowerOptions, microbatches: int) -> Scores:
    """Score as `_score_bound`, but let any number of microbatches be in flight: one more is with a generator."""
    passes, stages = options.passes, options.passes.shape[1]
    edges = options.edge[:, None]
    upstream = np.cumsum(passes, axis=1) - passes + 2 * np.arange(stages) * edges
    path = passes.sum(1) + 2 * (stages - 1) * options.edge
    return Scores(path, (upstream + microbatches * passes).max(1), options.tail)


def _total_bound(encoders: Scores, llm: Scores, _: int) -> np.ndarray:
    return np.maximum(encoders.path + llm.alone, encoders.alone) + np.maximum(encoders.tail, llm.tail)


# A lower bound: the LLM's stages begin when an encoder's path ends, and the longest path counts. Of a generator's none
# does: while it has a microbatch, the LLM goes on with others.
BOUND = Objective(_score_bound, np.maximum, _total_bound)
BOUND_WITH_GENERATOR = Objective(_score_busy, np.maximum, _total_bound)


class OptionTable(NamedTuple):
    """Options of an encoder in all numbers of stages, `[options]` each."""

    choices: list[Choice]
    devices: np.ndarray
    ranks: np.ndarray
    scores: Scores


def make_table(groups: Sequence[TowerOptions], microbatches: int, objective: Objective) -> OptionTable:
    scores = [objective.score(options, microbatches) for options in groups]
    empty = np.zeros(0)

    def join(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([empty, *columns])

    return OptionTable(
        [(options, n) for options in groups for n in range(len(options.data))],
        join([options.devices for options in groups]),
        join([options.ranks for options in groups]),
        Scores(*(join(columns) for columns in zip(*scores, strict=True)) if scores else (empty, empty, empty)),
    )


def compatible_ranks(ranks: np.ndarray, llm: Choice) -> np.ndarray:
    """Return which numbers of an encoder's ranks divide those of the LLM's, or are a multiple of them."""
    of_llm = int(llm[0].ranks[llm[1]])
    return (ranks % of_llm == 0) | (of_llm % np.maximum(ranks, 1) == 0)


def encoder_tables(
    problem: Problem, objective: Objective, microbatches: int, stages: int, rows: int
) -> list[OptionTable]:
    """Tabulate the options of all encoders before an LLM of so many stages and ranks, and of a generator behind it."""
    tables = []
    for name in problem.towers:
        if name == "llm":
            continue
        table = make_table(list_options(problem, name, microbatches, stages, rows), microbatches, objective)
        if name == problem.generator:
            scores = table.scores._replace(path=objective.generator_path * table.scores.path)
            table = table._replace(scores=scores)
        tables.append(table)
    return tables


def rank_llms(problem: Problem, objective: Objective) -> list[tuple[float, int, OptionTable, int]]:
    """Sort the LLM's options by their score without encoders; each with its microbatches, table and number in it."""
    none = Scores(*(np.zeros(1) for _ in Scores._fields))
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

    def complete(n: int, count: int, llm: OptionTable, stages: int) -> Iterator[tuple[float, int, dict[str, Choice]]]:
        """Yield candidates with encoders before so many stages."""
        # No more than all microbatches are in flight, and most rows are larger than the smallest.
        rows = int(llm.ranks[n])
        small = max((costs.smallest[count] for name in encoders for costs in problem.towers[name]), default=0.0)
        key = count, min(stages, count), rows if rows * count * small > 1 else 1
        if key not in tables:
            tables[key] = encoder_tables(problem, objective, *key)
        return _complete(problem, objective, llm, n, tables[key], encoders, count, limit)

    # First the best of every LLM's, for a limit that leaves little of the others. Tables for few numbers of stages do:
    # before more stages than there are nothing is faster, and before one nothing is slower.
    for first in (True, False):
        for score, count, llm, n in llms:
            if score >= limit():
                break
            stages = llm.choices[n][0].passes.shape[1]
            if first:
                yield from islice(complete(n, count, llm, 1 << (stages - 1).bit_length()), 1)
            elif next(complete(n, count, llm, 1), None):
                yield from complete(n, count, llm, stages)


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
    left = problem.cluster.devices - llm.devices[n]
    llm_scores = Scores(*(column[n] for column in llm.scores))
    devices, scores = np.zeros(1), Scores(*(np.zeros(1) for _ in Scores._fields))
    index = np.zeros((1, 0), np.int64)
    for table in tables:
        divides = compatible_ranks(table.ranks, llm.choices[n])
        alone = objective.total(table.scores, llm_scores, count)
        usable = np.flatnonzero(divides & (table.devices <= left) & (alone < limit()))
        a, b = (x.ravel() for x in np.indices((len(devices), len(usable))))
        total = devices[a] + table.devices[usable[b]]
        a, b, devices = a[total <= left], usable[b[total <= left]], total[total <= left]
        scores = Scores(
            objective.merge_paths(scores.path[a], table.scores.path[b]),
            np.maximum(scores.alone[a], table.scores.alone[b]),
            np.maximum(scores.tail[a], table.scores.tail[b]),
        )
        index = np.column_stack([index[a], b])
    totals = objective.total(scores, llm_scores, count)
    for k in np.argsort(totals, kind="stable"):
        if totals[k] >= limit():
            return
        chosen = {name: table.choices[i] for name, table, i in zip(encoders, tables, index[k], strict=True)}
        yield float(totals[k]), count, {**chosen, "llm": llm.choices[n]}


def allocate(problem: Problem, simulations: int = SIMULATIONS) -> Allocation | None:
    """Find the allocation with the least simulated seconds of a step; None where nothing fits.

    An encoder's ranks divide the LLM's or are a multiple of them; shards are powers of two; stages are cut by time,
    exactly. The result is exact if the bounds leave no more candidates than `simulations`.
    """
    best: Allocation | None = None
    bound = BOUND_WITH_GENERATOR if problem.generator else BOUND
    candidates = search(problem, bound, lambda: np.inf if best is None else best.seconds)
    for _, (_, count, chosen) in zip(range(simulations), candidates, strict=False):
        allocation = simulate_choice(problem, chosen, count)
        if best is None or allocation.seconds < best.seconds:
            best = allocation
    return best
