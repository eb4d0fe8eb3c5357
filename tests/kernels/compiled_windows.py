"""Compile attention in windows, forward and backward, for an absent H200, failing where registers spill: bytes as JSON.

With a word behind it: the warps of a program (1 has too few registers).
"""

import json
import os
import sys

# The tests' own setting, under which kernels are compiled as nobody runs them.
os.environ.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.autotune.absent import aot_devices
from mmjax.batch import MaskSpec
from mmjax.kernels import window_attention as windows
from mmjax.planning.hardware import parse_cluster

LENGTH = 41_984


def temporary_bytes(mesh: Mesh, width: int) -> int:
    def both(q, k, v, d_out, mask):
        plan = windows.plan_windows(mask)
        out, backward = jax.vjp(
            lambda q, k, v: windows.window_attention(q, k, v, plan, width**-0.5), q, k, v
        )
        return out, *backward(d_out)

    def struct(shape: tuple[int, ...], dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    arrays = [struct((1, LENGTH, 16, width), jnp.bfloat16)] * 4
    mask = MaskSpec(*(struct((1, LENGTH), jnp.int32) for _ in range(5)))
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
    # Newer JAX asks the mesh in use which GPU a kernel is lowered for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(both, compiler_options=options).lower(*arrays, mask)
    return lowered.compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    windows.WARPS = int(sys.argv[1]) if len(sys.argv) > 1 else windows.WARPS
    mesh = Mesh(np.array(aot_devices(parse_cluster("h200"))), ("device",))
    print(json.dumps({str(width): temporary_bytes(mesh, width) for width in (64, 72, 80)}))
