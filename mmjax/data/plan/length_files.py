"""Index samples of which only lengths are known: read from files, or drawn as in a corpus of incoherent lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmjax.config import DecoderConfig
from mmjax.data.media.patches import ItemModules
from mmjax.data.plan.length_index import LengthIndex, pairs_of_lengths
from mmjax.errors import UserError


def read_lengths(
    files: Sequence[Path], keys: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read these keys of all files, one after the other: int64 `[n]` each. A key that only some files have is left out.

    Where several files have no `source`, it is the number of the file. Raises UserError for what is
    no such file.
    """
    parts = [_read(path, keys, optional) for path in files]
    joined = {
        key: np.concatenate([part[key] for part in parts])
        for key in parts[0]
        if all(key in p for p in parts)
    }
    if len(files) > 1 and "source" in optional and "source" not in joined:
        # The file's number for each of its samples.
        joined["source"] = np.repeat(np.arange(len(files)), [len(part[keys[0]]) for part in parts])
    return joined


def _read(path: Path, keys: Sequence[str], optional: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            lengths = {key: file[key] for key in (*keys, *optional) if key in file.files}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"--lengths {path}: not a readable .npz file ({type(error).__name__})"
        ) from None
    for key in keys:
        if key not in lengths:
            raise UserError(f"--lengths {path}: no key {key!r}; needed are {', '.join(keys)}")
    size = len(lengths[keys[0]]) if lengths[keys[0]].ndim == 1 else -1
    for key, value in lengths.items():
        if value.ndim != 1 or len(value) != size or not np.issubdtype(value.dtype, np.integer):
            raise UserError(
                f"--lengths {path}: {key!r} must be integers [{max(size, 0)}], one for each sample"
            )
        if size == 0 or value.min() < 0:
            raise UserError(
                f"--lengths {path}: {key!r} must hold at least one sample and no negative length"
            )
    return {key: value.astype(np.int64) for key, value in lengths.items()}


def omni_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draw text, images and audio of incoherent lengths: half of the samples have images, a third audio, few both."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(4, samples, p=[0.2, 0.45, 0.28, 0.07])  # text, vision, audio, both
    vision = np.where(
        (kind == 1) | (kind == 3), np.clip(rng.lognormal(7.2, 0.6, samples), 64, 4096), 0
    )
    audio = np.where(kind >= 2, np.clip(rng.lognormal(6.2, 0.5, samples), 20, 1750), 0)
    text = np.clip(rng.lognormal(4.9, 0.9, samples), 10, 3000)
    lengths = {
        "vision": vision,
        "audio": audio,
        "text": text,
        "llm_tokens": text + vision / 4 + audio / 4,
    }
    return {key: value.astype(np.int64) for key, value in lengths.items()}


def interleaved_corpus(samples: int, seed: int, modules: ItemModules) -> Mapping[str, np.ndarray]:
    """Draw sequences of up to 8,192 tokens in which texts and images take turns, as MMScale's of LAION-400M.

    Images of 256 to 1,024 pixels a side are seen, a token for every 16 x 16 pixels, or made by one
    of the generators.
    """
    rng = np.random.default_rng(seed)
    turns = samples, 32
    image = np.clip(rng.lognormal(6.6, 0.7, turns), 256, 4096)
    text = np.clip(rng.lognormal(4.0, 1.0, turns), 5, 1000)
    generators = {name: m for name, m in modules.items() if m.is_generator}
    # 0: seen; else the number of the generator.
    role = np.where(rng.random(turns) < 0.5, 0, rng.integers(1, len(generators) + 1, turns))
    queries = np.array([0, *(generator.queries for generator in generators.values())])
    tokens = text + np.where(role == 0, image, queries[role])
    fits = np.cumsum(tokens, axis=1) <= 8192
    lengths = {
        "vision": (image * ((role == 0) & fits)).sum(1),
        "llm_tokens": (tokens * fits).sum(1),
    }
    for number, (name, generator) in enumerate(generators.items(), 1):
        lengths[name] = generator.min_patches * ((role == number) & fits).sum(1)
    return {key: value.astype(np.int64) for key, value in lengths.items()}


def index_of_lengths(
    lengths: Mapping[str, np.ndarray], modules: ItemModules, decoder: DecoderConfig | None = None
) -> LengthIndex:
    """Make the index of samples of which only lengths are known: `llm_tokens`, and of every module by name, int `[n]`.

    A module's lengths count positions in its layers; where there are any, they are one item, which
    an encoder rounds up to whole tokens. Those of a UNet, all of whose images have one size, are
    cut into images. The rest of a sample's LLM tokens is text.
    """
    llm = np.asarray(lengths["llm_tokens"], np.int64)
    per_token = np.array([module.positions_per_token for module in modules.values()], np.int64)
    stride = np.array([module.stride for module in modules.values()], np.int64)
    useful = np.stack([np.asarray(lengths[name], np.int64) for name in modules], axis=1) * stride
    queries = np.array([module.queries for module in modules.values()], np.int64)
    size = np.array([0 if m.is_stack else m.min_patches for m in modules.values()], np.int64)
    items = np.where(size > 0, -(-useful // np.maximum(size, 1)), useful > 0)
    useful = np.where(size > 0, items * size, useful)
    tokens = np.where(queries > 0, items * queries, -(-useful // per_token))
    positions = np.where(queries > 0, useful, tokens * per_token)
    llm = np.maximum(llm, tokens.sum(1) + 1)  # at least one token of text
    sample, encoder = np.nonzero(items)
    count = items[sample, encoder]

    def per_item(total: np.ndarray) -> np.ndarray:
        return np.repeat(total[sample, encoder] // count, count).astype(np.int32)

    item_encoder = np.repeat(encoder, count).astype(np.int32)
    item_useful = per_item(useful)
    return LengthIndex(
        source_name=np.array(["lengths"]),
        source_start=np.array([0, len(llm)]),
        text_tokens=(llm - tokens.sum(1)).astype(np.int32),
        totals=np.concatenate([llm[:, None], positions], axis=1).astype(np.int32),
        item_start=np.concatenate([[0], np.cumsum(items.sum(1))]),
        item_encoder=item_encoder,
        item_positions=per_item(positions),
        item_useful=item_useful,
        item_tokens=per_item(tokens),
        positions_per_token=per_token.astype(np.int32),
        **pairs_of_lengths(decoder, tuple(modules.values()), llm, item_encoder, item_useful),
    )
