"""The UNet of Stable Diffusion (Rombach et al. 2022), on rows that hold images of one size.

Every image is computed by itself: rows of latents `[R, L, F]` become a batch of images `[R * I, H,
W, C]`, channels last, as GPUs convolve them fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from mmjax.batch import ItemBatch
from mmjax.config import UnetConfig
from mmjax.config.generators import UNET_MLP_FACTOR, UNET_TIME_FACTOR
from mmjax.kernels.masks import encoder_mask
from mmjax.models.convolution import Convolution, GroupNorm, ResidualBlock, doubled
from mmjax.models.layers import MLP, Context, LayerConfig, LayerNorm, SelfAttention
from mmjax.models.linear import Linear
from mmjax.models.remat import keep_inputs, recomputed_layer
from mmjax.models.time_embedding import TimeEmbedding
from mmjax.parallel.sharding import constrain

RESIDUAL_EPS = 1e-5  # of the norms of residual blocks, and of LayerNorms
ATTENTION_EPS = 1e-6  # of the norm before attention

Image = Float[Array, "b h w c"]


class CrossAttention(nnx.Module):
    """Attention of an image's positions to its condition tokens."""

    def __init__(self, width: int, heads: int, condition_width: int, rngs: nnx.Rngs):
        self.query = Linear(width, width, ("embed", "heads"), rngs)
        self.key = Linear(condition_width, width, ("embed", "heads"), rngs)
        self.value = Linear(condition_width, width, ("embed", "heads"), rngs)
        self.output = Linear(width, width, ("heads", "embed"), rngs, bias=True)
        self.heads = heads

    def __call__(
        self, x: Float[Array, "b t d"], tokens: Float[Array, "b q e"]
    ) -> Float[Array, "b t d"]:
        q, k, v = (
            y.reshape(*y.shape[:2], self.heads, y.shape[2] // self.heads)
            for y in (self.query(x), self.key(tokens), self.value(tokens))
        )
        return self.output(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class AttentionBlock(nnx.Module):
    """A transformer layer over an image's positions, between projections: itself, its condition, and an MLP (GEGLU)."""

    def __init__(self, width: int, heads: int, config: UnetConfig, rngs: nnx.Rngs):
        c = config
        layer = LayerConfig(
            width=width,
            heads=heads,
            kv_heads=heads,
            head_width=width // heads,
            mlp_width=UNET_MLP_FACTOR * width,
            backend=c.attention,
            norm=partial(LayerNorm, eps=RESIDUAL_EPS),
            activation="gelu",
            gated=True,
            biases=("output", "gate", "up", "down"),
        )
        self.norm = GroupNorm(width, c.groups, ATTENTION_EPS)
        self.enter = Linear(width, width, ("embed", None), rngs, bias=True)
        self.self_norm = layer.norm(width)
        self.self_attention = SelfAttention(layer, rngs)
        self.cross_norm = layer.norm(width)
        self.cross_attention = CrossAttention(width, heads, c.condition_width, rngs)
        self.mlp_norm = layer.norm(width)
        self.mlp = MLP(width, layer.mlp_width, width, "gelu", rngs, gated=True, biases=layer.biases)
        self.leave = Linear(width, width, (None, "embed"), rngs, bias=True)

    def __call__(
        self, x: Image, tokens: Float[Array, "b q e"], present: Bool[Array, " b"]
    ) -> Image:
        """tokens: of the condition. present: whether there is an image; else nothing attends."""

        @keep_inputs
        def entered(x: Array) -> Array:
            return self.enter(self.norm(x).reshape(len(x), -1, x.shape[3]))

        hidden = entered(x)
        item = jnp.where(present, 0, -1)
        mask = encoder_mask(jnp.broadcast_to(item[:, None], hidden.shape[:2]))
        attn_out, _ = self.self_attention(self.self_norm(hidden), Context(mask))
        hidden = hidden + attn_out
        hidden = hidden + self.cross_attention(self.cross_norm(hidden), tokens)
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return x + self.leave(hidden).reshape(x.shape)


class Level(nnx.Module):
    """The blocks at one resolution, on the way down, in the middle or on the way up, and a convolution to the next.

    inputs: channels of each residual block's input. heads: of attention, behind so many residual
    blocks as `attending`.
    """

    def __init__(
        self,
        inputs: Sequence[int],
        width: int,
        heads: int,
        attending: int,
        config: UnetConfig,
        rngs: nnx.Rngs,
        stride: int = 0,
    ):
        time_width = UNET_TIME_FACTOR * config.widths[0]
        self.residual = nnx.Dict(
            {
                f"block{i}": ResidualBlock(
                    n,
                    width,
                    time_width=time_width,
                    groups=config.groups,
                    eps=RESIDUAL_EPS,
                    rngs=rngs,
                )
                for i, n in enumerate(inputs)
            }
        )
        self.attention = nnx.Dict(
            {f"block{i}": AttentionBlock(width, heads, config, rngs) for i in range(attending)}
        )
        self.resample = Convolution(width, width, ("embed", None), rngs, stride) if stride else None


class Unet(nnx.Module):
    """first -> levels down -> middle -> levels up -> last; each block up also takes the output of one down."""

    def __init__(self, config: UnetConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        widths = c.widths
        deepest = len(widths) - 1
        channels = c.latents.channels
        make_level = partial(Level, config=c, rngs=rngs)
        self.time = TimeEmbedding(widths[0], UNET_TIME_FACTOR * widths[0], rngs)
        self.first = Convolution(channels, widths[0], (None, "embed"), rngs)
        down, up = {}, {}
        for i, width in enumerate(widths):
            inputs = [widths[max(i - 1, 0)], *(width,) * (c.blocks - 1)]
            stride = 0 if i == deepest else 2
            down[f"level{i}"] = make_level(
                inputs, width, c.heads[i], c.attending[i] * c.blocks, stride=stride
            )
        self.down = nnx.Dict(down)
        self.middle = make_level([widths[-1]] * 2, widths[-1], c.heads[-1], 1)
        # Channels of what blocks up take: of the first convolution, of each block, and of those
        # between levels. With widths 320 and 640 and one block a level, the skips are
        #     320 (first)  320 (block)  320 (stride)  640 (block)
        # and the two blocks up of each level take them from the end: 640 + 640 and 640 + 320
        # channels into the deeper level, then 640 + 320 and 320 + 320 into the other.
        skips = [widths[0]]
        for i, width in enumerate(widths):
            skips += [width] * (c.blocks + (i < deepest))
        below = widths[-1]
        for i, width in reversed(list(enumerate(widths))):
            inputs = [n + skips.pop() for n in (below, *(width,) * c.blocks)]
            up[f"level{deepest - i}"] = make_level(
                inputs, width, c.heads[i], c.attending[i] * (c.blocks + 1), stride=int(i > 0)
            )
            below = width
        self.up = nnx.Dict(up)
        self.norm = GroupNorm(widths[0], c.groups, RESIDUAL_EPS)
        self.last = Convolution(widths[0], channels, ("embed", None), rngs)
        self.config = c
        self.dtype = dtype

    def __call__(
        self,
        latents: Float[Array, "r l f"],
        items: ItemBatch,
        time: Float[Array, "r i"],
        condition: Float[Array, "r c e"],
    ) -> Float[Array, "r l f"]:
        """Predict the velocity of every image's latents; 0 where a row's place for an image holds none.

        condition: tokens of a row's images, image after image. What is left of a row behind whole
        images is not read.
        """
        c = self.config
        rows, length, channels = latents.shape
        # [R, L, C] -> [R * I, H, W, C]: all images have one size, so image i of a row begins at
        # position i * min_patches.
        used = c.max_images(length) * c.min_patches
        images = rows * c.max_images(length)
        present = items.item[:, :used].reshape(images, c.min_patches)[:, 0] >= 0
        tokens = condition.astype(self.dtype).reshape(images, c.queries, condition.shape[2])
        time = jax.nn.silu(self.time(time.reshape(images), self.dtype))
        pictures = latents[:, :used].astype(self.dtype).reshape(images, *c.size, channels)
        x = jnp.where(
            present[:, None, None, None], self._velocity(pictures, time, tokens, present), 0
        )
        return jnp.pad(x.reshape(rows, used, channels), ((0, 0), (0, length - used), (0, 0)))

    def _velocity(self, x: Array, time: Array, tokens: Array, present: Array) -> Array:
        # Every output on the way down is pushed, and popped by the block at its resolution going
        # up.
        x = self.first(_laid_out(x))
        skips = [x]
        for level in _in_order(self.down, "level"):
            for i, residual in enumerate(_in_order(level.residual, "block")):
                x = self._block(residual, x, time)
                if i < len(level.attention):
                    x = self._block(level.attention[f"block{i}"], x, tokens, present)
                skips.append(x)
            if level.resample is not None:
                x = _laid_out(level.resample(x))
                skips.append(x)
        x = self._block(self.middle.residual["block0"], x, time)
        x = self._block(self.middle.attention["block0"], x, tokens, present)
        x = self._block(self.middle.residual["block1"], x, time)
        for level in _in_order(self.up, "level"):
            for i, residual in enumerate(_in_order(level.residual, "block")):
                x = self._block(residual, x, time, skips.pop())
                if i < len(level.attention):
                    x = self._block(level.attention[f"block{i}"], x, tokens, present)
            # Doubled again in backward rather than saved: the doubled image is four times as large.
            if level.resample is not None:
                x = _laid_out(keep_inputs(lambda x, level=level: level.resample(doubled(x)))(x))

        @keep_inputs
        def last(x: Array) -> Array:
            return self.last(jax.nn.silu(self.norm(x)))

        return last(x)

    def _block(self, block: Callable[..., Array], *inputs: Array) -> Array:
        """Apply a block, whose backward pass recomputes it where the config says so."""
        recomputed = self.config.remat == "full"
        with recomputed_layer(recomputed):
            apply = jax.checkpoint(lambda *arrays: block(*arrays)) if recomputed else block
            return _laid_out(apply(*inputs))


def _in_order(modules: Mapping[str, nnx.Module], name: str) -> list[nnx.Module]:
    """List modules by their numbers: a Dict may hold block10 before block2."""
    return [modules[f"{name}{i}"] for i in range(len(modules))]


def _laid_out(x: Array) -> Array:
    return constrain(x, "rows", None, None, "width")
