"""Optimizers whose learning rates, weight decays and clipping are arguments of the compiled update.

optax gives the directions (`scale_by_*`, no hyperparameters inside); the rates come in per step, a pair for each group
of parameters, so that a sweep or a schedule never compiles anything again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mmjax.config import AdamW, Config, Muon, Schedule
from mmjax.models.model import group_of
from mmjax.parallel.sharding import Axes

Params = dict[str, Any]
Path = tuple[str, ...]


class Hyperparameters(NamedTuple):
    """What one update is told. Everything float32 scalars; `rates` by group: (learning rate, weight decay)."""

    rates: dict[str, tuple[jax.Array, jax.Array]]
    clip: jax.Array


@dataclass(frozen=True)
class Optimizer:
    """A direction for every parameter, the group whose rates it follows, and whether weight decay falls on it."""

    direction: optax.GradientTransformation
    group_of: Callable[[Path], str]
    matrices: frozenset[Path]

    def init(self, params: Params) -> optax.OptState:
        """The state before the first update."""
        return self.direction.init(params)

    def update(
        self, gradients: Params, state: optax.OptState, params: Params, hyper: Hyperparameters
    ) -> tuple[Params, optax.OptState, jax.Array]:
        """New parameters and state, and the global gradient norm before clipping.

        Weight decay is decoupled and falls on matrices only (embeddings and projections; not norms, biases, fixed
        tables), also where the gradient is zero: an encoder that saw nothing in this step still decays.
        """
        norm = optax.tree.norm(gradients)
        scale = jnp.minimum(1.0, hyper.clip / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        directions, state = self.direction.update(gradients, state, params)

        def apply(key_path: Any, p: jax.Array, d: jax.Array) -> jax.Array:
            path = key_names(key_path)
            rate, decay = hyper.rates[self.group_of(path)]
            return p - rate * (d + decay * p) if path in self.matrices else p - rate * d

        return jax.tree_util.tree_map_with_path(apply, params, directions), state, norm


def key_names(path: Any) -> Path:
    """A JAX key path of nested dicts as strings."""
    return tuple(str(key.key) for key in path)


def _axes_by_path(axes: Params) -> dict[Path, Axes]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))
    return {key_names(path): names for path, names in leaves}


def make_optimizer(config: AdamW | Muon, axes: Params) -> Optimizer:
    """The optimizer of a config. Groups as by `group_of`; with Muon, `<group>/matrix` and `<group>/other`.

    `axes` are the logical axes of the model's parameters.
    """
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    by_path = _axes_by_path(axes)
    # A stack of layers has its layers in front, which no axis names.
    matrices = frozenset(path for path, names in by_path.items() if len(names) >= 2 and "fixed" not in names)
    if isinstance(config, AdamW):
        return Optimizer(adam, group_of, matrices)

    def label(path: Path) -> str:
        # Muon takes matrices between two inner widths. What meets tokens, pixels, frames or positions is a table or a
        # first projection, whose rows are better left to Adam; so are adapters, whose rank no axis names.
        return "matrix" if path in matrices and not {None, "vocab"} & set(by_path[path]) else "other"

    def labels(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, p: label(key_names(path)), params)

    def dimensions(params: Params) -> Params:
        return jax.tree.map(lambda p: optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), params)

    muon = optax.contrib.scale_by_muon(beta=config.momentum, weight_dimension_numbers=dimensions)
    direction = optax.partition({"matrix": optax.chain(muon, _scale_by_shape()), "other": adam}, labels)
    return Optimizer(direction, lambda path: f"{group_of(path)}/{label(path)}", matrices)


def _scale_by_shape() -> optax.GradientTransformation:
    """Muon's sqrt(max(1, out/in)), so that one learning rate suits matrices of every shape (Jordan et al. 2024)."""

    def update(updates: Params, state: optax.EmptyState, params: Params | None = None):
        del params
        scaled = jax.tree.map(lambda u: u * math.sqrt(max(1.0, u.shape[-1] / u.shape[-2])), updates)
        return scaled, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def schedule_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Share of the peak learning rate at step `step` of `steps`: linear warm-up, cosine to `final` at the last step."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    progress = (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup)
    return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def hyperparameters(config: Config, modules: tuple[str, ...], step: int) -> Hyperparameters:
    """The arguments of update `step`, NumPy scalars. A module's own rates are its adapters' too, if these have none."""
    o = config.optimizer
    factor = schedule_factor(config.schedule, step, config.training.steps)
    rates: dict[str, tuple[np.float32, np.float32]] = {}
    for module in modules:
        own = o.modules.get(module, o.modules.get(module.removesuffix(".lora")))
        rate = o.learning_rate if own is None or own.learning_rate is None else own.learning_rate
        decay = np.float32(o.weight_decay if own is None or own.weight_decay is None else own.weight_decay)
        if isinstance(o, AdamW):
            rates[module] = np.float32(factor * rate), decay
        else:
            rates[f"{module}/matrix"] = np.float32(factor * rate), decay
            # A module's own rate moves both of its groups alike.
            rates[f"{module}/other"] = np.float32(factor * o.adam_learning_rate * rate / o.learning_rate), decay
    return Hyperparameters(rates, np.float32(config.training.clip))
