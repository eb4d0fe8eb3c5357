"""Compile a step of few layers of a 7B vision LLM for 8 absent H100s and print what its HLO shows, as JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import RunPrograms
from mmjax.config import ConnectorConfig, DecoderConfig, MeshConfig, ModelConfig, VisionConfig
from mmjax.config.loading import load
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.memory import DeviceBatch

LAYERS = 2  # the fewest that are scanned
ITEM_BYTES = {"pred": 1, "bf16": 2, "f32": 4}
LLM = DecoderConfig(
    LAYERS,
    3584,
    28,
    4,
    head_width=128,
    mlp_width=18_944,
    vocab=32_768,
    tied=False,
    attention="auto",
    remat="products",
)
VISION = VisionConfig(
    LAYERS, 1280, 16, 3420, 14, connector=ConnectorConfig(2, 5120), attention="auto", remat="attention", norm="rms",
    gated=True,
)  # fmt: skip


def computations(hlo: str) -> dict[str, list[str]]:
    """The instructions of every computation, in the order in which they are executed."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in hlo.splitlines():
        if begun := re.match(r"(?:ENTRY )?%?(\S+) \(.*\{$", line):
            name = begun[1]
        elif line.startswith("  "):
            found.setdefault(name, []).append(line.strip().removeprefix("ROOT "))
    return found


def size(shapes: str) -> int:
    """The bytes of the arrays that a type names, such as `(bf16[4,8], f32[2])`."""
    total = 0
    for kind, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        count = ITEM_BYTES[kind]
        for n in filter(None, dimensions.split(",")):
            count *= int(n)
        total += count
    return total


def is_product(instruction: str) -> bool:
    """Whether an instruction is a product of matrices, as XLA's own kernel or cuBLAS's."""
    return (
        bool(re.match(r"%\S*(gemm|dot)\S* = \S+ (fusion|dot|custom-call)\(", instruction))
        or "__cublas$" in instruction
    )


def gathers(body: Sequence[str]) -> list[tuple[int, int]]:
    """Of every gather of a scan's body, its bytes and how many products are computed while it is under way."""
    found = []
    for i, line in enumerate(body):
        if started := re.match(r"(%\S+) = \(\(.*?\), (.*)\) all-gather-start\(", line):
            done = next(
                j for j, later in enumerate(body) if f"all-gather-done({started[1]})" in later
            )
            found.append((size(started[2]), sum(map(is_product, body[i:done]))))
        elif plain := re.match(r"%\S+ = (\(.*?\)|\S+) all-gather\(", line):
            found.append((size(plain[1]), 0))
    return found


def look(hlo: str) -> dict[str, float]:
    """What a program's scans over layers do beside their layers."""
    parts = computations(hlo)
    instructions = [line for lines in parts.values() for line in lines]
    names = {
        m[1] for line in instructions if (m := re.search(r" while\(.*body=%?([\w.\-]+)", line))
    }
    bodies = [parts[name] for name in names]
    scans = [body for body in bodies if gathers(body)]
    gathered = [gather for body in scans for gather in gathers(body)]
    return {
        "scans": len(scans),
        "hidden": sum(n for n, products in gathered if products)
        / max(sum(n for n, _ in gathered), 1),
        "mask reductions": sum(
            "pred[" in line.split(" all-reduce")[0]
            for b in bodies
            for line in b
            if "all-reduce" in line
        ),
        "sorts": sum(" sort(" in line for body in scans for line in body),
    }


if __name__ == "__main__":
    base = load("tiny_omni", ["optimizer=adamw", *(word for word in sys.argv[1:] if "=" in word)])
    config = replace(
        base,
        model=ModelConfig(LLM, {"vision": VISION}),
        mesh=MeshConfig(1, fsdp=8),
        training=replace(base.training, precision="bfloat16"),
    )
    batch = DeviceBatch({"llm": (1, 4096), "vision": (1, 8192)}, {"vision": 64}, 8)
    program = RunPrograms.on_one_mesh(
        config, batch, aot_devices(parse_cluster("h100x8"))
    ).compile_gradients()
    seen = look(program.text) | {
        "rematerialized": program.rematerialized,
        "synchronous": program.synchronous,
    }
    print(json.dumps(seen))
