"""A source of conversations: tokens by a checkpoint's template, images and clips as its encoders take them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from mmjax.data.chat import Chat
from mmjax.data.conversation import BadSample, Conversation, Media
from mmjax.data.index import Encoders
from mmjax.data.media_facts import KINDS, MediaFacts, Progress, open_facts, read_facts
from mmjax.data.media_items import PROBES, Functions, MediumItems, Senses, in_rows, names
from mmjax.data.sample import Facts, Question, Sample, Text
from mmjax.data.template import ASSISTANT
from mmjax.data.text_lengths import Reopen, TextLengths, count_text, open_text_lengths
from mmjax.errors import BadMedia

DECODED = 4  # media that are kept, so that the tiles of an image are cut from one decoding


class ChatSource:
    """Conversations of a data set as a `Source`, and as questions: each one's last answer."""

    def __init__(
        self, reopen: Reopen, chat: Chat, encoders: Encoders, cache: Path, functions: Functions | None = None
    ) -> None:
        """reopen: opens the conversations, here and in the processes that count their tokens.

        functions: those that the encoders' callbacks name.
        """
        self.conversations, self.chat, self._cache = reopen(), chat, cache
        self._reopen, self._senses = reopen, Senses(encoders, functions)
        self._decoded = lru_cache(maxsize=DECODED)(self._decode)

    def __len__(self) -> int:
        return len(self.conversations)

    def fingerprint(self) -> str:
        """Changes with the records, the sizes of their media, the template and how media are prepared."""
        digest = hashlib.sha256()
        for part in (self.conversations.fingerprint(), self.chat.fingerprint(), repr(self._senses.encoders)):
            digest.update(part.encode())
        for array in (self._facts.start, self._facts.size, self._facts.bad):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def files(self) -> list[tuple[str, int]]:
        """The files that its samples are in and how many each has, in order."""
        return self.conversations.files()

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
            media = self._items(index)
        except BadMedia as bad:
            raise BadSample(str(bad)) from None
        return self._senses.facts(int(self._text.tokens[index]), media)

    def _items(self, index: int) -> list[MediumItems]:
        """What every medium becomes. Raises BadMedia."""
        begin, end = self._facts.start[index : index + 2]
        kinds = [KINDS[kind] for kind in self._facts.kind[begin:end]]
        sizes = map(tuple, self._facts.size[begin:end].tolist())
        return [self._senses.items(kind, size, kinds.count("image")) for kind, size in zip(kinds, sizes, strict=True)]

    # ------------------------------------------------------------------------------------------------------ samples

    def sample(self, index: int) -> Sample:
        """The conversation's tokens and places. Raises BadSample."""
        media = self._items(index)
        return in_rows(self.chat.sample(self.conversations.conversation(index), names(media)), media)

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
        kinds = [KINDS[kind] for kind in self._facts.kind[slice(*self._facts.start[index : index + 2])]]
        encoded = self.conversations.encoded(index, medium)
        return self._senses.decoded(kinds[medium], encoded, kinds.count("image"))

    # ---------------------------------------------------------------------------------------------------- questions

    def question(self, index: int) -> Question:
        """The conversation up to its last answer, and that answer. Raises BadSample where it does not end with one."""
        conversation = self.conversations.conversation(index)
        *before, last = conversation.messages
        if last.role != ASSISTANT or any(isinstance(part, Media) for part in last.parts):
            raise BadSample("it does not end with an answer of the assistant, so there is nothing to ask")
        media = self._items(index)
        prompt = in_rows(self.chat.prompt(Conversation(tuple(before)), names(media)), media)
        needs = tuple(dict.fromkeys(medium.encoder for medium in media))
        return Question("chat", "chat.answer", prompt, "".join(last.parts).strip(), needs, conversation.answers)

    def answer_tokens(self, index: int) -> int:
        """Tokens that a question's answer takes, its end included."""
        asked, answered = self.question(index).prompt, self.sample(index)
        return sum(_text_tokens(answered)) - sum(_text_tokens(asked))

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.chat.ends

    def decode(self, tokens: Sequence[int]) -> str:
        """What tokens say, up to where the answer ends."""
        return self.chat.said(tokens)


def _text_tokens(sample: Sample) -> list[int]:
    """Tokens of each stretch of text."""
    return [len(segment.tokens) for segment in sample.segments if isinstance(segment, Text)]
