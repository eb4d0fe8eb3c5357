"""The training state that steps pass on, and its shardings on the mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from mmjax.models.model import Model, merge, partition
from mmjax.parallel.mesh import replicated
from mmjax.parallel.sharding import ShardingRules, sharding
from mmjax.runtime.optimizer import Optimizer, key_names

Params = dict[str, Any]


class TrainState(NamedTuple):
    """State between steps: `trainable` float32 master weights, `frozen` in the precision of the computation."""

    step: jax.Array  # int32 []
    trainable: Params
    frozen: Params
    optimizer: optax.OptState


def all_parameters(state: TrainState) -> Params:
    """Return trainable and frozen parameters together."""
    return merge(state.trainable, state.frozen)


def split(model: Model, frozen: frozenset[str], params: Params) -> tuple[Params, Params]:
    """Split parameters into trainable ones, unchanged, and frozen ones, cast to the precision of the computation."""
    trainable, constant = partition(params, frozen)
    return trainable, jax.tree.map(lambda p: p.astype(model.dtype), constant)


def state_from(model: Model, optimizer: Optimizer, frozen: frozenset[str], params: Params) -> TrainState:
    """Return the state of step 0 with these parameters."""
    trainable, constant = split(model, frozen, params)
    return TrainState(jnp.zeros((), jnp.int32), trainable, constant, optimizer.init(trainable))


def parameter_shardings(model: Model, mesh: Mesh, rules: ShardingRules) -> Params:
    """Return the sharding of every parameter of the model."""
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    axes, structure = jax.tree.flatten(model.axes, is_leaf=is_axes)
    shapes = jax.tree.leaves(model.abstract)
    return jax.tree.unflatten(structure, [sharding(mesh, rules, s.shape, a) for s, a in zip(shapes, axes, strict=True)])


def state_shardings(
    model: Model, optimizer: Optimizer, frozen: frozenset[str], mesh: Mesh, rules: ShardingRules
) -> TrainState:
    """Return the sharding of every leaf of the state: moments like their parameters, counters replicated."""
    trainable, constant = partition(parameter_shardings(model, mesh, rules), frozen)
    abstract = jax.eval_shape(optimizer.init, partition(model.abstract, frozen)[0])
    scalar = replicated(mesh)
    by_path = {key_names(path): s for path, s in jax.tree.leaves_with_path(trainable)}

    def moment(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # A moment's path ends with its parameter's, whatever optax wraps around it: (mu, llm, embed, weight) with
        # (llm, embed, weight). Leaves without a parameter are counters.
        names = tuple(str(getattr(key, "key", "")) for key in path)
        return next((by_path[names[k:]] for k in range(len(names)) if names[k:] in by_path), scalar)

    return TrainState(scalar, trainable, constant, jax.tree_util.tree_map_with_path(moment, abstract))
