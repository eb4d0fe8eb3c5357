"""`tiny` with eyes and ears."""

from dataclasses import replace

from mmjax.config import Config, FunctionSource
from mmjax.config.loading import sibling

tiny = sibling(__file__, "tiny")
few = tiny.few


def config() -> Config:
    base, omni = tiny.config(), tiny.omni.config()
    encoders = {
        name: replace(
            encoder,
            layers=1,
            width=32,
            heads=2,
            mlp_width=48,
            connector=replace(encoder.connector, mlp_width=48),
        )
        for name, encoder in omni.model.encoders.items()
    }
    source = FunctionSource("config:few", {"modalities": "image audio mixed text"})
    return replace(
        base,
        name="tiny_media",
        data=replace(base.data, sources={"few": source}),
        batch=replace(base.batch, rows={"llm": 4, "vision": 1, "audio": 1}, shapes=1),
        model=replace(base.model, encoders=encoders),
    )
