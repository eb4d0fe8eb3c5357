"""A ViT at native resolution: images of any size as packed patches, 2-D rotary positions, attention inside an image."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.batch import ItemBatch
from mmjax.config import VisionConfig
from mmjax.models.attention import items_mask
from mmjax.models.encoder_block import encoder_block
from mmjax.models.layer_runs import LayerRuns, Run
from mmjax.models.layers import Context, LayerNorm, Linear, TransformerLayer
from mmjax.models.rope import rotation_2d
from mmjax.parallel.sharding import constrain


class VisionEncoder(nnx.Module):
    """embed -> layers -> head over patches in merge order: the members of each merge window are contiguous.

    A window at an image's edge may hold padded patches (item -1): they attend nothing, and nothing attends them.
    """

    def __init__(self, config: VisionConfig, plan: tuple[Run, ...], dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.embed = Linear(c.patch**2 * c.channels, c.width, (None, "embed"), rngs, bias=True)
        block = encoder_block(c)
        self.layers = LayerRuns(lambda rngs: TransformerLayer(block, rngs), plan, rngs)
        self.head = LayerNorm(c.width, c.norm_eps)
        self.head_width = c.width // c.heads
        self.rope_theta = c.rope_theta
        self.dropout = c.dropout
        self.dtype = dtype

    def embedded(self, items: ItemBatch) -> Float[Array, "r l d"]:
        values = jnp.where((items.item >= 0)[..., None], items.values, 0).astype(self.dtype)
        return constrain(self.embed(values), "rows", "length", "width")

    def context(self, items: ItemBatch) -> Context:
        """The mask and the rotary angles of a batch."""
        return Context(
            items_mask(items.item), rotation_2d(items.coordinates[..., 1:], self.head_width, self.rope_theta)
        )

    def origin(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l"]]:
        """The sample of every position and its index among those of the sample's images."""
        return items.owner, items.offset

    def places(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l 3"]]:
        """Item and coordinates of every output position."""
        return items.item, items.coordinates
