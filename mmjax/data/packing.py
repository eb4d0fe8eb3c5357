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
from mmjax.batch import PADDING, ItemBatch, Microbatch, Mixed, TextBatch
from mmjax.config import AudioConfig, ModelConfig, VisionConfig
from mmjax.data.arrangement import CORNERS, NEWLINE, NOTHING, interpolates
from mmjax.data.media import hidden_tokens, positions_per_token, prepare, token_grid
from mmjax.data.placement import MicrobatchPlan
from mmjax.data.sample import Arranged, Facts, Item, Sample, Text
from mmjax.errors import UserError

# Bits of `kind` and `sees`: text, then the encoders, then the branches of a sample.
TEXT_KIND = 1
FIRST_BRANCH_BIT = 12
MAX_ENCODERS = FIRST_BRANCH_BIT - 1
MAX_BRANCHES = 30 - FIRST_BRANCH_BIT


@dataclass(frozen=True)
class Arrays:
    """What the arrays look like: the encoders in their order, and how an item's tokens attend in the LLM."""

    encoders: dict[str, VisionConfig | AudioConfig]
    items: str  # DecoderConfig.items
    vocab: int
    axes: int = 0  # of a position: (t, y, x) for an LLM with rotary sections; 0 = it is one number

    @classmethod
    def of(cls, model: ModelConfig) -> Arrays:
        """The arrays of a model's batches. Raises UserError where it has more encoders than the mask can tell apart."""
        if (count := len(model.encoders)) > MAX_ENCODERS:
            raise UserError(f"model.encoders has {count}; the attention mask tells {MAX_ENCODERS} apart")
        return cls(dict(model.encoders), model.llm.items, model.llm.vocab, len(model.llm.rope_sections))

    def features(self, encoder: str) -> int:
        """Width of one patch or frame."""
        config = self.encoders[encoder]
        return config.patch**2 * config.channels if isinstance(config, VisionConfig) else config.mels

    def dtype(self, encoder: str) -> type:
        """Of the patches or frames."""
        return np.uint8 if isinstance(self.encoders[encoder], VisionConfig) else np.float32

    def newline(self, encoder: str) -> bool:
        """Whether there is a token that stands behind rows of an image."""
        return self.encoders[encoder].connector.newline

    def bit(self, encoder: str) -> int:
        """The kind of an encoder's tokens."""
        return TEXT_KIND << 1 + list(self.encoders).index(encoder)


@dataclass(frozen=True)
class Reader:
    """How the loader gets at samples: by global id."""

    sample: Callable[[int], Sample]
    facts: Callable[[int], Facts]
    item: Callable[[int, int], np.ndarray]
    source_of: Callable[[np.ndarray], np.ndarray]
    name: Callable[[int], str]  # for messages: "source[index]"


class Place(NamedTuple):
    """Where an item's tokens come from."""

    encoder: str
    slot: int  # of the first, in what the rank of its sample got and made
    tokens: int
    newline: int = PADDING  # where that of the encoder's connector is among them
    grid: tuple[int, int, int] | None = None  # of an image where positions have axes: times, rows, columns of tokens


def pack_microbatch(
    plan: MicrobatchPlan,
    arrays: Arrays,
    reader: Reader,
    ranks: range | None = None,
    encoder_ranks: range | None = None,
) -> Microbatch:
    """The rows of `plan` on these ranks (on all), of items on these encoder ranks (on those of the ranks), as arrays.

    Raises UserError, naming the sample, where one can't be read, or is not what the length index promised.
    """
    ranks = range(plan.topology.ranks) if ranks is None else ranks
    parts = plan.topology.encoders_per_rank
    encoder_ranks = range(ranks.start * parts, ranks.stop * parts) if encoder_ranks is None else encoder_ranks
    sent = {encoder: _sent(plan, k, arrays, encoder, ranks) for k, encoder in enumerate(arrays.encoders, start=1)}
    items = {
        encoder: _pack_items(plan, k, arrays, encoder, _share(encoder_ranks, plan.rows[k] // parts), reader)
        for k, encoder in enumerate(arrays.encoders, start=1)
    }
    return Microbatch(_pack_text(plan, arrays, _share(ranks, plan.rows[LLM]), reader, sent), items)


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
def _naming(what: str) -> Iterator[None]:
    """Say what was being read when something was wrong with it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:
        error.add_note(f"while reading {what}")
        raise


# ------------------------------------------------------------------------------------------------------------ items


def _pack_items(
    plan: MicrobatchPlan, module: int, arrays: Arrays, encoder: str, share: range, reader: Reader
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
        with _naming(f"item {number} ({encoder}) of sample {reader.name(sample)}"):
            value, place, valid = prepare(arrays.encoders[encoder], reader.item(sample, number))
            if len(value) != length:
                raise ValueError(f"it has {len(value)} positions where its source's facts() promised {length}")
            if value.dtype != np.uint8 and not np.isfinite(value).all():
                raise ValueError("it holds NaN or Inf; mend the file or leave the sample out of its source")
        at = slice(begin, begin + length)
        values[row, at], coordinates[row, at] = value, place
        item[row, at] = np.where(valid, in_row[row], PADDING)
        owner[row, at], offset[row, at] = sample, before[part] + np.arange(length)
        in_row[row] += 1
    return ItemBatch(values, item, coordinates, owner, offset)


def _before_in_sample(plan: MicrobatchPlan, module: int, sample_of: np.ndarray) -> np.ndarray:
    """Positions of this module that the parts before each one take in its sample, int64 `[p]`."""
    length = np.where(plan.module == module, plan.length, 0)
    before = np.cumsum(length) - length
    return before - before[plan.part_start[:-1]][sample_of]


# ------------------------------------------------------------------------------------------------------------- text


def _pack_text(plan: MicrobatchPlan, arrays: Arrays, share: range, reader: Reader, sent: dict[str, Sent]) -> TextBatch:
    batch = _empty_text((len(share), plan.shape.lengths[LLM]), arrays, {e: s.send for e, s in sent.items()})
    sources = reader.source_of(plan.samples)
    samples, spans = np.zeros(len(share), np.int32), np.zeros(len(share), np.int32)
    for index, sample in enumerate(plan.samples.tolist()):
        part, end = plan.part_start[index : index + 2]
        row = plan.row[part] - share.start
        if not 0 <= row < len(share):
            continue
        at = slice(plan.offset[part], plan.offset[part] + plan.length[part])
        with _naming(f"sample {reader.name(sample)}"):
            places = [_place(plan, arrays, item, sent) for item in range(part + 1, end)]
            if arrays.axes:
                places = _with_grids(places, arrays, reader.facts(sample))
            _write_sample(_stretch(batch, row, at), reader.sample(sample), arrays, places, spans[row])
        batch.sample[row, at], batch.source[row, at] = samples[row], sources[index]
        batch.owner[row, at], batch.offset[row, at] = sample, np.arange(plan.length[part])
        samples[row] += 1
        spans[row] += end - part - 1
    return batch


def _empty_text(shape: tuple[int, int], arrays: Arrays, send: dict[str, np.ndarray]) -> TextBatch:
    def full(value: int, *more: int) -> np.ndarray:
        return np.full((*shape, *more), value, np.int32)

    def mixed() -> Mixed:
        return Mixed(full(PADDING, CORNERS), np.zeros((*shape, CORNERS), np.float32))

    return TextBatch(
        token=full(0),
        target=full(0),
        weight=np.zeros(shape, np.float32),
        position=np.zeros((*shape, arrays.axes) if arrays.axes else shape, np.int32),
        sample=full(PADDING),
        pos=np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
        span=full(0),
        kind=full(0),
        sees=full(0),
        source=full(PADDING),
        owner=full(PADDING),
        offset=full(0),
        slots={name: mixed() if interpolates(encoder) else full(PADDING) for name, encoder in arrays.encoders.items()},
        send=send,
    )


def _stretch(batch: TextBatch, row: int, at: slice) -> TextBatch:
    """Views `[n]` of the part of a row that a sample gets."""
    views = {f: getattr(batch, f)[row, at] for f in TextBatch._fields if f not in ("slots", "send")}
    slots = {
        e: Mixed(*(of[row, at] for of in s)) if isinstance(s, Mixed) else s[row, at] for e, s in batch.slots.items()
    }
    return TextBatch(**views, slots=slots, send={})


def _place(plan: MicrobatchPlan, arrays: Arrays, part: int, sent: dict[str, Sent]) -> Place:
    encoder = list(arrays.encoders)[int(plan.module[part]) - 1]
    config = arrays.encoders[encoder]
    tokens = int(plan.length[part]) // positions_per_token(config) - hidden_tokens(config)
    return Place(encoder, int(sent[encoder].slot[part]), tokens, sent[encoder].newline)


def _with_grids(places: Sequence[Place], arrays: Arrays, facts: Facts) -> list[Place]:
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


def _write_sample(row: TextBatch, sample: Sample, arrays: Arrays, places: Sequence[Place], first_span: int) -> None:
    """Write one sample into its stretch of a row (views `[n]`). ValueError where it isn't what was promised.

    A position goes on from where its branch is; a new branch begins where branch 0 is. Where positions have axes, an
    image's are its rows and columns, and what follows goes on behind the longer of both (Qwen2-VL). A token is the
    target of the one before it in its own branch; items stand in branch 0, so an item's last token predicts the text
    after it there.
    """
    lengths = _checked_lengths(sample, arrays, places, len(row.token))
    position: dict[int, int] = {0: 0}  # that follows in each branch
    last: dict[int, int] = {}  # index of the last token of each branch
    at = 0
    for segment, n in zip(sample.segments, lengths, strict=True):
        branch = segment.branch if isinstance(segment, Text) else 0
        begin = position.get(branch, position[0]) if segment.start is None else segment.start
        here = slice(at, at + n)
        along = np.arange(n)
        if isinstance(segment, Text):
            _write_text(row, here, segment, arrays, last.get(branch))
        else:
            _write_tokens(row, here, segment, places, arrays, first_span + segment.number + 1)
            if isinstance(segment, Item) and (grid := places[segment.number].grid) is not None:
                along = np.stack(np.unravel_index(along, grid), axis=-1)
        row.position[here] = begin + (along[:, None] if arrays.axes and along.ndim == 1 else along)
        position[branch] = begin + along.max(initial=-1) + 1
        at += n
        if n:
            last[branch] = at - 1


def _write_text(row: TextBatch, here: slice, text: Text, arrays: Arrays, before: int | None) -> None:
    """Tokens, whom they see, and what they predict. `before` is the index of the token before them in their branch.

    Branches see branch 0 and themselves: each has a kind of its own, so the mask spec needs nothing more.
    """
    own = 1 << (FIRST_BRANCH_BIT + text.branch - 1) if text.branch else TEXT_KIND
    row.token[here], row.kind[here], row.sees[here] = text.tokens, own, _everyone(arrays) | own
    predict = slice(here.start, max(here.stop - 1, here.start))
    row.target[predict], row.weight[predict] = text.tokens[1:], text.weights[1:]
    if before is not None and len(text.tokens):
        row.target[before], row.weight[before] = text.tokens[0], text.weights[0]
    elif len(text.tokens) and text.weights[0]:
        raise ValueError(f"the first token of branch {text.branch} has a loss weight, but none before it predicts it")


def _write_tokens(
    row: TextBatch, here: slice, segment: Item | Arranged, places: Sequence[Place], arrays: Arrays, span: int
) -> None:
    """Tokens of items: where they come from, and how they see each other and what is before them."""
    encoder, of = segment.encoder, places[segment.number : segment.number + _items(segment)]
    came = np.concatenate([np.arange(place.slot, place.slot + place.tokens) for place in of])
    slots, shares = came[:, None], np.ones((1, 1), np.float32)
    if isinstance(segment, Arranged):
        codes = np.array([of[0].newline, PADDING])  # at the end, as NEWLINE and NOTHING count from there
        slots, shares = np.concatenate([came, codes])[segment.tokens.token], segment.tokens.share
    into = row.slots[encoder]
    if isinstance(into, Mixed):
        into.slot[here, : slots.shape[1]], into.share[here, : slots.shape[1]] = slots, shares
    else:
        into[here] = slots[:, 0]
    row.kind[here] = arrays.bit(encoder)
    row.sees[here] = 0 if arrays.items == "isolated" else _everyone(arrays)
    row.span[here] = 0 if arrays.items == "causal" else span


def _items(segment: Item | Arranged) -> int:
    return segment.items if isinstance(segment, Arranged) else 1


def _tokens_of(segment: Item | Arranged, places: Sequence[Place], arrays: Arrays) -> int:
    """Tokens of the LLM that a segment takes. ValueError where they are arranged as they cannot be."""
    if isinstance(segment, Item):
        return places[segment.number].tokens
    token, have = segment.tokens.token, sum(p.tokens for p in places[segment.number :][: segment.items])
    if not NEWLINE <= token.min(initial=NOTHING) <= token.max(initial=NOTHING) < have:
        raise ValueError(
            f"its items from {segment.number} on have {have} tokens; it places {token.min()} to {token.max()}"
        )
    if (token == NEWLINE).any() and not arrays.newline(segment.encoder):
        raise ValueError(f"it places newlines, and connector.newline of {segment.encoder!r} is false")
    if not interpolates(arrays.encoders[segment.encoder]) and (token[:, 1:] != NOTHING).any():
        raise ValueError(f"it mixes tokens of {segment.encoder!r}, whose images say nothing of interpolation")
    return len(segment.tokens)


def _everyone(arrays: Arrays) -> int:
    """The kinds of branch 0: text and all encoders."""
    return (TEXT_KIND << 1 + len(arrays.encoders)) - 1


def _checked_lengths(sample: Sample, arrays: Arrays, places: Sequence[Place], promised: int) -> list[int]:
    """Tokens of each segment. ValueError where the sample isn't what its source's facts() say, or can't be written."""
    lengths, numbers = [], []
    for segment in sample.segments:
        if not isinstance(segment, Text):
            for number in range(segment.number, segment.number + _items(segment)):
                if number >= len(places) or places[number].encoder != segment.encoder:
                    raise ValueError(f"its item {number} of {segment.encoder!r} is not in its source's facts()")
                numbers.append(number)
            lengths.append(_tokens_of(segment, places, arrays))
            continue
        tokens, weights = segment.tokens, segment.weights
        lengths.append(len(tokens))
        if not 0 <= segment.branch <= MAX_BRANCHES:
            raise ValueError(f"it has a branch {segment.branch}; the attention mask tells 0 to {MAX_BRANCHES}")
        if len(tokens) != len(weights):
            raise ValueError(f"a text has {len(tokens)} tokens and {len(weights)} loss weights")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < arrays.vocab):
            raise ValueError(f"a token is {tokens.max()} or {tokens.min()}; model.llm.vocab={arrays.vocab} has no such")
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("a loss weight is negative, NaN or Inf")
    if sorted(numbers) != list(range(len(places))):
        raise ValueError(f"it places the items {numbers}, but its source's facts() have {len(places)}; each goes once")
    if sum(lengths) != promised:
        raise ValueError(f"it has {sum(lengths)} tokens where its source's facts() promised {promised}")
    return lengths
