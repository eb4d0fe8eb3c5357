"""Questions without their answers, as samples to generate from, and the samples that an evaluation uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mmjax.data.conversation import BadSample
from mmjax.data.sample import Question, Sample, SampleLengths, Source, Text
from mmjax.data.toy.dataset import END, decode_characters


class QuestionSource(Source, Protocol):
    """A source whose samples can be asked as questions.

    Where tokens are not characters it also has `answer_tokens(index)`, the length of an answer with its end token,
    `decode(tokens)`, the text up to there, and `ends`, the tokens that end an answer.
    """

    def question(self, index: int) -> Question: ...


def answer_tokens(source: QuestionSource, index: int) -> int:
    """Return the number of tokens of the answer to a question, its end token included."""
    return source.answer_tokens(index) if hasattr(source, "answer_tokens") else len(source.question(index).answer) + 1


def decode_answer(source: QuestionSource, tokens: Sequence[int]) -> str:
    """Decode tokens up to the end of the answer."""
    return source.decode(tokens) if hasattr(source, "decode") else decode_characters(tokens)


def ends_of(source: QuestionSource) -> tuple[int, ...]:
    """Return the tokens that end an answer; none where only `decode_characters` knows them."""
    return tuple(source.ends) if hasattr(source, "ends") else () if hasattr(source, "decode") else (END,)


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
        text = sum(len(s.tokens) for s in self.sample(index).segments if isinstance(s, Text))
        return replace(self.source.facts(index), text_tokens=text)

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
