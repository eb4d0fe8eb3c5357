"""A vision and audio LLM of 84B parameters: OrchMLLM's MLLM-84B (table 1), with Qwen2's 72B as the LLM.

Look at it with ``python -m mmjax.plan omni_84b cluster=h100x320x8``. It names no data: to train it,
name your sources.
"""

from mmjax.config import (
    AdamW,
    AudioConfig,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    LogMel,
    MeshConfig,
    ModelConfig,
    NoGrouping,
    RotaryGrid,
    Samples,
    Schedule,
    TrainingConfig,
    VisionConfig,
)


def config() -> Config:
    return Config(
        name="omni_84b",
        data=DataConfig(),
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
            Samples(20_480),
            {"llm": 2560, "vision": 2560, "audio": 2560},
            grouping=NoGrouping(chunk_steps=8),
        ),
        training=TrainingConfig(
            # 120B LLM tokens in steps of 9.3M (the plan's line `data`): what InternVL2.5-78B was
            # trained on in all its stages (arXiv:2412.05271), from a language model and encoders
            # that were trained before, as here.
            steps=13_000,
            precision="bfloat16",
            # A dozen points of the validation curve; an evaluation is a few steps' work.
            evaluate_every=1000,
            evaluate_samples=512,
            # At about 4 s a step a save every half hour. Llama 3's 16,384 GPUs failed every 3 hours
            # (arXiv:2407.21783, table 5), so 2,560 may about once a day, and then lose a quarter of
            # an hour. A checkpoint is 1 TB.
            checkpoint_every=500,
            keep=3,
            keep_every=5000,
            # 2,560 devices should not wait for a person because of one step: it is left out, and
            # its samples are named.
            bad_numbers="skip",
        ),
        mesh=MeshConfig(data=-1, fsdp=128),
        # Small, for towers that have been trained before; warm-up over 3% of the steps, then a
        # cosine to zero.
        optimizer=AdamW(learning_rate=1e-5),
        schedule=Schedule(warmup=400, final=0.0),
    )
