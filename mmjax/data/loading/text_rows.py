"""A sample's tokens, and the places of its items' tokens, written into a row of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmjax.batch import PADDING, TextBatch, WeightedSlots
from mmjax.config import AudioConfig, ModelConfig, VisionConfig
from mmjax.data.media.anyres_layout import CORNERS, NEWLINE, NO_TOKEN, interpolates_tokens
from mmjax.data.sample import ArrangedItems, Item, Sample, Text
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


class Place(NamedTuple):
    """Where an item's tokens come from."""

    encoder: str
    slot: int  # of the first, in what the rank of its sample got and made
    tokens: int
    newline: int = PADDING  # where that of the encoder's connector is among them
    grid: tuple[int, int, int] | None = None  # of an image where positions have axes: times, rows, columns of tokens


def empty_text(shape: tuple[int, int], arrays: Arrays, send: dict[str, np.ndarray]) -> TextBatch:
    """Rows `[R, T]` with nothing in them."""

    def full(value: int, *more: int) -> np.ndarray:
        return np.full((*shape, *more), value, np.int32)

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
            name: mixed() if interpolates_tokens(encoder) else full(PADDING)
            for name, encoder in arrays.encoders.items()
        },
        send=send,
    )


def stretch(batch: TextBatch, row: int, at: slice) -> TextBatch:
    """Views `[n]` of the part of a row that a sample gets."""
    slots = {}
    for encoder, of in batch.slots.items():
        slots[encoder] = (
            WeightedSlots(of.slot[row, at], of.share[row, at]) if isinstance(of, WeightedSlots) else of[row, at]
        )
    views = {f: getattr(batch, f)[row, at] for f in TextBatch._fields if f not in ("slots", "send")}
    return TextBatch(**views, slots=slots, send={})


def write_sample(row: TextBatch, sample: Sample, arrays: Arrays, places: Sequence[Place], first_span: int) -> None:
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
    row: TextBatch, here: slice, segment: Item | ArrangedItems, places: Sequence[Place], arrays: Arrays, span: int
) -> None:
    """Tokens of items: where they come from, and how they see each other and what is before them."""
    encoder, of = segment.encoder, places[segment.number : segment.number + _items(segment)]
    came = np.concatenate([np.arange(place.slot, place.slot + place.tokens) for place in of])
    slots, shares = came[:, None], np.ones((1, 1), np.float32)
    if isinstance(segment, ArrangedItems):
        codes = np.array([of[0].newline, PADDING])  # at the end, as NEWLINE and NOTHING count from there
        slots, shares = np.concatenate([came, codes])[segment.tokens.token], segment.tokens.share
    into = row.slots[encoder]
    if isinstance(into, WeightedSlots):
        into.slot[here, : slots.shape[1]], into.share[here, : slots.shape[1]] = slots, shares
    else:
        into[here] = slots[:, 0]
    row.kind[here] = arrays.bit(encoder)
    row.sees[here] = 0 if arrays.items == "isolated" else _everyone(arrays)
    row.span[here] = 0 if arrays.items == "causal" else span


def _items(segment: Item | ArrangedItems) -> int:
    return segment.items if isinstance(segment, ArrangedItems) else 1


def _tokens_of(segment: Item | ArrangedItems, places: Sequence[Place], arrays: Arrays) -> int:
    """Tokens of the LLM that a segment takes. ValueError where they are arranged as they cannot be."""
    if isinstance(segment, Item):
        return places[segment.number].tokens
    token, have = segment.tokens.token, sum(p.tokens for p in places[segment.number :][: segment.items])
    if not NEWLINE <= token.min(initial=NO_TOKEN) <= token.max(initial=NO_TOKEN) < have:
        first, last = token[token != NO_TOKEN].min(), token.max()
        raise ValueError(
            f"its items from {segment.number} on have {have} tokens, and it places those from {first} to {last}"
        )
    if (token == NEWLINE).any() and not arrays.newline(segment.encoder):
        raise ValueError(f"it places newlines, and connector.newline of {segment.encoder!r} is false")
    if not interpolates_tokens(arrays.encoders[segment.encoder]) and (token[:, 1:] != NO_TOKEN).any():
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
