"""Encode questions in the alphabet of the toy data sets, for runs without a chat format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.data.sample import BadSample, Conversation, Item, Sample, Text
from mmjax.data.text.conversation_tokens import OfMedia
from mmjax.data.toy.dataset import BEFORE_ITEM, END, PASSAGE, QUESTION, STRIDE


@dataclass(frozen=True)
class AlphabetFormat:
    """Encode questions as tokens of an alphabet, with the interface of a `Chat`.

    embedded: place parts at the RoPE positions that samples of the embedded data set have.
    """

    alphabet: str
    embedded: bool

    @property
    def ends(self) -> tuple[int, ...]:
        return (END,)

    def prompt(
        self,
        conversation: Conversation,
        encoders: OfMedia = (),
        texts: OfMedia = (),
    ) -> Sample:
        """Encode one question up to where its answer begins. Raises BadSample for what the alphabet lacks."""
        if len(conversation.messages) != 1:
            raise BadSample(
                "a run without a chat format knows no system messages; leave out --system"
            )
        (message,) = conversation.messages
        if not isinstance(message.parts[-1], str):
            raise BadSample("it ends with an image or a clip; put the question behind it")
        *context, question = message.parts
        segments = list[Text | Item]()
        # Without media, lines before the question are a passage, as in the embedded data set's text
        # samples.
        if not context and "\n" in question:
            *words, passage, question = question.split("\n")
            if any(words):
                segments.append(self._words("".join(words), 0, PASSAGE))
            segments.append(self._words(passage, PASSAGE, QUESTION))
        encoders_of_media = iter(encoders)
        number = 0  # of the next item
        for part in context:
            if isinstance(part, str):
                segments.append(self._words(part, number * STRIDE, number * STRIDE + BEFORE_ITEM))
                continue
            for encoder in next(encoders_of_media):
                position = number * STRIDE + BEFORE_ITEM
                if self.embedded and position > QUESTION:
                    raise BadSample(
                        f"samples of this run have at most {QUESTION // STRIDE} images and clips"
                    )
                segments.append(Item(encoder, number, position if self.embedded else None))
                number += 1
        # Samples of the embedded data set have their questions in branches 1, 2, ...
        segments.append(
            self._text(question.strip(), QUESTION if self.embedded else None, int(self.embedded))
        )
        return Sample(tuple(segments))

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """Decode generated tokens up to the end of the answer, skipping tokens that are no character."""
        stop = next((k for k, token in enumerate(tokens) if token == END), len(tokens))
        # 0 is padding and 1 the end; characters follow from 2.
        return "".join(
            self.alphabet[t - 2] for t in tokens[:stop] if 2 <= t < 2 + len(self.alphabet)
        )

    def _text(self, text: str, start: int | None, branch: int = 0) -> Text:
        if unknown := sorted(set(text) - set(self.alphabet)):
            shown = ", ".join(map(repr, unknown[:5]))
            raise BadSample(
                f"{shown} cannot be said in this run's alphabet, {self.alphabet!r} (data.alphabet)"
            )
        tokens = np.array([2 + self.alphabet.index(character) for character in text], np.int32)
        return Text(tokens, np.zeros(len(tokens), np.float32), branch, start)

    def _words(self, words: str, start: int, end: int) -> Text:
        """Encode words at positions from `start` on, which must end before `end`, where something else follows."""
        if self.embedded and len(words) > end - start:
            raise BadSample(
                f"{words!r} is longer than the {end - start} characters that samples of this run have there"
            )
        return self._text(words, start if self.embedded else None)
