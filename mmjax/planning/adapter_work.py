"""What low-rank adapters add to a module's products, and what its frozen weights then spare in backward."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from mmjax.adapters import Sizes, adapted, copies, linear_layers, module_with
from mmjax.config import AudioConfig, ModelConfig
from mmjax.planning.work import CONV_TAPS, Work


class AdapterWork(NamedTuple):
    """Multiply-adds of a module, beside or less than those without adapters."""

    forward: int = 0  # of the adapters
    backward: int = 0  # of the adapters: gradients of a, b and of what they read
    spared_weights: int = 0  # gradients of activations through frozen weights that nothing trainable stands before
    spared_attention: float = 0


def adapter_work(
    module: str, model: ModelConfig, work: Work, reached: bool, spares: bool, products: float
) -> AdapterWork:
    """Of one module. reached: whether what it reads wants a gradient, or all of its own weights do.

    Where neither does, the gradient ends inside its first layer, at the first adapter there. spares: whether that
    layer runs by itself; in a scan with others it computes what they compute. products: multiply-adds of one product
    of attention in one layer.
    """
    own = {name: lora for name, lora in adapted(model).items() if module_with(name) == module}
    if not own:
        return AdapterWork()
    names = {name: size for name, size in linear_layers(model).items() if module_with(name) == module}
    positions = work.tokens if module.endswith(".connector") else work.positions
    forward = sum(lora.rank * sum(names[name]) * copies(model, name) for name, lora in own.items()) * positions
    if reached or not spares or not forward:
        return AdapterWork(forward, 2 * forward, _stem(module, model, work) if not reached else 0)
    live, attention = _live(set(own), module, names)
    unread = sum(lora.rank * names[name][0] for name, lora in own.items() if name not in live) * positions
    dead = sum(names[name][0] * names[name][1] for name in names if name not in live) * positions
    unneeded = 0 if module.endswith(".connector") else (4 - attention) * products
    return AdapterWork(forward, 2 * forward - unread, dead + _stem(module, model, work), unneeded)


def _stem(module: str, model: ModelConfig, work: Work) -> int:
    """The second convolution of an audio encoder, before which stands its first."""
    encoder = model.encoders.get(module)
    return CONV_TAPS * encoder.width**2 * work.positions if isinstance(encoder, AudioConfig) else 0


def _live(own: Set[str], module: str, names: Sizes) -> tuple[set[str], int]:
    """Of a first layer: the linear layers whose input wants a gradient, and attention's products in backward."""
    if module.endswith(".connector"):
        first, *after = names
        return (set(after) if first in own else set()), 0
    at = {name.rsplit(".", 1)[1]: name for name in names}
    has = {place: name in own for place, name in at.items()}
    query, key, value = has["query"], has["key"], has["value"]
    # With the scores: the gradient of the weights, then of what the scores are made of.
    attention = (query or key) * (1 + query + key) + value
    live = {at["output"]} if query or key or value else set()
    after = bool(live) or has["output"]
    if after:
        live |= {at[place] for place in ("gate", "up") if place in at}
    if after or has["up"] or has.get("gate", False):
        live.add(at["down"])
    return live, attention
