"""A source of conversations: tokens by a checkpoint's template, images and clips as its encoders take them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mmjax.config import AudioConfig, VisionConfig
from mmjax.data.arrangement import Arrangement, BeforeLlm, before_llm
from mmjax.data.chat import Chat
from mmjax.data.conversation import BadSample, Conversation, Media, Medium
from mmjax.data.decode import ClipFacts, clip_facts, clip_samples, decode_clip, decode_image, image_size
from mmjax.data.image_items import BeforeEncoder, before_encoder, items_of_image, sizes_of_items
from mmjax.data.index import Encoders
from mmjax.data.media import item_size, token_grid
from mmjax.data.media_facts import KINDS, MediaFacts, Probe, open_facts, read_facts
from mmjax.data.sample import Arranged, Facts, Item, Question, Sample, Text
from mmjax.data.stored import StoredConversations
from mmjax.data.template import ASSISTANT
from mmjax.errors import BadMedia, UserError

DECODED = 4  # media that are kept, so that the tiles of an image are cut from one decoding


def probe_image(file: BinaryIO) -> tuple[int, int]:
    """(height, width), from the header."""
    return image_size(file)


def probe_clip(file: BinaryIO) -> tuple[int, int]:
    """(frames, rate), from the header."""
    return clip_facts(file)


PROBES: dict[Medium, Probe] = {"image": probe_image, "audio": probe_clip}


class MediumItems(NamedTuple):
    """What one medium becomes, known from its header."""

    encoder: str
    sizes: tuple[tuple[int, ...], ...]  # of each item
    tokens: Arrangement | None  # of an image whose tokens are not simply those of its items

    def count(self, encoders: Encoders) -> int:
        """Tokens of the LLM."""
        encoder = encoders[self.encoder]
        return sum(item_size(encoder, size).tokens for size in self.sizes) if self.tokens is None else len(self.tokens)


@dataclass(frozen=True)
class Eyes:
    """An encoder of images, and how these come to it and to the LLM."""

    name: str
    encoder: VisionConfig
    before_encoder: BeforeEncoder
    before_llm: BeforeLlm | None

    @classmethod
    def of(cls, name: str, encoder: VisionConfig, functions: Mapping[str, Callable[..., Any]]) -> Eyes:
        """With its own callbacks, by their names, where it has some."""
        first, last = encoder.callbacks.before_encoder, encoder.callbacks.before_llm
        ways = functions[first] if first else before_encoder(encoder.images)
        return cls(name, encoder, ways, functions[last] if last else before_llm(encoder))

    def items(self, size: tuple[int, int], images: int) -> MediumItems:
        """What an image of (height, width) becomes, one of so many of its sample. Raises BadMedia."""
        sizes = sizes_of_items(self.before_encoder, size, images)
        if self.before_llm is None:
            return MediumItems(self.name, sizes, None)
        grids = [token_grid(self.encoder, of)[1:] for of in sizes]
        return MediumItems(self.name, sizes, self.before_llm(size, grids))


class ChatSource:
    """Conversations of a data set as a `Source`, and as questions: each one's last answer."""

    def __init__(
        self,
        conversations: StoredConversations,
        chat: Chat,
        encoders: Encoders,
        cache: Path,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """`functions` are those that the encoders' callbacks name."""
        self.conversations, self.chat, self._cache = conversations, chat, cache
        self._encoders = dict(encoders)
        seeing = {name: encoder for name, encoder in encoders.items() if isinstance(encoder, VisionConfig)}
        self._eyes = {name: Eyes.of(name, encoder, functions or {}) for name, encoder in seeing.items()}
        self._decoded = lru_cache(maxsize=DECODED)(self._decode)

    def __len__(self) -> int:
        return len(self.conversations)

    def fingerprint(self) -> str:
        """Changes with the records, the sizes of their media, the template and how media are prepared."""
        digest = hashlib.sha256()
        for part in (self.conversations.fingerprint(), self.chat.fingerprint(), repr(self._encoders)):
            digest.update(part.encode())
        for array in (self._facts.start, self._facts.size, self._facts.bad):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def refresh(self) -> None:
        """Read the headers of media that are new or have changed since the last time."""
        read_facts(self.conversations, PROBES, self._cache)
        self.__dict__.pop("_facts", None)

    @cached_property
    def _facts(self) -> MediaFacts:
        known = open_facts(self.conversations, self._cache)
        return read_facts(self.conversations, PROBES, self._cache) if known is None else known

    @cached_property
    def _bad(self) -> dict[int, str]:
        return dict(zip(self._facts.bad.tolist(), self._facts.reason.tolist(), strict=True))

    # ------------------------------------------------------------------------------------------------------ lengths

    def facts(self, index: int) -> Facts:
        """What a sample needs. Raises BadSample."""
        (found,) = self.all_facts([index])
        if isinstance(found, BadSample):
            raise found
        return found

    def all_facts(self, indices: Sequence[int]) -> list[Facts | BadSample]:
        """What samples need, or why they cannot be used."""
        found = {index: self._read(index) for index in indices}
        good = [index for index in indices if isinstance(found[index], Conversation)]
        texts = dict(zip(good, self.chat.text_tokens([found[index] for index in good]), strict=True))
        return [self._facts_of(index, texts.get(index, found[index])) for index in indices]

    def _read(self, index: int) -> Conversation | BadSample:
        if (reason := self._bad.get(index)) is not None:
            return BadSample(reason)
        try:
            return self.conversations.conversation(index)
        except BadSample as bad:
            return bad

    def _facts_of(self, index: int, text: int | BadSample) -> Facts | BadSample:
        if isinstance(text, BadSample):
            return text
        try:
            media = self._items(index)
        except BadMedia as bad:
            return BadSample(str(bad))
        plain = all(medium.tokens is None for medium in media)
        tokens = None if plain else sum(medium.count(self._encoders) for medium in media)
        return Facts(text, tuple((medium.encoder, size) for medium in media for size in medium.sizes), tokens)

    def _items(self, index: int) -> list[MediumItems]:
        """What every medium becomes. Raises BadMedia."""
        begin, end = self._facts.start[index : index + 2]
        kinds = [KINDS[kind] for kind in self._facts.kind[begin:end]]
        found = []
        for kind, (first, second) in zip(kinds, self._facts.size[begin:end].tolist(), strict=True):
            name = self._encoder(kind)
            if kind == "image":
                found.append(self._eyes[name].items((first, second), kinds.count("image")))
            else:
                samples = clip_samples(ClipFacts(first, second), self._encoders[name].sample_rate)
                found.append(MediumItems(name, ((samples,),), None))
        return found

    def _encoder(self, kind: Medium) -> str:
        wanted = {"image": VisionConfig, "audio": AudioConfig}[kind]
        name = next((name for name, encoder in self._encoders.items() if isinstance(encoder, wanted)), None)
        if name is None:
            raise UserError(f"the data has media of the kind {kind}, but no model.encoders takes them; add one")
        return name

    # ------------------------------------------------------------------------------------------------------ samples

    def sample(self, index: int) -> Sample:
        """The conversation's tokens and places. Raises BadSample."""
        media = self._items(index)
        return in_rows(self.chat.sample(self.conversations.conversation(index), _names(media)), media)

    def item(self, index: int, number: int) -> np.ndarray:
        """An item of the sample, decoded. Raises BadMedia."""
        medium, within = self._medium(index, number)
        return self._decoded(index, medium)[within]

    def _medium(self, index: int, number: int) -> tuple[int, int]:
        """The medium that an item is of, and which of its items."""
        for medium, of in enumerate(self._items(index)):
            if number < len(of.sizes):
                return medium, number
            number -= len(of.sizes)
        raise IndexError(f"sample {index} has no item {number}")

    def _decode(self, index: int, medium: int) -> tuple[np.ndarray, ...]:
        name = self._items(index)[medium].encoder
        encoder = self._encoders[name]
        encoded = self.conversations.encoded(index, medium)
        if isinstance(encoder, AudioConfig):
            return (decode_clip(encoded, encoder.sample_rate),)
        images = sum(KINDS[kind] == "image" for kind in self._facts.kind[slice(*self._facts.start[index : index + 2])])
        return items_of_image(self._eyes[name].before_encoder, decode_image(encoded), images)

    # ---------------------------------------------------------------------------------------------------- questions

    def question(self, index: int) -> Question:
        """The conversation up to its last answer, and that answer. Raises BadSample where it does not end with one."""
        conversation = self.conversations.conversation(index)
        *before, last = conversation.messages
        if last.role != ASSISTANT or any(isinstance(part, Media) for part in last.parts):
            raise BadSample("it does not end with an answer of the assistant, so there is nothing to ask")
        media = self._items(index)
        prompt = in_rows(self.chat.prompt(Conversation(tuple(before)), _names(media)), media)
        needs = tuple(dict.fromkeys(medium.encoder for medium in media))
        return Question("chat", "chat.answer", prompt, "".join(last.parts).strip(), needs)

    def answer_tokens(self, index: int) -> int:
        """Tokens that a question's answer takes, its end included."""
        asked, answered = self.question(index).prompt, self.sample(index)
        return sum(_text_tokens(answered)) - sum(_text_tokens(asked))

    def decode(self, tokens: Sequence[int]) -> str:
        """What tokens say, up to where the answer ends."""
        ends = self.chat.tokenizer.ends
        stop = next((k for k, token in enumerate(tokens) if token in ends), len(tokens))
        return self.chat.tokenizer.decode(list(tokens[:stop]), skip_special=True).strip()


def _names(media: Sequence[MediumItems]) -> list[list[str]]:
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


def _text_tokens(sample: Sample) -> list[int]:
    """Tokens of each stretch of text."""
    return [len(segment.tokens) for segment in sample.segments if isinstance(segment, Text)]
