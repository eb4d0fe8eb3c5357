"""Low-rank adapters on the LLM of a checkpoint; its connector trains whole, its encoder not at all.

    python -m mmjax.train llava_lora checkpoint=llava-1.5-7b-hf data=llava_v1_5_mix665k.json
    images=images

Arguments as for llava_style. The recipe is LLaVA-1.5's: rank 128, alpha 256, learning rate 2e-4,
the connector's 2e-5.
"""

from dataclasses import replace

from mmjax.config import Config, LoraConfig, Rates
from mmjax.config.loading import sibling

full = sibling(__file__, "llava_style")


def config(
    checkpoint: str,
    data: str,
    images: str = "",
    validation: str = "",
    audio: str = "",
    videos: str = "",
) -> Config:
    base = full.config(checkpoint, data, images, validation, audio, videos)
    lora = {"llm": LoraConfig(("llm.layers.*",), rank=128, alpha=256.0)}
    connectors = {f"{name}.connector": Rates(learning_rate=2e-5) for name in base.model.encoders}
    return replace(
        base,
        name="llava_lora",
        model=replace(base.model, lora=lora),
        optimizer=replace(base.optimizer, learning_rate=2e-4, modules=connectors),
    )
