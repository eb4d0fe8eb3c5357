"""Low-rank adapters beside linear layers (LoRA, Hu et al. 2021), attached to a model that is built without them.

The layers themselves are born as ever, so a model with adapters is the same model at the start: `b` is zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.adapters import adapted, scale
from mmjax.config import LoraConfig, ModelConfig
from mmjax.models.layer_runs import Run
from mmjax.models.layers import Linear
from mmjax.models.multimodal import MultimodalModel


class LowRank(nnx.Module):
    """`scale * (x @ a) @ b`, `a` `[in, rank]` and `b` `[rank, out]`; of a stack, both with its layers in front."""

    def __init__(self, a: Array, b: Array, linear: Linear, scale: float):
        inputs, outputs = linear.weight.get_metadata("axes")
        self.a = nnx.Param(a, axes=(inputs, None))
        self.b = nnx.Param(b, axes=(None, outputs))
        self.scale = scale

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return (x @ self.a[...].astype(x.dtype)) @ self.b[...].astype(x.dtype) * self.scale


def attach(model: MultimodalModel, config: ModelConfig, key: Array) -> None:
    """Give a model that was just born its adapters. Layer i's values depend on its name and on i alone, not on runs."""
    for name, lora in adapted(config).items():
        of_name = jax.random.fold_in(key, zlib.crc32(name.encode()))
        for linear, run in _linear(model, name):
            linear.lora = _born(linear, lora, run, of_name)


def _linear(model: MultimodalModel, name: str) -> Iterator[tuple[Linear, Run | None]]:
    """The linear layers of this name: one for each run of a tower, stacked where the run is."""
    tower, place, *path = name.split(".")
    if place == "connector":
        yield _inside(model.connectors[tower], path), None
        return
    layers = (model.llm if tower == "llm" else model.encoders[tower]).layers
    for run in layers.plan:
        yield _inside(layers.runs[run.name], path[1:]), run


def _inside(module: nnx.Module, path: list[str]) -> Linear:
    for name in path:
        module = getattr(module, name)
    return module


def _born(linear: Linear, lora: LoraConfig, run: Run | None, key: Array) -> LowRank:
    *stacked, inputs, outputs = linear.weight.shape
    limit = inputs**-0.5

    def uniform(i: int | Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, i), (inputs, lora.rank), jnp.float32, -limit, limit)

    start = 0 if run is None else run.start
    a = jax.vmap(uniform)(jnp.arange(start, run.stop)) if stacked else uniform(start)
    return LowRank(a, jnp.zeros((*stacked, lora.rank, outputs), jnp.float32), linear, scale(lora))
