"""A vision LLM of 26B parameters: InternViT-6B and InternLM2-20B, InternVL-Chat-1.5 (OmniBal, table 2).

Look at it with ``python -m mmjax.plan internvl_26b cluster=a100x8x8``. It names no data: to train it, name yours.
"""

from dataclasses import replace

from mmjax.config import Config, DecoderConfig, MeshConfig, ModelConfig
from mmjax.config.loading import sibling

large = sibling(__file__, "omni_84b")


def config() -> Config:
    base = large.config()
    vision = base.model.encoders["vision"]
    return replace(
        base,
        name="internvl_26b",
        model=ModelConfig(
            llm=DecoderConfig(
                layers=48,
                width=6144,
                heads=48,
                kv_heads=8,
                head_width=128,
                mlp_width=16_384,
                vocab=92_553,
                rope_theta=1e6,
                tied=False,
                attention="auto",
            ),
            encoders={"vision": replace(vision, connector=replace(vision.connector, mlp_width=6144))},
        ),
        batch=replace(base.batch, size=replace(base.batch.size, count=512), rows={"llm": 64, "vision": 64}),
        training=replace(base.training, steps=10_000),  # 5M samples: fine-tuning
        schedule=replace(base.schedule, warmup=300),  # 3% of the steps
        mesh=MeshConfig(data=-1, fsdp=64),
    )
