"""A run as its folder tells of it: config, metrics and lives; and the plans of its last steps, made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config import Config
from mmjax.data.loader import StepLoader
from mmjax.data.plan import StepPlan
from mmjax.errors import UserError
from mmjax.reporting.curves import Metrics, read_metrics
from mmjax.training.run_data import loader_of
from mmjax.training.run_folder import RunFolder
from mmjax.training.run_history import Life, all_lives, life_of

PLANNED_STEPS = 32  # the last ones, whose rows and work are shown


@dataclass(frozen=True)
class Run:
    """What is in a run's folder. colour: of its curves, where runs are compared."""

    name: str
    folder: RunFolder
    config: Config
    metrics: Metrics
    lives: Sequence[dict[str, Any]]
    colour: int

    @property
    def resumes(self) -> list[int]:
        """The steps after which it was started again."""
        return [life["first"] for life in self.lives[1:]]

    @property
    def modules(self) -> tuple[str, ...]:
        """The LLM and its encoders."""
        return "llm", *self.config.model.encoders


@dataclass(frozen=True)
class Planned:
    """Some steps in a row, from `first` (0 is the run's first) on, as they were planned; nothing of them is loaded."""

    life: Life
    loader: StepLoader
    first: int
    plans: Sequence[StepPlan]

    @property
    def told(self) -> str:
        """Which steps these are, as the log counts them."""
        return f"steps {self.first + 1} to {self.first + len(self.plans)}"

    def work(self, balanced: bool) -> np.ndarray:
        """Positions of every rank, int64 `[modules, steps, ranks]`; unbalanced: as they would be with balance none."""
        of_steps = [sum(m.work() if balanced else m.unbalanced for m in plan.microbatches) for plan in self.plans]
        return np.stack(of_steps, axis=1)

    def fills(self, module: int) -> np.ndarray:
        """How full every row of a module is, float64 `[rows of all these steps]`."""
        found = []
        for microbatch in (m for plan in self.plans for m in plan.microbatches):
            here = microbatch.module == module
            useful = self.loader.index.useful(microbatch.samples)[here]
            rows = microbatch.rows[module] * microbatch.topology.ranks
            found.append(np.bincount(microbatch.row[here], useful, rows) / microbatch.shape.lengths[module])
        return np.concatenate(found)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of these folders. Raises UserError where one is no run, or is given twice."""
    folders = [RunFolder(path.resolve()) for path in paths]
    for k, folder in enumerate(folders):
        if folder in folders[:k]:
            raise UserError(f"{paths[k]} is given twice; give each run once")
    names = [folder.path.name for folder in folders]
    return [
        Run(
            names[k] if names.count(names[k]) == 1 else str(folder.path),
            folder,
            folder.read_config(),
            read_metrics(folder.metrics),
            all_lives(folder.history),
            k,
        )
        for k, folder in enumerate(folders)
    ]


def plan_again(run: Run) -> Planned:
    """The last steps that a run has done, or its first ones where it has done none.

    Raises UserError where its history or its length index is gone, or its files are.
    """
    last = max(run.metrics.steps, 1)
    life = life_of(run.folder.history, last - 1, run.folder.due)
    if life is None:
        raise UserError(
            "there is no history.jsonl that tells how its steps were made: it has not started yet, or is old"
        )
    if not run.metrics.steps:
        last = min(life.first + PLANNED_STEPS, max(life.config.training.steps, life.first + 1))
    loader = loader_of(life, run.folder)
    first = max(life.first, last - PLANNED_STEPS)
    return Planned(life, loader, first, [loader.plan(step) for step in range(first, last)])
