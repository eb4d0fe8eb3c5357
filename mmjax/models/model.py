"""A multimodal model as pure functions on nested dicts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.batch import ItemBatch, Microbatch, TextBatch
from mmjax.config import ModelConfig
from mmjax.config.model import (
    float8_linears,
    frozen_modules,
    quantized_layers,
    random_settings,
)
from mmjax.models.dropout import Noise
from mmjax.models.expert_routing import Routing
from mmjax.models.layer_stacks import Params, plan_stacks
from mmjax.models.lora import attach_adapters, linear_layers
from mmjax.models.multimodal import Cache, Functions, MultimodalModel, prefill, step
from mmjax.models.parameter_keys import ParameterKeys
from mmjax.models.quantization import QuantizedMatrix
from mmjax.models.stack_scan import LayerStack, seed_accumulators

# branches of the parameters of what belongs to a tower
PARTS = {"connectors": ".connector", "vaes": ".vae"}
ADAPTER_ATTRIBUTE = "lora"  # attribute of `Linear`


class Outputs(NamedTuple):
    """Operands of the losses."""

    # activations after the LLM's final norm: with the table, the operands of the logits
    hidden: Float[Array, "b t d"]
    table: Float[Array, "*p v d"]
    routing: Routing | None  # of all layers with experts
    errors: dict[str, Float[Array, "r l"]]  # of every patch of every generator


# graphs and states of models without functions, by all that they depend on
_traced: dict[str, tuple[Any, Any]] = {}
MAX_TRACED = 64


def _trace(
    config: ModelConfig,
    runs: Mapping[str, tuple[LayerStack, ...]],
    dtype: Any,
    functions: Functions,
) -> tuple[Any, Any]:
    """Return the graph of a model and the shapes of its parameters; nothing is allocated."""
    # The callbacks of the user are no part of the key: models that have any are traced every time.
    key = f"{config} {runs} {dtype}"
    if not functions and key in _traced:
        return _traced[key]
    init = partial(_init_params, config, runs, dtype, functions)
    traced = nnx.split(nnx.eval_shape(init, jax.random.key(0)))
    if not functions:
        while len(_traced) >= MAX_TRACED:
            _traced.pop(next(iter(_traced)))
        _traced[key] = traced
    return traced


@dataclass(frozen=True, eq=False)
class Model:
    """A multimodal model as pure functions. Everything here may be called under `jax.jit` or a bare trace."""

    config: ModelConfig
    dtype: Any  # of the activations; parameters are initialised in float32
    # layer stacks of every tower: "llm" and the encoders by name
    runs: dict[str, tuple[LayerStack, ...]]
    abstract: Params = field(repr=False)  # shapes and dtypes of the parameters
    # their logical axes, tuples; a stack's leading axis is not named
    axes: Params = field(repr=False)
    graph: Any = field(repr=False)  # NNX graph definition
    # the encoders' callbacks by name
    functions: Functions = field(repr=False, default_factory=dict)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        dtype: Any,
        cuts: Mapping[str, tuple[int, ...]] | None = None,
        functions: Functions | None = None,
    ) -> Model:
        """Build the model of a config, its towers cut into stacks at `cuts`. Holds no parameters, so it is cheap.

        functions: the callbacks that encoders name (`config.loading.resolve_callbacks`), needed to
        compute anything. Raises ValueError for an encoder called "llm", impossible cuts or remat
        policies, and widths that do not divide.
        """
        if "llm" in config.item_modules:
            raise ValueError(
                "no encoder may be called 'llm': that is the decoder's name; rename it in model.encoders"
            )
        towers = config.towers
        if unknown := set(cuts or {}) - set(towers):
            raise ValueError(
                f"cuts for {min(unknown)!r}, which is no tower; there are {', '.join(towers)}"
            )
        deepest = max((len(c.deepstack) for c in towers.values()), default=0)
        runs = {}
        for name, c in towers.items():
            if not c.is_stack:  # a UNet, whose blocks differ in shape
                runs[name] = ()
                continue
            # Stacks end where a layer's output is needed: for a deepstack or features in an encoder,
            # for an addition in the LLM. A deepstack of n layers is added behind the LLM's layers 0 .. n -
            # 1: with n = 2 and 6 layers, stacks of layers 0, 1 and 2..5.
            layers = range(deepest) if name == "llm" else (*c.deepstack, *c.feature_layers)
            borders = [i + 1 for i in layers if i + 1 < c.layers]
            if name == "llm":
                borders += [i for i in c.stack_borders if 0 < i < c.layers]
            if c.merge_after:  # whose last layer is one of a kind
                borders += [i for i in (c.merge_after - 1, c.merge_after) if 0 < i < c.layers]
            if c.is_generator and c.frozen and c.layers > 1:
                # of the first layer a gradient needs less than a scan computes for all
                borders.append(1)
            remat = "none" if c.remat == "auto" else c.remat  # "auto" that no plan has resolved
            runs[name] = plan_stacks(
                c.layers, remat, (*(cuts or {}).get(name, ()), *borders), c.layer_kinds
            )
        dtype = jnp.dtype(dtype)
        functions = functions or {}
        graph, state = _trace(config, runs, dtype, functions)
        axes: Params = {}
        for path, variable in nnx.to_flat_state(state):
            # a.b.c sets axes[a][b][c], creating the dicts that are missing.
            inner = reduce(lambda tree, key: tree.setdefault(key, {}), path[:-1], axes)
            inner[path[-1]] = variable.get_metadata("axes")
        return cls(
            config,
            dtype,
            runs,
            abstract=nnx.to_pure_dict(state),
            axes=axes,
            graph=graph,
            functions=functions,
        )

    @property
    def description(self) -> str | None:
        """Return as text all that its functions depend on; None where that includes functions of the user's."""
        return None if self.functions else f"{self.config} {self.dtype} {self.runs}"

    @property
    def frozen(self) -> set[str]:
        """Name the modules that the config freezes, as `module_of` does; adapters in them are trained all the same."""
        return set(frozen_modules(self.config))

    @property
    def is_random(self) -> bool:
        """Return whether training draws random numbers: for dropout, noise, or generators' times."""
        return self.config.makes_images or bool(random_settings(self.config))

    def init(self, key: Array) -> Params:
        """Initialise random float32 parameters; jit with `out_shardings` to create them sharded."""
        return nnx.to_pure_dict(
            nnx.state(_init_params(self.config, self.runs, self.dtype, self.functions, key))
        )

    def logits(
        self, params: Params, microbatch: Microbatch, noise: Noise | None = None
    ) -> Float[Array, "b t v"]:
        """Compute float32 logits of a microbatch; with `noise`, uint32 (seed, step), in training mode with dropout."""
        module = self.module(params)
        return module.decode(microbatch.text, module.encode(microbatch.items, noise), noise)

    def encode(
        self, params: Params, items: dict[str, ItemBatch], noise: Noise | None = None
    ) -> dict[str, Float[Array, "r m e"]]:
        """Compute every encoder's tokens for the LLM; `params` may lack the LLM's. `noise` as in `logits`."""
        return self.module(params).encode(items, noise)

    def decode(
        self,
        params: Params,
        text: TextBatch,
        features: dict[str, Float[Array, "r m e"]],
        noise: Noise | None = None,
    ) -> Float[Array, "b t v"]:
        """Compute float32 logits from encoder tokens; `params` may lack the encoders'. `noise` as in `logits`."""
        return self.module(params).decode(text, features, noise)

    def prefill(
        self, params: Params, microbatch: Microbatch, room: int
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Run prompts, one per row; return float32 logits of the next token and a cache for `room` more tokens."""
        module = self.module(params)
        return prefill(module, microbatch.text, module.encode(microbatch.items), room)

    def sample_images(
        self,
        params: Params,
        microbatch: Microbatch,
        noise: Noise,
        steps: int,
        guidance: float | Array,
    ) -> dict[str, Float[Array, "r l f"]]:
        """Sample the latents of every generator's images, in patches as their values in `microbatch`."""
        return self.module(params).sample_images(
            microbatch.text, microbatch.items, noise, steps, guidance
        )

    def step(
        self, params: Params, token: Int[Array, " b"], cache: Cache
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Decode one token per row; return float32 logits of the next. `params` may lack the encoders'."""
        return step(self.module(params), token, cache)

    def module(self, params: Params) -> MultimodalModel:
        """Build the NNX module with these parameters; shapes stand in for missing ones, which cannot compute."""
        return nnx.merge(self.graph, nnx.State(merge(self.abstract, params)))


def accumulate_in_scans(
    module: MultimodalModel, accumulators: Params | None
) -> Callable[[Array], Array]:
    """Give scanned stacks their accumulators, as `Stage.run` takes them.

    The loss must depend on what the returned function makes of the last layer's output, which is
    the same.
    """
    sums = {name: tower["layers"]["runs"] for name, tower in towers_of(accumulators or {}).items()}
    layers = {name: module.tower(name).layers for name in sums}
    for name, stacks in layers.items():
        stacks.accumulators = nnx.data(dict(sums[name]))

    def seed(x: Array) -> Array:
        passed = {name: dict(stacks.accumulators) for name, stacks in layers.items()}
        return seed_accumulators(x, passed, sums) if sums else x

    return seed


def towers_of(params: Params) -> Params:
    """Return the branches of the LLM, the encoders and the generators by name."""
    llm = {name: params[name] for name in params if name == "llm"}
    return llm | params.get("encoders", {}) | params.get("generators", {})


def module_of(path: tuple[str, ...]) -> str:
    """Name the module that a parameter belongs to: "llm", an encoder or generator, "<name>.connector", "<name>.vae"."""
    kind = path[0]
    if kind == "llm":
        return "llm"
    if kind not in ("encoders", "generators", *PARTS) or len(path) < 2:
        raise ValueError(f"{'/'.join(map(str, path))} is no parameter of a multimodal model")
    return f"{path[1]}{PARTS.get(kind, '')}"


def parameter_group(path: tuple[str, ...]) -> str:
    """Name the module that a parameter belongs to, or "<module>.lora" for an adapter's."""
    return f"{module_of(path)}.lora" if ADAPTER_ATTRIBUTE in path[2:] else module_of(path)


def parameter_name(path: tuple[str, ...]) -> str:
    """Name a parameter as patterns do: `llm.layers.*.attention.query.weight`, the same in all layers of a tower."""
    inside = path[1:] if path[0] == "llm" else path[2:]
    pairs = zip(("", *inside), inside, strict=False)
    names = ("*" if before == "runs" else name for before, name in pairs if name != "runs")
    return ".".join((module_of(path), *names))


def modules_of(params: Params) -> set[str]:
    """Name the modules in nested dicts of parameters, as `module_of` does."""
    parts = {f"{name}{suffix}" for kind, suffix in PARTS.items() for name in params.get(kind, ())}
    return set(towers_of(params)) | parts


def partition(params: Params, frozen: Set[str]) -> tuple[Params, Params]:
    """Split parameters into (trainable, frozen), each a nested dict without the other's branches.

    Adapters are trainable in any module. Raises ValueError for a module that the model does not
    have.
    """
    known = modules_of(params)
    known |= {name.removesuffix(".connector") for name in known}  # which may have no parameters
    if unknown := frozen - known:
        raise ValueError(
            f"cannot freeze {min(unknown)!r}: the model has {', '.join(sorted(known))}"
        )

    def select(tree: Params, path: tuple[str, ...], want_frozen: bool) -> Params:
        selected = {}
        for key, value in tree.items():
            where = (*path, key)
            if isinstance(value, dict):
                if inner := select(value, where, want_frozen):
                    selected[key] = inner
            # Adapters are trainable even in a frozen module.
            elif (module_of(where) in frozen and ADAPTER_ATTRIBUTE not in where[2:]) == want_frozen:
                selected[key] = value
        return selected

    return select(params, (), False), select(params, (), True)


def merge(first: Params, second: Params) -> Params:
    """Merge nested dicts; where both have a leaf, take the second's."""
    merged = dict(first)
    for key, value in second.items():
        # Only where both have a branch is there something to merge; else the second's takes the
        # place.
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def restrict(params: Params, structure: Params) -> Params:
    """Keep of nested dicts the leaves that another one has."""
    return {
        name: restrict(value, structure[name]) if isinstance(value, dict) else value
        for name, value in params.items()
        if name in structure
    }


def exclude(params: Params, structure: Params) -> Params:
    """Leave out of nested dicts the leaves that another one has."""
    excluded = {}
    for name, value in params.items():
        if name not in structure:
            excluded[name] = value
        elif isinstance(value, dict) and (inner := exclude(value, structure[name])):
            excluded[name] = inner
    return excluded


def _init_params(
    config: ModelConfig,
    runs: dict[str, tuple[LayerStack, ...]],
    dtype: Any,
    functions: Functions,
    key: Array,
) -> MultimodalModel:
    model = MultimodalModel(config, runs, dtype, ParameterKeys(key), functions)
    attach_adapters(model, config, key)
    for name, how in quantized_layers(config).items():
        for linear, _ in linear_layers(model, name):
            linear.weight = QuantizedMatrix(linear.weight[...], linear.axes, how)
    for name in float8_linears(config):
        for linear, layers in linear_layers(model, name):
            linear.float8 = config.llm.float8_layers[layers[0]]
    return model
