"""Generate questions and answers about a sample of digits, tones and text.

The tasks are fixed. No answer can be inferred from a question's words (positions are letters, a = first) nor well from
the sizes of the media: nothing is counted, and the largest digit is only asked of at most four.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import Literal, NamedTuple

from mmjax.data.toy.digits import Strip
from mmjax.data.toy.tones import Clip

Family = Literal["image", "audio", "mixed", "text"]

ORDINALS = "abcdefgh"
ENCODER = {Strip: "vision", Clip: "audio"}


class GeneratedQuestion(NamedTuple):
    """One possible question about a sample."""

    task: str  # family.name
    text: str
    answer: str
    needs: tuple[str, ...]  # encoders of the items that the answer depends on


def possible_questions(family: Family, media: Sequence[Strip | Clip], passage: str) -> list[list[GeneratedQuestion]]:
    """List every question about a sample, one list per task; `passage` is the text of a text-only sample."""
    if family == "text":
        return _of_passage(passage)
    reads = [GeneratedQuestion(f"{family}.read", f"read {o}?", m.text, ("vision",)) for o, m in _numbered(media, Strip)]
    writes = [
        GeneratedQuestion(f"{family}.write", f"write {o}?", m.text, ("audio",)) for o, m in _numbered(media, Clip)
    ]
    # A task's questions count as one in the draw, so a sample with many items does not ask to read all the time.
    tasks = [reads, writes]
    if family == "image" and len(media) == 1:
        by_letter = zip(ORDINALS, media[0].text, strict=False)
        tasks.append(
            [GeneratedQuestion("image.at", f"at {letter}?", digit, ("vision",)) for letter, digit in by_letter]
        )
    if family == "audio" and len(media) == 1:
        tasks.append([GeneratedQuestion("audio.first", "first?", media[0].text[0], ("audio",))])
        tasks.append([GeneratedQuestion("audio.last", "last?", media[0].text[-1], ("audio",))])
    if family == "mixed" and len(media) == 2:
        tasks.append(
            [GeneratedQuestion("mixed.both", "both?", f"{writes[0].answer} {reads[0].answer}", ("vision", "audio"))]
        )
    digits = "".join([m.text for m in media])
    # The largest of many digits is nearly always 9, which would be a good guess.
    if family != "audio" and 2 <= len(digits) <= 4:
        needs = ("vision", "audio") if family == "mixed" else ("vision",)
        tasks.append([GeneratedQuestion(f"{family}.max", "max?", max(digits), needs)])
    return [asks for asks in tasks if asks]


def _numbered(media: Sequence[Strip | Clip], kind: type) -> Iterator[tuple[str, Strip | Clip]]:
    """Iterate over the items of one kind, each with its letter among all items of the sample."""
    return ((letter, item) for letter, item in zip(ORDINALS, media, strict=False) if type(item) is kind)


def _of_passage(passage: str) -> list[list[GeneratedQuestion]]:
    if "+" in passage:
        return [[GeneratedQuestion("text.add", "add?", str(sum(map(int, passage.split("+")))), ())]]
    tasks = [
        [GeneratedQuestion("text.read", "read a?", passage, ())],
        [GeneratedQuestion("text.last", "last?", passage[-1], ())],
    ]
    if len(passage) <= 4:
        tasks.append([GeneratedQuestion("text.max", "max?", max(passage), ())])
    return tasks


def draw_questions(
    u: Iterator[float], tasks: list[list[GeneratedQuestion]], count: int
) -> tuple[GeneratedQuestion, ...]:
    """Draw up to `count` questions without replacement: tasks are equally likely, then questions of a task."""
    # An exponential race: the first to arrive is drawn with probability proportional to its rate, 1 / len(asks).
    arrivals = [(-log(1 - next(u)) * len(asks), ask) for asks in tasks for ask in asks]
    return tuple([ask for _, ask in sorted(arrivals)[:count]])
