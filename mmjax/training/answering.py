"""A model's answers to the questions of whole data sets, and how right they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmjax.data.chat_source import ChatSource
from mmjax.data.conversation import BadSample
from mmjax.data.prompts import Prompts
from mmjax.data.sample import Question
from mmjax.training.answer_scores import MEASURES, Scored
from mmjax.training.generation import Generator, Params


@dataclass(frozen=True)
class Reply:
    """What a model said to one question of a data set."""

    sample: int
    said: str
    right: tuple[str, ...]
    ended: bool  # by itself, and not because there was room for no more


@dataclass(frozen=True)
class Replies:
    """What it said to all of them. left_out: why the others could not be asked, by sample."""

    replies: tuple[Reply, ...]
    left_out: dict[int, str]

    def scores(self, measures: Sequence[str]) -> dict[str, float]:
        """By measure, as `MEASURES` names them; none where nothing was asked."""
        answers = [Scored(reply.said, reply.right) for reply in self.replies]
        return {name: MEASURES[name](answers) for name in measures} if answers else {}


def ask_all(
    generator: Generator,
    params: Params,
    source: ChatSource,
    limit: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Replies:
    """Every question of a source, or the first `limit` that can be asked; the others are left out."""
    questions: dict[int, Question] = {}
    left_out: dict[int, str] = {}
    for sample, question in _questions(source):
        if isinstance(question, BadSample):
            left_out[sample] = str(question)
        elif limit is None or len(questions) < limit:
            questions[sample] = question
    asked, spoiled, replies = list(questions), dict[int, str](), dict[int, Reply]()
    for place, answer in generator.answered(params, Prompts(source, 0), asked, spoiled=spoiled):
        sample = asked[place]
        right = questions[sample].answers or (questions[sample].answer,)
        replies[sample] = Reply(sample, answer.text, right, answer.ended)
        progress(len(replies))
    left_out |= {asked[place]: reason for place, reason in spoiled.items()}
    return Replies(tuple(replies[sample] for sample in asked if sample in replies), left_out)


def _questions(source: ChatSource) -> Iterator[tuple[int, Question | BadSample]]:
    for sample in range(len(source)):
        try:
            source.facts(sample)
            yield sample, source.question(sample)
        except BadSample as bad:
            yield sample, bad


def lines(replies: Replies, name: str) -> Iterator[Mapping[str, object]]:
    """What was said, as JSON lines have it."""
    for reply in replies.replies:
        own = {"sample": f"{name}[{reply.sample}]", "said": reply.said, "right": list(reply.right)}
        yield own if reply.ended else own | {"ended": False}
    for sample, reason in replies.left_out.items():
        yield {"sample": f"{name}[{sample}]", "left_out": reason}
