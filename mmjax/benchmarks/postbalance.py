"""Measure how even post-balancing makes the ranks of one phase, and how long it takes (OrchMLLM section 5.1)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

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
from mmjax.benchmarks.corpora import ONE_STEP, draw_step, rank_of_samples
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
        arrays={"sample": sample, "source": source, "rank": rank_of_samples(to, present)},
    )


def _make_method(args: Namespace, length: np.ndarray) -> Callable[[], np.ndarray]:
    equal = {"equal_counts": args.equal_counts}
    tolerance = float(length.mean()) if args.tolerance is None else args.tolerance
    method, options = {
        ("packed", "best"): (balance_packed, equal),
        ("padded", "best"): (balance_padded, equal),
        ("quadratic", "best"): (balance_quadratic, equal | {"lam": LAM}),
        ("conv", "best"): (balance_conv, equal | {"lam": LAM}),
        ("packed", "paper"): (paper_packed, {}),
        ("padded", "paper"): (paper_padded, {}),
        ("quadratic", "paper"): (paper_quadratic, {"tolerance": tolerance}),
        ("conv", "paper"): (paper_conv, {}),
    }[args.cost, args.method]
    return partial(method, length, args.ranks, **options)
