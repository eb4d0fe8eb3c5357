"""PixArt-alpha's diffusion transformer (Chen et al. 2023) over packed rows of latents of images of any size.

What an image's time does to its positions stays one vector per image. Rows are cut into blocks of
`min_patches` positions, the fewest that an image has, so that a block holds at most two images:
positions take the vectors of their image, and attend its condition, by choosing between two. That
costs in proportion to a row's length, whatever is in it; a masked product with the condition tokens
of the whole row would cost its square.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from mmjax.batch import ROW, ItemBatch
from mmjax.config import DiffusionTransformerConfig
from mmjax.config.generators import TIME_FEATURES
from mmjax.kernels.masks import encoder_mask
from mmjax.models.layer_stacks import LayerStacks
from mmjax.models.layers import MLP, Context, LayerConfig, LayerNorm, LayerOutput, SelfAttention
from mmjax.models.linear import Linear, apply_linears
from mmjax.models.remat import keep_inputs
from mmjax.models.rope import max_in_item
from mmjax.models.stack_scan import LayerStack
from mmjax.models.time_embedding import MAX_PERIOD, TimeEmbedding, cosines_and_sines
from mmjax.parallel.sharding import constrain

NO_SCORE = -1e30  # of a condition token that is not there
FINAL_EPS = 1e-6  # of the norm behind the last layer, whatever the config says of the others


class ImageBlocks(NamedTuple):
    """The images in each block of `min_patches` positions of a row: two at most, since none has fewer positions."""

    # one-hot: the first and the last image of a block; zeros where all is padding
    images: Float[Array, "r b 2 i"]
    last: Bool[Array, "r b p"]  # positions of the last image, where it is another than the first

    @classmethod
    def of(cls, item: Int[Array, "r l"], size: int, count: int, dtype: jnp.dtype) -> ImageBlocks:
        """Cut rows of at most `count` images, of `size` or more positions each."""
        # Images of 5, 4 and 6 positions in blocks of 4:
        #   item     0 0 0 0 | 0 1 1 1 | 1 2 2 2 | 2 2 2 -1
        #   images    0, 0      0, 1      1, 2      2, 2
        #   last     . . . . | . x x x | . x x x | . . .  .
        rows, length = item.shape
        item = jnp.pad(item, ((0, 0), (0, -length % size)), constant_values=-1)
        blocks = item.reshape(rows, item.shape[1] // size, size)
        last = blocks.max(-1, keepdims=True)
        # Padding is -1: it would be the least, and where all is padding both images are none.
        first = jnp.where(blocks < 0, last, blocks).min(-1, keepdims=True)
        images = jax.nn.one_hot(jnp.concatenate([first, last], axis=-1), count, dtype=dtype)
        return cls(images, (blocks == last) & (last != first))

    def take(self, x: Float[Array, "r i *d"]) -> Float[Array, "r b 2 *d"]:
        """Take the values of the two images of every block."""
        # A product with zeros and ones: in backward, unlike a gather, it adds up in the same order
        # every time.
        flat = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
        taken = jnp.einsum("rbki,rid->rbkd", self.images, flat, precision=jax.lax.Precision.HIGHEST)
        return taken.reshape(*taken.shape[:3], *x.shape[2:])

    def spread(self, x: Float[Array, "r i d"], length: int) -> Float[Array, "r l d"]:
        """Give every position the vector of its image."""
        pair = self.take(x)
        chosen = jnp.where(self.last[..., None], pair[:, :, None, 1], pair[:, :, None, 0])
        return self._joined(chosen, length)

    def attend(
        self,
        q: Float[Array, "r l n h"],
        k: Float[Array, "r c n h"],
        v: Float[Array, "r c n h"],
        present: Bool[Array, "r c"] | None = None,
    ) -> Float[Array, "r l n h"]:
        """Compute attention of every position to the condition tokens of its image.

        All have as many; present: where some of them may not be there.
        """
        rows, length, heads, width = q.shape
        blocks, size = self.last.shape[1:]
        count = self.images.shape[-1]
        queries = k.shape[1] // count
        # Condition tokens [R, I * queries, N, H] -> those of both images of a block [R, blocks, 2,
        # queries, N, H]; queries [R, L, N, H] -> [R, blocks, size, N, H].
        k, v = (self.take(x.reshape(rows, count, queries, heads, width)) for x in (k, v))
        q = jnp.pad(q, ((0, 0), (0, blocks * size - length), (0, 0), (0, 0))).reshape(
            rows, blocks, size, heads, width
        )
        # r = row, b = block, p = position in it, k = image, s = condition token, n = head, h =
        # channel.
        scores = (
            jnp.einsum("rbpnh,rbksnh->rbnpks", q, k, preferred_element_type=jnp.float32)
            * width**-0.5
        )
        if present is not None:
            taken = self.take(present.reshape(rows, count, queries).astype(q.dtype)) > 0
            # Finite: in padding there are none, and a mean of them is as good as another.
            scores = jnp.where(taken[:, :, None, None], scores, NO_SCORE)
        # [R, blocks, size, 2]: whether a position belongs to the first, or to the last image. The
        # softmax is over the tokens of both, of which those of the other image have weight 0.
        of_image = self.last[..., None] == jnp.array([False, True])
        scores = jnp.where(of_image[:, :, None, :, :, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores.reshape(*scores.shape[:4], 2 * queries), axis=-1)
        v = v.reshape(rows, blocks, 2 * queries, heads, width)
        out = jnp.einsum(
            "rbnps,rbsnh->rbpnh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return self._joined(out.astype(q.dtype), length)

    def _joined(self, x: Array, length: int) -> Array:
        """Join blocks `[R, blocks, size, ...]` to rows of this length."""
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]


class ImageInputs(NamedTuple):
    """Inputs of every layer that belong to the images of a row."""

    blocks: ImageBlocks
    time: Float[Array, "r i d"]  # embedded, sizes too where a model knows them
    # shift, scale and gate of attention, then of the MLP; a layer's table is added
    modulation: Float[Array, "r i 6 d"]
    condition: Float[Array, "r c e"]
    # condition tokens that are there; None: all of every image
    present: Bool[Array, "r c"] | None = None


class Table(nnx.Module):
    """Learned vectors added to the shifts, scales and gates that an image's time gives."""

    def __init__(self, size: int, width: int, rngs: nnx.Rngs):
        values = jax.random.normal(rngs.params(), (size, width), jnp.float32) * width**-0.5
        self.weight = nnx.Param(values, axes=(None, None))

    def __call__(self, x: Float[Array, "r i _ d"]) -> Float[Array, "r i n d"]:
        return x + self.weight[...].astype(x.dtype)


@keep_inputs
def _spread_over(x: Array, images: Array, blocks: ImageBlocks) -> Array:
    """Multiply every position by the vector of its image; in backward the vectors are spread again."""
    return x * blocks.spread(images, x.shape[1])


def modulated_norm(
    x: Float[Array, "r l d"],
    shift: Float[Array, "r i d"],
    scale: Float[Array, "r i d"],
    blocks: ImageBlocks,
    eps: float,
) -> Float[Array, "r l d"]:
    """Normalise each position to zero mean and unit variance, then scale and shift it as its image says."""

    @keep_inputs
    def norm(x: Array, shift: Array, scale: Array, blocks: ImageBlocks) -> Array:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
        shift, scale = (blocks.spread(v, x.shape[1]).astype(jnp.float32) for v in (shift, scale))
        return (y * (1 + scale) + shift).astype(x.dtype)

    return norm(x, shift, scale, blocks)


class CrossAttention(nnx.Module):
    """Attention of every position to the condition tokens of its image."""

    def __init__(self, config: DiffusionTransformerConfig, rngs: nnx.Rngs):
        c = config
        tokens = c.width if c.condition_mlp else c.condition_width
        self.query = Linear(c.width, c.width, ("embed", "heads"), rngs, bias="query" in c.biases)
        self.key = Linear(tokens, c.width, ("embed", "heads"), rngs, bias="key" in c.biases)
        self.value = Linear(tokens, c.width, ("embed", "heads"), rngs, bias="value" in c.biases)
        self.output = Linear(c.width, c.width, ("heads", "embed"), rngs, bias="output" in c.biases)
        self.heads = c.heads

    def __call__(self, x: Float[Array, "r l d"], images: ImageInputs) -> Float[Array, "r l d"]:
        @keep_inputs
        def attend(
            q: Array, k: Array, v: Array, blocks: ImageBlocks, present: Array | None
        ) -> Array:
            q, k, v = (
                y.reshape(*y.shape[:2], self.heads, y.shape[2] // self.heads) for y in (q, k, v)
            )
            return blocks.attend(q, k, v, present).reshape(x.shape)

        q = self.query(x)
        out = attend(
            q, *apply_linears(images.condition, self.key, self.value), images.blocks, images.present
        )
        return self.output(checkpoint_name(out, "attention_output"))


class DiffusionLayer(nnx.Module):
    """Self-attention within an image, cross-attention to its condition, then an MLP, each added to the stream.

    The first and the last are shifted, scaled and gated as the image's time says (adaLN-single).
    """

    def __init__(self, config: DiffusionTransformerConfig, rngs: nnx.Rngs):
        c = config
        self.table = Table(6, c.width, rngs)
        self.attention = SelfAttention(layer_config(c), rngs)
        self.cross_attention = CrossAttention(c, rngs)
        self.mlp = MLP(c.width, c.mlp_width, c.width, c.activation, rngs, biases=c.biases)
        self.eps = c.norm_eps

    def __call__(
        self, x: Float[Array, "r l d"], context: Context, past: None = None
    ) -> LayerOutput:
        images = context.images
        blocks = images.blocks
        vectors = jnp.moveaxis(self.table(images.modulation), 2, 0)
        attention_shift, attention_scale, attention_gate, mlp_shift, mlp_scale, mlp_gate = vectors
        y, _ = self.attention(
            modulated_norm(x, attention_shift, attention_scale, blocks, self.eps), context
        )
        x = x + _spread_over(y, attention_gate, blocks)
        x = checkpoint_name(x + self.cross_attention(x, images), "mlp_input")
        y = self.mlp(modulated_norm(x, mlp_shift, mlp_scale, blocks, self.eps))
        return LayerOutput(x + _spread_over(y, mlp_gate, blocks), None, None)


def layer_config(config: DiffusionTransformerConfig) -> LayerConfig:
    """Describe the self-attention of a layer. Raises ValueError where heads do not divide the width."""
    c = config
    if c.width % c.heads:
        raise ValueError(f"a width of {c.width} does not divide into {c.heads} heads")
    return LayerConfig(
        width=c.width,
        heads=c.heads,
        kv_heads=c.heads,
        head_width=c.width // c.heads,
        mlp_width=c.mlp_width,
        backend=c.attention,
        norm=partial(LayerNorm, eps=c.norm_eps),
        activation=c.activation,
        gated=False,
        biases=c.biases,
    )


def _present(
    condition: Float[Array, "r c e"], config: DiffusionTransformerConfig
) -> Bool[Array, "r c"] | None:
    """Return which condition tokens are present: the nonzero ones; None where every image has all."""
    return (condition != 0).any(-1) if config.text_tokens else None


def grid_positions(items: ItemBatch, width: int, grid: int, scale: float) -> Float[Array, "r l d"]:
    """Compute sines and cosines of a patch's column, then of its row, of images stretched to `grid` x `grid` patches.

    With a grid of 16, patch row 3 of an image of 32 lies at 1.5. scale: divides these positions.
    Float32.
    """
    patch = jnp.maximum(items.coordinates[..., ROW:], 0)
    size = 1 + max_in_item(patch, items.item)
    row, column = jnp.moveaxis(patch / (jnp.maximum(size, 1) / grid) / scale, -1, 0)
    quarter = width // 4
    frequencies = (1 / MAX_PERIOD ** (np.arange(quarter) / quarter)).astype(np.float32)
    angles = [place.astype(jnp.float32)[..., None] * frequencies for place in (column, row)]
    return jnp.concatenate([part for a in angles for part in (jnp.sin(a), jnp.cos(a))], axis=-1)


class ImageEmbedding(nnx.Module):
    """An image's time embedded; where a model knows them, its height, width and aspect ratio too (micro-conditions)."""

    def __init__(self, config: DiffusionTransformerConfig, rngs: nnx.Rngs):
        c = config
        self.time = TimeEmbedding(TIME_FEATURES, c.width, rngs)
        size_mlp = partial(
            MLP, TIME_FEATURES, c.width // 3, c.width // 3, "silu", biases=("up", "down")
        )
        self.side = size_mlp(rngs=rngs) if c.micro_conditions else None
        self.aspect = size_mlp(rngs=rngs) if c.micro_conditions else None
        self.pixels = c.patch * c.latents.factor  # per side of a patch

    def __call__(
        self, time: Float[Array, "r i"], items: ItemBatch, dtype: jnp.dtype
    ) -> Float[Array, "r i d"]:
        x = self.time(time, dtype)
        if self.side is None:
            return x
        # [R, L, I], and from it each image's number of patch rows and columns, [R, I]; 1 where
        # there is no image, whose aspect ratio would be 0 / 0.
        of_image = items.item[..., None] == jnp.arange(time.shape[1])
        patches = [
            jnp.max(jnp.where(of_image, 1 + items.coordinates[..., axis, None], 1), axis=1)
            for axis in (1, 2)
        ]
        height, width = (n.astype(jnp.float32) * self.pixels for n in patches)
        sides = [
            self.side(cosines_and_sines(side, TIME_FEATURES).astype(dtype))
            for side in (height, width)
        ]
        aspect = self.aspect(cosines_and_sines(height / width, TIME_FEATURES).astype(dtype))
        return x + jnp.concatenate([*sides, aspect], axis=-1)


class StoredLinear(nnx.Module):
    """A linear layer of a checkpoint that nothing computes: it gets no gradient and no weight decay."""

    def __init__(self, inputs: int, outputs: int):
        self.weight = nnx.Param(jnp.zeros((inputs, outputs), jnp.float32), axes=("embed", "fixed"))
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=(None,))


class Head(nnx.Module):
    """A norm modulated by the time, and the product that makes patches of velocities."""

    def __init__(self, config: DiffusionTransformerConfig, rngs: nnx.Rngs):
        c = config
        self.table = Table(2, c.width, rngs)
        self.output = Linear(c.width, c.patch_values, ("embed", None), rngs, bias=True)
        self.variance = StoredLinear(c.width, c.patch_values) if c.learned_variance else None

    def __call__(self, x: Float[Array, "r l d"], images: ImageInputs) -> Float[Array, "r l f"]:
        shift, scale = jnp.moveaxis(self.table(images.time[:, :, None]), 2, 0)
        return self.output(modulated_norm(x, shift, scale, images.blocks, FINAL_EPS))


class DiffusionTransformer(nnx.Module):
    """embed -> layers -> head over patches of latents, images one after the other, each row by row.

    `time` is that of each image of a row, `[R, I]`, where I is `config.max_images(L)`; image i of
    a row has its condition in columns i * queries to (i + 1) * queries of `condition` `[R, I *
    queries, E]`. Raises ValueError where a row is too short for an image, and where the width is no
    multiple of 4, or of 3 with micro-conditions.
    """

    def __init__(
        self,
        config: DiffusionTransformerConfig,
        plan: tuple[LayerStack, ...],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        c = config
        if c.width % 4 or (c.micro_conditions and c.width % 3):
            raise ValueError(
                f"a width of {c.width} is no multiple of {12 if c.micro_conditions else 4}"
            )
        self.patches = Linear(c.patch_values, c.width, (None, "embed"), rngs, bias=True)
        self.image_embedding = ImageEmbedding(c, rngs)
        self.modulation = Linear(c.width, 6 * c.width, ("embed", None), rngs, bias=True)
        mlp = partial(MLP, c.condition_width, c.width, c.width, "gelu_tanh", biases=("up", "down"))
        self.condition_mlp = mlp(rngs=rngs) if c.condition_mlp else None
        self.layers = LayerStacks(lambda _, rngs: DiffusionLayer(c, rngs), plan, rngs)
        self.head = Head(c, rngs)
        self.config = c
        self.dtype = dtype

    def __call__(
        self,
        latents: Float[Array, "r l f"],
        items: ItemBatch,
        time: Float[Array, "r i"],
        condition: Float[Array, "r c e"],
    ) -> Float[Array, "r l f"]:
        """Predict the velocity of every patch, 0 at padding."""
        context = self.context(items, time, condition)
        return self.finished(self.layers(self.embedded(latents, items), context), items, context)

    def embedded(self, latents: Float[Array, "r l f"], items: ItemBatch) -> Float[Array, "r l d"]:
        """Bring patches to the width, and add their positions."""
        c = self.config
        x = self.patches(jnp.where((items.item >= 0)[..., None], latents, 0).astype(self.dtype))
        x = x + grid_positions(items, c.width, c.grid, c.grid_scale).astype(self.dtype)
        return constrain(x, "rows", "sequence", "width")

    def context(
        self, items: ItemBatch, time: Float[Array, "r i"], condition: Float[Array, "r c e"]
    ) -> Context:
        """Build what all layers share: masks, blocks, modulation and condition."""
        c = self.config
        images = c.max_images(items.item.shape[1])
        tokens = c.condition_tokens
        if time.shape[1:] != (images,) or condition.shape[1] != images * tokens or not images:
            raise ValueError(
                f"rows of {items.item.shape[1]} positions have {images} images of {tokens} condition tokens, not "
                f"{time.shape[1]} times and {condition.shape[1]} tokens"
            )
        embedded = self.image_embedding(time, items, self.dtype)
        modulation = self.modulation(jax.nn.silu(embedded))
        condition = condition.astype(self.dtype)
        if self.condition_mlp is not None:
            present = _present(condition, c)
            condition = self.condition_mlp(condition)
            condition = (
                condition if present is None else jnp.where(present[..., None], condition, 0)
            )
        return self._context(items, embedded, modulation, condition)

    def passed_on(self, context: Context) -> tuple[Float[Array, "r i _"], Float[Array, "r c _"]]:
        """Return the arrays from which a later pipeline stage rebuilds the context (`resumed_context`)."""
        images = context.images
        sides = [images.time, images.modulation.reshape(*images.time.shape[:2], -1)]
        return jnp.concatenate(sides, axis=-1), images.condition

    def resumed_context(
        self, items: ItemBatch, images: Float[Array, "r i _"], condition: Float[Array, "r c _"]
    ) -> Context:
        """Build the context of layers. images: of each the time embedded and the modulation, side by side."""
        width = self.config.width
        return self._context(items, images[..., :width], images[..., width:], condition)

    def _context(
        self,
        items: ItemBatch,
        time: Float[Array, "r i d"],
        modulation: Float[Array, "r i _"],
        condition: Float[Array, "r c _"],
    ) -> Context:
        c = self.config
        inputs = ImageInputs(
            blocks=ImageBlocks.of(items.item, c.min_patches, time.shape[1], self.dtype),
            time=time,
            modulation=modulation.reshape(*time.shape[:2], 6, c.width),
            condition=condition,
            present=_present(condition, c),
        )
        context = Context(encoder_mask(items.item), images=inputs)
        return context.planned(c.attention, c.width // c.heads, (c.heads, c.heads), self.dtype)

    def finished(
        self, x: Float[Array, "r l d"], items: ItemBatch, context: Context
    ) -> Float[Array, "r l f"]:
        """Make velocities of the output of the last layer."""
        return jnp.where((items.item >= 0)[..., None], self.head(x, context.images), 0)
