"""Connector alignment: a vision tower and an LLM that never met; only the new connector between them trains.

    python -m mmjax.train llava_alignment tower=clip-vit-large-patch14-336 llm=Qwen2.5-7B-Instruct \
        data=blip_laion_cc_sbu_558k.json images=images

tower: a folder with CLIP, SigLIP or InternViT. llm: one with a decoder, its tokenizer and chat
template; image says which of its special tokens stands for images. The recipe is LLaVA-1.5's first
stage: batch 256, learning rate 1e-3.
"""

from dataclasses import replace

from mmjax.config import (
    AdamW,
    BatchConfig,
    ChatFormat,
    Config,
    DataConfig,
    LlavaSource,
    MeshConfig,
    Placeholder,
    Samples,
    Schedule,
    TrainingConfig,
)
from mmjax.hf.families import compose, encoder_from_hf, from_hf


def config(
    tower: str, llm: str, data: str, images: str = "", image: str = "<|image_pad|>"
) -> Config:
    vision = encoder_from_hf(tower)
    vision = replace(
        vision, connector=replace(vision.connector, merge=1, norm="none", activation="gelu")
    )
    chat = ChatFormat(llm, placeholders={"image": Placeholder(image)})
    return Config(
        name="llava_alignment",
        data=DataConfig(sources={"chat": LlavaSource(data, images=images)}, chat=chat),
        batch=BatchConfig(size=Samples(256), rows={"llm": 8, "vision": 8}),
        model=compose({"vision": vision}, from_hf(llm), freeze=["vision", "llm"]),
        training=TrainingConfig(steps=2000, precision="bfloat16", checkpoint_every=500),
        optimizer=AdamW(learning_rate=1e-3, weight_decay=0.0, b2=0.999),
        schedule=Schedule(warmup=60, final=0.0),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
