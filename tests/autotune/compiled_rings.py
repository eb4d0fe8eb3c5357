"""Compile two LLM layers whose tensor-parallel exchanges are overlapped for absent H100s; print what hides behind what.

`python compiled_rings.py TENSOR REMAT [FSDP]` prints JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from compiled_step import LLM, computations, is_product

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import RunPrograms
from mmjax.config import MeshConfig, ModelConfig
from mmjax.config.loading import load
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.memory import DeviceBatch


def chunks(body: Sequence[str]) -> list[int]:
    """How many products are computed while each chunk of a scan's body is under way."""
    found = []
    for i, line in enumerate(body):
        if started := re.match(r"(%\S+) = .* collective-permute-start\(", line):
            done = next(
                j
                for j, later in enumerate(body)
                if f"collective-permute-done({started[1]})" in later
            )
            found.append(sum(map(is_product, body[i:done])))
        elif " collective-permute(" in line:
            found.append(0)
    return found


def look(hlo: str) -> dict[str, object]:
    """What the scans over layers send between tensor-parallel devices."""
    parts = computations(hlo)
    names = re.findall(r" while\(.*body=%?([\w.\-]+)", hlo)
    bodies = [body for name in names if chunks(body := parts[name])]
    text = "\n".join(line for body in bodies for line in body)
    return {
        "chunks": [len(chunks(body)) for body in bodies],
        "exposed": [chunks(body).count(0) for body in bodies],
        "all-reduces": len(re.findall(r" all-reduce(-start)?\(", text)),
        # Of activations, which have three dimensions; shards of parameters have two.
        "gathers": len(
            re.findall(
                r"= \(?\(?\w+\[\d+,\d+,\d+\]\S*.* (?:all-gather|all-to-all)(?:-start)?\(", text
            )
        ),
    }


if __name__ == "__main__":
    tensor, remat, fsdp = int(sys.argv[1]), sys.argv[2], int((*sys.argv[3:], "1")[0])
    base = load("tiny_omni", ["optimizer=adamw"])
    config = replace(
        base,
        # Heads that eight devices divide.
        model=ModelConfig(
            replace(LLM, width=4096, heads=32, kv_heads=8, mlp_width=14_336, remat=remat), {}
        ),
        mesh=MeshConfig(1, fsdp=fsdp, tensor=tensor, sequence_parallel="overlap"),
        training=replace(base.training, precision="bfloat16"),
    )
    devices = aot_devices(parse_cluster(f"h100x{fsdp * tensor}"))
    program = RunPrograms.on_one_mesh(
        config, DeviceBatch({"llm": (1, 8192)}, {}, 8), devices
    ).compile_gradients()
    print(json.dumps(look(program.text) | {"rematerialized": program.rematerialized}))
