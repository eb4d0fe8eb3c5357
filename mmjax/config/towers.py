"""Config of towers: the LLM, encoders and their connectors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from mmjax.config.clips import AudioPreparation, LogMel
from mmjax.config.images import AsIs, ImagePreparation
from mmjax.config.videos import NoVideo, VideoPreparation

Attention = Literal["dense", "blockwise", "flash", "auto"]
# Activations that a layer saves for its backward pass; the rest is recomputed
# (`models.layer_stacks`).
Remat = Literal["none", "products", "attention_mlp", "attention", "offload", "full"]
# Of a module: one policy for all layers, or the fastest that fits in memory, chosen before step 0
# (`planning.remat`).
TowerRemat = Literal["auto", "none", "products", "attention_mlp", "attention", "offload", "full"]


# Of a frozen tower's matrices: in the precision of the computation, or in 8 or 4 bits
# (`models.quantization`).
Quantization = Literal["none", "int8", "nf4"]


@dataclass(frozen=True)
class PlainRope:
    """Rotary positions without scaling."""

    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by a factor."""

    factor: float  # that positions are divided by
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicRope:
    """Dynamic NTK: a base that grows with the length of samples beyond `positions`."""

    factor: float  # of the length beyond `positions`
    positions: int  # of the pretraining
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class YarnRope:
    """YaRN: slow channels divided by a factor, fast ones unchanged; cosines and sines scaled."""

    factor: float  # that slow channels are divided by
    positions: int  # of the pretraining
    attention: float  # by which cosines and sines are scaled
    fast: float = 32.0  # rotations over `positions`, from which on channels are unchanged
    slow: float = 1.0  # rotations up to which channels are divided
    whole: bool = True  # rounds the boundaries between them to whole channels
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: channels of long wavelengths divided by a factor, those between blended."""

    factor: float  # that channels of long wavelengths are divided by
    low: float  # rotations over `positions` up to which channels are divided
    high: float  # rotations from which on they are unchanged
    positions: int  # of the pretraining
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: a factor for every channel pair, and others for samples longer than `positions`."""

    short: tuple[float, ...]  # a factor per channel pair, up to `positions`
    long: tuple[float, ...]  # a factor per channel pair, beyond
    positions: int  # of the pretraining
    attention: float  # by which cosines and sines are scaled
    kind: Literal["long"] = "long"


RopeScaling = PlainRope | LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
UNLIMITED = 2**30  # tokens: more than any row has
Biased = Literal["query", "key", "value", "output", "gate", "up", "down"]


@dataclass(frozen=True)
class DeltaNetConfig:
    """A gated delta net in place of attention in some layers: a matrix per head that every token decays and writes."""

    layers: tuple[int, ...]  # that have it
    key_heads: int  # heads of queries and keys
    value_heads: int  # heads of values, a multiple of key_heads
    key_width: int  # channels per head of queries and keys
    value_width: int  # channels per head of values
    taps: int = 4  # tokens that the short convolution reads, the token itself included


# times what an even router gives a device: what it takes at once; the rest takes another turn
EXPERT_ROOM = 1.25


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP in some layers: a router sends each token to a few of many MLPs."""

    layers: tuple[int, ...]  # that have it
    count: int  # experts of a layer
    per_token: int  # experts that a token is sent to
    width: int  # of an expert's hidden layer
    normalized: bool = True  # the weights of a token's experts add up to 1
    # of the hidden layer of an expert that sees every token, behind a gate; 0: there is none
    shared_width: int = 0
    balance_loss: float = 0.0  # weight of the loss that balances the tokens of the experts
    z_loss: float = 0.0  # weight of the mean squared log-sum-exp of the router's logits

    def sent_at_once(self, tokens: int, devices: int) -> int:
        """Return how many of its tokens a device sends at once to each of those that share the experts; at most all.

        Of 64 experts on 8 devices a token's 2 are both on other devices than a given one with
        chance 0.76: 0.3 of all.
        """
        elsewhere = math.comb(self.count - self.count // devices, self.per_token) / math.comb(
            self.count, self.per_token
        )
        return min(tokens, math.ceil(EXPERT_ROOM * (1 - elsewhere) * tokens))

    def computed_at_once(self, tokens: int, devices: int) -> int:
        """Return how many copies of tokens a device computes at once, of these tokens of all that share the experts."""
        copies = tokens * self.per_token
        return max(1, min(copies, math.ceil(EXPERT_ROOM * copies / devices)))


class TowerFacts:
    """Facts that data, planning and inference ask of a tower beside its fields; each class states those that differ."""

    modality: Literal["text", "image", "audio"] = "text"  # of its items
    is_stack: bool = True  # of layers; a UNet's blocks differ in shape
    is_generator: bool = False  # makes images of the LLM's hidden states
    is_causal: bool = False  # positions attend those before them
    media: tuple[str, ...] = ()  # kinds of media that become its items
    stride: int = 1  # inputs that become one position of the layers
    pool: int = 1  # positions behind the layers that become one, before neighbours are merged
    deepstack: tuple[int, ...] = ()  # layers whose outputs are added to the LLM's
    windowed: tuple[int, ...] = ()  # layers that attend within windows
    window_inputs: int = 0  # inputs that such a window has at most
    gated: bool = False  # the MLP has a gate
    cross_width: int = 0  # channels of attention to a condition
    experts: ExpertsConfig | None = None  # in place of the MLP in some layers
    queries: int = 0  # learned tokens in the LLM that stand for an image to be made
    merged_positions: int = 1  # positions of the output that a connector merges into one token

    @property
    def window_positions(self) -> int:
        """Return how many positions of the layers a window has at most."""
        return self.window_inputs

    @property
    def token_positions(self) -> int:
        """Return how many positions of the layers become one token, pooling included."""
        return self.merged_positions * self.pool

    @property
    def positions_per_token(self) -> int:
        """Return how many inputs become one token of the LLM; 1 for a generator."""
        return self.stride * self.token_positions

    @property
    def shortest_row(self) -> int:
        """Return the inputs of the shortest row of a batch; others are multiples of it."""
        return self.positions_per_token

    def positions_of(self, inputs: Any) -> Any:
        """Count the positions of the layers that an item of so many inputs becomes, int or int `[n]`."""
        return inputs


class LayerKind(NamedTuple):
    """Name what a decoder's layers differ in."""

    has_delta_net: bool  # in place of attention
    has_experts: bool  # in place of the MLP
    has_float8: bool  # products of linear layers in FP8


@dataclass(frozen=True)
class DecoderConfig(TowerFacts):
    """A causal transformer: grouped-query attention; by default rotary positions, RMSNorm and a gated MLP."""

    is_causal: ClassVar[bool] = True

    layers: int  # number of layers
    width: int  # of the residual stream
    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_width: int  # channels per head
    mlp_width: int  # of the MLP's hidden layer
    vocab: int  # tokens
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling = PlainRope()
    # channel pairs rotated by (t, y, x); empty: all by one position
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False  # interleaves the pairs of the sections
    rotary_width: int = 0  # channels per head that RoPE turns, the first ones; 0: all
    norm_eps: float = 1e-6  # of the norms
    norm_offset: float = 0.0  # added to the scales of RMSNorms
    activation: Activation = "silu"  # of the MLP, of its gate where it has one
    biases: tuple[Biased, ...] = ()  # the matrices of a layer that have one
    qk_norm: Literal["none", "head"] = "none"  # of queries and keys, before RoPE
    # of the outputs of attention and MLP, before they are added to the residual stream
    post_norms: bool = False
    embedding_scale: float = 1.0  # that embeddings are multiplied by
    attention_gate: bool = False  # multiplies attention's output by the sigmoid of a projection
    attention_scale: float = 0.0  # of the scores; 0: head_width ** -0.5
    attention_cap: float = 0.0  # soft cap of the scores; 0: none
    logit_cap: float = 0.0  # soft cap of the logits; 0: none
    # tokens of the sliding window of the layers in `windowed`, the query's included
    window: int = 0
    windowed: tuple[int, ...] = ()  # layers with sliding-window attention
    # base of the rotary frequencies of those layers, unscaled; 0: as the others
    window_rope_theta: float = 0.0
    # in place of attention in some layers; none: all layers have attention
    delta_net: DeltaNetConfig | None = None
    tied: bool = True  # the embedding is the output table too
    # How the tokens of an image or clip attend; prefix: as all before the first answer, which
    # attends both ways.
    items: Literal["causal", "bidirectional", "isolated", "prefix"] = "causal"
    # all scores at once, by blocks, a kernel for GPUs; auto: that, elsewhere blocks
    attention: Attention = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, for the outputs of attention and MLP
    frozen: bool = False  # not trained
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    # in place of the MLP in some layers; none: all layers have the MLP
    experts: ExpertsConfig | None = None
    # RoPE turns channels 2i and 2i + 1 of a head together, not i and i + half of them
    rope_neighbours: bool = False
    # RMSNorm or LayerNorm; those of queries and keys are RMSNorms
    norm: Literal["rms", "layer"] = "rms"
    gated: bool = True  # the MLP has a gate
    learned_positions: int = 0  # entries of a table of learned positions in place of RoPE; 0: RoPE
    first_position: int = 0  # entry of that table for a sample's first token
    quantize: Quantization = "none"  # of the linear layers' frozen weights
    # products of all layers' linear layers, but the first and the last layer's
    fp8: Literal["off", "linears"] = "off"

    @property
    def window_inputs(self) -> int:
        """Return how many tokens a sliding window has."""
        return self.window

    @property
    def max_tokens(self) -> int:
        """Return how many tokens a sample may have: as many as there are learned positions."""
        return self.learned_positions - self.first_position if self.learned_positions else UNLIMITED

    @property
    def rotary_pairs(self) -> int:
        """Return the channel pairs of a head that RoPE turns."""
        return (self.rotary_width or self.head_width) // 2

    @property
    def delta_layers(self) -> tuple[bool, ...]:
        """Tell of each layer whether it has a gated delta net."""
        layers = self.delta_net.layers if self.delta_net else ()
        return tuple(i in layers for i in range(self.layers))

    @property
    def expert_layers(self) -> tuple[bool, ...]:
        """Tell of each layer whether it has a mixture of experts."""
        layers = self.experts.layers if self.experts else ()
        return tuple(i in layers for i in range(self.layers))

    @property
    def float8_layers(self) -> tuple[bool, ...]:
        """Tell of each layer whether its linear layers multiply in FP8."""
        return tuple(self.fp8 == "linears" and 0 < i < self.layers - 1 for i in range(self.layers))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Tell how the layers differ."""
        return tuple(map(LayerKind, self.delta_layers, self.expert_layers, self.float8_layers))


@dataclass(frozen=True)
class ConnectorConfig:
    """An MLP from an encoder's width to the LLM's, over `merge` neighbours (per axis for images)."""

    merge: int = 2  # neighbours that become one token, per axis for images
    mlp_width: int = 256  # 0: a single matrix instead of an MLP, whose bias is "down"
    # before they are merged, or after
    norm: Literal["none", "layer", "rms", "merged_layer", "merged_rms"] = "layer"
    norm_eps: float = 0.0  # 0: the encoder's
    norm_offset: float = 0.0  # added to an RMSNorm's scales
    activation: Activation = "gelu_tanh"  # of the MLP
    biases: tuple[Biased, ...] = ("up", "down")  # the matrices that have one
    merging: Literal["concatenate", "mean"] = "concatenate"  # of the features of merged neighbours
    # learned positions of merged tokens, up to this row/column/time; 0: none
    position_grid: int = 0
    # a learned token behind every row of an image whose tokens the LLM sees by rows
    newline: bool = False
    frozen: bool = False  # not trained
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    # of what a matrix makes of merged neighbours before the MLP (Mistral 3); 0: there is none
    merger_width: int = 0
    merger_bias: bool = False  # of that matrix
    # a square matrix, a LayerNorm and a GELU between that and the MLP (GLM-4.1V)
    projection: bool = False
    gated: bool = False  # the MLP has a gate


# What of an image counts: all of it, padded; whole patches; or whole patches, which must be in whole
# squares that the connector merges.
Counted = Literal["all", "patches", "squares"]


@dataclass(frozen=True)
class RotaryGrid:
    """2D RoPE by row and column, for images of any size."""

    counts: ClassVar[Counted] = "all"
    theta: float = 100.0  # base of the frequencies
    kind: Literal["rotary"] = "rotary"


@dataclass(frozen=True)
class AlternatingGrid:
    """2D RoPE whose frequencies turn by row and by column in turn; of an image only whole patches count (Pixtral)."""

    counts: ClassVar[Counted] = "squares"
    theta: float = 10_000.0  # base of the frequencies
    kind: Literal["alternating"] = "alternating"


@dataclass(frozen=True)
class LearnedGrid:
    """A learned vector per cell of a grid; images have at most as many rows and columns of patches.

    With an interpolation the grid is a square, whose vectors are interpolated to images of other
    sizes (DINOv2).
    """

    counts: ClassVar[Counted] = "patches"
    rows: int  # of patches
    columns: int  # of patches
    kind: Literal["learned"] = "learned"
    # antialiased: bicubic, wider where it shrinks
    interpolation: Literal["none", "bicubic", "antialiased"] = "none"


@dataclass(frozen=True)
class StretchedGrid:
    """A learned vector per cell of a square grid, interpolated to each image's size, and 2D RoPE."""

    counts: ClassVar[Counted] = "all"
    side: int  # of the square
    theta: float = 10_000.0  # base of the frequencies
    kind: Literal["stretched"] = "stretched"
    # bilinear, with the corner patches on the corner cells (Qwen3-VL), or bicubic, edge on edge
    # (GLM-4.1V)
    filter: Literal["bilinear", "bicubic"] = "bilinear"


@dataclass(frozen=True)
class FractionalGrid:
    """A learned vector per cell of a square grid, which a patch takes by where it lies in its image (Idefics3).

    Of an image only whole patches count.
    """

    counts: ClassVar[Counted] = "squares"
    side: int  # of the square
    kind: Literal["fractional"] = "fractional"


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
class VisionConfig(TowerFacts):
    """A ViT that takes images as packed patches."""

    modality: ClassVar[str] = "image"
    takes_pixels: ClassVar[bool] = True  # rows of a batch hold bytes

    layers: int  # number of layers
    width: int  # of the residual stream
    heads: int  # attention heads
    mlp_width: int  # of the MLP's hidden layer
    patch: int  # pixels per side
    channels: int = 3  # of an image; 3: red, green and blue
    frames: int = 1  # temporal patch size; a still image is repeated
    # per channel, or one for all; pixels become (x / 255 - mean) / std
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)  # per channel, or one for all
    images: ImagePreparation = AsIs()  # preprocessing
    videos: VideoPreparation = NoVideo()  # which frames of a video are taken, and their size
    positions: RotaryGrid | LearnedGrid | StretchedGrid | AlternatingGrid | FractionalGrid = (
        RotaryGrid()
    )
    # side, in patches, of the square windows that the layers in `windowed` attend within; a
    # multiple of connector.merge
    window: int = 0
    windowed: tuple[int, ...] = ()  # layers with window attention
    # layers whose outputs are added to the LLM's: the n-th's after its layer n
    deepstack: tuple[int, ...] = ()
    # a learned token beside the patches of every image; the LLM does not see it
    class_token: bool = False
    embed_bias: bool = True  # of the projection of patches
    embed_norm: bool = False  # before the first layer
    head_norm: bool = True  # after the last layer
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    # of the norm after the last layer; same: as `norm`
    head_norm_type: Literal["same", "layer", "rms"] = "same"
    norm_eps: float = 1e-6  # of the norms
    activation: Activation = "gelu_tanh"  # of the MLP
    gated: bool = False  # the MLP has a gate
    # the matrices of a layer that have one
    biases: tuple[Biased, ...] = ("query", "value", "output", "up", "down")
    qk_norm: Literal["none", "width"] = "none"  # of queries and keys, over all heads
    qk_norm_eps: float = 1e-6  # of those norms
    layer_scale: bool = False  # learned scales of the outputs of attention and MLP
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    # all scores at once, by blocks, a kernel for GPUs; auto: that, elsewhere blocks
    attention: Attention = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, for the outputs of attention and MLP
    frozen: bool = False  # not trained, apart from its connector
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    kind: Literal["vision"] = "vision"
    embed_norm_first: bool = False  # embed_norm comes before learned positions are added
    registers: int = 0  # further learned tokens beside the class token, without positions
    # a layer's norms: of the inputs of attention and MLP, or outputs
    norm_place: Literal["before", "after"] = "before"
    quantize: Quantization = "none"  # of the linear layers' frozen weights

    @property
    def head_width(self) -> int:
        """Return the channels of a head of attention."""
        return self.width // self.heads

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


@dataclass(frozen=True)
class Sinusoids:
    """Whisper's sinusoidal positions, for clips of any length."""

    kind: Literal["sinusoids"] = "sinusoids"


@dataclass(frozen=True)
class StoredTable:
    """A table of positions as stored in Whisper's checkpoints; not trained."""

    positions: int = 1500  # of the longest clip
    kind: Literal["stored"] = "stored"


@dataclass(frozen=True)
class AudioConfig(TowerFacts):
    """An encoder of packed log-mel frames: convolutions, then a transformer.

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
    layer_scale: ClassVar[bool] = False

    layers: int  # number of layers
    width: int  # of the residual stream
    heads: int  # attention heads
    mlp_width: int  # of the MLP's hidden layer
    clips: AudioPreparation = LogMel()
    positions: Sinusoids | StoredTable = Sinusoids()
    norm_eps: float = 1e-5  # of LayerNorm
    activation: Activation = "gelu_tanh"  # of the MLP
    stem_activation: Activation = "gelu_tanh"  # of the convolutions
    # average pooling over so many positions before the last norm; a remainder is dropped
    pool: int = 1
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    # all scores at once, by blocks, a kernel for GPUs; auto: that, elsewhere blocks
    attention: Attention = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, for the outputs of attention and MLP
    frozen: bool = False  # not trained, apart from its connector
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    # frames of the chunks that convolutions, positions and layers stay within; 0: whole clips
    chunk: int = 0
    kind: Literal["audio"] = "audio"
    stem_width: int = 0  # channels of three 2D convolutions; 0: two 1D ones, as wide as the layers
    attended_chunks: int = 1  # consecutive chunks of a clip that the layers attend
    key_bias: bool = False  # keys have a bias, as all other matrices of a layer
    quantize: Quantization = "none"  # of the linear layers' frozen weights

    @property
    def head_width(self) -> int:
        """Return the channels of a head of attention."""
        return self.width // self.heads

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
        return 8 if self.stem_width else 2

    @property
    def stem_bins(self) -> tuple[int, int, int]:
        """Return the bins behind each of three 2D convolutions."""
        return -(-self.mels // 2), -(-self.mels // 4), -(-self.mels // 8)

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


Encoder = VisionConfig | AudioConfig


def head_counts(tower: DecoderConfig | Encoder) -> list[int]:
    """List the numbers of heads that tensor parallelism divides: of queries, of keys, and of a delta net's keys."""
    if not tower.is_causal:
        return [tower.heads]
    return [tower.heads, tower.kv_heads, *([tower.delta_net.key_heads] if tower.delta_net else [])]
