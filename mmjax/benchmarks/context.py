"""Distribute blocks of tokens over the ranks of context parallelism: how equal attention is, and the time it takes."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

import numpy as np

from mmjax.balance.mask_work import block_work
from mmjax.balance.token_blocks import block_samples, distribute, distribute_samples, excess
from mmjax.benchmarks.baselines.token_blocks import (
    KINDS,
    LEAST_TOKENS,
    longest_first,
    random,
    ring,
    visible_keys,
    zigzag,
)
from mmjax.benchmarks.harness import Measurement, Options, median_seconds, option

METHODS: dict[
    str, Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]
] = {  # work, sample, ranks and seed
    "samples": lambda work, sample, ranks, seed: distribute_samples(work, sample, ranks),
    "equal": lambda work, sample, ranks, seed: distribute(work, ranks),
    "lpt": lambda work, sample, ranks, seed: longest_first(work, ranks),
    "zigzag": lambda work, sample, ranks, seed: zigzag(len(work), ranks),
    "ring": lambda work, sample, ranks, seed: ring(len(work), ranks),
    "random": lambda work, sample, ranks, seed: random(
        len(work), ranks, np.random.default_rng(seed)
    ),
}


OPTIONS: Options = {
    "--tokens": option(1 << 20, "of the row", minimum=LEAST_TOKENS),
    "--block": option(128, "tokens that stay together", minimum=1),
    "--ranks": option(64, minimum=1),
    "--mask": option(
        "EE",
        "encoder outputs first, within; packed samples; a long one and short ones",
        choices=tuple(KINDS),
    ),
    "--method": option("samples", "samples: as in training", choices=tuple(METHODS)),
    "--seed": option(0, minimum=0),
}


def run(args: Namespace) -> Measurement:
    """Measure the largest rank's excess of allowed pairs over the mean, blocks a rank, and times, medians of five.

    keys_mean, keys_max: keys of other ranks that a rank's queries may attend / tokens of the row,
    over ranks. To gather all of them is (ranks - 1) / ranks.
    """
    mask = KINDS[args.mask](args.tokens, np.random.default_rng(args.seed))
    work, workload = _time_call(lambda: block_work(mask, args.block))
    sample = block_samples(mask, args.block)
    rank, distribution = _time_call(
        lambda: METHODS[args.method](work, sample, args.ranks, args.seed)
    )
    owner = np.repeat(rank, args.block)[: args.tokens]
    keys = visible_keys(mask, owner, args.ranks)
    keys[owner, np.arange(args.tokens)] = False
    keys_of_others = keys.sum(1) / args.tokens
    counts = np.bincount(rank, minlength=args.ranks)
    figures = {
        "excess": excess(work, rank, args.ranks),
        "counts_min": counts.min(),
        "counts_max": counts.max(),
        "keys_mean": keys_of_others.mean(),
        "keys_max": keys_of_others.max(),
        "workload_milliseconds": workload,
        "milliseconds": distribution,
    }
    return Measurement(
        figures, {"rank": rank, "workload": work}, {"milliseconds": "< 1 (Cornstarch 4.3.2)"}
    )


def _time_call(call: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    """Return the call's result, and its milliseconds once it is compiled."""
    return call(), 1e3 * median_seconds(call)
