"""Lengths of samples: drawn like those of real training sets or read, and what steps of them hold."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.balance.phases import Costs, costs_of
from mmjax.benchmarks.harness import Options, option
from mmjax.config import ModelConfig
from mmjax.data.plan.length_files import omni_corpus, read_lengths
from mmjax.data.plan.length_index import LengthIndex, pairs_of_lengths
from mmjax.errors import UserError

PHASES = ("llm_tokens", "vision", "audio")
PER_TOKEN = 4  # patches or frames of an encoder for each token of the LLM
TILES = "vision_items"
TILE = 1024  # patches of one

LENGTHS: Options = {  # which
    "--lengths": option([], "default: made from --seed", type=Path, metavar="F.npz"),
    "--samples": option(200_000, "how many to make, without --lengths", minimum=1),
    "--seed": option(0, minimum=0),
}
ONE_STEP: Options = LENGTHS | {  # of one phase
    "--phase": option("llm_tokens", choices=PHASES),
    "--ranks": option(512, minimum=1),
    "--per-rank": option(60, "samples drawn for each rank", minimum=1),
}


def steps_options(per_rank: int) -> Options:
    """Declare the options that say what steps of all phases hold."""
    return LENGTHS | {
        "--per-rank": option(per_rank, "samples drawn for each rank", minimum=1),
        "--ranks-per-node": option(0, "that exchange among themselves (default: all)", minimum=0),
        "--scale": option(1, "divide all lengths by this, to at least 1", minimum=1),
    }


def read_phases(args: Namespace) -> Mapping[str, np.ndarray]:
    """Read or make the lengths that the options ask for."""
    return (
        read_lengths(args.lengths, PHASES) if args.lengths else omni_corpus(args.samples, args.seed)
    )


def draw_samples(available: int, count: int, seed: int) -> np.ndarray:
    """Draw so many samples, int64 `[count]`, each twice only where there are too few."""
    return np.random.default_rng(seed).choice(available, count, replace=count > available)


def draw_step(args: Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw samples for one step, int64 `[n]`, the rank that each is drawn for, and its length in the phase.

    A length of 0: it takes no part in the phase.
    """
    read = (
        read_lengths(args.lengths, (args.phase,))
        if args.lengths
        else omni_corpus(args.samples, args.seed)
    )
    sample = draw_samples(len(read[args.phase]), args.ranks * args.per_rank, args.seed)
    length = read[args.phase][sample]
    if not length.any():
        raise UserError(
            f"--phase {args.phase}: no drawn sample takes part in it; draw more with --per-rank"
        )
    return sample, np.repeat(np.arange(args.ranks, dtype=np.int32), args.per_rank), length


def rank_of_samples(rank: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Return the rank of every drawn sample, int32 `[n]`, -1 where it takes no part. rank: of those present."""
    of_all = np.full(len(present), -1, np.int32)
    of_all[present] = rank
    return of_all


def divided(length: np.ndarray, scale: int) -> np.ndarray:
    """Divide lengths, to at least 1 where there is anything."""
    return np.where(length > 0, np.maximum(length // scale, 1), 0)


def costs_of_step(lengths: Mapping[str, np.ndarray], sample: np.ndarray, scale: int) -> Costs:
    """Compute packed costs of samples of divided lengths, with one item for each encoder."""
    of_phases = divided(np.stack([lengths[phase][sample] for phase in PHASES], axis=1), scale)
    owner, encoder = np.nonzero(of_phases[:, 1:])
    items = of_phases[owner, 1 + encoder]
    return costs_of(
        of_phases[:, LLM], owner, 1 + encoder, items, -(-items // PER_TOKEN), len(PHASES)
    )


def draw_steps(args: Namespace) -> Iterator[Costs]:
    """Draw consecutive steps of a shuffle, of as many shuffles as they need; compute what each costs."""
    lengths = read_phases(args)
    rng = np.random.default_rng(args.seed)
    size = args.ranks * args.per_rank
    samples = len(lengths[PHASES[0]])
    shuffles = -(-args.steps * size // samples)
    order = np.concatenate([rng.permutation(samples) for _ in range(shuffles)])
    for sample in order[: args.steps * size].reshape(args.steps, size):
        yield costs_of_step(lengths, sample, args.scale)


def index_of_samples(
    read: Mapping[str, np.ndarray],
    encoders: Sequence[str],
    samples: int,
    scale: int,
    model: ModelConfig,
) -> LengthIndex:
    """Build the index of so many samples, those of `read` as often as needed, as one source of data.

    encoders: keys of `read`. An encoder's length is one item, `vision_items` counts tiles. Lengths
    in positions are divided by `scale`, to at least 1 where there is anything. model: whose layers'
    pairs are counted.
    """
    chosen = np.arange(samples) % len(read["llm_tokens"])
    scaled = {key: n if key == TILES else divided(n, scale) for key, n in read.items()}
    lengths = {key: scaled[key][chosen] for key in ("llm_tokens", *encoders)}
    # Of every sample and encoder: how many items, and how long each of them is. 5 tiles are 5 items
    # of 1,024 patches, 700 audio frames 1 item of 700.
    of_encoders = np.stack([lengths[key] for key in encoders], axis=1)
    tiles = np.array([key == TILES for key in encoders])
    count = np.where(tiles, of_encoders, np.minimum(of_encoders, 1))
    length = np.where(tiles, TILE, of_encoders)
    items_per_pair = count.ravel()
    encoder = np.repeat(np.tile(np.arange(len(encoders)), len(chosen)), items_per_pair)
    positions = np.repeat(length.ravel(), items_per_pair).astype(np.int32)
    tokens = count * -(-length // PER_TOKEN)
    llm = lengths["llm_tokens"]
    towers = tuple(model.encoders.values())
    return LengthIndex(
        source_name=np.array(["lengths"]),
        source_start=np.array([0, len(chosen)]),
        text_tokens=np.maximum(llm - tokens.sum(1), 0).astype(np.int32),
        totals=np.concatenate([llm[:, None], count * length], axis=1).astype(np.int32),
        item_start=np.concatenate([[0], np.cumsum(count.sum(1))]),
        item_encoder=encoder.astype(np.int32),
        item_positions=positions,
        item_useful=positions,
        item_tokens=-(-positions // PER_TOKEN),
        positions_per_token=np.ones(len(encoders), np.int32),
        **pairs_of_lengths(model.llm, towers, llm, encoder, positions),
    )


def visual_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draw images and text like an instruction-tuning corpus: 1 to 5 tiles, ten sources, a few very long texts."""
    rng = np.random.default_rng(seed)
    source = rng.choice(10, samples, p=np.array([4, 3, 3, 2, 2, 2, 1, 1, 1, 1]) / 20)
    tile_shares = rng.dirichlet([0.9, 0.2, 0.05, 0.25], 10)
    text_of = rng.uniform(4.2, 6.4, 10)  # of a source: mean of the logarithm of its text tokens
    tiles = _draw_tiles(tile_shares[source], rng)
    text = rng.lognormal(text_of[source], 0.7)
    tokens = np.clip(256 * tiles + text, 37, 4096)
    return {"vision_items": tiles, "llm_tokens": tokens.astype(np.int64), "source": source}


def _draw_tiles(shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw how many tiles the image of each sample has. shares `[n, 4]`: of images of 1, 3, 4 and 5 tiles."""
    # How many of the first three cumulative shares a random number exceeds.
    exceeded = rng.random((len(shares), 1)) > np.cumsum(shares, 1)[:, :-1]
    return np.array([1, 3, 4, 5])[exceeded.sum(1)]


# Sources of InternVL-Chat-1.2's training set, as modelled: samples, shares of images of 1, 3, 4 and
# 5 tiles, mean and standard deviation of the logarithm of text tokens, and how many of these there
# are at least. The last is text alone, which an empty tile stands beside.
INTERNVL_SOURCES = """
 70706  0.09 0.34 0.01 0.56  4.08 1.05 33
200000  0.93 0.07 0    0     5.67 0.30 30
 72318  0.62 0.28 0.04 0.06  5.01 0.45 30
157712  0.86 0.06 0    0.08  5.60 0.60 30
102025  0.52 0.08 0    0.40  5.56 0.35 30
374622  0.86 0.06 0    0.08  5.37 0.65 30
 81168  0.84 0.06 0    0.10  6.25 0.45 30
 81168  0.90 0.08 0    0.02  5.13 0.30 30
 87412  0.18 0.10 0.02 0.70  5.56 0.50 30
 40688  1    0    0    0     6.96 0.85 37
"""


def internvl_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draw images and text like InternVL-Chat-1.2's training set: tiles of 256 tokens, and up to 4,096 tokens."""
    rng = np.random.default_rng(seed)
    sources = np.loadtxt(INTERNVL_SOURCES.splitlines())
    counts, mean, deviation, least = sources[:, [0, 5, 6, 7]].T
    source = rng.choice(len(counts), samples, p=counts / counts.sum())
    tiles = _draw_tiles(sources[source, 1:5], rng)
    # The first source's texts are a logarithmic normal above its least, those of the others one
    # that is cut there.
    offset = np.where(source == 0, least[0], 0)
    text = np.maximum(offset + rng.lognormal(mean[source], deviation[source]), least[source])
    image = np.where(source < len(counts) - 1, 256 * tiles, 0)
    tokens = np.minimum(image + text, 4096)
    return {"vision_items": tiles, "llm_tokens": tokens.astype(np.int64), "source": source}
