"""Evaluate a model on data sets: generated answers to their questions, scored, and the loss of their samples.

One engine for `mmjax.evaluate` and for evaluation while training. Prompts lie one in a row, keys
and values are cached (`generator.py`); while training all batches have one shape, so that its
programs are compiled before the first step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mmjax.batch import Microbatch
from mmjax.config import Config
from mmjax.data.loading.replay import spoken
from mmjax.data.sample import BadSample, Question, Sample, Source, Text, with_place
from mmjax.data.sources.opening import look_again, open_sources
from mmjax.data.text.chat_template import END_OF_THINKING
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.inference.generator import Answer, Generator
from mmjax.inference.image_sampler import ImageSampler, ImageSampling
from mmjax.inference.prompt_rows import BatchLimits, PromptRows
from mmjax.inference.prompts import (
    QuestionPrompts,
    QuestionSource,
    Selection,
    answer_tokens,
    decode_answer,
    ends_of,
    select_usable,
)
from mmjax.inference.scores import Answered, Replies, Scores
from mmjax.losses.objective import TextObjective, mean_measures, measures_of
from mmjax.losses.step_losses import image_sums
from mmjax.models.layer_stacks import Params
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, activations_on, replicated
from mmjax.runtime.device_batch import put_rows
from mmjax.runtime.program_cache import CachedProgram
from mmjax.startup import activity

PICTURES = 200  # made of each source by default


def without_thought(prediction: str, references: Sequence[str]) -> str:
    """Return what stands behind a model's thought, unless the right answers have one too."""
    if any(END_OF_THINKING in right for right in references):
        return prediction
    return prediction.rpartition(END_OF_THINKING)[2].strip()


class Evaluator:
    """Answer questions and compute losses of fixed sets of samples.

    Sources are named `<split>/<source>`. Those with a `question` method are asked; losses are of
    all.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        rules: ShardingRules,
        sources: Mapping[str, Source],
        config: Config,
        limits: Mapping[str, int | None] | None = None,
        samples: Mapping[str, Sequence[int]] | None = None,
        max_tokens: int | None = None,
        batch_limits: BatchLimits | None = None,
        one_shape: bool = False,
        loss_chunks: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """limits: by split, the most samples to use of each source. samples: by source, those to choose from.

        max_tokens: of an answer, by default of the longest right one. batch_limits: what a rank
        computes together.
        one_shape: give all batches one shape, for `compile`. loss_chunks: as in the training
        config; None: no losses.
        progress: called with the number of samples that are done, after every batch. Raises
        UserError for a sample that cannot be used where the config says that is fatal.
        """
        self.sources = dict(sources)
        self._model = model
        self._batch_limits = batch_limits
        self._unusable = defaultdict[str, dict[int, str]](dict)
        # families and tasks of each split's questions
        self._groups = defaultdict[str, set[str]](set)
        self._fatal = config.data.on_bad_sample == "raise"
        self._mesh = mesh
        self._rules = rules
        self._progress = progress
        self._done = 0
        questions = list[tuple[str, int]]()  # source and sample
        measured = list[tuple[str, int]]()  # those whose loss is computed
        lengths = [1]  # tokens of right answers
        ends = set[tuple[int, ...]]()
        for name, source in sources.items():
            limit = (limits or {}).get(name.split("/")[0])
            candidates = range(len(source)) if samples is None else samples[name]
            if hasattr(source, "question"):
                groups, counted = (
                    self._groups[name.partition("/")[0]],
                    lengths if max_tokens is None else None,
                )
                check = partial(_check_question, source, name, counted, groups)
                questions += [
                    (name, index) for index in self._usable(name, source, candidates, check, limit)
                ]
                ends.add(ends_of(source))
            if loss_chunks is not None:
                measured += [
                    (name, index)
                    for index in self._usable(name, source, candidates, source.facts, limit)
                ]
        self._asked = questions
        self._measured = measured
        decode: Callable[[Sequence[int]], str] = lambda tokens: ""  # noqa: E731 - each source decodes its own answers
        common_ends = ends.pop() if len(ends) == 1 else ()
        self._generator = Generator(
            model,
            mesh,
            rules,
            common_ends,
            decode,
            max_tokens=max_tokens or max(lengths),
            batch_limits=batch_limits,
        )
        prompts = {name: QuestionPrompts(source) for name, source in sources.items()}
        self._questions = self._generator.rows(
            Selection([(prompts[name], index) for name, index in questions]),
            _by_split(questions) if one_shape else (),
        )
        self._samples = PromptRows(
            Selection([(sources[name], index) for name, index in measured]),
            model.config,
            self._generator.topology,
            max_answer=0,
            batch_limits=batch_limits,
            groups=_by_split(measured) if one_shape else (),
            loss=config.loss,
        )
        objective = TextObjective.of(model, config.loss, loss_chunks or 1)

        def losses(
            params: Params, batch: Microbatch
        ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
            with activations_on(mesh, rules):
                outputs, per_token, measures = objective(params, batch)
            by_token = {"loss": per_token, **measures, "weight": batch.text.weight}
            return {name: x.sum(1) for name, x in by_token.items()}, image_sums(
                outputs.errors, batch.items
            )

        closed_over = (model.description, rules, config.loss, objective.chunks)
        context = None if model.description is None else repr(closed_over)
        self._losses = CachedProgram(context, mesh, losses, out_shardings=replicated(mesh))
        self._loss = config.loss

    @property
    def left_out(self) -> dict[str, str]:
        """Name the samples that cannot be used, as far as is known, with the reason."""
        return {
            f"{name}[{n}]": why
            for name, unusable in self._unusable.items()
            for n, why in unusable.items()
        }

    def compile(self, params: Params) -> None:
        """Compile the programs by running each on its first batch."""
        if self._asked:
            for _ in self._generator.answer_rows(params, self._questions, [0], unreadable={}):
                pass
        if self._measured:
            for _, batch in self._samples.batches([0], {}):
                jax.block_until_ready(
                    self._losses.run(params, put_rows(batch, self._mesh, self._rules))
                )

    def metrics(self, split: str) -> tuple[str, ...]:
        """Name the scores that evaluating a split gives, but for the number of samples; none without samples."""
        measured = {name for name, _ in self._measured if name.startswith(f"{split}/")}
        by_source = (
            [f"loss/{name.partition('/')[2]}" for name in sorted(measured)]
            if len(measured) > 1
            else []
        )
        matches = [f"exact_match_{name}" for name in sorted(self._groups.get(split, ()))]
        losses = ["loss", *measures_of(self._loss)] if measured else []
        return tuple(f"{split}/{name}" for name in [*matches, *losses, *by_source])

    def questions(self, split: str = "") -> int:
        """Return the number of questions of a split, or of all."""
        return sum(name.startswith(split) for name, _ in self._asked)

    def answer(self, params: Params, split: str = "") -> dict[str, Replies]:
        """Answer the questions of a split, or all, greedily; the answers by source, in the order of its samples."""
        numbers = [n for n, (name, _) in enumerate(self._asked) if name.startswith(split)]
        unreadable = dict[int, str]()
        answers = dict[int, Answer]()
        with activity(f"answering {split} questions".replace("  ", " "), len(numbers)) as under_way:
            for number, answer in self._generator.answer_rows(
                params, self._questions, numbers, unreadable=unreadable
            ):
                answers[number] = answer
                under_way.done = len(answers)
                self._advance(1)
        self._note(self._asked, unreadable)
        answered: dict[str, list[Answered]] = {
            name: []
            for name, source in self.sources.items()
            if name.startswith(split) and hasattr(source, "question")
        }
        for number in numbers:
            name, sample = self._asked[number]
            if number in answers:
                answered[name].append(self._answered(name, sample, answers[number]))
        return {name: Replies(tuple(a), dict(self._unusable[name])) for name, a in answered.items()}

    def pictures(
        self, params: Params, sampling: ImageSampling | None = None, limit: int = PICTURES
    ) -> dict[str, dict[int, list[np.ndarray]]]:
        """Make the images of the first `limit` samples with any to be made of each source, by source and sample."""
        sampler = ImageSampler(self._model, self._mesh, self._rules, sampling, self._batch_limits)
        images_by_source: dict[str, dict[int, list[np.ndarray]]] = {}
        for name, source in self.sources.items():
            numbers = islice(
                (n for n in range(len(source)) if self._has_pictures(source, n)), limit
            )
            if not (samples := list(numbers)):
                continue
            images = defaultdict[int, list[np.ndarray]](list)
            unreadable = dict[int, str]()
            with activity(f"making images of {name}", len(samples)) as under_way:
                for image in sampler.images(
                    params, Selection([(source, n) for n in samples]), unreadable
                ):
                    images[samples[image.prompt]].append(image.pixels)
                    under_way.done = len(images)
            self._note([(name, n) for n in samples], unreadable)
            if images:
                images_by_source[name] = dict(sorted(images.items()))
        return images_by_source

    def image_prompts(self, name: str, sample: int) -> list[str]:
        """Return the text before each image to be made of a sample of a source, in the order of `pictures`."""
        source = self.sources[name]
        text = ""
        prompts: list[tuple[str, str]] = []
        for segment in source.sample(sample).segments:
            if isinstance(segment, Text):
                text += spoken(source, segment.tokens.tolist())
                continue
            if self._makes(segment.encoder):
                prompts.append((segment.encoder, text))
            text += f"<{segment.encoder}>"
        return [prompt for _, prompt in sorted(prompts, key=itemgetter(0))]

    def _makes(self, module: str) -> bool:
        return self._model.config.towers[module].is_generator

    def _has_pictures(self, source: Source, index: int) -> bool:
        try:
            return any(self._makes(module) for module, _ in source.facts(index).items)
        except BadSample:
            return False

    def loss(self, params: Params, split: str = "") -> Scores:
        """Compute the mean loss per token over the samples of a split, or all.

        Returns `loss`, `loss/<source>` where there are several, what else the config's loss
        measures, and `image_loss/<generator>`, the mean error of its patches; nothing without
        samples.
        """
        images = defaultdict[str, np.ndarray](lambda: np.zeros(2))  # by generator: errors, patches
        sums = defaultdict[str, Counter[str]](Counter)  # by source
        for name, _, values in self._sample_losses(params, split, images):
            sums[name].update(values)
        means = {
            name.split("/", 1)[1]: s["loss"] / s["weight"]
            for name, s in sums.items()
            if s["weight"] > 0
        }
        of_images = {
            f"image_loss/{name}": float(s[0] / s[1]) for name, s in images.items() if s[1] > 0
        }
        if not means:
            return of_images
        total = {name: sum(s[name] for s in sums.values()) for name in next(iter(sums.values()))}
        weight = total.pop("weight")
        by_source = {f"loss/{name}": mean for name, mean in means.items()} if len(means) > 1 else {}
        measured = mean_measures(self._loss, total, weight)
        return {"loss": total["loss"] / weight} | measured | by_source | of_images

    def log_probs(
        self, params: Params, measures: Mapping[str, Sequence[str]]
    ) -> dict[str, dict[int, dict[str, float]]]:
        """Compute log-probabilities of every sample's answers by name, by source and sample.

        measures: by name, the measures of the config's loss whose sum each is.
        """
        sums = defaultdict[str, dict[int, dict[str, float]]](dict)
        for name, sample, values in self._sample_losses(params):
            weight = values["weight"]
            sums[name][sample] = {
                key: sum(values[m] for m in names) / weight for key, names in measures.items()
            }
        return sums

    def _sample_losses(
        self, params: Params, split: str = "", images: dict[str, np.ndarray] | None = None
    ) -> Iterator[tuple[str, int, dict[str, float]]]:
        """Yield the source, the number and the sums over tokens of every readable sample, and add to `images`."""
        numbers = [n for n, (name, _) in enumerate(self._measured) if name.startswith(split)]
        unreadable = dict[int, str]()
        with activity(f"computing the {split or 'mean'} loss", len(numbers)) as under_way:
            for number, batch in self._samples.batches(numbers, unreadable):
                values, of_images = jax.device_get(
                    self._losses.run(params, put_rows(batch, self._mesh, self._rules))
                )
                for row in np.flatnonzero(number >= 0):
                    yield (
                        *self._measured[number[row]],
                        {name: float(x[row]) for name, x in values.items()},
                    )
                for name, of_generator in of_images.items() if images is not None else ():
                    images[name] += of_generator
                under_way.done += int((number >= 0).sum())
                self._advance(int((number >= 0).sum()))
        self._note(self._measured, unreadable)

    def _usable(
        self,
        name: str,
        source: Source,
        candidates: Sequence[int],
        check: Callable[[int], object],
        limit: int | None,
    ) -> list[int]:
        """Return the samples of a source that pass the check, and note the others."""
        usable, unusable = select_usable(candidates, check, limit)
        for sample, reason in unusable.items():
            self._leave_out(name, sample, with_place(source, sample, reason))
        return usable

    def _note(self, samples: Sequence[tuple[str, int]], unreadable: Mapping[int, str]) -> None:
        """Note the samples that turned out unreadable."""
        for number, reason in unreadable.items():
            name, sample = samples[number]
            self._leave_out(name, sample, with_place(self.sources[name], sample, reason))

    def _leave_out(self, source: str, sample: int, reason: str) -> None:
        if self._fatal:
            raise UserError(
                f"{source}[{sample}] cannot be asked: {reason}; mend it, or skip it with data.on_bad_sample=skip"
            )
        self._unusable[source][sample] = reason

    def _advance(self, samples: int) -> None:
        self._done += samples
        self._progress(self._done)

    def _answered(self, name: str, sample: int, answer: Answer) -> Answered:
        source: Any = self.sources[name]
        question: Question = source.question(sample)
        family, task = _family_and_task(question, name)
        references = question.answers or (question.answer,)
        prediction = without_thought(decode_answer(source, answer.tokens), references)
        return Answered(
            sample=sample,
            family=family,
            task=task,
            question=readable(question.prompt, source),
            answer=question.answer,
            prediction=prediction,
            needs=question.needs,
            references=references,
            ended=answer.ended,
        )


def _check_question(
    source: QuestionSource, name: str, lengths: list[int] | None, groups: set[str], index: int
) -> None:
    """Raise BadSample where a question cannot be asked; take in the length of its answer, its family and its task."""
    source.facts(index)
    question = source.question(index)
    if not isinstance(question.prompt.segments[-1], Text):
        raise UserError(
            f"the prompt of sample {index} ends with an item; it must end with the question's text"
        )
    groups |= set(_family_and_task(question, name))
    if lengths is not None:
        lengths.append(answer_tokens(source, index))


def _family_and_task(question: Question, name: str) -> tuple[str, str]:
    family = question.family or name.partition("/")[2]
    return family, question.task or family


def _by_split(samples: Sequence[tuple[str, int]]) -> list[list[int]]:
    """Group the numbers of samples by the split of their sources."""
    groups = defaultdict[str, list[int]](list)
    for number, (name, _) in enumerate(samples):
        groups[name.split("/")[0]].append(number)
    return list(groups.values())


def evaluation_sources(config: Config, splits: Sequence[str], folder: Path) -> dict[str, Source]:
    """Open the sources of these splits that have samples, by `<split>/<source>`, with their files as they are now.

    Called by all processes together.
    """
    sources = {
        f"{split}/{name}": source
        for split in splits
        for name, source in open_sources(config, split, folder).items()
        if len(source)
    }
    coordination.run_on_leader(lambda: look_again(sources))
    return sources


def readable(prompt: Sample, source: QuestionSource) -> str:
    """Render a prompt as text, its items as <encoder>."""
    return " ".join(
        decode_answer(source, s.tokens.tolist()) if isinstance(s, Text) else f"<{s.encoder}>"
        for s in prompt.segments
    )
