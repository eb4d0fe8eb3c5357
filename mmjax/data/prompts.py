"""Pack questions without their answers like training samples, with empty positions to generate the answers into."""

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
    """A source that also has questions.

    Where tokens are not characters it also has `answer_tokens(index)`, the length of an answer including its end, and
    `decode(tokens)`, the text of generated tokens up to that end.
    """

    def question(self, index: int) -> Question: ...


def answer_tokens(source: QuestionSource, index: int) -> int:
    """Count the tokens of the answer to a question, including its end."""
    return source.answer_tokens(index) if hasattr(source, "answer_tokens") else len(source.question(index).answer) + 1


def decoded(source: QuestionSource, tokens: Sequence[int]) -> str:
    """Decode generated tokens up to the end of the answer."""
    return source.decode(tokens) if hasattr(source, "decode") else decode(tokens)


@dataclass(frozen=True)
class Prompts:
    """A `Source` of a source's questions, each with `room` empty tokens after it.

    Their loss weight is 1, which marks the positions that predict the answer.
    """

    source: QuestionSource
    room: int

    def __len__(self) -> int:
        return len(self.source)

    def fingerprint(self) -> str:
        return f"{self.source.fingerprint()}:{self.room}"

    def facts(self, index: int) -> Facts:
        text = sum(len(s.tokens) for s in self.sample(index).segments if isinstance(s, Text))
        return replace(self.source.facts(index), text_tokens=text)

    def sample(self, index: int) -> Sample:
        """Return the question and the empty tokens for its answer, in the same branch."""
        segments = self.source.question(index).prompt.segments
        question = segments[-1]
        if not isinstance(question, Text):
            raise UserError(f"the prompt of sample {index} ends with an item; it must end with the question's text")
        # Without a `start` of its own, RoPE positions continue behind the question.
        empty = Text(np.zeros(self.room, np.int32), np.ones(self.room, np.float32), question.branch)
        return Sample((*segments, empty))

    def item(self, index: int, number: int) -> np.ndarray:
        return self.source.item(index, number)


class PromptLoader:
    """Pack the questions of several sources into batches of one static shape."""

    def __init__(self, sources: Mapping[str, QuestionSource], config: Config, topology: Topology = ONE_RANK) -> None:
        self.sources = dict(sources)
        # All batches have the same shape, so every prompt has room for the longest answer.
        room = max(_max_answer_tokens(source) for source in sources.values())
        prompts = {name: Prompts(source, room) for name, source in sources.items()}
        self._index = index = build_index(prompts, config.model.encoders)
        self._raises = config.data.on_bad_sample == "raise"
        self._bad = dict(zip(index.bad.tolist(), index.reason.tolist(), strict=True))
        if self._raises and self._bad:
            name, reason = next(iter(self.left_out.items()))
            raise UserError(f"{name} cannot be asked: {reason}; mend it, or skip it with data.on_bad_sample=skip")
        # One shape is one compiled program, whatever the training batches are.
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
        """Return the samples known to be unusable, by name, and why."""
        return {self._index.name(sample): reason for sample, reason in self._bad.items()}

    def usable(self, source: str) -> list[int]:
        """List the samples of a source that are not known to be unusable."""
        first = self._first[source]
        return [i for i in range(len(self.sources[source])) if first + i not in self._bad]

    def batches(self, source: str, samples: Sequence[int]) -> Iterator[tuple[np.ndarray, Microbatch]]:
        """Yield batches with each of these samples' questions once, without those that cannot be read.

        With each batch comes the sample at each place, int64 `[row, sample in row]`, -1 where a row has fewer. Raises
        UserError for one that cannot be read where the config says that it is fatal.
        """
        first = self._first[source]
        questions = np.array([first + i for i in samples if first + i not in self._bad], np.int64)
        for plan in self._planner.plan_once(questions) if len(questions) else ():
            # Without a dictionary to add to, packing raises for a sample that cannot be read.
            spoiled = None if self._raises else dict[int, str]()
            packed = pack_microbatch(plan, self._arrays, self._reader, spoiled=spoiled)
            self._bad |= spoiled or {}
            sample_at = np.full((len(packed.text.sample), 1 + int(packed.text.sample.max(initial=0))), -1)
            llm = plan.part_start[:-1]  # parts are in CSR order, each sample's LLM part first
            for sample, row, offset in zip(plan.samples.tolist(), plan.row[llm], plan.offset[llm], strict=True):
                if sample not in self._bad:
                    sample_at[row, packed.text.sample[row, offset]] = sample - first
            yield sample_at, packed


def _max_answer_tokens(source: QuestionSource) -> int:
    """Return the length of the longest answer to a usable question."""
    longest = 1
    for index in range(len(source)):
        with suppress(BadSample):
            longest = max(longest, answer_tokens(source, index))
    return longest


def read_answers(
    tokens: np.ndarray, batch: Microbatch, sample_at: np.ndarray, source: QuestionSource
) -> dict[int, str]:
    """Decode the answers generated into `tokens` `[R, T]`, by sample of this source; `sample_at` is from `batches`."""
    answers = {}
    for row, slot in np.argwhere(sample_at >= 0):
        predicts = (batch.text.sample[row] == slot) & (batch.text.weight[row] > 0)
        answer = tokens[row, np.flatnonzero(predicts) + 1]  # each position predicts the token behind it
        answers[int(sample_at[row, slot])] = decoded(source, answer.tolist())
    return answers
