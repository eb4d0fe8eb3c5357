"""Full instruction tuning of a checkpoint on a LLaVA-style file and a folder of images, clips or videos.

    python -m mmjax.train llava_style checkpoint=llava-1.5-7b-hf data=llava_v1_5_mix665k.json
    images=images

checkpoint: a Hugging Face folder (docs/models.md says which), with eyes or ears. data: a .json or
.jsonl; validation: one to ask while training; audio, videos: the folders of its clips and videos.
Data of another format keep these: `data.sources.chat=messages` behind them (docs/data.md has the
kinds). The recipe is LLaVA-1.5's second stage: all but the encoders train, batch 128, learning rate
2e-5.
"""

from mmjax.config import (
    AdamW,
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    LlavaSource,
    MeshConfig,
    Samples,
    Schedule,
    TrainingConfig,
)
from mmjax.hf.families import from_hf, frozen


def config(
    checkpoint: str,
    data: str,
    images: str = "",
    validation: str = "",
    audio: str = "",
    videos: str = "",
) -> Config:
    model = from_hf(checkpoint)
    model = frozen(model, list(model.encoders))
    return Config(
        name="llava_style",
        data=DataConfig(
            sources={
                "chat": LlavaSource(
                    data, images=images, audio=audio, videos=videos, validation=validation
                )
            },
            chat=ChatFormat(checkpoint),
        ),
        batch=BatchConfig(size=Samples(128), rows={"llm": 8, **dict.fromkeys(model.encoders, 8)}),
        model=model,
        training=TrainingConfig(
            steps=5000, precision="bfloat16", evaluate_every=500, checkpoint_every=500
        ),
        optimizer=AdamW(learning_rate=2e-5, weight_decay=0.0, b2=0.999),
        schedule=Schedule(warmup=150, final=0.0),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
