"""Count what Stable Diffusion's UNet keeps for backward: its blocks differ in shape, so no scan tells it.

Its operations and parameters are traced as all others are (`mmjax.cost`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mmjax.config import ModelConfig, UnetConfig
from mmjax.config.generators import UNET_MLP_FACTOR, UNET_TIME_FACTOR


class UnetBlock(NamedTuple):
    """Numbers that one block of a UNet makes for one image."""

    name: str
    saved: int = 0  # that it keeps for backward, beside `wide`
    output: int = 0
    wide: int = 0  # of the residual stream of attention, whose copies depend on what is trained
    scores: int = 0  # of all heads, among an image's positions
    recomputed: bool = True  # whether `remat` makes it again

    @property
    def attends(self) -> bool:
        """Return whether the condition reaches it."""
        return self.wide > 0


def unets(model: ModelConfig) -> dict[str, UnetConfig]:
    """Return a model's UNets by name."""
    return {name: tower for name, tower in model.towers.items() if not tower.is_stack}


def unet_blocks(config: UnetConfig) -> list[UnetBlock]:
    """List the blocks of a UNet in the order of the computation."""
    return list(_blocks(config))


def _blocks(c: UnetConfig) -> Iterator[UnetBlock]:
    # In the order of `models.unet`: down with `blocks` pairs a level, the middle, up with one more.
    height, width = c.size
    positions = [(height >> i) * (width >> i) for i in range(len(c.widths))]
    deepest = len(c.widths) - 1
    yield UnetBlock("time", saved=3 * UNET_TIME_FACTOR * c.widths[0], recomputed=False)
    yield _convolution("first", c.widths[0] * positions[0])
    for i, channels in enumerate(c.widths):
        for j in range(c.blocks):
            yield from _block_pair(f"down.level{i}", j, channels, positions[i], c, i)
        if i < deepest:
            yield _convolution(f"down.level{i}.resample", channels * positions[i + 1])
    yield _residual_block("middle.residual.block0", c.widths[-1], positions[-1])
    yield _attention_block("middle.attention.block0", c.widths[-1], positions[-1], c, deepest)
    yield _residual_block("middle.residual.block1", c.widths[-1], positions[-1])
    for i in reversed(range(len(c.widths))):
        for j in range(c.blocks + 1):
            yield from _block_pair(f"up.level{deepest - i}", j, c.widths[i], positions[i], c, i)
        if i:
            yield _convolution(f"up.level{deepest - i}.resample", c.widths[i] * positions[i - 1])
    yield _convolution("last", c.latents.channels * positions[0])


def _block_pair(
    level: str, number: int, channels: int, positions: int, config: UnetConfig, place: int
) -> Iterator[UnetBlock]:
    """Yield a residual block, and the attention behind it where its level has any."""
    yield _residual_block(f"{level}.residual.block{number}", channels, positions)
    if config.attending[place]:
        yield _attention_block(
            f"{level}.attention.block{number}", channels, positions, config, place
        )


def _convolution(name: str, outputs: int) -> UnetBlock:
    return UnetBlock(name, saved=outputs, output=outputs, recomputed=False)


def _residual_block(name: str, channels: int, positions: int) -> UnetBlock:
    return UnetBlock(name, saved=2 * channels * positions, output=channels * positions)


def _attention_block(
    name: str, width: int, positions: int, config: UnetConfig, place: int
) -> UnetBlock:
    return UnetBlock(
        name,
        # The MLP's hidden channels, and keys and values of tokens.
        saved=2 * UNET_MLP_FACTOR * width * positions + 2 * width * config.queries,
        output=width * positions,
        wide=width * positions,
        scores=positions * positions * config.heads[place],
    )


# Arrays as wide as attention's residual stream that an attention block keeps for backward, its
# output included: of a trained one also the inputs of products.
WIDE_ARRAYS = {False: 9, True: 15}
SCORE_BYTES = 2 * 4  # of dense attention: scores and weights, in float32


def unet_saved_bytes(
    config: UnetConfig, images: int, activation: int, trained: bool
) -> tuple[float, float]:
    """Count the bytes that images keep for backward, and the bytes of the block whose own pass needs most.

    activation: bytes of a number. A gradient reaches all blocks, or those from the first that the
    condition reaches.
    """
    scores = SCORE_BYTES * (config.attention == "dense")
    blocks = unet_blocks(config)
    if not trained:
        blocks = blocks[next(i for i, block in enumerate(blocks) if block.attends) :]
        blocks[0] = blocks[0]._replace(scores=0)  # it needs no gradient of its self-attention
    saved = [
        activation * (b.saved + WIDE_ARRAYS[trained] * b.wide) + scores * b.scores for b in blocks
    ]
    outside = [
        activation * b.output if config.remat == "full" and b.recomputed else n
        for b, n in zip(blocks, saved, strict=True)
    ]
    return float(images * sum(outside)), float(images * max(saved))
