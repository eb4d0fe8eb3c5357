"""`tiny` with eyes and a generator."""

from dataclasses import replace

from mmjax.config import Config, DiffusionTransformerConfig, FunctionSource, PixelLatents
from mmjax.config.loading import sibling

tiny = sibling(__file__, "tiny")
media = sibling(__file__, "tiny_media")
few = tiny.few


def config() -> Config:
    base, eyes = tiny.config(), media.config().model.encoders["vision"]
    picture = DiffusionTransformerConfig(
        layers=1,
        width=32,
        heads=2,
        mlp_width=48,
        condition_width=16,
        latents=PixelLatents(channels=1),
        queries=4,
        grid=4,
    )
    sources = {
        "few": FunctionSource("config:few", {"modalities": "image text"}),
        "drawing": FunctionSource(
            "mmjax.data.toy.drawing:drawings", {"samples": 96, "held_out": 24}
        ),
    }
    return replace(
        base,
        name="tiny_drawing",
        data=replace(base.data, sources=sources),
        batch=replace(base.batch, rows={"llm": 4, "vision": 1, "picture": 1}, shapes=1),
        model=replace(base.model, encoders={"vision": eyes}, generators={"picture": picture}),
    )
