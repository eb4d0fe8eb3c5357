"""Compile the delta rule with 1 or 2 states for an absent H200: temporary bytes, and bytes that each kernel spills."""

import json
import os
import re
import stat
import sys
import tempfile
from pathlib import Path

# The tests' own setting, under which kernels are compiled as nobody runs them.
os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
# So that XLA calls a ptxas that reports.
os.environ["XLA_FLAGS"] = (
    "--xla_gpu_enable_libnvptxcompiler=false --xla_gpu_enable_libnvjitlink=false"
)

import jax
import jax._src.lib
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.autotune.absent import aot_devices
from mmjax.kernels.delta_blocks import Tokens
from mmjax.kernels.delta_rule import delta_rule
from mmjax.planning.hardware import parse_cluster

LENGTH, KEY_HEADS, HEADS, WIDTH = 16_384, 16, 32, 128


def report_registers(folder: Path) -> Path:
    """Put a ptxas that reports before the one of the wheels; return its report."""
    wheels = Path(jax._src.lib.cuda_path)
    report = folder / "report"
    (folder / "bin").mkdir()
    (folder / "nvvm").symlink_to(wheels / "nvvm")
    script = folder / "bin" / "ptxas"
    script.write_text(f'#!/bin/sh\nexec "{wheels}/bin/ptxas" -v "$@" 2>> "{report}"\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    jax._src.lib.cuda_path = str(folder)
    return report


def temporary_bytes(mesh: Mesh, states: int) -> int:
    def struct(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    keys, values = (struct(1, LENGTH, n, WIDTH) for n in (KEY_HEADS, HEADS))
    numbers = struct(1, LENGTH, HEADS, dtype=jnp.float32)
    tokens = Tokens(keys, keys, values, numbers, numbers)
    state = struct(1, HEADS, WIDTH, WIDTH, dtype=jnp.float32)

    def total(
        tokens: Tokens, path: jax.Array, states: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        out, states = delta_rule(tokens, path, states, interpret=False)
        return out.astype(jnp.float32).sum() + sum(x.sum() for x in states), out

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jax.grad(total, has_aux=True)).lower(
            tokens, struct(1, LENGTH, dtype=jnp.int32), (state,) * states
        )
    return lowered.compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        report = report_registers(Path(folder))
        mesh = Mesh(np.array(aot_devices(parse_cluster("h200"))), ("device",))
        temporary = temporary_bytes(mesh, states=int(sys.argv[1]))
        found = re.findall(
            r"entry function 'delta_rule_([a-z_]+?)(?:__\d+)?'.*?(\d+) bytes spill stores",
            report.read_text(),
            re.DOTALL,
        )
    print(json.dumps({"temporary": temporary, "spills": {name: int(n) for name, n in found}}))
