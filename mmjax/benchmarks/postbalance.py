"""How even post-balancing makes the ranks of one phase, and how long it takes (OrchMLLM section 5.1)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from mmjax.balance.lpt import least_largest_load
from mmjax.balance.postbalance import (
    balance_conv,
    balance_packed,
    balance_padded,
    balance_quadratic,
    lower_bound,
    rank_costs,
)
from mmjax.balance.postbalance_paper import paper_conv, paper_packed, paper_padded, paper_quadratic
from mmjax.benchmarks import lengths
from mmjax.benchmarks.measurement import Measurement
from mmjax.errors import UserError

LAM = 1e-4  # per token: attention costs as much as the rest at 10,000 tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    lengths.add_arguments(parser)
    parser.add_argument("--phase", choices=("llm_tokens", "vision", "audio"), default="llm_tokens")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--per-rank", type=int, default=60, help="samples drawn for each rank")
    parser.add_argument("--cost", choices=("packed", "padded", "quadratic", "conv"), default="packed")
    parser.add_argument("--method", choices=("paper", "best"), default="best")
    parser.add_argument("--equal-counts", action="store_true", help="as many items on every rank, give or take one")
    parser.add_argument(
        "--tolerance", type=float, help="tokens, of the paper's method for quadratic (default: the items' mean length)"
    )


def run(args: argparse.Namespace) -> Measurement:
    """Draw the samples of one step, balance the phase's items, and compare with the samples as they were drawn."""
    _check(args)
    found = lengths.read_lengths(args.lengths, (args.phase,)) if args.lengths else _made(args)
    sample = _draw(len(found[args.phase]), args.ranks * args.per_rank, args.seed)
    source = np.repeat(np.arange(args.ranks, dtype=np.int32), args.per_rank)
    drawn = found[args.phase][sample]
    present = drawn > 0
    if not present.any():
        raise UserError(f"--phase {args.phase}: no drawn sample takes part in it; draw more with --per-rank")
    length = drawn[present]

    balance = _method(args, length)
    to = balance()  # compiles
    cost = rank_costs(args.cost, length, to, args.ranks, LAM)
    bound = lower_bound(args.cost, length, args.ranks, LAM)
    # Of every item alone, so without padding, whatever the ranks pad.
    weight = {"padded": "packed", "conv": "quadratic"}.get(args.cost, args.cost)
    mean = rank_costs(weight, length, to, args.ranks, LAM).mean()
    before = rank_costs(args.cost, length, source[present], args.ranks, LAM).max()
    packed = args.cost == "packed"
    least = -(-int(length.sum()) // args.ranks)
    rank = np.full(len(sample), -1, np.int32)
    rank[present] = to
    return Measurement(
        figures={
            "before": float(before / mean),
            "after": float(cost.max() / mean),
            "lower_bound": float(bound / mean),
            "gap": int(cost.max()) - least if packed else None,
            "gap_bound": int(least_largest_load(length, args.ranks)) - least if packed else None,
            "milliseconds": _milliseconds(balance),
            "sort_milliseconds": _milliseconds(lambda: np.sort(length)),
            "items": len(length),
        },
        arrays={"sample": sample, "source": source, "rank": rank},
    )


def _check(args: argparse.Namespace) -> None:
    for option in ("ranks", "per_rank", "samples"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} {getattr(args, option)}: give 1 or more")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: give 0 or more")
    if args.equal_counts and args.method == "paper":
        raise UserError("--equal-counts: the paper's algorithms have no such variant; use --method best")
    if args.tolerance is not None and not args.tolerance >= 0:
        raise UserError(f"--tolerance {args.tolerance}: give 0 or more tokens")


def _made(args: argparse.Namespace) -> dict[str, np.ndarray]:
    return dict(lengths.omni_corpus(args.samples, args.seed))


def _draw(available: int, count: int, seed: int) -> np.ndarray:
    """int64 `[count]`; a sample is drawn twice only where there are too few."""
    return np.random.default_rng(seed).choice(available, count, replace=count > available)


def _method(args: argparse.Namespace, length: np.ndarray) -> Callable[[], np.ndarray]:
    ranks, equal = args.ranks, args.equal_counts
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


def _milliseconds(call: Callable[[], np.ndarray]) -> float:
    """Median of five."""
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return float(np.median(taken) * 1e3)
