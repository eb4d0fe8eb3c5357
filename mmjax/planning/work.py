"""How much of each tower a microbatch asks for: what its arrays hold, or what full rows make the backend run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from mmjax.batch import ItemBatch, TextBatch
from mmjax.config import AudioConfig, DecoderConfig, ModelConfig, VisionConfig
from mmjax.planning.pairs import allowed_pairs, far_pairs, item_pairs

Encoder = VisionConfig | AudioConfig

CONV_TAPS = 3  # of both convolutions of the audio encoder
CONV_STRIDE = 2  # of the second one
BLOCK = 256  # queries and keys of one block of blockwise attention


class Work(NamedTuple):
    """How much of one tower there is to compute."""

    positions: int  # that pass through the layers: tokens, patches, frames after the stride
    pairs: float  # (query, key) pairs of one head of one layer, in the mean of its layers
    inputs: int = 0  # patches or frames that an encoder reads
    tokens: int = 0  # that its connector gives to the LLM


class Layer(NamedTuple):
    """One transformer layer by its widths."""

    width: int
    queries: int  # heads * head width
    keys: int
    heads: int
    mlp: int
    gated: bool
    vectors: int  # parameters that are in no matrix: norms and biases

    @property
    def weights(self) -> int:
        """Elements of its matrices, which is also the multiply-adds per position."""
        return self.width * (2 * self.queries + 2 * self.keys) + (2 + self.gated) * self.width * self.mlp

    @property
    def parameters(self) -> int:
        """All of a layer's."""
        return self.weights + self.vectors


def layer_of(config: DecoderConfig | Encoder) -> Layer:
    """The widths of a tower's layers."""
    c = config
    if isinstance(c, DecoderConfig):
        queries, keys = c.heads * c.head_width, c.kv_heads * c.head_width
        outputs = {"query": queries, "key": keys, "value": keys, "output": c.width, "down": c.width}
        vectors = sum(outputs.get(name, c.mlp_width) for name in c.biases)
        vectors += (2 + 2 * c.post_norms) * c.width + 2 * c.head_width * (c.qk_norm == "head")
        return Layer(c.width, queries, keys, c.heads, c.mlp_width, True, vectors)
    vision = c if isinstance(c, VisionConfig) else None
    biases = vision.biases if vision else ("query", "value", "output", "up", "down")
    vectors = sum(c.width if name not in ("gate", "up") else c.mlp_width for name in biases)
    vectors += 2 * norm_parameters(c)
    if vision:
        vectors += 2 * c.width * (vision.qk_norm == "width") + 2 * c.width * vision.layer_scale
    return Layer(c.width, c.width, c.width, c.heads, c.mlp_width, vision is not None and vision.gated, vectors)


def norm_parameters(config: Encoder) -> int:
    """Of one norm of an encoder: a scale, and a bias unless it is an RMSNorm."""
    return config.width if isinstance(config, VisionConfig) and config.norm == "rms" else 2 * config.width


def streams(encoder: Encoder) -> int:
    """MLPs of its connector: one, and one for each layer of a deepstack."""
    return 1 + (len(encoder.deepstack) if isinstance(encoder, VisionConfig) else 0)


def _with_windows(config: DecoderConfig | Encoder, pairs: int, near: Callable[[int], int]) -> float:
    """The mean over a tower's layers of `pairs`, and of `near(window)` for those that have a window."""
    if isinstance(config, AudioConfig) or not config.windowed:
        return pairs
    return pairs + (near(config.window) - pairs) * len(config.windowed) / config.layers


def merged_positions(encoder: Encoder) -> int:
    """Positions of an encoder's output that its connector makes one token of."""
    return encoder.connector.merge ** (2 if isinstance(encoder, VisionConfig) else 1)


def layer_positions(encoder: Encoder) -> int:
    """Positions of an encoder's layers that become one token: as many, and of audio those that are pooled before."""
    return merged_positions(encoder) * (encoder.pool if isinstance(encoder, AudioConfig) else 1)


def connector_weights(encoder: Encoder, outputs: int) -> int:
    """Elements of a connector's matrices, or of its only one; also the multiply-adds per token."""
    inputs, hidden = merged_positions(encoder) * encoder.width, encoder.connector.mlp_width
    return hidden * (inputs + outputs) if hidden else inputs * outputs


def useful_work(model: ModelConfig, text: TextBatch, items: Mapping[str, ItemBatch]) -> dict[str, Work]:
    """What the arrays of a microbatch hold, without padding, by tower."""
    pairs = int(allowed_pairs(text).sum())
    pairs = _with_windows(model.llm, pairs, lambda window: pairs - int(far_pairs(text, window).sum()))
    work = {"llm": Work(int((text.sample >= 0).sum()), pairs)}
    for name, batch in items.items():
        encoder = model.encoders[name]
        # Below 0 are what gives the LLM nothing: a class token, which the layers see, and silence, which they do not.
        seen = np.where(batch.coordinates[..., 1] >= 0, batch.item, -1)
        placed, rows, group = batch.item, len(batch.item), merged_positions(encoder)
        if isinstance(encoder, AudioConfig):
            placed = seen[:, ::CONV_STRIDE]
            seen = placed[:, encoder.pool - 1 :: encoder.pool]
        groups = seen.reshape(rows, seen.shape[1] // group, group).max(-1, initial=-1)
        inputs, positions, tokens = (int((x >= 0).sum()) for x in (batch.item, placed, groups))
        pairs = int(item_pairs(placed).sum())
        pairs = _with_windows(encoder, pairs, lambda window, of=batch: int(item_pairs(_squares(of, window)).sum()))
        work[name] = Work(positions, pairs, inputs, tokens)
    return work


def _squares(items: ItemBatch, window: int) -> np.ndarray:
    """Which of a row's squares of so many rows and columns of patches each patch is in, int `[R, L]`; -1 = padding."""
    row, column = np.moveaxis(np.maximum(items.coordinates[..., 1:], 0) // window, -1, 0)
    each = np.array([items.item.max(initial=0), row.max(initial=0), column.max(initial=0)], np.int64) + 1
    number = np.ravel_multi_index((np.maximum(items.item, 0), row, column), each)
    found = np.unique(number, return_inverse=True)[1].reshape(number.shape)
    return np.where(items.item >= 0, found, -1)


def length_work(
    model: ModelConfig, llm: np.ndarray, encoder: np.ndarray, useful: np.ndarray, tokens: np.ndarray
) -> dict[str, Work]:
    """What samples of these lengths hold, by tower: each causal in the LLM, items attending to themselves.

    llm: int `[n]`, tokens of each sample. Of every item, int `[p]`: number of its encoder, patches or frames, tokens.
    """
    length = llm.astype(np.int64)

    def causal(of: np.ndarray) -> int:
        return int((of * (of + 1) // 2).sum())

    pairs = _with_windows(
        model.llm, causal(length), lambda window: causal(length) - causal(np.maximum(length - window, 0))
    )
    work = {"llm": Work(int(length.sum()), pairs)}
    for k, (name, config) in enumerate(model.encoders.items()):
        inputs = useful[encoder == k].astype(np.int64)
        positions = inputs // CONV_STRIDE if isinstance(config, AudioConfig) else inputs
        pairs = int((positions**2).sum())
        # Of squares that an image's edge cuts, a length says nothing.
        pairs = _with_windows(config, pairs, lambda window, n=positions: int((n * np.minimum(n, window**2)).sum()))
        work[name] = Work(int(positions.sum()), pairs, int(inputs.sum()), int(tokens[encoder == k].sum()))
    return work


def row_work(model: ModelConfig, shape: Mapping[str, tuple[int, int]]) -> dict[str, Work]:
    """What the backend runs for full rows, by tower; `shape` is (rows, row length) of "llm" and the encoders.

    Dense attention has all pairs of a row. Blockwise attention skips blocks by what the rows hold; counted are those
    that it may visit: for the LLM up to the diagonal, for an encoder all.
    """
    work = {}
    for name, (rows, length) in shape.items():
        config = model.llm if name == "llm" else model.encoders[name]
        layer_length = length // CONV_STRIDE if isinstance(config, AudioConfig) else length
        pairs = layer_length**2
        if config.attention == "blockwise":
            side = min(BLOCK, layer_length)
            blocks = -(-layer_length // side)
            pairs = side**2 * (blocks * (blocks + 1) // 2 if name == "llm" else blocks**2)
            if name == "llm":
                pairs = _with_windows(config, pairs, lambda window, n=blocks, s=side: s**2 * _near_blocks(n, window, s))
        positions = rows * layer_length
        if name == "llm":
            work[name] = Work(positions, rows * pairs)
        else:
            work[name] = Work(positions, rows * pairs, rows * length, positions // layer_positions(config))
    return work


def _near_blocks(blocks: int, window: int, side: int) -> int:
    """Pairs of blocks that hold a query and a key of its window."""
    far = max(blocks - (-(-(window - 1) // side) + 1), 0)
    return blocks * (blocks + 1) // 2 - far * (far + 1) // 2
