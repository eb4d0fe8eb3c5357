"""Compile the gradients of an LLM in FP8 for an absent H100 and print what its HLO shows, as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import RunPrograms
from mmjax.config import DecoderConfig, ModelConfig
from mmjax.config.loading import load
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.memory import DeviceBatch

LLM = DecoderConfig(
    4, 1024, 8, 8, head_width=128, mlp_width=4096, vocab=32_768, tied=False, attention="auto", remat="products",
    fp8="linears",
)  # fmt: skip


if __name__ == "__main__":
    base = load("tiny_text", ["optimizer=adamw"])
    config = replace(
        base, model=ModelConfig(LLM), training=replace(base.training, precision="bfloat16")
    )
    batch = DeviceBatch({"llm": (1, 4096)}, {}, 1)
    text = (
        RunPrograms.on_one_mesh(config, batch, aot_devices(parse_cluster("h100")))
        .compile_gradients()
        .text
    )
    # Weights of both layers in float32 with their axes turned, which would be twice the memory of
    # the model.
    turned = sum(text.count(shape) for shape in ("f32[4096,2,1024]", "f32[1024,2,4096]"))
    print(
        json.dumps(
            {"products": text.count('custom_call_target="__cublas$lt$matmul$f8"'), "turned": turned}
        )
    )
