"""Text-to-image data to balance: 1 to 12 images a sample, of 256 to 1,024 pixels a side, in latents of a VAE."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mmjax.config import (
    BatchConfig,
    Config,
    DiffusionTransformerConfig,
    FunctionSource,
    Samples,
    VaeLatents,
)
from mmjax.config.loading import sibling
from mmjax.data.sample import Item, Sample, SampleLengths, Text

tiny_text = sibling(__file__, "tiny_text")


class Sizes:
    """A `Source` of texts and images to be made that are nothing but long and large."""

    def __init__(self, samples: int):
        rng = np.random.default_rng(0)
        self.text = np.clip(rng.lognormal(4.0, 1.0, samples), 5, 1000).astype(int)
        self.images = rng.integers(1, 13, samples)
        self.sides = 64 * rng.integers(4, 17, (samples, 12, 2))

    def __len__(self) -> int:
        return len(self.text)

    def fingerprint(self) -> str:
        return f"sizes-{len(self)}"

    def facts(self, index: int) -> SampleLengths:
        sides = self.sides[index, : self.images[index]].tolist()
        return SampleLengths(
            int(self.text[index]), tuple(("picture", (height, width)) for height, width in sides)
        )

    def sample(self, index: int) -> Sample:
        length = int(self.text[index])
        text = Text(np.zeros(length, np.int32), np.zeros(length, np.float32))
        return Sample((text, *(Item("picture", number) for number in range(self.images[index]))))

    def item(self, index: int, number: int) -> np.ndarray:
        height, width = self.sides[index, number]
        return np.zeros((height // 8, width // 8, 4), np.float32)


def sizes(split, samples=20_000) -> Sizes:
    """Open the source, as the config names it."""
    return Sizes(samples)


def config() -> Config:
    picture = DiffusionTransformerConfig(
        layers=28,
        width=1152,
        heads=16,
        mlp_width=4608,
        condition_width=4096,
        latents=VaeLatents(),
        min_patches=256,
    )
    small = tiny_text.config()
    return replace(
        small,
        name="text_to_image",
        data=replace(small.data, sources={"sizes": FunctionSource("config:sizes")}),
        model=replace(small.model, generators={"picture": picture}),
        batch=BatchConfig(Samples(128), {"llm": 8, "picture": 8}),  # 16 samples on each of 8 ranks
    )
