"""Conversations as a data set's files have them, before any tokenizer: messages with places of images and clips."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

Medium = Literal["image", "audio"]

MARKER = re.compile(r"<(image|audio)>")  # a medium's place in a text
# White space with a line break, after and before a marker.
_BREAK_AFTER = re.compile(r"^[^\S\r\n]*[\r\n]\s*")
_BREAK_BEFORE = re.compile(r"\s*[\r\n][^\S\r\n]*$")


class BadSample(ValueError):
    """A record that cannot be trained on. Its message is the reason, without the record's name, which callers add."""


@dataclass(frozen=True)
class MediaPlace:
    """A place of an image or a clip in a message; the n-th place of a conversation is that of its n-th medium."""

    kind: Medium


@dataclass(frozen=True)
class Message:
    """One message of a conversation: text and media, in order."""

    role: str  # "system", "user", "assistant", ...
    parts: tuple[str | MediaPlace, ...]
    weight: float = 1.0  # of the loss on an answer's tokens


@dataclass(frozen=True)
class Conversation:
    """One record of a data set."""

    messages: tuple[Message, ...]
    answers: tuple[str, ...] = ()  # all right answers to its last question, where the record has several

    def media(self) -> Iterator[MediaPlace]:
        """Iterate over the places of media in order."""
        return (part for message in self.messages for part in message.parts if isinstance(part, MediaPlace))


def split_markers(text: str) -> list[str | MediaPlace]:
    """Split a text at its markers `<image>` and `<audio>`.

    A line break beside a marker is part of the marker, not of the text: LLaVA's records write one, and chat templates
    write their own. Other white space stays.
    """
    pieces = MARKER.split(text)
    parts: list[str | MediaPlace] = []
    for k, piece in enumerate(pieces):
        if k % 2:  # re.split alternates texts with the marker's group
            parts.append(MediaPlace(cast(Medium, piece)))
            continue
        # A piece's start follows a marker unless it is the first, its end precedes one unless it is the last.
        if k > 0:
            piece = _BREAK_AFTER.sub("", piece)
        if k < len(pieces) - 1:
            piece = _BREAK_BEFORE.sub("", piece)
        if piece:
            parts.append(piece)
    return parts
