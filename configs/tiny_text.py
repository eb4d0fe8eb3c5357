"""`tiny_omni` without encoders: a language model alone.

python -m mmjax.train configs/tiny_text.py
"""

from dataclasses import replace

from mmjax.config import Config, EmbeddedSource
from mmjax.config.loading import sibling

omni = sibling(__file__, "tiny_omni")


def config() -> Config:
    base = omni.config()
    return replace(
        base,
        name="tiny_text",
        data=replace(base.data, sources={"embedded": EmbeddedSource(modalities=("text",))}),
        batch=replace(base.batch, rows={"llm": 8}),
        model=replace(base.model, encoders={}),
    )
