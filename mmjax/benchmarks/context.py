"""Distribute blocks of tokens over the ranks of context parallelism: how equal attention is, and the time it takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from mmjax.balance.baselines.token_blocks import KINDS, LEAST_TOKENS, longest_first, random, ring, zigzag
from mmjax.balance.mask_work import block_work, distribute, excess
from mmjax.benchmarks.measurement import Measurement, median_seconds
from mmjax.errors import UserError

METHODS: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {  # from work per block, ranks and seed
    "equal": lambda work, ranks, seed: distribute(work, ranks),
    "lpt": lambda work, ranks, seed: longest_first(work, ranks),
    "zigzag": lambda work, ranks, seed: zigzag(len(work), ranks),
    "ring": lambda work, ranks, seed: ring(len(work), ranks),
    "random": lambda work, ranks, seed: random(len(work), ranks, np.random.default_rng(seed)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the row")
    parser.add_argument("--block", type=int, default=128, help="tokens that stay together")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument(
        "--mask", choices=list(KINDS), default="EE", help="encoder outputs first, within; packed samples"
    )
    parser.add_argument("--method", choices=list(METHODS), default="equal")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Measurement:
    """Measure the largest rank's excess of allowed pairs over the mean, blocks a rank, and times, medians of five."""
    for name, minimum in (("tokens", LEAST_TOKENS), ("block", 1), ("ranks", 1), ("seed", 0)):
        if (value := getattr(args, name)) < minimum:
            raise UserError(f"--{name} {value}: give at least {minimum}")
    mask = KINDS[args.mask](args.tokens, np.random.default_rng(args.seed))
    work, workload = _time_call(lambda: block_work(mask, args.block))
    rank, distribution = _time_call(lambda: METHODS[args.method](work, args.ranks, args.seed))
    counts = np.bincount(rank, minlength=args.ranks)
    figures = {
        "excess": excess(work, rank, args.ranks),
        "counts_min": int(counts.min()),
        "counts_max": int(counts.max()),
        "workload_milliseconds": workload,
        "milliseconds": distribution,
    }
    return Measurement(figures, {"rank": rank, "workload": work}, {"milliseconds": "< 1 (Cornstarch 4.3.2)"})


def _time_call(call: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """Return the call's result, and its milliseconds once it is compiled."""
    return call(), 1e3 * median_seconds(call)
