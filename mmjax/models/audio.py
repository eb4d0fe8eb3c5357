"""Whisper's encoder over packed log-mel frames: two convolutions, positions, a transformer.

A convolution is written as explicit taps (shift, mask, matrix product), so that a tap which would reach into the next
clip, or into padding, is zero: a packed clip sees exactly the zero padding that it would see alone.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.batch import ItemBatch
from mmjax.config import AudioConfig, StoredTable
from mmjax.models.attention import encoder_mask
from mmjax.models.layer_stacks import LayerStack, LayerStacks
from mmjax.models.layers import (
    ACTIVATIONS,
    Context,
    FixedTable,
    LayerNorm,
    Linear,
    TransformerLayer,
    encoder_layer_config,
)
from mmjax.parallel.sharding import constrain

STRIDE = 2  # frames per position after the second convolution
MAX_TIMESCALE = 10_000.0


def taps(x: Float[Array, "r l f"], item: Int[Array, "r l"], stride: int) -> Float[Array, "r m 3*f"]:
    """Concatenate frames t-1, t and t+1 of every `stride`-th frame t; zero where not of the same item as t."""
    length = item.shape[1]
    centre = item[:, ::stride]
    # padded[:, t + 1] is frame t, so that slices from 0, 1 and 2 are the frames before, at and after t.
    padded_item = jnp.pad(item, ((0, 0), (1, 1)), constant_values=-1)
    padded_x = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    members = []
    for first in range(3):
        neighbour = padded_item[:, first : first + length : stride]
        same = (neighbour == centre) & (centre >= 0)
        members.append(jnp.where(same[..., None], padded_x[:, first : first + length : stride], 0))
    return jnp.concatenate(members, axis=-1)


def sinusoids(time: Int[Array, "r l"], width: int) -> Float[Array, "r l d"]:
    """Compute Whisper's position embedding: sines, then cosines, of `width / 2` timescales from 1 to 10000."""
    pairs = width // 2
    scales = jnp.exp(-jnp.log(MAX_TIMESCALE) / (pairs - 1) * jnp.arange(pairs, dtype=jnp.float32))
    angles = time.astype(jnp.float32)[..., None] * scales
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class AudioStem(nnx.Module):
    """Two convolutions of kernel 3, the second of stride 2, then positions in the clip."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        # A convolution of kernel 3 as one matrix over the three concatenated taps.
        self.first = Linear(3 * c.mels, c.width, (None, "embed"), rngs, bias=True)
        self.second = Linear(3 * c.width, c.width, ("embed", None), rngs, bias=True)
        stored = c.positions.positions if isinstance(c.positions, StoredTable) else 0
        self.positions = FixedTable(sinusoids(jnp.arange(stored)[None], c.width)[0]) if stored else None
        self.activation = c.stem_activation

    def __call__(
        self, x: Float[Array, "r l f"], item: Int[Array, "r l"], time: Int[Array, "r m"]
    ) -> Float[Array, "r m d"]:
        activation = ACTIVATIONS[self.activation]
        x = activation(self.first(taps(x, item, 1)))
        # Clips start at multiples of the stride, so packing does not change which frames the outputs are centred on.
        x = activation(self.second(taps(x, item, STRIDE)))
        if self.positions is None:
            return x + sinusoids(time, x.shape[-1]).astype(x.dtype)
        return x + self.positions(time, x.dtype)


class AudioEncoder(nnx.Module):
    """embed -> layers -> head over frames in time order; every clip starts at a multiple of the stride.

    The convolutions read all frames of a clip, its padding of silence included; the layers attend those up to the end
    of the recording (`ItemBatch.coordinates`).
    """

    def __init__(self, config: AudioConfig, plan: tuple[LayerStack, ...], dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.embed = AudioStem(c, rngs)
        block = encoder_layer_config(c)
        self.layers = LayerStacks(lambda rngs: TransformerLayer(block, rngs), plan, rngs)
        self.head = LayerNorm(c.width, c.norm_eps)
        self.pool = c.pool
        self.dropout = c.dropout
        self.dtype = dtype

    def embedded(self, items: ItemBatch) -> Float[Array, "r m d"]:
        if items.values.shape[1] % (STRIDE * self.pool):
            raise ValueError(
                f"a row of {items.values.shape[1]} audio frames is no multiple of the stride {STRIDE * self.pool}"
            )
        x = self.embed(items.values.astype(self.dtype), items.item, items.coordinates[:, ::STRIDE, 0] // STRIDE)
        return constrain(x, "rows", "length", "width")

    def context(self, items: ItemBatch) -> Context:
        """Build the attention mask of a batch; the stem has added positions already."""
        return Context(encoder_mask(self._layer_items(items)))

    def finished(self, x: Float[Array, "r m d"]) -> Float[Array, "r n d"]:
        """Pool the last layer's output over every `pool` positions and apply the final norm."""
        if self.pool > 1:
            x = x.reshape(len(x), x.shape[1] // self.pool, self.pool, x.shape[2]).mean(2)
        return self.head(x)

    def origin(self, items: ItemBatch) -> tuple[Int[Array, "r m"], Int[Array, "r m"]]:
        """Return every position's sample id, and the index of its first frame among those of the sample's clips."""
        return items.owner[:, ::STRIDE], items.offset[:, ::STRIDE]

    def places(self, items: ItemBatch) -> tuple[Int[Array, "r n"], Int[Array, "r n 3"]]:
        """Return item and coordinates of every output position, time in units of stride times pool.

        Positions at a clip's end that are too few to be pooled are padding.
        """
        stride = STRIDE * self.pool
        # The last position of each pool decides: where it is padding, the pool is incomplete.
        return self._layer_items(items)[:, self.pool - 1 :: self.pool], items.coordinates[:, ::stride] // stride

    def _layer_items(self, items: ItemBatch) -> Int[Array, "r m"]:
        """Return the item of every position after the stem, -1 for padding and for silence behind a recording."""
        return jnp.where(items.coordinates[..., 1] < 0, -1, items.item)[:, ::STRIDE]
