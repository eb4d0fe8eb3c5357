"""Audio encoders over packed rows of clips."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.batch import ROW, TIME, ItemBatch, chunk_numbers
from mmjax.config import AudioConfig, RotaryTime, StoredTable
from mmjax.kernels.masks import encoder_mask
from mmjax.models.conformer import ConformerLayer
from mmjax.models.layer_stacks import LayerStacks
from mmjax.models.layers import (
    ACTIVATIONS,
    Context,
    FixedTable,
    HeadNorm,
    LayerNorm,
    NormLayer,
    TransformerLayer,
    encoder_layer_config,
)
from mmjax.models.linear import Linear
from mmjax.models.remat import keep_inputs
from mmjax.models.rope import rotation_1d, sinusoids
from mmjax.models.stack_scan import LayerStack
from mmjax.parallel.sharding import constrain


def taps(
    x: Float[Array, "r l *b f"], item: Int[Array, "r l"], stride: int
) -> Float[Array, "r m *b 3*f"]:
    """Concatenate frames t-1, t and t+1 of every `stride`-th frame t; zero where not of the same item as t."""
    length = item.shape[1]
    centre = item[:, ::stride]
    # padded[:, t + 1] is frame t, so that slices from 0, 1 and 2 are the frames before, at and
    # after t.
    padded_item = jnp.pad(item, ((0, 0), (1, 1)), constant_values=-1)
    padded_x = jnp.pad(x, ((0, 0), (1, 1), *((0, 0),) * (x.ndim - 2)))
    members = []
    for first in range(3):
        neighbour = padded_item[:, first : first + length : stride]
        # Two paddings are equal too, hence the second condition.
        same = (neighbour == centre) & (centre >= 0)
        same = same.reshape(*same.shape, *(1,) * (x.ndim - 2))
        members.append(jnp.where(same, padded_x[:, first : first + length : stride], 0))
    return jnp.concatenate(members, axis=-1)


class AudioStem(nnx.Module):
    """Two convolutions of kernel 3, the second of stride 2, then positions in the clip, where they are added."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        # A convolution of kernel 3 as one matrix over the three concatenated taps.
        self.first = Linear(3 * c.mels, c.width, (None, "embed"), rngs, bias=True)
        self.second = Linear(3 * c.width, c.width, ("embed", None), rngs, bias=True)
        stored = c.positions.positions if isinstance(c.positions, StoredTable) else 0
        self.positions = (
            FixedTable(sinusoids(jnp.arange(stored)[None], c.width)[0]) if stored else None
        )
        self.is_rotary = isinstance(c.positions, RotaryTime)
        self.activation = c.stem_activation
        self.stride = c.stride

    def __call__(
        self, x: Float[Array, "r l f"], item: Int[Array, "r l"], time: Int[Array, "r m"]
    ) -> Float[Array, "r m d"]:
        activation = ACTIVATIONS[self.activation]
        x = activation(self.first(taps(x, item, 1)))
        # Clips start at multiples of the stride, so packing does not change which frames the
        # outputs are centred on.
        x = activation(self.second(taps(x, item, self.stride)))
        if self.is_rotary:
            return x
        if self.positions is None:
            return x + sinusoids(time, x.shape[-1]).astype(x.dtype)
        return x + self.positions(time, x.dtype)


class AudioStem2d(nnx.Module):
    """Three convolutions over time and bins, of kernel 3 and stride 2, a matrix, then positions in the chunk."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        into = partial(Linear, outputs=c.stem_width, axes=("embed", None), rngs=rngs, bias=True)
        self.first = into(9)
        self.second = into(9 * c.stem_width)
        self.third = into(9 * c.stem_width)
        self.output = Linear(c.stem_bins[-1] * c.stem_width, c.width, (None, "embed"), rngs)
        self.activation = c.stem_activation

    def __call__(
        self, x: Float[Array, "r l f"], item: Int[Array, "r l"], time: Int[Array, "r m"]
    ) -> Float[Array, "r m d"]:
        activation = ACTIVATIONS[self.activation]

        # Its activations are far larger than its input.
        @keep_inputs
        def convolved(x: Array, item: Array) -> Array:
            x = x[..., None]
            for convolution in (self.first, self.second, self.third):
                x = activation(convolution(bin_taps(taps(x, item, 2))))
                item = item[:, ::2]
            # Channel by channel, as they are stored.
            return self.output(
                jnp.swapaxes(x, -1, -2).reshape(*x.shape[:2], x.shape[2] * x.shape[3])
            )

        x = convolved(x, item)
        return x + sinusoids(time, x.shape[-1]).astype(x.dtype)


def bin_taps(x: Float[Array, "r m b f"]) -> Float[Array, "r m c 3*f"]:
    """Concatenate bins b-1, b and b+1 of every other bin b; zero beyond the first and the last."""
    padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
    return jnp.concatenate(
        [padded[:, :, first : first + x.shape[2] : 2] for first in range(3)], axis=-1
    )


class ConformerStem(nnx.Module):
    """Two convolutions over time and bins, of kernel 3 and stride 2, each with a norm, and a matrix."""

    def __init__(self, config: AudioConfig, rngs: nnx.Rngs):
        c = config
        first, second = c.stem_channels
        norm = partial(LayerNorm, eps=c.norm_eps, biased=False)
        self.first = Linear(9, first, (None, "embed"), rngs)
        self.first_norm = norm(first)
        self.second = Linear(9 * first, second, ("embed", None), rngs)
        self.second_norm = norm(second)
        self.output = Linear(c.stem_bins[-1] * second, c.width, (None, "embed"), rngs)
        self.activation = c.stem_activation

    def __call__(
        self, x: Float[Array, "r l f"], item: Int[Array, "r l"], time: Int[Array, "r m"]
    ) -> Float[Array, "r m d"]:
        activation = ACTIVATIONS[self.activation]

        # Its activations are far larger than its input.
        @keep_inputs
        def convolved(x: Array, item: Array) -> Array:
            x = activation(self.first_norm(self.first(bin_taps(taps(x[..., None], item, 2)))))
            x = bin_taps(taps(x, item[:, ::2], 2))
            x = activation(self.second_norm(self.second(x)))
            return self.output(x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]))

        return convolved(x, item)


class Frames(nnx.Module):
    """Frames themselves as positions, of layers that do not attend."""

    def __call__(
        self, x: Float[Array, "r l f"], item: Int[Array, "r l"], time: Int[Array, "r m"]
    ) -> Float[Array, "r m d"]:
        return x


def _make_stem(config: AudioConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Build what makes positions of frames."""
    if not config.attends:
        return Frames()
    if config.conformer:
        return ConformerStem(config, rngs)
    return AudioStem2d(config, rngs) if config.stem_width else AudioStem(config, rngs)


class AudioEncoder(nnx.Module):
    """embed -> layers -> head over frames in time order; every clip starts at a multiple of the stride.

    The convolutions read all frames of a clip, its padding of silence included; the layers attend
    those up to the end of the recording (`ItemBatch.coordinates`). With chunks
    (`AudioConfig.chunk`) each is encoded as a clip of its own, but for attention, which may reach
    over several.
    """

    def __init__(
        self, config: AudioConfig, plan: tuple[LayerStack, ...], dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        c = config
        self.embed = _make_stem(c, rngs)
        make = partial(TransformerLayer, encoder_layer_config(c))
        make = partial(ConformerLayer, c) if c.conformer else make
        make = make if c.attends else lambda _: NormLayer(HeadNorm(c.norm_eps))
        self.layers = LayerStacks(lambda _, rngs: make(rngs), plan, rngs)
        # A Conformer's last layer ends with a norm of its own.
        self.head = LayerNorm(c.width, c.norm_eps) if c.attends and not c.conformer else None
        self.config = c
        self.pool = c.pool
        self.dropout = c.dropout
        self.dtype = dtype

    def embedded(self, items: ItemBatch) -> Float[Array, "r m d"]:
        stride = self.config.stride
        if items.values.shape[1] % (stride * self.pool):
            raise ValueError(
                f"a row of {items.values.shape[1]} audio frames is no multiple of the stride {stride * self.pool}"
            )
        time = items.coordinates[..., TIME]
        item = items.item
        if self.config.chunk:
            frames = self.config.chunk_positions * stride
            item = chunk_numbers(item, time, jnp.arange(item.shape[1]), frames)
            time = time % frames
        x = self.embed(items.values.astype(self.dtype), item, time[:, ::stride] // stride)
        return constrain(x, "rows", "sequence", "width")

    def context(self, items: ItemBatch) -> Context:
        """Build the attention mask of a batch, and the angles of rotary positions; others were added by the stem."""
        c = self.config
        item = self._layer_items(items)
        time = items.coordinates[:, :: c.stride, TIME] // c.stride
        if c.chunk:
            item = chunk_numbers(
                item, time, jnp.arange(item.shape[1]), c.chunk_positions * c.attended_chunks
            )
        context = Context(encoder_mask(item))
        if c.conformer or not c.attends:  # which need no plan
            return context
        context = context.planned(c.attention, c.width // c.heads, (c.heads, c.heads), self.dtype)
        if not isinstance(c.positions, RotaryTime):
            return context
        time = time % c.chunk_positions if c.chunk else time
        return context._replace(rotation=rotation_1d(time, c.rotary_width, c.positions.theta))

    def finished(self, x: Float[Array, "r m d"]) -> Float[Array, "r n d"]:
        """Pool the last layer's output over every `pool` positions and apply the final norm, if there is one."""
        if self.pool > 1:
            x = x.reshape(len(x), x.shape[1] // self.pool, self.pool, x.shape[2]).mean(2)
        return x if self.head is None else self.head(x)

    def restored(self, x: Float[Array, "r m d"], items: ItemBatch) -> Float[Array, "r m d"]:
        """Return a layer's output: it is in time order."""
        return x

    def origin(self, items: ItemBatch) -> tuple[Int[Array, "r m"], Int[Array, "r m"]]:
        """Return every position's sample id, and the index of its first frame among those of the sample's clips."""
        stride = self.config.stride
        return items.owner[:, ::stride], items.offset[:, ::stride]

    def places(self, items: ItemBatch) -> tuple[Int[Array, "r n"], Int[Array, "r n 3"]]:
        """Return item and coordinates of every output position, time in units of stride times pool.

        Positions at a clip's end that are too few to be pooled are padding.
        """
        stride = self.config.stride * self.pool
        # The last position of each pool decides: where it is padding, the pool is incomplete.
        return self._layer_items(items)[:, self.pool - 1 :: self.pool], items.coordinates[
            :, ::stride
        ] // stride

    def _layer_items(self, items: ItemBatch) -> Int[Array, "r m"]:
        """Return the item of every position after the stem, -1 for padding and for silence behind a recording."""
        return jnp.where(items.coordinates[..., ROW] < 0, -1, items.item)[:, :: self.config.stride]
