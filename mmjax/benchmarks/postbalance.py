"""Measure how even post-balancing makes the ranks of one phase, and how long it takes (OrchMLLM section 5.1)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import numpy as np

from mmjax.benchmarks.baselines.postbalance import (
    balance_conv,
    balance_packed,
    balance_padded,
    balance_quadratic,
    least_largest_load,
    lower_bound,
    paper_conv,
    paper_packed,
    paper_padded,
    paper_quadratic,
    rank_costs,
)
from mmjax.benchmarks.corpora import ONE_STEP, draw_step
from mmjax.benchmarks.harness import Measurement, Options, median_seconds, option
from mmjax.errors import UserError

LAM = 1e-4  # per token: attention costs as much as the rest at 10,000 tokens


OPTIONS: Options = ONE_STEP | {
    "--cost": option("packed", choices=("packed", "padded", "quadratic", "conv")),
    "--method": option("best", choices=("paper", "best")),
    "--equal-counts": option(False, "as many items on every rank, give or take one"),
    "--tolerance": option(
        None,
        "tokens, of the paper's method for quadratic (default: the items' mean length)",
        type=float,
        minimum=0,
    ),
}


def run(args: Namespace) -> Measurement:
    """Draw the samples of one step, balance the phase's items, and compare with the samples as they were drawn."""
    if args.equal_counts and args.method == "paper":
        raise UserError(
            "--equal-counts: the paper's algorithms have no such variant; use --method best"
        )
    sample, source, drawn = draw_step(args)
    present = drawn > 0
    length = drawn[present]

    balance = _make_method(args, length)
    to = balance()  # compiles
    cost = rank_costs(args.cost, length, to, args.ranks, LAM)
    bound = lower_bound(args.cost, length, args.ranks, LAM)
    # Of every item alone, so without padding, whatever the ranks pad.
    weight = {"padded": "packed", "conv": "quadratic"}.get(args.cost, args.cost)
    mean = rank_costs(weight, length, to, args.ranks, LAM).mean()
    unbalanced = rank_costs(args.cost, length, source[present], args.ranks, LAM).max()
    packed = args.cost == "packed"
    mean_load = -(-length.sum() // args.ranks)
    rank = np.full(len(sample), -1, np.int32)
    rank[present] = to
    return Measurement(
        figures={
            "before": unbalanced / mean,
            "after": cost.max() / mean,
            "lower_bound": bound / mean,
            "gap": int(cost.max()) - mean_load if packed else None,
            "gap_bound": least_largest_load(length, args.ranks) - mean_load if packed else None,
            "milliseconds": 1e3 * median_seconds(balance),
            "sort_milliseconds": 1e3 * median_seconds(lambda: np.sort(length)),
            "items": len(length),
        },
        arrays={"sample": sample, "source": source, "rank": rank},
    )


def _make_method(args: Namespace, length: np.ndarray) -> Callable[[], np.ndarray]:
    ranks = args.ranks
    equal = args.equal_counts
    tolerance = float(length.mean()) if args.tolerance is None else args.tolerance
    return {
        ("packed", "best"): lambda: balance_packed(length, ranks, equal),
        ("padded", "best"): lambda: balance_padded(length, ranks, equal),
        ("quadratic", "best"): lambda: balance_quadratic(length, ranks, LAM, equal),
        ("conv", "best"): lambda: balance_conv(length, ranks, LAM, equal),
        ("packed", "paper"): lambda: paper_packed(length, ranks),
        ("padded", "paper"): lambda: paper_padded(length, ranks),
        ("quadratic", "paper"): lambda: paper_quadratic(length, ranks, tolerance),
        ("conv", "paper"): lambda: paper_conv(length, ranks),
    }[args.cost, args.method]
