"""Count parameters, FLOPs and memory of encoding images by a frozen VAE in every step: a forward pass alone."""

from __future__ import annotations

from typing import NamedTuple

from mmjax.config import VaeConfig
from mmjax.planning.unet import NORMED, SCORES, TAPS, taps

STREAMS = 2  # arrays of a block's widest channels that are live at once in the precision of the computation,
NORMED_STREAMS = 1  # and in float32, inside its norm
SCORE_BYTES = 2 * 4  # scores and weights of attention, in float32


class EncoderSizes(NamedTuple):
    """Sizes of a part of an encoder, for one image: parameters, multiply-adds, and numbers."""

    parameters: int = 0
    products: int = 0
    normed: int = 0  # elements that a norm reads before a convolution
    scores: int = 0  # of attention

    def __add__(self, other: EncoderSizes) -> EncoderSizes:
        return EncoderSizes(*map(sum, zip(self, other, strict=True)))


def _convolution(inputs: int, outputs: int, height: int, width: int, stride: int = 1) -> EncoderSizes:
    return EncoderSizes(
        parameters=(TAPS**2 * inputs + 1) * outputs,
        products=taps(height, stride) * taps(width, stride) * inputs * outputs,
    )


def _residual_block(inputs: int, outputs: int, height: int, width: int) -> EncoderSizes:
    positions = height * width
    shortcut = inputs != outputs
    rest = EncoderSizes(
        parameters=2 * (inputs + outputs) + shortcut * (inputs + 1) * outputs,
        products=shortcut * inputs * outputs * positions,
        normed=(inputs + outputs) * positions,
    )
    return _convolution(inputs, outputs, height, width) + _convolution(outputs, outputs, height, width) + rest


def encoder_sizes(vae: VaeConfig, size: tuple[int, int]) -> EncoderSizes:
    """Add up the parts of a VAE's encoder for an image of (height, width) latents."""
    sides = size[0] * vae.factor, size[1] * vae.factor
    total = _convolution(vae.image_channels, vae.widths[0], *sides)
    inputs = vae.widths[0]
    for i, width in enumerate(vae.widths):
        for _ in range(vae.blocks):
            total += _residual_block(inputs, width, *sides)
            inputs = width
        if i + 1 < len(vae.widths):
            total += _convolution(width, width, *sides, stride=2)
            sides = sides[0] // 2, sides[1] // 2
    positions = size[0] * size[1]
    total += _residual_block(inputs, inputs, *size) + _residual_block(inputs, inputs, *size)
    if vae.attention:
        total += EncoderSizes(
            parameters=4 * (inputs + 1) * inputs + 2 * inputs,
            products=4 * inputs**2 * positions + 2 * inputs * positions**2,
            normed=inputs * positions,
            scores=positions**2,
        )
    moments = 2 * vae.channels
    total += _convolution(inputs, moments, *size) + EncoderSizes(2 * inputs, normed=inputs * positions)
    return total + EncoderSizes((moments + 1) * moments, moments**2 * positions) if vae.encoder_product else total


def vae_parameters(vae: VaeConfig) -> int:
    """Count the parameters of a VAE's encoder."""
    return encoder_sizes(vae, (1, 1)).parameters


def vae_flops(vae: VaeConfig, size: tuple[int, int], elementwise: bool) -> int:
    """Count the FLOPs of encoding an image of (height, width) latents: products alone, or as the backend runs them."""
    sizes = encoder_sizes(vae, size)
    return 2 * sizes.products + elementwise * (NORMED[0] * sizes.normed + SCORES[0] * sizes.scores)


def vae_bytes(vae: VaeConfig, size: tuple[int, int], activation: int) -> float:
    """Count the peak bytes of encoding one image of (height, width) latents. activation: bytes of a number."""
    positions = size[0] * size[1]
    before = (vae.widths[0], *vae.widths)
    # Of a level's first block, which has the channels of the level before: a quarter of the positions further down.
    widest = max(
        max(before[i], width) * positions * 4 ** (len(vae.widths) - 1 - i) for i, width in enumerate(vae.widths)
    )
    return widest * (STREAMS * activation + NORMED_STREAMS * 4) + vae.attention * SCORE_BYTES * positions**2
