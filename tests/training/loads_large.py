"""Loads a checkpoint onto 8 devices of one process, and prints its peak memory and what the devices hold, in bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from mmjax.config import MeshConfig
from mmjax.hf.families import from_hf
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import parameter_shardings
from mmjax.runtime.weights import load_pretrained


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(folder: str, frozen: bool) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    model = Model.build(from_hf(folder, freeze=["llm"] if frozen else []), jnp.bfloat16)
    mesh = make_mesh(MeshConfig(data=1, fsdp=8), jax.devices())
    params = jax.block_until_ready(
        load_pretrained(model, parameter_shardings(model, mesh, ShardingRules()))
    )
    held = sum(
        shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards
    )
    print(json.dumps({"peak": peak(), "held": held}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "frozen")
