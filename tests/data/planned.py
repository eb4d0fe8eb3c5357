"""Planners of made samples for the tests of the step plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
from made import DRY_RUN_STEPS, ONE_RANK, config, index_of, random_samples

from mmjax.config import (
    IsfGrouping,
    LlmBalance,
    NoBalance,
    NoGrouping,
    PackGrouping,
    PostBalance,
    Samples,
)
from mmjax.data.plan import step_plan
from mmjax.data.plan.budget import Budget
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.grouping import Group, StepGrouper, stream_of
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import MicrobatchPlan, Shape, Topology
from mmjax.data.plan.sampler import pools_of
from mmjax.data.plan.step_plan import StepPlanner, make_planner

GROUPINGS = [PackGrouping(chunk_steps=12), IsfGrouping(chunk_steps=12), NoGrouping(chunk_steps=12)]
KINDS = [g.kind for g in GROUPINGS]
BALANCES = [NoBalance(), LlmBalance(), PostBalance(), PostBalance(locality="off")]
BALANCE_KINDS = ["none", "llm", "post", "post-apart"]
TOPOLOGIES = [
    ONE_RANK,
    Topology(2, 2, 2),
    Topology(8, 8, 8),
    Topology(8, 4, 4),
    Topology(8, 1, 1),
    Topology(4, 4, 4, 2),
]
SPREAD = ["1", "2", "8", "8-by-4", "8-by-1", "4-with-8-encoder-ranks"]


@cache
def some_index() -> LengthIndex:
    return index_of(random_samples(400, seed=0), config())


def grouper(
    index: LengthIndex | None = None,
    seed: int = 0,
    budget: Budget | None = None,
    weights: Sequence[float] = (1.0,),
    **changes,
) -> StepGrouper:
    index, made = some_index() if index is None else index, replace(config(**changes), seed=seed)
    budget = make_budget(index, made, weights) if budget is None else budget
    return StepGrouper(index, made.batch, weights, seed, budget)


def planner(
    index: LengthIndex | None = None,
    seed: int = 0,
    budget: Budget | None = None,
    topology: Topology = ONE_RANK,
    **changes,
) -> StepPlanner:
    return laid_out(index, seed, budget, topology, **changes)[0]


def laid_out(
    index: LengthIndex | None = None,
    seed: int = 0,
    budget: Budget | None = None,
    topology: Topology = ONE_RANK,
    **changes,
) -> tuple[StepPlanner, step_plan.RankLayout]:
    index, made = some_index() if index is None else index, replace(config(**changes), seed=seed)
    with mock.patch.object(step_plan, "DRY_RUN_STEPS", DRY_RUN_STEPS):
        return make_planner(index, made, [1.0], topology, budget)


@cache
def one_of_all(
    grouping, balance, topology: Topology, microbatches: int
) -> tuple[StepPlanner, step_plan.RankLayout]:
    """Sixteen samples a step in three rows of each module, in every combination of these."""
    changes = {"grouping": grouping, "balance": balance, "microbatches": microbatches}
    return laid_out(topology=topology, size=Samples(16), **changes)


def with_shapes(planned: StepPlanner, *shapes: Shape) -> StepPlanner:
    return replace(planned, placer=replace(planned.placer, shapes=shapes))


def order_of_chunks(grouped: StepGrouper, chunks: int) -> np.ndarray:
    """The samples that the first chunks should hold."""
    pools = pools_of(grouped.index, grouped.weights, grouped.oversize)
    stream = stream_of(
        grouped.batch, grouped.budget.samples_per_step, pools, grouped.weights, grouped.seed
    )
    return np.concatenate([stream.chunk(c) for c in range(chunks)])


def steps_of_chunks(grouped: StepGrouper, chunks: int) -> tuple[list[list[Group]], np.ndarray]:
    """All steps of the first chunks, and the samples that these chunks should hold."""
    order = order_of_chunks(grouped, chunks)
    steps: list[list[Group]] = []
    while sum(len(samples_of(step)) for step in steps) < len(order):
        steps.append(grouped.step(len(steps)))
    return steps, order


def samples_of(step: Sequence[Group | MicrobatchPlan]) -> np.ndarray:
    return np.concatenate([microbatch.samples for microbatch in step])
