"""Videos with their own sound: a medium beside each video's frames, and both interleaved in time (Qwen-Omni)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, NamedTuple

from mmjax.data.sample import SOUND, ArrangedItems, Conversation, Item, MediaPlace, Sample, Text
from mmjax.data.storage.files import Conversations, FileRef, hash_strings

Segment = Text | Item | ArrangedItems


@dataclass(frozen=True)
class WithSound:
    """Conversations that have the sound of each video as a medium of its own behind it."""

    conversations: Conversations

    def __len__(self) -> int:
        return len(self.conversations)

    def fingerprint(self) -> str:
        return hash_strings(self.conversations.fingerprint(), SOUND)

    @property
    def roots(self) -> tuple[str, ...]:
        """Return where media are looked for, if records are read without them."""
        return getattr(self.conversations, "roots", ())

    def files(self) -> list[tuple[str, int]]:
        return self.conversations.files()

    def place(self, index: int) -> str:
        return self.conversations.place(index)

    def conversation(self, index: int) -> Conversation:
        conversation = self.conversations.conversation(index)
        messages = [replace(m, parts=tuple(_with_sound(m.parts))) for m in conversation.messages]
        return replace(conversation, messages=tuple(messages))

    def media(self, index: int) -> tuple[FileRef, ...]:
        places = self.conversations.conversation(index).media()
        return tuple(
            stored
            for place, file in zip(places, self.conversations.media(index), strict=True)
            for stored in ((file, file) if place.kind == "video" else (file,))
        )


def _with_sound(parts: Sequence[str | MediaPlace]) -> Iterator[str | MediaPlace]:
    for part in parts:
        yield part
        if part == MediaPlace("video"):
            yield MediaPlace(SOUND)


class Sound(NamedTuple):
    """The sound of a video, which is the last of its items."""

    encoder: str
    samples: int
    tokens: int  # in the LLM
    chunk: int  # positions along t of the chunks in which frames and sound take turns
    marks: Literal[
        "together", "apart"
    ]  # each mark of sound stands beside that of the video, or at a position of its own


def interleave_sound(sample: Sample, first: int, times: Sequence[int], sound: Sound) -> Sample:
    """Put the tokens of a video and its sound, whose items follow each other from number `first` on, into turns.

    times: of the temporal patches. With chunks of 50 positions, patches at 0, 25, 50 and 75, and 80
    tokens of sound: patches 0 and 1, tokens 0 to 49, patches 2 and 3, tokens 50 to 79. The marks
    around them, the last token before and the first behind, stand at the positions of the marks
    outside of those, or at their own, as in transformers.
    """
    segments = list(sample.segments)
    index = next(k for k, s in enumerate(segments) if isinstance(s, Item) and s.number == first)
    patches = segments[index : index + len(times)]
    clip = segments[index + len(times)]
    assert isinstance(clip, Item)
    frames: list[list[Segment]] = [[] for _ in range(times[-1] // sound.chunk + 1)]
    for patch, time in zip(patches, times, strict=True):
        frames[time // sound.chunk].append(patch)
    heard = [
        replace(clip, part=(begin, min(begin + sound.chunk, sound.tokens)), patch=1)
        for begin in range(0, sound.tokens, sound.chunk)
    ]
    turns = [
        segment
        for patches_of_chunk, part in zip_longest(frames, heard)
        for segment in (*(patches_of_chunk or ()), *((part,) if part is not None else ()))
    ]
    previous, following = segments[index - 1], segments[index + len(times) + 1]
    assert isinstance(previous, Text)
    assert isinstance(following, Text)
    outer_begin, begin = _cut(previous, len(previous.tokens) - 1)
    end, outer_end = _cut(following, 1)
    back = int(sound.marks == "together")
    marked = [outer_begin, replace(begin, back=back), *turns, end, replace(outer_end, back=back)]
    marked = [s for s in marked if not isinstance(s, Text) or len(s.tokens)]
    return Sample((*segments[: index - 1], *marked, *segments[index + len(times) + 2 :]))


def _cut(text: Text, index: int) -> tuple[Text, Text]:
    """Cut a text behind its first `at` tokens."""
    head = replace(text, tokens=text.tokens[:index], weights=text.weights[:index])
    return head, replace(
        text, tokens=text.tokens[index:], weights=text.weights[index:], start=None, back=0
    )
