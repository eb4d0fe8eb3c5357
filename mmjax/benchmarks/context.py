"""Distribute blocks of tokens over the ranks of context parallelism: how equal attention is, and the time it takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from mmjax.balance.mask_work import block_work, distribute, excess
from mmjax.balance.sample_blocks import block_samples, distribute_samples
from mmjax.benchmarks.baselines.token_blocks import (
    KINDS,
    LEAST_TOKENS,
    longest_first,
    random,
    ring,
    visible_keys,
    zigzag,
)
from mmjax.benchmarks.measurement import Measurement, median_seconds
from mmjax.errors import UserError

METHODS: dict[str, Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]] = {  # work, sample, ranks and seed
    "samples": lambda work, sample, ranks, seed: distribute_samples(work, sample, ranks),
    "equal": lambda work, sample, ranks, seed: distribute(work, ranks),
    "lpt": lambda work, sample, ranks, seed: longest_first(work, ranks),
    "zigzag": lambda work, sample, ranks, seed: zigzag(len(work), ranks),
    "ring": lambda work, sample, ranks, seed: ring(len(work), ranks),
    "random": lambda work, sample, ranks, seed: random(len(work), ranks, np.random.default_rng(seed)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the row")
    parser.add_argument("--block", type=int, default=128, help="tokens that stay together")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument(
        "--mask",
        choices=list(KINDS),
        default="EE",
        help="encoder outputs first, within; packed samples; a long one and short ones",
    )
    parser.add_argument("--method", choices=list(METHODS), default="samples", help="samples: as in training")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Measurement:
    """Measure the largest rank's excess of allowed pairs over the mean, blocks a rank, and times, medians of five.

    keys_mean, keys_max: keys of other ranks that a rank's queries may attend / tokens of the row, over ranks. To gather
    all of them is (ranks - 1) / ranks.
    """
    for name, minimum in (("tokens", LEAST_TOKENS), ("block", 1), ("ranks", 1), ("seed", 0)):
        if (value := getattr(args, name)) < minimum:
            raise UserError(f"--{name} {value}: give at least {minimum}")
    mask = KINDS[args.mask](args.tokens, np.random.default_rng(args.seed))
    work, workload = _time_call(lambda: block_work(mask, args.block))
    sample = block_samples(mask, args.block)
    rank, distribution = _time_call(lambda: METHODS[args.method](work, sample, args.ranks, args.seed))
    owner = np.repeat(rank, args.block)[: args.tokens]
    keys = visible_keys(mask, owner, args.ranks)
    keys[owner, np.arange(args.tokens)] = False
    keys_of_others = keys.sum(1) / args.tokens
    counts = np.bincount(rank, minlength=args.ranks)
    figures = {
        "excess": excess(work, rank, args.ranks),
        "counts_min": int(counts.min()),
        "counts_max": int(counts.max()),
        "keys_mean": float(keys_of_others.mean()),
        "keys_max": float(keys_of_others.max()),
        "workload_milliseconds": workload,
        "milliseconds": distribution,
    }
    return Measurement(figures, {"rank": rank, "workload": work}, {"milliseconds": "< 1 (Cornstarch 4.3.2)"})


def _time_call(call: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """Return the call's result, and its milliseconds once it is compiled."""
    return call(), 1e3 * median_seconds(call)
