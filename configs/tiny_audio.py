"""`tiny_omni` without images: audio and text.

python -m mmjax.train configs/tiny_audio.py
"""

from dataclasses import replace

from mmjax.config import Config, EmbeddedSource
from mmjax.config.loading import sibling

omni = sibling(__file__, "tiny_omni")


def config() -> Config:
    base = omni.config()
    return replace(
        base,
        name="tiny_audio",
        data=replace(base.data, sources={"embedded": EmbeddedSource(modalities=("audio", "text"))}),
        batch=replace(base.batch, rows={"llm": 8, "audio": 3}),
        model=replace(base.model, encoders={"audio": base.model.encoders["audio"]}),
    )
