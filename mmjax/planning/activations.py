"""Bytes that a layer keeps between its forward and its backward pass, where its remat policy names what it keeps."""

from __future__ import annotations

from typing import NamedTuple

from mmjax.config import DecoderConfig, Remat
from mmjax.planning.work import Encoder, layer_of

LOGSUMEXP = 4  # bytes: blockwise attention keeps the sum of each query's softmax, in float32


class Kept(NamedTuple):
    """Bytes between the passes of one microbatch."""

    device: float
    host: float = 0.0  # offloaded


def named_saves(config: DecoderConfig | Encoder, policy: Remat, activation: int, trainable: bool = True) -> Kept:
    """Of one position of one layer. `activation`: bytes of a number. Not for `none`, which keeps what no name has.

    Every policy keeps the layer's input. Of products, the last is never kept: no gradient needs its value. The output
    of attention is only kept where something needs it: the gradient of trainable weights, or of blockwise attention.
    """
    layer = layer_of(config)
    stream, output = layer.width * activation, layer.queries * activation
    blockwise = config.attention == "blockwise"
    logsumexp = LOGSUMEXP * layer.heads * blockwise
    attention = logsumexp + (trainable or blockwise) * output
    mlp = (1 + layer.gated) * layer.mlp
    products = attention + (layer.queries + 2 * layer.keys + layer.width + mlp) * activation
    return {
        "full": Kept(stream),
        "attention": Kept(stream + logsumexp + output),
        "attention_mlp": Kept(2 * stream + attention),
        "products": Kept(stream + products),
        "offload": Kept(stream, products),
    }[policy]


def cut(kept: Kept, config: DecoderConfig | Encoder, positions: int, activation: int, parts: int) -> Kept:
    """What is left of it on a device where tensor parallelism cuts heads and MLP in so many parts.

    What lies between layers is whole on each. `positions`: that it was counted for.
    """
    whole = min(layer_of(config).width * activation * positions, kept.device)
    return Kept(whole + (kept.device - whole) / parts, kept.host / parts)
