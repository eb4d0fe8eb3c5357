"""A vision LLM of 14B to 76B parameters: InternViT-6B before an LLM of your choice (OmniBal, appendix table 1).

    python -m mmjax.plan internvl llm=34b cluster=h100x8x8 units=auto

llm: 8b (Llama 3), 20b (InternLM2: `internvl_26b`), 34b (Yi) or 70b (Llama 3). It names no data: to
train it, name yours.
"""

from dataclasses import replace

from mmjax.config import Config, DecoderConfig, MeshConfig, ModelConfig
from mmjax.config.loading import sibling
from mmjax.errors import UserError

large = sibling(__file__, "omni_84b")

LLAMA_3 = {"kv_heads": 8, "head_width": 128, "vocab": 128_256, "rope_theta": 5e5}
LLMS = {
    "8b": {"layers": 32, "width": 4096, "heads": 32, "mlp_width": 14_336, **LLAMA_3},
    "20b": {
        "layers": 48,
        "width": 6144,
        "heads": 48,
        "mlp_width": 16_384,
        "kv_heads": 8,
        "head_width": 128,
        "vocab": 92_553,
        "rope_theta": 1e6,
    },
    "34b": {
        "layers": 60,
        "width": 7168,
        "heads": 56,
        "mlp_width": 20_480,
        "kv_heads": 8,
        "head_width": 128,
        "vocab": 64_000,
        "rope_theta": 5e6,
    },
    "70b": {"layers": 80, "width": 8192, "heads": 64, "mlp_width": 28_672, **LLAMA_3},
}


def config(llm: str) -> Config:
    if llm not in LLMS:
        raise UserError(f"llm={llm}: choose one of {', '.join(LLMS)}")
    base = large.config()
    vision = base.model.encoders["vision"]
    decoder = DecoderConfig(**LLMS[llm], tied=False, attention="auto")
    connector = replace(vision.connector, mlp_width=decoder.width)
    return replace(
        base,
        name=f"internvl_6_{llm}",
        model=ModelConfig(llm=decoder, encoders={"vision": replace(vision, connector=connector)}),
        batch=replace(
            base.batch, size=replace(base.batch.size, count=512), rows={"llm": 64, "vision": 64}
        ),
        training=replace(base.training, steps=10_000),  # 5M samples: fine-tuning
        schedule=replace(base.schedule, warmup=300),  # 3% of the steps
        mesh=MeshConfig(data=-1, fsdp=64),
    )
