"""Low-rank adapters beside linear layers (LoRA, Hu et al. 2021), attached to a model that is built without them.

The layers themselves are initialised as without adapters, and `b` is zero: the model computes the same at the start.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import reduce

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config import LoraConfig, ModelConfig
from mmjax.config.model import adapters_by_layer, lora_scale
from mmjax.models.layer_stacks import LayerStack
from mmjax.models.layers import Linear
from mmjax.models.multimodal import MultimodalModel


class LowRank(nnx.Module):
    """`scale * (x @ a) @ b`, `a` `[in, rank]` and `b` `[rank, out]`; of a stack, with a leading layer axis."""

    def __init__(self, a: Array, b: Array, linear: Linear, scale: float):
        inputs, outputs = linear.weight.get_metadata("axes")
        self.a = nnx.Param(a, axes=(inputs, None))
        self.b = nnx.Param(b, axes=(None, outputs))
        self.scale = scale

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        return (x @ self.a[...].astype(x.dtype)) @ self.b[...].astype(x.dtype) * self.scale


def attach(model: MultimodalModel, config: ModelConfig, key: Array) -> None:
    """Attach adapters to a new model. Layer i's values depend on the linear layer's name and on i, not on stacks."""
    for name, lora in adapters_by_layer(config).items():
        name_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        for linear, run in _linear_layers(model, name):
            linear.lora = _init_adapter(linear, lora, run, name_key)


def _linear_layers(model: MultimodalModel, name: str) -> Iterator[tuple[Linear, LayerStack | None]]:
    """Find the linear layers of this name: a connector's only one, or one per stack of a tower.

    Names are as in `mmjax.config.model`: `vision.connector.mlp.up`, `llm.layers.*.attention.query`.
    """
    tower, part, *path = name.split(".")
    if part == "connector":
        yield reduce(getattr, path, model.connectors[tower]), None
        return
    layers = (model.llm if tower == "llm" else model.encoders[tower]).layers
    for run in layers.plan:
        yield reduce(getattr, path[1:], layers.runs[run.name]), run


def _init_adapter(linear: Linear, lora: LoraConfig, run: LayerStack | None, key: Array) -> LowRank:
    """Draw `a` as PyTorch's default for linear layers (Kaiming uniform with a = sqrt(5)); `b` is zero."""
    *stack, inputs, outputs = linear.weight.shape
    limit = inputs**-0.5

    def uniform(i: int | Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, i), (inputs, lora.rank), jnp.float32, -limit, limit)

    # Keys count from the stack's first layer in the tower, not from 0: other stacks draw the same values.
    start = 0 if run is None else run.start
    a = jax.vmap(uniform)(jnp.arange(start, run.stop)) if stack else uniform(start)
    return LowRank(a, jnp.zeros((*stack, lora.rank, outputs), jnp.float32), linear, lora_scale(lora))
