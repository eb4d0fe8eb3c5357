"""internvl_26b on units: two nodes of H100, one for the vision tower and one for the LLM in four stages.

Its vision tower takes as long as its LLM: four patches for each token, and a quarter of the
parameters. It names no
data: to train it, name yours.
"""

from dataclasses import replace

from mmjax.config import Config, MeshConfig, Unit
from mmjax.config.loading import sibling

on_one_mesh = sibling(__file__, "internvl_26b")


def config() -> Config:
    base = on_one_mesh.config()
    size = replace(base.batch.size, count=256)
    return replace(
        base,
        name="internvl_26b_units",
        batch=replace(base.batch, size=size, rows={"llm": 2, "vision": 8}, microbatches=32),
        mesh=MeshConfig(),
        units={"vision": Unit(data=2, fsdp=4), "llm": Unit(pipeline=4, fsdp=2)},
    )
