"""Make of each sample of a config's data what training feeds of it alone, and find the sample of given tokens."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from mmjax.config import Config
from mmjax.data.loading.text_rows import (
    BatchLayout,
    ItemSlots,
    empty_text,
    llm_tokens,
    row_view,
    write_sample,
)
from mmjax.data.media.patches import item_size, token_grid
from mmjax.data.sample import BadSample, Item, Sample, Source, Text
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.text.chat import Chat
from mmjax.errors import UserError

MEDIA = ("audio", "image", "video")  # by the number of axes of an item's size
START = 8  # tokens by which a sample's beginning is found
GRAM = 3  # tokens in a row, by which the nearest sample is found
# of a stretch's grams, that a sample must have to be taken for what it was made of
SHARE = 0.4
KEPT = 256  # references, with their arrays


@dataclass(frozen=True)
class Place:
    """An item of a sample: its medium, its number, and the tokens that stand for it."""

    medium: str
    number: int
    begin: int
    time: int  # position along t, from that of its video's first token on
    patch: int  # of its video


@dataclass(frozen=True)
class Reference:
    """A sample as training feeds it alone."""

    sample: int
    name: str  # with its place in the file, where it has one
    ids: np.ndarray  # int32 [n]
    trained: np.ndarray  # bool [n]: whether the token is learned
    medium: np.ndarray  # int8 [n]: the medium that the token stands for, by MEDIA; -1: none
    position: np.ndarray  # int32 [n] or [n, 3]
    places: tuple[Place, ...]


class References:
    """The samples of opened sources. All are tokenized once, to be found by their tokens."""

    def __init__(self, config: Config, sources: Mapping[str, Source]) -> None:
        """Raises UserError where there are no conversations, or their answers are compared."""
        self.layout = BatchLayout.of_config(config)
        self._owner: list[tuple[str, ChatSource, int]] = []
        ids: list[np.ndarray] = []
        for name, source in sources.items():
            if not isinstance(source, ChatSource):
                raise UserError(
                    f"data.sources.{name}: batches are compared with conversations, and this source has none; name a "
                    "source of files, as in docs/batches.md"
                )
            if source.chat.branching is not None:
                raise UserError(
                    f"loss={config.loss.kind}: batches are compared with conversations that loss=cross_entropy trains "
                    "on; choose that to verify them"
                )
            for index in range(len(source)):
                try:
                    tokens, _ = self._tokens(source, index, source.sample(index))
                except BadSample:
                    continue
                ids.append(tokens)
                self._owner.append((name, source, index))
        if not ids:
            raise UserError("the data has no sample that can be used, so no batch is compared")
        self._ids = ids
        self._start = min(START, *map(len, ids))
        self._by_start: dict[bytes, list[int]] = defaultdict(list)
        for sample in sorted(range(len(ids)), key=lambda k: -len(ids[k])):
            self._by_start[ids[sample][: self._start].tobytes()].append(sample)
        self.reference = lru_cache(KEPT)(self._reference)

    @property
    def chat(self) -> Chat:
        """Return the tokenizer and template, which all sources share."""
        return self._owner[0][1].chat

    @cached_property
    def placeholders(self) -> np.ndarray:
        """List the tokens that stand for media."""
        return np.array(list(self.chat.token.values()), np.int32)

    def item(self, sample: int, number: int) -> np.ndarray:
        """Decode an item, prepared for its encoder."""
        _, source, index = self._owner[sample]
        return source.item(index, number)

    def all_answers(self, sample: int) -> np.ndarray:
        """Tell which tokens are learned where every answer is, bool `[n]`."""
        source = self._owner[sample][1]
        every = copy.copy(source)
        form = replace(source.chat.form, train_on="assistant")
        every.chat = replace(source.chat, form=form)
        return self._reference(sample, every).trained

    # ----------------------------------------------------------------------------------------------
    # what a sample is

    def _slots(self, source: Source, index: int) -> list[ItemSlots]:
        slots = []
        for name, size in source.facts(index).items:
            encoder = self.layout.modules[name]
            has_grid = self.layout.axes and "image" in encoder.media
            grid = token_grid(encoder, size) if has_grid else None
            slots.append(ItemSlots(name, 0, item_size(encoder, size).tokens, grid=grid))
        return slots

    def _tokens(
        self, source: ChatSource, index: int, sample: Sample
    ) -> tuple[np.ndarray, list[ItemSlots]]:
        """Return the tokens of a sample, with its placeholders, and the tokens that each item takes."""
        slots = self._slots(source, index)
        sizes = source.facts(index).items
        parts = []
        for segment in sample.segments:
            if isinstance(segment, Text):
                parts.append(segment.tokens)
            else:
                token = source.chat.token[MEDIA[len(sizes[segment.number][1]) - 1]]
                count = llm_tokens(segment, slots, self.layout)
                parts.append(np.full(count, token, np.int32))
        return np.concatenate(parts), slots

    def _reference(self, sample: int, source: ChatSource | None = None) -> Reference:
        name, opened, index = self._owner[sample]
        source = source or opened
        contents = source.sample(index)
        ids, slots = self._tokens(source, index, contents)
        sizes = source.facts(index).items
        row = row_view(empty_text((1, len(ids)), self.layout, {}), 0, slice(None))
        write_sample(row, contents, self.layout, slots, 0)
        trained = np.zeros(len(ids), bool)
        medium = np.full(len(ids), -1, np.int8)
        places = []
        begin = 0
        for segment in contents.segments:
            if isinstance(segment, Text):
                end = begin + len(segment.tokens)
                trained[begin:end] = segment.weights > 0
            else:
                end = begin + llm_tokens(segment, slots, self.layout)
                kind = len(sizes[segment.number][1]) - 1
                medium[begin:end] = kind
                time, patch = (segment.time, segment.patch) if isinstance(segment, Item) else (0, 0)
                count = 1 if isinstance(segment, Item) else segment.items
                places += [
                    Place(MEDIA[kind], segment.number + k, begin, time, patch) for k in range(count)
                ]
            begin = end
        named = f"{name}[{index}] ({source.place(index)})"
        return Reference(sample, named, ids, trained, medium, row.position, tuple(places))

    # ----------------------------------------------------------------------------------------------
    # which sample some tokens are

    def beginning(self, ids: np.ndarray) -> list[int]:
        """Find the samples, the longest ones and all alike, whose tokens begin these."""
        alike: list[int] = []
        for sample in self._by_start.get(ids[: self._start].tobytes(), []):
            known = self._ids[sample]
            if alike and len(known) < len(self._ids[alike[0]]):
                break
            if len(known) <= len(ids) and np.array_equal(known, ids[: len(known)]):
                alike.append(sample)
        return alike

    def length(self, sample: int) -> int:
        """Count the tokens of a sample."""
        return len(self._ids[sample])

    def nearest(self, ids: np.ndarray) -> list[int]:
        """Find the samples that share most of these tokens, rare ones above all; none where that is too little."""
        known, owner = self._grams
        grams = np.unique(_grams(ids))
        first = np.searchsorted(known, grams)
        count = np.searchsorted(known, grams, side="right") - first
        # What more than half of all samples have, such as a system prompt, tells nothing.
        telling = count <= max(len(self._ids) / 2, 1)
        weight = np.zeros(len(self._ids))
        shared = np.zeros(len(self._ids))
        for begin, n, tells in zip(first, count, telling, strict=True):
            weight[owner[begin : begin + n]] += 1 / max(n, 1)
            shared[owner[begin : begin + n]] += tells
        best = np.flatnonzero(weight > weight.max() * 0.999)
        return best.tolist() if shared[best].max(initial=0) >= SHARE * telling.sum() else []

    def own_words(self, ids: np.ndarray) -> int:
        """Return where tokens go on otherwise than the first sample does, behind a system prompt that all have."""
        known = self._ids[0][: len(ids)]
        return int(np.argmin([*(ids[: len(known)] == known), False]))

    @cached_property
    def _grams(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all grams in order, and the sample of each; one that comes several times in a sample, once."""
        grams = [np.unique(_grams(ids)) for ids in self._ids]
        owner = np.repeat(np.arange(len(grams)), list(map(len, grams)))
        every = np.concatenate(grams)
        order = np.argsort(every, kind="stable")
        return every[order], owner[order]


def _grams(ids: np.ndarray) -> np.ndarray:
    """Hash each few tokens in a row; repeated ones count as one, as an image's placeholders do."""
    once = ids[np.flatnonzero(np.diff(ids, prepend=-1))].astype(np.int64)
    return (once[:-2] * 1_000_003 + once[1:-1]) * 1_000_003 + once[2:]
