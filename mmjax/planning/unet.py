"""Count parameters, FLOPs and saved activations of Stable Diffusion's UNet, whose blocks are of different shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mmjax.config import ModelConfig, UnetConfig
from mmjax.config.generators import UNET_MLP_FACTOR, UNET_TIME_FACTOR

TAPS = 3  # along each side of a convolution


class UnetBlock(NamedTuple):
    """Sizes of one block of a UNet, for one image: multiply-adds of its products, and numbers."""

    name: str
    parameters: int = 0
    data: int = 0  # weights times data, which needs no gradient
    weights: int = 0  # weights times activations
    time: int = 0  # of `weights`: times the embedding of the time
    condition: int = 0  # weights times the condition's tokens
    attention: int = 0  # among an image's positions
    cross: int = 0  # of positions to the condition's tokens
    downstream: int = 0  # of `weights`: behind cross-attention
    recomputed: int = 0  # of all, made again where blocks are recomputed: no gradient needs the last product
    last_input: int = 0  # of these, what the gradient of the last weights alone needs
    saved: int = 0  # numbers that it keeps for backward
    output: int = 0  # numbers that it puts out
    normed: int = 0  # elements that a norm reads before a convolution
    residual: int = 0  # elements of convolutions' outputs and of sums
    wide: int = 0  # elements of the residual stream of attention
    scores: int = 0  # of all heads, among an image's positions
    cross_scores: int = 0  # of all heads, of positions to the condition's tokens


def unets(model: ModelConfig) -> dict[str, UnetConfig]:
    """Return a model's UNets by name."""
    return {name: c for name, c in model.generators.items() if isinstance(c, UnetConfig)}


def unet_blocks(config: UnetConfig) -> list[UnetBlock]:
    """List the blocks of a UNet in the order of the computation."""
    return list(_blocks(config))


def _blocks(c: UnetConfig) -> Iterator[UnetBlock]:
    height, width = c.size
    channels, first, last = c.latents.channels, c.widths[0], c.widths[-1]
    deepest = len(c.widths) - 1
    time = UNET_TIME_FACTOR * first
    yield UnetBlock(
        "time",
        first * time + time * time + 2 * time,
        data=first * time,
        weights=time * time,
        time=time * time,
        saved=3 * time,
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
    products = taps(height, stride) * taps(width, stride) * inputs * outputs
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


def taps(side: int, stride: int) -> int:
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
        time=time * outputs,
        recomputed=first.weights + time * outputs,
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
    downstream = square + matrices["mlp"] + matrices["leave"]
    scores = positions * positions * config.heads[place]
    cross_scores = positions * config.queries * config.heads[place]
    attention = 2 * positions * positions * width
    cross = 2 * positions * config.queries * width
    weights = sum(matrices.values()) * positions
    return UnetBlock(
        name,
        parameters=sum(matrices.values()) + 2 * tokens + vectors,
        weights=weights,
        condition=2 * tokens * config.queries,
        attention=attention,
        cross=cross,
        downstream=downstream * positions,
        recomputed=weights - square * positions + 2 * tokens * config.queries + attention + cross,
        # Beside `wide`, which depends on what is trained: the MLP's hidden channels, and keys and values of tokens.
        saved=2 * hidden * positions + 2 * width * config.queries,
        output=width * positions,
        last_input=hidden * width * positions,
        wide=width * positions,
        scores=scores,
        cross_scores=cross_scores,
    )


def unet_parameters(config: UnetConfig) -> int:
    """Count the parameters of a UNet."""
    return sum(block.parameters for block in unet_blocks(config))


# Operations per element beside products, (forward, backward), as XLA's cost analysis counts them: least-squares fits as
# those of `planning.elementwise`. Backward normalises the operands of convolutions once more.
NORMED = (16, 24)  # GroupNorm and SiLU before a convolution
RESIDUAL = (0, 6)
WIDE = (296, 146)  # of a channel of attention's residual stream: four norms, and GELU by erf of four hidden channels
SCORES = (10, 11)  # scale, mask, maximum, difference, sum
CROSS_SCORES = (5, 13)
RECOMPUTED_WIDE = {False: 150, True: 970}  # of WIDE once more, by whether the UNet is trained: fusions repeat GELU
# Products of backward over those of forward: four gradients; without saved scores also the scores; the kernels for
# queries and for keys each recompute these, and the gradient of the weights.
ATTENTION_BACKWARD = {"dense": 2.0, "blockwise": 2.5, "flash": 3.5, "auto": 3.5}


def unet_flops(config: UnetConfig, images: int, trained: bool, upstream: bool) -> tuple[float, float]:
    """Count the needed FLOPs of a UNet's forward and backward pass, matrix products and convolutions alone.

    trained: its weights are. upstream: the gradient of the condition is wanted. A frozen UNet needs gradients from its
    last block to its first cross-attention, whose queries need none.
    """
    blocks = unet_blocks(config)
    forward = sum(b.data + b.weights + b.condition + b.attention + b.cross for b in blocks)
    backward = _backward_products(blocks, trained, upstream, 2.0)
    return 2.0 * images * forward, 2.0 * images * backward


def unet_executed(config: UnetConfig, images: int, trained: bool, upstream: bool) -> tuple[float, float, float]:
    """Count the FLOPs that the backend runs for so many images, forward and backward, and those of attention's kernel.

    Forward plus backward agrees with `cost_analysis()` of the compiled gradient to 2% from 64 channels upwards.
    """
    blocks = unet_blocks(config)
    forward = unet_flops(config, images, trained, upstream)[0]
    ratio = ATTENTION_BACKWARD[config.attention]
    backward = 2.0 * images * _backward_products(blocks, trained, upstream, ratio)
    forward += images * sum(_elementwise(b, 0) for b in blocks)
    attention = 2.0 * images * sum(b.attention for b in blocks)
    again = 0.0
    if trained or upstream:
        reached = _reached(blocks, trained)
        backward += images * sum(_elementwise(b, 1) for b in reached)
        if config.remat == "full":
            again = 1.0
            recomputed = [b for b in reached if b.recomputed]
            products = sum(b.recomputed - (not trained) * b.last_input for b in recomputed)
            backward += images * (2.0 * products + RECOMPUTED_WIDE[trained] * sum(b.wide for b in recomputed))
    flash = config.attention in ("flash", "auto")
    return forward, backward, flash * attention * (1 + (trained or upstream) * (ratio + again))


def _backward_products(blocks: list[UnetBlock], trained: bool, upstream: bool, ratio: float) -> float:
    """Count the multiply-adds of a backward pass. ratio: of attention's backward products to its forward ones."""
    if trained:
        of_weights = sum(b.data + b.weights + b.condition for b in blocks)
        of_inputs = sum(b.weights + upstream * b.condition + ratio * b.attention + 2 * b.cross for b in blocks)
        return of_weights + of_inputs
    if not upstream:
        return 0.0
    first, *later = _reached(blocks, trained)
    rest = sum(b.weights - b.time + b.condition + ratio * b.attention + 2 * b.cross for b in later)
    return first.downstream + first.condition + 1.5 * first.cross + rest


def _reached(blocks: list[UnetBlock], trained: bool) -> list[UnetBlock]:
    """List the blocks that a gradient reaches: all, or those from the first that the condition reaches."""
    first = 0 if trained else next(i for i, b in enumerate(blocks) if b.cross)
    return blocks[first:]


def _elementwise(block: UnetBlock, way: int) -> int:
    """Count the elementwise operations of a block for one image. way: 0 forward, 1 backward."""
    b = block
    terms = (
        (NORMED, b.normed),
        (RESIDUAL, b.residual),
        (WIDE, b.wide),
        (SCORES, b.scores),
        (CROSS_SCORES, b.cross_scores),
    )
    return sum(rate[way] * count for rate, count in terms)


# Arrays as wide as attention's residual stream that an attention block keeps for backward, its output included: of a
# trained one also the inputs of products.
WIDE_ARRAYS = {False: 9, True: 15}
SCORE_BYTES = 2 * 4  # of dense attention: scores and weights, in float32


def unet_saved_bytes(config: UnetConfig, images: int, activation: int, trained: bool) -> tuple[float, float]:
    """Count the bytes that so many images keep for backward, and those of the block that needs most in its own pass.

    activation: bytes of a number.
    """
    scores = SCORE_BYTES * (config.attention == "dense")
    blocks = _reached(unet_blocks(config), trained)
    if not trained:
        blocks[0] = blocks[0]._replace(scores=0)  # it needs no gradient of its self-attention
    saved = [activation * (b.saved + WIDE_ARRAYS[trained] * b.wide) + scores * b.scores for b in blocks]
    outside = [
        activation * b.output if config.remat == "full" and b.recomputed else n
        for b, n in zip(blocks, saved, strict=True)
    ]
    return float(images * sum(outside)), float(images * max(saved))
