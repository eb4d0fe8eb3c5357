"""Steps whose ranks attend alike have the samples that they would have anyway, in rows that are as full."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest
from made_lengths import lengths_of

from mmjax.balance.phases import costs_of, place_jointly
from mmjax.balance.waits import Prices, Waits, mean_waits
from mmjax.benchmarks import planning
from mmjax.benchmarks.corpora import index_of_samples
from mmjax.config import Config
from mmjax.data.plan.fit_budget import make_budget
from mmjax.data.plan.length_files import omni_corpus
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import Topology, waits_of
from mmjax.data.plan.step_plan import StepPlan, StepPlanner, make_planner
from mmjax.planning.reorder import Reordering, reorder
from mmjax.planning.schedules import StageGraph, make_schedule
from mmjax.planning.simulate import StageTimes, simulate

SAMPLES = 20_000


def corpus(kind: str, samples: int = SAMPLES) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Lengths, and their keys of encoders."""
    if kind == "omni":
        return omni_corpus(samples, 0), ("vision", "audio")
    return lengths_of(kind, samples), ("vision_items",)


def run_of(
    kind: str,
    ranks: int,
    per_rank: int,
    grouping: str = "pack",
    microbatches: int = 1,
    samples: int = SAMPLES,
) -> tuple[Config, LengthIndex]:
    lengths, keys = corpus(kind, samples)
    options = argparse.Namespace(
        ranks=ranks,
        per_rank=per_rank,
        grouping=grouping,
        balance="post",
        seed=1,
        microbatches=microbatches,
    )
    config = planning._config(options, tuple(key.removesuffix("_items") for key in keys))
    return config, index_of_samples(lengths, keys, samples, 1, config.model)


def planner_of(
    config: Config, index: LengthIndex, ranks: int, levelled: bool = True
) -> StepPlanner:
    budget = make_budget(index, config, [1.0])
    if not levelled:
        budget = replace(budget, position_seconds=(), pair_seconds=())
    return make_planner(
        index, config, [1.0], Topology(ranks, min(8, ranks), min(8, ranks)), budget, max_steps=4
    )[0]


def waits_in(planner: StepPlanner, prices: Prices, steps: int = 6) -> tuple[list[StepPlan], Waits]:
    plans = [planner.plan(step) for step in range(steps)]
    return plans, mean_waits(
        [waits_of(plan.microbatches, prices, planner.grouper.index) for plan in plans]
    )


CASES = {  # wait at most, with levelling
    ("chats", 8, 16, "pack", 1): 0.006,
    ("long", 8, 60, "pack", 1): 0.1,
    ("omni", 8, 16, "pack", 2): 0.02,
    ("chats", 8, 16, "none", 1): 0.01,
    ("documents", 8, 16, "none", 1): 0.2,
    ("chats", 64, 16, "pack", 1): 0.006,
    ("chats", 64, 60, "pack", 1): 0.006,
    ("documents", 64, 60, "pack", 1): 0.006,
    ("videos", 64, 60, "pack", 1): 0.009,
    ("long", 64, 60, "pack", 1): 0.065,
    ("long", 64, 32, "pack", 4): 0.08,
    ("chats", 512, 16, "pack", 1): 0.006,
    ("chats", 64, 16, "none", 1): 0.01,
}


@pytest.mark.default_cases(
    "chats-8-16-pack-1", "long-8-60-pack-1", "omni-8-16-pack-2", "chats-8-16-none-1"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_steps_keep_their_samples_and_fills_and_ranks_wait_less(case):
    kind, ranks, per_rank, grouping, microbatches = case
    samples = max(SAMPLES, 20 * ranks * per_rank * microbatches)
    config, index = run_of(kind, ranks, per_rank, grouping, microbatches, samples)
    levelled = planner_of(config, index, ranks)
    prices = levelled.grouper.budget.prices
    plans, waits = waits_in(levelled, prices)
    before_plans, before = waits_in(planner_of(config, index, ranks, levelled=False), prices)
    for plan, other in zip(plans, before_plans, strict=True):
        assert sorted(plan.samples().tolist()) == sorted(other.samples().tolist())
        for m in plan.microbatches:
            used = np.zeros((len(m.rows), ranks * max(m.rows)), np.int64)
            np.add.at(used, (m.module, m.row), m.length)
            assert np.all(used.max(1) <= m.shape.lengths)
        if grouping == "pack":
            assert plan.step == 0 or levelled.grouper.longest_wait(plan.step) <= 10
    assert waits.padding == pytest.approx(before.padding, abs=1e-12)  # the same rows, as full
    assert waits.wait <= min(before.wait, CASES[case])
    assert [plan.digest() for plan in plans] == [
        levelled.plan(plan.step).digest() for plan in plans
    ]


def test_rows_of_a_run_that_began_without_prices_stay_as_they_were():
    config, index = run_of("chats", 8, 16)
    old, new = (planner_of(config, index, 8, levelled) for levelled in (False, True))
    assert old.plan(0).digest() != new.plan(0).digest()
    assert old.plan(0).digest() == planner_of(config, index, 8, levelled=False).plan(0).digest()


def test_positions_and_pairs_added_up_as_one_cost_make_steps_longer():
    """Rows are computed with their padding: what evens the sum fills them unevenly, and the fullest counts."""
    config, index = run_of("chats", 64, 16, "none", samples=64 * 16 * 4)
    prices = make_budget(index, config, [1.0]).prices
    totals, pairs = index.totals.astype(float), index.parts().pairs_by_sample(2)
    lost = {"positions": 0.0, "sum": 0.0}
    for step in range(4):
        chosen = np.arange(step * 1024, (step + 1) * 1024)
        for way in lost:
            cost = totals[chosen] * prices.position + (way == "sum") * pairs[chosen] * prices.pair
            owner = np.flatnonzero(cost[:, 1])
            phases, tokens = np.ones(len(owner), np.int32), np.ones(len(owner), np.int64)
            costs = costs_of(cost[:, 0], owner, phases, cost[owner, 1], tokens, 2)
            rank = place_jointly(costs, 64, 8).sample_rank
            length = np.stack([np.bincount(rank, totals[chosen, k], 64) for k in (0, 1)])
            attention = np.stack(
                [np.bincount(rank, pairs[chosen, k] * prices.pair[k], 64) for k in (0, 1)]
            )
            lost[way] += float(prices.position @ length.max(1) + attention.max(1).sum())
    assert lost["sum"] > lost["positions"]


@pytest.mark.parametrize("stages", [4])
def test_a_pipeline_takes_little_longer_than_if_all_microbatches_were_equal(stages):
    """3 % of the samples have 8k to 32k tokens; the LLM alone, in four stages, 8 microbatches on 8 ranks."""
    config, index = run_of("long", 8, 32, "pack", microbatches=8, samples=16_000)
    planner = planner_of(config, index, 8)
    prices = planner.grouper.budget.prices
    graph = StageGraph(tuple((s, s + 1) for s in range(stages - 1)), tuple(range(stages)))
    position, pair = (np.full(stages, price[0] * 1e-6) for price in prices)
    ratios = []
    for levelled in (True, False):
        steps = planner if levelled else planner_of(config, index, 8, levelled=False)
        taken = ideal = 0.0
        for step in range(3):
            microbatches = steps.plan(step).microbatches
            rows = np.array([m.shape.lengths[0] * m.rows[0] for m in microbatches])
            pairs = np.array([m.per_rank(m.pairs, m.row)[0] for m in microbatches])
            forward = np.rint((position[:, None] * rows + pair[:, None] * pairs.max(1)) / 3).astype(
                np.int64
            )
            order = (
                reorder("1f1b", graph, forward, 2 * forward)
                if levelled
                else np.arange(len(microbatches))
            )
            times = StageTimes(forward[:, order], 2 * forward[:, order])
            taken += simulate(make_schedule("1f1b", graph, len(order)), times).makespan
            mean = float((position[0] * rows + pair[0] * pairs.mean(1)).mean())
            ideal += mean * (len(microbatches) + stages - 1)
        ratios.append(taken / ideal)
    assert ratios[0] <= 1.05 < 1.2 < ratios[1]


def test_microbatches_are_ordered_by_what_they_hold():
    graph = StageGraph(((0, 1), (1, 2), (2, 3)), (0, 1, 2, 3))
    forward = np.full((4, 1), 1000)
    pair = np.array([1.0, 2.0])[:, None, None] * np.ones((4, 1))  # of the LLM, in every stage
    by_content = Reordering("1f1b", graph, forward, 2 * forward, pair)
    pairs = np.array([[900, 10, 700, 20, 500, 30]])
    order = by_content.order([0] * 6, pairs)
    assert sorted(order) == list(range(6))
    assert order != list(range(6))
    assert replace(by_content, pair=np.zeros((2, 4, 1))).order([0] * 6, pairs) == list(range(6))
