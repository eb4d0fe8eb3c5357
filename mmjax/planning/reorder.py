"""Order the microbatches of a step so that the stages of a pipeline wait less: inter-microbatch reordering.

MMScale section 5.2: its algorithm 3 gives a first order, which pairwise exchanges improve in the
simulator; the order as planned stays unless the result is simulated to be faster. A pure function
of whole numbers, with a fixed number of simulations, so that every process comes to the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numba import njit

from mmjax.config import Config
from mmjax.config.training import unit_devices
from mmjax.config.unit_stages import LayerRange
from mmjax.planning.flops import Flops, layer_policies, stage_flops
from mmjax.planning.hardware import SHEET
from mmjax.planning.schedules import (
    ScheduleName,
    StageGraph,
    list_stages,
    make_schedule,
    schedule_name,
    unit_graph,
)
from mmjax.planning.simulate import total_order

SIMULATIONS = 512  # of exchanges, for one step
UNITS = 2**30  # of time, in the longest pass


@dataclass(frozen=True)
class Reordering:
    """Times by which the microbatches of a step are ordered.

    A pass takes what its shape takes, padding included, and its attention what the pairs of the
    fullest rank take.
    """

    schedule: ScheduleName
    graph: StageGraph
    forward: np.ndarray  # int64 [stages, shapes], in units of time
    backward: np.ndarray
    # float64 [2, stages, modules], the LLM first: forward and backward, of a pair; 0: shapes have
    # full rows' attention
    pair: np.ndarray

    def order(self, shapes: Sequence[int], pairs: np.ndarray) -> list[int]:
        """Order microbatches of these shapes, by number. pairs: int `[modules, m]`, if each rank had the fullest's."""
        columns = np.asarray(shapes)
        attention = np.rint(self.pair[..., None] * pairs).astype(np.int64).sum(2)
        forward = self.forward[:, columns] + attention[0]
        backward = self.backward[:, columns] + attention[1]
        return reorder(self.schedule, self.graph, forward, backward).tolist()


def make_reordering(
    config: Config, rows: Sequence[int], lengths: Sequence[Sequence[int]], by_content: bool = True
) -> Reordering:
    """Count the FLOPs of a config's stages for microbatches of every shape, as times to reorder by.

    rows: of each module on all ranks, the LLM first. lengths: of the rows, by shape and module.
    by_content: attention counts by the pairs of each microbatch, else as in rows that one sample
    fills.
    """
    seconds, pair = time_stages(config, rows, lengths, by_content)
    scale = UNITS / seconds.max()
    # Whole numbers, which all processes add up alike.
    forward, backward = np.rint(seconds * scale).astype(np.int64)
    return Reordering(schedule_name(config), unit_graph(config), forward, backward, pair * scale)


def time_stages(
    config: Config, rows: Sequence[int], lengths: Sequence[Sequence[int]], by_content: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return FLOPs by device of stages' passes, `[2, stages, shapes]`, and of a pair, `[2, stages, modules]`.

    Arguments as of `make_reordering`.
    """
    stages = list_stages(config)
    names = ["llm", *config.model.item_modules]
    seconds = np.zeros((2, len(stages), len(lengths)))
    pair = np.zeros((2, len(stages), len(names)))
    many = 1e6  # pairs
    for number, stage in enumerate(stages):
        devices = unit_devices(config.units[stage.unit]) / config.units[stage.unit].pipeline
        for piece in stage.pieces:
            module = names.index(piece.tower)
            for k, shape in enumerate(lengths):
                flops = _flops_of_row(config, piece, shape, 0.0 if by_content else None)
                seconds[:, number, k] += np.array(flops[:2]) * rows[module] / devices
            if by_content:
                none, some = (
                    _flops_of_row(config, piece, lengths[0], pairs) for pairs in (0.0, many)
                )
                # As many FLOPs of products would take less time where a kernel computes attention.
                slower = SHEET.flops / SHEET.attention if some.attention > none.attention else 1.0
                pair[:, number, module] = (
                    (np.array(some[:2]) - np.array(none[:2])) / many * slower / devices
                )
    return seconds, pair


def _flops_of_row(
    config: Config, piece: LayerRange, shape: Sequence[int], pairs: float | None
) -> Flops:
    """Count the FLOPs of layers for one row of every module. pairs: None: those of a row with one sample."""
    towers = config.model.towers
    policies = layer_policies(towers[piece.tower])[piece.start : piece.stop]
    one_row = {tower: (1, length) for tower, length in zip(towers, shape, strict=True)}
    piece_pairs = None if pairs is None else dict.fromkeys(towers, 0.0) | {piece.tower: pairs}
    reference = config.loss.repeats_forward
    flops = stage_flops(
        config.model,
        piece.tower,
        piece.layers,
        policies,
        one_row,
        # Of generators in other stages the loss waits for their backward pass.
        logits_again=config.model.makes_images,
        pairs=piece_pairs,
        reference=reference,
    )
    return flops.at_one_rate


class _Program(NamedTuple):
    """A schedule's actions in an order that runs, as arrays for the simulation of many orders of microbatches."""

    stage: np.ndarray  # int64 [actions]
    microbatch: np.ndarray
    backward: np.ndarray  # 1: a backward pass, 0: a forward pass
    worker: np.ndarray
    # int64 [actions + 1]; action a waits for needs[need_start[a]:need_start[a + 1]]
    need_start: np.ndarray
    needs: np.ndarray  # numbers of actions


@lru_cache
def _program(name: ScheduleName, graph: StageGraph, microbatches: int) -> _Program:
    schedule = make_schedule(name, graph, microbatches)
    actions = total_order(schedule)
    number = {action: n for n, action in enumerate(actions)}
    needs = [[number[need] for need, _ in graph.needs(action)] for action in actions]
    return _Program(
        stage=np.array([a.stage for a in actions]),
        microbatch=np.array([a.microbatch for a in actions]),
        backward=np.array([int(a.kind == "backward") for a in actions]),
        worker=np.array([graph.workers[a.stage] for a in actions]),
        need_start=np.cumsum([0, *map(len, needs)]),
        needs=np.array([*chain(*needs)], np.int64),
    )


def reorder(
    name: ScheduleName, graph: StageGraph, forward: np.ndarray, backward: np.ndarray
) -> np.ndarray:
    """Return the order in which microbatches go through the stages, int64 `[m]`: 2, 0, 1 begins with microbatch 2.

    forward, backward: int64 `[stages, m]`, times of the passes in whole numbers of any unit.
    Microbatches of equal times stay in their order.
    """
    m = forward.shape[1]
    planned = np.arange(m)
    if not any(graph.depths):
        return planned  # one worker does all, in any order
    if m < 2 or bool(np.all((forward == forward[:, :1]) & (backward == backward[:, :1]))):
        return planned
    seconds = np.stack([forward, backward]).astype(np.int64)
    # Which microbatches a copy has is a matter of their numbers: from the planned order there are
    # only exchanges.
    order = planned.copy() if name == "nested" else _algorithm_3(name, graph, seconds)
    program = _program(name, graph, m)
    makespan = _exchange(order, seconds, SIMULATIONS, program)
    if makespan >= _simulate(planned, seconds, np.zeros(len(program.stage), np.int64), program):
        return planned
    # Exchanges leave equal microbatches in any order: microbatches 3 1 2 0 of which 1 and 3 are
    # equal become 1 3 2 0. `kind` numbers the distinct times; the places of a kind get its members
    # rising.
    _, kind = np.unique(seconds.reshape(-1, m), axis=1, return_inverse=True)
    places = np.argsort(kind.ravel()[order], kind="stable")
    order[places] = np.argsort(kind.ravel(), kind="stable")
    return order


def _algorithm_3(name: ScheduleName, graph: StageGraph, seconds: np.ndarray) -> np.ndarray:
    """Order microbatches by MMScale's algorithm 3, int64 `[m]`.

    The smallest goes first, to let all stages begin, and the p - 1 next smallest last, where
    nothing fills the intervals between backward passes of the first stage. The others go where
    their forward pass fills such an interval best.
    """
    m = seconds.shape[2]
    # The paper's pipeline is a chain. Of a graph, its first stage is the deepest, of several the
    # one with most to do.
    first = max(
        range(len(graph.workers)), key=lambda s: (graph.depths[s], int(seconds[:, s].sum()))
    )
    depth = graph.depths[first]
    *pending, smallest = np.argsort(-seconds.sum((0, 1)), kind="stable").tolist()
    rear = [pending.pop() for _ in range(min(depth, len(pending)))]
    order = [smallest]
    program = _program(name, graph, m)
    numbers = {
        kind: np.flatnonzero((program.stage == first) & (program.backward == kind))
        for kind in (0, 1)
    }
    end = np.zeros(len(program.stage), np.int64)
    # Microbatches that have no place yet take no time: number m stands for them.
    known = np.concatenate([seconds, np.zeros((*seconds.shape[:2], 1), np.int64)], axis=2)
    forward = seconds[0, first]
    interval_number = 0
    while pending:
        _simulate(np.array(order + [m] * (m - len(order))), known, end, program)
        backward_end = end[numbers[1]]
        start = backward_end[interval_number] - seconds[1, first, order[interval_number]]
        # Before the first backward pass comes a forward pass, before the others the backward pass
        # of the one before.
        interval = start - (
            backward_end[interval_number - 1] if interval_number else end[numbers[0][0]]
        )
        # The first interval holds depth forward passes, each about an equal part of it.
        count = min(depth, len(pending)) if interval_number == 0 else 1
        for remaining in range(count, 0, -1):
            closest = min(pending, key=lambda i: (abs(forward[i] * remaining - interval), i))
            pending.remove(closest)
            order.append(closest)
            interval -= forward[closest]
        interval_number += 1
    return np.array(order + rear[::-1])


@njit(cache=True)
def _simulate(order, seconds, end, program):
    """Fill in the `end` of every action with microbatches in this order, as `simulate` does; return the makespan."""
    free = np.zeros(program.worker.max() + 1, np.int64)
    makespan = 0
    for a in range(len(program.stage)):
        start = free[program.worker[a]]
        for n in range(program.need_start[a], program.need_start[a + 1]):
            start = max(start, end[program.needs[n]])
        end[a] = (
            start + seconds[program.backward[a], program.stage[a], order[program.microbatch[a]]]
        )
        free[program.worker[a]] = end[a]
        makespan = max(makespan, end[a])
    return makespan


@njit(cache=True)
def _exchange(order, seconds, simulations, program):
    """Exchange pairs of `order` where that is faster, within so many simulations; return the makespan."""
    end = np.zeros(len(program.stage), np.int64)
    best = _simulate(order, seconds, end, program)
    improved = True
    while improved:
        improved = False
        for i in range(len(order)):
            for j in range(i + 1, len(order)):
                if np.all(seconds[:, :, order[i]] == seconds[:, :, order[j]]):
                    continue
                if simulations == 0:
                    return best
                simulations -= 1
                order[i], order[j] = order[j], order[i]
                makespan = _simulate(order, seconds, end, program)
                if makespan < best:
                    best = makespan
                    improved = True
                else:
                    order[i], order[j] = order[j], order[i]
    return best
