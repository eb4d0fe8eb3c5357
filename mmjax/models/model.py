"""A multimodal model as pure functions on nested dicts of parameters, complete or by pipeline stage."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mmjax.batch import ItemBatch, Microbatch, TextBatch
from mmjax.config import DiffusionTransformerConfig, LoraConfig, ModelConfig, UnetConfig, VisionConfig
from mmjax.config.model import adapters_by_layer, frozen_modules, layers_of, lora_scale, quantized_layers
from mmjax.models.decoder import logits_of
from mmjax.models.expert_routing import Routing
from mmjax.models.generation import (
    condition_of,
    draw,
    flow_errors,
    latents_of,
    noised_latents,
    query_states,
    velocity_errors,
)
from mmjax.models.layer_stacks import LayerStack, Params, plan_stacks, seed_accumulators
from mmjax.models.layers import Linear, Noise
from mmjax.models.multimodal import Cache, Functions, MultimodalModel, prefill, step
from mmjax.models.quantization import QuantizedMatrix
from mmjax.parallel.sharding import encoding

# Of a pipeline stage, by name, as `Stage` takes and makes them.
Activations = dict[str, Float[Array, "_ _ _"]]

PARTS = {"connectors": ".connector", "vaes": ".vae"}  # branches of the parameters of what belongs to a tower
ADAPTER_ATTRIBUTE = "lora"  # attribute of `Linear`


class Outputs(NamedTuple):
    """Hold the operands of the losses."""

    hidden: Float[Array, "b t d"]  # activations after the LLM's final norm: with the table, the operands of the logits
    table: Float[Array, "*p v d"]
    routing: Routing | None  # of all layers with experts
    errors: dict[str, Float[Array, "r l"]]  # of every patch of every generator


@dataclass(frozen=True, eq=False)
class Model:
    """A multimodal model as pure functions. Everything here may be called under `jax.jit` or a bare trace."""

    config: ModelConfig
    dtype: Any  # of the activations; parameters are initialised in float32
    runs: dict[str, tuple[LayerStack, ...]]  # layer stacks of every tower: "llm" and the encoders by name
    abstract: Params = field(repr=False)  # shapes and dtypes of the parameters
    axes: Params = field(repr=False)  # their logical axes, tuples; a stack's leading axis is not named
    graph: Any = field(repr=False)  # NNX graph definition
    functions: Functions = field(repr=False, default_factory=dict)  # the encoders' callbacks by name

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        dtype: Any,
        cuts: Mapping[str, tuple[int, ...]] | None = None,
        functions: Functions | None = None,
    ) -> Model:
        """Build the model of a config, its towers cut into stacks at `cuts`. Holds no parameters, so it is cheap.

        functions: the callbacks that encoders name (`config.loading.resolve_callbacks`), needed to compute anything.
        Raises ValueError for an encoder called "llm", impossible cuts or remat policies, and widths that do not divide.
        """
        if "llm" in config.item_modules:
            raise ValueError("no encoder may be called 'llm': that is the decoder's name; rename it in model.encoders")
        towers = {"llm": config.llm, **config.item_modules}
        if unknown := set(cuts or {}) - set(towers):
            raise ValueError(f"cuts for {min(unknown)!r}, which is no tower; there are {', '.join(towers)}")
        deepstacks = {name: c.deepstack for name, c in config.encoders.items() if isinstance(c, VisionConfig)}
        runs = {}
        for name, c in towers.items():
            if isinstance(c, UnetConfig):  # whose blocks differ in shape
                runs[name] = ()
                continue
            # Stacks end where a layer's output is needed: for a deepstack in an encoder, for an addition in the LLM.
            # A deepstack of n layers is added behind the LLM's layers 0 .. n - 1.
            layers = range(max(map(len, deepstacks.values()), default=0)) if name == "llm" else deepstacks.get(name, ())
            borders = [i + 1 for i in layers if i + 1 < c.layers]
            if isinstance(c, DiffusionTransformerConfig) and c.frozen and c.layers > 1:
                borders.append(1)  # of the first layer a gradient needs less than a scan computes for all
            remat = "none" if c.remat == "auto" else c.remat  # "auto" that no plan has resolved
            kinds = c.layer_kinds if name == "llm" else ()
            runs[name] = plan_stacks(c.layers, remat, (*(cuts or {}).get(name, ()), *borders), kinds)
        dtype = jnp.dtype(dtype)
        functions = functions or {}
        # Shapes only: nothing is allocated.
        init = partial(_init_params, config, runs, dtype, functions)
        graph, state = nnx.split(nnx.eval_shape(init, jax.random.key(0)))
        axes: Params = {}
        for path, variable in nnx.to_flat_state(state):
            # Descend along the path, creating the dicts that are missing.
            inner = reduce(lambda tree, key: tree.setdefault(key, {}), path[:-1], axes)
            inner[path[-1]] = variable.get_metadata("axes")
        return cls(config, dtype, runs, abstract=nnx.to_pure_dict(state), axes=axes, graph=graph, functions=functions)

    @property
    def frozen(self) -> set[str]:
        """Name the modules that the config freezes, as `module_of` does; adapters in them are trained all the same."""
        return set(frozen_modules(self.config))

    @property
    def is_random(self) -> bool:
        """Return whether training draws random numbers: for dropout, or for what generators make images of."""
        return bool(self.config.generators) or any(
            tower.dropout for tower in (self.config.llm, *self.config.encoders.values())
        )

    def init(self, key: Array) -> Params:
        """Initialise random float32 parameters; jit with `out_shardings` to create them sharded."""
        return nnx.to_pure_dict(nnx.state(_init_params(self.config, self.runs, self.dtype, self.functions, key)))

    def logits(self, params: Params, microbatch: Microbatch, noise: Noise | None = None) -> Float[Array, "b t v"]:
        """Compute float32 logits of a microbatch; with `noise`, uint32 (seed, step), in training mode with dropout."""
        module = self.module(params)
        return module.decode(microbatch.text, module.encode(microbatch.items, noise), noise)

    def outputs(
        self,
        params: Params,
        microbatch: Microbatch,
        noise: Noise | None = None,
        accumulators: Params | None = None,
        features: Mapping[str, Float[Array, "r m e"]] = MappingProxyType({}),
    ) -> Outputs:
        """Compute what losses are made of.

        accumulators: float32 sums of gradients of scanned stacks' parameters. The gradient with respect to them is the
        new sums, and these parameters get none. features: encoders' tokens, where they are known.
        """
        module = self.module(params)
        seed = _accumulate_in_scans(module, accumulators)
        unknown = {name: items for name, items in microbatch.items.items() if name not in features}
        features = {**features, **module.encode(unknown, noise)}
        hidden, table = module.hidden_and_table(microbatch.text, features, noise)
        errors = module.generator_errors(hidden, microbatch.text, microbatch.items, noise)
        return Outputs(seed(hidden), table, module.llm.layers.routing, errors)

    def encode(
        self, params: Params, items: dict[str, ItemBatch], noise: Noise | None = None
    ) -> dict[str, Float[Array, "r m e"]]:
        """Compute every encoder's tokens for the LLM; `params` may lack the LLM's. `noise` as in `logits`."""
        return self.module(params).encode(items, noise)

    def decode(
        self, params: Params, text: TextBatch, features: dict[str, Float[Array, "r m e"]], noise: Noise | None = None
    ) -> Float[Array, "b t v"]:
        """Compute float32 logits from encoder tokens; `params` may lack the encoders'. `noise` as in `logits`."""
        return self.module(params).decode(text, features, noise)

    def prefill(self, params: Params, microbatch: Microbatch, room: int) -> tuple[Float[Array, "b v"], Cache]:
        """Run prompts, one per row; return float32 logits of the next token and a cache for `room` more tokens."""
        module = self.module(params)
        return prefill(module, microbatch.text, module.encode(microbatch.items), room)

    def sample_images(
        self, params: Params, microbatch: Microbatch, noise: Noise, steps: int, guidance: float | Array
    ) -> dict[str, Float[Array, "r l f"]]:
        """Sample the latents of every generator's images, in patches as their values in `microbatch`."""
        return self.module(params).sample_images(microbatch.text, microbatch.items, noise, steps, guidance)

    def step(self, params: Params, token: Int[Array, " b"], cache: Cache) -> tuple[Float[Array, "b v"], Cache]:
        """Decode one token per row; return float32 logits of the next. `params` may lack the encoders'."""
        return step(self.module(params), token, cache)

    def module(self, params: Params) -> MultimodalModel:
        """Build the NNX module with these parameters; shapes stand in for missing ones, which cannot compute."""
        return nnx.merge(self.graph, nnx.State(merge(self.abstract, params)))

    def stages(self, tower: str, cuts: tuple[int, ...]) -> list[Stage]:
        """Cut a tower before the layers in `cuts`, which must be borders of its stacks."""
        borders = {run.start for run in self.runs[tower]}
        # Layer 0 is a border, but a cut before it would leave an empty stage.
        if wrong := set(cuts) - borders | {cut for cut in cuts if cut == 0}:
            raise ValueError(f"{tower} cannot be cut before layer {min(wrong)}: its runs begin at {sorted(borders)}")
        ends = [0, *sorted(cuts), layers_of(self.config, tower)]
        return [Stage(self, tower, start, stop) for start, stop in pairwise(ends)]


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers `start` to `stop` of one tower as a pure function: `stage(stage.select(params), inputs, batch)`.

    Takes and returns dicts of arrays by name, each made by one stage and taken by one: "vision.2" and "llm.2" are the
    activations `[R, L, D]` that enter layer 2, "vision" is an encoder's tokens, which its last stage makes and the
    LLM's first takes. Of a deepstack, "vision.deeper.1" goes from the stage with the layer that is taken out to the
    LLM's stage with layer 1, to whose output it is added. The LLM's last stage returns float32 "logits", or makes the
    hidden states that generators take, by the generator's name. What all layers of a generator take of the images
    beside their activations, "picture.2.images" and "picture.2.condition", goes from stage to stage with these; its
    last stage returns the "picture.error" `[R, L, 1]` of every patch. `batch` is the tower's: a TextBatch or an
    ItemBatch.
    """

    model: Model
    tower: str
    start: int
    stop: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == layers_of(self.model.config, self.tower)

    @property
    def generates(self) -> bool:
        """Return whether the stage is a generator's."""
        return self.tower in self.model.config.generators

    @property
    def makes_loss(self) -> bool:
        """Return whether a loss is made of the stage's output: the LLM's, or a generator's."""
        return self.last and (self.tower == "llm" or self.generates)

    @property
    def layers_output(self) -> str:
        """Name what the stage's last layer makes, where another stage goes on from it."""
        return f"{self.tower}.{self.stop}"

    def passed(self, layer: int) -> tuple[str, ...]:
        """Name what a generator's layer takes of the stage before it."""
        return tuple(f"{self.tower}.{layer}{part}" for part in ("", ".images", ".condition"))

    @property
    def inputs(self) -> tuple[str, ...]:
        if self.generates:
            return (self.tower,) if self.first else self.passed(self.start)
        before = () if self.first else (f"{self.tower}.{self.start}",)
        return (*before, *(name for encoder in self.encoders for name in self._tokens(encoder)))

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.tower == "llm":
            return self.sends_states or (("logits",) if self.last else (self.layers_output,))
        if self.generates:
            return (f"{self.tower}.error",) if self.last else self.passed(self.stop)
        after = () if self.last else (self.layers_output,)
        return (*after, *self._tokens(self.tower))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Name the encoders whose tokens the stage takes."""
        return tuple(name for name in self.model.config.encoders if self.tower == "llm" and self._tokens(name))

    @property
    def embeds_queries(self) -> tuple[str, ...]:
        """Name the generators whose learned queries the stage embeds."""
        return tuple(self.model.config.generators) if self.tower == "llm" and self.first else ()

    @property
    def sends_states(self) -> tuple[str, ...]:
        """Name the generators that take the stage's hidden states."""
        return tuple(self.model.config.generators) if self.tower == "llm" and self.last else ()

    def _tokens(self, encoder: str) -> list[str]:
        """Name the tokens of an encoder that the stage makes or, in the LLM, takes."""
        embedding = self.first if self.tower == "llm" else self.last
        return [encoder] * embedding + [f"{encoder}.deeper.{n}" for n in self._deeper(encoder)]

    def _deeper(self, encoder: str) -> list[int]:
        """Number an encoder's `deepstack` layers whose outputs the stage takes out or, in the LLM, adds."""
        config = self.model.config.encoders[encoder]
        layers = config.deepstack if isinstance(config, VisionConfig) else ()
        if self.tower != "llm":
            return [n for n, layer in enumerate(layers) if self.start <= layer < self.stop]
        # Those for which there is no layer end in the last stage, which adds them to nothing.
        return [n for n in range(len(layers)) if self.start <= n and (n < self.stop or self.last)]

    def select(self, params: Params) -> Params:
        """Select the stage's parameters. Tied embeddings are in the LLM's first and last stage: add their gradients."""
        if self.generates:
            return self._select_generator(params)
        tower = params["llm"] if self.tower == "llm" else params["encoders"][self.tower]
        tied = self.tower == "llm" and self.model.config.llm.tied
        stacks = [run for run in self.model.runs[self.tower] if self.start <= run.start < self.stop]
        runs = {name for run in stacks for name in run.parts}
        # The same nesting as the full parameters, so that `Model.module` can merge it.
        part = {"layers": {"runs": {name: tower["layers"]["runs"][name] for name in sorted(runs)}}}
        if self.first or (self.last and tied):
            part["embed"] = tower["embed"]
        if self.first and "positions" in tower:
            part["positions"] = tower["positions"]
        if self.last and "head" in tower:
            part["head"] = tower["head"]
        if self.tower == "llm":
            queries = {name: {"queries": params["connectors"][name]["queries"]} for name in self.embeds_queries}
            return {"llm": part} | ({"connectors": queries} if queries else {})
        connector = params["connectors"][self.tower]
        selected = {name: value for name, value in connector.items() if self.last and name != "deeper"}
        if deeper := {str(n): connector["deeper"][str(n)] for n in self._deeper(self.tower)}:
            selected["deeper"] = deeper
        return {"encoders": {self.tower: part}} | ({"connectors": {self.tower: selected}} if selected else {})

    def _select_generator(self, params: Params) -> Params:
        """Select a generator's layers; what stands before them and behind them; in the first stage its connector."""
        tower = params["generators"][self.tower]
        part = dict(tower)
        if "layers" in tower:
            stacks = [run for run in self.model.runs[self.tower] if self.start <= run.start < self.stop]
            runs = {name: tower["layers"]["runs"][name] for run in stacks for name in run.parts}
            ends = {name for name in tower if name != "layers" and (self.last if name == "head" else self.first)}
            part = {"layers": {"runs": runs}} | {name: tower[name] for name in sorted(ends)}
        selected = {"generators": {self.tower: part}}
        if self.first:
            connector = params["connectors"][self.tower]
            selected["connectors"] = {self.tower: {k: v for k, v in connector.items() if k != "queries"}}
        return selected

    def __call__(
        self,
        params: Params,
        inputs: Activations,
        batch: TextBatch | ItemBatch,
        noise: Noise | None = None,
        accumulators: Params | None = None,
    ) -> Activations:
        """Compute the stage's outputs. `noise` as in `Model.logits`, `accumulators` as in `Model.outputs`."""
        module = self.model.module(params)
        seed = _accumulate_in_scans(module, accumulators)
        if self.generates:
            with encoding():
                return dict(zip(self.outputs, self._generate(module, seed, inputs, batch, noise), strict=True))
        if self.tower == "llm":
            x = seed(self._llm_layers(module, inputs, batch, noise))
            if not self.last:
                return {self.layers_output: x}
            hidden, table = module.llm.hidden_and_table(x)
            if self.sends_states:
                return self.query_states(hidden, batch)
            return {"logits": logits_of(hidden, table, self.model.config.llm.logit_cap)}
        tower = module.encoders[self.tower]
        numbers = self._deeper(self.tower)
        with encoding():
            x = tower.embedded(batch) if self.first else inputs[self.inputs[0]]
            context = module.context(self.tower, batch, noise)
            layers = [module.connectors[self.tower].deepstack[n] for n in numbers]
            *deeper, x = tower.layers.outputs(x, context, layers, self.start, self.stop)
            x = seed(x)
            arrays = [] if self.last else [x]
            if names := self._tokens(self.tower):
                deeper = dict(zip(numbers, deeper, strict=True))
                tokens = module.connected(self.tower, x if self.last else None, deeper, batch)
                arrays += jnp.split(tokens, len(names), axis=-1) if names[1:] else [tokens]
        return dict(zip(self.outputs, arrays, strict=True))

    def hidden_and_table(
        self,
        params: Params,
        inputs: Activations,
        text: TextBatch,
        noise: Noise | None = None,
        accumulators: Params | None = None,
    ) -> tuple[Float[Array, "b t d"], Float[Array, "*p v d"]]:
        """Return what the LLM's last stage makes the logits of, as `Model.outputs`."""
        module = self.model.module(params)
        seed = _accumulate_in_scans(module, accumulators)
        return module.llm.hidden_and_table(seed(self._llm_layers(module, inputs, text, noise)))

    def query_states(self, hidden: Float[Array, "b t d"], text: TextBatch) -> Activations:
        """Bring the hidden states of generators' queries to the rows of these, by name."""
        return {name: query_states(hidden, text, name) for name in self.sends_states}

    def _generate(
        self,
        module: MultimodalModel,
        seed: Callable[[Array], Array],
        inputs: Activations,
        items: ItemBatch,
        noise: Noise | None,
    ) -> tuple[Array, ...]:
        """Run a generator's stage; return its `outputs`."""
        generator = module.generators[self.tower]
        config = generator.config
        draws = draw(np.zeros(2, np.uint32) if noise is None else noise, self.tower, config, items)
        clean = latents_of(config, items)
        if self.first:
            condition = condition_of(module.connectors[self.tower], inputs[self.tower], items, draws.dropped)
        if isinstance(config, UnetConfig):
            return (velocity_errors(generator, items, clean, condition, draws)[..., None],)
        if self.first:
            x = generator.embedded(noised_latents(clean, items, draws), items)
            context = generator.context(items, draws.time, condition)
        else:
            x, *images = (inputs[name] for name in self.inputs)
            context = generator.resumed_context(items, *images)
        x = seed(generator.layers(x, context, self.start, self.stop))
        if not self.last:
            return (x, *generator.passed_on(context))
        return (flow_errors(clean, items, draws, generator.finished(x, items, context))[..., None],)

    def _llm_layers(self, module: MultimodalModel, inputs: Activations, text: TextBatch, noise: Noise | None) -> Array:
        features = {}
        for encoder in self.encoders:
            tokens = [inputs[name] for name in self._tokens(encoder)]
            # One exchange for all of an encoder's tokens.
            features[encoder] = jnp.concatenate(tokens, axis=-1) if tokens[1:] else tokens[0]
        if self.first:
            x, add = module.embedded(text, features)
        else:
            x = inputs[self.inputs[0]]
            add = module.additions(text, features)
        return module.llm.layers(x, module.context("llm", text, noise), self.start, self.stop, add)


def _accumulate_in_scans(module: MultimodalModel, accumulators: Params | None) -> Callable[[Array], Array]:
    """Give scanned stacks their accumulators, as `Model.outputs` takes them.

    The loss must depend on what the returned function makes of the last layer's output, which is the same.
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


def modules_of(params: Params) -> set[str]:
    """Name the modules in nested dicts of parameters, as `module_of` does."""
    parts = {f"{name}{suffix}" for kind, suffix in PARTS.items() for name in params.get(kind, ())}
    return set(towers_of(params)) | parts


def partition(params: Params, frozen: Set[str]) -> tuple[Params, Params]:
    """Split parameters into (trainable, frozen), each a nested dict without the other's branches.

    Adapters are trainable in any module. Raises ValueError for a module that the model does not have.
    """
    known = modules_of(params)
    if unknown := frozen - known:
        raise ValueError(f"cannot freeze {min(unknown)!r}: the model has {', '.join(sorted(known))}")

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
        # Only where both have a branch is there something to merge; else the second's takes the place.
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


def _init_params(
    config: ModelConfig, runs: dict[str, tuple[LayerStack, ...]], dtype: Any, functions: Functions, key: Array
) -> MultimodalModel:
    model = MultimodalModel(config, runs, dtype, nnx.Rngs(params=key), functions)
    _attach_adapters(model, config, key)
    for name, how in quantized_layers(config).items():
        for linear, _ in _linear_layers(model, name):
            linear.weight = QuantizedMatrix(linear.weight[...], linear.axes, how)
    return model


# ------------------------------------------------------------------------------------------------------------ adapters


class LowRank(nnx.Module):
    """A low-rank adapter `scale * (x @ a) @ b` beside a linear layer (LoRA, Hu et al. 2021).

    `a` is `[in, rank]`, `b` `[rank, out]`; those of a stack have a leading layer axis. `b` begins as zero, so the model
    computes the same as without adapters.
    """

    def __init__(self, a: Array, b: Array, linear: Linear, scale: float):
        inputs, outputs = linear.axes
        self.a = nnx.Param(a, axes=(inputs, None))
        self.b = nnx.Param(b, axes=(None, outputs))
        self.scale = scale

    def __call__(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        inner = checkpoint_name(x @ self.a[...].astype(x.dtype), "adapter")
        return inner @ self.b[...].astype(x.dtype) * self.scale


def _attach_adapters(model: MultimodalModel, config: ModelConfig, key: Array) -> None:
    """Attach adapters to a new model. Layer i's values depend on the linear layer's name and on i, not on stacks."""
    for name, lora in adapters_by_layer(config).items():
        # A hash that does not change with the process, unlike Python's own.
        name_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        for linear, layers in _linear_layers(model, name):
            linear.lora = _init_adapter(linear, lora, layers, name_key)


def _linear_layers(model: MultimodalModel, name: str) -> Iterator[tuple[Linear, range | None]]:
    """Find the linear layers of this name: a connector's only one, or one per stored layers of a tower that have it.

    Names are as in `mmjax.config.model`: `vision.connector.mlp.up`, `llm.layers.*.attention.query`.
    """
    tower, part, *path = name.split(".")
    if part == "connector":
        yield reduce(getattr, path, model.connectors[tower]), None
        return
    stacks = model.tower(tower).layers
    for run in stacks.plan:
        for stored, layers in run.parts.items():
            if (mixer := getattr(stacks.runs[stored], path[1])) is not None:
                yield reduce(getattr, path[2:], mixer), layers


def _init_adapter(linear: Linear, lora: LoraConfig, layers: range | None, key: Array) -> LowRank:
    """Draw `a` as PyTorch's default for linear layers (Kaiming uniform with a = sqrt(5)); `b` is zero."""
    *stack, inputs, outputs = linear.weight.shape
    limit = inputs**-0.5

    def uniform(i: int | Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, i), (inputs, lora.rank), jnp.float32, -limit, limit)

    # Keys are those of the layers in the tower, not from 0: other stacks draw the same values.
    a = jax.vmap(uniform)(jnp.asarray(layers)) if stack else uniform(0 if layers is None else layers.start)
    return LowRank(a, jnp.zeros((*stack, lora.rank, outputs), jnp.float32), linear, lora_scale(lora))
