"""Compile the update of a 7B vision LLM for absent H200s: temporary bytes of a device, as JSON.

Arguments: devices, which divide parameters (`mesh.fsdp`), and dtypes of the moments.
"""

from __future__ import annotations

import json
import sys

from mmjax.autotune.absent import aot_devices
from mmjax.autotune.compile_run import RunPrograms
from mmjax.benchmarks.gpu_kernels import Sizes
from mmjax.benchmarks.gpu_steps import make_config
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.memory import DeviceBatch


def temporary_bytes(devices: int, moments: str) -> int:
    changes = [f"optimizer.moments={moments}", f"mesh.fsdp={devices}"]
    config = make_config(Sizes(), "7b", changes)
    batch = DeviceBatch({"llm": (1, 4096), "vision": (1, 8192)}, {"vision": 2048}, 1)
    cluster = aot_devices(parse_cluster(f"h200x{devices}"))
    update = RunPrograms.on_one_mesh(config, batch, cluster).lower_update(0).compile()
    memory = update.memory_analysis()
    # Parameters and moments are written in place.
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


if __name__ == "__main__":
    devices, *dtypes = sys.argv[1:]
    print(json.dumps({moments: temporary_bytes(int(devices), moments) for moments in dtypes}))
