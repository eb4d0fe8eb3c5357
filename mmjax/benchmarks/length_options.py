"""Options of the benchmarks that say which lengths samples have, and which of them a step holds."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from mmjax.data.lengths import omni_corpus, read_lengths
from mmjax.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which lengths."""
    parser.add_argument(
        "--lengths", nargs="+", type=Path, default=[], metavar="F.npz", help="default: made from --seed"
    )
    parser.add_argument("--samples", type=int, default=200_000, help="how many to make, without --lengths")
    parser.add_argument("--seed", type=int, default=0)


def add_step_arguments(parser: argparse.ArgumentParser, ranks: int) -> None:
    """The options that say which samples a step holds, and which phase of it is balanced."""
    parser.add_argument("--phase", choices=("llm_tokens", "vision", "audio"), default="llm_tokens")
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--per-rank", type=int, default=60, help="samples drawn for each rank")


def draw_step(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples drawn for one step, int64 `[n]`, the rank that each is drawn for, and its length in the phase.

    A sample is drawn twice only where there are too few. A length of 0: it takes no part in the phase.
    """
    for option in ("ranks", "per_rank", "samples"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} {getattr(args, option)}: give at least 1")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: give at least 0")
    found = read_lengths(args.lengths, (args.phase,)) if args.lengths else omni_corpus(args.samples, args.seed)
    available, count = len(found[args.phase]), args.ranks * args.per_rank
    sample = np.random.default_rng(args.seed).choice(available, count, replace=count > available)
    length = found[args.phase][sample]
    if not length.any():
        raise UserError(f"--phase {args.phase}: no drawn sample takes part in it; draw more with --per-rank")
    return sample, np.repeat(np.arange(args.ranks, dtype=np.int32), args.per_rank), length
