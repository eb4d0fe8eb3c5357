"""Lengths of samples, drawn like those of real training sets."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def visual_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draw images and text like an instruction-tuning corpus: 1 to 5 tiles, ten sources, a few very long texts."""
    rng = np.random.default_rng(seed)
    source = rng.choice(10, samples, p=np.array([4, 3, 3, 2, 2, 2, 1, 1, 1, 1]) / 20)
    tiles_of = rng.dirichlet([0.9, 0.2, 0.05, 0.25], 10)  # of a source: how often an image has 1, 3, 4 or 5 tiles
    text_of = rng.uniform(4.2, 6.4, 10)  # of a source: mean of the logarithm of its text tokens
    # A draw from the source's distribution: how many of the first three cumulative shares a random number exceeds.
    tiles = np.array([1, 3, 4, 5])[(rng.random((samples, 1)) > np.cumsum(tiles_of[source], 1)[:, :-1]).sum(1)]
    text = rng.lognormal(text_of[source], 0.7)
    return {
        "vision_items": tiles,
        "llm_tokens": np.clip(256 * tiles + text, 37, 4096).astype(np.int64),
        "source": source,
    }


# Sources of InternVL-Chat-1.2's training set, as modelled: samples, shares of images of 1, 3, 4 and 5 tiles, mean and
# standard deviation of the logarithm of text tokens, and how many of these there are at least. The last is text alone,
# which an empty tile stands beside.
INTERNVL_SOURCES = (
    (70_706, (0.09, 0.34, 0.01, 0.56), 4.08, 1.05, 33),
    (200_000, (0.93, 0.07, 0, 0), 5.67, 0.30, 30),
    (72_318, (0.62, 0.28, 0.04, 0.06), 5.01, 0.45, 30),
    (157_712, (0.86, 0.06, 0, 0.08), 5.60, 0.60, 30),
    (102_025, (0.52, 0.08, 0, 0.40), 5.56, 0.35, 30),
    (374_622, (0.86, 0.06, 0, 0.08), 5.37, 0.65, 30),
    (81_168, (0.84, 0.06, 0, 0.10), 6.25, 0.45, 30),
    (81_168, (0.90, 0.08, 0, 0.02), 5.13, 0.30, 30),
    (87_412, (0.18, 0.10, 0.02, 0.70), 5.56, 0.50, 30),
    (40_688, (1, 0, 0, 0), 6.96, 0.85, 37),
)
INTERNVL_SAMPLES = sum(count for count, *_ in INTERNVL_SOURCES)


def internvl_corpus(samples: int, seed: int) -> Mapping[str, np.ndarray]:
    """Draw images and text like InternVL-Chat-1.2's training set: tiles of 256 tokens, and up to 4,096 tokens."""
    rng = np.random.default_rng(seed)
    counts, tiles_of, mean, deviation, least = map(np.array, zip(*INTERNVL_SOURCES, strict=True))
    source = rng.choice(len(counts), samples, p=counts / INTERNVL_SAMPLES)
    tiles = np.array([1, 3, 4, 5])[(rng.random((samples, 1)) > np.cumsum(tiles_of[source], 1)[:, :-1]).sum(1)]
    # The first source's texts are a logarithmic normal above its least, those of the others one that is cut there.
    offset = np.where(source == 0, least[0], 0)
    text = np.maximum(offset + rng.lognormal(mean[source], deviation[source]), least[source])
    image = np.where(source < len(counts) - 1, 256 * tiles, 0)
    return {
        "vision_items": tiles,
        "llm_tokens": np.minimum(image + text, 4096).astype(np.int64),
        "source": source,
    }
