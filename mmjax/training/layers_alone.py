"""Isolate the layers of one tower, to trace the activations they save or to time them."""

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
from mmjax.models.model import ADAPTER_ATTRIBUTE, Model

VOCAB = 8  # of an isolated LLM, whose embedding and output should cost nothing


def isolate_tower(config: ModelConfig, tower: str, layers: int, remat: Remat) -> ModelConfig:
    """Reduce a model to `layers` layers of one tower ("llm", or an encoder) under one policy, and little besides."""
    llm = replace(config.llm, vocab=VOCAB)
    if tower == "llm":
        return ModelConfig(replace(llm, layers=layers, remat=remat), lora=config.lora)
    encoder = replace(config.encoders[tower], layers=layers, remat=remat)
    if isinstance(encoder, VisionConfig):
        # Layers that feed the LLM (deepstack) would split the stack into several scans.
        encoder = replace(encoder, deepstack=())
    return ModelConfig(replace(llm, layers=1), {tower: encoder}, config.lora)


def tower_batch(config: ModelConfig, tower: str, shape: tuple[int, int]) -> TextBatch | ItemBatch:
    """Return the shapes and dtypes of a tower's input. shape: (rows, row length)."""

    def array(*inner: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *inner), jnp.dtype(dtype))

    if tower == "llm":
        fields = dict.fromkeys(TextBatch._fields, array())
        position = array(3) if config.llm.rope_sections else array()
        return TextBatch(**fields | {"weight": array(dtype=np.float32), "position": position, "slots": {}, "send": {}})
    encoder = config.encoders[tower]
    features = encoder.patch**2 * encoder.channels if isinstance(encoder, VisionConfig) else encoder.mels
    return ItemBatch(array(features, dtype=np.float32), array(), array(3), array(), array())


def tower_inputs(model: Model, tower: str, params: Any, batch: TextBatch | ItemBatch) -> tuple[Any, Any, Context]:
    """Return the weights of a tower's layers, the input of the first one, and the context that all of them share."""
    module = model.module(params)
    part = module.llm if tower == "llm" else module.encoders[tower]
    x = part.embedded(batch.token if isinstance(batch, TextBatch) else batch)
    return nnx.split(part.layers)[1], x, module.context(tower, batch, None)


def tower_vjp(
    model: Model, tower: str, weights: Any, x: Any, context: Context, gradients: Set[str]
) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """Return the output of a tower's layers, and the function that takes its gradient back to those of `gradients`.

    gradients: any of "weights", "adapters" and "inputs".
    """
    module = model.module({})
    # The structure of the layers without their weights, which are arguments of the differentiated function.
    graph = nnx.split((module.llm if tower == "llm" else module.encoders[tower]).layers)[0]
    adapters, rest = nnx.split_state(weights, nnx.PathContains(ADAPTER_ATTRIBUTE), ...)
    values = {"weights": rest, "adapters": adapters, "inputs": x}

    def layers(differentiated: dict[str, Any]) -> Any:
        inputs = values | differentiated
        return nnx.merge(graph, inputs["weights"], inputs["adapters"])(inputs["inputs"], context)

    return jax.vjp(layers, {name: values[name] for name in sorted(gradients)})
