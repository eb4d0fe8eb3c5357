"""An LLM of 9B parameters that sees images and makes some of 512 pixels: MMScale's MLLM-9B."""

from dataclasses import replace

from mmjax.config import Config, MeshConfig, ModelConfig
from mmjax.config.loading import sibling

middle = sibling(__file__, "mllm_15b")


def config() -> Config:
    base = middle.config()
    vision, picture = base.model.encoders["vision"], base.model.generators["picture"]
    return replace(
        base,
        name="mllm_9b",
        model=ModelConfig(
            llm=replace(
                base.model.llm, layers=32, width=4096, heads=32, kv_heads=32, mlp_width=11_008
            ),
            encoders={
                "vision": replace(vision, connector=replace(vision.connector, mlp_width=4096))
            },
            generators={
                "picture": replace(picture, connector=replace(picture.connector, mlp_width=4096))
            },
        ),
        mesh=MeshConfig(data=-1, fsdp=16),
    )
