"""`tiny_omni` with its encoders frozen: only the connectors and the LLM learn.

Start it from a run that has learned to see and hear:

    python -m mmjax.train configs/tiny_omni.py
    python -m mmjax.train configs/tiny_frozen.py init_from=runs/tiny_omni
"""

from dataclasses import replace

from mmjax.config import Config
from mmjax.config.loading import sibling

omni = sibling(__file__, "tiny_omni")


def config() -> Config:
    base = omni.config()
    encoders = {
        name: replace(encoder, frozen=True) for name, encoder in base.model.encoders.items()
    }
    return replace(base, name="tiny_frozen", model=replace(base.model, encoders=encoders))
