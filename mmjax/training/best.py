"""Track the best evaluation by a named metric: whose checkpoint is kept, and when training stops early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmjax.config import TrainingConfig
from mmjax.disk import read_json_lines
from mmjax.distributed import coordination

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
            for evaluation_step, value in coordination.run_on_leader(lambda: _recorded(metrics, best.metric, step)):
                best.update(evaluation_step, {best.metric: value})
        return best

    @property
    def exhausted(self) -> bool:
        """Return whether the metric has not improved for as many evaluations as `patience` allows."""
        return 0 < self.patience <= self.stale

    def update(self, step: int, scores: Mapping[str, float]) -> bool:
        """Take in one evaluation; return whether it is the best so far. NaN never is."""
        if self.metric not in scores:
            return False
        value = scores[self.metric]
        sign = -1 if self.metric.partition("/")[2].startswith(LOWER_IS_BETTER) else 1
        # NaN is the only value that differs from itself.
        better = value == value and (not self.step or sign * value > sign * self.value)
        if better:
            self.value, self.step = value, step
        self.stale = 0 if better else self.stale + 1
        return better


def _recorded(metrics: Path, metric: str, step: int) -> list[tuple[int, float]]:
    """Return the steps and values of a metric in a run's records up to `step`."""
    records = read_json_lines(metrics)
    return [(r["step"], float(r[metric])) for r in records if metric in r and r["step"] <= step]
