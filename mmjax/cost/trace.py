"""Trace costs from the program itself, on abstract arrays: no kind of layer is named here.

A tower is traced alone, in parts: what stands before its layers, a layer of each kind, and what
stands behind them. The gradients are those of what is trained there and before, as dead-code
elimination leaves them. `cost.rows` tells from a row's sizes how everything grows.

What the program cannot tell:
- Attention by blocks runs as often as a mask says. One pair of blocks counts, for each of its pairs of positions.
- Products that stand for something cheaper, as chunks for the recurrence of a delta net, lie in a scope that says what
  is needed instead (`needs`).
- A kernel for GPUs, and what several devices exchange, are not in the trace, which is of no platform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Var
from jax.interpreters import partial_eval

from mmjax.batch import TOKEN_FIELDS, ItemBatch, TextBatch
from mmjax.config import DecoderConfig, ModelConfig, Remat
from mmjax.config.model import with_one_item_module
from mmjax.cost.operations import Operations, inner_programs, list_operations
from mmjax.cost.rates import UNITS, Cost, Ends, ModuleParameters, TowerTrace
from mmjax.cost.rows import PRIME, Row, count_cost, row_of
from mmjax.models.decoder import logits_of
from mmjax.models.generation import (
    Draws,
    condition_of,
    flow_errors,
    noised_latents,
    velocity_errors,
)
from mmjax.models.kv_cache import KeyValue
from mmjax.models.layer_stacks import Params
from mmjax.models.layers import Context
from mmjax.models.model import Model, merge, parameter_group, partition, towers_of
from mmjax.models.multimodal import MultimodalModel
from mmjax.models.stack_scan import LayerStack, apply_stack
from mmjax.parallel.sharding import for_no_platform

# Layers of the stack that stands for a tower's: a prime, so that no other scan of a model has this
# length, and `_saved_arrays` finds the scan over layers by it.
MANY = 997


def trace_passes(function: Callable[[Any, Any], tuple[Any, Any]], trained: Any, rest: Any) -> Any:
    """Trace `function(trained, rest)` and its gradients with respect to `trained`, with dead code eliminated.

    The function returns what is differentiated and what is not.
    """

    def both(trained: Any, rest: Any) -> Any:
        if not jax.tree.leaves(trained):
            return function(trained, rest)
        out, backward, rest_of_outputs = jax.vjp(lambda x: function(x, rest), trained, has_aux=True)
        return out, backward(out), rest_of_outputs

    program = jax.make_jaxpr(both)(trained, rest).jaxpr
    return partial_eval.dce_jaxpr(program, [True] * len(program.outvars))[0]


# --------------------------------------------------------------------------------------------------
# towers


class Inputs(NamedTuple):
    """Abstract inputs of a tower."""

    batch: TextBatch | ItemBatch
    # of other towers: what is added to the LLM's embeddings, or a generator's condition
    x: jax.ShapeDtypeStruct
    draws: Draws | None = None
    clean: jax.ShapeDtypeStruct | None = None


def _inputs(model: Model, tower: str, row: Row) -> Inputs:
    def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), dtype)

    config = model.config
    batch = tower_batch(config, tower, (1, row.length))
    generator = config.towers[tower]
    if not generator.is_generator:
        return Inputs(batch, array(row.length, config.llm.width, dtype=model.dtype))
    images = generator.max_images(row.length)
    patches = array(row.length, generator.patch_values)
    draws = Draws(array(images), array(images, dtype=np.bool_), patches)
    states = array(images * generator.condition_tokens, config.llm.width, dtype=model.dtype)
    return Inputs(batch, states, draws, patches)


def _branch(params: Params, tower: str) -> Params:
    """Select the parameters of a tower and its connector."""
    if tower == "llm":
        return {"llm": params["llm"]}
    kinds = ("encoders", "generators", "connectors")
    return {kind: {tower: params[kind][tower]} for kind in kinds if tower in params.get(kind, {})}


def tower_batch(config: ModelConfig, tower: str, shape: tuple[int, int]) -> TextBatch | ItemBatch:
    """Return the shapes and dtypes of a tower's input. shape: (rows, row length)."""

    def array(*inner: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *inner), jnp.dtype(dtype))

    if tower == "llm":
        fields = dict.fromkeys(TOKEN_FIELDS, array())
        position = array(3) if config.llm.rope_sections else array()
        return TextBatch(
            **fields
            | {"weight": array(dtype=np.float32), "position": position, "slots": {}, "send": {}}
        )
    module = config.item_modules[tower]
    values = array(module.input_values, dtype=np.uint8 if module.takes_pixels else np.float32)
    return ItemBatch(values, array(), array(3), array(), array())


def _before(module: MultimodalModel, tower: str, inputs: Inputs) -> tuple[Any, Any]:
    """Return the first layer's input, and the context that all layers share."""
    if tower == "llm":
        x, _ = module.embedded(inputs.batch, {})
        x = x + inputs.x
        return x, _with_keys(module.text_context(x, inputs.batch), x, module.llm.config)
    if tower in module.encoders:
        return module.encoders[tower].embedded(inputs.batch), module.context(
            tower, inputs.batch, None
        )
    condition = condition_of(module.connectors[tower], inputs.x, inputs.batch, inputs.draws.dropped)
    generator = module.tower(tower)
    if not generator.config.is_stack:
        return condition, None
    x = generator.embedded(noised_latents(inputs.clean, inputs.batch, inputs.draws), inputs.batch)
    return x, generator.context(inputs.batch, inputs.draws.time, condition)


def _with_keys(context: Context, x: Any, llm: DecoderConfig) -> Context:
    """Add keys and values for the layers that share those of another, which is not traced with them."""

    def keys(windowed: bool) -> KeyValue:
        width, (_, kv_heads) = llm.heads_of(windowed)
        array = jnp.broadcast_to(x[..., :1, None], (*x.shape[:2], kv_heads, width))
        return KeyValue(array, array)

    if not llm.shared_layers:
        return context
    return context._replace(shared=keys(False), window_shared=keys(True))


def _after(module: MultimodalModel, tower: str, x: Any, context: Any, inputs: Inputs) -> Any:
    """Compute the tower's result from the last layer's output: the loss, or an encoder's tokens."""
    if tower == "llm":
        hidden, table = module.llm.hidden_and_table(x)
        logits = logits_of(hidden, table, module.llm.config.logit_cap)
        of_target = jnp.take_along_axis(logits, inputs.batch.token[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - of_target
    if tower in module.encoders:
        deeper = range(len(module.connectors[tower].deepstack))
        outputs = dict.fromkeys(range(module.encoders[tower].config.layers), x)
        finished = module.finished(tower, outputs, inputs.batch)
        restored = module.encoders[tower].restored(x, inputs.batch)
        return module.connected(tower, finished, dict.fromkeys(deeper, restored), inputs.batch)
    generator = module.tower(tower)
    if not generator.config.is_stack:
        return velocity_errors(generator, inputs.batch, inputs.clean, x, inputs.draws)
    predicted = generator.finished(x, inputs.batch, context)
    return flow_errors(inputs.clean, inputs.batch, inputs.draws, predicted)


class _Tower:
    """A tower that is being traced."""

    def __init__(self, key: TowerTrace):
        self.name = key.tower
        self.model = Model.build(key.model, key.dtype)
        self.row = row_of(key.model, key.tower)
        self.inputs = _inputs(self.model, self.name, self.row)
        self.upstream = key.upstream
        self.trained, _ = partition(_branch(self.model.abstract, self.name), key.frozen)
        self.layers = (
            self.model.module({}).tower(self.name).layers if self.model.runs[self.name] else None
        )
        passed, self.reached = self._reached()
        self.passed, self.structure = jax.tree.flatten(passed)
        config = key.model.towers[self.name]
        self.merge_after = config.merge_after
        # positions that become one inside it, and the channels that this has
        self.merged = config.merged_inputs if config.merge_after else 1
        self.width_behind = config.feature_width if config.merge_after else 0

    def _reached(self) -> tuple[Any, list[bool]]:
        """Return the inputs of the layers, and for each of these arrays whether it needs a gradient."""
        trained = {"params": self.trained} | ({"x": self.inputs.x} if self.upstream else {})

        def before(trained: Any, rest: Any) -> Any:
            params, inputs = rest
            inputs = inputs._replace(x=trained.get("x", inputs.x))
            return _before(self.model.module(merge(params, trained["params"])), self.name, inputs)

        # An array has a gradient where it depends on a trained input: dead-code elimination of all
        # outputs but this one tells which inputs are still used, the trained ones first.
        program, passed = jax.make_jaxpr(before, return_shape=True)(
            trained, (self.model.abstract, self.inputs)
        )
        count = len(jax.tree.leaves(trained))
        reached = []
        for number, leaf in enumerate(jax.tree.leaves(passed)):
            output = [n == number for n in range(len(program.jaxpr.outvars))]
            used = partial_eval.dce_jaxpr(program.jaxpr, output)[1]
            reached.append(jnp.issubdtype(leaf.dtype, jnp.floating) and any(used[:count]))
        return passed, reached

    def _layer_leaves(
        self, name: str
    ) -> tuple[dict[tuple[str, ...], Any], frozenset[tuple[str, ...]]]:
        """Return the abstract parameters of one layer of a stack by path, and the paths of those that are trained."""

        def leaves(params: Any) -> dict[tuple[str, ...], Any]:
            stacks = towers_of(params).get(self.name, {}).get("layers", {}).get("runs", {})
            return nnx.traversals.flatten_mapping(stacks.get(name, {}))

        stacked = ":" in name
        every = {
            path: jax.ShapeDtypeStruct(leaf.shape[stacked:], leaf.dtype)
            for path, leaf in leaves(self.model.abstract).items()
        }
        return every, frozenset(leaves(self.trained))

    def kinds(self) -> tuple[int, ...]:
        """Return, for each layer, the first one that is like it."""
        first: dict[Any, int] = {}
        kinds = {}
        for run in self.model.runs[self.name]:
            for name, numbers in run.parts.items():
                leaves, _ = self._layer_leaves(name)
                kind = (
                    nnx.graphdef(self.layers.runs[name]),
                    tuple(leaves.items()),
                    self._windows(run, name),
                    self._is_behind_merger(numbers[0]),
                )
                kinds |= dict.fromkeys(numbers, first.setdefault(kind, numbers[0]))
        return tuple(kinds[number] for number in sorted(kinds))

    def _is_behind_merger(self, number: int) -> bool:
        return 0 < self.merge_after <= number

    def _at(self, number: int) -> tuple[list[Any], Any, list[bool]]:
        """Return the arrays that a layer takes, their structure, and which of them need a gradient."""
        if not self.merge_after:
            return self.passed, self.structure, self.reached
        x, context = jax.tree.unflatten(self.structure, range(len(self.passed)))
        behind = self._is_behind_merger(number)
        context = context.merged if behind else context._replace(merged=None)
        numbers, structure = jax.tree.flatten((x, context))
        passed = [self.passed[n] for n in numbers]
        if behind:
            rows, length, _ = passed[0].shape
            shape = rows, length // self.merged, self.width_behind
            passed[0] = jax.ShapeDtypeStruct(shape, passed[0].dtype)
        return passed, structure, [self.reached[n] for n in numbers]

    def _windows(self, run: LayerStack, name: str) -> tuple[bool, ...]:
        """Return what a part of a stack computes: layers without a window (False), with one (True), or both."""
        kinds = {
            part: {number in self.layers.windowed for number in numbers}
            for part, numbers in run.parts.items()
        }
        # as `apply_stack` chooses masks
        mixed = any(len(of_part) > 1 for of_part in kinds.values())
        return (False, True) if mixed else tuple(kinds[name])

    def ends(self) -> Ends:
        """Trace what stands around the layers."""
        layers_trained = "layers" in towers_of(self.trained).get(self.name, {})
        has_backward = any(self.reached) or layers_trained
        trained = {"params": self.trained} | ({"x": self.inputs.x} if self.upstream else {})
        trained |= {"passed": self.passed[0]} if has_backward else {}

        def around(trained: Any, rest: Any) -> Any:
            params, inputs = rest
            module = self.model.module(merge(params, trained["params"]))
            inputs = inputs._replace(x=trained.get("x", inputs.x))
            with jax.named_scope("entry"):
                x, context = _before(module, self.name, inputs)
            passed = jax.tree.leaves((x, context))
            # Sums stand in for the layers: their output depends on all that they get, so gradients
            # reach each of these arrays.
            x = x + trained.get("passed", 0)
            for array, reached in zip(passed[1:], self.reached[1:], strict=True):
                x = x + array.sum().astype(x.dtype) if reached else x
            x = _as_wide(x[:, :: self.merged], self.width_behind) if self.merge_after else x
            return _after(module, self.name, x, context, inputs), passed

        program = trace_passes(around, trained, (self.model.abstract, self.inputs))
        operations: dict[str, list[Operations]] = {"connector": [], "entry": [], "": []}
        for x in list_operations(program):
            # The first that its scope names; "", which every scope holds, takes the rest.
            operations[next(part for part in operations if part in x.scope)].append(x)
        kinds = self.kinds() if self.layers is not None else ()
        return Ends(
            entry=count_cost(operations["entry"], self.row, self._unit_before),
            exit=count_cost(operations[""], self.row, self._unit),
            connector=count_cost(operations["connector"], self.row, lambda x: "tokens"),
            kinds=kinds,
        )

    def _unit(self, x: Operations) -> str:
        """Return the unit of operations that grow with the row: in a UNet pairs for attention, else images' tokens."""
        return (
            "pairs"
            if self.row.unit == "tokens" and "attention" in x.scope and x.is_product
            else self.row.unit
        )

    def _unit_before(self, x: Operations) -> str:
        return (
            "inputs"
            if "inputs" in self.row.amounts and self.row.length in {*x.shape, *x.sizes}
            else self.row.unit
        )

    def layer(self, number: int, policy: Remat, unscanned: bool) -> Cost:
        """Trace a stack of layers like this one, or it alone."""
        parts = [(run, name) for run in self.model.runs[self.name] for name in run.parts]
        run, name = next((run, name) for run, name in parts if number in run.parts[name])
        layers = 1 if unscanned else MANY
        leaves, trained_paths = self._layer_leaves(name)
        # Parameters of one layer [...] become those of a stack [MANY, ...] of layers like it.
        stacked = {
            path: leaf if unscanned else jax.ShapeDtypeStruct((MANY, *leaf.shape), leaf.dtype)
            for path, leaf in leaves.items()
        }
        passed, structure, reached = self._at(number)
        inputs_reached = {n: leaf for n, leaf in enumerate(passed) if reached[n]}
        if not unscanned and (inputs_reached or trained_paths):
            inputs_reached |= {0: passed[0]}  # what the layer before has made
        trained = {
            "params": {path: stacked[path] for path in trained_paths},
            "passed": inputs_reached,
        }
        graph = nnx.graphdef(self.layers.runs[name])
        stack = LayerStack(0, layers, policy)
        # (True,): all layers have windows. (False, True): every other one stands for a mixture,
        # which a scan computes with both masks stacked, whatever the proportion.
        windows = self._windows(run, name)
        windowed = tuple(range(0, layers, len(windows))) if True in windows else ()

        def apply(stack: LayerStack, params: Any, x: Any, context: Any) -> Any:
            module = nnx.merge(graph, nnx.State(nnx.traversals.unflatten_mapping(params)))
            stored = dict.fromkeys(stack.parts, module)
            return apply_stack(stored, stack, x, context, windowed, False, None, {})[0]

        def of_layers(trained: Any, rest: Any) -> Any:
            params, passed = rest
            x, context = jax.tree.unflatten(
                structure, list((dict(enumerate(passed)) | trained["passed"]).values())
            )
            if context is not None and context.token_inputs is not None:
                of_all = (layers, *context.token_inputs.shape[1:])
                token_inputs = jnp.broadcast_to(context.token_inputs[:1], of_all)
                context = context._replace(token_inputs=token_inputs)
            params = params | trained["params"]
            if unscanned or number + 1 != self.merge_after:
                return apply(stack, params, x, context), None

            # A layer that merges positions makes fewer than it takes: each stands for those that it
            # was made of, so that there is a scan of such layers.
            def merging(x: Any, params: Any) -> Any:
                merged = apply(LayerStack(0, 1, policy), params, x, context)
                return _as_wide(jnp.repeat(merged, self.merged, axis=1), x.shape[-1]), None

            return jax.lax.scan(merging, x, params)

        program = trace_passes(of_layers, trained, (stacked, passed))
        behind = self._is_behind_merger(number)
        row = replace(self.row, pair_share=1 / self.merged**2) if behind else self.row
        cost = count_cost(list_operations(program), row, self._unit, layers)
        for saved in _saved_arrays(program):
            # [MANY, ...]: of one layer, in bytes for each unit of what it grows with.
            unit, rate = self.row.rate_of(saved.size // MANY, "positions")
            rates = cost.host if "host" in str(saved.memory_space).lower() else cost.device
            rates[UNITS.index(unit)] += rate * saved.dtype.itemsize
        return cost


def _as_wide(x: Any, width: int) -> Any:
    """Return an array of so many channels that depends on all of these."""
    if x.shape[-1] == width:
        return x
    return jnp.broadcast_to(x.sum(-1, keepdims=True), (*x.shape[:-1], width))


def _saved_arrays(program: Any) -> Iterator[Any]:
    """List the residuals that the forward scan over a stack's layers saves for backward, stacked over layers."""
    for equation in program.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == MANY:
            if "transpose" not in str(equation.source_info.name_stack):
                yield from (
                    x.aval
                    for x in equation.outvars
                    if type(x) is Var and x.aval.shape[:1] == (MANY,)
                )
        else:
            for inner in inner_programs(equation):
                yield from _saved_arrays(inner)


def ends(key: TowerTrace) -> Ends:
    """Trace what stands around a tower's layers."""
    with for_no_platform():
        return _cached_tower(key).ends()


def layer(key: TowerTrace, number: int, policy: Remat, unscanned: bool) -> Cost:
    """Trace layers like this one under a remat policy. unscanned: the first one, which nothing stands before."""
    with for_no_platform():
        return _cached_tower(key).layer(number, policy, unscanned)


_towers: dict[str, _Tower] = {}


def _cached_tower(key: TowerTrace) -> _Tower:
    """Build a tower to trace, or return one of the last 8, which its other layers are traced on too."""
    text = key.text
    if text not in _towers:
        while len(_towers) >= 8:
            _towers.pop(next(iter(_towers)))
        _towers[text] = _Tower(key)
    return _towers[text]


def module_parameters(model: ModelConfig) -> dict[str, ModuleParameters]:
    """Count the parameters of every module, and of adapters as `<module>.lora`."""
    with for_no_platform():
        built = Model.build(model, jnp.float32)
    axes = nnx.traversals.flatten_mapping(built.axes)
    counts: dict[str, np.ndarray] = {}
    for path, leaf in nnx.traversals.flatten_mapping(built.abstract).items():
        in_layers = "runs" in path
        # A matrix is [..., inputs, outputs], and its inputs have a logical axis; the rows of a
        # table and the taps of a filter have none.
        is_matrix = len(axes[path]) > 1 and axes[path][-2] is not None
        counted = [
            True,
            in_layers,
            is_matrix and (in_layers or "connectors" in path),
            "experts" in axes[path],
        ]
        counts.setdefault(parameter_group(path), np.zeros(4, int))
        counts[parameter_group(path)] += np.array(counted) * leaf.size
    parts = [
        f"{name}{part}" for name in ("llm", *model.item_modules) for part in ("", ".connector")
    ]
    return {
        module: ModuleParameters._make(counts[module].tolist())
        for module in sorted(counts, key=[*parts, *sorted(counts)].index)
    }


def encoding(model: ModelConfig, generator: str) -> Cost:
    """Trace how a VAE encodes an image of a generator in the step, and divide by its positions."""
    config = model.towers[generator]
    positions = math.prod(config.image_size) // config.patch**2
    values = config.input_values
    with for_no_platform():
        built = Model.build(
            with_one_item_module(replace(model.llm, layers=1), generator, config, {}), jnp.bfloat16
        )

        def encode(params: Params, batch: ItemBatch, noise: Any) -> Any:
            return built.module(params).vaes[generator](batch, noise)

        batch = tower_batch(built.config, generator, (1, positions))
        pixels = jax.ShapeDtypeStruct((1, positions, values), np.uint8)
        noise = jax.ShapeDtypeStruct((1, positions, config.patch_values), np.float32)
        program = jax.make_jaxpr(encode)(built.abstract, batch._replace(values=pixels), noise).jaxpr
    row = Row(positions, {"positions": positions}, {"length": PRIME})
    return count_cost(list_operations(program), row, lambda x: "positions")
