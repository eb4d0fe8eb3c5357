"""A ViT over packed patches: images of many sizes in one row, each attending itself (NaViT, Dehghani et al. 2023)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.batch import ItemBatch
from mmjax.config import LearnedGrid, StretchedGrid, VisionConfig
from mmjax.models.attention import MaskSpec, encoder_mask
from mmjax.models.layer_stacks import LayerStack, LayerStacks
from mmjax.models.layers import NORMS, Context, Linear, PositionTable, TransformerLayer, encoder_layer_config
from mmjax.models.rope import max_in_item, rotation_2d
from mmjax.parallel.sharding import constrain

MAX_WINDOWS = 2**15  # more windows than an image has side by side


class PatchEmbedding(nnx.Module):
    """Normalised pixels projected to the width; class token, learned positions and a norm as configured."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        c = config
        self.patches = Linear(c.frames * c.patch**2 * c.channels, c.width, (None, "embed"), rngs, bias=c.embed_bias)
        self.class_token = PositionTable(1, c.width, rngs) if c.class_token else None
        positions = _learned_positions(c)
        self.positions = PositionTable(positions, c.width, rngs) if positions else None
        self.norm = NORMS[c.norm](c.width, c.norm_eps) if c.embed_norm else None
        self.config = c

    def __call__(self, items: ItemBatch, dtype: jnp.dtype) -> Float[Array, "r l d"]:
        c = self.config
        _, row, column = jnp.moveaxis(items.coordinates, -1, 0)
        pixels = items.values.reshape(*items.values.shape[:2], c.patch**2, c.channels)
        # (pixel / 255 - mean) / std, in float32 whatever the precision: bfloat16 cannot tell 256 levels apart.
        # values * scale - shift, one multiply-add per pixel.
        scale = 1 / (255 * np.array(c.std))
        shift = np.array(c.mean) / np.array(c.std)
        pixels = pixels.astype(jnp.float32) * scale.astype(np.float32) - shift.astype(np.float32)
        pixels = jnp.where((items.item >= 0)[..., None], pixels.reshape(items.values.shape), 0).astype(dtype)
        # A still image is repeated over the frames of a temporal patch (Qwen2-VL).
        x = self.patches(jnp.tile(pixels, c.frames))
        if self.class_token is not None:
            x = jnp.where((row < 0)[..., None], self.class_token(jnp.zeros_like(row), dtype), x)
        if isinstance(c.positions, StretchedGrid):
            x = x + interpolate_positions(self.positions, c.positions.side, items).astype(dtype)
        elif self.positions is not None:
            # Entry 0 is the class token's, where there is one; the grid follows row by row.
            index = jnp.where(row < 0, 0, row * c.positions.columns + column + c.class_token)
            x = x + self.positions(index, dtype)
        return x if self.norm is None else self.norm(x)


def _learned_positions(config: VisionConfig) -> int:
    """Count the entries of the table of learned positions."""
    match config.positions:
        case LearnedGrid(rows=rows, columns=columns):
            return rows * columns + config.class_token
        case StretchedGrid(side=side):
            return side**2
    return 0


def interpolate_positions(table: PositionTable, side: int, items: ItemBatch) -> Float[Array, "r l d"]:
    """Interpolate a `side` x `side` grid of position vectors bilinearly, its corners aligned with those of each image.

    With side 4, patch column 3 of 7 lies at 3 * (4 - 1) / (7 - 1) = 1.5: half of column 1 and half of column 2.
    """
    patch = jnp.maximum(items.coordinates[..., 1:], 0)
    point = patch.astype(jnp.float32) * (side - 1) / jnp.maximum(max_in_item(patch, items.item), 1)
    vectors = jnp.zeros((), jnp.float32)
    for step in ((0, 0), (0, 1), (1, 0), (1, 1)):
        corner = jnp.floor(point) + jnp.array(step, jnp.float32)
        weight = jnp.prod(1 - jnp.abs(point - corner), axis=-1, keepdims=True)
        # Beyond the last row or column the weight is 0, so any index will do.
        row, column = jnp.moveaxis(jnp.minimum(corner.astype(jnp.int32), side - 1), -1, 0)
        vectors = vectors + weight * table(row * side + column, jnp.dtype(jnp.float32))
    return vectors


class VisionEncoder(nnx.Module):
    """embed -> layers -> head over patches in merge order: the members of each merge group are contiguous.

    A group at an image's edge may hold padded patches (item -1): they attend nothing, and nothing attends them. In an
    encoder with a class token, an image's last group holds it (row and column -1), and padding.
    """

    def __init__(self, config: VisionConfig, plan: tuple[LayerStack, ...], dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.embed = PatchEmbedding(c, rngs)
        block = encoder_layer_config(c)
        self.layers = LayerStacks(lambda rngs: TransformerLayer(block, rngs), plan, rngs, c.windowed)
        self.head = NORMS[c.head_norm_kind](c.width, c.norm_eps) if c.head_norm else None
        self.config = c
        self.dropout = c.dropout
        self.dtype = dtype

    def embedded(self, items: ItemBatch) -> Float[Array, "r l d"]:
        return constrain(self.embed(items, self.dtype), "rows", "length", "width")

    def finished(self, x: Float[Array, "r l d"]) -> Float[Array, "r l d"]:
        """Apply the final norm, if there is one, to the output of the last layer."""
        return x if self.head is None else self.head(x)

    def context(self, items: ItemBatch) -> Context:
        """Build the masks, and the rotary angles if positions are rotary."""
        c = self.config
        patch = jnp.maximum(items.coordinates[..., 1:], 0)
        context = Context(encoder_mask(items.item), window_mask=self._window_mask(items.item, patch))
        if isinstance(c.positions, LearnedGrid):
            return context
        return context._replace(rotation=rotation_2d(patch, c.width // c.heads, c.positions.theta))

    def _window_mask(self, item: Int[Array, "r l"], patch: Int[Array, "r l 2"]) -> MaskSpec | None:
        """Build the mask of layers with window attention: full inside each square window of an image."""
        if not self.config.windowed:
            return None
        row, column = jnp.moveaxis(patch // self.config.window, -1, 0)
        # A query that sees no kind attends its span alone, here the window.
        return encoder_mask(item)._replace(span=1 + row * MAX_WINDOWS + column, sees=jnp.zeros_like(item))

    def origin(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l"]]:
        """Return every position's sample id, and its index among those of the sample's images."""
        return items.owner, items.offset

    def places(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l 3"]]:
        """Return item and coordinates of every output position."""
        return items.item, items.coordinates
