"""Config of encoders of images and of clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mmjax.config.checks import check, divides, listed
from mmjax.config.clips import AudioPreparation, LogMel
from mmjax.config.images import AsIs, ImagePreparation
from mmjax.config.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from mmjax.config.towers import (
    INNER_MERGE,
    Activation,
    Attention,
    Biased,
    ConnectorConfig,
    Dropout,
    Encode,
    LayerCount,
    Quantization,
    Remat,
    TowerFacts,
    TowerRemat,
    check_encode,
    check_layer_numbers,
    check_norms,
    check_remat,
    check_windows,
)
from mmjax.config.videos import NoVideo, VideoPreparation

QUERY_MERGE = 4  # neighbours per axis that the merger before `QueryLayers` makes one position

# What of an image counts: all of it, padded; whole patches; or whole patches, which must be in whole
# squares that the connector merges.
Counted = Literal["all", "patches", "squares"]


@dataclass(frozen=True)
class RotaryGrid:
    """2D RoPE by row and column, for images of any size."""

    counts: ClassVar[Counted] = "all"
    head_unit: ClassVar[int] = 4  # RoPE turns pairs of a head's channels along two axes
    theta: PositiveFloat = 100.0  # base of the frequencies
    kind: Literal["rotary"] = "rotary"


@dataclass(frozen=True)
class AlternatingGrid:
    """2D RoPE whose frequencies turn by row and by column in turn; of an image only whole patches count (Pixtral)."""

    counts: ClassVar[Counted] = "squares"
    head_unit: ClassVar[int] = 2  # RoPE turns pairs of a head's channels
    theta: PositiveFloat = 10_000.0  # base of the frequencies
    kind: Literal["alternating"] = "alternating"


@dataclass(frozen=True)
class LearnedGrid:
    """A learned vector per cell of a grid; images have at most as many rows and columns of patches.

    With an interpolation the grid is a square, whose vectors are interpolated to images of other
    sizes (DINOv2, SigLIP 2).
    """

    counts: ClassVar[Counted] = "patches"
    rows: PositiveInt  # of patches
    columns: PositiveInt  # of patches
    kind: Literal["learned"] = "learned"
    # antialiased: bicubic, wider where it shrinks; and so is bilinear
    interpolation: Literal["none", "bicubic", "antialiased", "bilinear"] = "none"
    # base of 2D RoPE beside the vectors, of neighbouring channels, by column and row from 1 on, so
    # that the class token, at 0, does not turn (Llama 4); 0: there is none
    theta: NonNegativeFloat = 0.0
    class_last: bool = False  # the class token's vector is the last of the table, not the first

    @property
    def head_unit(self) -> int:
        """Return the channels of which a head has a multiple: RoPE turns pairs of them along two axes."""
        return 4 if self.theta else 1

    def check(self, where: str) -> None:
        check(
            self.interpolation == "none" or self.rows == self.columns,
            f"{where}: {self.rows} x {self.columns} are no square, which alone is interpolated",
        )
        check(
            self.interpolation == "none" or not self.class_last,
            f"{where}.class_last: of a table that is interpolated the class token's vector is the first; leave it out",
        )


@dataclass(frozen=True)
class StretchedGrid:
    """A learned vector per cell of a square grid, interpolated to each image's size, and 2D RoPE."""

    counts: ClassVar[Counted] = "all"
    head_unit: ClassVar[int] = 4  # RoPE turns pairs of a head's channels along two axes
    side: PositiveInt  # of the square
    theta: PositiveFloat = 10_000.0  # base of the frequencies
    kind: Literal["stretched"] = "stretched"
    # bilinear, with the corner patches on the corner cells (Qwen3-VL), or bicubic, edge on edge
    # (GLM-4.1V), or bilinear_edges: bilinear, edge on edge (PaddleOCR-VL), or bilinear_zeros: that
    # with zeros around the grid
    filter: Literal["bilinear", "bicubic", "bilinear_edges", "bilinear_zeros"] = "bilinear"
    # RoPE turns channels 2i and 2i + 1 of a head together, with x and y in turns (MoonViT)
    neighbours: bool = False
    # an image's n-th patch has the vector of the n-th one of an image of swapped sides, and columns
    # turn the first half of RoPE's pairs (Muse Glimmer)
    transposed: bool = False


@dataclass(frozen=True)
class FractionalGrid:
    """A learned vector per cell of a square grid, which a patch takes by where it lies in its image (Idefics3).

    Of an image only whole patches count.
    """

    counts: ClassVar[Counted] = "squares"
    head_unit: ClassVar[int] = 1  # no RoPE
    side: PositiveInt  # of the square
    kind: Literal["fractional"] = "fractional"


@dataclass(frozen=True)
class AxisTables:
    """A learned vector per row and one per column, added up, and 2D RoPE in each half of a head (Gemma 4).

    Of an image only whole patches count.
    """

    counts: ClassVar[Counted] = "squares"
    head_unit: ClassVar[int] = 4  # RoPE turns pairs of a head's channels along two axes
    side: PositiveInt  # rows, and columns, at most
    theta: PositiveFloat = 100.0  # base of the frequencies
    kind: Literal["axis_tables"] = "axis_tables"


@dataclass(frozen=True)
class Callbacks:
    """Your own functions around an encoder (Cornstarch 5.1), `module:qualname` as in a FunctionSource; empty: none.

    In the order of their calls. The first and the last are called where data is loaded, and get
    sizes; the others are called inside the step, on arrays, and keep their shapes.
    """

    # (Picture, images of its sample) -> Pictures: the items of an image, instead of `images`
    before_encoder: str = ""
    after_encoder: str = ""  # (features [R, L, W], ItemBatch) -> the connector's input
    after_connector: str = ""  # (tokens [R, M, E], ItemBatch) -> the tokens sent to the LLM
    # (size, grids of the items) -> Arrangement: which tokens of an image the LLM sees, and where
    before_llm: str = ""


@dataclass(frozen=True)
class QueryLayers:
    """Layers behind a merger of 4 x 4 patches that make an image's tokens of learned queries (DeepSeek-OCR 2).

    Two convolutions, between norms, see the patches around each; two of stride 2 merge them. The
    merged patches of an image attend each other. As many queries, with RoPE behind theirs, attend
    them and the queries before their own. A layer has RMSNorms, a gated MLP, and biases of queries,
    keys and values.
    """

    width: PositiveInt  # of these layers
    heads: PositiveInt  # attention heads
    kv_heads: PositiveInt  # key and value heads
    mlp_width: PositiveInt  # of the MLP's hidden layer
    # tokens of a side of the square images that it takes, each of which has queries of its own
    sides: tuple[PositiveInt, ...] = (12, 16)
    # channels of the first two convolutions, and of the third
    merger_widths: tuple[PositiveInt, ...] = (256, 512)
    activation: Activation = "silu"  # of the MLP's gate
    norm_eps: PositiveFloat = 1e-6  # of the norms
    theta: PositiveFloat = 10_000.0  # base of the rotary frequencies

    @property
    def head_width(self) -> int:
        """Return the channels of a head of attention."""
        return self.width // self.heads

    def check(self, where: str) -> None:
        divides(where, self.width, "width", self.heads, "heads")
        divides(where, self.heads, "heads", self.kv_heads, "kv_heads")
        check(
            self.head_width % 2 == 0,
            f"{where}: width={self.width} over heads={self.heads} is {self.head_width} per head; RoPE turns pairs, "
            f"so make width a multiple of {2 * self.heads}",
        )
        check(
            len(self.merger_widths) == 2,
            f"{where}.merger_widths={listed(self.merger_widths)}: give two, of the first two convolutions and of "
            "the third",
        )
        check(
            bool(self.sides) and list(self.sides) == sorted(set(self.sides)),
            f"{where}.sides={listed(self.sides)}: name one at least, in order, each once",
        )


@dataclass(frozen=True)
class VisionConfig(TowerFacts):
    """A ViT that takes images as packed patches."""

    modality: ClassVar[str] = "image"
    takes_pixels: ClassVar[bool] = True  # rows of a batch hold bytes

    layers: LayerCount  # number of layers
    width: PositiveInt  # of the residual stream
    heads: PositiveInt  # attention heads
    # of the MLP's hidden layer; 0: layers are norms alone, without attention
    mlp_width: NonNegativeInt
    patch: PositiveInt  # pixels per side
    channels: PositiveInt = 3  # of an image; 3: red, green and blue
    frames: PositiveInt = 1  # temporal patch size; a still image is repeated
    # per channel, or one for all; pixels become (x / 255 - mean) / std
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)  # per channel, or one for all
    images: ImagePreparation = AsIs()  # preprocessing
    videos: VideoPreparation = NoVideo()  # which frames of a video are taken, and their size
    positions: (
        RotaryGrid | LearnedGrid | StretchedGrid | AlternatingGrid | FractionalGrid | AxisTables
    ) = RotaryGrid()
    # side, in patches, of the square windows that the layers in `windowed` attend within; a
    # multiple of connector.merge
    window: NonNegativeInt = 0
    windowed: tuple[int, ...] = ()  # layers with window attention
    # layers whose outputs are added to the LLM's: the n-th's after its layer n
    deepstack: tuple[int, ...] = ()
    # a learned token beside the patches of every image; the LLM does not see it
    class_token: bool = False
    patch_norm: bool = False  # LayerNorm of a patch's pixels, before their projection
    embed_bias: bool = True  # of the projection of patches
    embed_norm: bool = False  # before the first layer
    head_norm: bool = True  # after the last layer
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    # of the norm after the last layer; same: as `norm`
    head_norm_type: Literal["same", "layer", "rms"] = "same"
    norm_eps: PositiveFloat = 1e-6  # of the norms
    activation: Activation = "gelu_tanh"  # of the MLP
    gated: bool = False  # the MLP has a gate
    # the matrices of a layer that have one
    biases: tuple[Biased, ...] = ("query", "value", "output", "up", "down")
    # RMSNorm of queries and keys: of each head, or over all of them
    qk_norm: Literal["none", "width", "head"] = "none"
    qk_norm_eps: float = 1e-6  # of those norms
    layer_scale: bool = False  # learned scales of the outputs of attention and MLP
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    # all scores at once, by blocks, a kernel for GPUs; auto: that, elsewhere blocks
    attention: Attention = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: Dropout = 0.0  # rate, in training, for the outputs of attention and MLP
    frozen: bool = False  # not trained, apart from its connector
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    kind: Literal["vision"] = "vision"
    embed_norm_first: bool = False  # embed_norm comes before learned positions are added
    # further learned tokens beside the class token, without positions
    registers: NonNegativeInt = 0
    # a layer's norms: of the inputs of attention and MLP, or outputs, or both
    norm_place: Literal["before", "after", "both"] = "before"
    quantize: Quantization = "none"  # of the linear layers' frozen weights
    # layers whose outputs the connector reads side by side, in this order; (): the last one
    feature_layers: tuple[int, ...] = ()
    kv_heads: NonNegativeInt = 0  # key and value heads; 0: as many as query heads
    # layers before a merger inside the tower, of 2 x 2 patches, which attend each other before
    # (MiniCPM-V); 0: there is none
    merge_after: NonNegativeInt = 0
    value_norm: bool = False  # divides the values of a head by their root mean square
    attention_scale: NonNegativeFloat = 0.0  # of the scores; 0: head width ** -0.5
    # the matrices of a layer clip their inputs and outputs to stored bounds, which are not trained
    clipped_linears: bool = False
    # a frozen encoder runs in every step, or once for each item, whose output is stored
    encode: Encode = "step"
    # patches of an image's side at most, of which queries have products with learned vectors for
    # the distances of rows and of columns, and windows at an image's edges have patches of zeros
    # (SAM); 0: there are none
    relative_side: NonNegativeInt = 0
    query_layers: QueryLayers | None = None  # those behind `merge_after`; none: as the others

    @property
    def pool(self) -> int:
        """Return how many patches become one position of the last layer: those of the merger inside the tower."""
        return self.inner_merge**2

    @property
    def inner_merge(self) -> int:
        """Return how many patches per axis the merger inside the tower makes one position; 1 without it."""
        if self.query_layers:
            return QUERY_MERGE
        return INNER_MERGE if self.merge_after else 1

    @property
    def merged_inputs(self) -> int:
        # beside each position of merged patches there is a query
        return self.pool // 2 if self.query_layers else self.pool

    @property
    def feature_width(self) -> int:
        return self.query_layers.width if self.query_layers else super().feature_width

    @property
    def other_heads(self) -> tuple[int, ...]:
        c = self.query_layers
        return (c.heads, c.kv_heads) if c else ()

    @property
    def windowed_share(self) -> float:
        """Weigh layers by the channels of their scores and values, those of distances and of a sink among them."""
        if not self.relative_side:
            return super().windowed_share
        count = self.merge_after or self.layers
        in_windows = len(self.windowed) * (self.head_width + self.window + 1)
        whole_images = (count - len(self.windowed)) * (self.head_width + self.relative_side)
        if c := self.query_layers:
            # Of a layer behind the merger, whose pairs are fewer by the square.
            whole_images += (self.layers - count) * c.width / self.heads / self.merged_inputs**2
        return in_windows / (in_windows + whole_images)

    @property
    def layer_kinds(self) -> tuple[bool, ...]:
        """Tell of each layer whether its learned distances are those in a window; (): there are none."""
        return tuple(i in self.windowed for i in range(self.layers)) if self.relative_side else ()

    @property
    def token_side(self) -> int:
        """Return how many patches per axis become one token of the LLM."""
        return self.connector.merge * self.inner_merge

    @property
    def head_width(self) -> int:
        """Return the channels of a head of attention."""
        return self.width // self.heads

    @property
    def rope_neighbours(self) -> bool:
        """Tell whether RoPE turns neighbouring channels of a head together."""
        grid = self.positions
        if isinstance(grid, LearnedGrid):
            return grid.theta > 0
        return isinstance(grid, StretchedGrid) and grid.neighbours

    @property
    def window_inputs(self) -> int:
        """Return how many patches a window has at most."""
        return self.window**2

    @property
    def merged_positions(self) -> int:
        """Return how many positions of the output the connector merges into one token."""
        return self.connector.merge**2

    @property
    def input_values(self) -> int:
        """Return how many values of a batch an input has."""
        return self.patch_values

    @property
    def media(self) -> tuple[str, ...]:
        """Name the kinds of media that become its items."""
        return ("image", "video") if self.takes_videos else ("image",)

    @property
    def own_tokens(self) -> int:
        """Return how many learned tokens stand beside the patches of every image; the LLM sees none of them."""
        return self.class_token + self.registers

    @property
    def hidden_tokens(self) -> int:
        """Return how many tokens behind each image the LLM does not see: the windows of its own tokens."""
        return -(-self.own_tokens // self.merged_positions)

    @property
    def patch_values(self) -> int:
        """Return how many pixel values a patch has in a batch: of one frame, or of all where videos are taken."""
        return self.patch**2 * self.channels * (self.frames if self.takes_videos else 1)

    @property
    def takes_videos(self) -> bool:
        """Return whether the encoder takes videos beside images."""
        return not isinstance(self.videos, NoVideo)

    @property
    def interpolates_tokens(self) -> bool:
        """Return whether a position of the LLM may be made of several tokens of the encoder."""
        return (
            bool(self.callbacks.before_llm) or self.images.interpolates or self.videos.interpolates
        )

    @property
    def head_norm_kind(self) -> Literal["layer", "rms"]:
        """Return the type of the norm after the last layer, if there is one."""
        return self.norm if self.head_norm_type == "same" else self.head_norm_type

    def check(self, where: str) -> None:
        check_remat(where, self)
        check_encode(where, self)
        divides(where, self.width, "width", self.heads, "heads")
        divides(where, self.heads, "heads", self.key_heads, "kv_heads")
        of_layers = ("windowed", "merge_after", "layer_scale", "value_norm", "clipped_linears")
        check_norms(where, self, (*of_layers, "gated", "relative_side", "dropout"))
        head_width = self.width // self.heads
        unit = self.positions.head_unit
        check(
            head_width % unit == 0 or not self.attends,
            f"{where}: width={self.width} over heads={self.heads} is {head_width} per head; 2D RoPE turns "
            f"pairs along two axes, so make width a multiple of {unit * self.heads}",
        )
        images = f"{where}.images={self.images.kind}"
        check(
            not self.callbacks.before_encoder or isinstance(self.images, AsIs),
            f"{where}.callbacks.before_encoder prepares images, and so does {images}; leave one of them out",
        )
        check(
            not self.callbacks.before_llm or not self.images.arranges_tokens,
            f"{where}.callbacks.before_llm says in what order tokens stand, and so does {images}; choose order=tiles",
        )
        check(
            self.class_token or not self.registers,
            f"{where}.registers={self.registers}: they stand beside a class token; use class_token=true",
        )
        check(
            self.norm_place == "before" or not self.layer_scale,
            f"{where}.layer_scale=true: what norm_place={self.norm_place} norms is scaled by the norms; use "
            "layer_scale=false",
        )
        check_windows(where, self)
        check(
            not self.windowed or self.window % self.connector.merge == 0,
            f"{where}.window={self.window}: a window holds whole tokens; use a multiple of "
            f"connector.merge={self.connector.merge}",
        )
        check_layer_numbers(f"{where}.deepstack", self.deepstack, self.layers)
        check(
            list(self.deepstack) == sorted(set(self.deepstack)),
            f"{where}.deepstack={listed(self.deepstack)}: name layers in order, each once",
        )
        check_layer_numbers(f"{where}.feature_layers", self.feature_layers, self.layers)
        check(
            not self.feature_layers or not self.head_norm,
            f"{where}.head_norm=true is of the last layer, and feature_layers={listed(self.feature_layers)} are "
            "read as they are; use head_norm=false",
        )
        check(
            self.merge_after <= self.layers,
            f"{where}.merge_after={self.merge_after}: there are {self.layers} layers; use at most so many",
        )
        alone = not (self.class_token or self.windowed or self.deepstack or self.feature_layers)
        check(
            not self.merge_after
            or bool(self.query_layers)
            or (alone and isinstance(self.positions, FractionalGrid)),
            f"{where}.merge_after={self.merge_after}: it goes with fractional positions, and without class_token, "
            "windowed, deepstack and feature_layers; leave them out",
        )
        self._check_relative(where)
        for name in ("mean", "std"):
            length = len(getattr(self, name))
            check(
                length in (1, self.channels),
                f"{where}.{name} has {length} numbers; give one for each of channels={self.channels}, or one for all",
            )
        check(min(self.std) > 0, f"{where}.std={self.std}: must be more than 0")

    def _check_relative(self, where: str) -> None:
        others = {"class_token": False, "deepstack": (), "feature_layers": (), "dropout": 0.0}
        others |= {"norm_place": "before", "qk_norm": "none", "value_norm": False}
        given = [name for name, none in others.items() if getattr(self, name) != none]
        square = isinstance(self.positions, LearnedGrid) and not self.positions.theta
        for name in ("relative_side", "query_layers"):
            key = f"{where}.{name}"
            check(
                not getattr(self, name) or (square and self.positions.interpolation != "none"),
                f"{key}: it goes with learned positions alone that are interpolated; use positions=learned",
            )
            check(
                not getattr(self, name) or not given,
                f"{key}: it goes without {(given or [''])[0]}; leave that out",
            )
        if c := self.query_layers:
            check(
                self.connector.merge == 1 and 0 < self.merge_after < self.layers,
                f"{where}.query_layers: the merger before them merges patches; use connector.merge=1, and a "
                f"merge_after from 1 to layers - 1={self.layers - 1}",
            )
            largest = QUERY_MERGE * c.sides[-1]
            check(
                self.relative_side in (0, largest),
                f"{where}.relative_side={self.relative_side}: images of query_layers.sides have {largest} patches a "
                "side at most; use that",
            )


@dataclass(frozen=True)
class Sinusoids:
    """Whisper's sinusoidal positions, for clips of any length."""

    kind: Literal["sinusoids"] = "sinusoids"


@dataclass(frozen=True)
class StoredTable:
    """A table of positions as stored in Whisper's checkpoints; not trained."""

    positions: PositiveInt = 1500  # of the longest clip
    kind: Literal["stored"] = "stored"


@dataclass(frozen=True)
class RotaryTime:
    """RoPE by the time in a clip (GLM-ASR)."""

    theta: PositiveFloat = 10_000.0  # base of the frequencies
    width: NonNegativeInt = 0  # channels of a head that it turns, the first; 0: all
    kind: Literal["rotary_time"] = "rotary_time"


@dataclass(frozen=True)
class ConformerConfig:
    """Layers of a Conformer in place of a transformer's: half MLPs, local attention, a causal convolution (Gemma 4).

    Attention is among a clip's nearest positions, with keys made of sinusoids of distances, in time
    before a position; those of distances below 0 are zeros.
    """

    past: NonNegativeInt  # positions before its own that a position attends
    future: NonNegativeInt = 0  # positions behind its own
    nearest: int = 0  # distance that its own counts as
    score_cap: PositiveFloat = 50.0  # scores become cap * tanh(score / cap)
    taps: PositiveInt = 5  # positions that the convolution reads, the last its own
    mlp_share: PositiveFloat = 0.5  # of the outputs of both MLPs, which is added to the stream
    limit: PositiveFloat = 1e10  # that activations are clipped to before norms
    # channels of two 2D convolutions of stride 2, which make positions of frames
    stem_widths: tuple[PositiveInt, ...] = (128, 32)

    def check(self, where: str) -> None:
        check(
            len(self.stem_widths) == 2,
            f"{where}.stem_widths={listed(self.stem_widths)}: give two, one for each convolution",
        )


@dataclass(frozen=True)
class AudioConfig(TowerFacts):
    """An encoder of packed log-mel frames: convolutions, then a transformer, or a Conformer's layers (`conformer`).

    Whisper's convolutions are two along time, the second of stride 2; with `stem_width` they are
    three along time and bins, all of stride 2 (Qwen3-Omni).
    """

    modality: ClassVar[str] = "audio"
    media: ClassVar[tuple[str, ...]] = ("audio",)
    takes_pixels: ClassVar[bool] = False  # rows of a batch hold float32
    interpolates_tokens: ClassVar[bool] = False  # each position of the LLM is one token
    # of a layer, as an image encoder's fields of these names
    norm: ClassVar[str] = "layer"
    norm_place: ClassVar[str] = "before"
    qk_norm: ClassVar[str] = "none"
    value_norm: ClassVar[bool] = False
    attention_scale: ClassVar[float] = 0.0
    layer_scale: ClassVar[bool] = False

    layers: LayerCount  # number of layers
    width: PositiveInt  # of the residual stream
    heads: PositiveInt  # attention heads
    # of the MLP's hidden layer; 0: layers are RMSNorms alone, without scales, of frames as they are
    mlp_width: NonNegativeInt
    clips: AudioPreparation = LogMel()
    positions: Sinusoids | StoredTable | RotaryTime = Sinusoids()
    norm_eps: PositiveFloat = 1e-5  # of LayerNorm
    activation: Activation = "gelu_tanh"  # of the MLP
    stem_activation: Activation = "gelu_tanh"  # of the convolutions
    # average pooling over so many positions before the last norm; a remainder is dropped
    pool: PositiveInt = 1
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    # all scores at once, by blocks, a kernel for GPUs; auto: that, elsewhere blocks
    attention: Attention = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: Dropout = 0.0  # rate, in training, for the outputs of attention and MLP
    frozen: bool = False  # not trained, apart from its connector
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    # frames of the chunks that convolutions, positions and layers stay within; 0: whole clips
    chunk: NonNegativeInt = 0
    kind: Literal["audio"] = "audio"
    # channels of three 2D convolutions; 0: two 1D ones, as wide as the layers
    stem_width: NonNegativeInt = 0
    attended_chunks: PositiveInt = 1  # consecutive chunks of a clip that the layers attend
    # a clip shorter than a chunk has zeros behind it up to one, as the last chunk of a longer clip
    padded_chunks: bool = False
    key_bias: bool = False  # keys have a bias, as all other matrices of a layer
    quantize: Quantization = "none"  # of the linear layers' frozen weights
    # the matrices of a layer clip their inputs and outputs to stored bounds, which are not trained
    clipped_linears: bool = False
    conformer: ConformerConfig | None = None  # layers of a Conformer; none: of a transformer
    # a frozen encoder runs in every step, or once for each item, whose output is stored
    encode: Encode = "step"

    @property
    def mlps(self) -> int:
        """Return how many MLPs a layer has."""
        return 2 if self.conformer else 1

    @property
    def stem_channels(self) -> tuple[int, ...]:
        """Return the channels of each 2D convolution, all of stride 2; none where they are along time alone."""
        if self.conformer:
            return self.conformer.stem_widths
        return (self.stem_width,) * 3 if self.stem_width else ()

    @property
    def head_width(self) -> int:
        """Return the channels of a head of attention."""
        return self.width // self.heads

    @property
    def rotary_width(self) -> int:
        """Return the channels of a head that RoPE turns."""
        width = self.positions.width if isinstance(self.positions, RotaryTime) else 0
        return width or self.head_width

    @property
    def windowed(self) -> tuple[int, ...]:
        """Return the layers that attend within windows: all where clips are cut into chunks."""
        return tuple(range(self.layers)) if self.chunk else ()

    @property
    def window(self) -> int:
        """Return how many positions a window has: consecutive chunks of a clip; 0 without chunks."""
        return self.chunk_positions * self.attended_chunks

    @property
    def window_positions(self) -> int:
        """Return how many positions a window has."""
        return self.window

    @property
    def window_inputs(self) -> int:
        """Return how many frames a chunk has."""
        return self.chunk

    @property
    def merged_positions(self) -> int:
        """Return how many positions of the output the connector merges into one token."""
        return self.connector.merge

    @property
    def input_values(self) -> int:
        """Return how many values of a batch an input has: the bins of a frame."""
        return self.mels

    @property
    def hidden_tokens(self) -> int:
        """Return how many tokens behind each clip the LLM does not see.

        That is one for the silence after it, or for positions too few to be pooled.
        """
        return int(self.pool > 1 or (self.clips.reads_silence and not self.chunk))

    @property
    def mels(self) -> int:
        """Return the width of a frame."""
        return self.clips.mels

    @property
    def sample_rate(self) -> int:
        """Return the sampling rate of the clips, in Hz."""
        return self.clips.sample_rate

    @property
    def stride(self) -> int:
        """Return the frames of a position of the layers."""
        return 2 ** (len(self.stem_channels) or 1) if self.attends else 1

    @property
    def stem_bins(self) -> tuple[int, ...]:
        """Return the bins behind each 2D convolution."""
        return tuple(-(-self.mels // 2 ** (n + 1)) for n in range(len(self.stem_channels)))

    @property
    def biases(self) -> tuple[Biased, ...]:
        """Return the matrices of a layer that have a bias."""
        return ("query", *(("key",) if self.key_bias else ()), "value", "output", "up", "down")

    @property
    def chunk_positions(self) -> int:
        """Return the positions of a whole chunk: each begins with one of its own, as the frames of its row do."""
        return -(-self.chunk // self.stride)

    def count_positions(self, frames: Any) -> Any:
        """Count the positions of the layers that clips of so many frames become, int or int `[n]`."""
        if not self.chunk:
            return -(-frames // self.stride)
        chunks, rest = frames // self.chunk, frames % self.chunk
        return chunks * self.chunk_positions + -(-rest // self.stride)

    def positions_of(self, inputs: Any) -> Any:
        """Count the positions of the layers that so many frames of a row become, int or int `[n]`."""
        return self.count_positions(inputs) if self.chunk else inputs // self.stride

    def check(self, where: str) -> None:
        check_remat(where, self)
        check_encode(where, self)
        divides(where, self.width, "width", self.heads, "heads")
        for name in ("before_encoder", "before_llm"):
            function = getattr(self.callbacks, name)
            check(
                not function,
                f"{where}.callbacks.{name}={function}: it is called for images, and this encoder takes clips; "
                "leave it out",
            )
        of_layers = ("conformer", "chunk", "stem_width", "key_bias", "clipped_linears", "dropout")
        check_norms(where, self, of_layers)
        check(
            self.attends or self.width == self.mels,
            f"{where}.width={self.width}: layers of frames as they are are as wide as these, {self.mels}",
        )
        if not self.chunk:
            check(
                self.attended_chunks == 1,
                f"{where}.attended_chunks={self.attended_chunks}: set chunk, or leave it out",
            )
            check(
                not self.stem_width,
                f"{where}.stem_width={self.stem_width}: positions are those of chunks; set chunk",
            )
            check(
                not self.clips.mirrored,
                f"{where}.clips.end=mirror: convolutions over whole clips read silence; set chunk",
            )
        check(
            bool(self.stem_width) or not self.padded_chunks,
            f"{where}.padded_chunks=true: 1D convolutions read no zeros behind a chunk; set stem_width",
        )
        if self.conformer:
            others = {"stem_width": 0, "chunk": 0, "pool": 1, "dropout": 0, "key_bias": False}
            given = [name for name, none in others.items() if getattr(self, name) != none]
            check(
                not given and isinstance(self.positions, Sinusoids),
                f"{where}.{(given or ['positions'])[0]}: a Conformer has none; leave it out",
            )
            check(
                not self.clips.reads_silence,
                f"{where}.clips.attended=clip: a Conformer reads no silence behind clips; use usm_mel",
            )
        positions = self.positions
        check(
            not self.stem_width or isinstance(positions, Sinusoids),
            f"{where}.positions: with stem_width they are sinusoids",
        )
        rotary = isinstance(positions, RotaryTime)
        check(
            not rotary or (self.rotary_width % 2 == 0 and self.rotary_width <= self.head_width),
            f"{where}.positions: RoPE would turn {self.rotary_width} of the {self.head_width} channels of a head; "
            "it turns pairs of them",
        )
        check(
            rotary or self.width % 2 == 0 or not self.attends,
            f"{where}.width={self.width}: sinusoidal positions come in pairs; make it even",
        )
        if isinstance(positions, StoredTable):
            frames = self.clips.fixed_frames
            longest = self.stride * positions.positions
            check(
                self.chunk <= longest,
                f"{where}.chunk={self.chunk}: there are positions of {longest} frames; make chunk smaller, or "
                "positions.positions larger",
            )
            check(
                bool(self.chunk) or frames <= longest,
                f"{where}.clips: a window of {frames} frames is longer than the {longest} of which "
                f"positions.positions={positions.positions} has any; make seconds smaller",
            )


Encoder = VisionConfig | AudioConfig
