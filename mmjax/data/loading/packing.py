"""From a microbatch's plan to its arrays: only what the wanted rows hold is opened and decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.balance.rearrangement import Places, Rearrangement, pack_places, tables
from mmjax.batch import PADDING, ItemBatch, Microbatch, TextBatch
from mmjax.config import VisionConfig
from mmjax.data.loading.text_rows import Arrays, Place, empty_text, stretch, write_sample
from mmjax.data.media.patches import encoder_input, hidden_tokens, positions_per_token, token_grid
from mmjax.data.plan.placement import MicrobatchPlan
from mmjax.data.sample import Sample, SampleLengths
from mmjax.errors import UserError


@dataclass(frozen=True)
class Reader:
    """How the loader gets at samples: by global id."""

    sample: Callable[[int], Sample]
    facts: Callable[[int], SampleLengths]
    item: Callable[[int, int], np.ndarray]
    source_of: Callable[[np.ndarray], np.ndarray]
    name: Callable[[int], str]  # for messages: "source[index]"


def pack_microbatch(
    plan: MicrobatchPlan,
    arrays: Arrays,
    reader: Reader,
    ranks: range | None = None,
    encoder_ranks: range | None = None,
    spoiled: dict[int, str] | None = None,
) -> Microbatch:
    """The rows of `plan` on these ranks (on all), of items on these encoder ranks (on those of the ranks), as arrays.

    A sample that can't be read, or is not what the length index promised, goes into `spoiled` with the reason; what
    of it was read stays in its place, and must weigh nothing. Without `spoiled` it is a UserError that names it.
    """
    ranks = range(plan.topology.ranks) if ranks is None else ranks
    parts = plan.topology.encoders_per_rank
    encoder_ranks = range(ranks.start * parts, ranks.stop * parts) if encoder_ranks is None else encoder_ranks
    sent = {encoder: _sent(plan, k, arrays, encoder, ranks) for k, encoder in enumerate(arrays.encoders, start=1)}
    items = {
        encoder: _pack_items(plan, k, arrays, encoder, _share(encoder_ranks, plan.rows[k] // parts), reader, spoiled)
        for k, encoder in enumerate(arrays.encoders, start=1)
    }
    return Microbatch(_pack_text(plan, arrays, _share(ranks, plan.rows[LLM]), reader, sent, spoiled), items)


def _share(ranks: range, rows: int) -> range:
    """The rows of these ranks, where each has so many."""
    return range(ranks.start * rows, ranks.stop * rows)


class Sent(NamedTuple):
    """How an encoder's tokens reach the text of these ranks."""

    send: np.ndarray  # int32 [ranks, peers, width], as in TextBatch
    slot: np.ndarray  # int64 [p], of the first token of each of the encoder's items that arrive or stay here
    newline: int  # slot of the connector's, which every row of a rank ends with: that of its own first row


def _sent(plan: MicrobatchPlan, module: int, arrays: Arrays, encoder: str, ranks: range) -> Sent:
    """The all-to-all of one encoder: from where its items are encoded to the rank of their sample."""
    peers, width = plan.topology.peers, plan.shape.widths[module - 1]
    group, length = positions_per_token(arrays.encoders[encoder]), plan.shape.lengths[module]
    items = np.flatnonzero(plan.module == module)
    rank, tokens = plan.rank(), plan.length[items] // group - hidden_tokens(arrays.encoders[encoder])
    source, home = rank[items], rank[plan.part_start[:-1]][plan.sample_of()][items]
    row_tokens, newline = length // group + arrays.newline(encoder), peers * width + length // group
    first = plan.row[items] % plan.rows[module] * np.int64(row_tokens) + plan.offset[items] // group
    arrived = pack_places(tokens, home, plan.topology.ranks)
    moved = Rearrangement(tokens, Places(source, first), arrived, plan.topology.ranks)
    capacity = int((arrived.offset + tokens).max(initial=1))
    slot, send = np.full(len(plan.module), PADDING, np.int64), []
    for node in range(ranks.start // peers, -(-ranks.stop // peers)):
        among = range(node * peers, (node + 1) * peers)
        mine = range(max(ranks.start, among.start), min(ranks.stop, among.stop))
        found = tables(moved, width, capacity, mine, among)
        here = (home >= mine.start) & (home < mine.stop)
        slot[items[here]] = found.gather[home[here] - mine.start, arrived.offset[here]]
        send.append(found.send)
    return Sent(np.concatenate(send), slot, newline if arrays.newline(encoder) else PADDING)


@contextmanager
def _reading(reader: Reader, sample: int, spoiled: dict[int, str] | None, item: str = "") -> Iterator[None]:
    """Note that the sample is spoiled when something is wrong with it, or with its item; or raise that, with names."""
    what = f"{item} of sample {reader.name(sample)}" if item else f"sample {reader.name(sample)}"
    try:
        yield
    except (OSError, ValueError) as error:
        if spoiled is None:
            raise UserError(f"{what}: {error}") from error
        spoiled.setdefault(sample, f"{item}: {error}" if item else str(error))
    except Exception as error:
        error.add_note(f"while reading {what}")
        raise


# ------------------------------------------------------------------------------------------------------------ items


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
    owner, offset = np.full(shape, PADDING, np.int32), np.zeros(shape, np.int32)
    in_row = np.zeros(len(share), np.int32)
    sample_of = plan.sample_of()
    before = _before_in_sample(plan, module, sample_of)
    here = (plan.module == module) & (plan.row >= share.start) & (plan.row < share.stop)
    for part in np.flatnonzero(here):
        sample, number = int(plan.samples[sample_of[part]]), int(part - plan.part_start[sample_of[part]] - 1)
        row, begin, length = plan.row[part] - share.start, plan.offset[part], plan.length[part]
        at = slice(begin, begin + length)
        owner[row, at], offset[row, at] = sample, before[part] + np.arange(length)
        with _reading(reader, sample, spoiled, f"item {number} ({encoder})"):
            value, place, valid = encoder_input(arrays.encoders[encoder], reader.item(sample, number))
            if len(value) != length:
                raise ValueError(f"it has {len(value)} positions where its source's facts() promised {length}")
            if value.dtype != np.uint8 and not np.isfinite(value).all():
                raise ValueError("it holds NaN or Inf; mend the file or leave the sample out of its source")
            values[row, at], coordinates[row, at] = value, place
            item[row, at] = np.where(valid, in_row[row], PADDING)
            in_row[row] += 1
    return ItemBatch(values, item, coordinates, owner, offset)


def _before_in_sample(plan: MicrobatchPlan, module: int, sample_of: np.ndarray) -> np.ndarray:
    """Positions of this module that the parts before each one take in its sample, int64 `[p]`."""
    length = np.where(plan.module == module, plan.length, 0)
    before = np.cumsum(length) - length
    return before - before[plan.part_start[:-1]][sample_of]


# ------------------------------------------------------------------------------------------------------------- text


def _pack_text(
    plan: MicrobatchPlan,
    arrays: Arrays,
    share: range,
    reader: Reader,
    sent: dict[str, Sent],
    spoiled: dict[int, str] | None,
) -> TextBatch:
    batch = empty_text((len(share), plan.shape.lengths[LLM]), arrays, {e: s.send for e, s in sent.items()})
    sources = reader.source_of(plan.samples)
    samples, spans = np.zeros(len(share), np.int32), np.zeros(len(share), np.int32)
    for index, sample in enumerate(plan.samples.tolist()):
        part, end = plan.part_start[index : index + 2]
        row = plan.row[part] - share.start
        if not 0 <= row < len(share):
            continue
        at = slice(plan.offset[part], plan.offset[part] + plan.length[part])
        with _reading(reader, sample, spoiled):
            places = [_place(plan, arrays, item, sent) for item in range(part + 1, end)]
            if arrays.axes:
                places = _with_grids(places, arrays, reader.facts(sample))
            write_sample(stretch(batch, row, at), reader.sample(sample), arrays, places, spans[row])
        batch.sample[row, at], batch.source[row, at] = samples[row], sources[index]
        batch.owner[row, at], batch.offset[row, at] = sample, np.arange(plan.length[part])
        samples[row] += 1
        spans[row] += end - part - 1
    return batch


def _place(plan: MicrobatchPlan, arrays: Arrays, part: int, sent: dict[str, Sent]) -> Place:
    encoder = list(arrays.encoders)[int(plan.module[part]) - 1]
    config = arrays.encoders[encoder]
    tokens = int(plan.length[part]) // positions_per_token(config) - hidden_tokens(config)
    return Place(encoder, int(sent[encoder].slot[part]), tokens, sent[encoder].newline)


def _with_grids(places: Sequence[Place], arrays: Arrays, facts: SampleLengths) -> list[Place]:
    """Every image's place with its grid, by the sizes in its source's facts. ValueError where they have changed."""
    if len(places) != len(facts.items):
        raise ValueError(f"its source's facts() have {len(facts.items)} items and promised {len(places)}")
    found = []
    for number, (place, (_, size)) in enumerate(zip(places, facts.items, strict=True)):
        encoder = arrays.encoders[place.encoder]
        grid = token_grid(encoder, size) if isinstance(encoder, VisionConfig) else None
        if grid is not None and math.prod(grid) != place.tokens:
            raise ValueError(
                f"its item {number} has {place.tokens} tokens, and by its source's facts() the size {size}"
            )
        found.append(place._replace(grid=grid))
    return found
