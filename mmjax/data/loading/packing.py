"""Pack a planned microbatch into arrays, opening and decoding only the samples of the wanted rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.balance.rearrangement import Places, Rearrangement, pack_places, tables
from mmjax.batch import PADDING, ItemBatch, Microbatch, TextBatch
from mmjax.data.loading.text_rows import (
    Arrays,
    Place,
    empty_text,
    llm_tokens,
    stretch,
    write_sample,
)
from mmjax.data.media.patches import item_input, token_grid
from mmjax.data.plan.placement import MicrobatchPlan
from mmjax.data.sample import Item, Sample, SampleLengths, Text
from mmjax.errors import UserError


@dataclass(frozen=True)
class Reader:
    """Access to samples, their lengths and their items by global id."""

    sample: Callable[[int], Sample]
    facts: Callable[[int], SampleLengths]
    item: Callable[[int, int], np.ndarray]
    source_of: Callable[[np.ndarray], np.ndarray]
    name: Callable[[int], str]  # for messages: "source[index]"
    # puts a sample's file and line before what is wrong with it
    with_place: Callable[[int, object], str]


def pack_microbatch(
    plan: MicrobatchPlan,
    arrays: Arrays,
    reader: Reader,
    ranks: range | None = None,
    encoder_ranks: range | Mapping[str, range] | None = None,
    spoiled: dict[int, str] | None = None,
) -> Microbatch:
    """Pack the rows of `plan` on these ranks (all), and of items on these encoder ranks (those of the ranks).

    encoder_ranks: of all encoders, or by encoder.

    A sample that can't be read, or is not what the length index promised, goes into `spoiled` with
    the reason; what of it was read stays in its place, and must weigh nothing. Without `spoiled` it
    is a UserError that names it.
    """
    ranks = range(plan.topology.ranks) if ranks is None else ranks
    parts = plan.topology.encoders_per_rank
    encoder_ranks = (
        range(ranks.start * parts, ranks.stop * parts) if encoder_ranks is None else encoder_ranks
    )
    if isinstance(encoder_ranks, range):
        encoder_ranks = dict.fromkeys(arrays.modules, encoder_ranks)
    shares = {
        m: _share(encoder_ranks[m], plan.rows[k] // parts)
        for k, m in enumerate(arrays.modules, start=1)
    }
    sent = {
        encoder: _sent(plan, k, arrays, encoder, ranks)
        for k, encoder in enumerate(arrays.encoders, start=1)
    }
    items = {
        module: _pack_items(plan, k, arrays, module, shares[module], reader, spoiled)
        for k, module in enumerate(arrays.modules, start=1)
    }
    queries = np.zeros((len(plan.module), 2), np.int64)
    text = _pack_text(plan, arrays, _share(ranks, plan.rows[LLM]), reader, sent, queries, spoiled)
    for k, name in enumerate(arrays.generators, start=1 + len(arrays.encoders)):
        text.send[name], text.condition[name] = _conditions(plan, k, arrays, name, ranks, queries)
    return Microbatch(text, items)


def _share(ranks: range, rows: int) -> range:
    """Return the rows of these ranks, where each has so many."""
    return range(ranks.start * rows, ranks.stop * rows)


class Sent(NamedTuple):
    """The exchange of an encoder's tokens: what is sent, and where in the text's input the items arrive."""

    send: np.ndarray  # int32 [ranks * context, peers, width], as in TextBatch
    # int64 [p], of the first token of each of the encoder's items that arrive or stay here, in the
    # arrays of all devices of its rank, one after the other.
    slot: np.ndarray
    # slot of the connector's, which every row of a rank ends with: that of its own first row
    newline: int


def _sent(plan: MicrobatchPlan, module: int, arrays: Arrays, encoder: str, ranks: range) -> Sent:
    """Plan the all-to-all of one encoder: from where its items are encoded to the rank of their sample."""
    peers = plan.topology.peers
    width = plan.shape.widths[module - 1]
    length = plan.shape.lengths[module]
    group = arrays.encoders[encoder].positions_per_token
    ranks_in_all, context = plan.topology.ranks, plan.topology.context
    rows = plan.rows[module] // context  # of each of the devices that a rank is
    items = np.flatnonzero(plan.module == module)
    tokens = plan.length[items] // group - arrays.encoders[encoder].hidden_tokens
    rank = plan.rank()
    device, row = np.divmod(plan.row[items] % plan.rows[module], rows)
    # Devices of one number exchange with each other: those of number 0 come first, by rank, then
    # those of number 1.
    first_of_number = device * ranks_in_all
    encoded = first_of_number + rank[items]
    target = first_of_number + rank[plan.part_start[:-1]][plan.sample_of()][items]
    # With 2 peers of width 3 and rows of 8 positions at 4 a token: slots 0 to 5 arrive, 6 and 7 are
    # the rank's first row, 8 is its newline (if the connector has one), and the next row begins
    # behind it.
    newline = peers * width + length // group
    row_tokens = length // group + arrays.newline(encoder)
    first = row * np.int64(row_tokens) + plan.offset[items] // group
    arrived = pack_places(tokens, target, ranks_in_all * context)
    moved = Rearrangement(tokens, Places(encoded, first), arrived, ranks_in_all * context)
    capacity = int((arrived.offset + tokens).max(initial=1))
    slot = np.full(len(plan.module), PADDING, np.int64)
    send = np.full((len(ranks), context, peers, width), PADDING, np.int32)
    for number, node in product(
        range(context), range(ranks.start // peers, -(-ranks.stop // peers))
    ):
        first_rank = number * ranks_in_all
        among = range(first_rank + node * peers, first_rank + (node + 1) * peers)
        mine = range(
            max(first_rank + ranks.start, among.start), min(first_rank + ranks.stop, among.stop)
        )
        exchange = tables(moved, width, capacity, mine, among)
        local = (target >= mine.start) & (target < mine.stop)
        slots = exchange.gather[target[local] - mine.start, arrived.offset[local]]
        slot[items[local]] = number * (peers * width + rows * row_tokens) + slots
        begin = mine.start - first_rank - ranks.start
        send[begin : begin + len(mine), number] = exchange.send
    return Sent(
        send.reshape(len(ranks) * context, peers, width),
        slot,
        newline if arrays.newline(encoder) else PADDING,
    )


def _conditions(
    plan: MicrobatchPlan, module: int, arrays: Arrays, name: str, ranks: range, queries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Plan the all-to-all of one generator: from where the hidden states of its images' conditions are to its rows.

    Of an image these are `text_tokens` positions, or those that its sample has before it, and its
    queries behind them.
    queries: int64 `[p, 2]`, as in `_pack_text`. Returns `TextBatch.send` and `TextBatch.condition`.
    """
    peers, in_all = plan.topology.peers, plan.topology.ranks
    width = plan.shape.widths[module - 1]
    text, count = arrays.generators[name].text_tokens, arrays.generators[name].condition_tokens
    images = arrays.generators[name].max_images(plan.shape.lengths[module])
    items = np.flatnonzero(plan.module == module)
    tokens = np.full(len(items), count, np.int64)
    rank = plan.rank()
    home_rank = rank[plan.part_start[:-1]][plan.sample_of()][items]
    # A row's images have as many columns each, in their order.
    row = plan.row[items]
    order = np.lexsort((plan.offset[items], row))
    number = np.empty(len(items), np.int64)
    number[order] = np.arange(len(items)) - np.searchsorted(row[order], row[order])
    column = (row % plan.rows[module] * images + number) * count
    # The tables number conditions one image after the other; here is where each of them is among
    # its rank's positions.
    along = np.arange(-text, count - text)
    first, text_tokens = queries[items].T[..., None]
    place = np.where(along >= -text_tokens, first + along, PADDING).reshape(-1)
    numbered = Places(home_rank, np.arange(len(items)) * count)
    moved = Rearrangement(tokens, numbered, Places(rank[items], column), in_all)
    capacity = plan.rows[module] * images * count
    send = np.full((len(ranks), peers, width), PADDING, np.int32)
    condition = np.full((len(ranks), capacity), PADDING, np.int32)
    for node in range(ranks.start // peers, -(-ranks.stop // peers)):
        among = range(node * peers, (node + 1) * peers)
        mine = range(max(ranks.start, among.start), min(ranks.stop, among.stop))
        exchange = tables(moved, width, capacity, mine, among)
        local = slice(mine.start - ranks.start, mine.stop - ranks.start)
        send[local] = _at(place, exchange.send)
        # Behind what arrives of peers come the rank's own.
        local_place = _at(place, exchange.gather - peers * width)
        local_place = np.where(local_place >= 0, local_place + peers * width, PADDING)
        condition[local] = np.where(exchange.gather < peers * width, exchange.gather, local_place)
    return send, condition.reshape(len(ranks) * plan.rows[module], images * count)


def _at(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Take values by index, PADDING where that is below 0."""
    return np.where(index >= 0, np.append(values, PADDING)[np.maximum(index, -1)], PADDING)


@contextmanager
def _reading(
    reader: Reader, sample: int, spoiled: dict[int, str] | None, item: str = ""
) -> Iterator[None]:
    """Note that the sample is spoiled when something is wrong with it, or with its item; or raise that, with names."""
    what = f"{item} of sample {reader.name(sample)}" if item else f"sample {reader.name(sample)}"
    try:
        yield
    except (OSError, ValueError) as error:
        if spoiled is None:
            raise UserError(f"{what}: {reader.with_place(sample, error)}") from error
        spoiled.setdefault(sample, reader.with_place(sample, f"{item}: {error}" if item else error))
    except Exception as error:
        error.add_note(f"while reading {what}")
        raise


# --------------------------------------------------------------------------------------------------
# items


def _pack_items(
    plan: MicrobatchPlan,
    module: int,
    arrays: Arrays,
    encoder: str,
    share: range,
    reader: Reader,
    spoiled: dict[int, str] | None,
) -> ItemBatch:
    shape = (len(share), plan.shape.lengths[module])
    values = np.zeros((*shape, arrays.features(encoder)), arrays.dtype(encoder))
    item = np.full(shape, PADDING, np.int32)
    coordinates = np.zeros((*shape, 3), np.int32)
    owner = np.full(shape, PADDING, np.int32)
    offset = np.zeros(shape, np.int32)
    in_row = np.zeros(len(share), np.int32)  # items that each row has so far
    sample_of = plan.sample_of()
    preceding = _before_in_sample(plan, module, sample_of)
    local = (plan.module == module) & (plan.row >= share.start) & (plan.row < share.stop)
    for part in np.flatnonzero(local):
        sample = int(plan.samples[sample_of[part]])
        # part_start is the sample's LLM part
        number = int(part - plan.part_start[sample_of[part]] - 1)
        row = plan.row[part] - share.start
        length = plan.length[part]
        span = slice(plan.offset[part], plan.offset[part] + length)
        owner[row, span] = sample
        offset[row, span] = preceding[part] + np.arange(length)
        with _reading(reader, sample, spoiled, f"item {number} ({encoder})"):
            decoded = reader.item(sample, number)
            value, place, valid = item_input(arrays.modules[encoder], decoded)
            if len(value) != length:
                raise ValueError(
                    f"it has {len(value)} positions where its source's facts() promised {length}"
                )
            if value.dtype != np.uint8 and not np.isfinite(value).all():
                raise ValueError(
                    "it holds NaN or Inf; mend the file or leave the sample out of its source"
                )
            values[row, span] = value
            coordinates[row, span] = place
            item[row, span] = np.where(valid, in_row[row], PADDING)
        # of what could not be read too: an image's number is its place among the conditions
        in_row[row] += 1
    return ItemBatch(values, item, coordinates, owner, offset)


def _before_in_sample(plan: MicrobatchPlan, module: int, sample_of: np.ndarray) -> np.ndarray:
    """Count the positions of this module that the parts before each one take in its sample, int64 `[p]`."""
    length = np.where(plan.module == module, plan.length, 0)
    preceding = np.cumsum(length) - length
    return preceding - preceding[plan.part_start[:-1]][sample_of]


# --------------------------------------------------------------------------------------------------
# text


def _pack_text(
    plan: MicrobatchPlan,
    arrays: Arrays,
    share: range,
    reader: Reader,
    sent: dict[str, Sent],
    queries: np.ndarray,
    spoiled: dict[int, str] | None,
) -> TextBatch:
    """Pack the text.

    queries: int64 `[p, 2]`, gets the place of each generator's item's first query among its rank's
    positions, and how many positions of its sample are before it.
    """
    batch = empty_text(
        (len(share), plan.shape.lengths[LLM]), arrays, {e: s.send for e, s in sent.items()}
    )
    sources = reader.source_of(plan.samples)
    # Samples and items that each row has so far: they number the next sample and its items'
    # attention spans.
    samples = np.zeros(len(share), np.int32)
    spans = np.zeros(len(share), np.int32)
    for index, sample in enumerate(plan.samples.tolist()):
        part, end = plan.part_start[index : index + 2]
        row = plan.row[part] - share.start
        if not 0 <= row < len(share):
            continue
        span = slice(plan.offset[part], plan.offset[part] + plan.length[part])
        with _reading(reader, sample, spoiled):
            places = [_place(plan, arrays, item, sent) for item in range(part + 1, end)]
            if arrays.axes:
                places = _with_grids(places, arrays, reader.facts(sample))
            contents = reader.sample(sample)
            write_sample(stretch(batch, row, span), contents, arrays, places, spans[row])
            if arrays.generators:
                begin = row % plan.rows[LLM] * plan.shape.lengths[LLM] + span.start
                offsets = _item_offsets(contents, arrays, places)
                queries[part + 1 : end] = np.stack([begin + offsets, offsets], axis=1)
        batch.sample[row, span] = samples[row]
        batch.source[row, span] = sources[index]
        batch.owner[row, span] = sample
        batch.offset[row, span] = np.arange(plan.length[part])
        samples[row] += 1
        spans[row] += end - part - 1
    return batch


def _item_offsets(sample: Sample, arrays: Arrays, places: Sequence[Place]) -> np.ndarray:
    """Find where each item of a sample begins among its tokens, int64 `[items]`; 0 where items are arranged."""
    offsets = np.zeros(len(places), np.int64)
    offset = 0
    for segment in sample.segments:
        if isinstance(segment, Item):
            offsets[segment.number] = offset
        offset += (
            len(segment.tokens)
            if isinstance(segment, Text)
            else llm_tokens(segment, places, arrays)
        )
    return offsets


def _place(plan: MicrobatchPlan, arrays: Arrays, part: int, sent: dict[str, Sent]) -> Place:
    encoder = list(arrays.modules)[int(plan.module[part]) - 1]
    if encoder in arrays.generators:
        return Place(encoder, 0, arrays.generators[encoder].queries)
    config = arrays.encoders[encoder]
    tokens = int(plan.length[part]) // config.positions_per_token - config.hidden_tokens
    return Place(encoder, int(sent[encoder].slot[part]), tokens, sent[encoder].newline)


def _with_grids(places: Sequence[Place], arrays: Arrays, facts: SampleLengths) -> list[Place]:
    """Give every image's place its grid, by the sizes in its source's facts. ValueError where they have changed."""
    if len(places) != len(facts.items):
        raise ValueError(
            f"its source's facts() have {len(facts.items)} items and promised {len(places)}"
        )
    placed = []
    for number, (place, (_, size)) in enumerate(zip(places, facts.items, strict=True)):
        encoder = arrays.modules[place.encoder]
        grid = token_grid(encoder, size) if "image" in encoder.media else None
        if grid is not None and math.prod(grid) != place.tokens:
            raise ValueError(
                f"its item {number} has {place.tokens} tokens, and by its source's facts() the size {size}"
            )
        placed.append(place._replace(grid=grid))
    return placed
