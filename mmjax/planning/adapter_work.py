"""Multiply-adds of low-rank adapters, and those that frozen weights beside them save in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from mmjax.adapters import Sizes, adapters_by_layer, layer_count, linear_layers, module_of_layer
from mmjax.config import AudioConfig, ModelConfig
from mmjax.planning.work import CONV_TAPS, Work, layer_sizes


class AdapterWork(NamedTuple):
    """Multiply-adds of a module with adapters, relative to the module without them."""

    forward: int = 0  # of the adapters
    backward: int = 0  # of the adapters: gradients of a, b and of their inputs
    spared_weights: int = 0  # saved: activation gradients through frozen weights with nothing trainable before them
    spared_attention: float = 0  # saved: gradients inside attention


def adapter_work(
    module: str, model: ModelConfig, works: Mapping[str, Work], reached: bool, spares: bool
) -> AdapterWork:
    """Count the multiply-adds that a module's adapters add and save.

    reached: whether its input needs a gradient, or all its weights do. Otherwise the gradient ends at the first adapter
    of its first layer. spares: whether that layer is compiled by itself; in a scan it computes what the others do.
    """
    adapters = {name: lora for name, lora in adapters_by_layer(model).items() if module_of_layer(name) == module}
    if not adapters:
        return AdapterWork()
    connector = module.endswith(".connector")
    tower = module.removesuffix(".connector")
    work = works[tower]
    sizes = {name: size for name, size in linear_layers(model).items() if module_of_layer(name) == module}
    positions = work.tokens if connector else work.positions
    # An adapter of an [in, out] matrix has rank * (in + out) elements.
    forward = (
        sum(lora.rank * sum(sizes[name]) * layer_count(model, name) for name, lora in adapters.items()) * positions
    )
    config = model.llm if tower == "llm" else model.encoders[tower]
    # The second convolution of an audio encoder needs no gradient of its input: the first one stands before it.
    stem = CONV_TAPS * config.width**2 * work.positions if isinstance(config, AudioConfig) and not connector else 0
    if reached:
        return AdapterWork(forward, 2 * forward)
    if not spares or not forward:
        return AdapterWork(forward, 2 * forward, stem)
    live, attention = _live(set(adapters), connector, sizes)
    # With nothing trainable before it, an adapter's input needs no gradient: rank * in multiply-adds less.
    unread = sum(lora.rank * sizes[name][0] for name, lora in adapters.items() if name not in live) * positions
    dead = sum(sizes[name][0] * sizes[name][1] for name in sizes if name not in live) * positions
    unneeded = 0 if connector else (4 - attention) * layer_sizes(config).queries * work.pairs
    return AdapterWork(forward, 2 * forward - unread, dead + stem, unneeded)


def _live(adapters: Set[str], connector: bool, sizes: Sizes) -> tuple[set[str], int]:
    """Find the first layer's linear layers whose input needs a gradient, and count attention's backward products."""
    if connector:
        first, *later = sizes
        return (set(later) if first in adapters else set()), 0
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
