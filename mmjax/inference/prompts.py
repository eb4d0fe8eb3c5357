"""Prompts of users and of data sets, packed into rows for generation."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, get_args

import numpy as np

from mmjax.config import MediaLimits
from mmjax.data.media.decode import check_media_size
from mmjax.data.media.patches import Encoders
from mmjax.data.sample import (
    MARKER,
    SOUND,
    BadSample,
    Conversation,
    MediaPlace,
    Medium,
    Message,
    Question,
    Sample,
    SampleLengths,
    Source,
    split_markers,
)
from mmjax.data.sources.processors import (
    PROBES,
    Functions,
    MediaProcessors,
    MediaSizes,
    SampleMedia,
    text_tokens,
)
from mmjax.data.storage.files import FileRef, InlineBytes
from mmjax.data.text.conversation_tokens import OfMedia
from mmjax.data.toy.dataset import END, decode_characters
from mmjax.errors import BadMedia, UserError


@dataclass(frozen=True)
class UserPrompt:
    """A conversation that ends with a question, and the encoded files of its media in order."""

    conversation: Conversation
    media: tuple[bytes, ...] = ()

    def followed_by(self, later: UserPrompt) -> UserPrompt:
        """Return the conversation with these messages behind it."""
        messages = (*self.conversation.messages, *later.conversation.messages)
        return UserPrompt(Conversation(messages), (*self.media, *later.media))


def make_prompt(
    question: str, files: Mapping[Medium, Sequence[bytes]], system: str = ""
) -> UserPrompt:
    """Build a prompt of one question, with media at its `<image>`, `<audio>` and `<video>`, or before it.

    Raises UserError for an empty question, or where its places and the files differ in number.
    """
    marked = MARKER.findall(question)
    for kind in get_args(Medium):
        places = marked.count(kind)
        count = len(files.get(kind, ()))
        if places not in (0, count):
            raise UserError(
                f"the question has {places} places <{kind}> for {count} file(s); give one --{kind} for each"
            )
    if not MARKER.sub("", question).strip():
        raise UserError("the question is empty; say what to ask")
    # Media of unmarked kinds first, in the order of `files`, then the question with the marked ones
    # in their places.
    parts: list[str | MediaPlace] = [
        MediaPlace(kind) for kind in files if kind not in marked for _ in files[kind]
    ]
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

    def prompt(
        self,
        conversation: Conversation,
        encoders: OfMedia = (),
        texts: OfMedia = (),
    ) -> Sample: ...

    def decode_answer(self, tokens: Sequence[int]) -> str:
        """Decode generated tokens up to the end of the answer."""


class UserPromptSource:
    """Questions as a `Source` of prompts."""

    def __init__(
        self,
        prompts: Sequence[UserPrompt],
        chat: PromptFormat,
        encoders: Encoders,
        functions: Functions | None = None,
        limits: MediaLimits = MediaLimits(),
    ) -> None:
        """functions: the encoders' callbacks by name."""
        self._prompts = list(prompts)
        self._chat = chat
        self._limits = limits
        processors = MediaProcessors(encoders, functions, limits)
        self._reads_sound = bool(processors.sound)
        self._media = SampleMedia(processors, self._sizes, self._file)

    def __len__(self) -> int:
        return len(self._prompts)

    def fingerprint(self) -> str:
        return "asked"  # nothing is cached of user prompts

    def facts(self, index: int) -> SampleLengths:
        try:
            return self._media.facts(index, text_tokens(self.sample(index)))
        except BadMedia as bad:
            raise BadSample(str(bad)) from None

    def sample(self, index: int) -> Sample:
        return self._media.place(
            index, partial(self._chat.prompt, self._prompts[index].conversation)
        )

    def item(self, index: int, number: int) -> np.ndarray:
        return self._media.item(index, number)

    def _sizes(self, index: int) -> MediaSizes:
        """Read the sizes of a prompt's media from their headers. Raises BadMedia."""
        prompt = self._prompts[index]
        sizes = []
        for place, encoded in zip(prompt.conversation.media(), prompt.media, strict=True):
            for kind in (
                (place.kind, SOUND)
                if place.kind == "video" and self._reads_sound
                else (place.kind,)
            ):
                first, second = PROBES[kind](io.BytesIO(encoded))
                check_media_size(kind, (first, second), self._limits)
                sizes.append((kind, (first, second)))
        return sizes

    def _file(self, index: int, medium: int) -> FileRef:
        return InlineBytes(self._prompts[index].media[medium])


class QuestionSource(Source, Protocol):
    """A source whose samples can be asked as questions.

    Where tokens are not characters it also has `answer_tokens(index)`, the length of an answer with
    its end token, `decode(tokens)`, the text up to there, and `ends`, the tokens that end an
    answer.
    """

    def question(self, index: int) -> Question: ...


def answer_tokens(source: QuestionSource, index: int) -> int:
    """Return the number of tokens of the answer to a question, its end token included."""
    return (
        source.answer_tokens(index)
        if hasattr(source, "answer_tokens")
        else len(source.question(index).answer) + 1
    )


def decode_answer(source: QuestionSource, tokens: Sequence[int]) -> str:
    """Decode tokens up to the end of the answer."""
    return source.decode(tokens) if hasattr(source, "decode") else decode_characters(tokens)


def ends_of(source: QuestionSource) -> tuple[int, ...]:
    """Return the tokens that end an answer; none where only `decode_characters` knows them."""
    return (
        tuple(source.ends)
        if hasattr(source, "ends")
        else ()
        if hasattr(source, "decode")
        else (END,)
    )


@dataclass(frozen=True)
class QuestionPrompts:
    """A `Source` of a source's questions: samples that end where the answer begins."""

    source: QuestionSource

    def __len__(self) -> int:
        return len(self.source)

    def fingerprint(self) -> str:
        """Return the source's fingerprint."""
        return self.source.fingerprint()

    def facts(self, index: int) -> SampleLengths:
        """Return the sample's items with the question's text."""
        return replace(
            self.source.facts(index), text_tokens=text_tokens(self.sample(index)), branches=None
        )

    def sample(self, index: int) -> Sample:
        """Return the question."""
        return self.source.question(index).prompt

    def item(self, index: int, number: int) -> np.ndarray:
        """Return an item of the sample."""
        return self.source.item(index, number)


class Selection:
    """Samples of one or more sources, in this order, as a `Source`."""

    def __init__(self, samples: Sequence[tuple[Source, int]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def fingerprint(self) -> str:
        """Return the sources' fingerprints with the samples' numbers."""
        sources = {id(source): source.fingerprint() for source, _ in self._samples}
        return repr([(sources[id(source)], index) for source, index in self._samples])

    def facts(self, index: int) -> SampleLengths:
        """Return the facts of that sample."""
        source, number = self._samples[index]
        return source.facts(number)

    def sample(self, index: int) -> Sample:
        """Return that sample."""
        source, number = self._samples[index]
        return source.sample(number)

    def item(self, index: int, number: int) -> np.ndarray:
        """Return an item of that sample."""
        source, sample = self._samples[index]
        return source.item(sample, number)


def select_usable(
    samples: Sequence[int], check: Callable[[int], object], limit: int | None = None
) -> tuple[list[int], dict[int, str]]:
    """Return the first `limit` samples that pass the check (all by default), and why those before them do not.

    check: raises BadSample. Samples behind the last one that is used are not looked at.
    """
    usable: list[int] = []
    unusable: dict[int, str] = {}
    for sample in samples:
        if limit is not None and len(usable) >= limit:
            break
        try:
            check(sample)
            usable.append(sample)
        except BadSample as bad:
            unusable[sample] = str(bad)
    return usable, unusable
