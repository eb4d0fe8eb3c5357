"""Sizes that determine FLOPs: layer shapes, tokens and attended pairs of each tower, exact, estimated or as executed.

Needed attention FLOPs, and so MFU, are in proportion to the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mmjax.balance.mask_work import Mask, block_work, causal_pairs
from mmjax.batch import FIRST_BRANCH_BIT, ROW, TIME, ItemBatch, TextBatch, branch_gap, chunk_numbers
from mmjax.config import Encoder, Generator, ModelConfig, Tower
from mmjax.config.model import with_changes
from mmjax.kernels.tiles import MAX_BLOCK, TILES, tiles_for, window_block
from mmjax.planning.hardware import Rates


class Work(NamedTuple):
    """Amounts that determine the FLOPs of one tower."""

    positions: int  # in the layers: tokens, patches, frames after the stride
    pairs: float  # (query, key) pairs of one head, averaged over the layers
    inputs: int = 0  # patches or frames that an encoder reads, patches of latents of a generator
    tokens: int = 0  # outputs of its connector
    blocks: float = 0  # of `min_patches` positions that a generator's rows are cut into
    taken: int = 0  # pairs of one of a block's two images and one of its row's


class LayerSizes(NamedTuple):
    """Widths of a transformer layer, of layers of several kinds the mean: what devices exchange and XLA gathers."""

    width: int
    queries: float  # inputs of the last matrix before the MLP: heads * width of values
    keys: float
    heads: float  # of attention
    mlp: float  # of all experts that a position takes
    gated: bool
    cross: float = 0  # channels of attention to a condition


def layer_sizes(config: Tower) -> LayerSizes:
    """Return the widths of a tower's layers."""
    c = config
    if not c.is_causal:
        return LayerSizes(
            width=c.width,
            queries=c.width,
            keys=c.key_heads * c.width / c.heads,
            heads=c.heads,
            mlp=c.mlps * c.mlp_width,
            gated=c.gated,
            cross=c.cross_width,
        )
    # (queries, keys, heads) of attention, and of a delta net or a convolution (0 heads, as
    # they have no scores), weighed by their shares of the layers; the width of the MLP likewise. Of keys and values of
    # different widths the mean.
    keys = sum(c.key_channels) / max(1, c.attention_layers)
    width = c.mean_head_width
    if c.latent:
        keys *= (1 + c.value_width / c.head_width) / 2
        width = c.value_width
    attention = np.array([c.heads * width, keys, c.heads], float)
    share = sum(c.delta_layers) / max(1, c.layers)
    if net := c.delta_net:
        of_net = np.array(
            [net.value_heads * net.value_width, net.key_heads * net.key_width, 0], float
        )
        attention += (of_net - attention) * share
    of_convolution = np.array([c.width, c.width, 0], float)
    attention += (of_convolution - attention) * sum(c.convolution_layers) / max(1, c.layers)
    wide = (c.shared_mlp_width or c.mlp_width) - c.mlp_width
    mlp = c.mlp_width + wide * c.shared_layers / max(1, c.layers)
    if experts := c.experts:
        sparse = experts.per_token * experts.width + experts.shared_width
        sparse += mlp * experts.beside_mlp
        mlp += (sparse - mlp) * sum(c.expert_layers) / max(1, c.layers)
    queries, keys, heads = attention.tolist()
    return LayerSizes(
        width=c.width, queries=queries, keys=keys, heads=heads, mlp=mlp, gated=c.gated
    )


def connector_mlps(module: Encoder | Generator) -> int:
    """Count the MLPs of a connector: one, plus one per deepstack layer of an encoder."""
    return 1 + len(module.deepstack)


def resolve_attention(model: ModelConfig, rates: Rates, context: int = 1) -> ModelConfig:
    """Resolve `attention=auto` of a model for a device: the kernel where the device has a rate for it, else blocks.

    context: devices that share a row of the LLM, on which `dense` is blocks as well.
    """
    backend = "blockwise" if rates.attention is None else "flash"

    changes = {
        name: {"attention": backend}
        for name, config in model.towers.items()
        if config.attention == "auto"
    }
    if context > 1 and model.llm.attention == "dense":
        changes["llm"] = {"attention": "blockwise"}
    return with_changes(model, changes)


def _mean_pairs(config: Tower, pairs: Any, window_pairs: Callable[[int], Any]) -> Any:
    """Average over a tower's layers: `pairs` without a window, `window_pairs` with one, of so many positions."""
    if not config.windowed:
        return pairs
    in_windows = window_pairs(config.window_positions)
    return pairs + (in_windows - pairs) * config.windowed_share


def useful_work(
    model: ModelConfig, text: TextBatch, items: Mapping[str, ItemBatch]
) -> dict[str, Work]:
    """Measure the work in the arrays of a microbatch by tower, without padding."""
    pairs = int(allowed_pairs(text).sum())
    full = pairs
    if model.llm.items == "in_windows":
        full = int(allowed_pairs(text._replace(span=np.zeros_like(text.span))).sum())
    pairs = _mean_pairs(
        model.llm,
        full,
        lambda _: pairs - int(pairs_beyond_window(text, model.llm.reach(text.position)).sum()),
    )
    work = {"llm": Work(int((text.sample >= 0).sum()), pairs)}
    for name, batch in items.items():
        encoder = model.towers[name]
        if encoder.is_generator:
            work[name] = _generator_work(encoder, batch.item)
            continue
        # Coordinates below 0 mark inputs that become no token: class tokens, which pass through the
        # layers, and the silence behind a clip, which does not.
        output_item = np.where(batch.coordinates[..., ROW] >= 0, batch.item, -1)
        layer_item = batch.item
        if encoder.stride > 1 or encoder.pool > 1:
            # The convolutions keep one frame of each position, pooling the last position of each
            # group.
            layer_item = output_item[:, :: encoder.stride]
            output_item = layer_item[:, encoder.pool - 1 :: encoder.pool]
        group = encoder.merged_positions
        # A token exists where any member of its merge group does.
        token_item = output_item.reshape(
            len(output_item), output_item.shape[1] // group, group
        ).max(-1, initial=-1)
        pairs = int(item_pairs(layer_item).sum())
        windows = _windows(encoder, batch, layer_item)
        pairs = _mean_pairs(encoder, pairs, lambda size, item=windows: int(item_pairs(item).sum()))
        inputs, positions, tokens = (
            int((x >= 0).sum()) for x in (batch.item, layer_item, token_item)
        )
        work[name] = _in_step(encoder, Work(positions, pairs, inputs, tokens))
    return work


def _in_step(config: Tower, work: Work) -> Work:
    """Leave an encoder that encodes once with the tokens of its connector: it has run before the step."""
    return work if config.encode == "step" else Work(0, 0, 0, work.tokens)


def _generator_work(config: Generator, item: np.ndarray) -> Work:
    """Measure the work of the images in a generator's rows, `[R, L]`, -1 = padding."""
    positions = int((item >= 0).sum())
    images = sum(len(np.unique(row[row >= 0])) for row in item)
    return Work(positions, int(item_pairs(item).sum()), positions, images * config.condition_tokens)


def _windows(encoder: Encoder, items: ItemBatch, layer_item: np.ndarray) -> np.ndarray:
    """Number the windows that layers attend within: squares of an image's patches, chunks of a clip's positions.

    Returns each position's, int `[R, L]`, -1 = padding; the items where there are no windows.
    """
    if not encoder.windowed:
        return layer_item
    window = encoder.window
    if encoder.modality == "audio":
        time = items.coordinates[:, :: encoder.stride, TIME] // encoder.stride
        return chunk_numbers(layer_item, time, np.arange(time.shape[1]), window)
    # Windows of 4: patch (5, 9) is in window (1, 2) of its image. (item, 1, 2) becomes one number.
    row, column = np.moveaxis(np.maximum(items.coordinates[..., ROW:], 0) // window, -1, 0)
    sizes = (
        np.array([items.item.max(initial=0), row.max(initial=0), column.max(initial=0)], np.int64)
        + 1
    )
    number = np.ravel_multi_index((np.maximum(items.item, 0), row, column), sizes)
    # Renumbered without gaps, for `item_pairs` counts by number.
    dense = np.unique(number, return_inverse=True)[1].reshape(number.shape)
    return np.where(items.item >= 0, dense, -1)


def length_work(
    model: ModelConfig, llm: np.ndarray, encoder: np.ndarray, useful: np.ndarray, tokens: np.ndarray
) -> dict[str, Work]:
    """Estimate the work of samples by tower from lengths alone: causal in the LLM, full inside each item.

    llm: int `[n]`, tokens of each sample. For every item, int `[p]`: its encoder's number, patches
    or frames, tokens. Generators are numbered after the encoders.
    """
    length = llm.astype(np.int64)

    def causal(window: int) -> int:
        return int(causal_pairs(length, window, model.llm.chunked).sum())

    pairs = _mean_pairs(model.llm, causal(0), causal)
    work = {"llm": Work(int(length.sum()), pairs)}
    for k, (name, config) in enumerate(model.item_modules.items()):
        inputs = useful[encoder == k].astype(np.int64)
        positions = config.positions_of(inputs)
        # Full attention inside an item: n queries of n keys each.
        pairs = int((positions**2).sum())
        # A length does not tell which windows an image's edge cuts: all are counted as complete.
        pairs = _mean_pairs(
            config, pairs, lambda size, n=positions: int((n * np.minimum(n, size)).sum())
        )
        count = (
            int((encoder == k).sum()) * config.condition_tokens
            if config.is_generator
            else int(tokens[encoder == k].sum())
        )
        of_items = Work(int(positions.sum()), pairs, int(inputs.sum()), count)
        work[name] = _in_step(config, of_items)
    return work


def row_work(
    model: ModelConfig,
    shape: Mapping[str, tuple[int, int]],
    pairs: Mapping[str, float] | None = None,
) -> dict[str, Work]:
    """Compute the work that the backend runs for padded rows, by tower.

    shape: (rows, row length) of "llm", the encoders and the generators. pairs: those of the blocks
    that attention visits, where the rows' contents are known (`visited_pairs`). Else dense
    attention runs all pairs of a row, and of other backends all blocks that they may visit count:
    for the LLM those up to the diagonal.
    """
    work = {}
    for name, (rows, length) in shape.items():
        config = model.towers[name]
        if not config.is_stack:
            # Every place for an image is computed, and nothing behind the last one.
            images = rows * config.max_images(length)
            positions = images * config.min_patches
            work[name] = Work(
                positions,
                positions * config.min_patches,
                positions,
                images * config.condition_tokens,
            )
            continue
        # Padding included: the backend computes it like everything else.
        layer_length = length // config.stride
        positions = rows * layer_length
        if config.attention == "dense":
            work[name] = Work(positions, rows * layer_length**2)
        elif pairs is not None and name in pairs:
            work[name] = Work(positions, pairs[name])
        else:
            one = np.zeros(1, np.int64)  # of each row one part, as long as the row
            work[name] = Work(
                positions, rows * float(visited_pairs(config, one, one, one + length, 1, length)[0])
            )
        if config.is_generator:
            images = config.max_images(length)
            blocks = rows * -(-length // config.min_patches)
            changes = {
                "tokens": rows * images * config.condition_tokens,
                "blocks": blocks,
                "taken": 2 * blocks * images,
            }
            work[name] = work[name]._replace(inputs=positions, **changes)
        elif name != "llm":
            tokens = positions // config.token_positions
            work[name] = _in_step(config, work[name]._replace(inputs=rows * length, tokens=tokens))
    return work


def _blocks(config: Tower, length: int) -> tuple[int, int]:
    """Return the queries and the keys of a block; a row that is shorter than a block is one of its own length."""
    windows = config.modality == "image" and config.windowed
    max_block = window_block(config.window_positions) if windows else MAX_BLOCK
    if config.attention == "blockwise":
        return min(max_block, length), min(max_block, length)
    tiles = tiles_for(min(config.head_width, max(TILES)), length, max_block).forward
    return tiles.q, tiles.k


def visited_pairs(
    config: Tower,
    row: np.ndarray,
    offset: np.ndarray,
    length: np.ndarray,
    rows: int,
    row_length: int,
    parts: int = 1,
) -> np.ndarray:
    """Count the pairs in the blocks that attention visits, of one head, averaged over the layers.

    row, offset, length: int `[p]`, where each sample of the LLM or item of an encoder lies in its
    row. Samples are causal (what an item's tokens see ahead of them is left out), items full; the
    patches of an image's window lie side by side. Returns float64 `[rows * parts]`, by the part of
    the row that the queries are in.
    """
    # A row of 8 in blocks of 4, with parts a of 3 and b of 4 tokens:  a a a b | b b b .
    # Rows lie one behind the other, padded to whole blocks: begin 0 3, end 3 7, start 0 4 of the
    # blocks of queries. The first block has parts 0 to 1, the second part 1 alone (first 0 1, last
    # 1 1), so keys go from 0 and from 3 on, up to the end of b, or to the diagonal if causal.
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
        low = begin[first]
        high = end[last]
        if config.is_causal:
            high = stop
        if window is not None and config.is_causal and not config.chunked:
            low = np.maximum(low, start - window + 1)
        elif window is not None:
            # From the window that the block's first position is in to that of its last.
            low = low + np.maximum(start - low, 0) // window * window
        if window is not None and not config.is_causal:
            high = np.minimum(high, begin[last] + -((begin[last] - stop) // window) * window)
        # Blocks of keys from that of `low` to that of `high - 1`: parts lie side by side.
        visited = ((high - 1) // k - low // k + 1) * (q * k)
        return np.bincount(start * parts // padded, visited, rows * parts)

    return _mean_pairs(config, pairs(), pairs)


def allowed_pairs(text: TextBatch) -> np.ndarray:
    """Count the allowed pairs of every row of the LLM for one head, int64 `[R]`.

    Reads `sample`, `pos` (no two tokens of a row alike), `span`, `kind` and `sees`, each `[R, T]`.
    Raises ValueError for two tokens of a sample with one `pos`.
    """
    arrays = [np.asarray(getattr(text, field)) for field in Mask._fields]
    length = max(text.sample.shape[1], 1)
    return np.array(
        [block_work(Mask._make(row), length).sum() for row in zip(*arrays, strict=True)], np.int64
    )


def pairs_beyond_window(text: TextBatch, window: np.ndarray | int) -> np.ndarray:
    """Count the allowed pairs that a window excludes, int64 `[R]`; for rows whose `pos` is the column.

    window: causal keys that each query attends, itself included; of all, or of each token `[R, T]`.
    Assumes that the tokens of a span are of one kind, as those of an item are.
    """
    length = text.sample.shape[1]
    # Of every token, the first column of its sample: samples 0 0 0 1 1 give 0 0 0 3 3.
    running_max = partial(np.maximum.accumulate, axis=1)
    starts = np.diff(text.sample, axis=1, prepend=-2) != 0
    first = running_max(np.where(starts, np.arange(length), 0))
    # Keys in columns first to far (exclusive) are beyond the window: with window 2, token 2 of a
    # sample misses key 0. Branches between a token and branch 0 do not count.
    column = np.arange(length)
    in_branch, in_branch_0 = (
        np.maximum(x - window + 1, first)
        for x in (column, column - branch_gap(running_max, text.sample, text.kind))
    )
    count = np.zeros(len(text.sample), np.int64)
    for bit in np.unique(text.kind):
        far = in_branch_0 if bit >> FIRST_BRANCH_BIT == 0 else in_branch
        # before_column[:, t] counts the row's tokens of this kind in columns 0 to t (exclusive).
        before_column = np.pad(np.cumsum(text.kind == bit, axis=1), ((0, 0), (1, 0)))
        beyond = np.take_along_axis(before_column, far, 1) - np.take_along_axis(
            before_column, first, 1
        )
        count += np.where((text.sees & bit != 0) & (text.sample >= 0), beyond, 0).sum(1)
    return count - _far_in_spans(text, window)


def _far_in_spans(text: TextBatch, window: int) -> np.ndarray:
    """Count the pairs beyond the window that are allowed all the same because they share a span, int64 `[R]`."""
    causal = (text.sees & text.kind != 0) & (text.sample >= 0)
    window = np.broadcast_to(window, text.sample.shape)
    count = np.zeros(len(text.sample), np.int64)
    for row, (sample, span) in enumerate(zip(text.sample, text.span, strict=True)):
        columns = np.flatnonzero(span)
        # By sample, then span, then column: members of a span follow each other in order.
        order = columns[np.lexsort((columns, span[columns], sample[columns]))]
        borders = np.flatnonzero(np.diff(sample[order]) | np.diff(span[order])) + 1
        for members in np.split(order, borders):
            # Of every member, the number of members at least `window` columns before it.
            beyond = np.searchsorted(members, members - window[row, members], side="right")
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
