"""A vision and audio LLM of 18B parameters: OrchMLLM's MLLM-18B (table 1), with Qwen2.5's 14B as the LLM."""

from dataclasses import replace

from mmjax.config import Config, ModelConfig
from mmjax.config.loading import sibling

large = sibling(__file__, "omni_84b")


def config() -> Config:
    base = large.config()
    vision, audio = base.model.encoders["vision"], base.model.encoders["audio"]
    return replace(
        base,
        name="omni_18b",
        model=ModelConfig(
            llm=replace(base.model.llm, layers=48, width=5120, heads=40, mlp_width=13_824),
            encoders={
                "vision": replace(
                    vision,
                    layers=40,
                    width=2400,
                    heads=30,
                    mlp_width=9600,
                    connector=replace(vision.connector, mlp_width=5120),
                ),
                "audio": replace(
                    audio,
                    layers=32,
                    width=1280,
                    heads=20,
                    mlp_width=5120,
                    connector=replace(audio.connector, merge=2, mlp_width=5120),
                ),
            },
        ),
    )
