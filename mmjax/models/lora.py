"""Low-rank adapters beside the linear layers of a model (LoRA, Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import reduce

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mmjax.config import LoraConfig, ModelConfig
from mmjax.config.model import adapters_by_layer, lora_scale
from mmjax.models.dropout import drop_inputs, layer_dropout
from mmjax.models.linear import Linear
from mmjax.models.matmul import matmul
from mmjax.models.multimodal import MultimodalModel
from mmjax.models.remat import keep_inputs


class LowRank(nnx.Module):
    """A low-rank adapter `scale * (x @ a) @ b` beside a linear layer (LoRA, Hu et al. 2021).

    `a` is `[in, rank]`, `b` `[rank, out]`; those of a stack have a leading layer axis. `b` begins
    as zero, so the model computes the same as without adapters. `magnitude` `[out]` of DoRA is what
    training adds to the lengths of the weight's columns. In training, `x` is dropped at a rate.
    name: of the linear layer.
    """

    def __init__(self, a: Array, b: Array, linear: Linear, lora: LoraConfig, name: str = ""):
        inputs, outputs = linear.axes
        self.a = nnx.Param(a, axes=(inputs, None))
        self.b = nnx.Param(b, axes=(None, outputs))
        self.scale = lora_scale(lora)
        self.dropout = lora.dropout
        self.name = name
        lengths = jnp.zeros((*b.shape[:-2], b.shape[-1]), jnp.float32)
        self.magnitude = nnx.Param(lengths, axes=(linear.bias_axis,)) if lora.dora else None

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        dropout = layer_dropout()

        def product(x: Array, a: Array, *key_and_layer: Array) -> Array:
            if key_and_layer:
                x = drop_inputs(x, *key_and_layer, self.dropout, self.name)
            return checkpoint_name(matmul(x, a.astype(x.dtype)), "adapter")

        if self.dropout and dropout is not None:
            # Backward draws again what was dropped.
            inner = keep_inputs(product)(x, self.a[...], dropout.key, dropout.layer)
        else:
            inner = product(x, self.a[...])
        return matmul(inner, self.b[...].astype(x.dtype)) * self.scale

    def column_scales(self, weight: Float[Array, "i o"]) -> Float[Array, " o"]:
        """Return what gives the columns of `weight + scale * a @ b` their trained lengths.

        DoRA (Liu et al. 2024): the lengths that are divided by get no gradient (section 4.3).
        """
        w, a, b = map(
            jax.lax.stop_gradient,
            (weight.astype(jnp.float32), self.a[...] * self.scale, self.b[...]),
        )
        squares = jnp.square(w).sum(0)
        # |w + a b|^2 = |w|^2 + 2 w (a b) + |a b|^2, without a matrix of the weight's size.
        turned = squares + (b * (2 * a.T @ w + a.T @ a @ b)).sum(0)
        length = jnp.sqrt(squares) + self.magnitude[...]
        return length * jax.lax.rsqrt(jnp.maximum(turned, jnp.finfo(jnp.float32).tiny))


def attach_adapters(model: MultimodalModel, config: ModelConfig, key: Array) -> None:
    """Attach adapters to a new model. Layer i's values depend on the linear layer's name and on i, not on stacks."""
    for name, lora in adapters_by_layer(config).items():
        # A hash that does not change with the process, unlike Python's own.
        name_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        for linear, layers in linear_layers(model, name):
            linear.lora = _init_adapter(linear, lora, layers, name_key, name)


def linear_layers(model: MultimodalModel, name: str) -> Iterator[tuple[Linear, range | None]]:
    """Find the linear layers of this name: a connector's only one, or one per stored layers of a tower that have it.

    Names are as in `mmjax.config.model`: `vision.connector.mlp.up`, `llm.layers.*.attention.query`.
    """
    tower, part, *path = name.split(".")
    if part == "connector":
        yield reduce(getattr, path, model.connectors[tower]), None
        return
    # `llm.layers.*.attention.query`: of layers 0 to 7 in a stack and 8 in none, the query of the
    # stack stands for 0..7, and that of layer 8 for itself. Layers that have a delta net have no
    # attention.
    stacks = model.tower(tower).layers
    for run in stacks.plan:
        for stored, layers in run.parts.items():
            mixer = getattr(stacks.runs[stored], path[1])
            if mixer is not None and (linear := reduce(getattr, path[2:], mixer)) is not None:
                yield linear, layers


def _init_adapter(
    linear: Linear, lora: LoraConfig, layers: range | None, key: Array, name: str
) -> LowRank:
    """Draw `a` as PyTorch's default for linear layers (Kaiming uniform with a = sqrt(5)); `b` is zero."""
    *stack, inputs, outputs = linear.weight.shape
    limit = inputs**-0.5

    def uniform(i: int | Array) -> Array:
        return jax.random.uniform(
            jax.random.fold_in(key, i), (inputs, lora.rank), jnp.float32, -limit, limit
        )

    # Keys are those of the layers in the tower, not from 0: other stacks draw the same values.
    a = (
        jax.vmap(uniform)(jnp.asarray(layers))
        if stack
        else uniform(0 if layers is None else layers.start)
    )
    return LowRank(a, jnp.zeros((*stack, lora.rank, outputs), jnp.float32), linear, lora, name)
