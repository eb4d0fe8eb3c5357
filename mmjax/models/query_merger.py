"""Merge an image's patches inside a tower, and put learned queries behind them: DeepSeek-OCR 2's tower.

A norm and a convolution of 3 x 3 patches, as behind SAM, then two of stride 2: one position of 4 x 4 patches. The
layers behind see an image's positions and as many queries, of which the LLM sees what becomes of them.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mmjax.batch import ROW, ItemBatch, MaskSpec
from mmjax.config import VisionConfig
from mmjax.config.encoders import QUERY_MERGE
from mmjax.models.layers import Context, LayerConfig, LayerNorm, PositionTable, RMSNorm
from mmjax.models.linear import Linear
from mmjax.models.remat import keep_inputs
from mmjax.models.rope import max_in_item, rotation_1d

NORM_EPS = 1e-6  # of the norms between convolutions, whatever the config's
STEPS = np.array(list(product((-1, 0, 1), repeat=2)))  # to a patch's neighbours, row by row


class Neighbours(NamedTuple):
    """The 3 x 3 patches around each of a row in merge order, itself among them. Both [R, L, 9]."""

    index: Array  # int32, in the row
    valid: Array  # bool, whether the image has it

    @classmethod
    def of(
        cls,
        item: Int[Array, "r l"],
        place: Int[Array, "r l 2"],
        sides: Int[Array, "r l 2"],
        square: int,
    ) -> Neighbours:
        """Locate the neighbours of patches in (row, column) of images of such sides, in order of squares."""
        start = jnp.arange(item.shape[1]) - _index(place, sides, square)
        around = place[..., None, :] + STEPS
        size = sides[..., None, :]
        valid = jnp.all((around >= 0) & (around < size), axis=-1) & (item >= 0)[..., None]
        return cls(jnp.where(valid, start[..., None] + _index(around, size, square), 0), valid)


def every_second(x: Array, square: int) -> Array:
    """Take what [R, L, ...] holds of patches in even rows and columns, which squares of such a side have in order."""
    rows, length, *inner = x.shape
    squares = x.reshape(rows, length // square**2, square, square, *inner)
    return squares[:, :, ::2, ::2].reshape(rows, length // 4, *inner)


def take_positions(x: Float[Array, "r l d"], index: Int[Array, "r m"] | None) -> Array:
    """Take positions of every row; without an index the row as it is."""
    return x if index is None else jnp.take_along_axis(x, index[..., None], axis=1)


def _index(place: Array, sides: Array, square: int) -> Array:
    """Number a patch in its image in merge order."""
    (row, column), columns = jnp.moveaxis(place, -1, 0), sides[..., 1]
    outer = row // square * (columns // square) + column // square
    return outer * square**2 + row % square * square + column % square


class Convolution(nnx.Module):
    """A convolution of 3 x 3 patches, without a bias, around those that `Neighbours` have."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        self.linear = Linear(len(STEPS) * inputs, outputs, (None, "embed"), rngs)

    def __call__(self, x: Float[Array, "r l d"], around: Neighbours) -> Float[Array, "r m e"]:
        @keep_inputs
        def convolved(x: Array) -> Array:
            rows, length, taps = around.index.shape
            index = around.index.reshape(rows, length * taps, 1)
            patches = jnp.take_along_axis(x, index, axis=1).reshape(rows, length, taps, x.shape[-1])
            patches = jnp.where(around.valid[..., None], patches, 0)
            return self.linear(patches.reshape(rows, length, taps * x.shape[-1]))

        return convolved(x)


class Positions(NamedTuple):
    """The positions behind the merger: of each image those of merged patches, row by row, then as many queries.

    All int32 [R, 2 G], of G merged patches in a row: two images of 1 and 4 of them become
    0 q 1 2 3 4 q q q q.
    """

    item: Array  # -1 = padding
    number: Array  # among those of its item
    count: Array  # of the item's merged patches
    start: Array  # of the item's first, among those of the row

    @classmethod
    def of(cls, items: ItemBatch, square: int) -> Positions:
        """Arrange the positions of items in merge order."""
        item = items.item[:, :: square**2]
        place = jnp.maximum(items.coordinates[:, :: square**2, ROW:], 0) // square
        sides = 1 + max_in_item(place, item)
        start = jnp.arange(item.shape[1]) - (place[..., 0] * sides[..., 1] + place[..., 1])
        twice = partial(jnp.repeat, repeats=2, axis=1)
        item, start, count = map(twice, (item, start, sides[..., 0] * sides[..., 1]))
        return cls(item, jnp.arange(item.shape[1]) - 2 * start, count, start)

    @property
    def is_query(self) -> Bool[Array, "r p"]:
        """Tell which positions are queries."""
        return self.number >= self.count

    @property
    def source(self) -> Int[Array, "r p"]:
        """Return the merged patch of the row that stands at a position, or whose token its query becomes."""
        number = self.number - self.is_query * self.count
        return jnp.where(self.item >= 0, self.start + number, 0)

    @property
    def mask(self) -> MaskSpec:
        """Return the mask under which merged patches attend each other, and queries all before them."""
        ones = jnp.ones_like(self.item)
        span = jnp.where(self.is_query, 0, self.item + 1)
        pos = jnp.broadcast_to(jnp.arange(self.item.shape[1], dtype=jnp.int32), self.item.shape)
        return MaskSpec(self.item, pos, span, ones, ones)

    def queries(self, x: Float[Array, "r p d"]) -> Float[Array, "r g d"]:
        """Take what has become of the queries, in the order of the merged patches."""
        start, count = (y[:, ::2] for y in (self.start, self.count))
        index = start + count + jnp.arange(start.shape[1])
        return take_positions(x, jnp.where(self.item[:, ::2] >= 0, index, 0))


class Merging(NamedTuple):
    """Indices that the merger takes beside activations."""

    around: tuple[Neighbours, ...]  # of each convolution
    positions: Positions

    @classmethod
    def of(cls, items: ItemBatch, square: int) -> Merging:
        """Locate the patches of items in merge order."""
        place = jnp.maximum(items.coordinates[..., ROW:], 0)
        sides = 1 + max_in_item(place, items.item)
        full = Neighbours.of(items.item, place, sides, square)
        second = partial(every_second, square=square)
        half = Neighbours.of(
            second(items.item), second(place) // 2, second(sides) // 2, square // 2
        )
        halved = (full, square), (half, square // 2)
        around = full, *(Neighbours(*(every_second(x, n) for x in y)) for y, n in halved)
        return cls(around, Positions.of(items, square))


class QueryMerger(nnx.Module):
    """Make one position of 4 x 4 patches, and put learned queries behind those of each image."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        c = config.query_layers
        first, second = c.merger_widths
        self.projection = Linear(config.width, first, (None, "embed"), rngs)
        self.projection_norm = LayerNorm(first, NORM_EPS)
        self.neighbours = Convolution(first, first, rngs)
        self.neighbours_norm = LayerNorm(first, NORM_EPS)
        self.halving = Convolution(first, second, rngs)
        self.merging = Convolution(second, c.width, rngs)
        tables = {f"side_{n}": PositionTable(n**2, c.width, rngs) for n in c.sides}
        self.queries = nnx.Dict(tables)

    def __call__(self, x: Float[Array, "r l d"], context: Context) -> Float[Array, "r p e"]:
        order, merging = context.merging
        x = self.projection_norm(self.projection(take_positions(x, order)))
        whole, halving, last = merging.around
        x = self.neighbours_norm(self.neighbours(x, whole))
        x = self.merging(self.halving(x, halving), last)
        positions = merging.positions
        x = take_positions(x, positions.source)
        # Images of no such side are refused before they are loaded.
        for table in self.queries.values():
            count = len(table.weight[...])
            number = jnp.clip(positions.number - count, 0, count - 1)
            is_query = positions.is_query & (positions.count == count)
            x = jnp.where(is_query[..., None], table(number, x.dtype), x)
        return x


def query_context(
    config: VisionConfig, items: ItemBatch, order: Int[Array, "r l"] | None, dtype: jnp.dtype
) -> tuple[tuple[Array | None, Merging], Context]:
    """Make what the merger takes, and the context of the layers behind it. items: in merge order.

    order: where each of these patches lies in the order of the layers before it; None: it is the same.
    """
    c = config.query_layers
    merging = Merging.of(items, QUERY_MERGE)
    positions = merging.positions
    rotation = rotation_1d(positions.number, c.head_width, c.theta)
    layer_context = Context(positions.mask, rotation).planned(
        config.attention, c.head_width, (c.heads, c.kv_heads), dtype
    )
    return (order, merging), layer_context


def query_layer_config(config: VisionConfig) -> LayerConfig:
    """Describe a layer behind the merger."""
    c = config.query_layers
    return LayerConfig(
        width=c.width,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_width=c.head_width,
        mlp_width=c.mlp_width,
        backend=config.attention,
        norm=partial(RMSNorm, eps=c.norm_eps),
        activation=c.activation,
        gated=True,
        biases=("query", "key", "value"),
    )
