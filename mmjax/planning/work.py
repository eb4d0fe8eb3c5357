"""Sizes that determine FLOPs: layer shapes, tokens and attended pairs of each tower, exact, estimated or as executed.

Needed attention FLOPs, and so MFU, are in proportion to the pairs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mmjax.balance.mask_work import Mask, block_work
from mmjax.batch import FIRST_BRANCH_BIT, ROW, TIME, ItemBatch, TextBatch, branch_gap, chunk_numbers
from mmjax.config import (
    AudioConfig,
    DecoderConfig,
    DiffusionTransformerConfig,
    Generator,
    ModelConfig,
    UnetConfig,
    VisionConfig,
)
from mmjax.config.generators import Tower
from mmjax.config.model import Sizes, connector_layers, connector_sizes, with_changes
from mmjax.config.towers import Encoder
from mmjax.kernels.tiles import MAX_BLOCK, TILES, tiles_for, window_block
from mmjax.planning.hardware import Rates

CONV_TAPS = 3  # kernel size of both convolutions of the audio encoder
CHUNK = 64  # tokens of a chunk of a gated delta net (`models.gated_delta_net`)
MLP_BIASES = {"gate", "up", "down"}


class Work(NamedTuple):
    """Amounts that determine the FLOPs of one tower."""

    positions: int  # in the layers: tokens, patches, frames after the stride
    pairs: float  # (query, key) pairs of one head, averaged over the layers
    inputs: int = 0  # patches or frames that an encoder reads, patches of latents of a generator
    tokens: int = 0  # outputs of its connector
    blocks: int = 0  # of `min_patches` positions that a generator's rows are cut into
    taken: int = 0  # pairs of one of a block's two images and one of its row's


class Products(NamedTuple):
    """Multiply-adds of one module's forward pass, by what gradients they have."""

    data: int  # weights times data, which needs no gradient
    weights: int  # weights times activations
    attention: int  # activations times activations
    recurrence: int = 0  # of gated delta nets, beside their weights
    chunked: int = 0  # the same as it runs, in chunks
    of_time: int = 0  # weights times what weights of the module alone have made: of a generator's times
    cross: int = 0  # activations times activations of a generator's condition
    spared_weights: int = 0  # of a frozen generator, what of `weights` comes before its condition: no gradient
    spared_attention: int = 0  # of `attention` and `cross` in backward


class AdapterWork(NamedTuple):
    """Multiply-adds of a module with adapters, relative to the module without them."""

    forward: int = 0  # of the adapters
    backward: int = 0  # of the adapters: gradients of a, b and of their inputs
    spared_weights: int = 0  # saved: activation gradients through frozen weights with nothing trainable before them
    spared_attention: float = 0  # saved: gradients inside attention


class LayerSizes(NamedTuple):
    """Sizes of one transformer layer; of a tower with layers of several kinds, their mean."""

    width: int
    queries: float  # inputs of the last matrix before the MLP: heads * head width
    keys: float
    heads: float  # of attention
    mlp: float  # of all experts that a position takes
    gated: bool
    vectors: float  # parameters outside the matrices: norms, biases and short convolutions
    extra: float = 0  # outputs of further matrices of the layer's width: gates, decays
    attended: float = 0  # channels of the queries that attend
    recurrence: float = 0  # multiply-adds per position that a gated delta net needs beside its matrices
    chunked: float = 0  # those that it runs, in chunks
    idle: float = 0  # elements of matrices that a position does not use: of the experts that it is not sent to
    router: float = 0  # outputs of the router of experts, which no remat policy saves
    shared: float = 0  # 1 where the output of a shared expert is multiplied by a gate
    cross: float = 0  # channels of attention to a condition, whose keys and values are counted in `idle`

    @property
    def weights(self) -> float:
        """Count the elements of the matrices that a position uses, which is also its multiply-adds."""
        projections = self.width * (2 * self.queries + 2 * self.keys + self.extra + self.router + 2 * self.cross)
        return projections + (2 + self.gated) * self.width * self.mlp

    @property
    def parameters(self) -> float:
        """Count all parameters."""
        return self.stored + self.vectors

    @property
    def stored(self) -> float:
        """Count the elements of all matrices."""
        return self.weights + self.idle


def kinds_of_layers(config: Tower) -> list[tuple[Tower, float]]:
    """Return, for each kind of layer of a tower, the tower with that kind alone and the kind's share of the layers."""
    if not isinstance(config, DecoderConfig) or len(set(config.layer_kinds)) < 2:
        return [(config, 1)]
    layers = tuple(range(config.layers))

    def with_kind(delta: bool, sparse: bool) -> DecoderConfig:
        return replace(
            config,
            delta_net=replace(config.delta_net, layers=layers) if delta else None,
            experts=replace(config.experts, layers=layers) if sparse else None,
        )

    return [(with_kind(*kind), count / config.layers) for kind, count in Counter(config.layer_kinds).items()]


def layer_sizes(config: Tower) -> LayerSizes:
    """Compute the sizes of a tower's layers."""
    kinds = kinds_of_layers(config)
    if len(kinds) == 1:
        return _with_experts(config, _sizes_of_kind(config))
    sizes = [_with_experts(kind, _sizes_of_kind(kind)) for kind, _ in kinds]
    means = (sum(part * x for x, (_, part) in zip(xs, kinds, strict=True)) for xs in zip(*sizes, strict=True))
    return LayerSizes(*means)._replace(width=config.width, gated=sizes[0].gated)


def _with_experts(config: Tower, sizes: LayerSizes) -> LayerSizes:
    """Put experts in the place of the MLP, where all layers of a tower have them."""
    if not isinstance(config, DecoderConfig) or not any(config.expert_layers):
        return sizes
    c = config.experts
    return sizes._replace(
        mlp=c.per_token * c.width + c.shared_width,
        extra=sizes.extra + bool(c.shared_width),  # the shared expert's gate
        router=c.count,
        shared=bool(c.shared_width),
        idle=(c.count - c.per_token) * 3 * config.width * c.width,
    )


def expert_parameters(llm: DecoderConfig) -> int:
    """Count the parameters of all experts that a router chooses from."""
    return sum(llm.expert_layers) * 3 * llm.width * llm.experts.width * llm.experts.count if llm.experts else 0


def _delta_net_sizes(config: DecoderConfig) -> LayerSizes:
    """Compute the sizes of layers with a gated delta net."""
    c = config.delta_net
    keys = c.key_heads * c.key_width
    values = c.value_heads * c.value_width
    # Beside both of the layer's norms, the gated norm's scale, filters, and of every head a decay's rate and bias.
    vectors = 2 * norm_parameters(config) + c.value_width + c.taps * (2 * keys + values) + 2 * c.value_heads
    state = c.key_width * c.value_width
    # Of a head and token: decay, read, write and query, of which the first has no addition.
    recurrence = c.value_heads * 3.5 * state
    # Three products with the state; within a chunk queries and keys by keys (once for a key head), both right sides of
    # the system, and the outputs; the inverse.
    shared = c.key_heads / c.value_heads
    in_chunk = CHUNK * (2 * c.key_width * shared + c.key_width + 2 * c.value_width) + CHUNK**2 / 3
    return LayerSizes(
        width=config.width,
        queries=values,
        keys=keys,
        heads=0,
        mlp=config.mlp_width,
        gated=config.gated,
        vectors=vectors,
        extra=values + 2 * c.value_heads,
        recurrence=recurrence,
        chunked=c.value_heads * (3 * state + in_chunk),
    )


def _diffusion_sizes(config: DiffusionTransformerConfig) -> LayerSizes:
    """Compute the sizes of a diffusion transformer's layers."""
    c = config
    # Of both attentions, of the MLP, and of the table that the time's vectors are added to.
    biases = sum({"up": c.mlp_width, "down": c.width}.get(name, 2 * c.width) for name in c.biases)
    return LayerSizes(
        width=c.width,
        queries=c.width,
        keys=c.width,
        heads=c.heads,
        mlp=c.mlp_width,
        gated=False,
        vectors=biases + 6 * c.width,
        attended=c.width,
        idle=2 * c.width * (c.width if c.condition_mlp else c.condition_width),
        cross=c.width,
    )


def _sizes_of_kind(config: Tower) -> LayerSizes:
    c = config
    if isinstance(c, DiffusionTransformerConfig):
        return _diffusion_sizes(c)
    queries = keys = c.width
    gated = True
    extra = 0
    if isinstance(c, DecoderConfig):
        if c.delta_net is not None and any(c.delta_layers):
            return _delta_net_sizes(c)
        extra = c.attention_gate * c.heads * c.head_width
        queries = c.heads * c.head_width
        keys = c.kv_heads * c.head_width
        gated = c.gated
        # Experts have no biases.
        biases = [name for name in c.biases if name not in MLP_BIASES or not any(c.expert_layers)]
        vectors = (2 + 2 * c.post_norms) * norm_parameters(c) + 2 * c.head_width * (c.qk_norm == "head")
    elif isinstance(c, VisionConfig):
        gated = c.gated
        biases = c.biases
        vectors = 2 * norm_parameters(c) + 2 * c.width * (c.qk_norm == "width") + 2 * c.width * c.layer_scale
    else:
        gated = False
        biases = c.biases
        vectors = 2 * norm_parameters(c)
    outputs = {"query": queries + extra, "key": keys, "value": keys, "output": c.width, "down": c.width}
    vectors += sum(outputs.get(name, c.mlp_width) for name in biases)
    return LayerSizes(
        width=c.width,
        queries=queries,
        keys=keys,
        heads=c.heads,
        mlp=c.mlp_width,
        gated=gated,
        vectors=vectors,
        extra=extra,
        attended=queries,
    )


def head_width(config: Tower) -> int:
    """Return the channels of a head of attention."""
    return config.head_width if isinstance(config, DecoderConfig) else config.width // config.heads


def norm_parameters(config: Tower) -> int:
    """Count the parameters of one norm of a tower's layers: a scale, and a bias unless it is an RMSNorm."""
    return config.width if not isinstance(config, AudioConfig) and config.norm == "rms" else 2 * config.width


def connector_mlps(module: Encoder | Generator) -> int:
    """Count the MLPs of a connector: one, plus one per deepstack layer of an encoder."""
    return 1 + (len(module.deepstack) if isinstance(module, VisionConfig) else 0)


def resolve_attention(model: ModelConfig, rates: Rates, context: int = 1) -> ModelConfig:
    """Return the model with what `attention=auto` is on a device: the kernel where that has a rate, else blocks.

    context: devices that share a row of the LLM, on which `dense` is blocks as well.
    """
    backend = "blockwise" if rates.attention is None else "flash"

    modules = {"llm": model.llm, **model.item_modules}
    changes = {name: {"attention": backend} for name, config in modules.items() if config.attention == "auto"}
    if context > 1 and model.llm.attention == "dense":
        changes["llm"] = {"attention": "blockwise"}
    return with_changes(model, changes)


def _mean_pairs(config: Tower, pairs: Any, window_pairs: Callable[[int], Any]) -> Any:
    """Average over a tower's layers: `pairs` without a window, `window_pairs` with one, of so many positions."""
    if isinstance(config, AudioConfig):
        return window_pairs(config.chunk_positions * config.attended_chunks) if config.chunk else pairs
    if isinstance(config, Generator) or not config.windowed:
        return pairs
    window = config.window if isinstance(config, DecoderConfig) else config.window**2
    return pairs + (window_pairs(window) - pairs) * len(config.windowed) / config.layers


def merged_positions(encoder: Encoder) -> int:
    """Count the positions of an encoder's output that its connector merges into one token."""
    return encoder.connector.merge ** (2 if isinstance(encoder, VisionConfig) else 1)


def layer_positions(encoder: Encoder) -> int:
    """Count the positions of an encoder's layers that become one token, audio's pooling included."""
    return merged_positions(encoder) * (encoder.pool if isinstance(encoder, AudioConfig) else 1)


def layers_of_connector(model: ModelConfig, name: str) -> Sizes:
    """List the linear layers of an encoder's or a generator's connector in the order of the computation."""
    if name in model.encoders:
        return connector_layers(model.encoders[name], model.llm.width)
    generator = model.generators[name]
    return connector_sizes(generator.connector, model.llm.width, generator.condition_width)


def stem_products(config: AudioConfig, work: Work) -> tuple[int, int]:
    """Count the multiply-adds of an audio encoder's stem: of the first convolution, whose input is data, and others."""
    if not config.stem_width:
        # The second one's outputs are the layers' positions.
        return CONV_TAPS * config.mels * config.width * work.inputs, CONV_TAPS * config.width**2 * work.positions
    first, second, third = config.stem_bins
    width = config.stem_width
    taps = CONV_TAPS**2 * width
    # Of every position of the layers they have 4, 2 and 1.
    later = taps * width * (2 * second + third) + third * width * config.width
    return 4 * taps * first * work.positions, later * work.positions


def connector_weights(model: ModelConfig, name: str) -> int:
    """Count the elements of a connector's matrices, which is also the multiply-adds per token."""
    return sum(rows * columns for rows, columns in layers_of_connector(model, name).values())


def useful_work(model: ModelConfig, text: TextBatch, items: Mapping[str, ItemBatch]) -> dict[str, Work]:
    """Measure the work in the arrays of a microbatch by tower, without padding."""
    pairs = int(allowed_pairs(text).sum())
    pairs = _mean_pairs(model.llm, pairs, lambda window: pairs - int(pairs_beyond_window(text, window).sum()))
    work = {"llm": Work(int((text.sample >= 0).sum()), pairs)}
    for name, batch in items.items():
        if name in model.generators:
            work[name] = _generator_work(model.generators[name], batch.item)
            continue
        encoder = model.encoders[name]
        # Coordinates below 0 mark inputs that become no token: class tokens, which pass through the layers, and the
        # silence behind a clip, which does not.
        output_item = np.where(batch.coordinates[..., ROW] >= 0, batch.item, -1)
        layer_item = batch.item
        if isinstance(encoder, AudioConfig):
            # The convolutions keep one frame of each position, pooling the last position of each group.
            layer_item = output_item[:, :: encoder.stride]
            output_item = layer_item[:, encoder.pool - 1 :: encoder.pool]
        group = merged_positions(encoder)
        # A token exists where any member of its merge group does.
        token_item = output_item.reshape(len(output_item), output_item.shape[1] // group, group).max(-1, initial=-1)
        pairs = int(item_pairs(layer_item).sum())
        windows = _windows(encoder, batch, layer_item)
        pairs = _mean_pairs(encoder, pairs, lambda size, item=windows: int(item_pairs(item).sum()))
        inputs, positions, tokens = (int((x >= 0).sum()) for x in (batch.item, layer_item, token_item))
        work[name] = Work(positions, pairs, inputs, tokens)
    return work


def _generator_work(config: Generator, item: np.ndarray) -> Work:
    """Measure the work of the images in a generator's rows, `[R, L]`, -1 = padding."""
    positions = int((item >= 0).sum())
    images = sum(len(np.unique(row[row >= 0])) for row in item)
    return Work(positions, int(item_pairs(item).sum()), positions, images * config.condition_tokens)


def _windows(encoder: Encoder, items: ItemBatch, layer_item: np.ndarray) -> np.ndarray:
    """Number the windows that layers attend within: squares of an image's patches, chunks of a clip's positions.

    Returns each position's, int `[R, L]`, -1 = padding; the items where there are no windows.
    """
    if isinstance(encoder, AudioConfig):
        if not encoder.chunk:
            return layer_item
        time = items.coordinates[:, :: encoder.stride, TIME] // encoder.stride
        positions = encoder.chunk_positions * encoder.attended_chunks
        return chunk_numbers(layer_item, time, np.arange(time.shape[1]), positions)
    if not encoder.windowed:
        return layer_item
    window = encoder.window
    row, column = np.moveaxis(np.maximum(items.coordinates[..., ROW:], 0) // window, -1, 0)
    sizes = np.array([items.item.max(initial=0), row.max(initial=0), column.max(initial=0)], np.int64) + 1
    number = np.ravel_multi_index((np.maximum(items.item, 0), row, column), sizes)
    # Renumbered without gaps, for `item_pairs` counts by number.
    dense = np.unique(number, return_inverse=True)[1].reshape(number.shape)
    return np.where(items.item >= 0, dense, -1)


def length_work(
    model: ModelConfig, llm: np.ndarray, encoder: np.ndarray, useful: np.ndarray, tokens: np.ndarray
) -> dict[str, Work]:
    """Estimate the work of samples by tower from lengths alone: causal in the LLM, full inside each item.

    llm: int `[n]`, tokens of each sample. For every item, int `[p]`: its encoder's number, patches or frames, tokens.
    Generators are numbered after the encoders.
    """
    length = llm.astype(np.int64)

    def causal(n: np.ndarray) -> int:
        return int((n * (n + 1) // 2).sum())

    # A window of w excludes, of n tokens, the causal pairs of n - w tokens.
    pairs = _mean_pairs(
        model.llm, causal(length), lambda window: causal(length) - causal(np.maximum(length - window, 0))
    )
    work = {"llm": Work(int(length.sum()), pairs)}
    for k, (name, config) in enumerate(model.item_modules.items()):
        inputs = useful[encoder == k].astype(np.int64)
        positions = inputs
        if isinstance(config, AudioConfig):
            positions = config.count_positions(inputs) if config.chunk else inputs // config.stride
        # Full attention inside an item: n queries of n keys each.
        pairs = int((positions**2).sum())
        # A length does not tell which windows an image's edge cuts: all are counted as complete.
        pairs = _mean_pairs(config, pairs, lambda size, n=positions: int((n * np.minimum(n, size)).sum()))
        is_generator = isinstance(config, Generator)
        count = int((encoder == k).sum()) * config.condition_tokens if is_generator else int(tokens[encoder == k].sum())
        work[name] = Work(int(positions.sum()), pairs, int(inputs.sum()), count)
    return work


def row_work(
    model: ModelConfig, shape: Mapping[str, tuple[int, int]], pairs: Mapping[str, float] | None = None
) -> dict[str, Work]:
    """Compute the work that the backend runs for padded rows, by tower.

    shape: (rows, row length) of "llm", the encoders and the generators. pairs: those of the blocks that attention
    visits, where the rows' contents are known (`visited_pairs`). Else dense attention runs all pairs of a row, and of
    other backends all blocks that they may visit count: for the LLM those up to the diagonal.
    """
    work = {}
    for name, (rows, length) in shape.items():
        config = {"llm": model.llm, **model.item_modules}[name]
        if isinstance(config, UnetConfig):
            # Every place for an image is computed, and nothing behind the last one.
            images = rows * config.most_images(length)
            positions = images * config.min_patches
            work[name] = Work(positions, positions * config.min_patches, positions, images * config.condition_tokens)
            continue
        # Padding included: the backend computes it like everything else.
        layer_length = length // config.stride if isinstance(config, AudioConfig) else length
        positions = rows * layer_length
        if config.attention == "dense":
            work[name] = Work(positions, rows * layer_length**2)
        elif pairs is not None and name in pairs:
            work[name] = Work(positions, pairs[name])
        else:
            one = np.zeros(1, np.int64)  # of each row one part, as long as the row
            work[name] = Work(positions, rows * float(visited_pairs(config, one, one, one + length, 1, length)[0]))
        if isinstance(config, DiffusionTransformerConfig):
            images = config.most_images(length)
            blocks = rows * -(-length // config.min_patches)
            changes = {
                "tokens": rows * images * config.condition_tokens,
                "blocks": blocks,
                "taken": 2 * blocks * images,
            }
            work[name] = work[name]._replace(inputs=positions, **changes)
        elif name != "llm":
            tokens = positions // layer_positions(config)
            work[name] = work[name]._replace(inputs=rows * length, tokens=tokens)
    return work


def _blocks(config: Tower, length: int) -> tuple[int, int]:
    """Return the queries and the keys of a block; a row that is shorter than a block is one of its own length."""
    windows = isinstance(config, VisionConfig) and config.windowed
    max_block = window_block(config.window) if windows else MAX_BLOCK
    if config.attention == "blockwise":
        return min(max_block, length), min(max_block, length)
    tiles = tiles_for(min(head_width(config), max(TILES)), length, max_block).forward
    return tiles.q, tiles.k


def visited_pairs(
    config: Tower,
    row: np.ndarray,
    offset: np.ndarray,
    length: np.ndarray,
    rows: int,
    row_length: int,
) -> np.ndarray:
    """Count the pairs in the blocks that attention visits, of one head, averaged over the layers, float64 `[rows]`.

    row, offset, length: int `[p]`, where each sample of the LLM or item of an encoder lies in its row. Samples are
    causal (what an item's tokens see ahead of them is left out), items full; the patches of an image's window lie side
    by side.
    """
    if isinstance(config, AudioConfig):
        offset, length, row_length = (x // config.stride for x in (offset, length, row_length))
    q, k = _blocks(config, row_length)
    padded = -(-row_length // max(q, k)) * max(q, k)  # of q and k, one divides the other
    order = np.lexsort((offset, row))
    begin = (row.astype(np.int64) * padded + offset)[order]  # of each part, counted over all rows
    end = begin + length[order]
    start = np.arange(0, rows * padded, q)  # of each block of queries
    first = np.searchsorted(end, start, side="right")  # part in it
    last = np.searchsorted(begin, start + q) - 1
    start, first, last = (x[first <= last] for x in (start, first, last))
    stop = np.minimum(end[last], start + q)

    def pairs(window: int | None = None) -> np.ndarray:
        low, high = begin[first], end[last]
        if isinstance(config, DecoderConfig):
            high = stop
            low = low if window is None else np.maximum(low, start - window + 1)
        elif window is not None:
            # From the window that the block's first position is in to that of its last.
            low = low + np.maximum(start - low, 0) // window * window
            high = np.minimum(high, begin[last] + -((begin[last] - stop) // window) * window)
        # Blocks of keys from that of `low` to that of `high - 1`: parts lie side by side.
        return np.bincount(start // padded, ((high - 1) // k - low // k + 1) * (q * k), rows)

    return _mean_pairs(config, pairs(), pairs)


def allowed_pairs(text: TextBatch) -> np.ndarray:
    """Count the allowed pairs of every row of the LLM for one head, int64 `[R]`.

    Reads `sample`, `pos` (no two tokens of a row alike), `span`, `kind` and `sees`, each `[R, T]`. Raises ValueError
    for two tokens of a sample with one `pos`.
    """
    arrays = [np.asarray(getattr(text, field)) for field in Mask._fields]
    length = max(text.sample.shape[1], 1)
    return np.array([block_work(Mask._make(row), length).sum() for row in zip(*arrays, strict=True)], np.int64)


def pairs_beyond_window(text: TextBatch, window: int) -> np.ndarray:
    """Count the allowed pairs that a sliding window excludes, int64 `[R]`; for rows whose `pos` is the column.

    Assumes that the tokens of a span are of one kind, as those of an item are.
    """
    length = text.sample.shape[1]
    # Of every token, the first column of its sample: samples 0 0 0 1 1 give 0 0 0 3 3.
    running_max = partial(np.maximum.accumulate, axis=1)
    starts = np.diff(text.sample, axis=1, prepend=-2) != 0
    first = running_max(np.where(starts, np.arange(length), 0))
    # Keys in columns first to far (exclusive) are beyond the window: with window 2, token 2 of a sample misses key 0.
    # Branches between a token and branch 0 do not count.
    column = np.arange(length)
    in_branch, in_branch_0 = (
        np.maximum(x - window + 1, first) for x in (column, column - branch_gap(running_max, text.sample, text.kind))
    )
    count = np.zeros(len(text.sample), np.int64)
    for bit in np.unique(text.kind):
        far = in_branch_0 if bit >> FIRST_BRANCH_BIT == 0 else in_branch
        # before_column[:, t] counts the row's tokens of this kind in columns 0 to t (exclusive).
        before_column = np.pad(np.cumsum(text.kind == bit, axis=1), ((0, 0), (1, 0)))
        beyond = np.take_along_axis(before_column, far, 1) - np.take_along_axis(before_column, first, 1)
        count += np.where((text.sees & bit != 0) & (text.sample >= 0), beyond, 0).sum(1)
    return count - _far_in_spans(text, window)


def _far_in_spans(text: TextBatch, window: int) -> np.ndarray:
    """Count the pairs beyond the window that are allowed all the same because they share a span, int64 `[R]`."""
    causal = (text.sees & text.kind != 0) & (text.sample >= 0)
    count = np.zeros(len(text.sample), np.int64)
    for row, (sample, span) in enumerate(zip(text.sample, text.span, strict=True)):
        columns = np.flatnonzero(span)
        # By sample, then span, then column: members of a span follow each other in order.
        order = columns[np.lexsort((columns, span[columns], sample[columns]))]
        borders = np.flatnonzero(np.diff(sample[order]) | np.diff(span[order])) + 1
        for members in np.split(order, borders):
            # Of every member, the number of members at least `window` columns before it.
            beyond = np.searchsorted(members, members - window, side="right")
            count[row] += beyond[causal[row, members]].sum()
    return count


def item_pairs(item: np.ndarray) -> np.ndarray:
    """Sum the squared lengths of the items of every row of an encoder, int64 `[R]`. `item` `[R, L]`, -1 = padding."""
    rows = len(item)
    items = item.max(initial=0) + 1
    # A number for each item of each row: with 3 items, item 1 of row 2 is 2 * 3 + 1 = 7.
    number = item + items * np.arange(rows)[:, None]
    lengths = np.bincount(number[item >= 0], minlength=rows * items)
    return (lengths.reshape(rows, items) ** 2).sum(1)
