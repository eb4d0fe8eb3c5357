"""Compare dense with blockwise attention, forward and backward, on packed rows."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.benchmarks.harness import Options, best_seconds, option
from mmjax.kernels.masks import encoder_mask
from mmjax.kernels.tiles import MAX_BLOCK
from mmjax.models.attention import attention

OPTIONS: Options = {
    "--tokens": option(4096),
    "--samples": option(4, "equal samples packed in the row"),
    "--lengths": option([], "tokens of each sample, in their place", type=int),
    "--items": option(False, "as an encoder's: every token attends the whole sample"),
    "--heads": option(4),
    "--width": option(64, "of a head"),
    "--blocks": option([MAX_BLOCK], "tokens of a block; several are compared"),
    "--repeats": option(3),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Measure milliseconds and temporary memory of both backends, interleaved, best of the repeats; ratios to dense."""
    lengths = args.lengths or np.bincount(np.arange(args.tokens) * args.samples // args.tokens)
    tokens = int(np.sum(lengths))
    inputs = [
        jax.random.normal(jax.random.key(i), (1, tokens, args.heads, args.width)) for i in range(3)
    ]
    mask = encoder_mask(jnp.asarray(np.repeat(np.arange(len(lengths)), lengths)[None], jnp.int32))
    if not args.items:
        mask = mask._replace(span=jnp.zeros_like(mask.span))
    programs = {}
    for backend, block in [("dense", None), *(("blockwise", block) for block in args.blocks)]:
        options = {} if block is None else {"max_block": block}
        gradients = jax.grad(partial(_loss, backend=backend, **options), argnums=(0, 1, 2))
        programs[backend, block] = jax.jit(gradients).lower(*inputs, mask).compile()

    def run_program(program: Any) -> None:
        jax.block_until_ready(program(*inputs, mask))

    runs = {key: partial(run_program, program) for key, program in programs.items()}
    best = best_seconds(runs, args.repeats)
    memory = {key: p.memory_analysis().temp_size_in_bytes for key, p in programs.items()}
    dense = "dense", None
    return [
        {
            "backend": key[0],
            "block": key[1],
            "milliseconds": 1e3 * best[key],
            "temporary_mb": memory[key] / 2**20,
            "speedup": best[dense] / best[key],
            "memory_saving": memory[dense] / memory[key],
        }
        for key in programs
    ]


def _loss(*operands: Any, **options: Any) -> jax.Array:
    return jnp.square(attention(*operands, **options)).sum()
