"""Count parameters, FLOPs and saved activations of Stable Diffusion's UNet, whose blocks are of different shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mmjax.config import UnetConfig
from mmjax.config.generators import UNET_MLP_FACTOR, UNET_TIME_FACTOR

TAPS = 3  # along each side of a convolution


class UnetBlock(NamedTuple):
    """Sizes of one block of a UNet, for one image: multiply-adds of its products, and numbers."""

    name: str
    parameters: int = 0
    data: int = 0  # weights times data, which needs no gradient
    weights: int = 0  # weights times activations
    condition: int = 0  # weights times the condition's tokens
    attention: int = 0  # among an image's positions
    cross: int = 0  # of positions to the condition's tokens
    behind: int = 0  # of `weights`: behind the cross-attention's scores
    saved: int = 0  # numbers that it keeps for backward, its output included
    output: int = 0  # numbers that it puts out
    normed: int = 0  # elements that norms with an activation read
    residual: int = 0  # elements that are added up


def unet_blocks(config: UnetConfig) -> list[UnetBlock]:
    """List the blocks of a UNet in the order of the computation."""
    return list(_blocks(config))


def _blocks(c: UnetConfig) -> Iterator[UnetBlock]:
    height, width = c.size
    channels, first, last = c.latents.channels, c.widths[0], c.widths[-1]
    deepest = len(c.widths) - 1
    time = UNET_TIME_FACTOR * first
    yield UnetBlock(
        "time", first * time + time * time + 2 * time, data=first * time, weights=time * time, saved=3 * time
    )
    yield _convolution("first", channels, first, height, width, data=True)
    skips = [first]
    inputs = first
    for i, channels_here in enumerate(c.widths):
        sides = height >> i, width >> i
        for j in range(c.blocks):
            yield from _block_pair(f"down.level{i}", j, inputs, channels_here, sides, c, i)
            inputs = channels_here
            skips.append(inputs)
        if i < deepest:
            yield _convolution(f"down.level{i}.resample", inputs, inputs, *sides, stride=2)
            skips.append(inputs)
    sides = height >> deepest, width >> deepest
    yield _residual_block("middle.residual.block0", last, last, sides, time)
    yield _attention_block("middle.attention.block0", last, sides, c, deepest)
    yield _residual_block("middle.residual.block1", last, last, sides, time)
    for i in reversed(range(len(c.widths))):
        sides = height >> i, width >> i
        for j in range(c.blocks + 1):
            yield from _block_pair(f"up.level{deepest - i}", j, inputs + skips.pop(), c.widths[i], sides, c, i)
            inputs = c.widths[i]
        if i:
            yield _convolution(f"up.level{deepest - i}.resample", inputs, inputs, 2 * sides[0], 2 * sides[1])
    out = _convolution("last", first, channels, height, width)
    yield out._replace(parameters=out.parameters + 2 * first, normed=first * height * width)


def _block_pair(
    level: str, number: int, inputs: int, outputs: int, sides: tuple[int, int], config: UnetConfig, place: int
) -> Iterator[UnetBlock]:
    """Yield a residual block, and the attention behind it where its level has any."""
    time = UNET_TIME_FACTOR * config.widths[0]
    yield _residual_block(f"{level}.residual.block{number}", inputs, outputs, sides, time)
    if config.attending[place]:
        yield _attention_block(f"{level}.attention.block{number}", outputs, sides, config, place)


def _convolution(
    name: str, inputs: int, outputs: int, height: int, width: int, stride: int = 1, data: bool = False
) -> UnetBlock:
    """Describe a convolution over an image of these sides. data: its input needs no gradient."""
    products = _taps(height, stride) * _taps(width, stride) * inputs * outputs
    positions = (height // stride) * (width // stride)
    return UnetBlock(
        name,
        parameters=TAPS**2 * inputs * outputs + outputs,
        data=products * data,
        weights=products * (not data),
        saved=outputs * positions,
        output=outputs * positions,
        residual=outputs * positions,
    )


def _taps(side: int, stride: int) -> int:
    """Count the taps of a convolution along one side that lie on the image: the zeros around it are not multiplied.

    Of 4 positions the first and the last have 2, the others 3; with a stride of 2 the first of 2 has 2, the other 3.
    """
    return TAPS * (side // stride) - (2 if stride == 1 else 1)


def _residual_block(name: str, inputs: int, outputs: int, sides: tuple[int, int], time: int) -> UnetBlock:
    positions = sides[0] * sides[1]
    first = _convolution(name, inputs, outputs, *sides)
    second = _convolution(name, outputs, outputs, *sides)
    shortcut = inputs * outputs * (inputs != outputs)
    parameters = first.parameters + second.parameters + 2 * inputs + 2 * outputs + (time + 1) * outputs
    return UnetBlock(
        name,
        parameters=parameters + shortcut + outputs * (inputs != outputs),
        weights=first.weights + second.weights + shortcut * positions + time * outputs,
        saved=2 * outputs * positions,
        output=outputs * positions,
        normed=(inputs + outputs) * positions,
        residual=outputs * positions * (3 + (inputs != outputs)),
    )


def _attention_block(name: str, width: int, sides: tuple[int, int], config: UnetConfig, place: int) -> UnetBlock:
    positions = sides[0] * sides[1]
    square = width * width
    hidden = UNET_MLP_FACTOR * width
    tokens = config.condition_width * width
    # Between projections: queries, keys, values and outputs of both attentions, and an MLP with a gate.
    matrices = {"enter": square, "self": 4 * square, "cross": 2 * square, "mlp": 3 * hidden * width, "leave": square}
    vectors = 2 * width + 3 * 2 * width + 4 * width + 2 * hidden + width  # norms; biases
    behind = square + matrices["mlp"] + matrices["leave"]
    scores = positions * (positions + config.queries) * config.heads[place]
    return UnetBlock(
        name,
        parameters=sum(matrices.values()) + 2 * tokens + vectors,
        weights=sum(matrices.values()) * positions,
        condition=2 * tokens * config.queries,
        attention=2 * positions * positions * width,
        cross=2 * positions * config.queries * width,
        behind=behind * positions,
        # Of each product its input, of attention queries, keys, values and scores.
        saved=(14 * width + 2 * hidden) * positions + 2 * width * config.queries + scores,
        output=width * positions,
        normed=width * positions,
        residual=0,
    )


def unet_parameters(config: UnetConfig) -> int:
    """Count the parameters of a UNet."""
    return sum(block.parameters for block in unet_blocks(config))
