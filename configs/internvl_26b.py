"""A vision LLM of 26B parameters: InternViT-6B and InternLM2-20B, InternVL-Chat-1.5 (OmniBal, table 2).

Look at it with ``python -m mmjax.plan internvl_26b cluster=a100x8x8``. It names no data: to train
it, name yours.
"""

from dataclasses import replace

from mmjax.config import Config
from mmjax.config.loading import sibling

internvl = sibling(__file__, "internvl")


def config() -> Config:
    return replace(internvl.config("20b"), name="internvl_26b")
