"""Preferences between pairs of answers, learned by adapters on the LLM of a checkpoint; the reference has none.

    python -m mmjax.train llava_dpo checkpoint=llava-1.5-7b-hf data=pairs.jsonl images=photos

data: TRL's preference format (docs/preferences.md); validation: such a file to measure while
training. All but the adapters is frozen, so the model without them is the reference, and images are
encoded once for both.
"""

from dataclasses import replace

from mmjax.config import AdamW, Config, PreferenceSource
from mmjax.config.loading import sibling
from mmjax.config.losses import Dpo
from mmjax.config.model import module_names
from mmjax.hf.families import frozen

lora = sibling(__file__, "llava_lora")


def config(checkpoint: str, data: str, images: str = "", validation: str = "") -> Config:
    base = lora.config(checkpoint, data)
    pairs = PreferenceSource(data, images=images, validation=validation)
    return replace(
        base,
        name="llava_dpo",
        data=replace(base.data, sources={"pairs": pairs}),
        model=frozen(base.model, module_names(base.model)),
        optimizer=AdamW(learning_rate=1e-5, weight_decay=0.0, b2=0.999),
        loss=Dpo(),
    )
