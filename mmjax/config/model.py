"""The model: an LLM, encoders, connectors, adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mmjax.config.media import AsIs, AudioPreparation, ImagePreparation, LogMel

# What a layer keeps between its forward and its backward pass; the rest is computed again (`models.layer_runs`).
Remat = Literal["none", "products", "attention_mlp", "attention", "offload", "full"]
# Of a tower: one for all its layers, or what the memory allows, decided before step 0 (`planning.fit`).
TowerRemat = Literal["auto", "none", "products", "attention_mlp", "attention", "offload", "full"]


@dataclass(frozen=True)
class PlainRope:
    """Rotary positions as they are."""

    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by a factor."""

    factor: float  # that positions are divided by
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicRope:
    """A base that grows with the sample, where that is longer than `positions` (dynamic NTK)."""

    factor: float  # of the length beyond `positions`
    positions: int  # of the training before
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class YarnRope:
    """YaRN: slow channels divided by a factor, fast ones as they are; cosines and sines scaled."""

    factor: float  # that slow channels are divided by
    positions: int  # of the training before
    attention: float  # by which cosines and sines are scaled
    fast: float = 32.0  # rotations over `positions` of the channels that stay
    slow: float = 1.0  # and of those that are divided
    whole: bool = True  # the borders between them lie on whole channels
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's: channels of long waves divided by a factor, those between blended."""

    factor: float  # that channels of long waves are divided by
    low: float  # rotations over `positions` of the channels that are divided
    high: float  # rotations of those that stay
    positions: int  # of the training before
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: a factor for every channel pair, others for samples longer than `positions`."""

    short: tuple[float, ...]  # a factor per channel pair, up to `positions`
    long: tuple[float, ...]  # a factor per channel pair, beyond
    positions: int  # of the training before
    attention: float  # by which cosines and sines are scaled
    kind: Literal["long"] = "long"


RopeScaling = PlainRope | LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
Biased = Literal["query", "key", "value", "output", "gate", "up", "down"]


@dataclass(frozen=True)
class DecoderConfig:
    """A causal transformer: rotary positions, RMSNorm, a gated MLP, grouped-query attention."""

    layers: int  # number of layers
    width: int  # of the residual stream
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_width: int  # channels per head
    mlp_width: int  # of the MLP's hidden layer
    vocab: int  # tokens
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling = PlainRope()
    rope_sections: tuple[int, ...] = ()  # channel pairs that turn with (t, y, x); empty: all with one position
    rope_interleaved: bool = False  # the sections' pairs take turns
    norm_eps: float = 1e-6  # of RMSNorm
    norm_offset: float = 0.0  # that is added to the norms' scales
    activation: Activation = "silu"  # of the MLP's gate
    biases: tuple[Biased, ...] = ()  # the matrices of a layer that have one
    qk_norm: Literal["none", "head"] = "none"  # of queries and keys, before they turn
    post_norms: bool = False  # of what attention and the MLP add to the residual stream
    embedding_scale: float = 1.0  # that embeddings are multiplied by
    attention_scale: float = 0.0  # of the scores; 0 = head_width ** -0.5
    attention_cap: float = 0.0  # scores are bent to stay below; 0 = not
    logit_cap: float = 0.0  # logits are bent to stay below; 0 = not
    window: int = 0  # tokens that the layers in `windowed` see, their own included
    windowed: tuple[int, ...] = ()  # layers that see a window
    tied: bool = True  # embedding and output table are one
    items: Literal["causal", "bidirectional", "isolated"] = "causal"  # how the tokens of an image or clip attend
    attention: Literal["dense", "blockwise"] = "dense"  # whether all scores are in memory at once, or a block at a time
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False  # not trained
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random


@dataclass(frozen=True)
class ConnectorConfig:
    """An MLP from an encoder's width to the LLM's, over `merge` neighbours (per axis for images)."""

    merge: int = 2  # neighbours that become one token, per axis for images
    mlp_width: int = 256  # 0 = no MLP but a single matrix, whose bias is "down"
    norm: Literal["none", "layer", "rms", "merged_layer"] = "layer"  # before neighbours are merged, or after
    norm_eps: float = 0.0  # 0 = the encoder's
    activation: Activation = "gelu_tanh"  # of the MLP
    biases: tuple[Biased, ...] = ("up", "down")  # the matrices that have one
    position_grid: int = 0  # learned positions of merged tokens, up to this row/column/time; 0 = none
    newline: bool = False  # a learned token behind every row of an image whose tokens the LLM sees by rows
    frozen: bool = False  # not trained
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random


@dataclass(frozen=True)
class RotaryGrid:
    """Patches turn with their row and column; images of any size."""

    theta: float = 100.0  # base of the frequencies
    kind: Literal["rotary"] = "rotary"


@dataclass(frozen=True)
class LearnedGrid:
    """A learned vector for every place of a grid; images have at most as many rows and columns of patches."""

    rows: int  # of patches
    columns: int  # of patches
    kind: Literal["learned"] = "learned"


@dataclass(frozen=True)
class StretchedGrid:
    """A learned vector for every place of a square grid that is stretched to each image; patches turn too."""

    side: int  # of the square
    theta: float = 10_000.0  # base of the frequencies
    kind: Literal["stretched"] = "stretched"


@dataclass(frozen=True)
class Callbacks:
    """Your own functions around an encoder (Cornstarch 5.1), `module:qualname` as of a FunctionSource; empty: none.

    In the order in which they are called. The first and the last are called where data is loaded, and know sizes; the
    others inside the step, on arrays, and keep their shapes.
    """

    before_encoder: str = ""  # (Picture, images of its sample) -> Pictures: the items of an image, instead of `images`
    after_encoder: str = ""  # (features [R, L, W], ItemBatch) -> what the connector reads
    after_connector: str = ""  # (tokens [R, M, E], ItemBatch) -> what is sent to the LLM
    before_llm: str = ""  # (size, grids of the items) -> Arrangement: which tokens of an image the LLM sees, and where


@dataclass(frozen=True)
class VisionConfig:
    """A ViT that takes images as packed patches."""

    layers: int  # number of layers
    width: int  # of the residual stream
    heads: int  # of attention
    mlp_width: int  # of the MLP's hidden layer
    patch: int  # pixels per side
    channels: int = 3  # of an image; 3: red, green and blue
    frames: int = 1  # of a clip that make one patch; a still image is all of them
    mean: tuple[float, ...] = (0.5,)  # of each channel, or of all; pixels are (x / 255 - mean) / std
    std: tuple[float, ...] = (0.5,)  # of each channel, or of all
    images: ImagePreparation = AsIs()  # before they are cut into patches
    positions: RotaryGrid | LearnedGrid | StretchedGrid = RotaryGrid()
    window: int = 0  # rows and columns of patches in the squares within which the layers in `windowed` attend
    windowed: tuple[int, ...] = ()  # layers that attend within windows
    deepstack: tuple[int, ...] = ()  # layers whose outputs are added to the LLM's: the n-th's behind its layer n
    class_token: bool = False  # a learned token beside the patches of every image; the LLM does not see it
    embed_bias: bool = True  # of the projection of patches
    embed_norm: bool = False  # before the first layer
    head_norm: bool = True  # after the last layer
    norm: Literal["layer", "rms"] = "layer"  # LayerNorm or RMSNorm
    head_norm_type: Literal["same", "layer", "rms"] = "same"  # of the norm after the last layer; same = as `norm`
    norm_eps: float = 1e-6  # of the norms
    activation: Activation = "gelu_tanh"  # of the MLP
    gated: bool = False  # the MLP has a gate
    biases: tuple[Biased, ...] = ("query", "value", "output", "up", "down")  # the matrices of a layer that have one
    qk_norm: Literal["none", "width"] = "none"  # of queries and keys, over all heads
    qk_norm_eps: float = 1e-6  # of those norms
    layer_scale: bool = False  # learned scales of what attention and the MLP add to the residual stream
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    attention: Literal["dense", "blockwise"] = "dense"  # whether all scores are in memory at once, or a block at a time
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False  # not trained, its connector apart
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    kind: Literal["vision"] = "vision"

    @property
    def head_norm_kind(self) -> Literal["layer", "rms"]:
        """The norm after the last layer, if there is one."""
        return self.norm if self.head_norm_type == "same" else self.head_norm_type


@dataclass(frozen=True)
class Sinusoids:
    """Whisper's formula, for clips of any length."""

    kind: Literal["sinusoids"] = "sinusoids"


@dataclass(frozen=True)
class StoredTable:
    """A vector for every position of a clip, as Whisper's checkpoints store them; training leaves them as they are."""

    positions: int = 1500  # of the longest clip
    kind: Literal["stored"] = "stored"


@dataclass(frozen=True)
class AudioConfig:
    """Whisper's encoder over packed log-mel frames: two convolutions (the second of stride 2), then a transformer."""

    layers: int  # number of layers
    width: int  # of the residual stream
    heads: int  # of attention
    mlp_width: int  # of the MLP's hidden layer
    clips: AudioPreparation = LogMel()
    positions: Sinusoids | StoredTable = Sinusoids()
    norm_eps: float = 1e-5  # of LayerNorm
    activation: Activation = "gelu_tanh"  # of the MLP
    stem_activation: Activation = "gelu_tanh"  # of the convolutions
    pool: int = 1  # so many positions become their mean before the last norm; those left over at the end are dropped
    connector: ConnectorConfig = ConnectorConfig()
    callbacks: Callbacks = Callbacks()
    attention: Literal["dense", "blockwise"] = "dense"  # whether all scores are in memory at once, or a block at a time
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: float = 0.0  # rate, in training, of what attention and the MLP add to the residual stream
    frozen: bool = False  # not trained, its connector apart
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    kind: Literal["audio"] = "audio"

    @property
    def mels(self) -> int:
        """Width of one frame."""
        return self.clips.mels

    @property
    def sample_rate(self) -> int:
        """Sampling rate of the clips, in Hz."""
        return self.clips.sample_rate


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank matrices a and b beside linear layers, which then add `scale * (x @ a) @ b`; b is 0 at first."""

    layers: tuple[str, ...]  # patterns of names, `*` for anything: llm.*, *.attention.query, vision.connector.mlp.up
    rank: int = 16  # columns of a, rows of b
    alpha: float = 32.0  # of the scale
    scaling: Literal["rank", "sqrt_rank"] = "rank"  # scale = alpha / rank, or alpha / sqrt(rank) (rsLoRA)
    base: Literal["frozen", "trained"] = "frozen"  # the other weights of a module that has adapters


@dataclass(frozen=True)
class ModelConfig:
    """An LLM and the encoders that feed it, by name."""

    llm: DecoderConfig
    encoders: dict[str, VisionConfig | AudioConfig] = field(default_factory=dict)  # by a name of your own
    lora: dict[str, LoraConfig] = field(default_factory=dict)  # by a name of your own
