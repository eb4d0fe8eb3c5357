"""The tokens of a conversation: as a sample with items in the places of media, and as an outline without its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.data.sample import BadSample, Item, Medium, Sample, Text

# Of each medium of a conversation in order: a string for each of its parts.
OfMedia = Sequence[Sequence[str]]
# Codes in a conversation's outline, beside numbers of tokens, which are at least 0.
TRAINED = -1  # the next token is the first that is trained on
BRANCH = -2  # the next text is a branch of its own
MEDIUM = -3  # a medium of the first kind of `_MEDIA`, and so on
_MEDIA: tuple[Medium, ...] = ("image", "audio", "video")


@dataclass(frozen=True)
class Tokens:
    """A conversation's tokens, one for each medium."""

    ids: np.ndarray  # int32 [n]
    weights: np.ndarray  # float32 [n]: above 0 where a token is trained on
    media: np.ndarray  # int64 [m]: indices of the tokens that stand for media
    kinds: tuple[str, ...]  # of these media
    # not in `ids`: tokens that the tokenizer adds before and after
    around: tuple[tuple[int, ...], tuple[int, ...]]

    def outline(self) -> list[int]:
        """List the tokens between media, as `Chat.outlines` does."""
        prefix, suffix = map(len, self.around)
        trained = int(np.argmax(self.weights > 0)) if self.weights.any() else -1
        # Of "<s>user: [image] why? assistant: so</s>", with 3 tokens before the image, 5 behind it
        # up to the answer, and 2 that are trained on: 3, MEDIUM, 5, TRAINED, 2.
        codes: list[int] = []
        begin = -prefix
        ends = [*zip(self.media.tolist(), self.kinds, strict=True), (len(self.ids) + suffix, None)]
        for end, kind in ends:
            if begin <= trained < end:
                codes += [trained - begin, TRAINED]
                begin = trained
            codes.append(end - begin)
            if kind is not None:
                codes.append(MEDIUM - _MEDIA.index(kind))
            begin = end + 1  # behind the medium's one token
        return codes

    def sample(self, weights: np.ndarray, items: dict[str, Iterator[list[Item]]]) -> Sample:
        """Put text and items in order; `items` iterates over the items of each medium, by kind."""
        prefix, suffix = self.around
        ids = np.concatenate([np.array(prefix, np.int32), self.ids, np.array(suffix, np.int32)])
        weights = np.pad(weights, (len(prefix), len(suffix)))
        segments: list[Text | Item] = []
        begin = 0
        ends = zip([*(self.media + len(prefix)), len(ids)], [*self.kinds, None], strict=True)
        for end, kind in ends:
            if begin < end:
                segments.append(Text(ids[begin:end], weights[begin:end]))
            if kind is not None:
                segments += next(items[kind])
            begin = end + 1  # behind the medium's one token
        return Sample(tuple(segments))


def outline_tokens(codes: Sequence[int]) -> int:
    """Count the text tokens of an outline."""
    return sum(code for code in codes if code > 0)


def outlined_branches(codes: Sequence[int]) -> tuple[int, ...]:
    """List the tokens of each branch of an outline."""
    begin = codes.index(BRANCH) if BRANCH in codes else len(codes)
    return tuple(code for code in codes[begin:] if code > 0)


def outlined_sample(codes: Sequence[int], kinds: Sequence[str], encoders: OfMedia) -> Sample:
    """Make a sample of a conversation's outline: as many tokens, all of them 0, as `Chat.sample` has.

    kinds: of the conversation's media in order. encoders: as in `Chat.sample`. Weights tell the
    first token that is trained on.
    """
    items = number_items(kinds, encoders)
    segments: list[Text | Item] = []
    branch = trained = 0
    for code in codes:
        if code <= MEDIUM:
            segments += next(items[_MEDIA[MEDIUM - code]])
        elif code > 0:
            weights = np.zeros(code, np.float32)
            weights[:1] = trained
            segments.append(Text(np.zeros(code, np.int32), weights, branch))
        trained = int(code == TRAINED)
        branch += code == BRANCH
    return Sample(tuple(segments))


def number_items(
    kinds: Sequence[str], encoders: OfMedia, texts: OfMedia = ()
) -> dict[str, Iterator[list[Item]]]:
    """Iterate by kind over the parts of each medium, numbered in the conversation's order (a template's may differ).

    A medium with texts around its parts has a place for each of them.
    """
    if len(kinds) != len(encoders):
        raise BadSample(f"it has {len(kinds)} places for media, and {len(encoders)} media")
    items: dict[str, list[list[Item]]] = {kind: [] for kind in kinds}
    number = 0
    for kind, names, around in zip(kinds, encoders, texts or [()] * len(kinds), strict=True):
        if not names:
            raise BadSample(f"its medium {len(items[kind])} of the kind {kind} has no items")
        placed = [Item(name, number + i) for i, name in enumerate(names)]
        items[kind] += [[item] for item in placed] if around else [placed]
        number += len(names)
    return {kind: iter(items_of_kind) for kind, items_of_kind in items.items()}
