"""A person's own questions as prompts: conversations that wait for an answer, with the files of their media at hand."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mmjax.data.chat_source import DECODED
from mmjax.data.conversation import MARKER, BadSample, Conversation, Media, Medium, Message, marked_parts
from mmjax.data.index import Encoders
from mmjax.data.media_items import PROBES, Functions, MediumItems, Senses, in_rows, names
from mmjax.data.sample import Facts, Sample, Text
from mmjax.errors import BadMedia, UserError


@dataclass(frozen=True)
class Asked:
    """A conversation that ends with a question, and the encoded file of each of its media in order."""

    conversation: Conversation
    media: tuple[bytes, ...] = ()


def ask(question: str, files: Mapping[Medium, Sequence[bytes]], system: str = "") -> Asked:
    """One question. Media stand where it has `<image>` and `<audio>`; those of a kind that it does not mark, before it.

    Raises UserError where it says nothing, or marks another number than there are files.
    """
    marked = MARKER.findall(question)
    for kind in ("image", "audio"):
        count, given = marked.count(kind), len(files.get(kind, ()))
        if count not in (0, given):
            raise UserError(f"the question has {count} places <{kind}> for {given} file(s); give one --{kind} for each")
    if not MARKER.sub("", question).strip():
        raise UserError("the question is empty; say what to ask")
    parts: list[str | Media] = [Media(k) for k, of in files.items() if k not in marked for _ in of]
    parts += marked_parts(question)
    left = {kind: iter(of) for kind, of in files.items()}
    media = tuple(next(left[part.kind]) for part in parts if isinstance(part, Media))
    messages = (Message("system", (system,)),) if system.strip() else ()
    return Asked(Conversation((*messages, Message("user", tuple(parts)))), media)


class PromptFormat(Protocol):
    """Encode questions as tokens: a `Chat`, or an `AlphabetFormat`."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def prompt(self, conversation: Conversation, encoders: Sequence[Sequence[str]] = ()) -> Sample: ...

    def said(self, tokens: Sequence[int]) -> str:
        """Decode generated tokens up to the end of the answer."""


class AskedPrompts:
    """Questions as a `Source` of prompts."""

    def __init__(
        self, asked: Sequence[Asked], chat: PromptFormat, encoders: Encoders, functions: Functions | None = None
    ) -> None:
        """functions: those that the encoders' callbacks name."""
        self.asked, self.chat, self._senses = list(asked), chat, Senses(encoders, functions)
        self._items = lru_cache(maxsize=DECODED)(self._decoded)

    def __len__(self) -> int:
        return len(self.asked)

    def fingerprint(self) -> str:
        """Questions are asked once: nothing is kept of them."""
        return "asked"

    def facts(self, index: int) -> Facts:
        """Return the lengths of a prompt, by the headers of its media. Raises BadSample."""
        text = sum(len(s.tokens) for s in self.sample(index).segments if isinstance(s, Text))
        return self._senses.facts(text, self._media_items(index))

    def sample(self, index: int) -> Sample:
        """The prompt, up to where its answer begins. Raises BadSample."""
        media = self._media_items(index)
        return in_rows(self.chat.prompt(self.asked[index].conversation, names(media)), media)

    def item(self, index: int, number: int) -> np.ndarray:
        """An item of the prompt, decoded. Raises BadMedia."""
        items = [(medium, k) for medium, of in enumerate(self._media_items(index)) for k in range(len(of.sizes))]
        medium, within = items[number]
        return self._items(index, medium)[within]

    def _media_items(self, index: int) -> list[MediumItems]:
        """Return the items of every medium. Raises BadSample."""
        kinds, found = self._kinds(index), []
        for kind, encoded in zip(kinds, self.asked[index].media, strict=True):
            try:
                facts = PROBES[kind](io.BytesIO(encoded))
                found.append(self._senses.items(kind, (facts[0], facts[1]), kinds.count("image")))
            except BadMedia as bad:
                raise BadSample(str(bad)) from None
        return found

    def _decoded(self, index: int, medium: int) -> tuple[np.ndarray, ...]:
        kinds = self._kinds(index)
        return self._senses.decoded(kinds[medium], self.asked[index].media[medium], kinds.count("image"))

    def _kinds(self, index: int) -> list[Medium]:
        return [media.kind for media in self.asked[index].conversation.media()]
