"""Count FLOPs of a model from the costs that its program has: those that it needs, and those that are executed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import ModelConfig, Remat, Tower
from mmjax.config.model import (
    adapted_modules,
    frozen_modules,
    stacked_towers,
    step_vaes,
)
from mmjax.cost import table
from mmjax.cost.rates import UNITS, Cost, SameModel, TowerTrace
from mmjax.kernels.tiles import padded_width
from mmjax.planning.hardware import SHEET
from mmjax.planning.work import Work, connector_mlps, row_work, useful_work

PAIRS = UNITS.index("pairs")


class Flops(NamedTuple):
    """Floating-point operations of one microbatch; a multiply-add is two."""

    forward: float
    backward: float
    attention: float = 0  # of these: the attention kernel's
    float8_forward: float = 0  # of forward: products in FP8
    float8_backward: float = 0  # of backward: products in FP8

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def float8(self) -> float:
        return self.float8_forward + self.float8_backward

    @property
    def at_one_rate(self) -> Flops:
        """Return FLOPs at one rate: FP8 products count as the FLOPs of other products that would take as long."""
        share = 1 - SHEET.flops / SHEET.float8
        return self._replace(
            forward=self.forward - share * self.float8_forward,
            backward=self.backward - share * self.float8_backward,
            float8_forward=0.0,
            float8_backward=0.0,
        )


# --------------------------------------------------------------------------------------------------
# needed


def model_flops(
    model: ModelConfig, work: Mapping[str, Work], frozen: Set[str], reference: bool = False
) -> dict[str, Flops]:
    """Count the model FLOPs of one microbatch by module.

    Matrix products only, as is usual for MFU: logits of every useful position, with or without a
    loss; a convolution as a product with all its taps; scores and weighted sums of allowed pairs.
    In backward, a product of weights and activations has two gradients of its size: the weights',
    if trainable, and the activations', if anything before them is. `frozen` names modules; their
    adapters are trainable and count as theirs. Towers not in `work` do not run.
    reference: the forward pass runs again without adapters, that of encoders where they have any.
    """
    flops = {}
    for tower, amounts in work.items():
        config = model.towers[tower]
        if config.is_generator:
            # A position attends the condition of its image; executed are those of both images of
            # its block.
            amounts = amounts._replace(blocks=amounts.positions / (2 * config.min_patches))
        layers = len(layer_policies(config))
        trace = tower_trace(model, tower, _running(work), frozen, "dense")
        tower_cost, connector = _whole(trace, [("none", True)] * layers)
        parts = {tower: tower_cost}
        if tower != "llm":
            parts[f"{tower}.connector"] = connector
        for module, cost in parts.items():
            forward = _total(cost.needed_forward, amounts)
            if reference and runs_twice(module, model):
                again = _whole(*_without_adapters(trace, layers))[module != tower]
                forward += _total(again.needed_forward, amounts)
            flops[module] = Flops(forward, _total(cost.needed_backward, amounts))
    return _with_encoding(flops, model, work, elementwise=False)


def tower_trace(
    model: ModelConfig,
    tower: str,
    running: Set[str],
    frozen: Set[str],
    attention: str = "",
    dtype: str = "bfloat16",
) -> TowerTrace:
    """Describe how a tower is traced. attention: instead of the tower's own."""
    return _tower_trace(
        SameModel(model), tower, frozenset(running), frozenset(frozen), attention, dtype
    )


@lru_cache(1024)
def _tower_trace(
    same: SameModel,
    tower: str,
    running: frozenset[str],
    frozen: frozenset[str],
    attention: str,
    dtype: str,
) -> TowerTrace:
    model = same.model
    # Inputs of a generator go through its connector first.
    config = model.towers[tower]
    module = f"{tower}.connector" if config.is_generator else tower
    _, upstream, _ = _gradients(module, model, running, frozen)
    backend = "dense" if config.attention == "dense" else "blockwise"
    return TowerTrace.of(model, tower, frozen, upstream, attention or backend, dtype)


# the policy of each layer, and whether it is compiled by itself
Layers = Sequence[tuple[Remat, bool]]


def _whole(trace: TowerTrace, layers: Layers) -> tuple[Cost, Cost]:
    """Add up the costs of a tower, and return those of its connector."""
    ends = table.ends(trace)
    return _stack(trace, range(len(layers)), layers) + ends.entry + ends.exit, ends.connector


def _stack(trace: TowerTrace, numbers: range, layers: Layers) -> Cost:
    """Add up the costs of these layers of a tower."""
    kinds = table.ends(trace).kinds
    counts: Counter[tuple[int, Remat, bool]] = Counter()
    for number, (policy, unscanned) in zip(numbers, layers, strict=True):
        # With all weights trained the first layer has the gradients that others have.
        key = kinds[number], policy, unscanned and number == 0 and trace.tower in trace.frozen
        counts[key] += 1
    return sum(
        (table.layer(trace, *key).times(count) for key, count in counts.items()), Cost.zero()
    )


def _without_adapters(trace: TowerTrace, layers: int) -> tuple[TowerTrace, Layers]:
    """Return the trace of a tower's forward pass as the frozen reference, without adapters."""
    modules = frozenset({trace.tower, f"{trace.tower}.connector"} - {"llm.connector"})
    plain = replace(trace, model=replace(trace.model, lora={}), frozen=modules, upstream=False)
    return plain, [("none", False)] * layers


def runs_twice(module: str, model: ModelConfig) -> bool:
    """Tell whether a module runs again for the reference: the LLM does, and encoders with adapters."""
    tower = module.partition(".")[0]
    return tower == "llm" or tower in {
        adapted.partition(".")[0] for adapted in adapted_modules(model)
    }


def _with_encoding(
    flops: dict[str, Flops], model: ModelConfig, work: Mapping[str, Work], elementwise: bool
) -> dict[str, Flops]:
    """Add the FLOPs of encoding images in the step to the forward pass of their generators."""
    for name in step_vaes(model):
        if name in flops:
            encoded = _encoding(model, name, work[name], elementwise)
            flops[name] = flops[name]._replace(forward=flops[name].forward + encoded)
    return flops


def _encoding(model: ModelConfig, generator: str, work: Work, elementwise: bool) -> float:
    cost = table.encoding(model, generator)
    rates = cost.needed_forward + elementwise * cost.beside_forward
    return work.inputs * math.fsum(rates)


def step_needed(
    model: ModelConfig,
    text: TextBatch,
    items: Mapping[str, ItemBatch],
    frozen: Set[str],
    share: float = 1.0,
    reference: bool = False,
) -> float:
    """Count the needed FLOPs of a microbatch, forward and backward over all modules, from its (NumPy) arrays.

    share: fraction of the text's items that `items` hold; the others are assumed to cost as much
    per item.
    """
    by_tower = needed_by_tower(model, text, items, frozen, reference)
    return sum(flops / (1 if tower == "llm" else share) for tower, flops in by_tower.items())


def needed_by_tower(
    model: ModelConfig,
    text: TextBatch,
    items: Mapping[str, ItemBatch],
    frozen: Set[str],
    reference: bool = False,
) -> dict[str, float]:
    """Count the needed FLOPs of a microbatch's arrays as `step_needed`, by tower, connectors with their encoder."""
    by_tower: dict[str, float] = {}
    for module, flops in model_flops(
        model, useful_work(model, text, items), frozen, reference
    ).items():
        tower = module.removesuffix(".connector")
        by_tower[tower] = by_tower.get(tower, 0.0) + flops.total
    return by_tower


def needed_gradients(tower: str, model: ModelConfig, frozen: Set[str]) -> frozenset[str]:
    """Return the gradients that a tower's layers compute in a backward pass: of "weights", "adapters" and "inputs"."""
    trainable, upstream, has_adapters = _gradients(
        tower, model, frozenset(stacked_towers(model)), frozen
    )
    gradients = {
        "weights": trainable,
        "adapters": has_adapters,
        "inputs": trainable or upstream or has_adapters,
    }
    return frozenset(part for part, needs_it in gradients.items() if needs_it)


def _running(work: Mapping[str, Work]) -> Set[str]:
    """Return the encoders and generators that have items."""
    return {name for name, w in work.items() if name != "llm" and (w.inputs or w.tokens)}


def _gradients(
    module: str, model: ModelConfig, running: Set[str], frozen: Set[str]
) -> tuple[bool, bool, bool]:
    """Return whether a module is trainable, whether anything that feeds it is, and whether it has adapters."""
    adapters = set(adapted_modules(model))
    tower = module.removesuffix(".connector")
    # An encoder is fed by nothing, its connector by it, the LLM by all that run, a generator's
    # connector by the LLM, whose inputs have the connector's learned queries among them.
    encoders = {name for name in model.encoders if name in running}
    feeding_llm = encoders | {f"{name}.connector" for name in model.item_modules if name in running}
    if module == "llm":
        feeding = feeding_llm
    elif model.towers[tower].is_generator:
        feeding = {"llm", *feeding_llm, *({f"{tower}.connector"} if module == tower else ())}
    else:
        feeding = set() if module == tower else {tower}
    # A frozen module that has adapters feeds gradients like a trainable one.
    return module not in frozen, bool(feeding - (frozen - adapters)), module in adapters


# --------------------------------------------------------------------------------------------------
# executed

# Products of backward attention on what a trace has: a kernel for queries and one for keys each
# compute the scores again and the gradient of the weights, seven products where blocks have five. A
# UNet is traced with dense attention.
KERNEL_PRODUCTS = 7 / 5
UNET_PRODUCTS = {"dense": 1, "blockwise": 5 / 4, "flash": 7 / 4, "auto": 7 / 4}


def executed(
    model: ModelConfig,
    shape: Mapping[str, tuple[int, int]],
    frozen: Set[str],
    logits_again: bool = False,
    pairs: Mapping[str, float] | None = None,
    reference: bool = False,
) -> dict[str, Flops]:
    """Count the FLOPs that the backend runs for one microbatch, by module; `shape` and `pairs` as in `row_work`.

    reference: as in `model_flops`. logits_again: whether backward makes the logits again, of a loss
    in parts of the vocabulary.

    With dense attention in float32, forward plus backward agrees with `cost_analysis()` of the
    compiled gradient to 2% from width 128 upwards. Below, elementwise work weighs more; in bfloat16
    a CPU's conversions add 2%. Of a loss in chunks `cost_analysis()` counts one chunk.
    """
    work = row_work(model, shape, pairs)
    flops = {}
    for tower, amounts in work.items():
        config = model.towers[tower]
        trace = tower_trace(model, tower, _running(work), frozen)
        layers = _compiled_layers(config)
        tower_cost, connector = _whole(trace, layers)
        flops[tower] = _flops_of(tower_cost, amounts, config)
        if tower == "llm" and logits_again:
            flops[tower] = _plus(flops[tower], backward=executed_logits(model, amounts))
        if tower != "llm":
            flops[f"{tower}.connector"] = _flops_of(connector, amounts, config)
        if reference:
            plain = _whole(*_without_adapters(trace, len(layers)))
            for module, cost in zip((tower, f"{tower}.connector"), plain, strict=True):
                if runs_twice(module, model) and module in flops:
                    flops[module] = _with_pass(flops[module], _flops_of(cost, amounts, config))
    return _with_encoding(flops, model, work, elementwise=True)


def _with_pass(flops: Flops, again: Flops) -> Flops:
    """Add a forward pass that nothing is kept of."""
    return _plus(
        flops, forward=again.forward, attention=again.attention, float8_forward=again.float8_forward
    )


def _plus(flops: Flops, **added: float) -> Flops:
    return flops._replace(**{name: getattr(flops, name) + extra for name, extra in added.items()})


def _compiled_layers(config: Tower) -> Layers:
    """Return the policy of every layer, and whether the first is compiled by itself.

    In a scan a layer computes every gradient that another one needs.
    """
    policies = layer_policies(config)
    # as `Model.build` cuts it
    apart = config.is_generator and config.frozen
    unscanned = len(policies) < 2 or policies[0] != policies[1] or apart
    return [(policy, unscanned) for policy in policies]


def _flops_of(cost: Cost, work: Work, config: Tower) -> Flops:
    """Count the executed FLOPs of a tower's part."""
    kernel = config.attention in ("flash", "auto")
    # [3, UNITS]; only attention's products are per pair, so its column is what the kernel changes.
    passes = np.array([cost.forward, cost.backward, cost.again])
    # Of the kernel, heads of 80 channels are computed as 128.
    passes[:, PAIRS] *= _padding(config)
    if not config.is_stack:
        passes[1, PAIRS] *= UNET_PRODUCTS[config.attention]
    elif kernel:
        passes[1, PAIRS] *= KERNEL_PRODUCTS
    forward, backward, again = (_total(rates, work) for rates in passes)
    return Flops(
        forward=forward + _total(cost.beside_forward, work),
        backward=backward + again + _total(cost.beside_backward, work),
        attention=kernel * float(passes[:, PAIRS].sum() * work.pairs),
        float8_forward=_total(cost.float8_forward, work),
        float8_backward=_total(cost.float8_backward, work),
    )


def _total(rates: np.ndarray, work: Work) -> float:
    """Multiply rates by amounts and add up, to the same bits on every processor: all ranks plan by the sums."""
    return math.fsum(rate * amount for rate, amount in zip(rates.tolist(), work, strict=True))


def _padding(config: Tower) -> float:
    """Return by how much the attention kernel widens heads."""
    if not config.is_stack or config.attention not in ("flash", "auto"):
        return 1
    # Of heads whose values are narrower than their keys, the kernel computes both as wide.
    return 2 * padded_width(config.head_width) / (config.head_width + config.value_width)


def stage_flops(
    model: ModelConfig,
    tower: str,
    layers: range,
    policies: Sequence[Remat],
    shape: Mapping[str, tuple[int, int]],
    logits_again: bool = False,
    pairs: Mapping[str, float] | None = None,
    reference: bool = False,
) -> Flops:
    """Count the FLOPs that a stage runs for one microbatch; `shape`, `pairs`, `reference` as in `executed`.

    layers: of the stage. policies: of those that count, all or none: measured times stand for the
    others. logits_again: whether the last layer's backward makes the logits again, of a loss in
    parts of the vocabulary or one that waits for generators.
    """
    config = model.towers[tower]
    work = row_work(model, shape, pairs)
    frozen = frozen_modules(model)
    trace = tower_trace(model, tower, _running(work), frozen)
    first = layers.start == 0
    last = layers.stop >= config.layers
    policies = policies if config.is_stack else ()
    unscanned = len(policies) < 2 or policies[0] != policies[1]
    # Share of the connector that this stage runs: of a generator all of it, before the layers.
    share = float(first)
    if tower != "llm" and not config.is_generator:
        # The connector's MLP, and one more for each layer of a deepstack.
        share = (last + sum(layer in layers for layer in config.deepstack)) / connector_mlps(config)

    def run(trace: TowerTrace, policies: Layers) -> Flops:
        ends = table.ends(trace)
        cost = (
            _stack(trace, layers[: len(policies)], policies)
            + ends.entry.times(first)
            + ends.exit.times(last)
        )
        return _flops_of(cost + ends.connector.times(share), work[tower], config)

    flops = run(trace, [(policy, unscanned) for policy in policies])
    if reference and runs_twice(tower, model):
        flops = _with_pass(flops, run(*_without_adapters(trace, len(policies))))
    if tower in step_vaes(model) and first:
        flops = _plus(flops, forward=_encoding(model, tower, work[tower], elementwise=True))
    if tower == "llm" and last and logits_again:
        return _plus(flops, backward=executed_logits(model, work["llm"]))
    return flops


def layer_flops(
    model: ModelConfig, tower: str, shape: Mapping[str, tuple[int, int]], reference: bool = False
) -> list[Flops]:
    """Count the FLOPs of every layer of a tower; the first and last include embedding, head and connector.

    shape, reference: as in `executed`. A UNet is one layer.
    """
    config = model.towers[tower]
    policies = layer_policies(config)
    count = config.layers
    kinds = table.ends(
        tower_trace(model, tower, _running(row_work(model, shape)), frozen_modules(model))
    ).kinds
    flops: dict[object, Flops] = {}  # layers of a kind are counted once
    keys = []
    for layer in range(count):
        key = (
            *kinds[layer : layer + 1],
            *policies[layer : layer + 1],
            layer == 0,
            layer == count - 1,
            layer in config.deepstack,
        )
        if key not in flops:
            flops[key] = stage_flops(
                model,
                tower,
                range(layer, layer + 1),
                policies[layer : layer + 1],
                shape,
                # Of generators in other stages the loss waits for their backward pass.
                logits_again=model.makes_images,
                reference=reference,
            )
        keys.append(key)
    return [flops[key] for key in keys]


def executed_logits(model: ModelConfig, work: Work) -> float:
    """Count the forward FLOPs of all logits, which a loss in parts of the vocabulary recomputes in backward."""
    trace = tower_trace(model, "llm", frozenset(model.item_modules), frozen_modules(model))
    return _flops_of(table.ends(trace).exit, work, model.llm).forward


def recompute_flops(
    model: ModelConfig, tower: str, work: Work, policy: Remat, dtype: str = "bfloat16"
) -> float:
    """Count the FLOPs of recomputing one layer's forward pass in backward, under a remat policy; of layers the mean.

    dtype: of the activations, which changes no count: that of other costs of the layer needs no
    trace of its own.
    """
    config = model.towers[tower]
    trace = tower_trace(
        model, tower, frozenset(model.item_modules), frozen_modules(model), dtype=dtype
    )

    def backward(policy: Remat) -> float:
        return _flops_of(mean_layer(trace, policy), work, config).backward

    return backward(policy) - backward("none") if policy != "none" else 0.0


def mean_layer(trace: TowerTrace, policy: Remat) -> Cost:
    """Return the costs of a layer of a tower, averaged over its kinds."""
    layers = len(table.ends(trace).kinds)
    return _stack(trace, range(layers), [(policy, False)] * layers).times(1 / max(1, layers))


def attention_flops(model: ModelConfig, tower: str, work: Work) -> float:
    """Count the FLOPs of attention in the forward pass of one layer; of layers the mean."""
    trace = tower_trace(model, tower, frozenset(model.item_modules), frozen_modules(model))
    return _padding(model.towers[tower]) * float(
        mean_layer(trace, "none").forward[PAIRS] * work.pairs
    )


def layer_policies(config: Tower) -> tuple[Remat, ...]:
    """Return the remat policy of each layer, "none" for an `auto` that is not resolved yet; none of a UNet's blocks."""
    if not config.is_stack:
        return ()
    if isinstance(config.remat, tuple):
        return config.remat
    return ("none" if config.remat == "auto" else config.remat,) * config.layers
