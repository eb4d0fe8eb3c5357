"""Count FLOPs of a model: those that it needs, those that are executed, and those of adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import (
    AudioConfig,
    DecoderConfig,
    DiffusionTransformerConfig,
    LearnedGrid,
    ModelConfig,
    Remat,
    UnetConfig,
    VisionConfig,
)
from mmjax.config.generators import Tower, image_size
from mmjax.config.model import (
    Sizes,
    adapted_modules,
    adapters_by_layer,
    frozen_modules,
    layer_count,
    linear_layers,
    module_of_layer,
    step_vaes,
    towers_of,
    with_changes,
)
from mmjax.kernels.tiles import padded_width
from mmjax.planning.diffusion_work import (
    attention_gradients,
    diffusion_adapters,
    diffusion_products,
    executed_cross,
    recomputed_products,
)
from mmjax.planning.elementwise import LOGITS, connector_elementwise, layer_elementwise, tower_elementwise
from mmjax.planning.unet import unet_executed, unet_flops, unets
from mmjax.planning.vae import vae_flops
from mmjax.planning.work import (
    AdapterWork,
    Products,
    Work,
    connector_mlps,
    connector_weights,
    head_width,
    layer_positions,
    layer_sizes,
    layers_of_connector,
    row_work,
    stem_products,
    useful_work,
)


class Flops(NamedTuple):
    """Floating-point operations of one microbatch; a multiply-add is two."""

    forward: int
    backward: int
    attention: float = 0  # of these: the attention kernel's

    @property
    def total(self) -> int:
        return self.forward + self.backward


# ------------------------------------------------------------------------------------------------------------ needed


def model_flops(
    model: ModelConfig, work: Mapping[str, Work], frozen: Set[str], reference: bool = False
) -> dict[str, Flops]:
    """Count the model FLOPs of one microbatch by module.

    Matrix products only, as is usual for MFU: logits of every useful position, with or without a loss; a convolution as
    a product with all its taps; scores and weighted sums of allowed pairs. In backward, a product of weights and
    activations has two gradients of its size: the weights', if trainable, and the activations', if anything before them
    is. `frozen` names modules; their adapters are trainable and count as theirs. Towers not in `work` do not run.
    reference: the forward pass runs again without adapters, that of encoders where they have any.
    """
    flops = {}
    for module, p in _products(model, work, frozen).items():
        trainable, upstream, has_adapters = _gradients(module, model, _running(work), frozen)
        # MFU counts what is needed, whatever a scan then computes in vain.
        lora = adapter_work(module, model, work, trainable, upstream, spares=True)
        backward = trainable * (p.data + p.weights + 2 * p.of_time) + lora.backward
        if trainable or upstream or has_adapters:
            # With any trainable parameter here or before, gradients flow through the activations.
            backward += p.weights - lora.spared_weights - p.spared_weights + 2 * (p.attention + p.cross + p.recurrence)
            backward -= lora.spared_attention + p.spared_attention
        forward = p.data + p.of_time + p.weights + p.attention + p.cross + p.recurrence
        forward += lora.forward + forward * (reference and _runs_twice(module, model))
        flops[module] = Flops(2 * forward, 2 * backward)
    for name, unet in _running_unets(model, work).items():
        trainable, upstream, _ = _gradients(name, model, _running(work), frozen)
        flops[name] = Flops(*unet_flops(unet, work[name].tokens // unet.queries, trainable, upstream))
    return _with_encoding(flops, model, work, elementwise=False)


def _runs_twice(module: str, model: ModelConfig) -> bool:
    """Tell whether a module runs again for the reference: the LLM does, and encoders with adapters."""
    tower = module.partition(".")[0]
    return tower == "llm" or tower in {adapted.partition(".")[0] for adapted in adapted_modules(model)}


def _with_encoding(
    flops: dict[str, Flops], model: ModelConfig, work: Mapping[str, Work], elementwise: bool
) -> dict[str, Flops]:
    """Add what encoding images in the step takes to the forward pass of their generators."""
    for name, vae in step_vaes(model).items():
        if name in flops:
            generator = model.generators[name]
            size = image_size(generator)
            images = work[name].inputs * generator.patch**2 // math.prod(size)
            encoded = images * vae_flops(vae, size, elementwise)
            flops[name] = flops[name]._replace(forward=flops[name].forward + encoded)
    return flops


def _running_unets(model: ModelConfig, work: Mapping[str, Work]) -> dict[str, UnetConfig]:
    return {name: unet for name, unet in unets(model).items() if name in work}


def step_needed(
    model: ModelConfig,
    text: TextBatch,
    items: Mapping[str, ItemBatch],
    frozen: Set[str],
    share: float = 1.0,
    reference: bool = False,
) -> float:
    """Count the needed FLOPs of a microbatch, forward and backward over all modules, from its (NumPy) arrays.

    share: fraction of the text's items that `items` hold; the others are assumed to cost as much per item.
    """
    by_tower = needed_by_tower(model, text, items, frozen, reference)
    return sum(flops / (1 if tower == "llm" else share) for tower, flops in by_tower.items())


def needed_by_tower(
    model: ModelConfig, text: TextBatch, items: Mapping[str, ItemBatch], frozen: Set[str], reference: bool = False
) -> dict[str, float]:
    """Count the needed FLOPs of a microbatch's arrays as `step_needed`, by tower, connectors with their encoder."""
    by_tower: dict[str, float] = {}
    for module, flops in model_flops(model, useful_work(model, text, items), frozen, reference).items():
        tower = module.removesuffix(".connector")
        by_tower[tower] = by_tower.get(tower, 0.0) + flops.total
    return by_tower


def needed_gradients(tower: str, model: ModelConfig, frozen: Set[str]) -> frozenset[str]:
    """Return the gradients that a tower's layers compute in a backward pass: of "weights", "adapters" and "inputs"."""
    trainable, upstream, has_adapters = _gradients(tower, model, frozenset(towers_of(model)), frozen)
    gradients = {"weights": trainable, "adapters": has_adapters, "inputs": trainable or upstream or has_adapters}
    return frozenset(part for part, needs_it in gradients.items() if needs_it)


def _running(work: Mapping[str, Work]) -> Set[str]:
    """Return the encoders and generators that have items."""
    return {name for name, w in work.items() if name != "llm" and w.inputs}


def _gradients(module: str, model: ModelConfig, running: Set[str], frozen: Set[str]) -> tuple[bool, bool, bool]:
    """Return whether a module is trainable, whether anything that feeds it is, and whether it has adapters."""
    adapters = set(adapted_modules(model))
    tower = module.removesuffix(".connector")
    # An encoder is fed by nothing, its connector by it, the LLM by all that run, a generator's connector by the LLM,
    # whose inputs have the connector's learned queries among them.
    encoders = {name for name in model.encoders if name in running}
    feeding_llm = encoders | {f"{name}.connector" for name in model.item_modules if name in running}
    if module == "llm":
        feeding = feeding_llm
    elif tower in model.generators:
        feeding = {"llm", *feeding_llm, *({f"{tower}.connector"} if module == tower else ())}
    else:
        feeding = set() if module == tower else {tower}
    # A frozen module that has adapters feeds gradients like a trainable one.
    return module not in frozen, bool(feeding - (frozen - adapters)), module in adapters


def _products(model: ModelConfig, work: Mapping[str, Work], frozen: Set[str]) -> dict[str, Products]:
    """Count the multiply-adds of every module's forward pass, those of UNets aside."""
    products = {}
    for name, w in work.items():
        config = model.generators.get(name) or towers_of(model)[name]
        if isinstance(config, DiffusionTransformerConfig):
            trainable, upstream, _ = _gradients(name, model, _running(work), frozen)
            products[name] = diffusion_products(config, w, trainable, upstream, adapter_ranks(model, name))
        if name in model.generators:
            matrices = connector_weights(model, name)
            rows, columns = next(iter(layers_of_connector(model, name).values()))
            _, upstream, _ = _gradients(f"{name}.connector", model, _running(work), frozen)
            first = rows * columns * (config.connector.norm == "none" and not upstream)
            products[f"{name}.connector"] = Products(first * w.tokens, (matrices - first) * w.tokens, 0)
            continue
        layer = layer_sizes(config)
        # Per position each element of a matrix is one multiply-add.
        weights = round(config.layers * layer.weights) * w.positions
        attention = config.layers * 2 * layer.attended * w.pairs  # scores, and the weighted sum of values
        if isinstance(config, DecoderConfig):
            weights += config.vocab * config.width * w.positions
            recurrence, chunked = (round(config.layers * x) * w.positions for x in (layer.recurrence, layer.chunked))
            products[name] = Products(0, weights, attention, recurrence, chunked)
            continue
        if isinstance(config, VisionConfig):
            grid = config.positions
            interpolated = isinstance(grid, LearnedGrid) and grid.interpolation != "none"
            cells = grid.rows * grid.columns if interpolated else 0
            data = (config.frames * config.patch**2 * config.channels + cells) * config.width * w.inputs
        else:
            data, later = stem_products(config, w)
            weights += later
        products[name] = Products(data, weights, attention)
        # Behind a frozen encoder, and without a norm, a connector's first matrix is the first trainable thing: its
        # input is data.
        matrices = connector_weights(model, name)
        rows, columns = next(iter(layers_of_connector(model, name).values()))
        first = rows * columns * (config.connector.norm == "none" and name in frozen)
        products[f"{name}.connector"] = Products(
            first * w.tokens, (connector_mlps(config) * matrices - first) * w.tokens, 0
        )
    return products


# ---------------------------------------------------------------------------------------------------------- executed


def executed(
    model: ModelConfig,
    shape: Mapping[str, tuple[int, int]],
    frozen: Set[str],
    loss_chunks: int = 1,
    pairs: Mapping[str, float] | None = None,
    reference: bool = False,
) -> dict[str, Flops]:
    """Count the FLOPs that the backend runs for one microbatch, by module; `shape` and `pairs` as in `row_work`.

    reference: as in `model_flops`.

    With dense attention in float32, forward plus backward agrees with `cost_analysis()` of the compiled gradient to 2%
    from width 128 upwards. Below, elementwise work weighs more; in bfloat16 a CPU's conversions add 2%. Of a loss in
    chunks, which recomputes its logits in backward, `cost_analysis()` counts one chunk.
    """
    work = row_work(model, shape, pairs)
    flops = {}
    for module, p in _products(model, work, frozen).items():
        trainable, upstream, has_adapters = _gradients(module, model, _running(work), frozen)
        has_backward = trainable or upstream or has_adapters
        tower = module.removesuffix(".connector")
        config = {**towers_of(model), **model.generators}[tower]
        flash = config.attention in ("flash", "auto")
        policies: tuple[Remat, ...] = ()  # of a connector, which has no layers
        if module == tower:
            policies = layer_policies(config)
            p = p._replace(attention=p.attention * _padding(config))
        attention = _ATTENTION_PRODUCTS[config.attention] * p.attention // 2
        # If the first two layers have one policy they are one scan, whose body computes every gradient for all of them.
        apart = isinstance(config, DiffusionTransformerConfig) and config.frozen  # as `Model.build` cuts it
        unscanned = len(policies) < 2 or policies[0] != policies[1] or apart  # the first layer
        lora = adapter_work(module, model, work, trainable, upstream, spares=unscanned)
        # The blockwise kernel computes the gradients of queries, keys and values together, needed or not.
        attention -= lora.spared_attention if config.attention == "dense" else 0
        backward = trainable * (p.data + p.weights + 2 * p.of_time) + lora.backward
        # A chunk's forward pass runs again in backward, under any policy.
        backward += has_backward * (p.weights - lora.spared_weights + attention + 3 * p.chunked)
        recompute = again = cross = 0
        if module == tower:
            forward_ops, backward_ops = tower_elementwise(config, work[tower])
            # Only layers are recomputed by policy; connectors and embeddings keep what they need.
            recompute = sum(recompute_flops(config, work[tower], policy, trainable) for policy in policies)
            again = sum(recomputed_attention(config, work[tower], policy) for policy in policies)
            if module == "llm" and loss_chunks > 1:
                recompute += executed_logits(model, work["llm"])
            if isinstance(config, DiffusionTransformerConfig):
                cross, cross_backward = executed_cross(config, work[tower], trainable)
                backward += has_backward * cross_backward
                if unscanned and not trainable and config.layers:
                    # Of the first layer there is but the gradient of the condition, and of adapters.
                    needed = attention_gradients(adapter_ranks(model, tower))
                    spared = (4 - needed) if config.attention == "dense" else 4 * (not needed)
                    backward -= has_backward * (p.spared_weights + spared * attention // (4 * config.layers))
                    backward_ops -= (not needed) * layer_elementwise(config, work[tower])[1]
            if isinstance(config, AudioConfig) and config.stem_width:  # which keeps its input alone
                recompute += trainable * 2 * sum(stem_products(config, work[tower]))
        else:
            forward_ops, backward_ops = connector_elementwise(config, model.llm.width, work[tower])
        backward = 2 * backward + has_backward * (backward_ops + recompute)
        passes = 1 + (reference and _runs_twice(module, model))
        forward = passes * (2 * (p.data + p.of_time + p.weights + p.attention + cross + p.chunked) + forward_ops)
        forward += 2 * lora.forward
        kernel = flash * (passes * 2 * p.attention + has_backward * (2 * attention + again))
        flops[module] = Flops(forward, backward, kernel)
    for name, unet in _running_unets(model, work).items():
        trainable, upstream, _ = _gradients(name, model, _running(work), frozen)
        flops[name] = Flops(*unet_executed(unet, work[name].tokens // unet.queries, trainable, upstream))
    return _with_encoding(flops, model, work, elementwise=True)


def stage_flops(
    model: ModelConfig,
    tower: str,
    layers: range,
    policies: Sequence[Remat],
    shape: Mapping[str, tuple[int, int]],
    loss_chunks: int = 1,
    pairs: Mapping[str, float] | None = None,
) -> Flops:
    """Count the FLOPs that a pipeline stage runs for one microbatch; `shape` and `pairs` as in `executed`.

    layers: of the stage. policies: of those that count, all or none: measured times stand for the others.
    """
    config = {**towers_of(model), **model.generators}[tower]
    if isinstance(config, UnetConfig):
        flops = executed(model, shape, frozen_modules(model))
        forward, backward, _ = np.add(flops[tower], flops[f"{tower}.connector"])
        return Flops(forward, backward, flops[tower].attention)
    if tower == "llm" and model.generators:
        loss_chunks = max(loss_chunks, 2)  # the loss waits for the generator's backward pass, and makes logits again
    last = layers.stop == config.layers
    part = {"layers": len(policies), "remat": tuple(policies)}
    for kind in ("delta_net", "experts") if tower == "llm" else ():
        if policies and (section := getattr(model.llm, kind)):
            part[kind] = replace(section, layers=tuple(n for n, i in enumerate(layers) if i in section.layers))
    changed = with_changes(model, {tower: part})
    # As of a whole tower of so few layers, so logits are taken off where others compute them.
    flops = executed(changed, shape, frozen_modules(model), loss_chunks, pairs)
    forward, backward, attention = flops[tower]
    if tower == "llm" and not last:
        logits = executed_logits(model, row_work(model, shape)["llm"])
        return Flops(max(0, forward - logits), max(0, backward - 2 * logits), attention)
    if tower in model.generators:
        share = layers.start == 0  # the connector stands before the layers
    if tower in model.encoders:
        # The connector's MLP, and one more for each layer of a deepstack.
        deepstack = config.deepstack if isinstance(config, VisionConfig) else ()
        share = (last + sum(layer in layers for layer in deepstack)) / connector_mlps(config)
    if tower != "llm":
        connector = flops[f"{tower}.connector"]
        return Flops(forward + share * connector.forward, backward + share * connector.backward, attention)
    return Flops(forward, backward, attention)


def relative_cost(
    model: ModelConfig, length: int = 128, frozen: Set[str] = frozenset(), reference: bool = False
) -> np.ndarray:
    """Count executed FLOPs per additional row position of each tower with its connector, `[towers]`.

    float64. Attention makes it grow with the row: this is the cost at rows of about `length` positions.
    """
    strides = {name: e.stride if isinstance(e, AudioConfig) else 1 for name, e in model.encoders.items()}
    steps = {name: strides[name] * layer_positions(encoder) for name, encoder in model.encoders.items()}
    steps |= {name: generator.min_patches for name, generator in model.generators.items()}
    # The other modules run on the shortest row that they can have.
    short = {"llm": (1, 1)} | {name: (1, step) for name, step in steps.items()}
    costs = []
    for name, (_, step) in short.items():
        # Rows must be whole steps, so the lengths are h and 3 h for a multiple h of the step near length / 2.
        half = max(1, length // (2 * step)) * step
        # The derivative of a quadratic f at 2h is (f(3h) - f(h)) / 2h, exactly. The other modules run as well, because
        # they decide what needs a gradient, and cancel.
        low, high = (
            sum(f.total for f in executed(model, {**short, name: (1, n)}, frozen, reference=reference).values())
            for n in (half, 3 * half)
        )
        costs.append((high - low) / (2 * half))
    return np.array(costs)


def executed_logits(model: ModelConfig, work: Work) -> int:
    """Count the forward FLOPs of all logits, which a loss in chunks recomputes in backward."""
    return (2 * model.llm.width + LOGITS[0]) * model.llm.vocab * work.positions


# Products of backward attention: four gradients; without saved scores also the scores; the kernels for queries and for
# keys each recompute these, and the gradient of the weights.
_ATTENTION_PRODUCTS = {"dense": 4, "blockwise": 5, "flash": 7, "auto": 7}


def recompute_flops(config: Tower, work: Work, policy: Remat, trainable: bool = True) -> int:
    """Count the FLOPs of recomputing one layer's forward pass in backward, under a remat policy.

    trainable: whether the layer's weights have gradients, as a diffusion transformer's gates want to know. The last
    product of a layer is never recomputed: no gradient needs its value. Blockwise attention is not recomputed
    where its output is saved. Dense attention recomputes both of its products, the second because the gradient of the
    softmax's sum needs the output before division; blockwise saves that sum.
    """
    if policy == "none":
        return 0
    if isinstance(config, DiffusionTransformerConfig):
        products = 2 * recomputed_products(config, work, policy, trainable)
        return products + recomputed_attention(config, work, policy) + layer_elementwise(config, work)[0]
    layer = layer_sizes(config)
    saved_weights = {  # matrices whose outputs are saved or not needed
        "products": layer.weights,
        "offload": layer.weights,
        "attention_mlp": layer.width * (layer.queries + layer.mlp),
        "attention": layer.width * layer.mlp,
        "full": layer.width * layer.mlp,
    }[policy]
    products = 2 * (layer.weights - saved_weights + layer.chunked) * work.positions
    return products + recomputed_attention(config, work, policy) + layer_elementwise(config, work)[0]


def recomputed_attention(config: Tower, work: Work, policy: Remat) -> float:
    """Count the FLOPs of attention in `recompute_flops`."""
    if policy == "none" or (config.attention != "dense" and policy != "full"):
        return 0
    return 2 * 2 * layer_sizes(config).attended * work.pairs * _padding(config)


def _padding(config: Tower) -> float:
    """Return by how much the attention kernel widens heads: those of 80 channels are computed as 128."""
    width = head_width(config)
    return padded_width(width) / width if config.attention in ("flash", "auto") else 1


def layer_policies(config: Tower) -> tuple[Remat, ...]:
    """Return the remat policy of each layer; "none" for an `auto` that is not resolved yet."""
    if isinstance(config.remat, tuple):
        return config.remat
    return ("none" if config.remat == "auto" else config.remat,) * config.layers


def adapter_ranks(model: ModelConfig, tower: str) -> dict[str, int]:
    """Return the ranks of the adapters of a tower's layers by their paths in a layer: `attention.query`, `mlp.up`."""
    adapters = adapters_by_layer(model).items()
    return {name.split("*.")[1]: lora.rank for name, lora in adapters if module_of_layer(name) == tower}


def adapter_work(
    module: str, model: ModelConfig, works: Mapping[str, Work], trainable: bool, upstream: bool, spares: bool
) -> AdapterWork:
    """Count the multiply-adds that a module's adapters add and save.

    trainable: whether its weights need a gradient. upstream: whether its input does. Where none does, the gradient ends
    at the first adapter of its first layer. spares: whether that layer is compiled by itself; in a scan it computes
    what the others do.
    """
    adapters = {name: lora for name, lora in adapters_by_layer(model).items() if module_of_layer(name) == module}
    if not adapters:
        return AdapterWork()
    if module in model.generators:
        return diffusion_adapters(
            model.generators[module], works[module], adapter_ranks(model, module), trainable, upstream
        )
    reached = trainable or upstream
    connector = module.endswith(".connector")
    tower = module.removesuffix(".connector")
    work = works[tower]
    sizes = {name: size for name, size in linear_layers(model).items() if module_of_layer(name) == module}
    positions = work.tokens if connector else work.positions
    # An adapter of an [in, out] matrix has rank * (in + out) elements.
    forward = (
        sum(lora.rank * sum(sizes[name]) * layer_count(model, name) for name, lora in adapters.items()) * positions
    )
    config = towers_of(model)[tower]
    # The later convolutions of an audio encoder need no gradient of their input: the first one stands before them.
    # Counted among `weights`, whose activation gradients the caller adds; here they are taken off again.
    stem = stem_products(config, work)[1] if isinstance(config, AudioConfig) and not connector else 0
    if reached:
        # Backward has the gradients of a and b, as many multiply-adds as forward, and as many again for the adapter's
        # input.
        return AdapterWork(forward, 2 * forward)
    # What the first layer spares is counted for attention alone.
    if not spares or not forward or (module == "llm" and (model.llm.delta_net or model.llm.experts)):
        return AdapterWork(forward, 2 * forward, stem)
    live, attention = _live(set(adapters), connector, sizes)
    # With nothing trainable before it, an adapter's input needs no gradient: rank * in multiply-adds less.
    unread = sum(lora.rank * sizes[name][0] for name, lora in adapters.items() if name not in live) * positions
    dead = sum(sizes[name][0] * sizes[name][1] for name in sizes if name not in live) * positions
    # Of four products of attention's backward, those that no adapter of the first layer needs.
    unneeded = 0 if connector else (4 - attention) * layer_sizes(config).attended * work.pairs
    return AdapterWork(forward, 2 * forward - unread, dead + stem, unneeded)


def _live(adapters: Set[str], connector: bool, sizes: Sizes) -> tuple[set[str], int]:
    """Find the first layer's linear layers whose input needs a gradient, and count attention's backward products."""
    if connector:
        # Those behind the first with an adapter, in the order of the computation; gate and up have one input.
        order = [name.replace("mlp.gate", "mlp.up") for name in sizes]
        first = next((place for place, name in zip(order, sizes, strict=True) if name in adapters), order[-1])
        return {name for place, name in zip(order, sizes, strict=True) if order.index(place) > order.index(first)}, 0
    names = {name.rsplit(".", 1)[1]: name for name in sizes}
    query, key, value, output, up, gate = (
        names.get(part) in adapters for part in ("query", "key", "value", "output", "up", "gate")
    )
    # Four products without any frozen weights: the gradients of the attention weights, queries, keys and values. The
    # first is needed for queries and keys.
    attention = (query or key) * (1 + query + key) + value
    in_attention = query or key or value
    live = {names["output"]} if in_attention else set()
    if in_attention or output:
        live |= {names[part] for part in ("gate", "up") if part in names}
    if in_attention or output or up or gate:
        live.add(names["down"])
    return live, attention
