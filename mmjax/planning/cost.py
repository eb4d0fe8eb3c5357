"""Count the floating-point operations of a microbatch: those needed, and those executed.

`needed` is what the mathematics asks for: matrix products on useful positions, attention on allowed pairs, and backward
only what some trainable parameter wants. Divided by time and peak it is MFU. `executed` is what the backend runs: full
rows, every score of dense attention or every block that blockwise attention may visit, recomputation, and elementwise
work as XLA counts it. Both come module by module: "llm", "<encoder>" and "<encoder>.connector".
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np

from mmjax.adapters import adapted_modules, adapter_sizes, frozen_by_adapters
from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import DecoderConfig, LearnedGrid, ModelConfig, Remat, StoredTable, StretchedGrid, VisionConfig
from mmjax.planning.adapter_work import AdapterWork, adapter_work
from mmjax.planning.elementwise import LOGITS, connector_elementwise, layer_elementwise, tower_elementwise
from mmjax.planning.work import (
    CONV_STRIDE,
    CONV_TAPS,
    Encoder,
    Work,
    connector_weights,
    layer_of,
    layer_positions,
    merged_positions,
    norm_parameters,
    row_work,
    streams,
    useful_work,
)


class Flops(NamedTuple):
    """Floating-point operations of one microbatch; a multiply-add is two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


class Products(NamedTuple):
    """Multiply-adds of one module's forward pass. Their gradients differ, so they are kept apart."""

    data: int  # weights times data, which has no gradient
    weights: int  # weights times activations
    attention: int  # activations times activations


def parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of every module, exactly; those of its adapters apart, as `<module>.lora`."""
    llm = model.llm
    counts = {"llm": llm.layers * layer_of(llm).parameters + llm.width + (2 - llm.tied) * llm.vocab * llm.width}
    for name, encoder in model.encoders.items():
        c, width = encoder.connector, encoder.width
        if isinstance(encoder, VisionConfig):
            embed, axes = _patch_embedding(encoder), 2
            scale_alone = encoder.head_norm_kind == "rms"
            norms = encoder.head_norm * (width if scale_alone else 2 * width)
        else:
            table = encoder.positions.positions if isinstance(encoder.positions, StoredTable) else 0
            embed, axes = (CONV_TAPS * (encoder.mels + width) + 2 + table) * width, 1
            norms = norm_parameters(encoder)
        counts[name] = embed + encoder.layers * layer_of(encoder).parameters + norms
        merged = merged_positions(encoder) * width
        norm = {"none": 0, "layer": 2 * width, "rms": width, "merged_layer": 2 * merged}[c.norm]
        biases = ("up" in c.biases) * c.mlp_width + ("down" in c.biases) * llm.width
        mlp = connector_weights(encoder, llm.width) + biases
        deeper = (streams(encoder) - 1) * (2 * merged + mlp)
        counts[f"{name}.connector"] = norm + mlp + deeper + (axes * c.position_grid + c.newline) * llm.width
    return counts | adapter_sizes(model)


def _patch_embedding(c: VisionConfig) -> int:
    """Parameters before the first layer."""
    learned = c.positions.rows * c.positions.columns + c.class_token if isinstance(c.positions, LearnedGrid) else 0
    learned += c.positions.side**2 if isinstance(c.positions, StretchedGrid) else 0
    vectors = c.embed_bias + c.class_token + learned
    return (c.frames * c.patch**2 * c.channels + vectors) * c.width + c.embed_norm * norm_parameters(c)


# ------------------------------------------------------------------------------------------------------------ needed


def needed(model: ModelConfig, work: Mapping[str, Work], frozen: Set[str]) -> dict[str, Flops]:
    """FLOPs that the mathematics of one microbatch needs, by module.

    Matrix products alone, as everyone's MFU: the logits of every useful position, with or without a loss; a convolution
    as a product with all its taps; the scores and the weighted sums of allowed pairs. Backward, a product of weights
    and activations has two gradients of its own size: that of the weights where they are trainable, that of the
    activations where something trainable stands before them. `frozen` names modules, whose adapters are trainable all
    the same and count as their module's. Towers that are not in `work` do not run.
    """
    flops = {}
    for module, p in _products(model, work, frozen).items():
        trainable, upstream, adapted = _gradients(module, model, _running(work), frozen)
        own = _adapter_work(module, model, work, trainable or upstream, True)
        backward = trainable * (p.data + p.weights) + own.backward
        if trainable or upstream or adapted:
            backward += p.weights - own.spared_weights + 2 * p.attention - own.spared_attention
        flops[module] = Flops(2 * (p.data + p.weights + p.attention + own.forward), 2 * backward)
    return flops


def _adapter_work(
    module: str, model: ModelConfig, work: Mapping[str, Work], reached: bool, spares: bool
) -> AdapterWork:
    tower = module.removesuffix(".connector")
    queries = layer_of(model.llm if tower == "llm" else model.encoders[tower]).queries
    return adapter_work(module, model, work[tower], reached, spares, queries * work[tower].pairs)


def step_needed(
    model: ModelConfig, text: TextBatch, items: Mapping[str, ItemBatch], frozen: Set[str], share: float = 1.0
) -> float:
    """Needed FLOPs of a microbatch, forward and backward over all modules, from its (NumPy) arrays.

    share: of the text's items that `items` are; the others are taken to cost as much.
    """
    found = needed(model, useful_work(model, text, items), frozen)
    return float(sum(f.total / (1 if module == "llm" else share) for module, f in found.items()))


def mfu(needed_flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation; `peak` is the FLOP/s of all devices together."""
    return needed_flops / (seconds * peak)


def frozen_modules(model: ModelConfig) -> frozenset[str]:
    """The modules that the config freezes; their adapters are trained all the same."""
    parts = {"llm": model.llm.frozen}
    for name, encoder in model.encoders.items():
        parts |= {name: encoder.frozen, f"{name}.connector": encoder.connector.frozen}
    return frozenset(module for module, frozen in parts.items() if frozen) | frozen_by_adapters(model)


def wanted_gradients(tower: str, model: ModelConfig, frozen: Set[str]) -> frozenset[str]:
    """Return the gradients that a tower's layers compute in a backward pass: of "weights", "adapters" and "inputs"."""
    trainable, upstream, adapted = _gradients(tower, model, frozenset(model.encoders), frozen)
    some = trainable or upstream or adapted
    parts = {"weights": trainable, "adapters": adapted, "inputs": some}
    return frozenset(part for part, wanted in parts.items() if wanted)


def _running(work: Mapping[str, Work]) -> Set[str]:
    """The encoders that have items."""
    return {name for name, w in work.items() if name != "llm" and w.inputs}


def _gradients(module: str, model: ModelConfig, running: Set[str], frozen: Set[str]) -> tuple[bool, bool, bool]:
    """Return whether a module is trainable, whether anything that feeds it is, and whether it has adapters."""
    adapters = adapted_modules(model)
    tower = module.removesuffix(".connector")
    before = set() if module == tower else {tower}
    if module == "llm":
        encoders = [name for name in model.encoders if name in running]
        before = {*encoders, *(f"{name}.connector" for name in encoders)}
    return module not in frozen, bool(before - (frozen - set(adapters))), module in adapters


def _products(model: ModelConfig, work: Mapping[str, Work], frozen: Set[str]) -> dict[str, Products]:
    """Multiply-adds of every module's forward pass."""
    products = {}
    for name, w in work.items():
        config = model.llm if name == "llm" else model.encoders[name]
        layer = layer_of(config)
        weights = config.layers * layer.weights * w.positions
        attention = config.layers * 2 * layer.queries * w.pairs  # scores, and the weighted sum of values
        if isinstance(config, DecoderConfig):
            products[name] = Products(0, weights + config.vocab * config.width * w.positions, attention)
            continue
        if isinstance(config, VisionConfig):
            data = config.frames * config.patch**2 * config.channels * config.width * w.inputs
        else:
            data = CONV_TAPS * config.mels * config.width * w.inputs
            weights += CONV_TAPS * config.width**2 * w.positions
        products[name] = Products(data, weights, attention)
        # Without a norm before it, the first matrix of a connector is the first thing that may want a gradient.
        whole, after = connector_weights(config, model.llm.width), config.connector.mlp_width * model.llm.width
        first = (whole - after) * (config.connector.norm == "none" and name in frozen)
        products[f"{name}.connector"] = Products(first * w.tokens, (streams(config) * whole - first) * w.tokens, 0)
    return products


# ---------------------------------------------------------------------------------------------------------- executed


def executed(
    model: ModelConfig, shape: Mapping[str, tuple[int, int]], frozen: Set[str], loss_chunks: int = 1
) -> dict[str, Flops]:
    """FLOPs that the backend runs for one microbatch of this shape, by module; `shape` as in `row_work`.

    With dense attention in float32, forward plus backward is what `cost_analysis()` of the compiled gradient says, to
    2%, from width 128 upwards. Below, elementwise work weighs more; in bfloat16 a CPU's conversions add 2%. Of a loss
    in chunks, which makes its logits again in backward, `cost_analysis()` counts one chunk.
    """
    work = row_work(model, shape)
    flops = {}
    for module, p in _products(model, work, frozen).items():
        trainable, upstream, adapted = _gradients(module, model, _running(work), frozen)
        some, tower = trainable or upstream or adapted, module.removesuffix(".connector")
        config = model.llm if module == "llm" else model.encoders[tower]
        # Blockwise attention keeps no scores: a fifth product in its backward pass computes them again.
        attention = 5 * p.attention // 2 if config.attention == "blockwise" else 2 * p.attention
        own = _adapter_work(module, model, work, trainable or upstream, module != tower or _first_alone(config))
        attention -= own.spared_attention if config.attention == "dense" else 0
        backward = trainable * (p.data + p.weights) + some * (p.weights - own.spared_weights + attention) + own.backward
        if module == tower:
            forward_ops, backward_ops = tower_elementwise(config, work[tower])
            again = sum(recomputed(config, work[tower], policy) for policy in policies_of(config))
            if module == "llm" and loss_chunks > 1:
                again += executed_logits(model, work["llm"])
        else:
            forward_ops, backward_ops = connector_elementwise(config, model.llm.width, work[tower])
            again = 0
        backward = 2 * backward + some * (backward_ops + again)
        flops[module] = Flops(2 * (p.data + p.weights + p.attention + own.forward) + forward_ops, backward)
    return flops


def relative_cost(model: ModelConfig, length: int = 128, frozen: Set[str] = frozenset()) -> np.ndarray:
    """Executed FLOPs of one more row position of the LLM and of each encoder (with its connector), float64 `[modules]`.

    Attention makes it grow with the row: this is the cost at rows of about `length` positions.
    """
    steps = {name: CONV_STRIDE * layer_positions(encoder) for name, encoder in model.encoders.items()}
    short = {"llm": (1, 1)} | {name: (1, step) for name, step in steps.items()}
    costs = []
    for name, (_, step) in short.items():
        half = max(1, length // (2 * step)) * step
        # A quadratic's slope at 2 * half is its rise from half to three halves, divided by the way. The other modules
        # run, because they decide what needs a gradient, and cancel.
        low, high = (
            sum(f.total for f in executed(model, {**short, name: (1, n)}, frozen).values()) for n in (half, 3 * half)
        )
        costs.append((high - low) / (2 * half))
    return np.array(costs)


def executed_logits(model: ModelConfig, work: Work) -> int:
    """FLOPs of all logits, forward: what a loss in chunks makes again in backward."""
    return (2 * model.llm.width + LOGITS[0]) * model.llm.vocab * work.positions


def recomputed(config: DecoderConfig | Encoder, work: Work, policy: Remat) -> int:
    """FLOPs that backward spends on one layer's forward pass again, by its remat policy.

    The last product of a layer is never computed again: no gradient needs its value. The output of attention, where
    it is kept, spares blockwise attention. Dense attention computes both of its products again, the second because
    the gradient of the softmax's sum needs the output before division; blockwise keeps that sum.
    """
    layer = layer_of(config)
    kept = {
        "products": layer.weights,
        "offload": layer.weights,
        "attention_mlp": layer.width * (layer.queries + layer.mlp),
        "attention": layer.width * layer.mlp,
        "full": layer.width * layer.mlp,
    }
    if policy == "none":
        return 0
    spared = config.attention == "blockwise" and policy != "full"
    attention = 0 if spared else 2 * 2 * layer.queries * work.pairs
    return 2 * (layer.weights - kept[policy]) * work.positions + attention + layer_elementwise(config, work)[0]


def _first_alone(config: DecoderConfig | Encoder) -> bool:
    """Return whether the first layer is in no scan with others."""
    policies = policies_of(config)
    return len(policies) < 2 or policies[0] != policies[1]


def policies_of(config: DecoderConfig | Encoder) -> tuple[Remat, ...]:
    """The remat policy of each layer; where none is decided yet, none."""
    if isinstance(config.remat, tuple):
        return config.remat
    return ("none" if config.remat == "auto" else config.remat,) * config.layers
