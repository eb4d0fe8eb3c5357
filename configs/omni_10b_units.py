"""omni_10b on units: two nodes of H100, with six devices for vision, two for audio and eight for the LLM.

It names no data: to train it, name yours.
"""

from dataclasses import replace

from mmjax.config import Config, MeshConfig, Unit
from mmjax.config.loading import sibling

on_one_mesh = sibling(__file__, "omni_10b")


def config() -> Config:
    base = on_one_mesh.config()
    size = replace(base.batch.size, count=256)
    return replace(
        base,
        name="omni_10b_units",
        batch=replace(
            base.batch, size=size, rows={"llm": 2, "vision": 6, "audio": 6}, microbatches=32
        ),
        mesh=MeshConfig(),
        units={
            "vision": Unit(data=3, fsdp=2),
            "audio": Unit(data=2),
            # The last stage has the logits, which take as long as two layers.
            "llm": Unit(pipeline=4, fsdp=2, cuts=(8, 15, 22)),
        },
    )
