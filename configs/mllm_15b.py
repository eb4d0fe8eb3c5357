"""An LLM of 15B parameters that sees images and makes some of 512 pixels: MMScale's MLLM-15B."""

from dataclasses import replace

from mmjax.config import Config, MeshConfig, ModelConfig
from mmjax.config.loading import sibling

large = sibling(__file__, "mllm_72b")


def config() -> Config:
    base = large.config()
    vision, picture = base.model.encoders["vision"], base.model.generators["picture"]
    return replace(
        base,
        name="mllm_15b",
        model=ModelConfig(
            llm=replace(
                base.model.llm, layers=40, width=5120, heads=40, kv_heads=40, mlp_width=13_824
            ),
            encoders={
                "vision": replace(vision, connector=replace(vision.connector, mlp_width=5120))
            },
            generators={
                "picture": replace(
                    picture,
                    size=(64, 64),
                    connector=replace(picture.connector, mlp_width=5120),
                    remat="none",
                )
            },
        ),
        mesh=MeshConfig(data=-1, fsdp=32),
    )
