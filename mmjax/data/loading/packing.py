"""Pack a planned microbatch into arrays, opening and decoding only the samples of the wanted rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from mmjax.balance.exchange import Rearrangement, exchange_tables
from mmjax.balance.parts import LLM, offsets_by_key
from mmjax.batch import PADDING, EncodedItems, ItemBatch, Microbatch, TextBatch
from mmjax.config import Encoder, Generator
from mmjax.data.loading.feature_lookup import FeatureLookup
from mmjax.data.loading.text_rows import (
    BatchLayout,
    ItemSlots,
    empty_text,
    llm_tokens,
    row_view,
    write_sample,
)
from mmjax.data.media.patches import ItemInput, ItemPlaces, item_input, item_places, token_grid
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
    # converts what `item` returns to its part of a batch's row
    convert: Callable[[Encoder | Generator, np.ndarray], ItemInput] = item_input
    # hashes what an item is decoded from; None: only its content tells it
    item_hash: Callable[[int, int], bytes | None] = lambda sample, number: None


def pack_microbatch(
    plan: MicrobatchPlan,
    layout: BatchLayout,
    reader: Reader,
    ranks: range | None = None,
    encoder_ranks: range | Mapping[str, range] | None = None,
    unreadable: dict[int, str] | None = None,
    stored: FeatureLookup | None = None,
) -> Microbatch:
    """Pack the rows of `plan` on these ranks (all), and of items on these encoder ranks (those of the ranks).

    encoder_ranks: of all encoders, or by encoder.

    A sample that can't be read, or is not what the length index promised, goes into `unreadable`
    with the reason; what of it was read stays in its place, and must weigh nothing. Without
    `unreadable` it is a UserError that names it.

    stored: looks up what encoders that encode once made of their items; None: their rows hold the
    items themselves.
    """
    ranks = range(plan.topology.ranks) if ranks is None else ranks
    parts = plan.topology.encoders_per_rank
    encoder_ranks = (
        range(ranks.start * parts, ranks.stop * parts) if encoder_ranks is None else encoder_ranks
    )
    if isinstance(encoder_ranks, range):
        encoder_ranks = dict.fromkeys(layout.modules, encoder_ranks)
    numbers = {name: k for k, name in enumerate(layout.modules, start=1)}
    shares = {m: _share(encoder_ranks[m], plan.rows[k] // parts) for m, k in numbers.items()}
    sent = {
        name: plan_token_exchange(plan, k, layout, name, ranks)
        for name, k in numbers.items()
        if name not in layout.rules.generator_names
    }
    items = {
        module: _pack_items(plan, k, layout, module, shares[module], reader, unreadable, stored)
        for module, k in numbers.items()
    }
    queries = np.zeros((len(plan.module), 2), np.int64)
    text = _pack_text(
        plan, layout, _share(ranks, plan.rows[LLM]), reader, sent, queries, unreadable
    )
    for name in layout.rules.generator_names:
        text.send[name], text.condition[name] = plan_condition_exchange(
            plan, numbers[name], layout, name, ranks, queries
        )
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


def plan_token_exchange(
    plan: MicrobatchPlan, module: int, layout: BatchLayout, encoder: str, ranks: range
) -> Sent:
    """Plan the all-to-all of one encoder: from where its items are encoded to the rank of their sample.

    A device numbers what it can find: the chunks of its peers, then its own rows, each with a
    newline behind it where the connector has one. With 2 peers, a width of 3, rows of 8 positions
    at 4 a token and a newline, these are the slots of rank 1, to which rank 0 sends an item of two
    tokens a, and which has encoded b and c itself:

        slot    0 1 2   3 4 5   6 7   8         9 10  11
                a a .   . . .   b c   newline   . .   newline
                rank 0  rank 1  row 0           row 1

    Of `context` devices that are one rank, device d adds d times as many slots as a device has.
    Devices of one number exchange with each other.
    """
    ranks_in_all, peers, context = plan.topology.ranks, plan.topology.peers, plan.topology.context
    width = plan.shape.widths[module - 1]
    config = layout.modules[encoder]
    per_token = config.positions_per_token
    rows = plan.rows[module] // context  # of each of the devices that a rank is
    row_tokens = plan.shape.lengths[module] // per_token + config.connector.newline
    items = np.flatnonzero(plan.module == module)
    tokens = plan.length[items] // per_token - config.hidden_tokens
    source = plan.rank()[items]
    target = plan.home_rank()[items]
    device, row = np.divmod(plan.row[items] % plan.rows[module], rows)
    moved = Rearrangement(
        length=tokens,
        source=source,
        source_offset=row * np.int64(row_tokens) + plan.offset[items] // per_token,
        target=target,
        target_offset=offsets_by_key(tokens, device * ranks_in_all + target),
    )
    capacity = int((moved.target_offset + tokens).max(initial=1))
    slot = np.full(len(plan.module), PADDING, np.int64)
    send = np.full((len(ranks), context, peers, width), PADDING, np.int32)
    for number in range(context):
        chosen = device == number
        of_device = Rearrangement._make(field[chosen] for field in moved)
        for mine, node in _by_node(ranks, peers):
            local = slice(mine.start - ranks.start, mine.stop - ranks.start)
            send[local, number], gather = exchange_tables(of_device, width, capacity, mine, node)
            arrive = (of_device.target >= mine.start) & (of_device.target < mine.stop)
            slot[items[chosen][arrive]] = (
                number * (peers * width + rows * row_tokens)
                + gather[of_device.target[arrive] - mine.start, of_device.target_offset[arrive]]
            )
    newline = peers * width + row_tokens - 1 if config.connector.newline else PADDING
    return Sent(send.reshape(len(ranks) * context, peers, width), slot, newline)


def plan_condition_exchange(
    plan: MicrobatchPlan,
    module: int,
    layout: BatchLayout,
    name: str,
    ranks: range,
    queries: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Plan the all-to-all of one generator: from where the hidden states of its images' conditions are to its rows.

    Of an image these are `text_tokens` positions, or those that its sample has before it, and its
    queries behind them. queries: int64 `[p, 2]`, as in `_pack_text`. Returns `TextBatch.send` and
    `TextBatch.condition`.

    With 2 tokens of text and 2 queries, an image whose queries begin at position 5 of its rank,
    behind 7 tokens of its sample, has the condition 3 4 5 6; one behind a single token, with
    queries at 11, has . 10 11 12. Both are on rank 0 and made in rows of one image on rank 1, to
    which chunks of 8 are sent:

        sent by rank 0 to rank 1       3 4 5 6 . 10 11 12
        found by rank 1 in row 0       0 1 2 3
                           row 1               4  5  6  7
    """
    peers = plan.topology.peers
    width = plan.shape.widths[module - 1]
    generator = layout.modules[name]
    text, count = generator.text_tokens, generator.condition_tokens
    images = generator.max_images(plan.shape.lengths[module])
    items = np.flatnonzero(plan.module == module)
    # A row's images have as many columns each, in their order.
    row = plan.row[items]
    order = np.lexsort((plan.offset[items], row))
    number = np.empty(len(items), np.int64)
    number[order] = np.arange(len(items)) - np.searchsorted(row[order], row[order])
    # The tables number conditions one image after the other; `position` is where each of them is
    # among its rank's positions.
    moved = Rearrangement(
        length=np.full(len(items), count, np.int64),
        source=plan.home_rank()[items],
        source_offset=np.arange(len(items)) * count,
        target=plan.rank()[items],
        target_offset=(row % plan.rows[module] * images + number) * count,
    )
    along = np.arange(-text, count - text)
    first, text_tokens = queries[items].T[..., None]
    position = np.where(along >= -text_tokens, first + along, PADDING).reshape(-1)
    capacity = plan.rows[module] * images * count
    send = np.full((len(ranks), peers, width), PADDING, np.int32)
    condition = np.full((len(ranks), capacity), PADDING, np.int32)
    received = peers * width
    for mine, node in _by_node(ranks, peers):
        sent, gather = exchange_tables(moved, width, capacity, mine, node)
        local = slice(mine.start - ranks.start, mine.stop - ranks.start)
        send[local] = _take(position, sent)
        # Behind what arrives of peers come the rank's own positions.
        resident = _take(position, gather - received)
        resident = np.where(resident >= 0, resident + received, PADDING)
        condition[local] = np.where(gather < received, gather, resident)
    return send, condition.reshape(len(ranks) * plan.rows[module], images * count)


def _by_node(ranks: range, peers: int) -> Iterator[tuple[range, range]]:
    """Yield these ranks node by node, with all ranks of their node: 2 .. 4 of nodes of 3 are 2 and 3, 4."""
    for first in range(ranks.start // peers * peers, ranks.stop, peers):
        node = range(first, first + peers)
        yield range(max(ranks.start, first), min(ranks.stop, node.stop)), node


def _take(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Take values by index, PADDING where that is below 0."""
    return np.where(index >= 0, np.append(values, PADDING)[np.maximum(index, -1)], PADDING)


@contextmanager
def _reading(
    reader: Reader, sample: int, unreadable: dict[int, str] | None, item: str = ""
) -> Iterator[None]:
    """Note in `unreadable` what is wrong with the sample or its item; without it raise that, with names."""
    what = f"{item} of sample {reader.name(sample)}" if item else f"sample {reader.name(sample)}"
    try:
        yield
    except (OSError, ValueError) as error:
        if unreadable is None:
            raise UserError(f"{what}: {reader.with_place(sample, error)}") from error
        reason = f"{item}: {error}" if item else error
        unreadable.setdefault(sample, reader.with_place(sample, reason))
    except Exception as error:
        error.add_note(f"while reading {what}")
        raise


# --------------------------------------------------------------------------------------------------
# items


def _pack_items(
    plan: MicrobatchPlan,
    module: int,
    layout: BatchLayout,
    encoder: str,
    share: range,
    reader: Reader,
    unreadable: dict[int, str] | None,
    stored: FeatureLookup | None,
) -> ItemBatch:
    shape = (len(share), plan.shape.lengths[module])
    stored = stored if stored is not None and encoder in stored.readers else None
    if stored is None:
        values = np.zeros((*shape, layout.features(encoder)), layout.dtype(encoder))
    else:
        values = stored.empty(encoder, *shape)
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
        with _reading(reader, sample, unreadable, f"item {number} ({encoder})"):
            config = layout.modules[encoder]
            prepare = partial(_prepare_item, reader, config, sample, number, length)
            if stored is None:
                prepared = prepare()
                values[row, span] = prepared.values
            else:
                key = reader.item_hash(sample, number)
                prepared = stored.write(values, encoder, row, span.start, key, prepare)
            if prepared is None:
                places = item_places(config, reader.facts(sample).items[number][1])
            else:
                places = ItemPlaces(prepared.coordinates, prepared.valid)
            coordinates[row, span] = places.coordinates
            item[row, span] = np.where(places.valid, in_row[row], PADDING)
        # of what could not be read too: an image's number is its place among the conditions
        in_row[row] += 1
    kind = ItemBatch if stored is None else EncodedItems
    return kind(values, item, coordinates, owner, offset)


def _prepare_item(
    reader: Reader, module: Encoder | Generator, sample: int, number: int, length: int
) -> ItemInput:
    """Decode an item and convert it to its part of a row. Raises ValueError where it is not what was promised."""
    item = reader.convert(module, reader.item(sample, number))
    if len(item.values) != length:
        raise ValueError(
            f"it has {len(item.values)} positions where its source's facts() promised {length}"
        )
    if item.values.dtype != np.uint8 and not np.isfinite(item.values).all():
        raise ValueError("it holds NaN or Inf; mend the file or leave the sample out of its source")
    return item


def _before_in_sample(plan: MicrobatchPlan, module: int, sample_of: np.ndarray) -> np.ndarray:
    """Count the positions of this module that the parts before each one take in its sample, int64 `[p]`."""
    length = np.where(plan.module == module, plan.length, 0)
    preceding = np.cumsum(length) - length
    return preceding - preceding[plan.part_start[:-1]][sample_of]


# --------------------------------------------------------------------------------------------------
# text


def _pack_text(
    plan: MicrobatchPlan,
    layout: BatchLayout,
    share: range,
    reader: Reader,
    sent: dict[str, Sent],
    queries: np.ndarray,
    unreadable: dict[int, str] | None,
) -> TextBatch:
    """Pack the text.

    queries: int64 `[p, 2]`, gets the place of each generator's item's first query among its rank's
    positions, and how many positions of its sample are before it.
    """
    batch = empty_text(
        (len(share), plan.shape.lengths[LLM]), layout, {e: s.send for e, s in sent.items()}
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
        with _reading(reader, sample, unreadable):
            places = [_item_slots(plan, layout, item, sent) for item in range(part + 1, end)]
            if layout.axes:
                places = _with_grids(places, layout, reader.facts(sample))
            contents = reader.sample(sample)
            write_sample(row_view(batch, row, span), contents, layout, places, spans[row])
            if layout.rules.generator_names:
                begin = row % plan.rows[LLM] * plan.shape.lengths[LLM] + span.start
                offsets = _item_offsets(contents, layout, places)
                queries[part + 1 : end] = np.stack([begin + offsets, offsets], axis=1)
        batch.sample[row, span] = samples[row]
        batch.source[row, span] = sources[index]
        batch.owner[row, span] = sample
        batch.offset[row, span] = np.arange(plan.length[part])
        samples[row] += 1
        spans[row] += end - part - 1
    return batch


def _item_offsets(sample: Sample, layout: BatchLayout, places: Sequence[ItemSlots]) -> np.ndarray:
    """Find where each item of a sample begins among its tokens, int64 `[items]`; 0 where items are arranged."""
    offsets = np.zeros(len(places), np.int64)
    offset = 0
    for segment in sample.segments:
        if isinstance(segment, Item):
            offsets[segment.number] = offset
        offset += (
            len(segment.tokens)
            if isinstance(segment, Text)
            else llm_tokens(segment, places, layout)
        )
    return offsets


def _item_slots(
    plan: MicrobatchPlan, layout: BatchLayout, part: int, sent: dict[str, Sent]
) -> ItemSlots:
    encoder = list(layout.modules)[int(plan.module[part]) - 1]
    config = layout.modules[encoder]
    if config.is_generator:
        return ItemSlots(encoder, 0, config.queries)
    tokens = int(plan.length[part]) // config.positions_per_token - config.hidden_tokens
    return ItemSlots(encoder, int(sent[encoder].slot[part]), tokens, sent[encoder].newline)


def _with_grids(
    places: Sequence[ItemSlots], layout: BatchLayout, facts: SampleLengths
) -> list[ItemSlots]:
    """Give every image's place its grid, by the sizes in its source's facts. ValueError where they have changed."""
    if len(places) != len(facts.items):
        raise ValueError(
            f"its source's facts() have {len(facts.items)} items and promised {len(places)}"
        )
    placed = []
    for number, (place, (_, size)) in enumerate(zip(places, facts.items, strict=True)):
        encoder = layout.modules[place.encoder]
        grid = token_grid(encoder, size) if "image" in encoder.media else None
        if grid is not None and math.prod(grid) != place.tokens:
            raise ValueError(
                f"its item {number} has {place.tokens} tokens, and by its source's facts() the size {size}"
            )
        placed.append(place._replace(grid=grid))
    return placed
