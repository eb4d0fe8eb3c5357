"""Compile the kernels for Hopper, forward and backward, for an absent H100; ptxas reports on standard output."""

import os

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.autotune.absent import aot_devices
from mmjax.batch import MaskSpec
from mmjax.kernels.flash_attention import Scores, plan_blocks
from mmjax.kernels.hopper_attention import hopper_attention
from mmjax.kernels.masked_tiles import plan_tiles
from mmjax.kernels.tiles import tiles_for
from mmjax.planning.hardware import parse_cluster

CASES = ((28, 4, 128, 0.0), (8, 8, 80, 0.0), (8, 2, 64, 30.0), (4, 2, 16, 0.0), (4, 2, 96, 0.0))
LENGTH = 4096


def compile_case(mesh: Mesh, heads: int, kv_heads: int, width: int, cap: float) -> None:
    tiles = tiles_for(width, LENGTH)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mask: MaskSpec) -> jax.Array:
        plan = plan_tiles(mask, plan_blocks(mask, tiles))
        return (
            hopper_attention(q, k, v, plan, Scores(width**-0.5, cap, tiles))
            .astype(jnp.float32)
            .sum()
        )

    def struct(shape: tuple[int, ...], dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    tokens = (struct((1, LENGTH, n, width), jnp.bfloat16) for n in (heads, kv_heads, kv_heads))
    mask = MaskSpec(*(struct((1, LENGTH), jnp.int32) for _ in range(5)))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(*tokens, mask).compile()


if __name__ == "__main__":
    mesh = Mesh(np.array(aot_devices(parse_cluster("h100"))), ("device",))
    for case in CASES:
        compile_case(mesh, *case)
