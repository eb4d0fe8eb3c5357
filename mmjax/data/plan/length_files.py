"""Lengths of samples whose data is not at hand: read from an `.npz` file, or made from a seed.

Keys of a file: `vision_items, llm_tokens`, with `source` where samples come from several; or
`vision, audio, text, llm_tokens`. Each is an integer array `[samples]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmjax.config import AudioConfig
from mmjax.data.media.patches import Encoders, positions_per_token
from mmjax.data.plan.length_index import LengthIndex
from mmjax.errors import UserError
from mmjax.planning.work import CONV_STRIDE


def read_lengths(files: Sequence[Path], keys: Sequence[str], optional: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Read these keys of all files, one after the other: int64 `[n]` each. A key that only some files have is left out.

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
            lengths = {key: file[key] for key in (*keys, *optional) if key in file.files}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"--lengths {path}: not a readable .npz file ({type(error).__name__})") from None
    for key in keys:
        if key not in lengths:
            raise UserError(f"--lengths {path}: no key {key!r}; needed are {', '.join(keys)}")
    size = len(lengths[keys[0]]) if lengths[keys[0]].ndim == 1 else -1
    for key, value in lengths.items():
        if value.ndim != 1 or len(value) != size or not np.issubdtype(value.dtype, np.integer):
            raise UserError(f"--lengths {path}: {key!r} must be integers [{max(size, 0)}], one for each sample")
        if size == 0 or value.min() < 0:
            raise UserError(f"--lengths {path}: {key!r} must hold at least one sample and no negative length")
    return {key: value.astype(np.int64) for key, value in lengths.items()}


def visual_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draw images and text like an instruction-tuning corpus: 1 to 5 tiles, ten sources, a few very long texts."""
    rng = np.random.default_rng(seed)
    source = rng.choice(10, samples, p=np.array([4, 3, 3, 2, 2, 2, 1, 1, 1, 1]) / 20)
    tiles_of = rng.dirichlet([0.9, 0.2, 0.05, 0.25], 10)  # of a source: how often an image has 1, 3, 4 or 5 tiles
    text_of = rng.uniform(4.2, 6.4, 10)  # of a source: mean of the logarithm of its text tokens
    tiles = np.array([1, 3, 4, 5])[(rng.random((samples, 1)) > np.cumsum(tiles_of[source], 1)[:, :-1]).sum(1)]
    text = rng.lognormal(text_of[source], 0.7)
    return {
        "vision_items": tiles,
        "llm_tokens": np.clip(256 * tiles + text, 37, 4096).astype(np.int64),
        "source": source,
    }


def omni_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draw text, images and audio of incoherent lengths: half of the samples have images, a third audio, few both."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, samples, p=[0.2, 0.45, 0.28, 0.07])  # text, vision, audio, both
    vision = np.where((kind == 1) | (kind == 3), np.clip(rng.lognormal(7.2, 0.6, samples), 64, 4096), 0)
    audio = np.where(kind >= 2, np.clip(rng.lognormal(6.2, 0.5, samples), 20, 1750), 0)
    text = np.clip(rng.lognormal(4.9, 0.9, samples), 10, 3000)
    lengths = {"vision": vision, "audio": audio, "text": text, "llm_tokens": text + vision / 4 + audio / 4}
    return {key: value.astype(np.int64) for key, value in lengths.items()}


def index_of_lengths(lengths: Mapping[str, np.ndarray], encoders: Encoders) -> LengthIndex:
    """Make the index of samples of which only lengths are known: `llm_tokens`, and of every encoder by name, int `[n]`.

    An encoder's lengths count positions in its layers; where there are any, they are one item, which is rounded up to
    whole tokens. The rest of a sample's LLM tokens is text.
    """
    llm = np.asarray(lengths["llm_tokens"], np.int64)
    per_token = np.array([positions_per_token(encoder) for encoder in encoders.values()], np.int64)
    stride = np.array([CONV_STRIDE if isinstance(e, AudioConfig) else 1 for e in encoders.values()], np.int64)
    useful = np.stack([np.asarray(lengths[name], np.int64) for name in encoders], axis=1) * stride
    sample, encoder = np.nonzero(useful)
    tokens = -(-useful // per_token)
    llm = np.maximum(llm, tokens.sum(1) + 1)  # at least one token of text
    item_tokens = tokens[sample, encoder]
    return LengthIndex(
        source_name=np.array(["lengths"]),
        source_start=np.array([0, len(llm)]),
        text_tokens=(llm - tokens.sum(1)).astype(np.int32),
        totals=np.concatenate([llm[:, None], tokens * per_token], axis=1).astype(np.int32),
        item_start=np.concatenate([[0], np.cumsum((useful > 0).sum(1))]),
        item_encoder=encoder.astype(np.int32),
        item_positions=(item_tokens * per_token[encoder]).astype(np.int32),
        item_useful=useful[sample, encoder].astype(np.int32),
        item_tokens=item_tokens.astype(np.int32),
        positions_per_token=per_token.astype(np.int32),
    )
