"""Count the operations of a model beside its matrix products, element by element."""

from __future__ import annotations

from typing import NamedTuple

from mmjax.config import (
    AudioConfig,
    DecoderConfig,
    DiffusionTransformerConfig,
    FractionalGrid,
    Generator,
    LearnedGrid,
    VisionConfig,
)
from mmjax.config.generators import Tower
from mmjax.config.towers import Encoder
from mmjax.planning.work import (
    Work,
    connector_mlps,
    layer_sizes,
)


class Elementwise(NamedTuple):
    """Operations per element beside matrix products, (forward, backward).

    As XLA's cost analysis counts them in a program compiled for CPU: one each for an addition, product, comparison or
    selection, none for exp, rsqrt or tanh. Fusions recompute cheap values and count them each time, so backward has
    more than the derivatives have; the numbers are least-squares fits over widths, lengths and heads, which leave less
    than 0.3% of a layer unexplained. At width 128 all of this is 2-4% of a layer.
    """

    width: tuple[int, int]  # of activations: norms, residuals, biases
    mlp: tuple[int, int]  # of the hidden activations of the MLP
    scores: tuple[int, int] = (7, 8)  # of every head: scale, mask, maximum, difference, sum
    pairs: tuple[int, int] = (14, 14)  # the mask itself, once for all heads


DECODER = Elementwise(width=(10, 33), mlp=(5, 16), pairs=(20, 21))  # RMSNorm, SwiGLU; the mask evaluates kinds too
ENCODER = Elementwise(width=(23, 83), mlp=(9, 19))  # LayerNorm, GELU by tanh, biases
DIFFUSION = Elementwise(width=(42, 109), mlp=(9, 19))  # norms shifted and scaled, gates, three residuals; GELU by tanh
CROSS_SCORES = (1, 4)  # of every head
CROSS_TOKENS = (5, 11)  # per element of the keys of a condition
ROTARY_QUERIES = (4, 13)  # per element of the rotated queries
ROTARY_KEYS = (3, 6)
LOGITS = (4, 4)  # per logit: log-sum-exp, its gradient, and the gradient of picking one


def layer_elementwise(config: Tower, work: Work) -> tuple[int, int]:
    """Count the elementwise operations of one layer, (forward, backward)."""
    layer = layer_sizes(config)
    if isinstance(config, DiffusionTransformerConfig):
        return _sum(
            (DIFFUSION.width, layer.width * work.positions),
            (DIFFUSION.mlp, layer.mlp * work.positions),
            (DIFFUSION.scores, layer.heads * work.pairs),
            (DIFFUSION.pairs, work.pairs),
            (CROSS_SCORES, layer.heads * 2 * config.condition_tokens * work.blocks * config.min_patches),
            (CROSS_TOKENS, layer.cross * work.tokens),
        )
    rates = _rates(config)
    if isinstance(config, DecoderConfig):
        rotary = not config.learned_positions
    else:
        rotary = isinstance(config, VisionConfig) and not isinstance(config.positions, LearnedGrid | FractionalGrid)
    return _sum(
        (rates.width, layer.width * work.positions),
        (rates.mlp, layer.mlp * work.positions),
        (ROTARY_QUERIES, rotary * layer.attended * work.positions),
        (ROTARY_KEYS, rotary * layer.keys * work.positions),
        (rates.scores, layer.heads * work.pairs),
        (rates.pairs, work.pairs),
    )


def _rates(config: Tower) -> Elementwise:
    """Choose the operations per element by the kinds of a tower's norms and MLP."""
    if isinstance(config, DiffusionTransformerConfig):
        return DIFFUSION
    norm = DECODER if not isinstance(config, AudioConfig) and config.norm == "rms" else ENCODER
    mlp = DECODER if layer_sizes(config).gated else ENCODER
    scores = DECODER if isinstance(config, DecoderConfig) else ENCODER
    return scores._replace(width=norm.width, mlp=mlp.mlp)


def tower_elementwise(config: Tower, work: Work) -> tuple[int, int]:
    """Count the elementwise operations of a tower: its layers, final norm, and logits or convolutions."""
    forward, backward = layer_elementwise(config, work)
    pool = config.pool if isinstance(config, AudioConfig) else 1
    outside = [(_one_norm(_rates(config)), config.width * work.positions // pool)]
    if isinstance(config, DecoderConfig):
        outside.append((LOGITS, config.vocab * work.positions))
    elif isinstance(config, AudioConfig):
        outside.append((ENCODER.mlp, _stem_activations(config, work)))
    once = _sum(*outside)
    # What is outside of the layers happens once.
    return config.layers * forward + once[0], config.layers * backward + once[1]


def _stem_activations(config: AudioConfig, work: Work) -> int:
    """Count the values that the activation functions of an audio encoder's convolutions take."""
    if not config.stem_width:
        return config.width * (work.inputs + work.positions)
    first, second, third = config.stem_bins
    return config.stem_width * (4 * first + 2 * second + third) * work.positions


def connector_elementwise(encoder: Encoder | Generator, llm_width: int, work: Work) -> tuple[int, int]:
    """Count the elementwise operations of a connector: norm, GELU, and placing its tokens in the text."""
    if isinstance(encoder, Generator):
        return _sum(
            (_one_norm(ENCODER), (llm_width + encoder.condition_width) * work.tokens),
            (ENCODER.mlp, encoder.connector.mlp_width * work.tokens),
        )
    mlps = connector_mlps(encoder)
    return _sum(
        (_one_norm(ENCODER), mlps * encoder.width * work.positions),
        (ENCODER.mlp, mlps * encoder.connector.mlp_width * work.tokens),
        (_one_norm(ENCODER), mlps * llm_width * work.tokens),
    )


def _one_norm(rates: Elementwise) -> tuple[int, int]:
    """Estimate one norm as half of a layer's two norms and residuals."""
    return rates.width[0] // 2, rates.width[1] // 2


def _sum(*terms: tuple[tuple[int, int], int]) -> tuple[int, int]:
    """Add up the operations of terms ((forward, backward) per element, elements)."""
    return sum(rate[0] * n for rate, n in terms), sum(rate[1] * n for rate, n in terms)
