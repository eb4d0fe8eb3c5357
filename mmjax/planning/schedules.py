"""Order the forward and backward passes of a pipeline's stages: GPipe, 1F1B (eager, interleaved, nested).

Stages form a directed acyclic graph that ends in stages which compute losses, the sinks: encoders
that do not depend on each other run side by side before the LLM (modality parallelism, Cornstarch
section 4.1), generators behind it, whose backward passes then come before that of the LLM's last
stage. Each group of devices, a worker, runs one stage, or several chunks of layers where the
schedule is interleaved (Megatron-LM, Narayanan et al. 2021; MMScale section 4.3). Encoders may have
a copy on every worker of the LLM, whose passes are nested in the LLM's idle time (BigMac). All
functions are pure, so every process computes the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Literal, NamedTuple

import numpy as np

from mmjax.config import Config
from mmjax.config.unit_stages import LayerRange, cut_unit
from mmjax.planning.nesting import NestedPasses, nest

ScheduleName = Literal["gpipe", "1f1b", "eager", "interleaved", "nested"]
Pass = Literal["forward", "backward"]


class UnitStage(NamedTuple):
    """Layers of one tower or several on some devices of a unit."""

    pieces: tuple[LayerRange, ...]
    name: str  # "vision[16:24] + llm[0:8]", and of whole towers "vision"
    unit: str
    part: int  # of the unit's devices, which its stages take in turn
    copy: tuple[int, int] = (0, 1)  # its number and the count of copies, as in `StageGraph`


def list_stages(config: Config) -> list[UnitStage]:
    """List the stages of all units, in the order of their devices."""
    stages = []
    for name, unit in config.units.items():
        copies = config.units[unit.beside].pipeline if unit.beside else 1
        for copy, (number, pieces) in product(
            range(copies), enumerate(cut_unit(config.model, name, unit))
        ):
            layers = " + ".join(
                tower
                if config.model.towers[tower].layers == stop - start
                else f"{tower}[{start}:{stop}]"
                for tower, start, stop in pieces
            )
            stage = UnitStage(
                pieces=pieces,
                name=f"{layers} copy {copy}" if unit.beside else layers,
                unit=unit.beside or name,
                # With virtual stages, n and n + pipeline are on the same devices.
                part=copy if unit.beside else number % unit.pipeline,
                copy=(copy, copies),
            )
            stages.append(stage)
    return stages


def stage_cuts(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the layers before which each tower is cut."""
    cuts: dict[str, tuple[int, ...]] = {}
    for stage in list_stages(config):
        for tower, start, _ in stage.pieces if stage.copy[0] == 0 else ():
            cuts[tower] = cuts.get(tower, ()) + (start,) * (start > 0)
    return cuts


def schedule_name(config: Config) -> ScheduleName:
    """Resolve the schedule."""
    schedule = config.pipeline.schedule
    if schedule != "auto":
        return schedule
    if any(unit.beside for unit in config.units.values()):
        return "nested"
    return "interleaved" if any(unit.virtual > 1 for unit in config.units.values()) else "1f1b"


def stage_times(config: Config) -> tuple[tuple[int, int], ...]:
    """Return the forward and backward time of every stage by which a nested schedule is made."""
    times = config.pipeline.stage_times
    return tuple(zip(times[::2], times[1::2], strict=True))


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

    A stage without a backward pass has an empty one all the same: waiting for it keeps a frozen
    encoder from running ahead of the stages that consume its activations, which would hold them all
    in memory.
    """

    kind: Pass
    stage: int
    microbatch: int


@dataclass(frozen=True)
class StageGraph:
    """Stages by number, the edges between them, and the worker that runs each. Raises ValueError for a cycle."""

    # (producer, consumer) of activations; gradients go the other way
    edges: tuple[tuple[int, int], ...]
    workers: tuple[int, ...]  # of every stage; equal numbers share devices
    # By stage: of a copy its number and their count; copy 1 of 4 runs microbatches 1, 5, 9, ...
    # Empty: no copies.
    copies: tuple[tuple[int, int], ...] = ()
    # Forward and backward time of every stage in whole numbers, for a nested schedule. Empty: 1 and
    # 2.
    times: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        stages = range(len(self.workers))
        if unknown := [edge for edge in self.edges if not set(edge) <= set(stages)]:
            raise ValueError(
                f"the edge {unknown[0]} leads to no stage: there are {len(self.workers)}"
            )
        if len(self.topological) < len(self.workers):
            raise ValueError(
                f"the stages {sorted(set(stages) - set(self.topological))} depend on each other in a circle"
            )
        unlinked = sorted(set(stages) - {stage for edge in self.edges for stage in edge})
        if unlinked and len(stages) > 1:
            raise ValueError(f"the stages {unlinked} are linked to no other stage")

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages whose activations a stage takes, by stage."""
        return tuple(
            tuple(a for a, b in self.edges if b == stage) for stage in range(len(self.workers))
        )

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Return the stages that take a stage's activations, by stage."""
        return tuple(
            tuple(b for a, b in self.edges if a == stage) for stage in range(len(self.workers))
        )

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """Return the stages, every one behind its producers; those on a cycle are missing."""
        # Kahn's algorithm: a stage follows when all of its producers have.
        order: list[int] = []
        waiting = [len(producers) for producers in self.producers]
        ready = [stage for stage, count in enumerate(waiting) if not count]
        while ready:
            order.append(ready.pop(0))
            for consumer in self.consumers[order[-1]]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    ready.append(consumer)
        return tuple(order)

    @cached_property
    def sinks(self) -> tuple[int, ...]:
        """Return the stages without consumers. Each computes a loss, and runs backward with its forward pass."""
        return tuple(stage for stage, consumers in enumerate(self.consumers) if not consumers)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Count the edges between workers on the longest path from a stage to a sink, by stage."""
        depths = [0] * len(self.workers)
        for stage in reversed(self.topological):
            lengths = (
                depths[c] + (self.workers[c] != self.workers[stage]) for c in self.consumers[stage]
            )
            depths[stage] = max(lengths, default=0)
        return tuple(depths)

    def runs(self, stage: int, microbatch: int) -> bool:
        """Tell whether a microbatch goes through a stage: of copies it takes one."""
        copy, copies = self.copies[stage] if self.copies else (0, 1)
        return microbatch % copies == copy

    def needs(self, action: Action) -> list[tuple[Action, tuple[int, int] | None]]:
        """List the actions whose results an action takes, with the edge over which they come, None within a stage."""
        kind, stage, microbatch = action
        if kind == "forward":
            producers = [s for s in self.producers[stage] if self.runs(s, microbatch)]
            return [(Action(kind, s, microbatch), (s, stage)) for s in producers]
        needs: list[tuple[Action, tuple[int, int] | None]] = [
            (Action("forward", stage, microbatch), None)
        ]
        return [*needs, *((Action(kind, s, microbatch), (stage, s)) for s in self.consumers[stage])]

    @cached_property
    def by_worker(self) -> StageGraph:
        """Build the graph of the workers. Raises ValueError where others lie between the stages of one."""
        edges = ((self.workers[a], self.workers[b]) for a, b in self.edges)
        between = tuple(dict.fromkeys((a, b) for a, b in edges if a != b))
        try:
            return StageGraph(between, tuple(range(max(self.workers) + 1)))
        except ValueError as error:
            raise ValueError(
                "other workers' stages lie between those of one worker; use interleaved"
            ) from error

    @cached_property
    def workers_in_turn(self) -> int:
        """Count the workers that a microbatch passes one after the other, on the longest path."""
        passed: list[frozenset[int]] = [frozenset()] * len(self.workers)
        for stage in self.topological:
            longest = max((passed[p] for p in self.producers[stage]), key=len, default=frozenset())
            passed[stage] = longest | {self.workers[stage]}
        return max(map(len, passed))


def unit_graph(config: Config) -> StageGraph:
    """Link the stages of `list_stages` by the activations that go from one to another."""
    stages = list_stages(config)
    devices = list(dict.fromkeys((stage.unit, stage.part) for stage in stages))
    edges = dict.fromkeys((sender, receiver) for (sender, _), (receiver, _) in unit_links(config))
    return StageGraph(
        edges=tuple(edges),
        workers=tuple(devices.index((stage.unit, stage.part)) for stage in stages),
        copies=tuple(stage.copy for stage in stages),
        times=stage_times(config),
    )


PieceNumber = tuple[int, int]  # of a stage, and of a piece in it


def unit_links(config: Config) -> list[tuple[PieceNumber, PieceNumber]]:
    """List which pieces go on from which in another stage: of its tower, of an encoder the LLM, of the LLM generators.

    A deepstack's further edges are no constraint: what is added later leaves the encoder before its
    last layer does.
    """
    stages = list_stages(config)
    pieces = {
        (n, k): piece for n, stage in enumerate(stages) for k, piece in enumerate(stage.pieces)
    }
    begins = {
        (piece.tower, piece.start, stages[number[0]].copy): number
        for number, piece in pieces.items()
    }
    only = (0, 1)
    links = []
    for number, (tower, _, stop) in pieces.items():
        following = [(tower, stop, stages[number[0]].copy)]
        if stop == config.model.towers[tower].layers:
            following = [(name, 0, only) for name in config.model.towers_behind(tower)]
        links += [(number, begins[key]) for key in following if begins[key][0] != number[0]]
    return links


@dataclass(frozen=True)
class Schedule:
    """The actions of every worker in order, for a number of microbatches."""

    graph: StageGraph
    microbatches: int
    orders: tuple[tuple[Action, ...], ...] = field(repr=False)  # by worker

    def in_flight_bound(self, stage: int) -> int:
        """Return the largest number of microbatches between their forward and backward pass through a stage."""
        count = largest = 0
        for action in self.orders[self.graph.workers[stage]]:
            if action.stage == stage:
                count += 1 if action.kind == "forward" else -1
                largest = max(largest, count)
        return largest


def make_schedule(name: ScheduleName, graph: StageGraph, microbatches: int) -> Schedule:
    """Order the actions of all workers.

    `gpipe` runs all forward passes first and holds every microbatch's activations. `1f1b` runs as
    many forward passes ahead as a stage is deep, so that it holds depth + 1 microbatches. `eager`
    runs twice as many ahead, which hides the time of transfers at the cost of memory. `interleaved`
    is for workers with several chunks of the LLM; the other stages run ahead as far as their
    consumers need. Otherwise a worker's stages, an encoder beside another or before the LLM's first
    layers, or generators behind its last, run as one. Raises ValueError where others lie between a
    worker's stages, and where an interleaved schedule's chunks do not go round its workers.
    `nested` is for encoders with copies beside the LLM's stages, whose order is that of 1f1b.
    """
    if name == "nested":
        return _nested(graph, microbatches)
    if name == "interleaved":
        return _interleaved(graph, microbatches)
    ahead = {
        "gpipe": lambda depth: microbatches if depth else 0,
        "1f1b": lambda depth: depth,
        "eager": lambda d: 2 * d,
    }
    orders = [
        _one_forward_one_backward(graph, worker, ahead[name](depth), microbatches)
        for worker, depth in enumerate(graph.by_worker.depths)
    ]
    return Schedule(graph, microbatches, tuple(orders))


def _one_forward_one_backward(
    graph: StageGraph, worker: int, warmup: int, microbatches: int
) -> tuple[Action, ...]:
    """Run `warmup` forward passes, then forward and backward passes in turn, then the remaining backward passes."""
    # Warm-up 2 with 4 microbatches: F0 F1 | F2 B0 F3 B1 | B2 B3. A sink has F and B of a microbatch
    # at once, so its warm-up is 0: F0 B0 F1 B1 F2 B2 F3 B3.
    warmup = min(warmup, microbatches)
    stages = [stage for stage in graph.topological if graph.workers[stage] == worker]

    def forward(microbatch: int) -> list[Action]:
        kinds = {
            stage: ("forward", "backward") if stage in graph.sinks else ("forward",)
            for stage in stages
        }
        return [Action(kind, stage, microbatch) for stage in stages for kind in kinds[stage]]

    def backward(microbatch: int) -> list[Action]:
        return [
            Action("backward", stage, microbatch)
            for stage in reversed(stages)
            if stage not in graph.sinks
        ]

    order = [action for i in range(warmup) for action in forward(i)]
    for i in range(microbatches - warmup):
        order += [*forward(warmup + i), *backward(i)]
    return (
        *order,
        *(action for i in range(microbatches - warmup, microbatches) for action in backward(i)),
    )


@lru_cache
def _nested(graph: StageGraph, microbatches: int) -> Schedule:
    """Order the other stages as 1f1b does without copies, and place the copies' passes where workers would wait."""
    stages = range(len(graph.workers))
    hosts = [stage for stage in stages if not graph.copies or graph.copies[stage][1] == 1]
    edges = ((hosts.index(a), hosts.index(b)) for a, b in graph.edges if a in hosts and b in hosts)
    without = make_schedule(
        "1f1b", StageGraph(tuple(edges), tuple(graph.workers[s] for s in hosts)), microbatches
    )
    nested = [stage for stage in stages if stage not in hosts]
    if not nested:
        return Schedule(graph, microbatches, without.orders)
    first = max(
        (c for s in nested for c in graph.consumers[s] if c in hosts), key=graph.depths.__getitem__
    )
    sequences: list[tuple[list[Action], ...]] = []
    outer: set[int] = set()  # the first of every worker's copies, and the last to run backward
    for worker, order in enumerate(without.orders):
        beside = [stage for stage in nested if graph.workers[stage] == worker]
        turns = [m for m in range(microbatches) if beside and graph.runs(beside[0], m)]
        outer.update(beside[:1])
        sequences.append(
            (
                [action._replace(stage=hosts[action.stage]) for action in order],
                [Action("forward", stage, m) for m in turns for stage in beside],
                [Action("backward", stage, m) for m in turns for stage in reversed(beside)],
            )
        )
    # All passes in one list, worker after worker, each with its three sequences: `ends` are their
    # ends, from which `bounds` [workers, 3, 2] has (begin, end) of each.
    actions = [action for parts in sequences for part in parts for action in part]
    number = {action: n for n, action in enumerate(actions)}
    needs = [[number[need] for need, _ in graph.needs(action)] for action in actions]
    ends = np.cumsum([len(part) for parts in sequences for part in parts])
    times = graph.times or ((1, 2),) * len(stages)
    passes = NestedPasses(
        queue=np.arange(len(actions)),
        bounds=np.stack([np.array([0, *ends[:-1]]), ends], 1).reshape(-1, 3, 2),
        length=np.array([times[a.stage][a.kind == "backward"] for a in actions]),
        need_start=np.cumsum([0, *map(len, needs)]),
        needs=np.array([n for numbers in needs for n in numbers], np.int64),
        microbatch=np.array([a.microbatch for a in actions]),
        takes_tokens=np.array([a.kind == "forward" and a.stage == first for a in actions]),
        opens=np.array([a.kind == "forward" and a.stage in outer for a in actions]),
        closes=np.array([a.kind == "backward" and a.stage in outer for a in actions]),
    )
    orders = nest(passes, graph.copies[nested[0]][1], graph.depths[first])
    return Schedule(
        graph, microbatches, tuple(tuple(actions[n] for n in order) for order in orders)
    )


def _interleaved(graph: StageGraph, microbatches: int) -> Schedule:
    """Order chunks as Megatron-LM does, and every stage before them as far ahead as its consumers need."""
    # Stages that run as one are as deep, chunks are not.
    depths = {
        worker: {d for d, w in zip(graph.depths, graph.workers, strict=True) if w == worker}
        for worker in graph.workers
    }
    chunked = {worker for worker in graph.workers if len(depths[worker]) > 1}
    chain = [stage for stage in graph.topological if graph.workers[stage] in chunked]
    workers = list(dict.fromkeys(graph.workers[stage] for stage in chain))
    chunks, rest = divmod(len(chain), max(1, len(workers)))
    # The chain of chunks must go round the workers, and no other stage may stand in it. Chunk c of
    # worker w is stage number c * workers + w of the chain: every worker's turn comes once a chunk.
    round_robin = [graph.workers[stage] for stage in chain] == workers * chunks and not rest
    linked = all(edge in graph.edges for edge in pairwise(chain))
    if not chain or not round_robin or not linked:
        raise ValueError(
            "an interleaved schedule needs equally many chunks of layers on each of its workers, in turn"
        )
    depth = graph.depths[chain[-1]]
    # Workers take turns in groups of as many microbatches. Where the last group is not full, the
    # turns of those that it lacks are left out, which contradicts no dependency of the others.
    rounded = -(-microbatches // len(workers)) * len(workers)
    orders: list[tuple[Action, ...]] = [()] * (max(graph.workers) + 1)
    for rank, worker in enumerate(workers):
        order = _interleaved_order(chain, rank, len(workers), chunks, rounded, depth)
        orders[worker] = tuple(action for action in order if action.microbatch < microbatches)
    # From the LLM outwards, as an encoder must be as far ahead as the stage that consumes it ever
    # is.
    for worker in dict.fromkeys(graph.workers[stage] for stage in reversed(graph.topological)):
        if worker in chunked:
            continue
        (own_depth,) = depths[worker]
        if own_depth < depth:
            # Behind the chain no group of microbatches may wait for the next one's forward passes.
            groups = (
                range(i, min(i + len(workers), microbatches))
                for i in range(0, microbatches, len(workers))
            )
            orders[worker] = tuple(
                action._replace(microbatch=group[action.microbatch])
                for group in groups
                for action in _one_forward_one_backward(graph, worker, own_depth, len(group))
            )
            continue
        consumers = [
            c
            for stage, w in enumerate(graph.workers)
            if w == worker
            for c in graph.consumers[stage]
        ]
        warmup = max((_lead(orders[graph.workers[c]], c) for c in consumers), default=0)
        orders[worker] = _one_forward_one_backward(graph, worker, warmup, microbatches)
    return Schedule(graph, microbatches, tuple(orders))


def _interleaved_order(
    chain: Sequence[int], rank: int, workers: int, chunks: int, microbatches: int, depth: int
) -> tuple[Action, ...]:
    """Order one worker's chunks: groups of as many microbatches as there are workers, chunk after chunk.

    depth: stages behind the last chunk.
    """
    total = microbatches * chunks

    def action(kind: Pass, turn: int) -> Action:
        # With 4 workers and 2 chunks, turns 0-3 are microbatches 0-3 of the first chunk, 4-7 the
        # same of the second, 8-11 microbatches 4-7 of the first; backward passes begin with the
        # last chunk.
        chunk = turn % (workers * chunks) // workers
        chunk = chunk if kind == "forward" else chunks - 1 - chunk
        microbatch = turn // (workers * chunks) * workers + turn % workers
        return Action(kind, chain[chunk * workers + rank], microbatch)

    # As in Megatron-LM: two more for every worker behind this one, and a whole group for every
    # chunk but the last.
    warmup = min(total, (workers - rank - 1) * 2 + (chunks - 1) * workers + depth)
    order = [action("forward", turn) for turn in range(warmup)]
    for turn in range(total - warmup):
        order += [action("forward", warmup + turn), action("backward", turn)]
    return (*order, *(action("backward", turn) for turn in range(total - warmup, total)))


def _lead(order: Sequence[Action], stage: int) -> int:
    """Return how many forward passes a stage is ahead of its backward passes at most, when one of these begins."""
    lead = ahead = 0
    for action in order:
        if action.stage == stage:
            lead = max(lead, ahead) if action.kind == "backward" else lead
            ahead += 1 if action.kind == "forward" else -1
    return lead
