"""Facts and settings that the LLM, encoders and generators share, and the config of connectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mmjax.config.checks import check
from mmjax.config.ranges import (
    Limit,
    NonNegativeInt,
    at_least,
    at_most,
)

Attention = Literal["dense", "blockwise", "flash", "auto"]
# Activations that a layer saves for its backward pass; the rest is recomputed
# (`models.layer_stacks`).
Remat = Literal["none", "products", "attention_mlp", "attention", "offload", "full"]
# Of a module: one policy for all layers, or the fastest that fits in memory, chosen before step 0
# (`planning.remat`).
TowerRemat = Literal["auto", "none", "products", "attention_mlp", "attention", "offload", "full"]


# Of a frozen tower's matrices: in the precision of the computation, or in 8 or 4 bits
# (`models.quantization`).
Quantization = Literal["none", "int8", "fp8", "nf4"]


# Of an encoder's outputs: computed in every step, or once for each item and stored.
Encode = Literal["step", "once"]


INNER_MERGE = 2  # neighbours per axis that a merger inside a vision tower makes one position
MAX_LAYERS = 10_000  # the remat policy of each layer is planned by itself
MAX_MERGE = 1024  # neighbours per axis; an image's token merges their square
LayerCount = Annotated[int, at_least(1), at_most(MAX_LAYERS)]
Dropout = Annotated[
    float,
    Limit(lambda rate: 0 <= rate < 1, "choose at least 0 (nothing is dropped) and less than 1"),
]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
Biased = Literal["query", "key", "value", "output", "gate", "up", "down"]


def check_remat(where: str, tower: Any) -> None:
    """Check that a tower has one policy, or one for each layer."""
    policies = len(tower.remat)
    check(
        isinstance(tower.remat, str) or policies == tower.layers,
        f"{where}.remat gives {policies} policies for layers={tower.layers}; give one for each, or one for all",
    )


def check_encode(where: str, tower: Any) -> None:
    """Check that the outputs of an encoder that encodes once are the same in every step."""
    if tower.encode == "step":
        return
    once = f"{where}.encode=once"
    check(
        tower.frozen,
        f"{once}: its outputs change as it is trained; use frozen=true, or encode=step",
    )
    check(
        tower.attends,
        f"{once}: norms alone take less time than what is stored takes to read; use encode=step",
    )
    check(
        not tower.dropout,
        f"{once}: dropout={tower.dropout} drops others in every step; use dropout=0, or encode=step",
    )


def check_layer_numbers(where: str, named: Sequence[int], layers: int) -> None:
    """Check that a tower with so many layers has those that are named."""
    outside = [layer for layer in named if not 0 <= layer < layers]
    check(not outside, f"{where} names layer {outside[:1]}, there are 0 to {layers - 1}")


def check_windows(where: str, tower: Any) -> None:
    """Check that layers with windowed attention are there, and have a window."""
    check_layer_numbers(f"{where}.windowed", tower.windowed, tower.layers)
    complete = bool(tower.window) or not tower.windowed
    check(complete, f"{where}.windowed names layers, but window=0; say how many they see")


def check_norms(where: str, encoder: Any, fields: Sequence[str]) -> None:
    """Check that layers that are norms alone are given none of these fields."""
    for name in fields:
        check(
            encoder.attends or not getattr(encoder, name),
            f"{where}.mlp_width=0: layers are norms alone, without {name}; leave that out",
        )


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
    # layers whose outputs the connector reads; (): the last one
    feature_layers: tuple[int, ...] = ()
    windowed: tuple[int, ...] = ()  # layers that attend within windows
    window_inputs: int = 0  # inputs that such a window has at most
    relative_side: int = 0  # patches of a side at most, where distances are learned
    # layers before a merger inside the tower, which the others see fewer positions behind; 0: none
    merge_after: int = 0
    layer_kinds: tuple[Any, ...] = ()  # of every layer, those that differ; (): they are alike
    # heads, of queries and of keys, of layers behind such a merger that have others
    other_heads: tuple[int, ...] = ()
    gated: bool = False  # the MLP has a gate
    mlps: int = 1  # of a layer
    parallel_mlp: bool = False  # the MLP reads what attention reads
    rope_neighbours: bool = False  # RoPE turns channels 2i and 2i + 1 of a head together
    conformer: Any = None  # layers of another kind than a transformer's
    cross_width: int = 0  # channels of attention to a condition
    experts: Any = None  # in place of the MLP in some layers
    queries: int = 0  # learned tokens in the LLM that stand for an image to be made
    merged_positions: int = 1  # positions of the output that a connector merges into one token
    encode: Encode = "step"  # in every step, or once for each item

    @property
    def key_heads(self) -> Any:
        """Return how many heads of keys and values there are; by default as many as of queries."""
        return getattr(self, "kv_heads", 0) or self.heads

    @property
    def attends(self) -> bool:
        """Tell whether layers attend; those without an MLP are norms alone."""
        return getattr(self, "mlp_width", 1) > 0

    @property
    def value_width(self) -> Any:
        """Return the channels of a head's values; by default as many as of queries and keys."""
        return self.head_width

    @property
    def window_positions(self) -> int:
        """Return how many positions of the layers a window has at most."""
        return self.window_inputs

    @property
    def windowed_share(self) -> Any:
        """Return the share of attention that is in windows, per pair of positions."""
        return len(self.windowed) / self.layers

    @property
    def token_positions(self) -> int:
        """Return how many positions of the layers become one token, pooling included."""
        return self.merged_positions * self.pool

    @property
    def output_stride(self) -> int:
        """Return how many inputs become one position of what the connector reads."""
        return self.stride * self.pool

    @property
    def feature_width(self) -> int:
        """Return the channels of what the connector reads of the last layers."""
        return self.width * max(1, len(self.feature_layers))

    @property
    def output_width(self) -> int:
        """Return the channels of what the connector reads, those of a deepstack behind the others."""
        return self.feature_width + self.width * len(self.deepstack)

    @property
    def merged_inputs(self) -> int:
        """Return how many positions before a merger inside the tower one behind it stands for."""
        return self.pool

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


@dataclass(frozen=True)
class ConnectorConfig:
    """An MLP from an encoder's width to the LLM's, over `merge` neighbours (per axis for images)."""

    # neighbours that become one token, per axis for images
    merge: Annotated[int, at_least(1), at_most(MAX_MERGE)] = 2
    mlp_width: NonNegativeInt = 256  # 0: a single matrix instead of an MLP, whose bias is "down"
    # before they are merged, or after
    # (merged_unscaled: RMSNorm without a learned scale; merger_unscaled: that of what the merger's
    # matrix makes; token_unscaled: that of the tokens)
    norm: Literal[
        "none",
        "layer",
        "rms",
        "merged_layer",
        "merged_rms",
        "merged_unscaled",
        "merger_unscaled",
        "token_unscaled",
    ] = "layer"
    norm_eps: float = 0.0  # 0: the encoder's
    norm_offset: float = 0.0  # added to an RMSNorm's scales
    activation: Activation = "gelu_tanh"  # of the MLP
    biases: tuple[Biased, ...] = ("up", "down")  # the matrices that have one
    # of the features of merged neighbours; interleave: side by side too, channel by channel
    merging: Literal["concatenate", "interleave", "mean"] = "concatenate"
    # learned positions of merged tokens, up to this row/column/time; 0: none
    position_grid: NonNegativeInt = 0
    # a learned token behind every row of an image whose tokens the LLM sees by rows
    newline: bool = False
    frozen: bool = False  # not trained
    weights: str = ""  # a Hugging Face folder whose weights it starts from; empty: random
    # of what a matrix makes of merged neighbours before the MLP (Mistral 3); 0: there is none
    merger_width: NonNegativeInt = 0
    merger_bias: bool = False  # of that matrix
    # a square matrix, a LayerNorm and a GELU between that and the MLP (GLM-4.1V)
    projection: bool = False
    gated: bool = False  # the MLP has a gate
    # of what the MLP makes, of which a matrix makes the tokens (HyperCLOVA X); 0: there is none
    output_width: NonNegativeInt = 0
    # the MLP's activation stands before that matrix, which has no bias then (Llama 4)
    output_activation: bool = False
    feature_scale: float = 1.0  # that merged features are multiplied by
    # stored numbers of every channel, not trained, are subtracted from merged features and multiply
    # them (Gemma 4)
    standardize: bool = False

    def check(self, where: str) -> None:
        check(
            self.norm != "merger_unscaled" or bool(self.merger_width),
            f"{where}.norm=merger_unscaled is of what the merger's matrix makes; set merger_width",
        )
        check(
            self.output_width > 0 or not self.output_activation,
            f"{where}.output_activation=true: it stands before the matrix of output_width; set that, or leave it out",
        )
