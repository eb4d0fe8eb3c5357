"""What a device holds beside the activations that layers keep."""

from __future__ import annotations

from collections.abc import Mapping, Set

from mmjax.config import ModelConfig
from mmjax.planning.cost import parameters
from mmjax.planning.work import layer_of

MASTER = 4  # bytes: parameters, the sum of gradients, and each of the optimizer's two moments are float32


def fixed_bytes(
    model: ModelConfig, tokens: Mapping[str, int], frozen: Set[str], shards: int, activation: int
) -> dict[str, float]:
    """Bytes on one device by kind, for parameters sharded over `shards` devices (ZeRO-3) and AdamW.

    tokens: positions of "llm" and tokens that each encoder gives to it, of one microbatch on this device. activation:
    bytes of an activation, and of a frozen parameter. `gathered` is what is whole for a moment: the weights of two
    layers and a float32 gradient of one, or as much of an output table. `logits` are float32, with their gradient;
    `features` are encoder tokens as they are made and as they arrive.
    """
    counts = parameters(model)
    whole, trainable = sum(counts.values()), sum(n for module, n in counts.items() if module not in frozen)
    layer = max(layer_of(config).parameters for config in (model.llm, *model.encoders.values()))
    table = model.llm.vocab * model.llm.width
    received = sum(n for name, n in tokens.items() if name != "llm")
    return {
        "parameters": (MASTER * trainable + activation * (whole - trainable)) / shards,
        "gradients": MASTER * trainable / shards,
        "optimizer": 2 * MASTER * trainable / shards,
        "gathered": max((2 * activation + MASTER) * layer, (activation + MASTER) * table) if shards > 1 else 0,
        "logits": 2 * 4 * tokens["llm"] * model.llm.vocab,
        "features": 2 * activation * received * model.llm.width,
    }
