"""The layers of one tower by themselves: traced to see what they keep, run to see how long they take."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import ModelConfig, Remat, VisionConfig
from mmjax.models.layers import Context
from mmjax.models.model import ADAPTER, Model

VOCAB = 8  # of an LLM whose layers alone are wanted


def tower_alone(config: ModelConfig, tower: str, layers: int, remat: Remat) -> ModelConfig:
    """The model with so many layers of a tower ("llm", or an encoder), all of this policy, and little beside them."""
    llm = replace(config.llm, vocab=VOCAB)
    if tower == "llm":
        return ModelConfig(replace(llm, layers=layers, remat=remat), lora=config.lora)
    encoder = replace(config.encoders[tower], layers=layers, remat=remat)
    if isinstance(encoder, VisionConfig):
        encoder = replace(encoder, deepstack=())  # whose borders would cut the stack
    return ModelConfig(replace(llm, layers=1), {tower: encoder}, config.lora)


def batch_of_tower(config: ModelConfig, tower: str, shape: tuple[int, int]) -> TextBatch | ItemBatch:
    """The shapes of what a tower reads; `shape`: rows, row length."""

    def array(*more: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *more), jnp.dtype(dtype))

    if tower == "llm":
        fields = dict.fromkeys(TextBatch._fields, array())
        own = {"weight": array(dtype=np.float32), "position": array(*(3,) * bool(config.llm.rope_sections))}
        return TextBatch(**fields | own | {"slots": {}, "send": {}})
    encoder = config.encoders[tower]
    features = encoder.patch**2 * encoder.channels if isinstance(encoder, VisionConfig) else encoder.mels
    return ItemBatch(array(features, dtype=np.float32), array(), array(3), array(), array())


def tower_inputs(model: Model, tower: str, params: Any, batch: TextBatch | ItemBatch) -> tuple[Any, Any, Context]:
    """The weights of a tower's layers, what the first of them reads, and what all of them read."""
    module = model.module(params)
    part = module.llm if tower == "llm" else module.encoders[tower]
    x = part.embedded(batch.token if isinstance(batch, TextBatch) else batch)
    return nnx.split(part.layers)[1], x, module.context(tower, batch, None)


def backward_of(
    model: Model, tower: str, weights: Any, x: Any, context: Context, wanted: Set[str]
) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The output of a tower's layers, and what takes its gradient back to those `wanted`.

    These are "weights", "adapters" and "inputs".
    """
    module = model.module({})
    graph = nnx.split((module.llm if tower == "llm" else module.encoders[tower]).layers)[0]
    adapters, rest = nnx.split_state(weights, nnx.PathContains(ADAPTER), ...)
    values = {"weights": rest, "adapters": adapters, "inputs": x}

    def layers(differentiated: dict[str, Any]) -> Any:
        of = values | differentiated
        return nnx.merge(graph, of["weights"], of["adapters"])(of["inputs"], context)

    return jax.vjp(layers, {name: values[name] for name in sorted(wanted)})
