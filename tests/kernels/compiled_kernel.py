"""Compile the attention kernel, forward and backward, for an absent H100: temporary bytes by case, as JSON."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.autotune.absent import aot_devices
from mmjax.batch import MaskSpec
from mmjax.kernels.flash_attention import Scores, flash_attention, plan_blocks
from mmjax.kernels.tiles import MAX_BLOCK, tiles_for
from mmjax.planning.hardware import parse_cluster

CASES = {
    "16384 x 28 (4) x 128": (16_384, 28, 4, 128),
    "16384 x 16 (16) x 80": (16_384, 16, 16, 80),
    "16384 x 16 (16) x 80, blocks of 64": (16_384, 16, 16, 80, 64),
}


def temporary_bytes(
    mesh: Mesh, length: int, heads: int, kv_heads: int, width: int, max_block: int = MAX_BLOCK
) -> int:
    tiles = tiles_for(width, length, max_block)
    scores = Scores(width**-0.5, 0.0, tiles)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, mask: MaskSpec) -> jax.Array:
        return flash_attention(q, k, v, plan_blocks(mask, tiles), scores).astype(jnp.float32).sum()

    def struct(shape: tuple[int, ...], dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    tokens = (struct((1, length, n, width), jnp.bfloat16) for n in (heads, kv_heads, kv_heads))
    mask = MaskSpec(*(struct((1, length), jnp.int32) for _ in range(5)))
    # Newer JAX asks the mesh in use which GPU a kernel is lowered for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*tokens, mask)
    return lowered.compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    mesh = Mesh(np.array(aot_devices(parse_cluster("h100"))), ("device",))
    print(json.dumps({name: temporary_bytes(mesh, *case) for name, case in CASES.items()}))
