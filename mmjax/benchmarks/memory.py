"""Compare predicted with compiled memory of the real train step on absent H100s, by model, remat and loss chunks."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from itertools import product
from typing import Any

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import compiled_bytes
from mmjax.benchmarks.harness import Options, option
from mmjax.benchmarks.synthetic_run import plan_rows, with_policies
from mmjax.config import (
    AdamW,
    AudioConfig,
    Config,
    ConnectorConfig,
    DecoderConfig,
    MeshConfig,
    ModelConfig,
    VisionConfig,
)
from mmjax.config.loading import load
from mmjax.planning.hardware import Rates, parse_cluster
from mmjax.planning.memory import GB, DeviceBatch
from mmjax.planning.remat import MemoryLimit
from mmjax.planning.speed import Speed

DEVICES = 8
MIXES = (
    {"llm": "full", "vision": "full", "audio": "full"},
    {"llm": "products", "vision": "attention", "audio": "none"},
)
SPEED = Speed(Rates(1.0, 1.0, 1.0))  # nothing is chosen here


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure one row for each model, mix and number of loss chunks.

    `predicted` and `compiled` are GB of a device, `off` by which part they differ. Models of one to
    two billion parameters in bfloat16, sharded over 8 devices, with one row of each module on each.
    """
    devices = aot_devices(parse_cluster(f"h100x{DEVICES}"))
    rows: list[dict[str, Any]] = []
    for name in args.model or sorted(MODELS):
        model, lengths = MODELS[name]
        for mix, chunks in product(MIXES, LOSS_CHUNKS.get(name, (1,))):
            comparison = _compare(_config(model, mix, chunks), lengths, devices)
            remat = "/".join(mix[tower] for tower in lengths)
            rows.append({"model": name, "remat": remat, "loss_chunks": chunks} | comparison)
    return rows


def _compare(config: Config, lengths: dict[str, int], devices: list[Any]) -> dict[str, float]:
    model = config.model
    shape = {name: (1, length) for name, length in lengths.items()}
    batch = DeviceBatch(shape, dict.fromkeys(model.encoders, 64), DEVICES)
    config = replace(config, batch=replace(config.batch, microbatches=1))
    predicted = plan_rows(
        config, shape, {"fsdp": DEVICES}, SPEED, MemoryLimit(0), batch.widths
    ).device
    compiled = compiled_bytes(config, batch, devices)
    return {"predicted": predicted / GB, "compiled": compiled / GB, "off": predicted / compiled - 1}


def _config(model: ModelConfig, mix: dict[str, Any], chunks: int) -> Config:
    base = load("tiny_omni")
    return replace(
        base,
        model=with_policies(model, mix),
        mesh=MeshConfig(1, fsdp=DEVICES),
        optimizer=AdamW(),
        training=replace(base.training, precision="bfloat16", loss_chunks=chunks),
    )


def _llm(layers: int, vocab: int = 65_536) -> DecoderConfig:
    sizes = {"heads": 16, "kv_heads": 4, "head_width": 128, "mlp_width": 8192, "vocab": vocab}
    return DecoderConfig(layers, 2048, **sizes, tied=False, attention="auto")


def _vision(layers: int) -> VisionConfig:
    connector = ConnectorConfig(mlp_width=2048)
    return VisionConfig(layers, 1024, 16, 4096, 14, connector=connector, attention="auto")


AUDIO = AudioConfig(
    12, 768, 12, 3072, connector=ConnectorConfig(merge=4, mlp_width=2048), attention="auto"
)
MODELS = {
    "large-vocabulary": (ModelConfig(_llm(4, 131_072)), {"llm": 8192}),
    "llm-heavy": (ModelConfig(_llm(24), {"vision": _vision(12)}), {"llm": 8192, "vision": 4096}),
    "vit-heavy": (ModelConfig(_llm(4), {"vision": _vision(48)}), {"llm": 4096, "vision": 16_384}),
    "omni": (
        ModelConfig(_llm(16), {"vision": _vision(24), "audio": AUDIO}),
        {"llm": 8192, "vision": 8192, "audio": 4096},
    ),
}
LOSS_CHUNKS = {"large-vocabulary": (1, 8)}  # of the others 1
OPTIONS: Options = {
    "--model": option(None, "default: all", choices=sorted(MODELS), action="append")
}
