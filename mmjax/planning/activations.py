"""Bytes that a layer saves between its forward and backward pass under the remat policies that name what they save."""

from __future__ import annotations

from typing import NamedTuple

from mmjax.config import DecoderConfig, Remat
from mmjax.planning.work import Encoder, layer_sizes

LOGSUMEXP = 4  # bytes: blockwise attention saves the log-sum-exp of each query and head, in float32


class SavedBytes(NamedTuple):
    """Bytes saved between the passes of one microbatch."""

    device: float
    host: float = 0.0  # offloaded


def saved_bytes_of_policy(
    config: DecoderConfig | Encoder, policy: Remat, activation: int, trainable: bool = True
) -> SavedBytes:
    """Count the bytes saved per position of one layer; `activation` is bytes of a number. Not for the policy `none`.

    Every policy saves the layer's input. Of the products, the last is never saved: no gradient needs its value. The
    output of attention is only saved where it is needed: for gradients of trainable weights, or of blockwise attention.
    """
    layer = layer_sizes(config)
    stream = layer.width * activation
    output = layer.queries * activation
    blockwise = config.attention == "blockwise"
    logsumexp = LOGSUMEXP * layer.heads * blockwise
    attention = logsumexp + (trainable or blockwise) * output
    # Outputs of the linear layers: query, key and value, attention's output, and up (and gate) of the MLP.
    mlp = (1 + layer.gated) * layer.mlp
    products = attention + (layer.queries + 2 * layer.keys + layer.width + mlp) * activation
    return {
        "full": SavedBytes(stream),
        "attention": SavedBytes(stream + logsumexp + output),
        "attention_mlp": SavedBytes(2 * stream + attention),
        "products": SavedBytes(stream + products),
        "offload": SavedBytes(stream, products),
    }[policy]


def divide_by_tensor_parallelism(
    saved: SavedBytes, config: DecoderConfig | Encoder, positions: int, activation: int, parts: int
) -> SavedBytes:
    """Divide the bytes saved at `positions` by tensor parallelism into `parts`: all but the replicated layer inputs."""
    replicated = min(layer_sizes(config).width * activation * positions, saved.device)
    return SavedBytes(replicated + (saved.device - replicated) / parts, saved.host / parts)
