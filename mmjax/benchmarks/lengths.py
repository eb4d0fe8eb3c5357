"""Lengths of samples for the benchmarks of `balance`: read from an `.npz` file, or made from a seed.

Keys of a file: `vision_items, llm_tokens`, with `source` where samples come from several; or
`vision, audio, text, llm_tokens`. Each is an integer array `[samples]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

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


def read_lengths(files: Sequence[Path], keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """These keys of all files, one after the other: int64 `[n]` each. A key that only some files have is left out.

    Where several files have no `source`, it is the number of the file. Raises UserError for what is no such file.
    """
    parts = [_read(path, keys, optional) for path in files]
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0] if all(key in p for p in parts)}
    if len(files) > 1 and "source" in optional and "source" not in joined:
        joined["source"] = np.repeat(np.arange(len(files)), [len(part[keys[0]]) for part in parts])
    return joined


def _read(path: Path, keys: Sequence[str], optional: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: file[key] for key in (*keys, *optional) if key in file.files}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"--lengths {path}: not a readable .npz file ({type(error).__name__})") from None
    for key in keys:
        if key not in found:
            raise UserError(f"--lengths {path}: no key {key!r}; needed are {', '.join(keys)}")
    size = len(found[keys[0]]) if found[keys[0]].ndim == 1 else -1
    for key, value in found.items():
        if value.ndim != 1 or len(value) != size or not np.issubdtype(value.dtype, np.integer):
            raise UserError(f"--lengths {path}: {key!r} must be integers [{max(size, 0)}], one for each sample")
        if size == 0 or value.min() < 0:
            raise UserError(f"--lengths {path}: {key!r} must hold at least one sample and no negative length")
    return {key: value.astype(np.int64) for key, value in found.items()}


def visual_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Images and text like an instruction-tuning corpus: 1 to 5 tiles, ten sources, a few very long texts."""
    rng = np.random.default_rng(seed)
    source = rng.choice(10, samples, p=np.array([4, 3, 3, 2, 2, 2, 1, 1, 1, 1]) / 20)
    tiles_of, text_of = rng.dirichlet([0.9, 0.2, 0.05, 0.25], 10), rng.uniform(4.2, 6.4, 10)
    tiles = np.array([1, 3, 4, 5])[(rng.random((samples, 1)) > np.cumsum(tiles_of[source], 1)[:, :-1]).sum(1)]
    text = rng.lognormal(text_of[source], 0.7)
    return {
        "vision_items": tiles,
        "llm_tokens": np.clip(256 * tiles + text, 37, 4096).astype(np.int64),
        "source": source,
    }


def omni_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Text, images and audio of incoherent lengths: half of the samples have images, a third audio, few both."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, samples, p=[0.2, 0.45, 0.28, 0.07])  # text, vision, audio, both
    vision = np.where((kind == 1) | (kind == 3), np.clip(rng.lognormal(7.2, 0.6, samples), 64, 4096), 0)
    audio = np.where(kind >= 2, np.clip(rng.lognormal(6.2, 0.5, samples), 20, 1750), 0)
    text = np.clip(rng.lognormal(4.9, 0.9, samples), 10, 3000)
    lengths = {"vision": vision, "audio": audio, "text": text, "llm_tokens": text + vision / 4 + audio / 4}
    return {key: value.astype(np.int64) for key, value in lengths.items()}
