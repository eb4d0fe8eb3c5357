"""Config of generators: models behind the LLM that make images of its hidden states, by flow matching on latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mmjax.config.checks import check, divides
from mmjax.config.decoder import DecoderConfig
from mmjax.config.encoders import Encoder
from mmjax.config.images import AsIs, ImagePreparation
from mmjax.config.ranges import Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from mmjax.config.towers import (
    Activation,
    Attention,
    Biased,
    ConnectorConfig,
    LayerCount,
    Remat,
    TowerFacts,
    TowerRemat,
    check_remat,
)

TIME_FEATURES = 256  # sinusoids of an image's time, and of its sizes


@dataclass(frozen=True)
class PixelLatents:
    """An image's own pixels in place of latents, for small images."""

    channels: PositiveInt = 3  # of an image
    # per channel, or one for all; pixels become (x / 255 - mean) / std
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)  # per channel, or one for all
    kind: Literal["pixels"] = "pixels"

    factor: ClassVar[int] = 1  # pixels per side of a latent
    encode: ClassVar[str] = "none"

    def check(self, where: str) -> None:
        for name in ("mean", "std"):
            count = len(getattr(self, name))
            check(
                count in (1, self.channels),
                f"{where}.{name} has {count} values for channels={self.channels}; give one, or one for each",
            )
        check(min(self.std) > 0, f"{where}.std={self.std}: must be more than 0")


@dataclass(frozen=True)
class VaeConfig:
    """The variational autoencoder of Stable Diffusion and its successors (diffusers' AutoencoderKL), read from its
    folder.
    """

    # channels of each level; the resolution halves between levels
    widths: tuple[int, ...] = (128, 256, 512, 512)
    blocks: int = 2  # residual blocks per level of the encoder; one more in the decoder
    groups: int = 32  # of GroupNorm
    image_channels: int = 3  # of an image
    channels: int = 4  # of a latent
    attention: bool = True  # at the lowest resolution
    encoder_product: bool = True  # behind the encoder, over channels
    decoder_product: bool = True  # before the decoder, over channels
    scale: float = 0.18215  # latents become (x - shift) * scale
    shift: float = 0.0  # of latents before they are scaled

    @property
    def factor(self) -> int:
        """Return the pixels per side of a latent."""
        return 2 ** (len(self.widths) - 1)


@dataclass(frozen=True)
class VaeLatents:
    """Latents that a frozen variational autoencoder makes of an image."""

    weights: str = ""  # a diffusers folder of an AutoencoderKL; empty: for planning alone
    channels: PositiveInt = 4  # of a latent
    factor: PositiveInt = 8  # pixels per side of a latent
    scale: float = 0.18215  # latents become (x - shift) * scale
    shift: float = 0.0  # of latents before they are scaled
    kind: Literal["vae"] = "vae"
    # once: by mmjax.index --latents, before training; step: from pixels, in every step, images of
    # one size
    encode: Literal["once", "step"] = "once"
    vae: VaeConfig = VaeConfig()  # that encodes in every step, as its folder describes it


Latents = PixelLatents | VaeLatents


@dataclass(frozen=True)
class FlowMatching:
    """A generator's loss: the squared error of the velocity from an image's latents to noise (Esser et al. 2024).

    Of an image with latents x and noise e the generator sees (1 - t) x + t e at a time t that is
    logit-normal, and predicts e - x.
    """

    weight: PositiveFloat = 1.0  # of this loss beside the LLM's
    time_mean: float = 0.0  # of the logit of t
    time_std: PositiveFloat = 1.0  # of the logit of t
    # share of images trained without their condition, for guidance
    condition_dropout: Fraction = 0.1


_CONNECTOR = ConnectorConfig(merge=1, mlp_width=0, biases=("down",))
# Of a connector that reads single hidden states: what says how neighbours are merged, or where they
# lie, is left alone.
_CONNECTOR_KEYS = (
    "merge",
    "merging",
    "position_grid",
    "newline",
    "merger_width",
    "merger_bias",
    "projection",
    "output_width",
    "output_activation",
)


class GeneratorFacts(TowerFacts):
    """Facts of a generator beside its fields."""

    modality: ClassVar[str] = "image"
    media: ClassVar[tuple[str, ...]] = ("picture",)  # an image of the assistant's
    is_generator: ClassVar[bool] = True
    interpolates_tokens: ClassVar[bool] = False  # each query is a token

    @property
    def step_vae(self) -> VaeConfig | None:
        """Return the VAE that encodes the images in every step, or None."""
        return self.latents.vae if self.latents.encode == "step" else None

    @property
    def takes_pixels(self) -> bool:
        """Return whether rows of a batch hold pixels: the latents themselves, or what is encoded in the step."""
        return self.latents.kind == "pixels" or self.step_vae is not None

    @property
    def input_values(self) -> int:
        """Return how many values of a batch a patch has, where it may not be latents yet."""
        if self.step_vae is None:
            return self.patch_values
        return (self.patch * self.latents.factor) ** 2 * self.step_vae.image_channels

    @property
    def condition_tokens(self) -> int:
        """Return how many hidden states of the LLM are an image's condition at most."""
        return self.text_tokens + self.queries

    @property
    def shortest_row(self) -> int:
        """Return the inputs of the shortest row of a batch; others are multiples of it."""
        return self.min_patches

    def max_images(self, length: int) -> int:
        """Return how many images a row of this length holds at most."""
        return length // self.min_patches


@dataclass(frozen=True)
class DiffusionTransformerConfig(GeneratorFacts):
    """A diffusion transformer as PixArt's: self-attention within an image, cross-attention to its condition."""

    layers: LayerCount  # number of layers
    width: PositiveInt  # of the residual stream
    heads: PositiveInt  # attention heads
    mlp_width: PositiveInt  # of the MLP's hidden layer
    condition_width: (
        PositiveInt  # of the tokens that the connector makes of the LLM's hidden states
    )
    patch: PositiveInt = 2  # latents per side of a patch
    latents: PixelLatents | VaeLatents = PixelLatents()
    images: ImagePreparation = AsIs()  # preprocessing
    min_patches: PositiveInt = 16  # of an image; smaller images are refused
    # learned tokens in the LLM that stand for an image; their hidden states are its condition
    queries: PositiveInt = 16
    # patches per side of an image whose positions are 0, 1, ..; other sizes are stretched to it
    grid: PositiveInt = 16
    grid_scale: PositiveFloat = 1.0  # that positions are divided by
    # the time's embedding knows an image's height, width and aspect ratio
    micro_conditions: bool = False
    # the checkpoint's last layer predicts variances too, which are not trained
    learned_variance: bool = False
    norm_eps: PositiveFloat = 1e-6  # of LayerNorm
    activation: Activation = "gelu_tanh"  # of the MLP
    flow: FlowMatching = FlowMatching()
    connector: ConnectorConfig = _CONNECTOR
    # all scores at once, by blocks, a kernel for GPUs; auto: that, elsewhere blocks
    attention: Attention = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    frozen: bool = False  # not trained, apart from its connector
    weights: str = ""  # a diffusers folder whose weights it starts from; empty: random
    kind: Literal["diffusion_transformer"] = "diffusion_transformer"
    # brings condition tokens to the width; else the layers' keys and values read them
    condition_mlp: bool = True
    # of both attentions and the MLP
    biases: tuple[Biased, ...] = ("query", "key", "value", "output", "up", "down")
    # positions before an image whose hidden states are its condition too, as far as there are
    text_tokens: NonNegativeInt = 0

    @property
    def head_width(self) -> int:
        """Return the channels of a head of attention."""
        return self.width // self.heads

    @property
    def cross_width(self) -> int:
        """Return the channels of attention to the condition."""
        return self.width

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Return the latents of each side of an image where all have one size, else None."""
        return tuple(side // self.latents.factor for side in self.images.picture_size) or None

    @property
    def patch_values(self) -> int:
        """Return how many values a patch of latents has."""
        return self.patch**2 * self.latents.channels

    def check(self, where: str) -> None:
        _check_generator(where, self)
        check_remat(where, self)
        divides(where, self.width, "width", self.heads, "heads")
        unit = 12 if self.micro_conditions else 4
        check(
            self.width % unit == 0,
            f"{where}.width={self.width}: sines and cosines of rows and columns"
            f"{', and of sizes (micro_conditions),' if unit == 12 else ''} fill it; use a multiple of {unit}",
        )
        check(
            self.queries <= self.min_patches,
            f"{where}.queries={self.queries}: an image of min_patches={self.min_patches} has fewer patches; "
            "use fewer queries, or larger images",
        )
        check(
            self.condition_tokens <= self.min_patches,
            f"{where}.text_tokens={self.text_tokens}: with {self.queries} queries these are more than the "
            f"patches of an image of min_patches={self.min_patches}; use fewer, or larger images",
        )


# Widths in a UNet over that of the first level, and over that of an attention block.
UNET_TIME_FACTOR = 4  # the embedding of the time
UNET_MLP_FACTOR = 4  # the MLP's hidden layer


@dataclass(frozen=True)
class UnetConfig(GeneratorFacts):
    """Stable Diffusion 2.1's UNet, for images of one size."""

    is_stack: ClassVar[bool] = False
    layers: ClassVar[int] = 1  # it is not cut
    patch: ClassVar[int] = 1  # latents per side of a patch
    text_tokens: ClassVar[int] = 0  # positions before an image that are its condition too

    condition_width: (
        PositiveInt  # of the tokens that the connector makes of the LLM's hidden states
    )
    # channels of each level; the resolution halves between levels
    widths: tuple[int, ...] = (320, 640, 1280, 1280)
    heads: tuple[int, ...] = (5, 10, 20, 20)  # attention heads of each level
    attending: tuple[bool, ...] = (True, True, True, False)  # levels with attention
    blocks: PositiveInt = 2  # residual blocks per level on the way down; one more on the way up
    groups: PositiveInt = 32  # of GroupNorm
    size: tuple[int, ...] = (64, 64)  # height and width of an image in latents
    linear_projections: bool = True  # around attention; else convolutions (Stable Diffusion 1)
    latents: PixelLatents | VaeLatents = VaeLatents()
    images: ImagePreparation = AsIs()  # preprocessing
    # learned tokens in the LLM that stand for an image; their hidden states are its condition
    queries: PositiveInt = 77
    flow: FlowMatching = FlowMatching()
    connector: ConnectorConfig = _CONNECTOR
    remat: Literal["none", "full"] = "none"  # of every block
    frozen: bool = False  # not trained, apart from its connector
    weights: str = ""  # a diffusers folder whose weights it starts from; empty: random
    kind: Literal["unet"] = "unet"
    # Among an image's latents: all scores at once, by blocks, a kernel for GPUs; auto: that,
    # elsewhere blocks.
    attention: Attention = "dense"

    @property
    def width(self) -> int:
        """Return the channels of the first level."""
        return self.widths[0]

    @property
    def image_size(self) -> tuple[int, int]:
        """Return the latents of each side of an image."""
        return self.size

    @property
    def patch_values(self) -> int:
        """Return how many values a patch of latents has."""
        return self.latents.channels

    @property
    def min_patches(self) -> int:
        """Return the patches of an image: all have as many."""
        return self.size[0] * self.size[1]

    def check(self, where: str) -> None:
        _check_generator(where, self)
        levels = len(self.widths)
        check(levels >= 1, f"{where}.widths is empty; give the channels of each level")
        for key in ("heads", "attending"):
            count = len(getattr(self, key))
            check(
                count == levels,
                f"{where}.{key} names {count} levels, widths {levels}; give one value for each",
            )
        check(
            self.widths[0] % 2 == 0,
            f"{where}.widths: the time has as many features as the first level channels; use an even number",
        )
        # In the middle there is attention at the width of the last level.
        attending = (*self.attending[:-1], True)
        for width, heads, attends in zip(self.widths, self.heads, attending, strict=True):
            check(
                width >= 1 and width % self.groups == 0,
                f"{where}.groups={self.groups} does not divide the width {width}",
            )
            check(
                not attends or (heads >= 1 and width % heads == 0),
                f"{where}: {heads} heads do not divide the width {width} of their level",
            )
        check(len(self.size) == 2, f"{where}.size={self.size}: give height and width in latents")
        unit = 2 ** (levels - 1)
        check(
            all(side > 0 and side % unit == 0 for side in self.size),
            f"{where}.size={self.size}: {levels} levels halve it {levels - 1} times; use multiples of {unit}",
        )


Generator = DiffusionTransformerConfig | UnetConfig


Tower = DecoderConfig | Encoder | Generator


def _check_generator(where: str, generator: Generator) -> None:
    """Check what all generators have."""
    if vae := generator.step_vae:
        _check_vae(f"{where}.latents", generator, vae)
    usual = ConnectorConfig(merge=1)
    for key in _CONNECTOR_KEYS:
        value = getattr(generator.connector, key)
        check(
            value == getattr(usual, key),
            f"{where}.connector.{key}={value}: it reads the hidden state of each query by itself; leave it at "
            f"{getattr(usual, key)}",
        )


def _check_vae(where: str, generator: Generator, vae: VaeConfig) -> None:
    """Check a VAE that encodes in every step."""
    for key in ("channels", "factor", "scale", "shift"):
        configured, value = getattr(generator.latents, key), getattr(vae, key)
        check(
            configured == value,
            f"{where}.{key}={configured}, but its vae says {value}; use {where}.{key}={value}",
        )
    check(
        vae.image_channels == 3,
        f"{where}.vae.image_channels={vae.image_channels}: images have 3 channels",
    )
    size = generator.image_size
    check(
        size is not None,
        f"{where}.encode=step: images of one size are encoded in a step, and these have any; prepare them by "
        "images=fixed_size, or choose encode=once",
    )
    unit = generator.patch * vae.factor
    check(
        all(side % generator.patch == 0 for side in size),
        f"{where}.encode=step: images are no whole patches of {unit} x {unit} pixels; change images.crop",
    )
