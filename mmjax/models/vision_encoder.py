"""Vision encoders over packed rows of images and of videos' frames."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from mmjax.batch import ROW, ItemBatch
from mmjax.config import (
    AlternatingGrid,
    AxisTables,
    FractionalGrid,
    LearnedGrid,
    StretchedGrid,
    VisionConfig,
)
from mmjax.kernels.masks import encoder_mask
from mmjax.models.layer_stacks import LayerStacks
from mmjax.models.layers import (
    MLP,
    NORMS,
    Context,
    LayerNorm,
    NormLayer,
    PositionTable,
    SelfAttention,
    TransformerLayer,
    encoder_layer_config,
    relative_width,
    with_relative_positions,
)
from mmjax.models.linear import Linear
from mmjax.models.query_merger import Positions, QueryMerger, query_context, query_layer_config
from mmjax.models.relative_positions import Places
from mmjax.models.remat import keep_inputs
from mmjax.models.rope import max_in_item, rotation_2d
from mmjax.models.stack_scan import LayerStack
from mmjax.parallel.sharding import constrain


class PatchEmbedding(nnx.Module):
    """Normalised pixels projected to the width; class token, registers, learned positions, a norm as configured."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        c = config
        values = c.frames * c.patch**2 * c.channels
        self.patch_norm = LayerNorm(values, c.norm_eps) if c.patch_norm else None
        self.patches = Linear(values, c.width, (None, "embed"), rngs, bias=c.embed_bias)
        self.class_token = PositionTable(1, c.width, rngs) if c.class_token else None
        self.registers = PositionTable(c.registers, c.width, rngs) if c.registers else None
        positions = _learned_positions(c)
        self.positions = PositionTable(positions, c.width, rngs) if positions else None
        self.norm = NORMS[c.norm](c.width, c.norm_eps) if c.embed_norm else None
        self.config = c

    def __call__(self, items: ItemBatch, dtype: jnp.dtype) -> Float[Array, "r l d"]:
        c = self.config
        _, row, column = jnp.moveaxis(items.coordinates, -1, 0)
        *places, values = items.values.shape
        pixels = items.values.reshape(*places, values // c.channels, c.channels)
        normalize = rounded_pixels if c.images.rounds_pixels else exact_pixels
        pixels = normalize(pixels.astype(jnp.float32), np.array(c.mean), np.array(c.std))
        # Padding is zero after normalisation, not before: a black pixel is not zero then.
        pixels = jnp.where(
            (items.item >= 0)[..., None], pixels.reshape(items.values.shape), 0
        ).astype(dtype)
        # Where no videos are taken, a batch has one frame of a temporal patch: still images are
        # repeated (Qwen2-VL).
        x = jnp.tile(pixels, c.frames * c.patch**2 * c.channels // pixels.shape[-1])
        x = self.patches(x if self.patch_norm is None else self.patch_norm(x))
        if self.class_token is not None:
            x = jnp.where((row < 0)[..., None], self.class_token(jnp.zeros_like(row), dtype), x)
        if c.embed_norm_first and self.norm is not None:
            x = self.norm(x)
        if isinstance(c.positions, StretchedGrid):
            x = x + interpolate_positions(self.positions, c.positions, items).astype(dtype)
        elif isinstance(c.positions, AxisTables):
            # Entries of columns, then those of rows. Sides of padded patches may be beyond them.
            row, column = (jnp.clip(axis, 0, c.positions.side - 1) for axis in (row, column))
            x = x + self.positions(column, dtype) + self.positions(c.positions.side + row, dtype)
        elif isinstance(c.positions, FractionalGrid):
            x = x + self.positions(fractional_positions(c.positions.side, items), dtype)
        elif self.positions is not None:
            # Entry 0, or the last, is the class token's, where there is one; the grid's are row by
            # row.
            grid = c.positions
            first, own = (0, grid.rows * grid.columns) if grid.class_last else (c.class_token, 0)
            index = jnp.where(row < 0, own, row * grid.columns + column + first)
            if c.positions.interpolation == "none":
                x = x + self.positions(index, dtype)
            else:
                x = x + resized_positions(self.positions, c.positions, items).astype(dtype)
        if self.registers is not None:
            # In columns -2, -3, ..: behind the class token in column -1.
            number = jnp.clip(-2 - column, 0, c.registers - 1)
            x = jnp.where((column < -1)[..., None], self.registers(number, dtype), x)
        return x if self.norm is None or c.embed_norm_first else self.norm(x)


def exact_pixels(x: Float[Array, "*b c"], mean: np.ndarray, std: np.ndarray) -> Array:
    """Compute (x / 255 - mean) / std, in float32 whatever the precision: bfloat16 cannot tell 256 levels apart."""
    # x * scale - shift, one multiply-add per pixel.
    scale = 1 / (255 * std)
    return x * scale.astype(np.float32) - (mean / std).astype(np.float32)


def rounded_pixels(x: Float[Array, "*b c"], mean: np.ndarray, std: np.ndarray) -> Array:
    """Compute (x / 255 - mean) / std, all of it rounded to bfloat16 as Llama 4's processor does."""
    # Not by a cast, which XLA may leave out.
    round = partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    mean, std = (round(numbers.astype(np.float32)) for numbers in (mean, std))
    return round(round(round(x * np.float32(1 / 255)) - mean) / std)


def _learned_positions(config: VisionConfig) -> int:
    """Count the entries of the table of learned positions."""
    match config.positions:
        case LearnedGrid(rows=rows, columns=columns):
            return rows * columns + config.class_token
        case StretchedGrid(side=side) | FractionalGrid(side=side):
            return side**2
        case AxisTables(side=side):
            return 2 * side
    return 0


def interpolate_positions(
    table: PositionTable, grid: StretchedGrid, items: ItemBatch
) -> Float[Array, "r l d"]:
    """Interpolate a square grid of position vectors to the size of each image.

    Bilinear, the grid's corners are aligned with those of each image: with side 4, patch column 3
    of 7 lies at 3 * (4 - 1) / (7 - 1) = 1.5, half of column 1 and half of column 2. With the other
    filters its edges are: the centre of patch column 3 of 7 lies at 3.5 / 7 * 4 - 0.5 = 1.5 too,
    where, bicubic, columns 0 to 3 have their shares. Transposed, patch (1, 0) of 2 x 3, its number
    3, lies where number 3 of 3 x 2 does, (1, 1).
    """
    patch = jnp.maximum(items.coordinates[..., ROW:], 0)
    largest = max_in_item(patch, items.item)
    if grid.transposed:
        number = patch[..., 0] * (largest[..., 1] + 1) + patch[..., 1]
        patch = jnp.stack(jnp.divmod(number, largest[..., 0] + 1), axis=-1)
        largest = largest[..., ::-1]
    bicubic = grid.filter == "bicubic"
    if grid.filter != "bilinear":
        point = (patch.astype(jnp.float32) + 0.5) / (largest + 1) * grid.side - 0.5
    else:
        point = patch.astype(jnp.float32) * (grid.side - 1) / jnp.maximum(largest, 1)
    vectors = jnp.zeros((), jnp.float32)
    # The cells around the point along each axis, 2 x 2 or 4 x 4.
    for step in product((-1, 0, 1, 2) if bicubic else (0, 1), repeat=2):
        cell = jnp.floor(point) + jnp.array(step, jnp.float32)
        distance = jnp.abs(point - cell)
        share = _cubic(distance, -0.75) if bicubic else 1 - distance
        if grid.filter == "bilinear_zeros":
            share = jnp.where((cell >= 0) & (cell < grid.side), share, 0)
        # Beyond the grid a share is the nearest cell's; with corners aligned it is 0.
        row, column = jnp.moveaxis(jnp.clip(cell.astype(jnp.int32), 0, grid.side - 1), -1, 0)
        vectors = vectors + jnp.prod(share, axis=-1, keepdims=True) * table(
            row * grid.side + column, jnp.dtype(jnp.float32)
        )
    return vectors


def fractional_positions(side: int, items: ItemBatch) -> Int[Array, "r l"]:
    """Find the cell of a `side` x `side` grid in which each patch's top left corner lies, if both have one size.

    With side 4, patch column 3 of 6 begins at 3 / 6, which is where column 2 of 4 does. Computed in
    float32 as in transformers, whose rounding decides at the borders of cells.
    """
    patch = jnp.maximum(items.coordinates[..., ROW:], 0)
    step = 1.0 / (1 + max_in_item(patch, items.item)).astype(jnp.float32)
    fraction = jnp.minimum(patch.astype(jnp.float32) * step, np.float32(1.0 - 1e-6))
    row, column = jnp.moveaxis(jnp.searchsorted(_cell_borders(side), fraction, side="right"), -1, 0)
    return row * side + column


def _cell_borders(side: int) -> np.ndarray:
    """Compute torch.arange(1 / side, 1, 1 / side) to the bit, as CPUs do.

    They take whole groups of 16 in vectors of 8, each of which counts on from a first value in
    float32.
    """
    step = 1 / side
    count = max(math.ceil((1.0 - step) / step), 0)
    index = np.arange(count)
    first = np.where(index < count // 16 * 16, index // 8 * 8, index)
    return ((step + step * first).astype(np.float32) + (index - first) * step).astype(np.float32)


def resized_positions(
    table: PositionTable, grid: LearnedGrid, items: ItemBatch
) -> Float[Array, "r l d"]:
    """Interpolate a square of position vectors to each image's size, as PyTorch's `interpolate` does.

    The class token's own vector, where the table begins with one, stays as it is.
    """
    side = grid.rows
    first = len(table.weight[...]) - side**2  # entry of the square's first cell

    @keep_inputs
    def interpolated(patch: Array, size: Array, weight: Array) -> Array:
        row, column = (
            axis_weights(patch[..., i], size[..., i], side, grid.interpolation) for i in (0, 1)
        )
        # A product with the whole square, most of whose factors are 0: a fraction of what one layer
        # costs.
        factors = (row[..., :, None] * column[..., None, :]).reshape(*row.shape[:2], side**2)
        cells = weight[first:].astype(jnp.float32)
        return jnp.matmul(factors, cells, precision=jax.lax.Precision.HIGHEST)

    patch = jnp.maximum(items.coordinates[..., ROW:], 0)
    size = 1 + max_in_item(patch, items.item)
    # Padded patches may lie beyond the image, where no cell has a share.
    x = interpolated(jnp.minimum(patch, size - 1), size, table.weight[...])
    if not first:
        return x
    tokens = items.coordinates[..., ROW] < 0
    return jnp.where(
        tokens[..., None], table(jnp.zeros_like(tokens, jnp.int32), jnp.dtype(jnp.float32)), x
    )


def axis_weights(
    place: Int[Array, "r l"], count: Int[Array, "r l"], side: int, interpolation: str
) -> Float[Array, "r l s"]:
    """Compute the share of each of `side` cells in cell `place` of `count`, both along one axis.

    Of 2 cells that 4 become, the first lies at (0 + 0.5) * 4 / 2 - 0.5 = 0.5: between cells 0 and
    1.
    """
    scale = side / count.astype(jnp.float32)[..., None]
    centre = (place.astype(jnp.float32)[..., None] + 0.5) * scale - 0.5
    cells = jnp.arange(side)
    if interpolation != "bicubic":
        distance = jnp.abs(cells - centre) / jnp.maximum(scale, 1)
        linear = interpolation == "bilinear"
        weights = jnp.maximum(1 - distance, 0) if linear else _cubic(distance, -0.5)
        return weights / weights.sum(-1, keepdims=True)
    taps = jnp.floor(centre) + jnp.arange(-1, 3)
    # Beyond the border lies the border's own cell again.
    taken = jnp.clip(taps, 0, side - 1)[..., None] == cells
    return jnp.sum(_cubic(taps - centre, -0.75)[..., None] * taken, axis=-2)


def _cubic(x: Array, a: float) -> Array:
    """Evaluate the cubic convolution kernel (Keys 1981), whose slope at 1 is `a`."""
    x = jnp.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return jnp.where(x <= 1, near, jnp.where(x < 2, far, 0))


class Windows(NamedTuple):
    """The attention windows of merge groups, `[R, G]`. A group's first member, its top left patch, is never padding."""

    item: Array  # -1 = padding
    row: Array
    column: Array
    order: Array  # the groups' indices in the row, so that those of a window are contiguous

    @classmethod
    def of(cls, items: ItemBatch, window: int, merge: int) -> Windows:
        """Order windows so that few cross a border between blocks of whole ones, for kernels that visit blocks.

        First windows whose size divides that of a whole one, largest first: with 8 x 8 patches
        those of 64, 32, 16, ..; then the others, cut by an image's edges to 48 or 36 patches, say.
        Padding is last.
        """
        # A window's area is known by its corner: with windows of 8 patches and an image of 20 x 12,
        # those of the first column are 8 x 8 and 4 x 8, those of the last 8 x 4 and 4 x 4.
        item = items.item[:, :: merge**2]
        corner = jnp.maximum(items.coordinates[:, :: merge**2, ROW:], 0)
        index = corner // window
        sides = jnp.minimum(max_in_item(corner, item) + merge - index * window, window)
        sizes = [size for size in range(window**2, 0, -1) if window**2 % size == 0]
        rank = np.full(window**2 + 1, len(sizes), np.int32)
        rank[sizes] = np.arange(len(sizes))
        rank = jnp.where(item < 0, len(sizes) + 1, jnp.asarray(rank)[jnp.prod(sides, axis=-1)])
        row, column = jnp.moveaxis(index, -1, 0)
        return cls(item, row, column, jnp.lexsort((column, row, item, rank)))

    def number(self) -> Int[Array, "r g"]:
        """Number the windows from 1 along the ordered row."""
        keys = jnp.take_along_axis(jnp.stack(self[:3]), self.order[None], axis=2)
        return 1 + jnp.cumsum(
            jnp.any(jnp.diff(keys, axis=2, prepend=keys[..., :1]) != 0, axis=0), axis=1
        )


def take_groups(x: Shaped[Array, "r l *w"], order: Int[Array, "r g"]) -> Shaped[Array, "r l *w"]:
    """Reorder the groups of positions of every row: output group g is input group order[g]."""
    rows, groups = order.shape
    x_groups = x.reshape(rows, groups, x.shape[1] // max(groups, 1), *x.shape[2:])
    # No index twice: backward then writes each group once, without atomic additions.
    take = jax.vmap(lambda x, i: x.at[i].get(unique_indices=True, mode="promise_in_bounds"))
    return take(x_groups, order).reshape(x.shape)


class WindowMerger(nnx.Module):
    """Make one position of 2 x 2 patches inside a tower: they attend each other, then an MLP is added to their mean."""

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs):
        c = config
        norm = partial(LayerNorm, eps=c.norm_eps)
        self.attention_norm = norm(c.width)
        self.attention = SelfAttention(
            replace(encoder_layer_config(c), backend="dense", window=0), rngs
        )
        self.mlp_norm = norm(c.pool * c.width)
        self.mlp = MLP(
            c.pool * c.width,
            c.pool * c.mlp_width,
            c.width,
            "gelu_tanh",
            rngs,
            biases=("up", "down"),
        )
        self.size = c.pool

    def __call__(self, x: Float[Array, "r l d"], context: Context) -> Float[Array, "r m d"]:
        rows, length, width = x.shape
        # Positions are in merge order: the patches of a window follow each other, and are a row of
        # attention.
        windows = lambda y: y.reshape(rows * length // self.size, self.size, *y.shape[2:])  # noqa: E731
        attn_out, _ = self.attention(
            windows(self.attention_norm(x)), Context(jax.tree.map(windows, context.mask))
        )
        x = (windows(x) + attn_out).reshape(rows, length // self.size, self.size, width)
        joined = x.reshape(rows, length // self.size, self.size * width)
        return self.mlp(self.mlp_norm(joined)) + x.mean(2)


class VisionEncoder(nnx.Module):
    """embed -> layers -> head over patches in merge order: the members of each merge group are contiguous.

    A group at an image's edge may hold padded patches (item -1): they attend nothing, and nothing
    attends them. In an encoder with a class token, an image's last groups hold it (row and column
    -1), registers and padding. Where layers have windows, what they compute is in window order
    (`Windows`), from `embedded` to `restored`. Behind a merger inside the tower (`merge_after`) a
    position stands for 2 x 2 patches.
    """

    def __init__(
        self, config: VisionConfig, plan: tuple[LayerStack, ...], dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        c = config
        self.embed = PatchEmbedding(c, rngs)
        plain = encoder_layer_config(c)
        merger = partial(QueryMerger if c.query_layers else WindowMerger, c)

        def make(number: int, rngs: nnx.Rngs) -> nnx.Module:
            if not c.attends:
                return NormLayer(NORMS[c.norm](c.width, c.norm_eps))
            if c.query_layers and number >= c.merge_after:
                return TransformerLayer(query_layer_config(c), rngs)
            windowed = number in c.windowed
            block = with_relative_positions(c, plain, windowed) if c.relative_side else plain
            is_last = number + 1 == c.merge_after
            return TransformerLayer(replace(block, merger=merger) if is_last else block, rngs)

        self.layers = LayerStacks(make, plan, rngs, c.windowed, c.merge_after)
        eps = c.query_layers.norm_eps if c.query_layers else c.norm_eps
        self.head = NORMS[c.head_norm_kind](c.feature_width, eps) if c.head_norm else None
        self.config = c
        self.window = 0 if c.relative_side else plain.window
        self.dropout = c.dropout
        self.dtype = dtype

    def embedded(self, items: ItemBatch) -> Float[Array, "r l d"]:
        return constrain(
            self.embed(self._window_ordered(items), self.dtype), "rows", "sequence", "width"
        )

    def restored(self, x: Float[Array, "r l d"], items: ItemBatch) -> Float[Array, "r m d"]:
        """Put a layer's output back into merge order, of queries behind patches what has become of them."""
        if self.config.query_layers:
            return Positions.of(items, self.config.inner_merge).queries(x)
        if not self.config.windowed:
            return x
        return constrain(
            take_groups(x, jnp.argsort(self._windows(items).order)), "rows", "length", "width"
        )

    def finished(self, x: Float[Array, "r l d"]) -> Float[Array, "r l d"]:
        """Apply the final norm, if there is one, to the output of the last layer."""
        return x if self.head is None else self.head(x)

    def context(self, items: ItemBatch) -> Context:
        """Build the masks, and the rotary angles if positions are rotary."""
        c = self.config
        ordered = self._window_ordered(items)
        context = Context(encoder_mask(ordered.item))
        if not c.attends:
            return context
        if c.windowed:
            window = jnp.repeat(self._windows(items).number(), c.connector.merge**2, axis=1)
            # A query that sees no kind attends its span alone, here the window.
            context = context._replace(
                window_mask=context.mask._replace(span=window, sees=jnp.zeros_like(window))
            )
        heads = relative_width(c, False), (c.heads, c.key_heads)
        in_window = relative_width(c, True), (c.heads, c.key_heads)
        context = context.planned(c.attention, *heads, self.dtype, self.window, in_window)
        if c.relative_side:
            patch = jnp.maximum(ordered.coordinates[..., ROW:], 0)
            of_image, of_window = (Places.of(patch, ordered.item, n) for n in (0, c.window))
            context = context._replace(places=of_image, window_places=of_window)
        if c.query_layers:
            order = jnp.argsort(self._windows(items).order) if c.windowed else None
            merging, merged = query_context(c, items, order, self.dtype)
            context = context._replace(merging=merging, merged=merged)
        elif c.merge_after:
            merged = Context(encoder_mask(ordered.item[:, :: c.pool]))
            context = context._replace(merged=merged.planned(c.attention, *heads, self.dtype))
        is_learned = isinstance(c.positions, LearnedGrid)
        if isinstance(c.positions, FractionalGrid) or (is_learned and not c.positions.theta):
            return context
        # Beside learned vectors patches count from 1: the class token, in row and column -1, is at 0.
        patch = jnp.maximum(ordered.coordinates[..., ROW:] + is_learned, 0)
        # Of tables by axis, and there, columns turn the first half.
        by_column = isinstance(c.positions, AxisTables | LearnedGrid)
        by_column = by_column or getattr(c.positions, "transposed", False)
        patch = patch[..., ::-1] if by_column else patch
        alternating = isinstance(c.positions, AlternatingGrid)
        turns = c.rope_neighbours and not is_learned
        return context._replace(
            rotation=rotation_2d(patch, c.head_width, c.positions.theta, alternating, turns)
        )

    def _windows(self, items: ItemBatch) -> Windows:
        return Windows.of(items, self.config.window, self.config.connector.merge)

    def _window_ordered(self, items: ItemBatch) -> ItemBatch:
        """Put items into the order of the layers."""
        if not self.config.windowed:
            return items
        return jax.tree.map(partial(take_groups, order=self._windows(items).order), items)

    def origin(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l"]]:
        """Return the sample id of every position of the layers, and its index among those of the sample's images."""
        ordered = self._window_ordered(items)
        return ordered.owner, ordered.offset

    def places(self, items: ItemBatch) -> tuple[Int[Array, "r l"], Int[Array, "r l 3"]]:
        """Return item and coordinates of every output position."""
        c = self.config
        merges = jnp.array([1, c.inner_merge, c.inner_merge])  # t, y, x
        return items.item[:, :: c.pool], items.coordinates[:, :: c.pool] // merges
