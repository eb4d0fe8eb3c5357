"""What a forward and backward pass computes beside matrix products, as XLA's cost analysis counts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mmjax.config import AudioConfig, DecoderConfig, LearnedGrid, VisionConfig
from mmjax.planning.work import Encoder, Work, layer_of, streams


class Elementwise(NamedTuple):
    """Operations per element that are no matrix product, (forward, backward).

    As XLA's cost analysis counts them in a program compiled for CPU: one each for an addition, product, comparison or
    selection, none for exp, rsqrt or tanh. A fusion computes cheap values again where it needs them and counts them
    again, so backward has more than the derivatives have; the numbers are least-squares fits over widths, lengths and
    heads, which leave less than 0.3% of a layer unexplained. At width 128 all of this is 2-4% of a layer.
    """

    width: tuple[int, int]  # of activations: norms, residuals, biases
    mlp: tuple[int, int]  # of the hidden activations of the MLP
    scores: tuple[int, int] = (7, 8)  # of every head: scale, mask, maximum, difference, sum
    pairs: tuple[int, int] = (14, 14)  # the mask itself, once for all heads


DECODER = Elementwise(width=(10, 33), mlp=(5, 16), pairs=(20, 21))  # RMSNorm, SwiGLU; the mask evaluates kinds too
ENCODER = Elementwise(width=(23, 83), mlp=(9, 19))  # LayerNorm, GELU by tanh, biases
ROTARY_QUERIES = (4, 13)  # per element of the rotated queries
ROTARY_KEYS = (3, 6)
LOGITS = (4, 4)  # per logit: log-sum-exp, its gradient, and the gradient of picking one


def layer_elementwise(config: DecoderConfig | Encoder, work: Work) -> tuple[int, int]:
    """Elementwise operations of one layer, (forward, backward)."""
    layer, per = layer_of(config), _per_element(config)
    rotated = isinstance(config, DecoderConfig) or (
        isinstance(config, VisionConfig) and not isinstance(config.positions, LearnedGrid)
    )
    elements = (
        (per.width, layer.width * work.positions),
        (per.mlp, layer.mlp * work.positions),
        (ROTARY_QUERIES, rotated * layer.queries * work.positions),
        (ROTARY_KEYS, rotated * layer.keys * work.positions),
        (per.scores, layer.heads * work.pairs),
        (per.pairs, work.pairs),
    )
    return _sum(elements)


def _per_element(config: DecoderConfig | Encoder) -> Elementwise:
    """A layer's norms and its MLP, of one kind or the other."""
    if isinstance(config, DecoderConfig):
        return DECODER
    rms, gated = isinstance(config, VisionConfig) and config.norm == "rms", layer_of(config).gated
    return ENCODER._replace(width=(DECODER if rms else ENCODER).width, mlp=(DECODER if gated else ENCODER).mlp)


def tower_elementwise(config: DecoderConfig | Encoder, work: Work) -> tuple[int, int]:
    """Of a whole tower. Its final norm is half of what a layer's two norms are."""
    forward, backward = layer_elementwise(config, work)
    per = _per_element(config)
    half_norms = (per.width[0] // 2, per.width[1] // 2)
    pool = config.pool if isinstance(config, AudioConfig) else 1
    outside = [(half_norms, config.width * work.positions // pool)]
    if isinstance(config, DecoderConfig):
        outside.append((LOGITS, config.vocab * work.positions))
    elif isinstance(config, AudioConfig):
        outside.append((ENCODER.mlp, config.width * (work.inputs + work.positions)))
    once = _sum(outside)
    return config.layers * forward + once[0], config.layers * backward + once[1]


def connector_elementwise(encoder: Encoder, llm_width: int, work: Work) -> tuple[int, int]:
    """Of a connector: the norm, the GELU, and putting its tokens where the LLM reads them."""
    half_norms, each = (ENCODER.width[0] // 2, ENCODER.width[1] // 2), streams(encoder)
    return _sum(
        (
            (half_norms, each * encoder.width * work.positions),
            (ENCODER.mlp, each * encoder.connector.mlp_width * work.tokens),
            (half_norms, each * llm_width * work.tokens),
        )
    )


def _sum(elements: Iterable[tuple[tuple[int, int], int]]) -> tuple[int, int]:
    """Operations of elements given as ((forward, backward) per element, elements)."""
    elements = tuple(elements)
    return sum(per[0] * n for per, n in elements), sum(per[1] * n for per, n in elements)
