"""Questions without their answers, packed like training samples, with room for the answers to be written in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mmjax.batch import Microbatch
from mmjax.config import BatchConfig, Config, Samples
from mmjax.data.conversation import BadSample
from mmjax.data.embedded import decode
from mmjax.data.index import build_index
from mmjax.data.loader import reader_of
from mmjax.data.packing import pack_microbatch
from mmjax.data.placement import ONE_RANK, Topology
from mmjax.data.plan import make_planner
from mmjax.data.sample import Facts, Question, Sample, Source, Text
from mmjax.data.text_rows import Arrays
from mmjax.errors import UserError

PROMPTS_PER_BATCH = 48


class QuestionSource(Source, Protocol):
    """A source that can also be asked.

    Where tokens are not characters it also has `answer_tokens(index)`, how many an answer takes with its end, and
    `decode(tokens)`, what they say up to there.
    """

    def question(self, index: int) -> Question: ...


def answer_tokens(source: QuestionSource, index: int) -> int:
    """Tokens that the answer to a question takes, its end included."""
    return source.answer_tokens(index) if hasattr(source, "answer_tokens") else len(source.question(index).answer) + 1


def decoded(source: QuestionSource, tokens: Sequence[int]) -> str:
    """What tokens say, up to where the answer ends."""
    return source.decode(tokens) if hasattr(source, "decode") else decode(tokens)


@dataclass(frozen=True)
class Prompts:
    """A `Source` of a source's questions, each with `room` empty tokens after it. Their loss weight is 1: it marks the
    positions that predict the answer."""

    source: QuestionSource
    room: int

    def __len__(self) -> int:
        return len(self.source)

    def fingerprint(self) -> str:
        """That of the source, and the room."""
        return f"{self.source.fingerprint()}:{self.room}"

    def facts(self, index: int) -> Facts:
        """The sample's items; the text is the question's."""
        text = sum(len(s.tokens) for s in self.sample(index).segments if isinstance(s, Text))
        return replace(self.source.facts(index), text_tokens=text)

    def sample(self, index: int) -> Sample:
        """The question and the room for its answer, in the same branch."""
        segments = self.source.question(index).prompt.segments
        question = segments[-1]
        if not isinstance(question, Text):
            raise UserError(f"the prompt of sample {index} ends with an item; it must end with the question's text")
        empty = Text(np.zeros(self.room, np.int32), np.ones(self.room, np.float32), question.branch)
        return Sample((*segments, empty))

    def item(self, index: int, number: int) -> np.ndarray:
        """An item of the sample."""
        return self.source.item(index, number)


class PromptLoader:
    """Packs the questions of several sources into batches of one static shape, made for all of them together."""

    def __init__(self, sources: Mapping[str, QuestionSource], config: Config, topology: Topology = ONE_RANK) -> None:
        self.sources = dict(sources)
        room = max(_answer_room(source) for source in sources.values())
        prompts = {name: Prompts(source, room) for name, source in sources.items()}
        self._index = index = build_index(prompts, config.model.encoders)
        self._raises = config.data.on_bad_sample == "raise"
        self._bad = dict(zip(index.bad.tolist(), index.reason.tolist(), strict=True))
        if self._raises and self._bad:
            name, reason = next(iter(self.left_out.items()))
            raise UserError(f"{name} cannot be asked: {reason}; mend it, or skip it with data.on_bad_sample=skip")
        size = Samples(min(PROMPTS_PER_BATCH, len(index)))
        batch = BatchConfig(size=size, rows=config.batch.rows, alignment=config.batch.alignment, shapes=1)
        config = replace(config, batch=batch, seed=0)
        self._first = dict(zip(sources, index.source_start[:-1].tolist(), strict=True))
        self._planner, _ = make_planner(index, config, [1.0] * len(sources), topology)
        if len(oversize := self._planner.grouper.oversize):
            raise UserError(
                f"the question of sample {index.name(oversize[0])} fits no packed row; lower batch.rows of its encoders"
            )
        self._arrays = Arrays.of(config.model)
        self._reader = reader_of(prompts, index)

    @property
    def left_out(self) -> dict[str, str]:
        """The samples that cannot be asked, as far as is known, and why."""
        return {self._index.name(sample): reason for sample, reason in self._bad.items()}

    def usable(self, source: str) -> list[int]:
        """The samples of a source that can be asked, as far as is known."""
        first = self._first[source]
        return [i for i in range(len(self.sources[source])) if first + i not in self._bad]

    def batches(self, source: str, samples: Sequence[int]) -> Iterator[tuple[np.ndarray, Microbatch]]:
        """Batches that hold each of these samples' questions once, but for those that cannot be read.

        With each, int64 `[row, sample in row]`: which sample lies there, -1 where a row holds fewer. Raises UserError
        for one that cannot be read where the config says that it is fatal.
        """
        first = self._first[source]
        wanted = np.array([first + i for i in samples if first + i not in self._bad], np.int64)
        for plan in self._planner.plan_once(wanted) if len(wanted) else ():
            spoiled = None if self._raises else dict[int, str]()
            packed = pack_microbatch(plan, self._arrays, self._reader, spoiled=spoiled)
            self._bad |= spoiled or {}
            lies = np.full((len(packed.text.sample), 1 + int(packed.text.sample.max(initial=0))), -1)
            llm = plan.part_start[:-1]
            for sample, row, at in zip(plan.samples.tolist(), plan.row[llm], plan.offset[llm], strict=True):
                if sample not in self._bad:
                    lies[row, packed.text.sample[row, at]] = sample - first
            yield lies, packed


def _answer_room(source: QuestionSource) -> int:
    """Tokens of the longest answer to a question that can be asked."""
    longest = 1
    for index in range(len(source)):
        with suppress(BadSample):
            longest = max(longest, answer_tokens(source, index))
    return longest


def read_answers(tokens: np.ndarray, batch: Microbatch, lies: np.ndarray, source: QuestionSource) -> dict[int, str]:
    """The answers written into `tokens` `[R, T]`, by sample of this source; up to where they end."""
    answers = {}
    for row, slot in np.argwhere(lies >= 0):
        at = np.flatnonzero((batch.text.sample[row] == slot) & (batch.text.weight[row] > 0)) + 1
        answers[int(lies[row, slot])] = decoded(source, tokens[row, at].tolist())
    return answers
