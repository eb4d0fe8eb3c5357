"""The model as training sees it: pure functions on nested dicts of parameters, whole or by pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.adapters import frozen_by_adapters
from mmjax.batch import ItemBatch, Microbatch, TextBatch
from mmjax.config import ModelConfig, Remat, TowerRemat, VisionConfig
from mmjax.models.cached import Cache, prefill, step
from mmjax.models.dropout import Noise
from mmjax.models.layer_runs import Run, plan_runs
from mmjax.models.lora import attach
from mmjax.models.multimodal import Functions, MultimodalModel
from mmjax.parallel.sharding import encoding

Params = dict[str, Any]  # nested, by module and attribute; leaves are arrays
ADAPTER = "lora"  # a linear layer's attribute


@dataclass(frozen=True, eq=False)
class Model:
    """A multimodal model as pure functions. Everything here may be called under `jax.jit` or a bare trace."""

    config: ModelConfig
    dtype: Any  # of the activations; parameters are born float32
    runs: dict[str, tuple[Run, ...]]  # of every tower: "llm" and the encoders by name
    abstract: Params = field(repr=False)  # shapes and dtypes of the parameters
    axes: Params = field(repr=False)  # their logical axes, tuples; a stack's leading axis is not named
    graph: Any = field(repr=False)
    functions: Functions = field(repr=False, default_factory=dict)  # that the encoders' callbacks name

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        dtype: Any,
        cuts: Mapping[str, tuple[int, ...]] | None = None,
        functions: Functions | None = None,
    ) -> Model:
        """The model of a config, its towers cut into runs at `cuts`. Holds no parameters, so it costs nothing.

        functions: those that the encoders' callbacks name (`config_files.callbacks_of`); what computes needs them.
        Raises ValueError for an encoder called "llm", impossible cuts or remat policies, and widths that do not divide.
        """
        if "llm" in config.encoders:
            raise ValueError("no encoder may be called 'llm': that is the decoder's name; rename it in model.encoders")
        towers = {"llm": config.llm, **config.encoders}
        if unknown := set(cuts or {}) - set(towers):
            raise ValueError(f"cuts for {min(unknown)!r}, which is no tower; there are {', '.join(towers)}")
        runs = {
            name: plan_runs(c.layers, _decided(c.remat), (*(cuts or {}).get(name, ()), *_borders(config, name)))
            for name, c in towers.items()
        }
        dtype = jnp.dtype(dtype)
        functions = functions or {}
        born = partial(_born, config, runs, dtype, functions)
        graph, state = nnx.split(nnx.eval_shape(born, jax.random.key(0)))
        axes = {path: variable.get_metadata("axes") for path, variable in nnx.to_flat_state(state)}
        return cls(config, dtype, runs, nnx.to_pure_dict(state), _nested(axes), graph, functions)

    @property
    def frozen(self) -> set[str]:
        """The modules that the config freezes, named as by `module_of`; their adapters are trained all the same."""
        names = {"llm"} if self.config.llm.frozen else set()
        for name, encoder in self.config.encoders.items():
            names |= {name} if encoder.frozen else set()
            names |= {f"{name}.connector"} if encoder.connector.frozen else set()
        return names | frozen_by_adapters(self.config)

    @property
    def drops(self) -> bool:
        """Whether training it drops anything, and so wants noise."""
        return any(tower.dropout for tower in (self.config.llm, *self.config.encoders.values()))

    def init(self, key: Array) -> Params:
        """Random parameters, float32; under jit with `out_shardings` born where they belong."""
        return nnx.to_pure_dict(nnx.state(_born(self.config, self.runs, self.dtype, self.functions, key)))

    def logits(self, params: Params, microbatch: Microbatch, noise: Noise | None = None) -> Float[Array, "b t v"]:
        """Float32 logits of a microbatch; training mode, with dropout, where there is `noise`: uint32 (seed, step)."""
        module = self.module(params)
        return module.decode(microbatch.text, module.encode(microbatch.items, noise), noise)

    def hidden_and_table(
        self, params: Params, microbatch: Microbatch, noise: Noise | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "v d"]]:
        """What `logits` are the scores of: activations after the final norm, and the output table; `noise` as there."""
        module = self.module(params)
        return module.hidden_and_table(microbatch.text, module.encode(microbatch.items, noise), noise)

    def encode(
        self, params: Params, items: dict[str, ItemBatch], noise: Noise | None = None
    ) -> dict[str, Float[Array, "r m e"]]:
        """Every encoder's tokens for the LLM; `params` need not hold the LLM's. `noise` as in `logits`."""
        return self.module(params).encode(items, noise)

    def decode(
        self, params: Params, text: TextBatch, features: dict[str, Float[Array, "r m e"]], noise: Noise | None = None
    ) -> Float[Array, "b t v"]:
        """Float32 logits from encoder tokens; `params` need not hold the encoders'. `noise` as in `logits`."""
        return self.module(params).decode(text, features, noise)

    def prefill(self, params: Params, microbatch: Microbatch, room: int) -> tuple[Float[Array, "b v"], Cache]:
        """Float32 logits after each row's prompt, one a row, and what is kept of it with room for so many tokens."""
        module = self.module(params)
        return prefill(module, microbatch.text, module.encode(microbatch.items), room)

    def step(self, params: Params, token: Int[Array, " b"], cache: Cache) -> tuple[Float[Array, "b v"], Cache]:
        """Float32 logits after one more token of each row; `params` need not hold the encoders'."""
        return step(self.module(params), token, cache)

    def module(self, params: Params) -> MultimodalModel:
        """The NNX module with these parameters; where some are missing, their shapes stand in, which cannot compute."""
        return nnx.merge(self.graph, nnx.State(merge(self.abstract, params)))

    def stages(self, tower: str, cuts: tuple[int, ...]) -> list[Stage]:
        """A tower cut before the layers in `cuts`, which must be borders of its runs.

        An encoder's `deepstack` must lie in its last stage, and the layers behind which it is added in the LLM's first:
        between stages go activations alone.
        """
        borders = {run.start for run in self.runs[tower]}
        if wrong := set(cuts) - borders | {cut for cut in cuts if cut == 0}:
            raise ValueError(f"{tower} cannot be cut before layer {min(wrong)}: its runs begin at {sorted(borders)}")
        if wrong := [cut for cut in cuts if not _alone(self.config, tower, cut)]:
            raise ValueError(
                f"{tower} cannot be cut before layer {min(wrong)}: an encoder's deepstack leads out of its last stage "
                "and into the LLM's first"
            )
        ends = [0, *sorted(cuts), self.runs[tower][-1].stop]
        return [Stage(self, tower, a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers `start` to `stop` of one tower as a pure function: `stage(stage.select(params), inputs, batch)`.

    An encoder's first stage takes `inputs=None` and its last, connector included, gives tokens for the LLM; the LLM's
    first stage takes a dict of such tokens by encoder and its last gives float32 logits. Between stages go activations
    `[R, L, D]`. `batch` is the tower's own: a TextBatch or an ItemBatch.
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
        return self.stop == self.model.runs[self.tower][-1].stop

    def select(self, params: Params) -> Params:
        """The stage's own parameters. Tied embeddings belong to the LLM's first and last stage: add their gradients."""
        whole = params["llm"] if self.tower == "llm" else params["encoders"][self.tower]
        tied = self.tower == "llm" and self.model.config.llm.tied
        runs = {r.name for r in self.model.runs[self.tower] if self.start <= r.start < self.stop}
        part = {"layers": {"runs": {name: whole["layers"]["runs"][name] for name in sorted(runs)}}}
        if self.first or (self.last and tied):
            part["embed"] = whole["embed"]
        if self.last and "head" in whole:
            part["head"] = whole["head"]
        if self.tower == "llm":
            return {"llm": part}
        connector = {"connectors": {self.tower: params["connectors"][self.tower]}} if self.last else {}
        return {"encoders": {self.tower: part}, **connector}

    def __call__(
        self,
        params: Params,
        inputs: dict[str, Float[Array, "r m d"]] | Float[Array, "b t w"] | None,
        batch: TextBatch | ItemBatch,
        noise: Noise | None = None,
    ) -> Float[Array, "b l e"]:
        """Activations, encoder tokens or logits: whatever this stage ends with. `noise` as in `Model.logits`."""
        module = self.model.module(params)
        if self.tower == "llm":
            x, add = module.embedded(batch, inputs) if self.first else (inputs, ())
            x = module.llm.layers(x, module.context("llm", batch, noise), self.start, self.stop, add)
            return module.llm.logits(x) if self.last else x
        tower = module.encoders[self.tower]
        with encoding():
            x = tower.embedded(batch) if self.first else inputs
            context = module.context(self.tower, batch, noise)
            deep = module.connectors[self.tower].deepstack if self.last else ()
            outputs = tower.layers.outputs(x, context, deep, self.start, self.stop)
            return module.connected(self.tower, outputs, batch) if self.last else outputs[-1]


def module_of(path: tuple[str, ...]) -> str:
    """The module that a parameter belongs to: "llm", an encoder's name, or "<encoder>.connector"."""
    kind = path[0]
    if kind == "llm":
        return "llm"
    if kind not in ("encoders", "connectors") or len(path) < 2:
        raise ValueError(f"{'/'.join(map(str, path))} is no parameter of a multimodal model")
    return path[1] if kind == "encoders" else f"{path[1]}.connector"


def group_of(path: tuple[str, ...]) -> str:
    """The module that a parameter belongs to, or "<module>.lora" for one of an adapter."""
    return f"{module_of(path)}.lora" if ADAPTER in path[2:] else module_of(path)


def modules_of(params: Params) -> set[str]:
    """The modules that nested dicts of parameters hold, named as by `module_of`."""
    connectors = {f"{name}.connector" for name in params.get("connectors", ())}
    return ({"llm"} & set(params)) | set(params.get("encoders", ())) | connectors


def partition(params: Params, frozen: Set[str]) -> tuple[Params, Params]:
    """(trainable, frozen) parameters, split by module; each a nested dict without the other's branches.

    Adapters are trainable in any module. Raises ValueError for a module that the model does not have.
    """
    known = modules_of(params)
    if unknown := frozen - known:
        raise ValueError(f"cannot freeze {min(unknown)!r}: the model has {', '.join(sorted(known))}")

    def of_module(module: str, own: Params, keep: bool) -> Params:
        if module in frozen:
            return _adapters(own, not keep)
        return {} if keep else own

    def part(keep: bool) -> Params:
        llm = of_module("llm", params.get("llm", {}), keep)
        chosen = {"llm": llm} if llm else {}
        for kind in ("encoders", "connectors"):
            inside = {n: of_module(module_of((kind, n)), p, keep) for n, p in params.get(kind, {}).items()}
            inside = {n: p for n, p in inside.items() if p}
            chosen |= {kind: inside} if inside else {}
        return chosen

    return part(False), part(True)


def _adapters(own: Params, keep: bool) -> Params:
    """The adapters of a module's parameters alone, or all but these."""
    chosen = {}
    for key, value in own.items():
        if key == ADAPTER:
            chosen |= {key: value} if keep else {}
        elif isinstance(value, dict):
            inner = _adapters(value, keep)
            chosen |= {key: inner} if inner else {}
        elif not keep:
            chosen[key] = value
    return chosen


def merge(first: Params, second: Params) -> Params:
    """Nested dicts as one; where both have a leaf, the second's."""
    merged = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _born(
    config: ModelConfig, runs: dict[str, tuple[Run, ...]], dtype: Any, functions: Functions, key: Array
) -> MultimodalModel:
    model = MultimodalModel(config, runs, dtype, nnx.Rngs(params=key), functions)
    attach(model, config, key)
    return model


def _decided(remat: TowerRemat | tuple[Remat, ...]) -> Remat | tuple[Remat, ...]:
    """What nobody has decided computes nothing again."""
    return "none" if remat == "auto" else remat


def _deepstacks(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: c.deepstack for name, c in config.encoders.items() if isinstance(c, VisionConfig)}


def _borders(config: ModelConfig, tower: str) -> tuple[int, ...]:
    """Where a tower's runs must end: what layers give there is taken for a deepstack, or has one added."""
    if tower == "llm":
        added = max(map(len, _deepstacks(config).values()), default=0)
        return tuple(range(1, min(added + 1, config.llm.layers)))
    return tuple(i + 1 for i in _deepstacks(config).get(tower, ()) if i + 1 < config.encoders[tower].layers)


def _alone(config: ModelConfig, tower: str, cut: int) -> bool:
    """Whether activations are all that the layers from `cut` on need of those before it."""
    deepstacks = _deepstacks(config)
    if tower == "llm":
        return cut >= max(map(len, deepstacks.values()), default=0)
    return cut <= min(deepstacks.get(tower, ()), default=cut)


def _nested(flat: dict[tuple[str, ...], Any]) -> Params:
    """`{("a", "b"): x}` as `{"a": {"b": x}}`."""
    tree: Params = {}
    for path, leaf in flat.items():
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = leaf
    return tree
