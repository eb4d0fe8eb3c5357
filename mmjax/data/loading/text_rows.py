"""Lay out the arrays of a batch's text rows and write samples into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmjax.batch import FIRST_BRANCH_BIT, PADDING, TIME, TOKEN_FIELDS, TextBatch, WeightedSlots
from mmjax.config import Config, CrossEntropy, Encoder, Generator, LossConfig, ModelConfig
from mmjax.data.loading.canvas import sample_canvas
from mmjax.data.plan.attended_pairs import MaskRules, prefix_tokens
from mmjax.data.sample import (
    CORNERS,
    MAX_BRANCHES,
    NEWLINE,
    NO_TOKEN,
    ArrangedItems,
    Item,
    Sample,
    Text,
)
from mmjax.errors import UserError

MAX_MODULES = FIRST_BRANCH_BIT - 1


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a batch's arrays: the modules in their order, and how an item's tokens attend in the LLM."""

    modules: dict[str, Encoder | Generator]  # whose rows hold items, in the model's order
    items: str  # DecoderConfig.items
    vocab: int
    in_order: bool = False  # layers read a sample's tokens one after the other
    branches: bool = False  # samples may have branches
    axes: int = 0  # of a position: (t, y, x) for an LLM with rotary sections; 0 = it is one number
    canvas_markers: tuple[int, ...] = ()  # DecoderConfig.canvas_markers
    loss: LossConfig = CrossEntropy()  # which says what a sample's branches must be

    @classmethod
    def of(
        cls, model: ModelConfig, loss: LossConfig = CrossEntropy(), branches: bool = False
    ) -> BatchLayout:
        """Lay out the arrays of a model's batches. Raises UserError where the mask cannot tell its modules apart.

        branches: samples may have branches, whatever the loss.
        """
        if (count := len(model.item_modules)) > MAX_MODULES:
            raise UserError(
                f"model has {count} encoders and generators; the attention mask tells {MAX_MODULES} apart"
            )
        return cls(
            modules=model.item_modules,
            items=model.llm.items,
            vocab=model.llm.vocab,
            in_order=model.llm.reads_in_order,
            branches=branches or loss.is_branched,
            axes=len(model.llm.rope_sections),
            canvas_markers=model.llm.canvas_markers,
            loss=loss,
        )

    @classmethod
    def of_config(cls, config: Config) -> BatchLayout:
        """Lay out the arrays of a run's batches. Raises UserError as `of` does."""
        return cls.of(config.model, config.loss, config.data.has_branches)

    def features(self, module: str) -> int:
        """Return the width of one patch or frame."""
        return self.modules[module].input_values

    def dtype(self, module: str) -> type:
        """Return the dtype of the patches or frames."""
        return np.uint8 if self.modules[module].takes_pixels else np.float32

    def newline(self, encoder: str) -> bool:
        """Tell whether the connector has a newline token, which follows every row of an image."""
        return self.modules[encoder].connector.newline

    @cached_property
    def rules(self) -> MaskRules:
        """Return how tokens attend."""
        return MaskRules.of(self.modules, self.items)

    def bit(self, module: str) -> int:
        """Return the kind bit of the tokens of a module's items."""
        return self.rules.bit(module)


class ItemSlots(NamedTuple):
    """The slots from which an item's tokens come."""

    encoder: str
    slot: int  # of the first, in what the rank of its sample got and made
    tokens: int
    newline: int = PADDING  # where that of the encoder's connector is among them
    # of an image where positions have axes: times, rows, columns of tokens
    grid: tuple[int, int, int] | None = None


def empty_text(
    shape: tuple[int, int], layout: BatchLayout, send: dict[str, np.ndarray]
) -> TextBatch:
    """Make rows `[R, T]` with nothing in them."""

    def full(value: int, *trailing: int) -> np.ndarray:
        return np.full((*shape, *trailing), value, np.int32)

    def mixed() -> WeightedSlots:
        return WeightedSlots(full(PADDING, CORNERS), np.zeros((*shape, CORNERS), np.float32))

    return TextBatch(
        token=full(0),
        target=full(0),
        weight=np.zeros(shape, np.float32),
        position=np.zeros((*shape, layout.axes) if layout.axes else shape, np.int32),
        sample=full(PADDING),
        pos=np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
        span=full(0),
        kind=full(0),
        sees=full(0),
        source=full(PADDING),
        owner=full(PADDING),
        offset=full(0),
        slots={
            name: mixed() if module.interpolates_tokens else full(PADDING)
            for name, module in layout.modules.items()
        },
        send=send,
        condition={},
        loss_inputs={name: np.zeros(shape, np.float32) for name in layout.loss.inputs},
        branches=() if layout.in_order and layout.branches else None,
    )


def row_view(batch: TextBatch, row: int, span: slice) -> TextBatch:
    """Return views `[n]` of the part of a row that a sample gets."""
    slots = {}
    for encoder, rows in batch.slots.items():
        if isinstance(rows, WeightedSlots):
            slots[encoder] = WeightedSlots(rows.slot[row, span], rows.share[row, span])
        else:
            slots[encoder] = rows[row, span]
    views = {f: getattr(batch, f)[row, span] for f in TOKEN_FIELDS}
    inputs = {name: rows[row, span] for name, rows in batch.loss_inputs.items()}
    return TextBatch(**views, slots=slots, send={}, loss_inputs=inputs)


def write_sample(
    row: TextBatch,
    sample: Sample,
    layout: BatchLayout,
    places: Sequence[ItemSlots],
    first_span: int,
) -> None:
    """Write one sample into its stretch of a row (views `[n]`). ValueError where it isn't what was promised.

    A position goes on from where its branch is; a new branch begins where branch 0 is. Where
    positions have axes, an image's are its rows and columns, and what follows goes on behind the
    longer of both (Qwen2-VL). A video's temporal patches have the same rows and columns, and times
    of their own, behind which text goes on as its `text_after` says. With `canvas_markers` all
    positions are those of `sample_canvas`. A token is the target of the one before it in its own
    branch; items stand in branch 0, so an item's last token predicts the text after it there.

    With `items` "prefix" all that precedes the first trained token is one span, which attends both
    ways (PaliGemma).
    """
    lengths = _checked_lengths(sample, layout, places, len(row.token))
    position: dict[int, int] = {0: 0}  # of the next token in each branch
    last: dict[int, int] = {}  # index of the last token of each branch
    offset = 0
    begin = 0
    for segment, n in zip(sample.segments, lengths, strict=True):
        branch = segment.branch if isinstance(segment, Text) else 0
        grid = (
            places[segment.number].grid
            if isinstance(segment, Item) and segment.part is None
            else None
        )
        continues = isinstance(segment, Item) and bool(segment.patch and layout.axes)
        if not continues:  # else it begins where the piece of the video before it did
            begin = position.get(branch, position[0]) if segment.start is None else segment.start
        span = slice(offset, offset + n)
        # positions within the segment; `[n, 3]` for an image's grid where positions have axes
        along = np.arange(n)
        if isinstance(segment, Text):
            begin -= segment.back
            _write_text(row, span, segment, layout, last.get(branch))
        else:
            _write_tokens(row, span, segment, places, layout, first_span + segment.number + 1)
            if grid is not None:
                along = np.stack(np.unravel_index(along, grid), axis=-1)
            elif continues and segment.part:
                along = along + segment.part[0]
        reached = along.max(initial=-1)
        if grid is not None:
            along[:, TIME] += segment.time
            reached = along.max() if segment.text_after == "time" else reached
        position[branch] = begin + reached + 1
        row.position[span] = begin + (along[:, None] if layout.axes and along.ndim == 1 else along)
        offset += n
        if n:
            last[branch] = offset - 1
    if layout.canvas_markers:
        grids = [place.grid for place in places]
        row.position[:] = sample_canvas(sample, lengths, grids, layout.canvas_markers)
    if layout.items == "prefix":
        row.span[: prefix_tokens(sample, lengths)] = first_span + 1


def _write_text(
    row: TextBatch, span: slice, text: Text, layout: BatchLayout, previous: int | None
) -> None:
    """Write tokens, whom they see and what they predict. previous: index of the token before them in their branch."""
    row.token[span] = text.tokens
    row.kind[span], row.sees[span] = layout.rules.text(text.branch)
    # Tokens 5, 6, 7 at 10 to 12: 10 predicts 6, 11 predicts 7; 12 has no target unless text of its
    # branch follows.
    predict = slice(span.start, max(span.stop - 1, span.start))
    row.target[predict] = text.tokens[1:]
    row.weight[predict] = text.weights[1:]
    for name in row.loss_inputs.keys() & text.loss_inputs.keys():
        row.loss_inputs[name][predict] = text.loss_inputs[name][1:]
    if previous is not None and len(text.tokens):
        row.target[previous] = text.tokens[0]
        row.weight[previous] = text.weights[0]
    elif len(text.tokens) and text.weights[0]:
        raise ValueError(
            f"the first token of branch {text.branch} has a loss weight, but none before it predicts it"
        )


def _write_tokens(
    row: TextBatch,
    span: slice,
    segment: Item | ArrangedItems,
    places: Sequence[ItemSlots],
    layout: BatchLayout,
    group: int,
) -> None:
    """Write items' tokens: their slots, and how they see each other and what is before them. group: their `span`."""
    encoder = segment.encoder
    item_places = places[segment.number : segment.number + _items(segment)]
    item_slots = np.concatenate(
        [np.arange(place.slot, place.slot + place.tokens) for place in item_places]
    )
    if isinstance(segment, Item) and segment.part:
        item_slots = item_slots[slice(*segment.part)]
    slots = item_slots[:, None]
    shares = np.ones((1, 1), np.float32)
    if isinstance(segment, ArrangedItems):
        # at the end, as NEWLINE and NO_TOKEN count from there
        codes = np.array([item_places[0].newline, PADDING])
        slots = np.concatenate([item_slots, codes])[segment.tokens.token]
        shares = segment.tokens.share
    into = row.slots[encoder]
    if isinstance(into, WeightedSlots):
        into.slot[span, : slots.shape[1]] = slots
        into.share[span, : slots.shape[1]] = shares
    else:
        into[span] = slots[:, 0]
    row.kind[span], row.sees[span], row.span[span] = layout.rules.item(encoder, group)


def _items(segment: Item | ArrangedItems) -> int:
    return segment.items if isinstance(segment, ArrangedItems) else 1


def llm_tokens(
    segment: Item | ArrangedItems, places: Sequence[ItemSlots], layout: BatchLayout
) -> int:
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
    if (token == NEWLINE).any() and not layout.newline(segment.encoder):
        raise ValueError(
            f"it places newlines, and connector.newline of {segment.encoder!r} is false"
        )
    if layout.modules[segment.encoder].is_generator:
        raise ValueError(f"it arranges tokens of {segment.encoder!r}, which makes images")
    if not layout.modules[segment.encoder].interpolates_tokens and (token[:, 1:] != NO_TOKEN).any():
        raise ValueError(
            f"it mixes tokens of {segment.encoder!r}, whose images say nothing of interpolation"
        )
    return len(segment.tokens)


def _checked_lengths(
    sample: Sample, layout: BatchLayout, places: Sequence[ItemSlots], promised: int
) -> list[int]:
    """Count segments' tokens. ValueError where the sample isn't what its source's facts() say or can't be written."""
    lengths: list[int] = []
    numbers: list[int] = []
    placed: dict[int, int] = {}  # tokens of items that stand in parts
    for segment in sample.segments:
        if not isinstance(segment, Text):
            for number in range(segment.number, segment.number + _items(segment)):
                if number >= len(places) or places[number].encoder != segment.encoder:
                    raise ValueError(
                        f"its item {number} of {segment.encoder!r} is not in its source's facts()"
                    )
                if isinstance(segment, Item) and segment.part:
                    first, placed_so_far = segment.part[0], placed.get(number, 0)
                    if first != placed_so_far:
                        raise ValueError(
                            f"a part of its item {number} begins at token {first}, not {placed_so_far}"
                        )
                    placed[number] = segment.part[1]
                    if placed[number] < places[number].tokens:  # more parts follow
                        continue
                numbers.append(number)
            lengths.append(llm_tokens(segment, places, layout))
            continue
        tokens = segment.tokens
        weights = segment.weights
        lengths.append(len(tokens))
        if not 0 <= segment.branch <= MAX_BRANCHES:
            raise ValueError(
                f"it has a branch {segment.branch}; the attention mask tells 0 to {MAX_BRANCHES}"
            )
        if len(tokens) != len(weights):
            raise ValueError(f"a text has {len(tokens)} tokens and {len(weights)} loss weights")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < layout.vocab):
            raise ValueError(
                f"a token is {tokens.max()} or {tokens.min()}; model.llm.vocab={layout.vocab} has no such"
            )
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("a loss weight is negative, NaN or Inf")
    if layout.in_order:
        _check_order(sample, layout.branches)
    _check_answers(sample, layout.loss)
    if sorted(numbers) != list(range(len(places))):
        raise ValueError(
            f"it places the items {numbers}, but its source's facts() have {len(places)}; each goes once"
        )
    if sum(lengths) != promised:
        raise ValueError(
            f"it has {sum(lengths)} tokens where its source's facts() promised {promised}"
        )
    return lengths


def _check_order(sample: Sample, branches: bool) -> None:
    """Check that layers can read each branch's tokens one after the other. Raises ValueError."""
    order = [
        segment.branch if isinstance(segment, Text) else 0
        for segment in sample.segments
        if not isinstance(segment, Text) or len(segment.tokens)
    ]
    begun = set(order[:1])
    for previous, branch in pairwise(order):
        if branch and branch != previous and branch in begun:
            raise ValueError(
                f"its branch {branch} goes on behind other tokens, and a layer without attention (model.llm.delta_net, "
                "convolution) reads a branch's tokens one after the other; put them together"
            )
        if previous and branch != previous and not branches:
            raise ValueError(
                f"it has tokens behind its branch {previous}, and a layer without attention (model.llm.delta_net, "
                "convolution) goes on from the last token of a prompt; leave out all branches but one"
            )
        begun.add(branch)


def _check_answers(sample: Sample, loss: LossConfig) -> None:
    """Check that a sample's branches are answers as the loss reads them. Raises ValueError."""
    if not loss.is_branched:
        return
    trained = [
        segment
        for segment in sample.segments
        if isinstance(segment, Text) and segment.weights.any()
    ]
    branches = [segment.branch for segment in trained]
    if (
        (loss.branches and branches != [*loss.branches])
        or 0 in branches
        or len(set(branches)) < len(branches)
    ):
        expected = (
            " and ".join(f"{what} in branch {number}" for number, what in loss.branches.items())
            or "answers"
        )
        raise ValueError(
            f"it trains text in the branches {branches}; loss={loss.kind} takes {expected}, one text each"
        )
    for name in loss.inputs:
        if any(
            len(segment.loss_inputs.get(name, ())) != len(segment.tokens) for segment in trained
        ):
            raise ValueError(
                f"its answers have no {name} of every token, which loss={loss.kind} reads"
            )
