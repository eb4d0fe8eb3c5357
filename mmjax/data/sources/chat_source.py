"""A source of conversations: text tokenized with a checkpoint's chat template, images and clips prepared for its
encoders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from mmjax.data.conversation import BadSample, Conversation, MediaPlace
from mmjax.data.media.patches import Encoders
from mmjax.data.sample import Question, Sample, SampleLengths, Text
from mmjax.data.sources.media_sizes import KINDS, MediaFacts, Progress, open_facts, read_facts
from mmjax.data.sources.processors import (
    PROBES,
    Functions,
    MediaItems,
    MediaProcessors,
    encoder_names,
    merge_arranged_items,
)
from mmjax.data.sources.token_counts import Reopen, TokenCounts, count_text, open_token_counts
from mmjax.data.text.chat import Chat
from mmjax.data.text.chat_template import ASSISTANT
from mmjax.errors import BadMedia

DECODED = 4  # cached media, so that an image is decoded once for all its tiles


class ChatSource:
    """Conversations of a data set as a `Source`, and as questions: each one's last answer."""

    def __init__(
        self, reopen: Reopen, chat: Chat, encoders: Encoders, cache: Path, functions: Functions | None = None
    ) -> None:
        """reopen: opens the conversations, here and in counting worker processes. functions: callbacks by name."""
        self.conversations = reopen()
        self.chat = chat
        self._cache = cache
        self._reopen = reopen
        self._senses = MediaProcessors(encoders, functions)
        self._decoded = lru_cache(maxsize=DECODED)(self._decode)

    def __len__(self) -> int:
        return len(self.conversations)

    def fingerprint(self) -> str:
        """Hash the records, the sizes of their media, the template and how media are prepared."""
        digest = hashlib.sha256()
        for part in (self.conversations.fingerprint(), self.chat.fingerprint(), repr(self._senses.encoders)):
            digest.update(part.encode())
        # Resized media change tokens, so that a batch of the same index would have another content.
        for array in (self._facts.start, self._facts.size, self._facts.bad):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def files(self) -> list[tuple[str, int]]:
        return self.conversations.files()

    def read_headers(self, progress: Progress = lambda done: None) -> MediaFacts:
        """Read the media's headers that are new or have changed since the last time; return the facts of all."""
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
    def _text(self) -> TokenCounts:
        known = open_token_counts(self.conversations, self.chat, self._cache)
        return count_text(self.conversations, self._reopen, self.chat, self._cache) if known is None else known

    @cached_property
    def _bad(self) -> dict[int, str]:
        # Where both text and media are bad, the media's reason is named.
        tables = (self._text, self._facts)
        return {k: why for t in tables for k, why in zip(t.bad.tolist(), t.reason.tolist(), strict=True)}

    def facts(self, index: int) -> SampleLengths:
        if (reason := self._bad.get(index)) is not None:
            raise BadSample(reason)
        try:
            media = self._items(index)
        except BadMedia as bad:
            raise BadSample(str(bad)) from None
        return self._senses.facts(int(self._text.tokens[index]), media)

    def _items(self, index: int) -> list[MediaItems]:
        """Return the items of every medium. Raises BadMedia."""
        begin, end = self._facts.start[index : index + 2]
        kinds = [KINDS[kind] for kind in self._facts.kind[begin:end]]
        sizes = map(tuple, self._facts.size[begin:end].tolist())
        return [self._senses.items(kind, size, kinds.count("image")) for kind, size in zip(kinds, sizes, strict=True)]

    def sample(self, index: int) -> Sample:
        media = self._items(index)
        return merge_arranged_items(
            self.chat.sample(self.conversations.conversation(index), encoder_names(media)), media
        )

    def item(self, index: int, number: int) -> np.ndarray:
        for medium, items in enumerate(self._items(index)):
            if number < len(items.sizes):
                return self._decoded(index, medium)[number]
            number -= len(items.sizes)
        raise IndexError(f"sample {index} has no item {number}")

    def _decode(self, index: int, medium: int) -> tuple[np.ndarray, ...]:
        kinds = [KINDS[kind] for kind in self._facts.kind[slice(*self._facts.start[index : index + 2])]]
        encoded = self.conversations.media(index)[medium].read()
        return self._senses.decoded(kinds[medium], encoded, kinds.count("image"))

    def question(self, index: int) -> Question:
        """Return the conversation up to its last answer, and that answer. Raises BadSample where it ends otherwise."""
        conversation = self.conversations.conversation(index)
        *history, last = conversation.messages
        if last.role != ASSISTANT or any(isinstance(part, MediaPlace) for part in last.parts):
            raise BadSample("it does not end with an answer of the assistant, so there is nothing to ask")
        media = self._items(index)
        return Question(
            family="chat",
            task="chat.answer",
            prompt=merge_arranged_items(self.chat.prompt(Conversation(tuple(history)), encoder_names(media)), media),
            answer="".join(last.parts).strip(),
            needs=tuple(dict.fromkeys(medium.encoder for medium in media)),
            answers=conversation.answers,
        )

    def answer_tokens(self, index: int) -> int:
        """Count the tokens of a question's answer, including its end."""
        return _text_tokens(self.sample(index)) - _text_tokens(self.question(index).prompt)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.chat.ends

    def decode(self, tokens: Sequence[int]) -> str:
        return self.chat.said(tokens)


def _text_tokens(sample: Sample) -> int:
    return sum(len(segment.tokens) for segment in sample.segments if isinstance(segment, Text))
