"""Measure how compile time grows with depth: a gradient step of many equal layers against few."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mmjax.batch import Microbatch
from mmjax.benchmarks.harness import Options, best_seconds, option
from mmjax.config import DecoderConfig, ModelConfig
from mmjax.cost.trace import tower_batch
from mmjax.models.model import Model

OPTIONS: Options = {
    "--layers": option([6, 48], metavar=("FEW", "MANY"), nargs=2),
    "--repeats": option(3),
}


def run(args: Namespace) -> list[dict[str, Any]]:
    """Time tracing, lowering and compiling at both depths, interleaved, the best of the repeats; and their ratio."""
    seconds = best_seconds({n: _compiler(n) for n in args.layers}, args.repeats)
    few, many = args.layers
    ratio = seconds[many] / seconds[few]
    return [
        {"layers": n, "seconds": seconds[n], "ratio": ratio if n == many else 1.0}
        for n in args.layers
    ]


def _compiler(layers: int) -> Callable[[], object]:
    """Return what compiles a gradient step of so many layers from nothing."""
    llm = DecoderConfig(
        layers=layers, width=64, heads=4, kv_heads=2, head_width=16, mlp_width=128, vocab=64
    )
    config = ModelConfig(llm)
    model = Model.build(config, jnp.float32)
    batch = Microbatch(tower_batch(config, "llm", (2, 64)), {})

    def compile_step() -> None:
        jax.clear_caches()
        gradients = jax.grad(lambda params, batch: model.logits(params, batch).sum())
        jax.jit(gradients).lower(model.abstract, batch).compile()

    return compile_step
