"""Evaluate a run on its validation and test splits, and track the best value of a metric.

The best value decides which checkpoint is kept, and when training stops early.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmjax.balance.parts import LLM
from mmjax.config import Config, TrainingConfig
from mmjax.console import print_lines
from mmjax.data.plan.step_plan import RankLayout
from mmjax.disk import atomic_write, read_json_lines
from mmjax.distributed import coordination
from mmjax.errors import UserError
from mmjax.inference.evaluation import Evaluator, evaluation_sources
from mmjax.inference.prompt_rows import BatchLimits
from mmjax.inference.scores import Answered, Scores, exact_match_by_group
from mmjax.planning.memory import ACTIVATION
from mmjax.planning.remat import RunPlan
from mmjax.runtime.executor import Executor
from mmjax.runtime.run_dir import RunFolder


def make_evaluator(
    config: Config,
    folder: RunFolder,
    executor: Executor,
    layout: RankLayout,
    memory_plan: RunPlan,
    report_progress: Callable[[int], None],
) -> Evaluator:
    """Open the validation and test splits of a run, in batches that fit beside its training state."""
    positions = layout.rows[LLM] * max(shape.lengths[LLM] for shape in layout.shapes)
    activation = ACTIVATION[config.training.precision]
    return Evaluator(
        executor.model,
        executor.mesh,
        executor.rules,
        evaluation_sources(config, ("validation", "test"), folder.path),
        config,
        limits={"validation": config.training.evaluate_samples},
        batch_limits=BatchLimits(
            tokens=memory_plan.evaluation_positions(config.model.llm, positions, activation)
        ),
        one_shape=True,
        loss_chunks=memory_plan.loss_chunks,
        progress=report_progress,
    )


def score_split(
    evaluator: Evaluator, params: dict[str, Any], split: str
) -> tuple[Scores, list[Answered]]:
    """Answer a split's questions and compute its loss; return scores, named as in metrics.jsonl, and answers."""
    replies = evaluator.answer(params, split)
    answered = [answer for reply in replies.values() for answer in reply.answered]
    scores = exact_match_by_group(answered) | evaluator.loss(params, split)
    return {f"{split}/{name}": value for name, value in scores.items()}, answered


def write_test_scores(path: Path, scores: Mapping[str, float]) -> None:
    """Write the scores of the test split, whole or not at all: where there is no room they are made again later."""
    try:
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(scores, indent=2) + "\n")
    except OSError as error:
        print_lines(f"WARNING {path} cannot be written: {error.strerror}; the scores are below")


LOWER_IS_BETTER = ("loss", "wer")  # first parts of such metrics' names


@dataclass
class BestMetric:
    """The best value of a metric so far. metric: its name in metrics.jsonl; empty where none is tracked."""

    metric: str = ""
    patience: int = 0  # evaluations without a better value after which training stops; 0 = never
    value: float = 0.0
    step: int = 0  # of the best value; 0 = there is none yet
    stale: int = 0  # evaluations since

    @classmethod
    def resume(cls, training: TrainingConfig, metrics: Path, step: int) -> BestMetric:
        """Read what a run's evaluations gave up to `step`, the same on every process."""
        best = cls(training.keep_best, training.patience)
        if best.metric and step:
            for evaluation_step, value in coordination.run_on_leader(
                lambda: _recorded(metrics, best.metric, step)
            ):
                best.update(evaluation_step, {best.metric: value})
        return best

    @property
    def exhausted(self) -> bool:
        """Return whether the metric has not improved for as many evaluations as `patience` allows."""
        return 0 < self.patience <= self.stale

    def check(self, evaluator: Evaluator) -> None:
        """Raise UserError where no evaluation gives this metric."""
        metrics = evaluator.metrics("validation")
        if self.metric and self.metric not in metrics:
            raise UserError(
                f"training.keep_best={self.metric}: evaluations of this run give "
                f"{', '.join(metrics) or 'nothing, since no source has a validation split'}; name one of them",
                everywhere=True,
            )

    def update(self, step: int, scores: Mapping[str, float]) -> bool:
        """Take in one evaluation; return whether it is the best so far. NaN never is."""
        if self.metric not in scores:
            return False
        value = scores[self.metric]
        sign = -1 if self.metric.partition("/")[2].startswith(LOWER_IS_BETTER) else 1
        # NaN is the only value that differs from itself.
        better = value == value and (not self.step or sign * value > sign * self.value)
        if better:
            self.value = value
            self.step = step
        self.stale = 0 if better else self.stale + 1
        return better

    def describe_stop(self, step: int) -> str:
        """Describe why training stops early after `step` steps."""
        return (
            f"{self.metric} has not improved for {self.stale} evaluations, the last after step {step} "
            f"(best {self.value:.4g} after step {self.step})"
        )


def _recorded(metrics: Path, metric: str, step: int) -> list[tuple[int, float]]:
    """Return the steps and values of a metric in a run's records up to `step`."""
    records = read_json_lines(metrics)
    return [(r["step"], float(r[metric])) for r in records if metric in r and r["step"] <= step]
