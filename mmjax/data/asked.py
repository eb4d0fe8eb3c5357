"""A person's own questions as prompts: conversations that wait for an answer, with the files of their media at hand."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mmjax.data.chat import Chat
from mmjax.data.chat_source import DECODED, PROBES, decoded_items, encoder_for, item_sizes
from mmjax.data.conversation import BadSample, Conversation, Media, Medium, Message
from mmjax.data.index import Encoders
from mmjax.data.sample import Facts, Sample, Text
from mmjax.errors import BadMedia, UserError

_PLACE = re.compile(r"<(image|audio)>")


@dataclass(frozen=True)
class Asked:
    """A conversation that ends with a question, and the encoded file of each of its media in order."""

    conversation: Conversation
    media: tuple[bytes, ...] = ()


def ask(question: str, files: Mapping[Medium, Sequence[bytes]], system: str = "") -> Asked:
    """One question. Media stand where it has `<image>` and `<audio>`; those of a kind that it does not mark, before it.

    Raises UserError where it says nothing, or marks another number than there are files.
    """
    marked = _PLACE.findall(question)
    for kind in ("image", "audio"):
        count, given = marked.count(kind), len(files.get(kind, ()))
        if count not in (0, given):
            raise UserError(f"the question has {count} places <{kind}> for {given} file(s); give one --{kind} for each")
    if not _PLACE.sub("", question).strip():
        raise UserError("the question is empty; say what to ask")
    pieces = _PLACE.split(question)
    parts: list[str | Media] = [Media(k) for k, of in files.items() if k not in marked for _ in of]
    parts += [Media(piece) if k % 2 else piece for k, piece in enumerate(pieces) if piece]  # type: ignore[arg-type]
    left = {kind: iter(of) for kind, of in files.items()}
    media = tuple(next(left[part.kind]) for part in parts if isinstance(part, Media))
    messages = (Message("system", (system,)),) if system.strip() else ()
    return Asked(Conversation((*messages, Message("user", tuple(parts)))), media)


class AskedPrompts:
    """Questions as a `Source` of prompts."""

    def __init__(self, asked: Sequence[Asked], chat: Chat, encoders: Encoders) -> None:
        self.asked, self.chat, self._encoders = list(asked), chat, dict(encoders)
        self._items = lru_cache(maxsize=DECODED)(self._decoded)

    def __len__(self) -> int:
        return len(self.asked)

    def fingerprint(self) -> str:
        """Questions are asked once: nothing is kept of them."""
        return "asked"

    def facts(self, index: int) -> Facts:
        """What a prompt needs, by the headers of its media. Raises BadSample."""
        text = sum(len(s.tokens) for s in self.sample(index).segments if isinstance(s, Text))
        return Facts(text, tuple((name, size) for name, sizes in self._sizes(index) for size in sizes))

    def sample(self, index: int) -> Sample:
        """The prompt, up to where its answer begins. Raises BadSample."""
        names = [[name] * len(sizes) for name, sizes in self._sizes(index)]
        return self.chat.prompt(self.asked[index].conversation, names)

    def item(self, index: int, number: int) -> np.ndarray:
        """An item of the prompt, decoded. Raises BadMedia."""
        items = [(medium, k) for medium, (_, sizes) in enumerate(self._sizes(index)) for k in range(len(sizes))]
        medium, within = items[number]
        return self._items(index, medium)[within]

    def _sizes(self, index: int) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
        """Of every medium: its encoder, and the size of each of its items. Raises BadSample."""
        found = []
        for media, encoded in zip(self._media(index), self.asked[index].media, strict=True):
            name = encoder_for(media.kind, self._encoders)
            try:
                facts = PROBES[media.kind](io.BytesIO(encoded))
                found.append((name, item_sizes(self._encoders[name], facts, self._images(index))))
            except BadMedia as bad:
                raise BadSample(str(bad)) from None
        return found

    def _decoded(self, index: int, medium: int) -> tuple[np.ndarray, ...]:
        encoder = self._encoders[encoder_for(self._media(index)[medium].kind, self._encoders)]
        return decoded_items(encoder, self.asked[index].media[medium], self._images(index))

    def _media(self, index: int) -> list[Media]:
        return list(self.asked[index].conversation.media())

    def _images(self, index: int) -> int:
        return sum(media.kind == "image" for media in self._media(index))
