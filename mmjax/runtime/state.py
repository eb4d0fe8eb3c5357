"""The training state, its optimizer with schedules and groups of parameters, and its shardings on the mesh."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from mmjax.config import Adafactor, Config, OptimizerConfig, Rates, Schedule
from mmjax.config.codec import did_you_mean
from mmjax.config.model import rated_modules
from mmjax.config.training import rates_of
from mmjax.errors import UserError
from mmjax.models.layer_stacks import Params, key_names, split_layers
from mmjax.models.model import (
    ADAPTER_ATTRIBUTE,
    Model,
    merge,
    module_of,
    parameter_group,
    parameter_name,
    partition,
)
from mmjax.models.quantization import cast_frozen
from mmjax.parallel.sharding import (
    Axes,
    ShardingRules,
    partition_spec,
    replicated,
    spec_axes,
    tree_shardings,
)
from mmjax.runtime.moments import store_moments
from mmjax.runtime.muon import scale_by_muon

Path = tuple[str, ...]
# Run-time arguments of one update, float32 []: `clip`, `clip_value` where there is one, and
# `learning_rate/<group>`, `weight_decay/<group>` by parameter group; bool [] `trained/<group>` of
# groups that some steps freeze. They are arguments of the compiled update, so that a schedule
# compiles nothing.
Hyperparameters = dict[str, Any]


class AveragedState(NamedTuple):
    """The state of a direction, and a moving average of the parameters, float32."""

    direction: optax.OptState
    average: Params


@dataclass(frozen=True)
class Optimizer:
    """An optax direction, and by parameter: the group whose rates it has, and whether it is a matrix that decays.

    offloads: its moments are in host memory between updates (`shardings_with_moments`). config:
    what it was made from. multiples: of the group's learning rate, by parameter; of a stack an
    array. scheduled: by parameter that some steps freeze, its group.
    """

    direction: optax.GradientTransformation
    group_of: Callable[[Path], str]
    matrices: frozenset[Path]
    offloads: bool = False
    config: OptimizerConfig | None = None
    multiples: Mapping[Path, Any] = field(default_factory=dict)
    scheduled: Mapping[Path, str] = field(default_factory=dict)

    def init(self, params: Params) -> optax.OptState:
        """Return the state before the first update, at which an average is of the parameters alone."""
        state = self.direction.init(params)
        # Copies: an update gives parameters and state away, and no buffer may be in both.
        return AveragedState(state, jax.tree.map(jnp.copy, params)) if self.ema else state

    @property
    def ema(self) -> float:
        """Return the decay of the moving average of the parameters; 0: none is kept."""
        return 0.0 if self.config is None else self.config.ema

    def average(self, state: optax.OptState) -> Params:
        """Return the moving average of the parameters, on the devices."""
        return self.load(state.average)

    def load(self, state: optax.OptState) -> optax.OptState:
        """Bring the moments to the devices, where they are in host memory."""
        return jax.device_put(state, jax.memory.Space.Device) if self.offloads else state

    def store(self, state: optax.OptState, shardings: optax.OptState) -> optax.OptState:
        """Bring the moments back to host memory, where they are kept there."""
        return jax.device_put(state, shardings) if self.offloads else state

    def mask_frozen(self, gradients: Params, hyper: Hyperparameters) -> Params:
        """Replace the gradients of parameters that are frozen at this step by zeros."""

        def mask(path: Any, g: jax.Array) -> jax.Array:
            group = self.scheduled.get(key_names(path))
            return g if group is None else jnp.where(hyper[f"trained/{group}"], g, 0)

        return jax.tree_util.tree_map_with_path(mask, gradients)

    def update(
        self,
        gradients: Params,
        state: optax.OptState,
        params: Params,
        hyper: Hyperparameters,
        norm: jax.Array | None = None,
    ) -> tuple[Params, optax.OptState, jax.Array]:
        """Return new parameters and state, and the global gradient norm before clipping.

        norm: that of all gradients, where these are only a part of them.

        Weight decay is decoupled and falls on matrices only (embeddings and projections; not norms,
        biases, fixed tables), also where the gradient is zero: an encoder that saw nothing in this
        step still decays.
        """
        gradients = self.mask_frozen(gradients, hyper)
        norm = optax.tree.norm(gradients) if norm is None else norm
        scale = jnp.minimum(1.0, hyper["clip"] / jnp.maximum(norm, 1e-12))
        gradients = jax.tree.map(lambda g: g * scale, gradients)
        if (limit := hyper.get("clip_value")) is not None:
            gradients = jax.tree.map(lambda g: jnp.clip(g, -limit, limit), gradients)
        inner = state.direction if self.ema else state
        directions, inner = self.direction.update(gradients, inner, params, hyper=hyper)

        def apply(key_path: Any, p: jax.Array, d: jax.Array) -> jax.Array:
            path = key_names(key_path)
            group = self.group_of(path)
            rate = hyper[f"learning_rate/{group}"]
            if (multiple := self.multiples.get(path)) is not None:
                rate = rate * multiple
            decay = hyper[f"weight_decay/{group}"]
            # Decoupled decay (AdamW): it does not pass through the moments, nor is it clipped.
            return p - rate * (d + decay * p) if path in self.matrices else p - rate * d

        params = jax.tree_util.tree_map_with_path(apply, params, directions)
        if not self.ema:
            return params, inner, norm
        average = optax.incremental_update(params, state.average, 1 - self.ema)
        return params, AveragedState(inner, average), norm


def make_optimizer(config: OptimizerConfig, axes: Params, dtype: Any = jnp.float32) -> Optimizer:
    """Build the optimizer of a config. Groups: one a `parameter_group`; with Muon `<group>/matrix` and `<group>/other`.

    axes: the logical axes of the model's parameters. dtype: of the computation, and so of Muon's
    matrix products.
    """
    leaves = jax.tree.leaves_with_path(axes, is_leaf=lambda x: isinstance(x, tuple))
    by_path: dict[Path, Axes] = {key_names(path): names for path, names in leaves}
    # Logical axes leave out the leading axis of a stack of layers: stacked biases still have one.
    matrices = frozenset(
        path for path, names in by_path.items() if len(names) >= 2 and "fixed" not in names
    )
    group_of = _group_by_name(config.modules, by_path)
    scheduled = {
        path: group
        for path in by_path
        if rates_of(config.modules, group := group_of(path)).is_scheduled
    }

    def made(direction: optax.GradientTransformation, group_of: Callable[[Path], str]) -> Optimizer:
        return Optimizer(
            _by_schedule(direction, scheduled),
            group_of,
            matrices=matrices,
            offloads=config.offload,
            config=config,
            multiples=_multiples(config.modules, by_path, group_of),
            scheduled=scheduled,
        )

    if isinstance(config, Adafactor):
        direction = _by_layer(_scale_by_adafactor(config))
        if config.b1:
            mean = optax.ema(config.b1, debias=False)
            direction = optax.chain(direction, store_moments(mean, config.moments, matrices))
        return made(direction, group_of)
    adam = store_moments(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps), config.moments, matrices
    )
    if not config.has_muon:
        return made(adam, group_of)

    def label(path: Path) -> str:
        # Muon is for matrices between two inner widths. Embedding tables and the first projections
        # of pixels and frames are better left to Adam, row by row; so are adapters, whose rank has
        # no logical axis.
        return (
            "matrix" if path in matrices and not {None, "vocab"} & set(by_path[path]) else "other"
        )

    def labels(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(lambda path, p: label(key_names(path)), params)

    muon = store_moments(scale_by_muon(config.momentum, by_path, dtype), config.moments, matrices)
    direction = optax.partition({"matrix": muon, "other": adam}, labels)
    return made(direction, lambda path: f"{group_of(path)}/{label(path)}")


def _by_schedule(
    direction: optax.GradientTransformation, scheduled: Mapping[Path, str]
) -> optax.GradientTransformationExtraArgs:
    """Keep the state of every scheduled group by itself, and leave it as it is at steps that freeze the group.

    A group that starts late thus has moments, and their bias correction, of its own updates alone.
    """
    if not scheduled:
        return optax.with_extra_args_support(direction)

    def of_group(group: str) -> optax.GradientTransformationExtraArgs:
        def update(
            gradients: Params, state: Any, params: Params, *, hyper: Hyperparameters
        ) -> tuple[Params, Any]:
            directions, new = direction.update(gradients, state, params)
            keep = partial(jnp.where, hyper[f"trained/{group}"])
            return directions, jax.tree.map(keep, new, state)

        return optax.GradientTransformationExtraArgs(direction.init, update)

    def label(path: Any, _: Any) -> str:
        return scheduled.get(key_names(path), "")

    groups = {group: of_group(group) for group in sorted(set(scheduled.values()))}
    return optax.partition(
        {"": direction, **groups}, partial(jax.tree_util.tree_map_with_path, label)
    )


def _group_by_name(modules: Mapping[str, Rates], paths: Iterable[Path]) -> Callable[[Path], str]:
    """Return the function that names a parameter's group: the first whose patterns match it, or its module.

    Raises UserError for a pattern that matches nothing.
    """
    patterns = {name: rates.parameters for name, rates in modules.items() if rates.parameters}
    names = list(map(parameter_name, paths)) if patterns else []
    for name, of_group in patterns.items():
        for pattern in of_group:
            if not fnmatch.filter(names, pattern):
                raise UserError(
                    f"optimizer.modules.{name}.parameters: {pattern!r} matches no parameter (all layers of a tower "
                    f"have the same rates: write * for their number){did_you_mean(pattern, names)}"
                )

    def group(path: Path) -> str:
        for name, of_group in patterns.items():
            if any(fnmatch.fnmatchcase(parameter_name(path), pattern) for pattern in of_group):
                return name
        return parameter_group(path)

    return group


def _multiples(
    modules: Mapping[str, Rates],
    by_path: Mapping[Path, Axes],
    group_of: Callable[[Path], str],
) -> dict[Path, Any]:
    """Return what multiplies the learning rates of single parameters, where it is not 1.

    With a decay d a tower of L layers has d ** (L - i) in layer i, d ** (L + 1) before its layers
    and 1 behind them (BEiT, Bao et al. 2021).
    """
    layers = {path: split_layers(path)[1] for path in by_path if "runs" in path}
    depths: dict[str, int] = {}
    for path, numbers in layers.items():
        depths[module_of(path)] = max(depths.get(module_of(path), 0), numbers.stop)
    multiples = {}
    for path, axes in by_path.items():
        rates = rates_of(modules, group_of(path))
        depth = depths.get(module_of(path), 0)
        if path in layers:
            below = depth - np.asarray(layers[path])
        else:
            below = np.asarray([0 if "head" in path or not depth else depth + 1])
        multiple = np.float32(rates.layer_decay) ** below.astype(np.float32)
        if path[-2:] == (ADAPTER_ATTRIBUTE, "b"):
            multiple = multiple * np.float32(rates.b_ratio)
        if (multiple != 1).any():
            stacked = len(multiple) > 1
            multiples[path] = multiple.reshape(-1, *[1] * len(axes)) if stacked else multiple[0]
    return multiples


MIN_FACTORED = 32  # a matrix whose shorter side has fewer elements keeps all of its squares


def _scale_by_adafactor(config: Adafactor) -> optax.GradientTransformation:
    """Divide a parameter's gradient by the root of its factored mean squares, and bound the RMS of the result.

    Adafactor (Shazeer and Stern 2018) with a bound of the decay instead of relative steps (Zhai et
    al. 2022, "Scaling Vision Transformers").
    """
    decay = lambda step, exponent: jnp.minimum(config.b2, 1 - (step + 1.0) ** -exponent)  # noqa: E731
    squares = optax.scale_by_factored_rms(min_dim_size_to_factor=MIN_FACTORED, decay_rate_fn=decay)
    return optax.chain(squares, optax.clip_by_block_rms(config.clip))


def _by_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation to every parameter by itself, to stacked ones layer by layer."""

    def on_layers(function: Callable[..., Any]) -> Callable[..., Any]:
        def on_leaf(path: Any, *leaves: Any) -> Any:
            layers = split_layers(key_names(path))[1]
            return (jax.vmap(function) if len(layers) > 1 else function)(*leaves)

        return on_leaf

    def init(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(on_layers(inner.init), params)

    def update(
        gradients: Params, state: Params, params: Params | None = None
    ) -> tuple[Params, Params]:
        pairs = jax.tree_util.tree_map_with_path(on_layers(inner.update), gradients, state, params)
        structure = jax.tree.structure(gradients)
        directions, states = zip(*structure.flatten_up_to(pairs), strict=True)
        return structure.unflatten(directions), structure.unflatten(states)

    return optax.GradientTransformation(init, update)


# Share of the way from `final` to the peak, by the share of the decay that is behind a step.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "sqrt": lambda done: 1 - math.sqrt(done),
}


def schedule_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the share of the peak learning rate at a step: warm-up, peak, then the decay to `final` at the last step.

    In Python and not by `optax.schedules`, whose results are arrays: a step would wait for the
    device's.
    """
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    # The last of `steps` updates is number steps - 1, at which the decay reaches 1.
    last = steps - 1
    start = max(schedule.warmup, last - schedule.decay) if schedule.decay else schedule.warmup
    done = min(1.0, max(0, step - start) / max(1, last - start))
    if done < 1:
        done = done * schedule.cycles % 1
    return schedule.final + (1 - schedule.final) * DECAYS[schedule.shape](done)


def hyperparameters(config: Config, step: int) -> Hyperparameters:
    """Return the arguments of update `step`, NumPy scalars. Adapters without rates of their own have their module's."""
    o = config.optimizer
    factor = schedule_factor(config.schedule, step, config.training.steps)
    # NumPy scalars of a fixed dtype: other values are other arguments, not another program.
    hyper: Hyperparameters = {"clip": np.float32(config.training.clip)}
    if config.training.clip_value:
        hyper["clip_value"] = np.float32(config.training.clip_value)
    named = [name for name, rates in o.modules.items() if rates.parameters]
    for module in [*rated_modules(config.model), *named]:
        override = rates_of(o.modules, module)
        rate = o.learning_rate if override.learning_rate is None else override.learning_rate
        decay = o.weight_decay if override.weight_decay is None else override.weight_decay
        if override.is_scheduled:
            hyper[f"trained/{module}"] = np.bool(override.trains(step))
            rate *= override.trains(step)
        rates = {module: factor * rate}
        if o.has_muon:
            # A module's learning rate scales both of its groups alike; of 0 there is no multiple.
            scale = rate / o.learning_rate if o.learning_rate else 1.0
            rates = {
                f"{module}/matrix": factor * rate,
                f"{module}/other": factor * o.adam_learning_rate * scale,
            }
        for group, scheduled in rates.items():
            hyper[f"learning_rate/{group}"] = np.float32(scheduled)
            hyper[f"weight_decay/{group}"] = np.float32(decay)
    return hyper


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
    """Split parameters into trainable ones, unchanged, and frozen ones as `cast_frozen` does."""
    trainable, constant = partition(params, frozen)
    return trainable, cast_frozen(constant, model.dtype)


def parameter_shardings(model: Model, mesh: Mesh, rules: ShardingRules) -> Params:
    """Return the sharding of every parameter of the model."""
    return tree_shardings(mesh, rules, model.abstract, model.axes)


def shardings_with_moments(
    optimizer: Optimizer, params: Params, trainable: Params, constant: Params, *, mesh: Mesh
) -> TrainState:
    """Return the sharding of every leaf of the state: moments like their parameters, the rest replicated.

    params: shapes of the trainable parameters. Where the optimizer offloads, moments are in host
    memory.
    """
    abstract = jax.eval_shape(optimizer.init, params)
    scalar = replicated(mesh)
    by_path = {key_names(path): s for path, s in jax.tree.leaves_with_path(trainable)}

    def moment(path: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        # A moment's path ends with its parameter's, whatever optax wraps around it: (mu, llm,
        # embed, weight) with (llm, embed, weight). Leaves without a parameter are counters, and the
        # factors of Adafactor.
        names = tuple(str(getattr(key, "key", "")) for key in path)
        like = next((by_path[names[k:]] for k in range(len(names)) if names[k:] in by_path), scalar)
        # A row that has one scale is not sharded along it.
        spec = [
            axes if size > 1 else None for axes, size in zip(like.spec, leaf.shape, strict=False)
        ]
        if optimizer.config is not None and optimizer.config.over_data and like is not scalar:
            spec = _over_data(spec, leaf.shape, mesh)
        moved = optimizer.offloads and like is not scalar
        return NamedSharding(
            mesh, partition_spec(spec), memory_kind="pinned_host" if moved else None
        )

    return TrainState(
        scalar, trainable, constant, jax.tree_util.tree_map_with_path(moment, abstract)
    )


def _over_data(spec: Sequence[Any], shape: tuple[int, ...], mesh: Mesh) -> list[Any]:
    """Cut the first dimension that still divides along `data` too; without one, nothing is cut."""
    spec = [*spec, *(None,) * (len(shape) - len(spec))]
    for dimension, (names, size) in enumerate(zip(spec_axes(spec), shape, strict=True)):
        if size % math.prod(mesh.shape[name] for name in ("data", *names)) == 0:
            spec[dimension] = ("data", *names)
            break
    return spec
