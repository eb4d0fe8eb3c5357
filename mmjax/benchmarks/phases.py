"""Measure how equal ranks are in each phase, by how samples are placed, and what travels: plans steps, runs nothing."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mmjax.balance.mask_work import causal_pairs
from mmjax.balance.parts import LLM, dist_ratio
from mmjax.balance.phases import (
    Costs,
    PhasePlan,
    candidate_widths,
    cost_per_rank,
    costs_of,
    place_by_llm,
    place_each_phase,
    place_in_order,
    place_jointly,
    wire,
)
from mmjax.balance.waits import Prices, least_fullest, wait_share
from mmjax.benchmarks.corpora import PHASES, draw_steps, steps_options
from mmjax.benchmarks.harness import Options, named, option, timed
from mmjax.config.loading import find_config, load
from mmjax.planning.prices import pair_costs

AUDIO_STRIDE = 2  # frames of a position in the layers

_timed = partial(timed, clock=time.process_time)

OPTIONS: Options = steps_options(60) | {
    "--ranks": option(8, minimum=1),
    "--steps": option(100, minimum=1),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure a row for each way of placing samples; `bound` is the larger of a phase's mean and its longest part.

    `mean_*`, `worst_*`: dist ratios of positions. `wait`: the share of a step that ranks wait for
    the one with most attention in each phase, in rows as long as the fullest rank needs, by the
    prices of omni_10b. `ms`: of a core. `sorts`: how many times as long that is as sorting the same
    lengths by index.
    """
    peers = args.ranks_per_node or args.ranks
    steps = list(draw_steps(args))
    prices = pair_costs(load(find_config("omni_10b"), ()).model)
    attention = [_attention(costs, prices) for costs in steps]
    sorting = np.median([_timed(_sort_lengths, costs)[1] for costs in steps])
    rows = []
    for name, plan in balances(args.ranks, peers).items():
        plan(steps[0])  # compiles
        over = args.ranks if name == "apart" else peers
        placed, seconds = zip(*(_timed(plan, costs) for costs in steps), strict=True)
        ratios, waits, sent = [], [], []
        for costs, attended, step in zip(steps, attention, placed, strict=True):
            positions = cost_per_rank(costs, step, args.ranks).T
            ratios.append(dist_ratio(positions))
            rows_seconds = (prices.position * positions.max(1))[:, None]
            waits.append(wait_share(rows_seconds + cost_per_rank(attended, step, args.ranks).T))
            sent.append(wire(step.width, args.ranks, over).sum() / max(costs.item_tokens.sum(), 1))
        took = np.median(seconds)
        rows.append(
            _row(name, np.array(ratios), np.mean(waits))
            | {"wire_share": np.mean(sent), "ms": 1e3 * took, "sorts": took / sorting}
        )
    bounds = np.array([_bound(costs, args.ranks) for costs in steps])
    waits = [
        wait_bound(prices.position @ costs.sample.sum(0) / args.ranks, attended.sample, args.ranks)
        for costs, attended in zip(steps, attention, strict=True)
    ]
    nothing = {"wire_share": 0.0, "ms": 0.0, "sorts": 0.0}
    return [*rows, _row("bound", bounds, np.mean(waits)) | nothing]


def _attention(costs: Costs, prices: Prices) -> Costs:
    """Return the seconds of the attention of samples and items of these lengths."""
    llm = causal_pairs(costs.sample[:, LLM], 0) * prices.pair[LLM]
    stride = np.where(costs.item_phase == PHASES.index("audio"), AUDIO_STRIDE, 1)
    items = (costs.item_cost // stride) ** 2 * prices.pair[costs.item_phase]
    return costs_of(
        llm, costs.item_sample, costs.item_phase, items, costs.item_tokens, costs.phases
    )


def balances(ranks: int, peers: int) -> dict[str, Callable[[Costs], PhasePlan]]:
    """Return ways of placing the samples of a step, named as in `batch.balance`; "apart": each phase by itself."""
    return {
        "none": lambda costs: place_in_order(costs, ranks),
        "llm": lambda costs: place_by_llm(costs, ranks),
        "apart": lambda costs: place_each_phase(costs, ranks),
        "post": lambda costs: place_jointly(costs, ranks, peers, candidate_widths(costs)),
    }


def _sort_lengths(costs: Costs) -> list[np.ndarray]:
    return [np.argsort(cost, kind="stable") for cost in costs.sample.T.astype(np.int64)]


def _row(name: str, ratios: np.ndarray, wait: float) -> dict[str, Any]:
    names = [phase.removesuffix("_tokens") for phase in PHASES]
    worst = named("worst_", names, ratios.max(0))
    return {"balance": name} | named("mean_", names, ratios.mean(0)) | worst | {"wait": wait}


def _bound(costs: Costs, ranks: int) -> np.ndarray:
    longest = costs.sample.max(0, initial=0.0)
    for p in range(1, costs.phases):
        longest[p] = costs.item_cost[costs.item_phase == p].max(initial=0.0)
    mean = costs.sample.sum(0) / ranks
    return 1 - mean / np.maximum(np.maximum(longest, np.ceil(mean)), 1e-30)


def wait_bound(of_rows: float, seconds: np.ndarray, ranks: int) -> float:
    """Bound from below the share of a microbatch's time that ranks wait. of_rows: seconds of a rank's rows.

    seconds: float64 `[n, M]`, of each sample's attention.
    """
    mean = of_rows + float(seconds.sum()) / ranks
    return max(
        0.0,
        1 - mean / max(of_rows + float(least_fullest(seconds, ranks).sum()), np.finfo(float).tiny),
    )
