"""A tiny model that draws digits and answers questions about images, and a config with both kinds of data."""

from __future__ import annotations

from dataclasses import replace

from tiny_run import tiny_config

from mmjax.config import (
    Config,
    DiffusionTransformerConfig,
    EmbeddedSource,
    FunctionSource,
    PixelLatents,
    UnetConfig,
)

PICTURE = DiffusionTransformerConfig(
    layers=2,
    width=32,
    heads=2,
    mlp_width=64,
    condition_width=24,
    latents=PixelLatents(channels=1),
    min_patches=16,
    queries=4,
    text_tokens=12,
    grid=4,
    biases=("query", "value", "output", "up", "down"),  # a key's has a gradient of rounding alone
)

UNET = UnetConfig(
    condition_width=24,
    widths=(16, 32),
    heads=(2, 4),
    attending=(True, False),
    blocks=1,
    groups=8,
    size=(8, 16),
    latents=PixelLatents(channels=1),
    queries=4,
)


def drawing_config(**changes) -> Config:
    """Questions about images, texts, and prompts with one to three digits to draw."""
    base = tiny_config()
    sources = {
        "embedded": EmbeddedSource(modalities=("image", "text"), samples=300),
        "drawing": FunctionSource("mmjax.data.toy.drawing:drawings", {"samples": 300}),
    }
    model = replace(
        base.model,
        encoders={"vision": base.model.encoders["vision"]},
        generators={"picture": PICTURE},
    )
    rows = {"llm": 3, "vision": 1, "picture": 2}
    return replace(
        base,
        data=replace(base.data, sources=sources),
        batch=replace(base.batch, rows=rows),
        model=model,
        **changes,
    )
