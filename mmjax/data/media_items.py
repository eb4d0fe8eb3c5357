"""Turn images and clips of a conversation into items of an encoder, and their tokens in the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mmjax.config import AudioConfig, VisionConfig
from mmjax.data.arrangement import Arrangement, BeforeLlm, before_llm
from mmjax.data.clip_items import pieces
from mmjax.data.conversation import Medium
from mmjax.data.decode import ClipFacts, clip_facts, clip_samples, decode_clip, decode_image, image_size
from mmjax.data.image_items import BeforeEncoder, before_encoder, items_of_image, sizes_of_items
from mmjax.data.index import Encoders
from mmjax.data.media import item_size, token_grid
from mmjax.data.media_facts import Probe
from mmjax.data.sample import Arranged, Facts, Item, Sample
from mmjax.errors import UserError

MEASURED = 1 << 16  # media whose items' sizes are kept

Functions = Mapping[str, Callable[..., Any]]  # that the encoders' callbacks name


def probe_image(file: BinaryIO) -> tuple[int, int]:
    """(height, width), from the header."""
    return image_size(file)


def probe_clip(file: BinaryIO) -> tuple[int, int]:
    """(frames, rate), from the header."""
    return clip_facts(file)


PROBES: dict[Medium, Probe] = {"image": probe_image, "audio": probe_clip}


class MediumItems(NamedTuple):
    """The items of one medium, known from its header."""

    encoder: str
    sizes: tuple[tuple[int, ...], ...]  # of each item
    tokens: Arrangement | None = None  # of an image whose tokens are not simply those of its items

    def count(self, encoders: Encoders) -> int:
        """Tokens of the LLM."""
        encoder = encoders[self.encoder]
        return sum(item_size(encoder, size).tokens for size in self.sizes) if self.tokens is None else len(self.tokens)


class Senses:
    """Prepare images and clips for a model's encoders, and their tokens for its LLM."""

    def __init__(self, encoders: Encoders, functions: Functions | None = None) -> None:
        self.encoders = dict(encoders)
        seeing = {name: encoder for name, encoder in encoders.items() if isinstance(encoder, VisionConfig)}
        self._eyes = {name: Eyes.of(name, encoder, functions or {}) for name, encoder in seeing.items()}
        self.items = lru_cache(maxsize=MEASURED)(self._items)

    def encoder(self, kind: Medium) -> str:
        """The encoder that takes media of a kind, by name. Raises UserError where there is none."""
        wanted = {"image": VisionConfig, "audio": AudioConfig}[kind]
        name = next((name for name, encoder in self.encoders.items() if isinstance(encoder, wanted)), None)
        if name is None:
            raise UserError(f"the data has media of the kind {kind}, but no model.encoders takes them; add one")
        return name

    def _items(self, kind: Medium, facts: tuple[int, int], images: int) -> MediumItems:
        """Return the items of a medium by its header; images: the number of images of its sample. Raises BadMedia."""
        name = self.encoder(kind)
        if kind == "image":
            return self._eyes[name].items(facts, images)
        encoder = self.encoders[name]
        samples = clip_samples(ClipFacts(*facts), encoder.sample_rate)
        return MediumItems(name, tuple((stop - start,) for start, stop in pieces(encoder, samples)))

    def decoded(self, kind: Medium, encoded: bytes, images: int) -> tuple[np.ndarray, ...]:
        """The items of a medium's file, of the sizes that `items` says. Raises BadMedia."""
        name = self.encoder(kind)
        if kind == "image":
            items = items_of_image(self._eyes[name].before_encoder, decode_image(encoded), images)
            return tuple(map(grey, items)) if self.encoders[name].channels == 1 else items
        encoder = self.encoders[name]
        wave = decode_clip(encoded, encoder.sample_rate)
        return tuple(wave[start:stop] for start, stop in pieces(encoder, len(wave)))

    def facts(self, text_tokens: int, media: Sequence[MediumItems]) -> Facts:
        """Return the lengths of a sample with these media."""
        plain = all(medium.tokens is None for medium in media)
        tokens = None if plain else sum(medium.count(self.encoders) for medium in media)
        return Facts(text_tokens, tuple((medium.encoder, size) for medium in media for size in medium.sizes), tokens)


@dataclass(frozen=True)
class Eyes:
    """An encoder of images, and how these come to it and to the LLM."""

    name: str
    encoder: VisionConfig
    before_encoder: BeforeEncoder
    before_llm: BeforeLlm | None

    @classmethod
    def of(cls, name: str, encoder: VisionConfig, functions: Functions) -> Eyes:
        """With its own callbacks, by their names, where it has some."""
        first, last = encoder.callbacks.before_encoder, encoder.callbacks.before_llm
        ways = functions[first] if first else before_encoder(encoder.images)
        return cls(name, encoder, ways, functions[last] if last else before_llm(encoder))

    def items(self, size: tuple[int, int], images: int) -> MediumItems:
        """Return the items of an image of (height, width), one of so many of its sample. Raises BadMedia."""
        sizes = sizes_of_items(self.before_encoder, size, images)
        if self.before_llm is None:
            return MediumItems(self.name, sizes)
        grids = [token_grid(self.encoder, of)[1:] for of in sizes]
        return MediumItems(self.name, sizes, self.before_llm(size, grids))


def grey(image: np.ndarray) -> np.ndarray:
    """Turn an image uint8 `[h, w, 3]` into its luma `[h, w, 1]` (ITU-R 601), as an encoder of one channel takes it."""
    return ((image @ np.array([299, 587, 114]) + 500) // 1000).astype(np.uint8)[..., None]


def names(media: Sequence[MediumItems]) -> list[list[str]]:
    """The encoder of each item of every medium."""
    return [[medium.encoder] * len(medium.sizes) for medium in media]


def in_rows(sample: Sample, media: Sequence[MediumItems]) -> Sample:
    """The sample with one place for all items of each image whose tokens are arranged."""
    place: dict[int, Arranged | None] = {}  # by item; None: it goes with one before it
    number = 0
    for medium in media:
        items = range(number, number + len(medium.sizes))
        if medium.tokens is not None:
            place |= dict.fromkeys(items) | {number: Arranged(medium.encoder, number, len(items), medium.tokens)}
        number = items.stop
    segments = (place.get(s.number, s) if isinstance(s, Item) else s for s in sample.segments)
    return Sample(tuple(segment for segment in segments if segment is not None))
