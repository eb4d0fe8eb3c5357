"""How much the layers of a tower keep between their forward and their backward pass, by remat policy: nothing runs."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, get_args

import jax
import jax.numpy as jnp

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import AudioConfig, ModelConfig, Remat
from mmjax.models.model import Model
from mmjax.planning.activations import Kept, named_saves
from mmjax.planning.work import CONV_STRIDE, layer_of
from mmjax.training.layers_alone import backward_of, batch_of_tower, tower_alone, tower_inputs

TRAINED = frozenset({"weights", "adapters"})
EVERYTHING = TRAINED | {"inputs"}
MANY = 997  # layers of a tower that is traced, never run: no other dimension has this size


def kept_per_layer(
    config: ModelConfig, tower: str, shape: tuple[int, int], dtype: Any, wanted: Set[str] = EVERYTHING
) -> dict[Remat, Kept]:
    """What one layer of a tower ("llm", or an encoder) keeps under every policy; `shape`: rows, row length.

    `wanted` says which gradients backward computes: those of the layers' "weights", of their "adapters", and of their
    "inputs" for what stands before them.
    Counted are the residuals of JAX's vector-Jacobian product (OmniBal, A.1.1,
    measures them on a device): what lies between layers, and what they keep inside. Parameters are not, nor the masks
    and rotary angles that all layers share. Of `none` this is traced; copies of the weights in the precision of the
    computation are left out: they are as many as the parameters, and lie where these do.
    """
    part = config.llm if tower == "llm" else config.encoders[tower]
    (rows, length), size = shape, jnp.dtype(dtype).itemsize
    positions = rows * (length // CONV_STRIDE if isinstance(part, AudioConfig) else length)
    found: dict[Remat, Kept] = {"none": _kept_by_layer(config, tower, shape, dtype, wanted)}
    for policy in [p for p in get_args(Remat) if p != "none"]:
        device, host = named_saves(part, policy, size, bool(wanted & TRAINED)) if wanted else Kept(0)
        found[policy] = Kept(positions * device, positions * host)
    return found


def _kept_by_layer(config: ModelConfig, tower: str, shape: tuple[int, int], dtype: Any, wanted: Set[str]) -> Kept:
    """What each of many layers keeps with nothing computed again: the stacked residuals."""
    if not wanted:
        return Kept(0)
    alone = tower_alone(config, tower, MANY, "none")
    part = alone.llm if tower == "llm" else alone.encoders[tower]
    stacked = [x for x in _residuals(Model.build(alone, dtype), tower, shape, wanted) if x.shape[:1] == (MANY,)]
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in stacked) // MANY
    copies = layer_of(part).weights * jnp.dtype(dtype).itemsize if dtype != jnp.float32 else 0
    return Kept(held - copies)


def _residuals(model: Model, tower: str, shape: tuple[int, int], wanted: Set[str]) -> list[jax.ShapeDtypeStruct]:
    """Of the layers of a tower, without parameters and what all layers share."""

    def residuals(params: Any, batch: TextBatch | ItemBatch) -> list[Any]:
        weights, x, context = tower_inputs(model, tower, params, batch)
        _, backward = backward_of(model, tower, weights, x, context, wanted)
        shared = {id(leaf) for leaf in jax.tree.leaves((weights, context))}
        return [leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in shared]

    return jax.eval_shape(residuals, model.abstract, batch_of_tower(model.config, tower, shape))
