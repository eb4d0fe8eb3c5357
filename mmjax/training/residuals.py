"""Trace the bytes that a tower's layers save between forward and backward, by remat policy; nothing runs."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, get_args

import jax
import jax.numpy as jnp

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import AudioConfig, ModelConfig, Remat
from mmjax.models.model import Model
from mmjax.planning.activations import SavedBytes, saved_bytes_of_policy
from mmjax.planning.work import CONV_STRIDE, layer_sizes
from mmjax.training.layers_alone import isolate_tower, tower_batch, tower_inputs, tower_vjp

TRAINED = frozenset({"weights", "adapters"})
EVERYTHING = TRAINED | {"inputs"}
MANY = 997  # layers of a tower that is traced, never run: no other dimension has this size


def saved_bytes_per_layer(
    config: ModelConfig, tower: str, shape: tuple[int, int], dtype: Any, gradients: Set[str] = EVERYTHING
) -> dict[Remat, SavedBytes]:
    """Return the bytes that one layer of a tower ("llm", or an encoder) saves under every policy.

    shape: (rows, row length). gradients: what backward computes, any of the layers' "weights", their "adapters", and
    their "inputs" for the modules before them.

    Counted are the residuals of JAX's vector-Jacobian product, between layers and inside them (OmniBal, A.1.1, measures
    them on a device); not the parameters, nor the masks and rotary angles that all layers share. Only `none` is traced,
    without copies of the weights in the precision of the computation: there are as many as parameters, sharded alike.
    """
    part = config.llm if tower == "llm" else config.encoders[tower]
    rows, length = shape
    positions = rows * (length // CONV_STRIDE if isinstance(part, AudioConfig) else length)
    saved: dict[Remat, SavedBytes] = {
        "none": _traced(config, tower, shape, dtype, gradients) if gradients else SavedBytes(0)
    }
    for policy in [p for p in get_args(Remat) if p != "none"]:
        trained = bool(gradients & TRAINED)
        device, host = (
            saved_bytes_of_policy(part, policy, jnp.dtype(dtype).itemsize, trained) if gradients else SavedBytes(0)
        )
        saved[policy] = SavedBytes(positions * device, positions * host)
    return saved


def _traced(config: ModelConfig, tower: str, shape: tuple[int, int], dtype: Any, gradients: Set[str]) -> SavedBytes:
    """Trace MANY layers without remat and return the bytes that each saves.

    Under `scan`, a residual of every layer is one array with a leading axis of MANY. What all layers share has none.
    """
    isolated = isolate_tower(config, tower, MANY, "none")
    part = isolated.llm if tower == "llm" else isolated.encoders[tower]
    model = Model.build(isolated, dtype)

    def residuals(params: Any, batch: TextBatch | ItemBatch) -> list[Any]:
        weights, x, context = tower_inputs(model, tower, params, batch)
        _, backward = tower_vjp(model, tower, weights, x, context, gradients)
        # A vector-Jacobian product is a pytree whose leaves are its residuals; inputs among them are not new memory.
        shared = {id(leaf) for leaf in jax.tree.leaves((weights, context))}
        return [leaf for leaf in jax.tree.leaves(backward) if id(leaf) not in shared]

    leaves = jax.eval_shape(residuals, model.abstract, tower_batch(isolated, tower, shape))
    stacked = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.shape[:1] == (MANY,))
    copies = layer_sizes(part).weights * jnp.dtype(dtype).itemsize if dtype != jnp.float32 else 0
    return SavedBytes(stacked // MANY - copies)
