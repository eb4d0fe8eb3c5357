"""A ViT over packed patches: images of many sizes in one row, attention inside an image."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.batch import ItemBatch
from mmjax.config import LearnedGrid, StretchedGrid, VisionConfig
from mmjax.models.attention import MaskSpec, items_mask
from mmjax.models.encoder_block import NORMS, encoder_block
from mmjax.models.layer_runs import LayerRuns, Run
from mmjax.models.layers import Context, Linear, PositionTable, TransformerLayer
from mmjax.models.rope import rotation_2d
from mmjax.parallel.sharding import constrain

SQUARES = 2**15  # more than an image has side by side


class PatchEmbedding(nnx.Module):
    """Pixels normalised and projected, the class token, learned positions, a norm: whatever the config has."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        c = config
        self.patches = Linear(c.frames * c.patch**2 * c.channels, c.width, (None, "embed"), rngs, bias=c.embed_bias)
        self.class_token = PositionTable(1, c.width, rngs) if c.class_token else None
        places = _learned_places(c)
        self.positions = PositionTable(places, c.width, rngs) if places else None
        self.norm = NORMS[c.norm](c.width, c.norm_eps) if c.embed_norm else None
        self.config = c

    def __call__(self, items: ItemBatch, dtype: jnp.dtype) -> Float[Array, "r l d"]:
        c, (row, column) = self.config, (items.coordinates[..., 1], items.coordinates[..., 2])
        pixels = items.values.reshape(*items.values.shape[:2], c.patch**2, c.channels)
        # In float32, whatever the precision: 255 levels less a mean are more than bfloat16 can tell apart.
        scale, shift = 1 / (255 * np.array(c.std)), np.array(c.mean) / np.array(c.std)
        pixels = pixels.astype(jnp.float32) * scale.astype(np.float32) - shift.astype(np.float32)
        pixels = jnp.where((items.item >= 0)[..., None], pixels.reshape(items.values.shape), 0).astype(dtype)
        x = self.patches(jnp.tile(pixels, c.frames))
        if self.class_token is not None:
            x = jnp.where((row < 0)[..., None], self.class_token(jnp.zeros_like(row), dtype), x)
        if isinstance(c.positions, StretchedGrid):
            x = x + stretched(self.positions, c.positions.side, items).astype(dtype)
        elif self.positions is not None:
            place = jnp.where(row < 0, 0, row * c.positions.columns + column + c.class_token)
            x = x + self.positions(place, dtype)
        return x if self.norm is None else self.norm(x)


def _learned_places(config: VisionConfig) -> int:
    match config.positions:
        case LearnedGrid(rows=rows, columns=columns):
            return rows * columns + config.class_token
        case StretchedGrid(side=side):
            return side**2
    return 0


def stretched(table: PositionTable, side: int, items: ItemBatch) -> Float[Array, "r l d"]:
    """Vectors of a `side` x `side` grid whose corners lie on those of each image, between neighbours by distance."""
    place = jnp.maximum(items.coordinates[..., 1:], 0)
    at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(_extents(place, items.item) - 1, 1)
    low = jnp.floor(at)
    found = jnp.zeros((), jnp.float32)
    for down in (0, 1):
        for right in (0, 1):
            corner = low + jnp.array([down, right], jnp.float32)
            near = jnp.prod(1 - jnp.abs(at - corner), axis=-1, keepdims=True)
            row, column = jnp.moveaxis(jnp.minimum(corner.astype(jnp.int32), side - 1), -1, 0)
            found = found + near * table(row * side + column, jnp.dtype(jnp.float32))
    return found


def _extents(place: Int[Array, "r l 2"], item: Int[Array, "r l"]) -> Int[Array, "r l 2"]:
    """For every patch, how many rows and columns its image has."""

    def of_row(place: Array, item: Array) -> Array:
        slot = jnp.maximum(item, 0)
        last = jax.ops.segment_max(jnp.where((item >= 0)[:, None], place, 0), slot, len(item))
        return last[slot] + 1

    return jax.vmap(of_row)(place, item)


class VisionEncoder(nnx.Module):
    """embed -> layers -> head over patches in merge order: the members of each merge window are contiguous.

    A window at an image's edge may hold padded patches (item -1): they attend nothing, and nothing attends them. Of an
    encoder with a class token, an image's last window holds it (row and column -1), and padding.
    """

    def __init__(self, config: VisionConfig, plan: tuple[Run, ...], dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.embed = PatchEmbedding(c, rngs)
        block = encoder_block(c)
        self.layers = LayerRuns(lambda rngs: TransformerLayer(block, rngs), plan, rngs, c.windowed)
        self.head = NORMS[c.head_norm_kind](c.width, c.norm_eps) if c.head_norm else None
        self.config = c
        self.dropout = c.dropout
        self.dtype = dtype

    def embedded(self, items: ItemBatch) -> Float[Array, "r l d"]:
        return constrain(self.embed(items, self.dtype), "rows", "length", "width")

    def finished(self, x: Float[Array, "r l d"]) -> Float[Array, "r l d"]:
        """The head, on the output of the last layer."""
        return x if self.head is None else self.head(x)

    def context(self, items: ItemBatch) -> Context:
        """The masks, and the rotary angles if positions are rotary."""
        c, place = self.config, jnp.maximum(items.coordinates[..., 1:], 0)
        context = Context(items_mask(items.item), near=self._squares(items.item, place) if c.windowed else None)
        if isinstance(c.positions, LearnedGrid):
            return context
        return context._replace(rotation=rotation_2d(place, c.width // c.heads, c.positions.theta))

    def _squares(self, item: Int[Array, "r l"], place: Int[Array, "r l 2"]) -> MaskSpec:
        """The mask of windowed layers: every patch sees those of its own square of its own image."""
        row, column = jnp.moveaxis(place // self.config.window, -1, 0)
        # What sees no kind sees its span alone.
        return items_mask(item)._replace(span=1 + row * SQUARES + column, sees=jnp.zeros_like(item))

    def origin(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l"]]:
        """The sample of every position and its index among those of the sample's images."""
        return items.owner, items.offset

    def places(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l 3"]]:
        """Item and coordinates of every output position."""
        return items.item, items.coordinates
