"""Options and timers that benchmarks share."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config import ModelConfig
from mmjax.data.plan.length_index import LengthIndex, omni_corpus, pairs_of_lengths, read_lengths
from mmjax.errors import UserError


@dataclass(frozen=True)
class Measurement:
    """Hold figures, which `--json` prints, arrays, which `--out` writes, and the figures that the paper published."""

    figures: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    paper: Mapping[str, str] = field(default_factory=dict)


def median_seconds(run: Callable[[], object], within: float = 10.0) -> float:
    """Time five runs, or fewer where they take longer than `within` seconds in all; return the median."""
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) <= within:
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


PER_TOKEN = 4  # patches or frames of an encoder for each token of the LLM
TILES = "vision_items"
TILE = 1024  # patches of one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which lengths."""
    parser.add_argument(
        "--lengths", nargs="+", type=Path, default=[], metavar="F.npz", help="default: made from --seed"
    )
    parser.add_argument("--samples", type=int, default=200_000, help="how many to make, without --lengths")
    parser.add_argument("--seed", type=int, default=0)


def add_step_arguments(parser: argparse.ArgumentParser, ranks: int) -> None:
    """Add the options that say which samples a step holds, and which phase of it is balanced."""
    parser.add_argument("--phase", choices=("llm_tokens", "vision", "audio"), default="llm_tokens")
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--per-rank", type=int, default=60, help="samples drawn for each rank")


def draw_step(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw samples for one step, int64 `[n]`, the rank that each is drawn for, and its length in the phase.

    A sample is drawn twice only where there are too few. A length of 0: it takes no part in the phase.
    """
    for option in ("ranks", "per_rank", "samples"):
        if getattr(args, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} {getattr(args, option)}: give at least 1")
    if args.seed < 0:
        raise UserError(f"--seed {args.seed}: give at least 0")
    lengths = read_lengths(args.lengths, (args.phase,)) if args.lengths else omni_corpus(args.samples, args.seed)
    available = len(lengths[args.phase])
    count = args.ranks * args.per_rank
    sample = np.random.default_rng(args.seed).choice(available, count, replace=count > available)
    length = lengths[args.phase][sample]
    if not length.any():
        raise UserError(f"--phase {args.phase}: no drawn sample takes part in it; draw more with --per-rank")
    return sample, np.repeat(np.arange(args.ranks, dtype=np.int32), args.per_rank), length


def index_of_samples(
    read: Mapping[str, np.ndarray],
    encoders: Sequence[str],
    samples: int,
    scale: int,
    model: ModelConfig | None = None,
) -> LengthIndex:
    """Build the index of so many samples, those of `read` as often as needed, as one source of data.

    encoders: keys of `read`. An encoder's length is one item, `vision_items` counts tiles. Lengths in positions are
    divided by `scale`, to at least 1 where there is anything. model: whose layers' pairs are counted; None: those of
    full attention.
    """
    chosen = np.arange(samples) % len(read["llm_tokens"])
    scaled = {k: n if k == TILES else np.where(n > 0, np.maximum(n // scale, 1), 0) for k, n in read.items()}
    lengths = {key: scaled[key][chosen] for key in ("llm_tokens", *encoders)}
    # Of every sample and encoder: how many items, and how long each of them is. 5 tiles are 5 items of 1,024 patches,
    # 700 audio frames 1 item of 700.
    count = np.stack([lengths[k] if k == TILES else np.minimum(lengths[k], 1) for k in encoders], axis=1)
    length = np.stack([np.full(len(chosen), TILE) if k == TILES else lengths[k] for k in encoders], axis=1)
    items_per_pair = count.ravel()
    encoder = np.repeat(np.tile(np.arange(len(encoders)), len(chosen)), items_per_pair)
    positions = np.repeat(length.ravel(), items_per_pair).astype(np.int32)
    tokens = count * -(-length // PER_TOKEN)
    llm, towers = (None, (None,) * len(encoders)) if model is None else (model.llm, tuple(model.encoders.values()))
    return LengthIndex(
        source_name=np.array(["lengths"]),
        source_start=np.array([0, len(chosen)]),
        text_tokens=np.maximum(lengths["llm_tokens"] - tokens.sum(1), 0).astype(np.int32),
        totals=np.concatenate([lengths["llm_tokens"][:, None], count * length], axis=1).astype(np.int32),
        item_start=np.concatenate([[0], np.cumsum(count.sum(1))]),
        item_encoder=encoder.astype(np.int32),
        item_positions=positions,
        item_useful=positions,
        item_tokens=-(-positions // PER_TOKEN),
        positions_per_token=np.ones(len(encoders), np.int32),
        **pairs_of_lengths(llm, towers, lengths["llm_tokens"], encoder, positions),
    )
