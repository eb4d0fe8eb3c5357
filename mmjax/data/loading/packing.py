"""Pack a planned microbatch into arrays, opening and decoding only the samples of the wanted rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.balance.rearrangement import Places, Rearrangement, pack_places, tables
from mmjax.batch import PADDING, TEXT_KIND, TIME, TOKEN_FIELDS, ItemBatch, Microbatch, TextBatch, WeightedSlots
from mmjax.config import AudioConfig, Generator, ModelConfig, PixelLatents, VisionConfig
from mmjax.data.media.anyres_layout import interpolates_tokens
from mmjax.data.media.patches import encoder_input, generator_input, hidden_tokens, positions_per_token, token_grid
from mmjax.data.plan.placement import MicrobatchPlan
from mmjax.data.sample import CORNERS, NEWLINE, NO_TOKEN, ArrangedItems, Item, Sample, SampleLengths, Text
from mmjax.errors import UserError

# Bits of `kind` and `sees`: text, then the encoders and generators, then the branches of a sample.
FIRST_BRANCH_BIT = 12
MAX_MODULES = FIRST_BRANCH_BIT - 1
MAX_BRANCHES = 30 - FIRST_BRANCH_BIT


@dataclass(frozen=True)
class Arrays:
    """The layout of a batch's arrays: the modules in their order, and how an item's tokens attend in the LLM."""

    encoders: dict[str, VisionConfig | AudioConfig]
    items: str  # DecoderConfig.items
    vocab: int
    in_order: bool = False  # layers read a sample's tokens one after the other, so it can have no branches
    axes: int = 0  # of a position: (t, y, x) for an LLM with rotary sections; 0 = it is one number
    generators: dict[str, Generator] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelConfig) -> Arrays:
        """Lay out the arrays of a model's batches. Raises UserError where the mask cannot tell its modules apart."""
        if (count := len(model.item_modules)) > MAX_MODULES:
            raise UserError(f"model has {count} encoders and generators; the attention mask tells {MAX_MODULES} apart")
        return cls(
            encoders=dict(model.encoders),
            items=model.llm.items,
            vocab=model.llm.vocab,
            in_order=model.llm.delta_net is not None,
            axes=len(model.llm.rope_sections),
            generators=dict(model.generators),
        )

    @property
    def modules(self) -> dict[str, VisionConfig | AudioConfig | Generator]:
        """Return the modules whose rows hold items, in the model's order."""
        return {**self.encoders, **self.generators}

    def features(self, module: str) -> int:
        """Return the width of one patch or frame."""
        config = self.modules[module]
        return config.mels if isinstance(config, AudioConfig) else config.patch_values

    def dtype(self, module: str) -> type:
        """Return the dtype of the patches or frames."""
        config = self.modules[module]
        pixels = (
            isinstance(config.latents, PixelLatents)
            if isinstance(config, Generator)
            else isinstance(config, VisionConfig)
        )
        return np.uint8 if pixels else np.float32

    def newline(self, encoder: str) -> bool:
        """Tell whether the connector has a newline token, which follows every row of an image."""
        return self.encoders[encoder].connector.newline

    def bit(self, module: str) -> int:
        """Return the kind bit of the tokens of a module's items."""
        return TEXT_KIND << 1 + list(self.modules).index(module)


class Place(NamedTuple):
    """The slots from which an item's tokens come."""

    encoder: str
    slot: int  # of the first, in what the rank of its sample got and made
    tokens: int
    newline: int = PADDING  # where that of the encoder's connector is among them
    grid: tuple[int, int, int] | None = None  # of an image where positions have axes: times, rows, columns of tokens


def empty_text(shape: tuple[int, int], arrays: Arrays, send: dict[str, np.ndarray]) -> TextBatch:
    """Make rows `[R, T]` with nothing in them."""

    def full(value: int, *trailing: int) -> np.ndarray:
        return np.full((*shape, *trailing), value, np.int32)

    def mixed() -> WeightedSlots:
        return WeightedSlots(full(PADDING, CORNERS), np.zeros((*shape, CORNERS), np.float32))

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
        slots={
            name: mixed() if name in arrays.encoders and interpolates_tokens(module) else full(PADDING)
            for name, module in arrays.modules.items()
        },
        send=send,
    )


def stretch(batch: TextBatch, row: int, span: slice) -> TextBatch:
    """Return views `[n]` of the part of a row that a sample gets."""
    slots = {}
    for encoder, rows in batch.slots.items():
        if isinstance(rows, WeightedSlots):
            slots[encoder] = WeightedSlots(rows.slot[row, span], rows.share[row, span])
        else:
            slots[encoder] = rows[row, span]
    views = {f: getattr(batch, f)[row, span] for f in TOKEN_FIELDS}
    return TextBatch(**views, slots=slots, send={})


def write_sample(row: TextBatch, sample: Sample, arrays: Arrays, places: Sequence[Place], first_span: int) -> None:
    """Write one sample into its stretch of a row (views `[n]`). ValueError where it isn't what was promised.

    A position goes on from where its branch is; a new branch begins where branch 0 is. Where positions have axes, an
    image's are its rows and columns, and what follows goes on behind the longer of both (Qwen2-VL). A video's temporal
    patches have the same rows and columns, and times of their own, behind which text goes on as its `text_after` says.
    A token is the target of the one before it in its own branch; items stand in branch 0, so an item's last token
    predicts the text after it there.

    With `items` "prefix" all that precedes the first trained token is one span, which attends both ways (PaliGemma).
    """
    lengths = _checked_lengths(sample, arrays, places, len(row.token))
    position: dict[int, int] = {0: 0}  # of the next token in each branch
    last: dict[int, int] = {}  # index of the last token of each branch
    offset = 0
    begin = 0
    for segment, n in zip(sample.segments, lengths, strict=True):
        branch = segment.branch if isinstance(segment, Text) else 0
        grid = places[segment.number].grid if isinstance(segment, Item) and segment.part is None else None
        together = isinstance(segment, Item) and bool(segment.patch and arrays.axes)
        if not together:  # else it begins where the piece of the video before it did
            begin = position.get(branch, position[0]) if segment.start is None else segment.start
        span = slice(offset, offset + n)
        along = np.arange(n)  # positions within the segment; `[n, 3]` for an image's grid where positions have axes
        if isinstance(segment, Text):
            begin -= segment.back
            _write_text(row, span, segment, arrays, last.get(branch))
        else:
            _write_tokens(row, span, segment, places, arrays, first_span + segment.number + 1)
            if grid is not None:
                along = np.stack(np.unravel_index(along, grid), axis=-1)
            elif together and segment.part:
                along = along + segment.part[0]
        reached = along.max(initial=-1)
        if grid is not None:
            along[:, TIME] += segment.time
            reached = along.max() if segment.text_after == "time" else reached
        position[branch] = begin + reached + 1
        row.position[span] = begin + (along[:, None] if arrays.axes and along.ndim == 1 else along)
        offset += n
        if n:
            last[branch] = offset - 1
    if arrays.items == "prefix":
        row.span[: _prefix(sample, lengths)] = first_span + 1


def _prefix(sample: Sample, lengths: Sequence[int]) -> int:
    """Count the tokens of branch 0 before the first that is trained on."""
    count = 0
    for segment, n in zip(sample.segments, lengths, strict=True):
        if isinstance(segment, Text):
            if segment.branch:
                break
            trained = np.flatnonzero(segment.weights)
            if len(trained):
                return count + int(trained[0])
        count += n
    return count


def _write_text(row: TextBatch, span: slice, text: Text, arrays: Arrays, previous: int | None) -> None:
    """Write tokens, whom they see and what they predict. previous: index of the token before them in their branch.

    Branches see branch 0 and themselves: each has a kind of its own, so the mask spec needs nothing more.
    """
    kind = 1 << (FIRST_BRANCH_BIT + text.branch - 1) if text.branch else TEXT_KIND
    row.token[span] = text.tokens
    row.kind[span] = kind
    row.sees[span] = _everyone(arrays) | kind
    # Tokens 5, 6, 7 at 10 to 12: 10 predicts 6, 11 predicts 7; 12 has no target unless text of its branch follows.
    predict = slice(span.start, max(span.stop - 1, span.start))
    row.target[predict] = text.tokens[1:]
    row.weight[predict] = text.weights[1:]
    if previous is not None and len(text.tokens):
        row.target[previous] = text.tokens[0]
        row.weight[previous] = text.weights[0]
    elif len(text.tokens) and text.weights[0]:
        raise ValueError(f"the first token of branch {text.branch} has a loss weight, but none before it predicts it")


def _write_tokens(
    row: TextBatch, span: slice, segment: Item | ArrangedItems, places: Sequence[Place], arrays: Arrays, group: int
) -> None:
    """Write items' tokens: their slots, and how they see each other and what is before them. group: their `span`."""
    encoder = segment.encoder
    item_places = places[segment.number : segment.number + _items(segment)]
    item_slots = np.concatenate([np.arange(place.slot, place.slot + place.tokens) for place in item_places])
    if isinstance(segment, Item) and segment.part:
        item_slots = item_slots[slice(*segment.part)]
    slots = item_slots[:, None]
    shares = np.ones((1, 1), np.float32)
    if isinstance(segment, ArrangedItems):
        codes = np.array([item_places[0].newline, PADDING])  # at the end, as NEWLINE and NO_TOKEN count from there
        slots = np.concatenate([item_slots, codes])[segment.tokens.token]
        shares = segment.tokens.share
    into = row.slots[encoder]
    if isinstance(into, WeightedSlots):
        into.slot[span, : slots.shape[1]] = slots
        into.share[span, : slots.shape[1]] = shares
    else:
        into[span] = slots[:, 0]
    row.kind[span] = arrays.bit(encoder)
    is_query = encoder in arrays.generators  # queries of an image to be made, which attend as text does
    row.sees[span] = 0 if arrays.items == "isolated" and not is_query else _everyone(arrays)
    row.span[span] = group if arrays.items in ("bidirectional", "isolated") and not is_query else 0


def _items(segment: Item | ArrangedItems) -> int:
    return segment.items if isinstance(segment, ArrangedItems) else 1


def _tokens_of(segment: Item | ArrangedItems, places: Sequence[Place], arrays: Arrays) -> int:
    """Count the tokens of the LLM that a segment takes. ValueError where they are arranged as they cannot be."""
    if isinstance(segment, Item):
        return segment.part[1] - segment.part[0] if segment.part else places[segment.number].tokens
    token = segment.tokens.token
    have = sum(p.tokens for p in places[segment.number :][: segment.items])
    if not NEWLINE <= token.min(initial=NO_TOKEN) <= token.max(initial=NO_TOKEN) < have:
        first, last = token[token != NO_TOKEN].min(), token.max()
        raise ValueError(
            f"its items from {segment.number} on have {have} tokens, and it places those from {first} to {last}"
        )
    if (token == NEWLINE).any() and not arrays.newline(segment.encoder):
        raise ValueError(f"it places newlines, and connector.newline of {segment.encoder!r} is false")
    if segment.encoder in arrays.generators:
        raise ValueError(f"it arranges tokens of {segment.encoder!r}, which makes images")
    if not interpolates_tokens(arrays.encoders[segment.encoder]) and (token[:, 1:] != NO_TOKEN).any():
        raise ValueError(f"it mixes tokens of {segment.encoder!r}, whose images say nothing of interpolation")
    return len(segment.tokens)


def _everyone(arrays: Arrays) -> int:
    """Return the kinds of branch 0: text, all encoders and all generators."""
    return (TEXT_KIND << 1 + len(arrays.modules)) - 1


def _checked_lengths(sample: Sample, arrays: Arrays, places: Sequence[Place], promised: int) -> list[int]:
    """Count segments' tokens. ValueError where the sample isn't what its source's facts() say or can't be written."""
    lengths: list[int] = []
    numbers: list[int] = []
    placed: dict[int, int] = {}  # tokens of items that stand in parts
    for segment in sample.segments:
        if not isinstance(segment, Text):
            for number in range(segment.number, segment.number + _items(segment)):
                if number >= len(places) or places[number].encoder != segment.encoder:
                    raise ValueError(f"its item {number} of {segment.encoder!r} is not in its source's facts()")
                if isinstance(segment, Item) and segment.part:
                    first, placed_so_far = segment.part[0], placed.get(number, 0)
                    if first != placed_so_far:
                        raise ValueError(f"a part of its item {number} begins at token {first}, not {placed_so_far}")
                    placed[number] = segment.part[1]
                    if placed[number] < places[number].tokens:  # more parts follow
                        continue
                numbers.append(number)
            lengths.append(_tokens_of(segment, places, arrays))
            continue
        tokens = segment.tokens
        weights = segment.weights
        lengths.append(len(tokens))
        if not 0 <= segment.branch <= MAX_BRANCHES:
            raise ValueError(f"it has a branch {segment.branch}; the attention mask tells 0 to {MAX_BRANCHES}")
        if segment.branch and arrays.in_order:
            raise ValueError(
                f"it has a branch {segment.branch}, and a gated delta net (model.llm.delta_net) reads all tokens in "
                "order; make each branch a sample of its own"
            )
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


@dataclass(frozen=True)
class Reader:
    """Access to samples, their lengths and their items by global id."""

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
    encoder_ranks: range | Mapping[str, range] | None = None,
    spoiled: dict[int, str] | None = None,
) -> Microbatch:
    """Pack the rows of `plan` on these ranks (all), and of items on these encoder ranks (those of the ranks).

    encoder_ranks: of all encoders, or by encoder.

    A sample that can't be read, or is not what the length index promised, goes into `spoiled` with the reason; what
    of it was read stays in its place, and must weigh nothing. Without `spoiled` it is a UserError that names it.
    """
    ranks = range(plan.topology.ranks) if ranks is None else ranks
    parts = plan.topology.encoders_per_rank
    encoder_ranks = range(ranks.start * parts, ranks.stop * parts) if encoder_ranks is None else encoder_ranks
    if isinstance(encoder_ranks, range):
        encoder_ranks = dict.fromkeys(arrays.modules, encoder_ranks)
    shares = {m: _share(encoder_ranks[m], plan.rows[k] // parts) for k, m in enumerate(arrays.modules, start=1)}
    sent = {encoder: _sent(plan, k, arrays, encoder, ranks) for k, encoder in enumerate(arrays.encoders, start=1)}
    items = {
        module: _pack_items(plan, k, arrays, module, shares[module], reader, spoiled)
        for k, module in enumerate(arrays.modules, start=1)
    }
    queries = np.zeros(len(plan.module), np.int64)
    text = _pack_text(plan, arrays, _share(ranks, plan.rows[LLM]), reader, sent, queries, spoiled)
    for k, name in enumerate(arrays.generators, start=1 + len(arrays.encoders)):
        text.send[name], condition = _conditions(plan, k, arrays, name, ranks, shares[name], queries)
        items[name] = items[name]._replace(condition=condition)
    return Microbatch(text, items)


def _share(ranks: range, rows: int) -> range:
    """Return the rows of these ranks, where each has so many."""
    return range(ranks.start * rows, ranks.stop * rows)


class Sent(NamedTuple):
    """The exchange of an encoder's tokens: what is sent, and where in the text's input the items arrive."""

    send: np.ndarray  # int32 [ranks * context, peers, width], as in TextBatch
    # int64 [p], of the first token of each of the encoder's items that arrive or stay here, in the arrays of all
    # devices of its rank, one after the other.
    slot: np.ndarray
    newline: int  # slot of the connector's, which every row of a rank ends with: that of its own first row


def _sent(plan: MicrobatchPlan, module: int, arrays: Arrays, encoder: str, ranks: range) -> Sent:
    """Plan the all-to-all of one encoder: from where its items are encoded to the rank of their sample."""
    peers = plan.topology.peers
    width = plan.shape.widths[module - 1]
    length = plan.shape.lengths[module]
    group = positions_per_token(arrays.encoders[encoder])
    ranks_in_all, context = plan.topology.ranks, plan.topology.context
    rows = plan.rows[module] // context  # of each of the devices that a rank is
    items = np.flatnonzero(plan.module == module)
    tokens = plan.length[items] // group - hidden_tokens(arrays.encoders[encoder])
    rank = plan.rank()
    device, row = np.divmod(plan.row[items] % plan.rows[module], rows)
    # Devices of one number exchange with each other: those of number 0 come first, by rank, then those of number 1.
    first_of_number = device * ranks_in_all
    encoded = first_of_number + rank[items]
    home = first_of_number + rank[plan.part_start[:-1]][plan.sample_of()][items]
    # With 2 peers of width 3 and rows of 8 positions at 4 a token: slots 0 to 5 arrive, 6 and 7 are the rank's first
    # row, 8 is its newline (if the connector has one), and the next row begins behind it.
    newline = peers * width + length // group
    row_tokens = length // group + arrays.newline(encoder)
    first = row * np.int64(row_tokens) + plan.offset[items] // group
    arrived = pack_places(tokens, home, ranks_in_all * context)
    moved = Rearrangement(tokens, Places(encoded, first), arrived, ranks_in_all * context)
    capacity = int((arrived.offset + tokens).max(initial=1))
    slot = np.full(len(plan.module), PADDING, np.int64)
    send = np.full((len(ranks), context, peers, width), PADDING, np.int32)
    for number, node in product(range(context), range(ranks.start // peers, -(-ranks.stop // peers))):
        first_rank = number * ranks_in_all
        among = range(first_rank + node * peers, first_rank + (node + 1) * peers)
        mine = range(max(first_rank + ranks.start, among.start), min(first_rank + ranks.stop, among.stop))
        exchange = tables(moved, width, capacity, mine, among)
        local = (home >= mine.start) & (home < mine.stop)
        slots = exchange.gather[home[local] - mine.start, arrived.offset[local]]
        slot[items[local]] = number * (peers * width + rows * row_tokens) + slots
        begin = mine.start - first_rank - ranks.start
        send[begin : begin + len(mine), number] = exchange.send
    return Sent(send.reshape(len(ranks) * context, peers, width), slot, newline if arrays.newline(encoder) else PADDING)


def _conditions(
    plan: MicrobatchPlan, module: int, arrays: Arrays, name: str, ranks: range, share: range, queries: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Plan the all-to-all of one generator: from where the hidden states of its images' queries are to its rows.

    queries: int64 `[p]`, as in `_pack_text`. share: the generator's rows. Returns `TextBatch.send` and
    `ItemBatch.condition`.
    """
    peers, in_all = plan.topology.peers, plan.topology.ranks
    width = plan.shape.widths[module - 1]
    count = arrays.generators[name].queries
    images = arrays.generators[name].most_images(plan.shape.lengths[module])
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
    moved = Rearrangement(tokens, Places(home_rank, queries[items]), Places(rank[items], column), in_all)
    capacity = plan.rows[module] * images * count
    send = np.full((len(ranks), peers, width), PADDING, np.int32)
    condition = np.full((len(ranks), capacity), PADDING, np.int32)
    for node in range(ranks.start // peers, -(-ranks.stop // peers)):
        among = range(node * peers, (node + 1) * peers)
        mine = range(max(ranks.start, among.start), min(ranks.stop, among.stop))
        exchange = tables(moved, width, capacity, mine, among)
        local = slice(mine.start - ranks.start, mine.stop - ranks.start)
        send[local], condition[local] = exchange.send, exchange.gather
    condition = condition.reshape(len(ranks) * plan.rows[module], images * count)
    first = ranks.start * plan.rows[module]
    return send, condition[share.start - first : share.stop - first]


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
    owner = np.full(shape, PADDING, np.int32)
    offset = np.zeros(shape, np.int32)
    in_row = np.zeros(len(share), np.int32)  # items that each row has so far
    sample_of = plan.sample_of()
    preceding = _before_in_sample(plan, module, sample_of)
    local = (plan.module == module) & (plan.row >= share.start) & (plan.row < share.stop)
    for part in np.flatnonzero(local):
        sample = int(plan.samples[sample_of[part]])
        number = int(part - plan.part_start[sample_of[part]] - 1)  # part_start is the sample's LLM part
        row = plan.row[part] - share.start
        length = plan.length[part]
        span = slice(plan.offset[part], plan.offset[part] + length)
        owner[row, span] = sample
        offset[row, span] = preceding[part] + np.arange(length)
        with _reading(reader, sample, spoiled, f"item {number} ({encoder})"):
            decoded = reader.item(sample, number)
            if encoder in arrays.generators:
                value, place, valid = generator_input(arrays.generators[encoder], decoded)
            else:
                value, place, valid = encoder_input(arrays.encoders[encoder], decoded)
            if len(value) != length:
                raise ValueError(f"it has {len(value)} positions where its source's facts() promised {length}")
            if value.dtype != np.uint8 and not np.isfinite(value).all():
                raise ValueError("it holds NaN or Inf; mend the file or leave the sample out of its source")
            values[row, span] = value
            coordinates[row, span] = place
            item[row, span] = np.where(valid, in_row[row], PADDING)
            in_row[row] += 1
    return ItemBatch(values, item, coordinates, owner, offset)


def _before_in_sample(plan: MicrobatchPlan, module: int, sample_of: np.ndarray) -> np.ndarray:
    """Count the positions of this module that the parts before each one take in its sample, int64 `[p]`."""
    length = np.where(plan.module == module, plan.length, 0)
    preceding = np.cumsum(length) - length
    return preceding - preceding[plan.part_start[:-1]][sample_of]


# ------------------------------------------------------------------------------------------------------------- text


def _pack_text(
    plan: MicrobatchPlan,
    arrays: Arrays,
    share: range,
    reader: Reader,
    sent: dict[str, Sent],
    queries: np.ndarray,
    spoiled: dict[int, str] | None,
) -> TextBatch:
    """Pack the text. queries: int64 `[p]`, gets the place of each generator's item's first query among its rank's."""
    batch = empty_text((len(share), plan.shape.lengths[LLM]), arrays, {e: s.send for e, s in sent.items()})
    sources = reader.source_of(plan.samples)
    # Samples and items that each row has so far: they number the next sample and its items' attention spans.
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
                queries[part + 1 : end] = begin + _item_offsets(contents, arrays, places)
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
        offset += len(segment.tokens) if isinstance(segment, Text) else _tokens_of(segment, places, arrays)
    return offsets


def _place(plan: MicrobatchPlan, arrays: Arrays, part: int, sent: dict[str, Sent]) -> Place:
    encoder = list(arrays.modules)[int(plan.module[part]) - 1]
    if encoder in arrays.generators:
        return Place(encoder, 0, arrays.generators[encoder].queries)
    config = arrays.encoders[encoder]
    tokens = int(plan.length[part]) // positions_per_token(config) - hidden_tokens(config)
    return Place(encoder, int(sent[encoder].slot[part]), tokens, sent[encoder].newline)


def _with_grids(places: Sequence[Place], arrays: Arrays, facts: SampleLengths) -> list[Place]:
    """Give every image's place its grid, by the sizes in its source's facts. ValueError where they have changed."""
    if len(places) != len(facts.items):
        raise ValueError(f"its source's facts() have {len(facts.items)} items and promised {len(places)}")
    placed = []
    for number, (place, (_, size)) in enumerate(zip(places, facts.items, strict=True)):
        encoder = arrays.modules[place.encoder]
        grid = token_grid(encoder, size) if isinstance(encoder, VisionConfig) else None
        if grid is not None and math.prod(grid) != place.tokens:
            raise ValueError(
                f"its item {number} has {place.tokens} tokens, and by its source's facts() the size {size}"
            )
        placed.append(place._replace(grid=grid))
    return placed
