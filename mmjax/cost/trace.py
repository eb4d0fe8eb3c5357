"""Trace costs from the program itself, on abstract arrays: no kind of layer is named here.

A tower is traced alone, in parts: what stands before its layers, a layer of each kind, and what
stands behind them. The gradients are those of what is trained there and before, as dead-code
elimination leaves them. Sizes that grow with a row have prime factors of their own, larger than any
width, so one trace tells how everything grows: with q the prime of a row's length, 2 * q**2 * 64
operations are of pairs of positions.

What the program cannot tell:
- Attention by blocks runs as often as a mask says. One pair of blocks counts, for each of its pairs of positions.
- Products that stand for something cheaper, as chunks for the recurrence of a delta net, lie in a scope that says what
  is needed instead (`needs`).
- A kernel for GPUs, and what several devices exchange, are not in the trace, which is of no platform.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Var
from jax.interpreters import partial_eval

from mmjax.batch import TOKEN_FIELDS, ItemBatch, TextBatch
from mmjax.config import AudioConfig, ModelConfig, Remat, UnetConfig, VisionConfig
from mmjax.config.generators import Generator, image_size, row_values, takes_pixels
from mmjax.config.model import layer_positions
from mmjax.cost.operations import Operations, inner_programs, list_operations
from mmjax.cost.rates import UNITS, Cost, Ends, ModuleParameters, TowerTrace
from mmjax.kernels.tiles import MAX_BLOCK
from mmjax.models.decoder import logits_of
from mmjax.models.generation import (
    Draws,
    condition_of,
    flow_errors,
    noised_latents,
    velocity_errors,
)
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model, merge, parameter_group, partition, towers_of
from mmjax.models.multimodal import MultimodalModel
from mmjax.models.stack_scan import LayerStack, apply_stack
from mmjax.parallel.sharding import for_no_platform

MANY = 997  # layers of the stack that stands for a tower's
PRIME = 200_003


def trace_passes(function: Callable[[Any, Any], tuple[Any, Any]], trained: Any, rest: Any) -> Any:
    """Trace `function(trained, rest)` and its gradients with respect to `trained`, without what nobody needs.

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
# rows


@dataclass(frozen=True)
class Row:
    """The row that a tower is traced on."""

    length: int
    amounts: Mapping[str, int]  # of work, by unit
    primes: Mapping[str, int]  # factors of what grows with the length, the images or the blocks
    unit: str = "positions"  # of what grows with the length

    def rate_of(self, count: float, unit: str) -> tuple[str, float]:
        """Tell what a count grows with, and how much for each. unit: the one of the row's length."""
        powers = Counter({name: _power(count, prime) for name, prime in self.primes.items()})
        if self.unit == "tokens":
            # What a row's images have to do with each other, as of one image.
            return unit, count / self.primes["length"] ** max(
                0, powers["length"] - 1
            ) / self.amounts[unit]
        if powers["length"] > 1:
            unit = "pairs"
        elif sum(powers.values()) > 1:
            unit = "taken"
        else:
            unit = next((name for name in ("tokens", "blocks") if powers[name]), unit)
        return unit, count / self.amounts[unit]


def _power(number: int, prime: int) -> int:
    power = 0
    while number and number % prime == 0:
        number //= prime
        power += 1
    return power


def row_of(model: ModelConfig, tower: str) -> Row:
    """Choose a row for a tower."""
    config = {"llm": model.llm, **model.item_modules}[tower]
    if isinstance(config, UnetConfig):
        length = PRIME * config.min_patches
        amounts = {"pairs": length * config.min_patches, "tokens": PRIME * config.condition_tokens}
        return Row(length, amounts, {"length": PRIME}, "tokens")
    if isinstance(config, Generator):
        return _row_of_images(config.min_patches, config.condition_tokens)
    if tower == "llm":
        length = positions = 2 * MAX_BLOCK * PRIME
        return Row(length, {"positions": positions, "pairs": positions**2}, {"length": PRIME})
    stride = config.stride
    multiple = config.chunk or 1 if isinstance(config, AudioConfig) else config.window**2 or 1
    length = math.lcm(stride * MAX_BLOCK, stride * layer_positions(config), multiple) * PRIME
    positions = length // stride
    amounts = {
        "positions": positions,
        "pairs": positions**2,
        "inputs": length,
        "tokens": positions // layer_positions(config),
    }
    return Row(length, amounts, {"length": PRIME})


@lru_cache
def _row_of_images(size: int, tokens: int) -> Row:
    """Choose a row of images of `size` positions or more, whose length, images and blocks have no factor in common."""

    def is_prime(n: int) -> bool:
        return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))

    images = max(PRIME, min(2**24, 2**30 // size)) | 1
    while True:
        # Blocks are one more than images: 2 p, with the images 2 p - 1.
        images += 2
        if not (is_prime(images) and is_prime((images + 1) // 2)):
            continue
        for length in range(size * images + 1, size * (images + 1)):
            if is_prime(length):
                blocks = images + 1
                amounts = {
                    "positions": length,
                    "pairs": length**2,
                    "inputs": length,
                    "tokens": images * tokens,
                }
                amounts |= {"blocks": blocks, "taken": 2 * images * blocks}
                return Row(
                    length, amounts, {"length": length, "tokens": images, "blocks": blocks // 2}
                )


NEEDS = re.compile(r"needs=(\d+)")


def count_cost(
    operations: Iterable[Operations], row: Row, unit: Callable[[Operations], str], layers: int = 1
) -> Cost:
    """Add up operations by unit of work. unit: of those that grow with the row's length. layers: that were traced."""
    cost = Cost.zero()
    instead: dict[str, float] = {}
    for x in operations:
        if x.of_pair:
            place, rate = UNITS.index("pairs"), x.count
        else:
            name, rate = row.rate_of(x.count, unit(x))
            place, rate = UNITS.index(name), rate / layers
        is_backward = "transpose" in x.scope
        if not x.is_product:
            (cost.beside_backward if is_backward else cost.beside_forward)[place] += rate
            continue
        if x.in_float8:
            (cost.float8_backward if is_backward else cost.float8_forward)[place] += rate
        if "rematted_computation" in x.scope:
            cost.again[place] += rate
        else:
            (cost.backward if is_backward else cost.forward)[place] += rate
            if match := NEEDS.search(x.scope):
                instead["backward" if is_backward else "forward"] = float(match[1])
            else:
                (cost.needed_backward if is_backward else cost.needed_forward)[place] += rate
    cost.needed_forward[0] += instead.get("forward", 0)
    cost.needed_backward[0] += 2 * instead.get("forward", 0) * ("backward" in instead)
    return cost


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
    if tower not in config.generators:
        return Inputs(batch, array(row.length, config.llm.width, dtype=model.dtype))
    generator = config.generators[tower]
    images = generator.most_images(row.length)
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
    if isinstance(module, AudioConfig):
        values = array(module.mels, dtype=np.float32)
    elif isinstance(module, VisionConfig):
        values = array(module.patch_values, dtype=np.uint8)
    else:
        values = array(row_values(module), dtype=np.uint8 if takes_pixels(module) else np.float32)
    return ItemBatch(values, array(), array(3), array(), array())


def _before(module: MultimodalModel, tower: str, inputs: Inputs) -> tuple[Any, Any]:
    """Return the first layer's input, and what all layers share."""
    if tower == "llm":
        x, _ = module.embedded(inputs.batch, {})
        return x + inputs.x, module.context("llm", inputs.batch, None)
    if tower in module.encoders:
        return module.encoders[tower].embedded(inputs.batch), module.context(
            tower, inputs.batch, None
        )
    condition = condition_of(module.connectors[tower], inputs.x, inputs.batch, inputs.draws.dropped)
    generator = module.generators[tower]
    if isinstance(generator.config, UnetConfig):
        return condition, None
    x = generator.embedded(noised_latents(inputs.clean, inputs.batch, inputs.draws), inputs.batch)
    return x, generator.context(inputs.batch, inputs.draws.time, condition)


def _after(module: MultimodalModel, tower: str, x: Any, context: Any, inputs: Inputs) -> Any:
    """Return what is made of the last layer's output: the loss, or an encoder's tokens."""
    if tower == "llm":
        hidden, table = module.llm.hidden_and_table(x)
        logits = logits_of(hidden, table, module.llm.config.logit_cap)
        of_target = jnp.take_along_axis(logits, inputs.batch.token[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - of_target
    if tower in module.encoders:
        deeper = range(len(module.connectors[tower].deepstack))
        return module.connected(tower, x, dict.fromkeys(deeper, x), inputs.batch)
    generator = module.generators[tower]
    if isinstance(generator.config, UnetConfig):
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

    def _reached(self) -> tuple[Any, list[bool]]:
        """Return what the layers get, and of each of these arrays whether its gradient is wanted."""
        trained = {"params": self.trained} | ({"x": self.inputs.x} if self.upstream else {})

        def before(trained: Any, rest: Any) -> Any:
            params, inputs = rest
            inputs = inputs._replace(x=trained.get("x", inputs.x))
            return _before(self.model.module(merge(params, trained["params"])), self.name, inputs)

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
                    self._windows(run),
                )
                kinds |= dict.fromkeys(numbers, first.setdefault(kind, numbers[0]))
        return tuple(kinds[number] for number in sorted(kinds))

    def _windows(self, run: LayerStack) -> tuple[bool, ...]:
        """Tell whether layers of a stack have windows, and whether others have none: such a scan takes one of two."""
        return tuple(
            sorted({number in self.layers.windowed for number in range(run.start, run.stop)})
        )

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
            # In the layers' place: their output depends on all that they get.
            x = x + trained.get("passed", 0)
            for array, reached in zip(passed[1:], self.reached[1:], strict=True):
                x = x + array.sum().astype(x.dtype) if reached else x
            return _after(module, self.name, x, context, inputs), passed

        program = trace_passes(around, trained, (self.model.abstract, self.inputs))
        operations: dict[str, list[Operations]] = {"connector": [], "entry": [], "": []}
        for x in list_operations(program):
            operations[next(part for part in operations if part in x.scope)].append(x)
        kinds = self.kinds() if self.layers is not None else ()
        return Ends(
            entry=count_cost(operations["entry"], self.row, self._unit_before),
            exit=count_cost(operations[""], self.row, self._unit),
            connector=count_cost(operations["connector"], self.row, lambda x: "tokens"),
            kinds=kinds,
        )

    def _unit(self, x: Operations) -> str:
        """Tell the unit of what grows with the length: in a UNet, of attention pairs, and else images' tokens."""
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
        stacked = {
            path: leaf if unscanned else jax.ShapeDtypeStruct((MANY, *leaf.shape), leaf.dtype)
            for path, leaf in leaves.items()
        }
        inputs_reached = {n: leaf for n, leaf in enumerate(self.passed) if self.reached[n]}
        if not unscanned and (inputs_reached or trained_paths):
            inputs_reached |= {0: self.passed[0]}  # what the layer before has made
        trained = {
            "params": {path: stacked[path] for path in trained_paths},
            "passed": inputs_reached,
        }
        graph = nnx.graphdef(self.layers.runs[name])
        stack = LayerStack(0, layers, policy)
        windows = self._windows(run)
        windowed = tuple(range(0, layers, len(windows))) if True in windows else ()

        def of_layers(trained: Any, rest: Any) -> Any:
            params, passed = rest
            x, context = jax.tree.unflatten(
                self.structure, list((dict(enumerate(passed)) | trained["passed"]).values())
            )
            module = nnx.merge(
                graph, nnx.State(nnx.traversals.unflatten_mapping(params | trained["params"]))
            )
            stored = dict.fromkeys(stack.parts, module)
            return apply_stack(stored, stack, x, context, windowed, False, None, {})[0], None

        program = trace_passes(of_layers, trained, (stacked, self.passed))
        cost = count_cost(list_operations(program), self.row, self._unit, layers)
        for saved in _saved_arrays(program):
            unit, rate = self.row.rate_of(saved.size // MANY, "positions")
            rates = cost.host if "host" in str(saved.memory_space).lower() else cost.device
            rates[UNITS.index(unit)] += rate * saved.dtype.itemsize
        return cost


def _saved_arrays(program: Any) -> Iterator[Any]:
    """List what the forward scan over the layers of a stack hands to the backward pass, for all layers."""
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
        # The inputs of a matrix have a name; the rows of a table, and the taps of a filter, have
        # none.
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
    config = model.generators[generator]
    positions = math.prod(image_size(config)) // config.patch**2
    values = row_values(config)
    with for_no_platform():
        built = Model.build(
            ModelConfig(replace(model.llm, layers=1), generators={generator: config}), jnp.bfloat16
        )

        def encode(params: Params, batch: ItemBatch, noise: Any) -> Any:
            return built.module(params).vaes[generator](batch, noise)

        batch = tower_batch(built.config, generator, (1, positions))
        pixels = jax.ShapeDtypeStruct((1, positions, values), np.uint8)
        noise = jax.ShapeDtypeStruct((1, positions, config.patch_values), np.float32)
        program = jax.make_jaxpr(encode)(built.abstract, batch._replace(values=pixels), noise).jaxpr
    row = Row(positions, {"positions": positions}, {"length": PRIME})
    return count_cost(list_operations(program), row, lambda x: "positions")
