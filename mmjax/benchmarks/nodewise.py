"""Measure what balancing sends between nodes when these are chosen first, or by an integer programme (OrchMLLM 5.2)."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import numpy as np

from mmjax.benchmarks.baselines.nodewise import (
    balance_nodewise,
    inter_node,
    largest_cost,
    permute_batches,
    traffic_bounds,
    volume,
)
from mmjax.benchmarks.baselines.postbalance import balance_packed
from mmjax.benchmarks.corpora import ONE_STEP, draw_step
from mmjax.benchmarks.harness import Measurement, Options, median_seconds, option
from mmjax.errors import UserError

OPTIONS: Options = ONE_STEP | {
    "--ranks-per-node": option(8, minimum=1),
    "--method": option("best", choices=("ilp", "best")),
    "--tolerance": option(
        0.002, "of method best: largest cost over mean, less 1", minimum=0, maximum=1
    ),
    "--time-limit": option(30.0, "of method ilp, seconds", above=0),
}


def run(args: Namespace) -> Measurement:
    """Draw the samples of one step, balance its items with and without regard to nodes, and compare what travels."""
    if args.ranks_per_node >= args.ranks:
        raise UserError(
            f"--ranks-per-node {args.ranks_per_node}: give fewer than --ranks, so that there are two nodes"
        )
    sample, source, drawn = draw_step(args)
    present = drawn > 0
    length = drawn[present]
    start = source[present]

    baseline = balance_packed(length, args.ranks)
    to, solved = (
        _plan(args, length, start)
        if args.method == "best"
        else _solve(args, length, start, baseline)
    )
    without = inter_node(length, start, baseline, args.ranks, args.ranks_per_node)
    traffic = inter_node(length, start, to, args.ranks, args.ranks_per_node)
    cost = np.bincount(to, length, args.ranks)
    allowed = max(int(cost.max()), largest_cost(length, args.ranks, args.tolerance))
    bounds = traffic_bounds(length, start, args.ranks, args.ranks_per_node, allowed)
    return Measurement(
        figures={
            "sent_max_reduction": _reduction(traffic.sent.max(), without.sent.max()),
            "received_max_reduction": _reduction(traffic.received.max(), without.received.max()),
            "total_reduction": _reduction(traffic.total, without.total),
            "after": cost.max() / cost.mean(),
            **solved,
            "sent_max_bound": _reduction(bounds.sent, without.sent.max()),
            "received_max_bound": _reduction(bounds.received, without.received.max()),
            "total_bound": _reduction(bounds.total, without.total),
            "travelling": length[start != to].sum() / length.sum(),
            "items": len(length),
        },
        arrays={
            "sample": sample,
            "source": source,
            "rank": _scatter_to_samples(to, present),
            "baseline_rank": _scatter_to_samples(baseline, present),
        },
        paper={"total_reduction": "0.44-0.72 (OrchMLLM figure 13)"},
    )


def _plan(
    args: Namespace, length: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, dict[str, Any]]:
    def plan() -> np.ndarray:
        return balance_nodewise(length, start, args.ranks, args.ranks_per_node, args.tolerance)

    to = plan()  # compiles
    return to, {"milliseconds": 1e3 * median_seconds(plan)}


def _solve(
    args: Namespace, length: np.ndarray, start: np.ndarray, baseline: np.ndarray
) -> tuple[np.ndarray, dict[str, Any]]:
    """Solve once only: it may take all of its time limit, beside which nothing else counts."""
    tokens = volume(length, start, baseline, args.ranks)
    began = time.perf_counter()
    permutation = permute_batches(tokens, args.ranks_per_node, args.time_limit)
    taken = (time.perf_counter() - began) * 1e3
    return permutation.batch_rank[baseline], {"milliseconds": taken, "optimal": permutation.optimal}


def _reduction(volume_with: float, volume_without: float) -> float:
    return 1 - volume_with / volume_without if volume_without else 0.0


def _scatter_to_samples(to: np.ndarray, present: np.ndarray) -> np.ndarray:
    rank = np.full(len(present), -1, np.int32)
    rank[present] = to
    return rank
