"""Make a past step again from a run's folder and its data: what lay in each row, and where each item was encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from mmjax.balance.parts import LLM
from mmjax.batch import TOKEN_FIELDS, TextBatch, allowed, branch_gap
from mmjax.config import DecoderConfig
from mmjax.data.loading.batch_hash import hex_hash
from mmjax.data.loading.step_loader import LoadedStep, StepLoader
from mmjax.data.plan.placement import MicrobatchPlan
from mmjax.data.plan.step_plan import StepPlan
from mmjax.data.sample import Sample, Source, Text
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.toy.dataset import ALPHABET, END, EmbeddedDataset
from mmjax.data.toy.drawing import DrawnDigits


@dataclass(frozen=True)
class Piece:
    """A stretch of a sample's text, or the place of an item."""

    text: str
    trained: bool = False  # the loss is on it
    branch: int = 0
    item: int | None = None  # the number of the item that stands here
    tokens: tuple[int, ...] = ()  # of a text


@dataclass(frozen=True)
class PlacedItem:
    """The place at which an item was encoded."""

    number: int
    encoder: str
    rank: int
    row: int  # on that rank
    begin: int
    positions: int


@dataclass(frozen=True)
class PlacedSample:
    """A sample in a row of the LLM, from `begin` up to `end`."""

    id: int
    name: str
    begin: int
    end: int
    items: tuple[PlacedItem, ...]


@dataclass(frozen=True)
class PackedRow:
    """A row of the LLM."""

    microbatch: int
    rank: int
    row: int  # on that rank
    length: int
    samples: tuple[PlacedSample, ...]


@dataclass(frozen=True)
class Replayed:
    """Step `step` (the first is 0) as a loader of all rows makes it."""

    loader: StepLoader
    step: int

    @cached_property
    def plan(self) -> StepPlan:
        """Plan the placement of every sample; nothing is opened for it."""
        return self.loader.plan(self.step)

    @cached_property
    def loaded(self) -> LoadedStep:
        """Load all rows of all ranks."""
        return self.loader(self.step)

    @property
    def content(self) -> str:
        """Spell the hash of all rows as the log has it."""
        return hex_hash(int(self.loaded.content))

    def rows(self, rank: int | None = None) -> Iterator[PackedRow]:
        """Yield the rows of the LLM that hold something, of one rank or of all."""
        for number, plan in enumerate(self.plan.microbatches):
            llm = plan.part_start[:-1]
            for row in np.unique(plan.row[llm]):
                in_row = np.flatnonzero(plan.row[llm] == row)
                row_rank, row_on_rank = divmod(int(row), plan.rows[LLM])
                if rank in (None, row_rank):
                    samples = [
                        self._placed(plan, int(k))
                        for k in in_row[np.argsort(plan.offset[llm[in_row]])]
                    ]
                    yield PackedRow(
                        number, row_rank, row_on_rank, plan.shape.lengths[LLM], tuple(samples)
                    )

    def text_of(self, row: PackedRow) -> TextBatch:
        """Return the arrays of a row, `[T]`."""
        text = self.loaded.microbatches[row.microbatch].text
        index = row.rank * self.plan.microbatches[row.microbatch].rows[LLM] + row.row
        fields = {f: getattr(text, f)[index] for f in TOKEN_FIELDS}
        return TextBatch(**fields, slots={}, send={})

    def _placed(self, plan: MicrobatchPlan, k: int) -> PlacedSample:
        # its LLM part, then one part for each item
        first, stop = plan.part_start[k : k + 2].tolist()
        modules = list(self.loader.config.model.item_modules)
        items = []
        for part in range(first + 1, stop):
            module = int(plan.module[part])
            rank, row = divmod(int(plan.row[part]), plan.rows[module])
            item = PlacedItem(
                number=part - first - 1,
                encoder=modules[module - 1],
                rank=rank,
                row=row,
                begin=int(plan.offset[part]),
                positions=int(plan.length[part]),
            )
            items.append(item)
        sample = int(plan.samples[k])
        begin = int(plan.offset[first])
        end = begin + int(plan.length[first])
        return PlacedSample(sample, self.loader.index.name(sample), begin, end, tuple(items))

    def pieces(self, sample: int) -> list[Piece]:
        """Decode the text of a sample as it was tokenized, with what is trained on, and its items' places."""
        source = self.source(sample)
        read: Sample = self.loader.reader.sample(sample)
        pieces = []
        for segment in read.segments:
            if not isinstance(segment, Text):
                pieces.append(Piece(f"<{segment.encoder}>", item=segment.number))
                continue
            trained = segment.weights > 0
            borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
            for begin, end in pairwise(borders):
                tokens = segment.tokens[begin:end].tolist()
                text = spoken(source, tokens)
                pieces.append(
                    Piece(text, bool(trained[begin]), segment.branch, tokens=tuple(tokens))
                )
        return pieces

    def item(self, sample: int, number: int) -> np.ndarray:
        """Read an item as it was decoded: uint8 `[height, width, channels]`, or float32 `[samples]`."""
        return self.loader.reader.item(sample, number)

    def source(self, sample: int) -> Source:
        """Return the source that a sample is of."""
        return list(self.loader.sources.values())[
            int(self.loader.index.source_of(np.array(sample)))
        ]


def spoken(source: Any, tokens: Sequence[int]) -> str:
    """Decode tokens, special ones too; give their numbers where the source cannot decode."""
    if isinstance(source, ChatSource):
        return source.chat.tokenizer.decode(tokens, skip_special=False)
    if isinstance(source, EmbeddedDataset | DrawnDigits):
        return "".join(
            "|" if token == END else ALPHABET[token - 2] for token in tokens if token >= END
        )
    return " ".join(map(str, tokens))


def seen(text: TextBatch, reach: np.ndarray | int | None = None) -> np.ndarray:
    """Return the keys `[T]` that each query `[T]` of a row attends, bool.

    reach: the tokens that a query attends causally in a windowed layer, its own included; None: all
    before it.
    """
    mask = text.mask
    if reach is not None:
        running_max = partial(np.maximum.accumulate, axis=1)
        order = np.argsort(text.pos)  # devices that share rows permute them
        gap = branch_gap(running_max, text.sample[None, order], text.kind[None, order])
        reach = np.full_like(text.pos, reach)
        mask = mask._replace(pos=text.pos - gap[0, text.pos], reach=reach)
    return allowed(mask, mask)


NO_LAYER, WITHOUT_WINDOW, EVERY_LAYER = range(3)


def seen_by_layers(text: TextBatch, llm: DecoderConfig) -> np.ndarray:
    """Return which of the LLM's layers let each query `[T]` of a row attend each key `[T]`, uint8.

    NO_LAYER, those WITHOUT_WINDOW alone, or EVERY_LAYER. Where all layers are windowed there is
    nothing in between.
    """
    if not llm.windowed:
        return np.where(seen(text), EVERY_LAYER, NO_LAYER).astype(np.uint8)
    near = seen(text, llm.reach(text.position))
    far = seen(text) & (len(llm.windowed) < llm.layers)
    return np.where(near, EVERY_LAYER, np.where(far, WITHOUT_WINDOW, NO_LAYER)).astype(np.uint8)


def describe_window(llm: DecoderConfig) -> str:
    """Describe in one line which layers have the sliding window, for a picture of the mask; empty where none has."""
    if not llm.windowed:
        return ""
    what = f"{'chunks' if llm.chunked else 'a sliding window'} of {llm.window:,} tokens"
    if len(llm.windowed) == llm.layers:
        return f"All layers have {what}."
    return (
        f"Layers {_ranges(llm.windowed)} of 0-{llm.layers - 1} have {what}; "
        "what is drawn paler only the other layers see."
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Spell ascending numbers, runs of them as their ends: 0-4, 6-10, 12."""
    borders = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    runs = [(numbers[a], numbers[b - 1]) for a, b in pairwise(borders)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
