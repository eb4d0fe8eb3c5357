"""Samples of three modalities with lengths as incoherent as real corpora, made from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmjax.balance.exchange import Rearrangement
from mmjax.balance.parts import Parts, offsets_by_key

LLM, VISION, AUDIO = range(3)


def parts_of(samples: Sequence[Sequence[tuple[int, int]]]) -> Parts:
    """Parts of each sample's (module, length) pairs, the LLM's first."""
    start = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])]).astype(np.int64)
    module, length = (
        np.array([pair for sample in samples for pair in sample], np.int64).reshape(-1, 2).T
    )
    return Parts(start, module.astype(np.int32), np.ascontiguousarray(length))


def rearrange(length: np.ndarray, source: np.ndarray, target: np.ndarray) -> Rearrangement:
    """Items that are packed in their order before and after they move."""
    return Rearrangement(
        length=length,
        source=source,
        source_offset=offsets_by_key(length, source),
        target=target,
        target_offset=offsets_by_key(length, target),
    )


def corpus(samples: int, seed: int, wide: bool = False, alignment: int = 4) -> Parts:
    """Text only, images, clips or both in one sample; `wide` has up to four images and clips of up to 4x the mean."""
    rng = np.random.default_rng(seed)
    spread, images, longest = (0.75, 4, 4.0) if wide else (0.5, 3, 2.5)
    lengths: list[list[tuple[int, int]]] = []
    for family in rng.choice(4, samples, p=[0.34, 0.34, 0.22, 0.10]):
        text = int(np.clip(rng.lognormal(3.0, 0.5), 6, 60))
        items: list[tuple[int, int]] = []
        if family in (0, 2):
            for _ in range(rng.integers(1, images + 1) if rng.random() < 0.4 else 1):
                items.append((VISION, _aligned(rng, 16, spread, longest, alignment)))
        if family in (1, 2):
            items.append((AUDIO, _aligned(rng, 52, spread, longest, alignment)))
        lengths.append([(LLM, text + sum(length for _, length in items) // 4), *items])
    return parts_of(lengths)


def _aligned(
    rng: np.random.Generator, mean: float, spread: float, longest: float, alignment: int
) -> int:
    """A log-normal length clipped at `longest` times its mean, rounded up to the alignment."""
    length = np.clip(mean * rng.lognormal(-(spread**2) / 2, spread), 1, longest * mean)
    return int(-(-length // alignment) * alignment)
