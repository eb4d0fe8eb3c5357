"""Cut the rows of a batch into samples, and set the tokens of each against those of the sample that it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mmjax.verification.dumped_batch import DumpedBatch
from mmjax.verification.references import Reference, References

# Chooses of samples with the same text the one whose images stand in the batch.
Choose = Callable[[Sequence[int]], int]


class Symbol(NamedTuple):
    """A token, or the placeholders of an image together."""

    token: int
    begin: int
    count: int


class Change(NamedTuple):
    """Symbols that stand here instead of those that the sample has there; nothing here: they are missing."""

    fed: list[Symbol]
    expected: list[Symbol]
    token: int  # token of the segment
    number: int  # token of the sample


@dataclass(frozen=True)
class Segment:
    """A sample in a row of a batch, from `begin` up to `end`."""

    batch: DumpedBatch
    row: int
    begin: int
    end: int
    known: References
    reference: Reference | None  # None: it is in no source

    @property
    def span(self) -> slice:
        """Return its part of the row."""
        return slice(self.begin, self.end)

    @cached_property
    def ids(self) -> np.ndarray:
        """Return its tokens."""
        return self.batch.ids[self.row, self.span].astype(np.int32)

    @cached_property
    def is_placeholder(self) -> np.ndarray:
        """Tell which tokens stand for media."""
        return np.isin(self.ids, self.known.placeholders)

    def text(self, begin: int, end: int | None = None) -> str:
        """Decode some tokens, or one."""
        tokens = self.ids[begin : begin + 1 if end is None else end]
        return self.known.chat.tokenizer.decode(tokens.tolist())

    @cached_property
    def name(self) -> str:
        """Name the sample, or say how it begins."""
        if self.reference is not None:
            return self.reference.name
        return repr(self.text(0, 24)[:60])

    @cached_property
    def _compared(self) -> tuple[list[Change], np.ndarray]:
        """Return what differs, and the pairs of tokens here and there that are the same, int `[n, 2]`."""
        assert self.reference is not None
        if np.array_equal(self.ids, self.reference.ids):
            return [], np.repeat(np.arange(len(self.ids))[:, None], 2, axis=1)
        fed, expected = (
            list(_symbols(ids, self.known.placeholders)) for ids in (self.ids, self.reference.ids)
        )
        matcher = SequenceMatcher(
            None, [s.token for s in fed], [s.token for s in expected], autojunk=False
        )
        changes, pairs = [], []
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind != "equal":
                token = fed[a].begin if a < len(fed) else len(self.ids)
                number = expected[c].begin if c < len(expected) else len(self.reference.ids)
                changes.append(Change(fed[a:b], expected[c:d], token, number))
                continue
            for ours, theirs in zip(fed[a:b], expected[c:d], strict=True):
                count = np.arange(min(ours.count, theirs.count))
                pairs.append(np.stack([ours.begin + count, theirs.begin + count], axis=1))
                if ours.count != theirs.count:
                    changes.append(Change([ours], [theirs], ours.begin, theirs.begin))
        return changes, np.concatenate([np.zeros((0, 2), int), *pairs])

    @property
    def changes(self) -> list[Change]:
        """List where its tokens are not the sample's."""
        return self._compared[0]

    @property
    def pairs(self) -> np.ndarray:
        """Return the tokens here and there that are the same, int `[n, 2]`."""
        return self._compared[1]

    def aligned(self, values: np.ndarray) -> np.ndarray:
        """Lay out values of the sample's tokens as the tokens stand here; 0 where a token is not the sample's."""
        out = np.zeros((len(self.ids), *values.shape[1:]), values.dtype)
        out[self.pairs[:, 0]] = values[self.pairs[:, 1]]
        return out


def _symbols(ids: np.ndarray, placeholders: np.ndarray) -> Iterator[Symbol]:
    # Each token by itself, but the same placeholder again and again together.
    repeats = (np.diff(ids, prepend=-1) == 0) & np.isin(ids, placeholders)
    begins = [*np.flatnonzero(~repeats).tolist(), len(ids)]
    for begin, end in pairwise(begins):
        yield Symbol(int(ids[begin]), begin, end - begin)


def cut_rows(batch: DumpedBatch, known: References, choose: Choose) -> list[Segment]:
    """Cut every row into its samples, in order; what is padding is left out."""
    segments = []
    for row, ids in enumerate(batch.ids.astype(np.int32)):
        is_token = np.ones(len(ids), bool) if batch.row_mask is None else batch.row_mask[row] > 0
        edges = np.flatnonzero(np.diff(is_token, prepend=False, append=False)).reshape(-1, 2)
        borders = _told_borders(batch, row)
        for begin, end in edges.tolist():
            for span, samples in _cut(ids, begin, end, borders, known):
                reference = known.reference(choose(samples)) if samples else None
                segments.append(Segment(batch, row, span.start, span.stop, known, reference))
    return segments


def _told_borders(batch: DumpedBatch, row: int) -> np.ndarray:
    """Return where samples begin by what the batch says, the first source of it that there is."""
    if batch.borders is not None:
        return batch.borders
    if batch.row_mask is not None and (batch.row_mask > 1).any():
        return np.flatnonzero(np.diff(batch.row_mask[row], prepend=0))
    position = batch.positions(row, slice(None))
    if position is None:
        return np.zeros(0, int)
    position = position.reshape(len(position), -1)
    return np.flatnonzero((position == 0).all(axis=1))


def _cut(
    ids: np.ndarray, begin: int, end: int, borders: np.ndarray, known: References
) -> Iterator[tuple[slice, list[int]]]:
    """Yield stretches of a row, each with the samples that it may be.

    A stretch is a whole sample by its tokens; else it goes on up to a border that the batch tells,
    or to the next whole sample.
    """
    while begin < end:
        if samples := known.beginning(ids[begin:end]):
            stop = begin + known.length(samples[0])
            yield slice(begin, stop), samples
            begin = stop
            continue
        marked = borders[(borders > begin) & (borders < end)]
        starts = (k for k in range(begin + 1, end) if known.beginning(ids[k:end]))
        stop = int(marked[0]) if len(marked) else next(starts, end)
        doubled = ids[begin] == ids[min(begin + 1, end - 1)]  # a begin token, twice
        if doubled and (samples := known.beginning(ids[begin + 1 : end])):
            stop = begin + 1 + known.length(samples[0])
        if (ids[begin:stop] != ids[begin]).any():
            yield slice(begin, stop), known.nearest(ids[begin:stop])
        begin = stop
