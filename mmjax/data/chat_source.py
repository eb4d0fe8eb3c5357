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
from mmjax.data.clip_items import pieces
from mmjax.data.conversation import BadSample, Conversation, Media, Medium
from mmjax.data.decode import ClipFacts, clip_facts, clip_samples, decode_clip, decode_image, image_size
from mmjax.data.image_items import items_of_image, items_of_size
from mmjax.data.index import Encoders
from mmjax.data.media_facts import KINDS, MediaFacts, Probe, Progress, open_facts, read_facts
from mmjax.data.sample import Facts, Question, Sample, Text
from mmjax.data.template import ASSISTANT
from mmjax.data.text_lengths import Reopen, TextLengths, count_text, open_text_lengths
from mmjax.errors import BadMedia, UserError

MEASURED = 1 << 16  # sizes of media whose items' sizes are kept
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

    def __init__(self, reopen: Reopen, chat: Chat, encoders: Encoders, cache: Path) -> None:
        """reopen: opens the conversations, here and in the processes that count their tokens."""
        self.conversations, self.chat, self._cache = reopen(), chat, cache
        self._reopen, self._encoders = reopen, dict(encoders)
        self._sizes = lru_cache(maxsize=MEASURED)(self._measured)
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

    def read_headers(self, progress: Progress = lambda done: None) -> MediaFacts:
        """What is known of all media: headers are read of those that are new or have changed since the last time."""
        self._facts = read_facts(self.conversations, PROBES, self._cache, progress)
        return self._facts

    def count_tokens(self, progress: Progress = lambda done: None) -> None:
        """Tokenize all text, unless that was done for these records and this template."""
        self._text = count_text(self.conversations, self._reopen, self.chat, self._cache, progress)

    @cached_property
    def _facts(self) -> MediaFacts:
        known = open_facts(self.conversations, self._cache)
        return self.read_headers() if known is None else known

    @cached_property
    def _text(self) -> TextLengths:
        known = open_text_lengths(self.conversations, self.chat, self._cache)
        return count_text(self.conversations, self._reopen, self.chat, self._cache) if known is None else known

    @cached_property
    def _bad(self) -> dict[int, str]:
        of_text, of_media = (zip(x.bad.tolist(), x.reason.tolist(), strict=True) for x in (self._text, self._facts))
        return {**dict(of_text), **dict(of_media)}

    # ------------------------------------------------------------------------------------------------------ lengths

    def facts(self, index: int) -> Facts:
        """What a sample needs. Raises BadSample."""
        if (reason := self._bad.get(index)) is not None:
            raise BadSample(reason)
        try:
            items = [(name, size) for name, sizes in self._items(index) for size in sizes]
        except BadMedia as bad:
            raise BadSample(str(bad)) from None
        return Facts(int(self._text.tokens[index]), tuple(items))

    def _items(self, index: int) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Of every medium: its encoder, and the size of each of its items. Raises BadMedia."""
        begin, end = self._facts.start[index : index + 2]
        kinds = [KINDS[kind] for kind in self._facts.kind[begin:end]]
        found = []
        for kind, facts in zip(kinds, self._facts.size[begin:end].tolist(), strict=True):
            found.append((name := encoder_for(kind, self._encoders), self._sizes(name, *facts, kinds.count("image"))))
        return found

    def _measured(self, name: str, first: int, second: int, images: int) -> tuple[tuple[int, ...], ...]:
        return item_sizes(self._encoders[name], (first, second), images)

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
        return Question("chat", "chat.answer", prompt, "".join(last.parts).strip(), needs, conversation.answers)

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
    samples = clip_samples(ClipFacts(first, second), encoder.sample_rate)
    return tuple((stop - start,) for start, stop in pieces(encoder, samples))


def decoded_items(encoder: VisionConfig | AudioConfig, encoded: bytes, images: int) -> tuple[np.ndarray, ...]:
    """The items of a medium's file, of the sizes that `item_sizes` says. Raises BadMedia."""
    if isinstance(encoder, AudioConfig):
        wave = decode_clip(encoded, encoder.sample_rate)
        return tuple(wave[start:stop] for start, stop in pieces(encoder, len(wave)))
    return items_of_image(encoder.images, decode_image(encoded), images)


def _text_tokens(sample: Sample) -> list[int]:
    """Tokens of each stretch of text."""
    return [len(segment.tokens) for segment in sample.segments if isinstance(segment, Text)]
