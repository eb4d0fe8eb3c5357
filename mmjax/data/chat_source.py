"""A source of conversations: tokens by a checkpoint's template, images and clips as its encoders take them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mmjax.config import AudioConfig, VisionConfig
from mmjax.data.chat import Chat
from mmjax.data.conversation import BadSample, Conversation, Media, Medium
from mmjax.data.decode import ClipFacts, clip_facts, clip_samples, decode_clip, decode_image, image_size
from mmjax.data.image_items import items_of_image, items_of_size
from mmjax.data.index import Encoders
from mmjax.data.media_facts import KINDS, MediaFacts, Probe, open_facts, read_facts
from mmjax.data.sample import Facts, Question, Sample, Text
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


class ChatSource:
    """Conversations of a data set as a `Source`, and as questions: each one's last answer."""

    def __init__(self, conversations: StoredConversations, chat: Chat, encoders: Encoders, cache: Path) -> None:
        self.conversations, self.chat, self._cache = conversations, chat, cache
        self._encoders = dict(encoders)
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
            items = [(name, size) for name, sizes in self._items(index) for size in sizes]
        except BadMedia as bad:
            return BadSample(str(bad))
        return Facts(text, tuple(items))

    def _items(self, index: int) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Of every medium: its encoder, and the size of each of its items. Raises BadMedia."""
        begin, end = self._facts.start[index : index + 2]
        kinds = [KINDS[kind] for kind in self._facts.kind[begin:end]]
        found = []
        for kind, facts in zip(kinds, self._facts.size[begin:end].tolist(), strict=True):
            name = encoder_for(kind, self._encoders)
            found.append((name, item_sizes(self._encoders[name], facts, kinds.count("image"))))
        return found

    # ------------------------------------------------------------------------------------------------------ samples

    def sample(self, index: int) -> Sample:
        """The conversation's tokens and places. Raises BadSample."""
        return self.chat.sample(self.conversations.conversation(index), self._names(index))

    def item(self, index: int, number: int) -> np.ndarray:
        """An item of the sample, decoded. Raises BadMedia."""
        medium, within = self._medium(index, number)
        return self._decoded(index, medium)[within]

    def _names(self, index: int) -> list[list[str]]:
        """The encoder of each item of every medium."""
        return [[name] * len(sizes) for name, sizes in self._items(index)]

    def _medium(self, index: int, number: int) -> tuple[int, int]:
        """The medium that an item is of, and which of its items."""
        for medium, (_, sizes) in enumerate(self._items(index)):
            if number < len(sizes):
                return medium, number
            number -= len(sizes)
        raise IndexError(f"sample {index} has no item {number}")

    def _decode(self, index: int, medium: int) -> tuple[np.ndarray, ...]:
        encoder = self._encoders[self._items(index)[medium][0]]
        encoded = self.conversations.encoded(index, medium)
        images = sum(KINDS[kind] == "image" for kind in self._facts.kind[slice(*self._facts.start[index : index + 2])])
        return decoded_items(encoder, encoded, images)

    # ---------------------------------------------------------------------------------------------------- questions

    def question(self, index: int) -> Question:
        """The conversation up to its last answer, and that answer. Raises BadSample where it does not end with one."""
        conversation = self.conversations.conversation(index)
        *before, last = conversation.messages
        if last.role != ASSISTANT or any(isinstance(part, Media) for part in last.parts):
            raise BadSample("it does not end with an answer of the assistant, so there is nothing to ask")
        names = self._names(index)
        prompt = self.chat.prompt(Conversation(tuple(before)), names)
        needs = tuple(dict.fromkeys(name for of in names for name in of))
        return Question("chat", "chat.answer", prompt, "".join(last.parts).strip(), needs)

    def answer_tokens(self, index: int) -> int:
        """Tokens that a question's answer takes, its end included."""
        asked, answered = self.question(index).prompt, self.sample(index)
        return sum(_text_tokens(answered)) - sum(_text_tokens(asked))

    def decode(self, tokens: Sequence[int]) -> str:
        """What tokens say, up to where the answer ends."""
        return self.chat.said(tokens)


def encoder_for(kind: Medium, encoders: Encoders) -> str:
    """The encoder that takes media of a kind, by name. Raises UserError where there is none."""
    wanted = {"image": VisionConfig, "audio": AudioConfig}[kind]
    name = next((name for name, encoder in encoders.items() if isinstance(encoder, wanted)), None)
    if name is None:
        raise UserError(f"the data has media of the kind {kind}, but no model.encoders takes them; add one")
    return name


def item_sizes(encoder: VisionConfig | AudioConfig, facts: Sequence[int], images: int) -> tuple[tuple[int, ...], ...]:
    """The size of each item of a medium: (height, width) of an image of that size, (samples,) of a clip of these facts.

    images: how many its sample has. Raises BadMedia.
    """
    first, second = facts
    if isinstance(encoder, VisionConfig):
        return tuple(tuple(size) for size in items_of_size(encoder.images, (first, second), images).sizes)
    return ((clip_samples(ClipFacts(first, second), encoder.sample_rate),),)


def decoded_items(encoder: VisionConfig | AudioConfig, encoded: bytes, images: int) -> tuple[np.ndarray, ...]:
    """The items of a medium's file, of the sizes that `item_sizes` says. Raises BadMedia."""
    if isinstance(encoder, AudioConfig):
        return (decode_clip(encoded, encoder.sample_rate),)
    return items_of_image(encoder.images, decode_image(encoded), images)


def _text_tokens(sample: Sample) -> list[int]:
    """Tokens of each stretch of text."""
    return [len(segment.tokens) for segment in sample.segments if isinstance(segment, Text)]
