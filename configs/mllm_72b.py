"""An LLM of 72B parameters that sees and makes images: MMScale's MLLM-72B, ViT-Huge, Llama 3 and Stable Diffusion 2.1.

Images of 1,024 pixels are made by a UNet behind the LLM. Look at it with ``python -m mmjax.plan
mllm_72b cluster=a800x120x8``. It names no data: to train it, name your sources, the weights of the
UNet (``model.generators.picture.weights``) and of the VAE
(``model.generators.picture.latents.weights``).
"""

from mmjax.config import (
    AdamW,
    BatchConfig,
    Config,
    ConnectorConfig,
    DataConfig,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    NoGrouping,
    RotaryGrid,
    Samples,
    Schedule,
    TrainingConfig,
    UnetConfig,
    VisionConfig,
)


def config() -> Config:
    return Config(
        name="mllm_72b",
        data=DataConfig(),
        model=ModelConfig(
            llm=DecoderConfig(
                layers=80,
                width=8192,
                heads=64,
                kv_heads=8,
                head_width=128,
                mlp_width=28_672,
                vocab=128_256,
                rope_theta=5e5,
                norm_eps=1e-5,
                tied=False,
                attention="auto",
            ),
            encoders={
                # A token for every 16 x 16 pixels.
                "vision": VisionConfig(
                    layers=32,
                    width=1280,
                    heads=16,
                    mlp_width=5120,
                    patch=16,
                    positions=RotaryGrid(1e4),
                    connector=ConnectorConfig(merge=1, mlp_width=8192),
                    attention="auto",
                ),
            },
            generators={
                "picture": UnetConfig(
                    condition_width=1024,
                    size=(128, 128),
                    connector=ConnectorConfig(merge=1, mlp_width=8192),
                    attention="auto",
                    remat="full",
                ),
            },
        ),
        batch=BatchConfig(  # a row of two sequences of up to 8,192 tokens on each of 960 devices
            Samples(1920),
            {"llm": 960, "vision": 960, "picture": 960},
            grouping=NoGrouping(chunk_steps=8),
        ),
        training=TrainingConfig(
            # 120B LLM tokens in steps of up to 15.7M, as the towers have been trained before.
            steps=8000,
            precision="bfloat16",
            evaluate_every=1000,
            evaluate_samples=512,
            checkpoint_every=500,
            keep=3,
            keep_every=4000,
            bad_numbers="skip",
        ),
        mesh=MeshConfig(data=-1, fsdp=64),
        # Small, for towers that have been trained before; warm-up over 3% of the steps, then a
        # cosine to zero.
        optimizer=AdamW(learning_rate=1e-5),
        schedule=Schedule(warmup=240, final=0.0),
    )
