"""The variational autoencoder of Stable Diffusion (Rombach et al. 2022), channels last: images to latents and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mmjax.config import VaeConfig
from mmjax.kernels.masks import encoder_mask
from mmjax.models.blockwise_attention import blockwise_attention, dense_attention
from mmjax.models.convolution import Convolution, GroupNorm, ResidualBlock, doubled
from mmjax.models.layer_stacks import Params
from mmjax.models.linear import Linear
from mmjax.models.parameter_keys import ParameterKeys

EPS = 1e-6  # of all its norms, written in no config
LOG_VARIANCE = (-30.0, 20.0)  # limits
DENSE = 4096  # latents of an image up to which attention has all scores at once


class Attention(nnx.Module):
    """Attention with one head among an image's positions, beside the residual stream."""

    def __init__(self, width: int, groups: int, rngs: nnx.Rngs):
        self.norm = GroupNorm(width, groups, EPS)
        self.query = Linear(width, width, ("embed", "heads"), rngs, bias=True)
        self.key = Linear(width, width, ("embed", "heads"), rngs, bias=True)
        self.value = Linear(width, width, ("embed", "heads"), rngs, bias=True)
        self.output = Linear(width, width, ("heads", "embed"), rngs, bias=True)

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        # [B, H, W, C] -> [B, H * W, 1, C]: every pixel a token, with one head.
        hidden = self.norm(x).reshape(len(x), -1, 1, x.shape[3])
        mask = encoder_mask(jnp.zeros(hidden.shape[:2], jnp.int32))
        attend = dense_attention if hidden.shape[1] <= DENSE else blockwise_attention
        attn_out = attend(self.query(hidden), self.key(hidden), self.value(hidden), mask, mask)
        return x + self.output(attn_out).reshape(x.shape)


class Middle(nnx.Module):
    """The blocks at the lowest resolution, between those of all levels and the latents."""

    def __init__(self, config: VaeConfig, rngs: nnx.Rngs):
        width = config.widths[-1]
        block = partial(ResidualBlock, width, width, 0, config.groups, EPS, rngs)
        self.before = block()
        self.attention = Attention(width, config.groups, rngs) if config.attention else None
        self.behind = block()

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
        x = self.before(x)
        return self.behind(x if self.attention is None else self.attention(x))


class Level(nnx.Module):
    """The residual blocks at one resolution, and a convolution at the next; at the last there is none.

    widths: channels before each block and behind the last.
    """

    def __init__(
        self, widths: Sequence[int], groups: int, resample: Convolution | None, rngs: nnx.Rngs
    ):
        blocks = (
            ResidualBlock(inputs, outputs, time_width=0, groups=groups, eps=EPS, rngs=rngs)
            for inputs, outputs in pairwise(widths)
        )
        self.blocks = nnx.Dict({f"block{i}": block for i, block in enumerate(blocks)})
        self.resample = resample

    def __call__(self, x: Float[Array, "b h w i"]) -> Float[Array, "b h w o"]:
        """Apply the residual blocks alone."""
        for i in range(len(self.blocks)):
            x = self.blocks[f"block{i}"](x)
        return x


class Encoder(nnx.Module):
    """From an image to the mean and log variance of its latents."""

    def __init__(self, config: VaeConfig, rngs: nnx.Rngs):
        c = config
        self.enter = Convolution(c.image_channels, c.widths[0], (None, "embed"), rngs)
        self.levels = nnx.Dict()
        for i, width in enumerate(c.widths):
            # Zeros stand behind the image alone, so that 2n rows become n: with 4 rows, windows 0 1
            # 2 and 2 3 (4), as in diffusers' checkpoints; zeros on both sides would shift them by
            # one.
            last = i + 1 == len(c.widths)
            down = (
                None
                if last
                else Convolution(width, width, ("embed", None), rngs, stride=2, padding=(0, 1))
            )
            widths = (c.widths[max(i - 1, 0)], *(width,) * c.blocks)
            self.levels[f"level{i}"] = Level(widths, c.groups, down, rngs)
        self.middle = Middle(c, rngs)
        self.norm = GroupNorm(c.widths[-1], c.groups, EPS)
        self.leave = Convolution(c.widths[-1], 2 * c.channels, ("embed", None), rngs)
        product = (
            Linear(2 * c.channels, 2 * c.channels, (None, None), rngs, bias=True)
            if c.encoder_product
            else None
        )
        self.product = product

    def __call__(self, image: Float[Array, "b h w c"]) -> Float[Array, "b y x m"]:
        x = self.enter(image)
        for i in range(len(self.levels)):
            level = self.levels[f"level{i}"]
            x = level(x)
            if level.resample is not None:
                x = level.resample(x)
        moments = self.leave(jax.nn.silu(self.norm(self.middle(x))))
        return moments if self.product is None else self.product(moments)


class Decoder(nnx.Module):
    """From latents to an image."""

    def __init__(self, config: VaeConfig, rngs: nnx.Rngs):
        c = config
        widths = c.widths[::-1]
        product = (
            Linear(c.channels, c.channels, (None, None), rngs, bias=True)
            if c.decoder_product
            else None
        )
        self.product = product
        self.enter = Convolution(c.channels, widths[0], (None, "embed"), rngs)
        self.middle = Middle(c, rngs)
        self.levels = nnx.Dict()
        for i, width in enumerate(widths):
            up = None if i + 1 == len(widths) else Convolution(width, width, ("embed", None), rngs)
            level = (widths[max(i - 1, 0)], *(width,) * (c.blocks + 1))
            self.levels[f"level{i}"] = Level(level, c.groups, up, rngs)
        self.norm = GroupNorm(widths[-1], c.groups, EPS)
        self.leave = Convolution(widths[-1], c.image_channels, ("embed", None), rngs)

    def __call__(self, latents: Float[Array, "b y x m"]) -> Float[Array, "b h w c"]:
        x = self.middle(self.enter(latents if self.product is None else self.product(latents)))
        for i in range(len(self.levels)):
            level = self.levels[f"level{i}"]
            x = level(x)
            if level.resample is not None:
                x = level.resample(doubled(x))
        return self.leave(jax.nn.silu(self.norm(x)))


class Autoencoder(nnx.Module):
    """An encoder and a decoder."""

    def __init__(self, config: VaeConfig, rngs: nnx.Rngs):
        self.encoder = Encoder(config, rngs)
        self.decoder = Decoder(config, rngs)


def moments_of(
    encoder: Encoder, image: Float[Array, "b h w c"]
) -> tuple[Float[Array, "b y x m"], Float[Array, "b y x m"]]:
    """Compute the float32 mean and log variance of the latents of images in -1..1, in the images' precision."""
    mean, log_variance = jnp.split(encoder(image).astype(jnp.float32), 2, axis=-1)
    return mean, jnp.clip(log_variance, *LOG_VARIANCE)


@dataclass(frozen=True, eq=False)
class VaeModel:
    """A variational autoencoder as pure functions on nested dicts of parameters."""

    config: VaeConfig
    abstract: Params = field(repr=False)  # shapes and dtypes of the parameters
    graph: Any = field(repr=False)  # NNX graph definition

    @classmethod
    def build(cls, config: VaeConfig) -> VaeModel:
        """Build the autoencoder of a config. Holds no parameters, so it is cheap."""
        graph, state = nnx.split(
            nnx.eval_shape(lambda: Autoencoder(config, ParameterKeys(jax.random.key(0))))
        )
        return cls(config, abstract=nnx.to_pure_dict(state), graph=graph)

    def encode(
        self, params: Params, image: Float[Array, "b h w c"]
    ) -> tuple[Float[Array, "b y x m"], Float[Array, "b y x m"]]:
        """Compute the float32 mean and log variance of the latents of images in -1..1, in the images' precision.

        Latents are not scaled. Raises ValueError where the VAE's factor does not divide the sides.
        """
        if any(side % self.config.factor for side in image.shape[1:3]):
            raise ValueError(
                f"{image.shape[1]} x {image.shape[2]} pixels are no multiples of {self.config.factor}"
            )
        return moments_of(self._module(params).encoder, image)

    def decode(self, params: Params, latents: Float[Array, "b y x m"]) -> Float[Array, "b h w c"]:
        """Compute the images, about -1..1, of latents that are not scaled."""
        return self._module(params).decoder(latents)

    def _module(self, params: Params) -> Autoencoder:
        return nnx.merge(self.graph, nnx.State(params))
