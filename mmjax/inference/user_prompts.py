"""A user's own questions as prompts: conversations that end with a question, and the files of their media."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mmjax.data.conversation import MARKER, BadSample, Conversation, MediaPlace, Medium, Message, split_markers
from mmjax.data.media.patches import Encoders
from mmjax.data.sample import Sample, SampleLengths, Text
from mmjax.data.sources.chat_source import DECODED
from mmjax.data.sources.processors import (
    PROBES,
    Functions,
    MediaItems,
    MediaProcessors,
    encoder_names,
    merge_arranged_items,
)
from mmjax.errors import BadMedia, UserError


@dataclass(frozen=True)
class UserPrompt:
    """A conversation that ends with a question, and the encoded files of its media in order."""

    conversation: Conversation
    media: tuple[bytes, ...] = ()


def make_prompt(question: str, files: Mapping[Medium, Sequence[bytes]], system: str = "") -> UserPrompt:
    """Build a prompt of one question, with media at its `<image>` and `<audio>`; kinds without such come before it.

    Raises UserError for an empty question, or where its places and the files differ in number.
    """
    marked = MARKER.findall(question)
    for kind in ("image", "audio"):
        places = marked.count(kind)
        count = len(files.get(kind, ()))
        if places not in (0, count):
            raise UserError(
                f"the question has {places} places <{kind}> for {count} file(s); give one --{kind} for each"
            )
    if not MARKER.sub("", question).strip():
        raise UserError("the question is empty; say what to ask")
    # Media of unmarked kinds first, in the order of `files`, then the question with the marked ones in their places.
    parts: list[str | MediaPlace] = [MediaPlace(kind) for kind in files if kind not in marked for _ in files[kind]]
    parts += split_markers(question)
    unplaced = {kind: iter(of_kind) for kind, of_kind in files.items()}
    media = tuple(next(unplaced[part.kind]) for part in parts if isinstance(part, MediaPlace))
    messages = (Message("system", (system,)),) if system.strip() else ()
    return UserPrompt(Conversation((*messages, Message("user", tuple(parts)))), media)


class PromptFormat(Protocol):
    """The interface that encodes questions as tokens: a `Chat`, or an `AlphabetFormat`."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens that end an answer."""

    def prompt(self, conversation: Conversation, encoders: Sequence[Sequence[str]] = ()) -> Sample: ...

    def said(self, tokens: Sequence[int]) -> str:
        """Decode generated tokens up to the end of the answer."""


class UserPromptSource:
    """Questions as a `Source` of prompts."""

    def __init__(
        self, prompts: Sequence[UserPrompt], chat: PromptFormat, encoders: Encoders, functions: Functions | None = None
    ) -> None:
        """functions: the encoders' callbacks by name."""
        self._prompts = list(prompts)
        self._chat = chat
        self._senses = MediaProcessors(encoders, functions)
        self._decoded = lru_cache(maxsize=DECODED)(self._decode)

    def __len__(self) -> int:
        return len(self._prompts)

    def fingerprint(self) -> str:
        return "asked"  # nothing is cached of user prompts

    def facts(self, index: int) -> SampleLengths:
        text = sum(len(s.tokens) for s in self.sample(index).segments if isinstance(s, Text))
        return self._senses.facts(text, self._media_items(index))

    def sample(self, index: int) -> Sample:
        media = self._media_items(index)
        return merge_arranged_items(self._chat.prompt(self._prompts[index].conversation, encoder_names(media)), media)

    def item(self, index: int, number: int) -> np.ndarray:
        media = self._media_items(index)
        places = [(medium, k) for medium, items in enumerate(media) for k in range(len(items.sizes))]
        medium, k = places[number]
        return self._decoded(index, medium)[k]

    def _media_items(self, index: int) -> list[MediaItems]:
        """Return the items of every medium. Raises BadSample."""
        kinds = self._kinds(index)
        media = []
        for kind, encoded in zip(kinds, self._prompts[index].media, strict=True):
            # Headers alone: `item` decodes.
            try:
                facts = PROBES[kind](io.BytesIO(encoded))
                media.append(self._senses.items(kind, (facts[0], facts[1]), kinds.count("image")))
            except BadMedia as bad:
                raise BadSample(str(bad)) from None
        return media

    def _decode(self, index: int, medium: int) -> tuple[np.ndarray, ...]:
        kinds = self._kinds(index)
        return self._senses.decoded(kinds[medium], self._prompts[index].media[medium], kinds.count("image"))

    def _kinds(self, index: int) -> list[Medium]:
        return [medium.kind for medium in self._prompts[index].conversation.media()]
