"""Lengths like those of chats, of documents and of videos, and chats of which a few are very long."""

from __future__ import annotations

import numpy as np

TOKENS_OF_TILE = 256


def lengths_of(kind: str, samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw tokens of the LLM and tiles of 1,024 patches."""
    rng = np.random.default_rng(seed)
    text = np.clip(rng.lognormal(6.5, 0.7, samples), 64, 4096).astype(np.int64)
    tiles = rng.choice([0, 1, 2, 4], samples, p=[0.25, 0.45, 0.2, 0.1])
    if kind == "long":  # 3 % of them
        text = np.where(rng.random(samples) < 0.03, rng.integers(8192, 32768, samples), text)
    elif kind == "documents":
        size = rng.choice(3, samples, p=[0.80, 0.15, 0.05])
        longer = rng.integers(4096, 16384, samples), rng.integers(16384, 32000, samples)
        text = np.select([size == 1, size == 2], longer, text)
        tiles = np.where(size > 0, 0, tiles)
    elif kind == "videos":
        video = rng.random(samples) < 0.2
        tiles = np.where(
            video, np.clip(rng.lognormal(3.1, 0.6, samples), 8, 96).astype(np.int64), tiles
        )
        text = np.where(video, np.clip(text // 4, 64, None), text)
    return {"llm_tokens": text + TOKENS_OF_TILE * tiles, "vision_items": tiles}
