"""How much the layers of a tower keep between their forward and their backward pass, by remat policy: nothing runs."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import ModelConfig, Remat, VisionConfig
from mmjax.models.model import Model


class Kept(NamedTuple):
    """Bytes between the passes of one microbatch."""

    device: int
    host: int  # offloaded


def kept(model: Model, tower: str, shape: tuple[int, int], wanted: Set[str] = frozenset({"weights", "inputs"})) -> Kept:
    """What all layers of a tower ("llm", or an encoder) keep under their remat policies; `shape`: rows, row length.

    `wanted` says which gradients backward computes: those of the layers' "weights", those of their "inputs" for what
    stands before them. Counted are the residuals of JAX's vector-Jacobian product (OmniBal, A.1.1, measures them on a
    device): what lies between layers, and what they keep inside. Parameters are not, nor the masks and rotary angles
    that all layers share.
    """
    if not wanted:
        return Kept(0, 0)

    def residuals(params: Any, batch: TextBatch | ItemBatch) -> tuple[list[Any], list[Any]]:
        """(on the device, on the host)."""
        module = model.module(params)
        part = module.llm if tower == "llm" else module.encoders[tower]
        x = part.embedded(batch.token if isinstance(batch, TextBatch) else batch)
        context = module.context(tower, batch, None)
        graph, weights = nnx.split(part.layers)
        values = {"weights": weights, "inputs": x}

        def layers(differentiated: dict[str, Any]) -> Any:
            of = values | differentiated
            return nnx.merge(graph, of["weights"])(of["inputs"], context)

        _, backward = jax.vjp(layers, {name: values[name] for name in wanted})
        shared = {id(leaf) for leaf in jax.tree.leaves((weights, context))}
        own = [leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in shared]
        offloaded = [leaf.aval.memory_space == jax.memory.Space.Host for leaf in own]
        return tuple([x for x, there in zip(own, offloaded, strict=True) if there == on_host] for on_host in (0, 1))

    found = jax.eval_shape(residuals, model.abstract, _batch(model.config, tower, shape))
    return Kept(*(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in found))


def kept_per_layer(
    config: ModelConfig,
    tower: str,
    shape: tuple[int, int],
    dtype: Any,
    wanted: Set[str] = frozenset({"weights", "inputs"}),
) -> dict[Remat, Kept]:
    """What each layer more of a tower keeps under every policy; arguments as in `kept`."""

    def of(remat: Remat, layers: int) -> Kept:
        if tower == "llm":
            alone = ModelConfig(replace(config.llm, layers=layers, remat=remat))
        else:
            encoder = replace(config.encoders[tower], layers=layers, remat=remat)
            alone = ModelConfig(replace(config.llm, layers=1), {tower: encoder})
        return kept(Model.build(alone, dtype), tower, shape, wanted)

    # Two and three layers are scanned, and what all layers share cancels.
    return {r: Kept(*(b - a for a, b in zip(of(r, 2), of(r, 3), strict=True))) for r in get_args(Remat)}


def _batch(config: ModelConfig, tower: str, shape: tuple[int, int]) -> TextBatch | ItemBatch:
    """The shapes of what a tower reads."""

    def array(*more: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *more), jnp.dtype(dtype))

    if tower == "llm":
        fields = dict.fromkeys(TextBatch._fields, array())
        return TextBatch(**fields | {"weight": array(dtype=np.float32), "slots": {}, "send": {}})
    encoder = config.encoders[tower]
    features = encoder.patch**2 * encoder.channels if isinstance(encoder, VisionConfig) else encoder.mels
    return ItemBatch(array(features, dtype=np.float32), array(), array(3), array(), array())
