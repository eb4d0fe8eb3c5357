"""A vision and audio LLM of 84B parameters: OrchMLLM's MLLM-84B (table 1), with Qwen2's 72B as the LLM.

Look at it with ``python -m mmjax.plan omni_84b cluster=h100x320x8``. It names no data: to train it, name your sources.
"""

from dataclasses import replace

from mmjax.config import (
    AdamW,
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DecoderConfig,
    LogMel,
    MeshConfig,
    ModelConfig,
    NoGrouping,
    RotaryGrid,
    Samples,
    VisionConfig,
)
from mmjax.config.loading import sibling

tiny = sibling(__file__, "tiny_omni")


def config() -> Config:
    base = tiny.config()
    return replace(
        base,
        name="omni_84b",
        data=replace(base.data, sources={}),
        model=ModelConfig(
            llm=DecoderConfig(
                layers=80,
                width=8192,
                heads=64,
                kv_heads=8,
                head_width=128,
                mlp_width=29_568,
                vocab=152_064,
                rope_theta=1e6,
                tied=False,
                attention="auto",
            ),
            encoders={
                "vision": VisionConfig(
                    layers=45,
                    width=3200,
                    heads=25,
                    mlp_width=12_800,
                    patch=14,
                    positions=RotaryGrid(1e4),
                    connector=ConnectorConfig(merge=2, mlp_width=8192),
                    attention="auto",
                ),
                "audio": AudioConfig(
                    layers=48,
                    width=3072,
                    heads=24,
                    mlp_width=12_288,
                    clips=LogMel(mels=128),
                    connector=ConnectorConfig(merge=4, mlp_width=8192),
                    attention="auto",
                ),
            },
        ),
        batch=BatchConfig(  # 8 samples and one row of each module on each of 2,560 devices
            Samples(20_480), {"llm": 2560, "vision": 2560, "audio": 2560}, grouping=NoGrouping(chunk_steps=8)
        ),
        training=replace(base.training, precision="bfloat16"),
        mesh=MeshConfig(data=-1, fsdp=128),
        optimizer=AdamW(learning_rate=1e-5),
    )
