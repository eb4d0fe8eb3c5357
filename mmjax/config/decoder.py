"""Config of the LLM: its positions, its layers and what stands in their place in some of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from mmjax.config.checks import check, divides, listed
from mmjax.config.encoders import Encoder
from mmjax.config.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
)
from mmjax.config.towers import (
    Activation,
    Attention,
    Biased,
    Dropout,
    LayerCount,
    Quantization,
    Remat,
    TowerFacts,
    TowerRemat,
    check_layer_numbers,
    check_remat,
    check_windows,
)

UNLIMITED = 2**30  # tokens: more than any row has


@dataclass(frozen=True)
class PlainRope:
    """Rotary positions without scaling."""

    kind: Literal["plain"] = "plain"


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by a factor."""

    factor: PositiveFloat  # that positions are divided by
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class DynamicRope:
    """Dynamic NTK: a base that grows with the length of samples beyond `positions`."""

    factor: PositiveFloat  # of the length beyond `positions`
    positions: PositiveInt  # of the pretraining
    kind: Literal["dynamic"] = "dynamic"


@dataclass(frozen=True)
class YarnRope:
    """YaRN: slow channels divided by a factor, fast ones unchanged; cosines and sines scaled."""

    factor: PositiveFloat  # that slow channels are divided by
    positions: PositiveInt  # of the pretraining
    attention: float  # by which cosines and sines are scaled
    fast: float = 32.0  # rotations over `positions`, from which on channels are unchanged
    slow: float = 1.0  # rotations up to which channels are divided
    whole: bool = True  # rounds the boundaries between them to whole channels
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: channels of long wavelengths divided by a factor, those between blended."""

    factor: PositiveFloat  # that channels of long wavelengths are divided by
    low: float  # rotations over `positions` up to which channels are divided
    high: float  # rotations from which on they are unchanged
    positions: PositiveInt  # of the pretraining
    kind: Literal["llama3"] = "llama3"

    def check(self, where: str) -> None:
        check(self.low < self.high, f"{where}: low={self.low} must be below high={self.high}")


@dataclass(frozen=True)
class LongRope:
    """LongRoPE: a factor for every channel pair, and others for samples longer than `positions`."""

    short: tuple[float, ...]  # a factor per channel pair, up to `positions`
    long: tuple[float, ...]  # a factor per channel pair, beyond
    positions: PositiveInt  # of the pretraining
    attention: float  # by which cosines and sines are scaled
    kind: Literal["long"] = "long"


@dataclass(frozen=True)
class ProportionalRope:
    """Gemma 4: of the pairs over all channels of a head only the first ones turn."""

    share: Annotated[float, at_least(0.0, "it is a share of the pairs")] = 1.0  # of the pairs
    factor: PositiveFloat = 1.0  # that channels are divided by
    kind: Literal["proportional"] = "proportional"


RopeScaling = (
    PlainRope | LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope | ProportionalRope
)


@dataclass(frozen=True)
class DeltaNetConfig:
    """A gated delta net in place of attention in some layers: a matrix per head that every token decays and writes."""

    layers: tuple[int, ...]  # that have it
    key_heads: PositiveInt  # heads of queries and keys
    value_heads: PositiveInt  # heads of values, a multiple of key_heads
    key_width: PositiveInt  # channels per head of queries and keys
    value_width: PositiveInt  # channels per head of values
    taps: PositiveInt = 4  # tokens that the short convolution reads, the token itself included

    def check(self, where: str) -> None:
        check(
            bool(self.layers),
            f"{where}.layers is empty; name the layers that have it, or use {where}=none",
        )
        divides(where, self.value_heads, "value_heads", self.key_heads, "key_heads")


@dataclass(frozen=True)
class TokenInputsConfig:
    """Gemma's per-layer embeddings: every layer adds what it makes of a vector of its own for each token."""

    width: PositiveInt  # of the vector
    vocab: PositiveInt  # tokens of their table; 0 stands for images, clips and padding, and is not trained


@dataclass(frozen=True)
class ConvolutionConfig:
    """A short convolution between two gates in place of attention in some layers (LFM2)."""

    layers: tuple[int, ...]  # that have it
    taps: PositiveInt = 3  # tokens that it reads, the token itself included
    biased: bool = False  # its matrices and its filter have biases

    def check(self, where: str) -> None:
        check(
            bool(self.layers),
            f"{where}.layers is empty; name the layers that have it, or use {where}=none",
        )


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA): keys and values of all heads are made of a latent, and positions are apart.

    RoPE turns the last `rotary_width` channels of a head's query, and a key of as many that all heads share.
    """

    key_rank: PositiveInt  # channels of the latent of keys and values
    value_width: PositiveInt  # channels per head of values
    query_rank: NonNegativeInt = 0  # channels of a latent of queries; 0: there is none


# times what an even router gives a device: what it takes at once; the rest takes another turn
EXPERT_ROOM = 1.25


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP in some layers: a router sends each token to a few of many MLPs."""

    layers: tuple[int, ...]  # that have it
    count: PositiveInt  # experts of a layer
    per_token: PositiveInt  # experts that a token is sent to
    width: PositiveInt  # of an expert's hidden layer
    normalized: bool = True  # the weights of a token's experts add up to 1
    # of the hidden layer of an expert that sees every token, behind a gate; 0: there is none
    shared_width: NonNegativeInt = 0
    # weight of the loss that balances the tokens of the experts
    balance_loss: NonNegativeFloat = 0.0
    z_loss: NonNegativeFloat = 0.0  # weight of the mean squared log-sum-exp of the router's logits
    # of the router's logits, by which experts are chosen and weighed
    scores: Literal["softmax", "sigmoid"] = "softmax"
    # a number for each expert is added to its score when experts are chosen; it is not trained
    correction: bool = False
    groups: PositiveInt = 1  # of consecutive experts
    # that a token's experts are of: those with the largest sums of their best scores
    chosen_groups: PositiveInt = 1
    scale: PositiveFloat = 1.0  # of the weights of a token's experts
    shared_gate: bool = True  # before the expert that sees every token
    biases: bool = False  # of the router and of the experts' matrices
    # gpt-oss: gates are cut off above it, and what they multiply on both sides, to which 1 is added; 0:
    # neither is
    limit: NonNegativeFloat = 0.0
    # of the sigmoid in the silu of such gates
    slope: PositiveFloat = 1.0
    group_best: PositiveInt = 2  # scores of a group that are added up when groups are chosen
    # of experts, which the weights of a token's experts multiply
    weighted: Literal["outputs", "inputs"] = "outputs"
    # Gemma 4's: beside the MLP, with learned scales of what the router and the experts read, and of
    # what an expert weighs
    beside_mlp: bool = False

    def check(self, where: str) -> None:
        check(
            bool(self.layers),
            f"{where}.layers is empty; name the layers that have it, or use {where}=none",
        )
        check(
            self.per_token <= self.count,
            f"{where}.per_token={self.per_token} is more than count={self.count}; choose at most that",
        )
        check(
            self.weighted == "outputs" or not self.biases,
            f"{where}.weighted=inputs: experts whose inputs are weighted have no biases; use biases=false",
        )
        divides(where, self.count, "count", self.groups, "groups")
        chosen, groups = self.chosen_groups, self.groups
        reach = chosen * (self.count // groups)
        check(
            groups == 1
            or (
                chosen <= groups
                and self.per_token <= reach
                and self.count >= self.group_best * groups
            ),
            f"{where}.chosen_groups={chosen} of groups={groups} have {reach} experts; a group needs "
            f"group_best={self.group_best} at least, and "
            f"per_token={self.per_token} as many as the chosen have",
        )

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


class LayerKind(NamedTuple):
    """Name what a decoder's layers differ in."""

    has_delta_net: bool  # in place of attention
    has_experts: bool  # in place of the MLP
    has_float8: bool  # products of linear layers in FP8
    has_rope: bool  # queries and keys are turned
    is_full: bool  # no window, where heads or caches of layers with and without one differ
    shares_keys: bool  # attends the keys and values of a layer before it
    has_convolution: bool  # in place of attention


@dataclass(frozen=True)
class DecoderConfig(TowerFacts):
    """A causal transformer: grouped-query attention; by default rotary positions, RMSNorm and a gated MLP."""

    is_causal: ClassVar[bool] = True

    layers: LayerCount  # number of layers
    width: PositiveInt  # of the residual stream
    heads: PositiveInt  # query heads
    kv_heads: PositiveInt  # key and value heads
    head_width: PositiveInt  # channels per head
    mlp_width: PositiveInt  # of the MLP's hidden layer
    # tokens
    vocab: Annotated[int, at_least(3, "padding, end of answer and one character need at least 3")]
    rope_theta: PositiveFloat = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling = PlainRope()
    # channel pairs rotated by (t, y, x); empty: all by one position
    rope_sections: tuple[int, ...] = ()
    rope_interleaved: bool = False  # interleaves the pairs of the sections
    # ids of the tokens around images and slices by which these lie on a canvas (MiniCPM-V 4.7), that
    # which begins a slice first; -1: there is none; empty: each image has rows and columns of its own
    canvas_markers: tuple[int, ...] = ()
    rotary_width: int = 0  # channels per head that RoPE turns, the first ones; 0: all
    # queries at position p are multiplied by 1 + query_growth * log(1 + floor(p / query_span))
    query_growth: NonNegativeFloat = 0.0
    # layers whose queries grow: with rotary positions, or without, where p counts from 1 (Llama 4)
    growing: Literal["rotated", "unrotated"] = "rotated"
    query_span: PositiveInt = 16_384  # tokens after which queries grow
    norm_eps: PositiveFloat = 1e-6  # of the norms
    norm_offset: float = 0.0  # added to the scales of RMSNorms
    activation: Activation = "silu"  # of the MLP, of its gate where it has one
    biases: tuple[Biased, ...] = ()  # the matrices of a layer that have one
    # of queries and keys, before RoPE, unscaled: without weights; or without weights behind it, in
    # layers that have it
    qk_norm: Literal["none", "head", "unscaled", "rotated"] = "none"
    # of the outputs of attention and MLP, before they are added to the residual stream
    post_norms: bool = False
    embedding_scale: float = 1.0  # that embeddings are multiplied by
    attention_gate: bool = False  # multiplies attention's output by the sigmoid of a projection
    attention_scale: NonNegativeFloat = 0.0  # of the scores; 0: head_width ** -0.5
    attention_cap: NonNegativeFloat = 0.0  # soft cap of the scores; 0: none
    logit_cap: NonNegativeFloat = 0.0  # soft cap of the logits; 0: none
    # tokens of the sliding window of the layers in `windowed`, the query's included
    window: NonNegativeInt = 0
    windowed: tuple[int, ...] = ()  # layers with sliding-window attention
    # windows do not slide: samples are cut into chunks of `window` tokens, each causal by itself
    chunked: bool = False
    # base of the rotary frequencies of those layers, unscaled; 0: as the others
    window_rope_theta: NonNegativeFloat = 0.0
    # in place of attention in some layers; none: all layers have attention
    delta_net: DeltaNetConfig | None = None
    tied: bool = True  # the embedding is the output table too
    # How the tokens of an image or clip attend; prefix: as all before the first answer, which
    # attends both ways; images: those both ways, clips causal; in_windows: so in layers with a
    # window, causal in others.
    items: Literal["causal", "bidirectional", "isolated", "prefix", "images", "in_windows"] = (
        "causal"
    )
    # all scores at once, by blocks, a kernel for GPUs; auto: that, elsewhere blocks
    attention: Attention = "dense"
    remat: TowerRemat | tuple[Remat, ...] = "auto"  # of every layer, or one per layer
    dropout: Dropout = 0.0  # rate, in training, for the outputs of attention and MLP
    # Of noise on embedded text in training: up to alpha / sqrt(tokens * width) (NEFTune). 0: none.
    neftune_alpha: NonNegativeFloat = 0.0
    frozen: bool = False  # not trained
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    # in place of the MLP in some layers; none: all layers have the MLP
    experts: ExpertsConfig | None = None
    # RoPE turns channels 2i and 2i + 1 of a head together, not i and i + half of them
    rope_neighbours: bool = False
    # RMSNorm or LayerNorm, without a bias too; those of queries and keys are RMSNorms
    norm: Literal["rms", "layer", "layer_without_bias"] = "rms"
    gated: bool = True  # the MLP has a gate
    # entries of a table of learned positions in place of RoPE; 0: RoPE
    learned_positions: NonNegativeInt = 0
    first_position: NonNegativeInt = 0  # entry of that table for a sample's first token
    quantize: Quantization = "none"  # of the linear layers' frozen weights
    # products of all layers' linear layers, but the first and the last layer's
    fp8: Literal["off", "linears"] = "off"
    # the MLP reads the norm that attention reads, and both outputs are added at once
    parallel_mlp: bool = False
    unrotated: tuple[int, ...] = ()  # layers whose attention has no rotary positions (NoPE)
    logit_scale: float = 1.0  # that logits are multiplied by
    pre_norms: bool = True  # of the inputs of attention and MLP
    # that the outputs of attention and MLP are multiplied by, before they are added
    residual_scale: float = 1.0
    scaled_items: bool = False  # embedding_scale multiplies the tokens of images and clips too
    # attention's softmax has a learned score of each head beside those of the keys (gpt-oss)
    sinks: bool = False
    # in place of attention in some layers; none: there is none
    convolution: ConvolutionConfig | None = None
    # multi-head latent attention in place of grouped-query attention
    latent: LatentAttentionConfig | None = None
    full_head_width: NonNegativeInt = (
        0  # channels per head of layers without a window; 0: as others
    )
    full_kv_heads: NonNegativeInt = 0  # key and value heads of those layers; 0: as others
    # in layers without a window values are what keys are before their norm
    keys_as_values: bool = False
    value_norm: bool = False  # divides the values of a head by their root mean square
    # last layers that attend the keys and values of the last layer of their kind, with a window or
    # without, before them all
    shared_layers: NonNegativeInt = 0
    shared_mlp_width: NonNegativeInt = 0  # of the MLP's hidden layer in those; 0: as in others
    # vectors for every token that each layer takes; none: there are none
    token_inputs: TokenInputsConfig | None = None
    # a stored number, not trained, multiplies every layer's output
    output_scales: bool = False
    post_norm_eps: NonNegativeFloat = 0.0  # of `post_norms`; 0: norm_eps
    # the scales of the norm behind the last layer are without norm_offset
    plain_head_norm: bool = False
    # embeddings of text are divided by their root mean square
    embedding_norm: bool = False
    # the projection of attention_gate is a matrix of its own, not beside that of queries
    separate_gate: bool = False

    @property
    def window_inputs(self) -> int:
        """Return how many tokens a sliding window has."""
        return self.window

    def reach(self, position: Any) -> Any:
        """Return how many causal keys queries at these positions attend in `windowed` layers, themselves included.

        Of chunks of 4, positions 0 1 2 3 4 5 attend 1 2 3 4 1 2.
        """
        return position % self.window + 1 if self.chunked else self.window

    @property
    def max_tokens(self) -> int:
        """Return how many tokens a sample may have: as many as there are learned positions."""
        return self.learned_positions - self.first_position if self.learned_positions else UNLIMITED

    @property
    def rotary_pairs(self) -> int:
        """Return the channel pairs of a head that RoPE turns."""
        return (self.rotary_width or self.head_width) // 2

    @property
    def value_width(self) -> int:
        """Return the channels of a head's values."""
        return self.latent.value_width if self.latent else self.head_width

    @property
    def delta_layers(self) -> tuple[bool, ...]:
        """Tell of each layer whether it has a gated delta net."""
        layers = self.delta_net.layers if self.delta_net else ()
        return tuple(i in layers for i in range(self.layers))

    @property
    def convolution_layers(self) -> tuple[bool, ...]:
        """Tell of each layer whether it has a gated convolution."""
        layers = self.convolution.layers if self.convolution else ()
        return tuple(i in layers for i in range(self.layers))

    @property
    def attention_layers(self) -> int:
        """Return how many layers have attention."""
        return self.layers - sum(self.delta_layers) - sum(self.convolution_layers)

    @property
    def reads_in_order(self) -> bool:
        """Return whether some layers read a sample's tokens one after the other."""
        return self.delta_net is not None or self.convolution is not None

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
        first_shared = self.layers - self.shared_layers
        return tuple(
            LayerKind(
                has_delta_net=self.delta_layers[i],
                has_experts=self.expert_layers[i],
                has_float8=self.float8_layers[i],
                has_rope=i not in self.unrotated,
                is_full=self.splits_windows and i not in self.windowed,
                shares_keys=i >= first_shared,
                has_convolution=self.convolution_layers[i],
            )
            for i in range(self.layers)
        )

    @property
    def splits_windows(self) -> bool:
        """Return whether layers with and without a window are stored apart."""
        return bool(
            self.full_head_width or self.full_kv_heads or self.keys_as_values or self.shared_layers
        )

    @property
    def key_sources(self) -> tuple[int, ...]:
        """Return the layers whose keys and values later ones share: the last of each kind before these."""
        if not self.shared_layers:
            return ()
        before = range(self.layers - self.shared_layers)
        kinds = ([i for i in before if (i in self.windowed) == kind] for kind in (False, True))
        return tuple(sorted(layers[-1] for layers in kinds if layers))

    @property
    def stack_borders(self) -> tuple[int, ...]:
        """Return the layers that begin a stack: those whose keys are shared, alone, and the first that shares."""
        return tuple(sorted({i + n for i in self.key_sources for n in (0, 1)}))

    def heads_of(self, windowed: bool) -> tuple[int, tuple[int, int]]:
        """Return the width of a head, and the numbers of heads of queries and of keys, of layers of a kind."""
        if windowed:
            return self.head_width, (self.heads, self.kv_heads)
        kv_heads = self.full_kv_heads or self.kv_heads
        return self.full_head_width or self.head_width, (self.heads, kv_heads)

    @property
    def key_channels(self) -> tuple[int, ...]:
        """Return the channels of the keys of every layer; 0 where it has none of its own."""
        channels = []
        for i, kind in enumerate(self.layer_kinds):
            width, (_, kv_heads) = self.heads_of(i in self.windowed)
            without = kind.has_delta_net or kind.has_convolution or kind.shares_keys
            channels.append(0 if without else width * kv_heads)
        return tuple(channels)

    @property
    def mean_head_width(self) -> float:
        """Return the channels per head, of layers that differ the mean."""
        full, windowed = (self.heads_of(windowed)[0] for windowed in (False, True))
        return full + (windowed - full) * len(self.windowed) / self.layers

    @property
    def windowed_share(self) -> float:
        return len(self.windowed) * self.head_width / (self.layers * self.mean_head_width)

    def check(self, where: str) -> None:
        check_remat(where, self)
        divides(where, self.heads, "heads", self.kv_heads, "kv_heads")
        if self.full_kv_heads:
            divides(where, self.heads, "heads", self.full_kv_heads, "full_kv_heads")
        self._check_shared(where)
        if self.learned_positions:
            self._check_learned_positions(where)
        else:
            self._check_rope(where)
        for name in ("delta_net", "experts", "convolution"):
            layers = getattr(getattr(self, name), "layers", ())
            check_layer_numbers(f"{where}.{name}.layers", layers, self.layers)
        check_layer_numbers(f"{where}.unrotated", self.unrotated, self.layers)
        both = [
            i for i in range(self.layers) if self.delta_layers[i] and self.convolution_layers[i]
        ]
        check(
            not both,
            f"{where}.convolution.layers and {where}.delta_net.layers both have {listed(both)}; leave it out of one",
        )
        biased = [name for name in self.biases if name in ("gate", "up", "down")]
        check(
            not biased or not all(self.expert_layers) or self.experts.beside_mlp,
            f"{where}.biases has {listed(biased)}, and all layers have experts, whose matrices have none; leave it out",
        )
        check_windows(where, self)
        check(
            self.attention_gate or not self.separate_gate,
            f"{where}.separate_gate=true: it is the matrix of attention_gate; set that, or leave it out",
        )
        check(
            not self.chunked or not self.rope_sections,
            f"{where}.chunked: chunks are of tokens, which positions with rope_sections do not count; leave one out",
        )
        check(
            bool(self.rope_sections) or not self.canvas_markers,
            f"{where}.canvas_markers={listed(self.canvas_markers)}: a canvas has rows and columns, and rope_sections "
            "is empty; leave it out",
        )
        check(
            not self.chunked or self.items == "causal",
            f"{where}.items={self.items}: chunks would cut what attends both ways; use items=causal",
        )
        if self.latent:
            self._check_latent(where, self.latent)

    def _check_latent(self, where: str, latent: LatentAttentionConfig) -> None:
        heads, keys = self.heads, self.kv_heads
        check(
            keys == heads,
            f"{where}.kv_heads={keys}: latent attention makes keys of each of heads={heads}; use as many",
        )
        values, width = latent.value_width, self.head_width
        check(
            values <= width,
            f"{where}.latent.value_width={values} is more than head_width={width}; use at most that",
        )
        check(
            self.qk_norm == "none"
            and not self.attention_gate
            and not self.sinks
            and "value" not in self.biases,
            f"{where}.latent: latent attention has no qk_norm, attention_gate, sinks or bias of values; leave them out",
        )

    def _check_shared(self, where: str) -> None:
        shared = range(self.layers - self.shared_layers, self.layers)
        sources = {i in self.windowed for i in self.key_sources}
        check(
            {i in self.windowed for i in shared} <= sources,
            f"{where}.shared_layers={self.shared_layers}: layers with a window and without must each have one of "
            "their kind before them, whose keys they share",
        )
        for name in ("delta_net", "convolution"):
            check(
                getattr(self, name) is None or not self.splits_windows,
                f"{where}.{name}: heads of layers without a window that differ, and shared keys, do not go with it",
            )
        check(
            bool(self.shared_layers) or not self.shared_mlp_width,
            f"{where}.shared_mlp_width={self.shared_mlp_width}: shared_layers=0; leave it out",
        )

    def _check_learned_positions(self, where: str) -> None:
        positions, first = self.learned_positions, self.first_position
        check(
            first < positions,
            f"{where}.first_position={first}: learned_positions={positions} has no such entry",
        )
        check(
            not self.query_growth,
            f"{where}.query_growth={self.query_growth}: with learned positions queries do not grow; leave it out",
        )
        check(
            self.qk_norm != "rotated",
            f"{where}.qk_norm=rotated: with learned positions nothing is rotated; use head or none",
        )
        sections = self.rope_sections
        check(
            not sections,
            f"{where}.rope_sections={listed(sections)}: learned positions take RoPE's place; leave the sections out",
        )

    def _check_rope(self, where: str) -> None:
        for name in ("head_width", "full_head_width"):
            width = getattr(self, name)
            check(width % 2 == 0, f"{where}.{name}={width}: RoPE turns pairs; make it even")
        width = self.head_width
        turned = self.rotary_width
        check(
            turned % 2 == 0 and 0 <= turned <= width,
            f"{where}.rotary_width={turned}: RoPE turns pairs of channels; use an even number up to "
            f"head_width={width}",
        )
        pairs = self.rotary_pairs
        sections = self.rope_sections
        check(
            not sections or sum(sections) == pairs,
            f"{where}.rope_sections has {sum(sections)} channel pairs, RoPE turns {pairs}",
        )
        check(
            len(sections) in (0, 3),
            f"{where}.rope_sections has {len(sections)} sections; there are three: t, y and x",
        )
        if isinstance(self.rope_scaling, LongRope):
            for name in ("short", "long"):
                factors = len(getattr(self.rope_scaling, name))
                check(
                    factors == pairs,
                    f"{where}.rope_scaling.{name} has {factors} factors, a head has {pairs} channel pairs",
                )


def head_counts(tower: DecoderConfig | Encoder) -> list[int]:
    """List what tensor parallelism divides: heads of queries, keys and delta nets' keys; channels of convolutions."""
    heads = [tower.heads, tower.key_heads, *tower.other_heads]
    if not tower.is_causal:
        return heads
    heads += [tower.full_kv_heads] * bool(tower.full_kv_heads)
    delta_heads = [tower.delta_net.key_heads] if tower.delta_net else []
    return [*heads, *delta_heads, *([tower.width] if tower.convolution else [])]
