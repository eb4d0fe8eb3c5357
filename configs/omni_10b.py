"""A vision and audio LLM of 10B parameters: OrchMLLM's MLLM-10B (table 1), with Qwen2's 7B as the LLM."""

from dataclasses import replace

from mmjax.config import Config, ModelConfig
from mmjax.config.loading import sibling

middle = sibling(__file__, "omni_18b")


def config() -> Config:
    base = middle.config()
    vision, audio = base.model.encoders["vision"], base.model.encoders["audio"]
    return replace(
        base,
        name="omni_10b",
        model=ModelConfig(
            llm=replace(
                base.model.llm, layers=28, width=3584, heads=28, kv_heads=4, mlp_width=18_944
            ),
            encoders={
                "vision": replace(
                    vision,
                    layers=36,
                    width=2048,
                    heads=16,
                    mlp_width=8192,
                    connector=replace(vision.connector, merge=1, mlp_width=3584),
                ),
                "audio": replace(audio, connector=replace(audio.connector, mlp_width=3584)),
            },
        ),
    )
