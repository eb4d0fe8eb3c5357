"""Exact match of greedy answers: single questions, each decoded freely, by family and task."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.data.placement import Topology
from mmjax.data.prompts import PromptLoader, QuestionSource, decoded, read_answers
from mmjax.data.sample import Sample, Text
from mmjax.data.sources import open_sources
from mmjax.models.model import Model
from mmjax.parallel.mesh import replicated
from mmjax.parallel.sharding import ShardingRules, activations_on
from mmjax.startup import Activity, activity
from mmjax.training.decoding import greedy
from mmjax.training.step import put_rows

Params = dict[str, Any]
Scores = dict[str, float]


@dataclass(frozen=True)
class Answered:
    """One question and what the model said."""

    family: str
    task: str
    question: str
    answer: str
    said: str
    needs: tuple[str, ...]  # encoders of the items that the answer depends on

    def __str__(self) -> str:
        return f"{self.question}  ->  {self.said!r}" + (
            "" if self.said == self.answer else f"  (it is {self.answer!r})"
        )


class Evaluator:
    """Asks a model the questions of sources. One program, compiled once for all of them."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        rules: ShardingRules,
        sources: Mapping[str, QuestionSource],
        config: Config,
        topology: Topology,
        gets_on: Callable[[], None] = lambda: None,
    ) -> None:
        """gets_on: called after every batch of answers."""
        self._gets_on, self._under_way = gets_on, Activity("answering")
        self.sources = dict(sources)
        self._loader = PromptLoader(sources, config, topology) if sources else None
        self._mesh, self._rules = mesh, rules

        def answers(params: Params, batch: Microbatch) -> jax.Array:
            with activations_on(mesh, rules):
                return greedy(model, params, batch)

        self._answers: Callable[[Params, Microbatch], jax.Array] = jax.jit(answers, out_shardings=replicated(mesh))

    @property
    def left_out(self) -> dict[str, str]:
        """The samples that cannot be asked, as far as is known, and why."""
        return self._loader.left_out if self._loader else {}

    def prepare(self, params: Params) -> None:
        """Compile the program, by asking one question."""
        for source in self.sources:
            if asked := self._loader.usable(source)[:1]:
                self.ask(params, source, asked)
                return

    def ask(self, params: Params, source: str, samples: Sequence[int]) -> list[Answered]:
        """The answers to these samples' questions, in their order; none to those that cannot be read."""
        said: dict[int, str] = {}
        for lies, batch in self._loader.batches(source, samples):
            tokens = self._answers(params, put_rows(batch, self._mesh, self._rules))
            said |= read_answers(np.asarray(tokens), batch, lies, self.sources[source])
            self._under_way.done += int((lies >= 0).sum())
            self._gets_on()
        questions = {i: self.sources[source].question(i) for i in samples if i in said}
        return [
            Answered(q.family, q.task, readable(q.prompt, self.sources[source]), q.answer, said[i], q.needs)
            for i, q in questions.items()
        ]

    def ask_all(self, params: Params, split: str, limit: int | None = None) -> list[Answered]:
        """The questions of every source of a split (named `<split>/<source>`), at most `limit` of each."""
        asked = {k: self._loader.usable(k)[:limit] for k in self.sources if k.startswith(f"{split}/")}
        with activity(f"answering {split} questions", sum(map(len, asked.values()))) as self._under_way:
            return [answered for name, samples in asked.items() for answered in self.ask(params, name, samples)]


def question_sources(config: Config, splits: Sequence[str], folder: Any) -> dict[str, QuestionSource]:
    """The sources of these splits that have questions, by `<split>/<source>`."""
    return {
        f"{split}/{name}": source
        for split in splits
        for name, source in open_sources(config, split, folder).items()
        if hasattr(source, "question") and len(source)
    }


def readable(prompt: Sample, source: QuestionSource) -> str:
    """A prompt as text, its items as <encoder>."""
    return " ".join(
        decoded(source, s.tokens.tolist()) if isinstance(s, Text) else f"<{s.encoder}>" for s in prompt.segments
    )


def exact_match(answered: Sequence[Answered]) -> Scores:
    """`exact_match_<family>`, then `exact_match_<family>.<task>`, and `samples`; nothing where nothing was asked."""
    hits: dict[str, list[bool]] = defaultdict(list)
    for a in answered:
        hits[a.family].append(a.said == a.answer)
        hits[a.task].append(a.said == a.answer)
    scores = {f"exact_match_{name}": float(np.mean(hits[name])) for name in sorted(hits, key=lambda n: ("." in n, n))}
    return scores | {"samples": len(answered)} if scores else {}


def chance(answered: Sequence[Answered]) -> Scores:
    """`chance_<family>`: the exact match of always giving each task's commonest answer, without looking."""
    answers: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for a in answered:
        answers[a.family][a.task][a.answer] += 1
    return {
        f"chance_{family}": sum(max(c.values()) for c in tasks.values()) / sum(c.total() for c in tasks.values())
        for family, tasks in sorted(answers.items())
    }
