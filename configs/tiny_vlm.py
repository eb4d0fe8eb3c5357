"""`tiny_omni` without audio: images and text.

python -m mmjax.train configs/tiny_vlm.py
"""

from dataclasses import replace

from mmjax.config import Config, EmbeddedSource
from mmjax.config.loading import sibling

omni = sibling(__file__, "tiny_omni")


def config() -> Config:
    base = omni.config()
    return replace(
        base,
        name="tiny_vlm",
        data=replace(base.data, sources={"embedded": EmbeddedSource(modalities=("image", "text"))}),
        batch=replace(base.batch, rows={"llm": 8, "vision": 2}),
        model=replace(base.model, encoders={"vision": base.model.encoders["vision"]}),
    )
