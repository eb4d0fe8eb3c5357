"""Compare dense with blockwise attention, forward and backward, on packed rows."""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.models.attention import MaskSpec, attention


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=4, help="equal samples packed in the row")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--repeats", type=int, default=3)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure milliseconds and temporary memory of both backends, interleaved, best of the repeats; ratios to dense."""
    inputs = [jax.random.normal(jax.random.key(i), (1, args.tokens, args.heads, args.width)) for i in range(3)]
    pos = jnp.arange(args.tokens, dtype=jnp.int32)[None]
    ones = jnp.ones_like(pos)
    mask = MaskSpec(sample=pos * args.samples // args.tokens, pos=pos, span=0 * pos, kind=ones, sees=ones)
    programs = {}
    for backend in ("dense", "blockwise"):
        loss = lambda q, k, v, mask, backend=backend: jnp.square(attention(q, k, v, mask, backend)).sum()  # noqa: E731
        programs[backend] = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*inputs, mask).compile()
    best = dict.fromkeys(programs, np.inf)
    for _ in range(args.repeats):
        for backend, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*inputs, mask))
            best[backend] = min(best[backend], time.perf_counter() - began)
    memory = {b: p.memory_analysis().temp_size_in_bytes for b, p in programs.items()}
    return [
        {
            "backend": b,
            "milliseconds": 1e3 * best[b],
            "temporary_mb": memory[b] / 2**20,
            "speedup": best["dense"] / best[b],
            "memory_saving": memory["dense"] / memory[b],
        }
        for b in programs
    ]
