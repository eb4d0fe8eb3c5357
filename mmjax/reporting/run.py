"""Read run folders: config, metrics and launches; and plan a run's last steps again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.config import Config
from mmjax.data.loading.step_loader import StepLoader
from mmjax.data.plan.step_plan import StepPlan
from mmjax.errors import UserError
from mmjax.reporting.curves import Metrics, read_metrics
from mmjax.runtime.run_dir import RunFolder
from mmjax.training.run_data import loader_of
from mmjax.training.run_history import Launch, launch_of_step, read_launches

PLANNED_STEPS = 32  # the last steps, whose rows and work are shown


@dataclass(frozen=True)
class Run:
    """Contents of a run folder."""

    name: str
    folder: RunFolder
    config: Config
    metrics: Metrics
    lives: Sequence[dict[str, Any]]  # launches
    colour: int  # of its curves, where runs are compared

    @property
    def resumes(self) -> list[int]:
        """Steps after which the run resumed."""
        return [life["first"] for life in self.lives[1:]]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the LLM and its encoders."""
        return "llm", *self.config.model.encoders


@dataclass(frozen=True)
class Planned:
    """Plans of consecutive steps, from `first` (counted from 0) on; no sample of them is loaded."""

    life: Launch
    loader: StepLoader
    first: int
    plans: Sequence[StepPlan]

    @property
    def span(self) -> str:
        """Describe the range of steps, counted from 1 as in the log."""
        return f"steps {self.first + 1} to {self.first + len(self.plans)}"

    def work(self, balanced: bool) -> np.ndarray:
        """Count the positions of every rank, int64 `[modules, steps, ranks]`, as it ran or as without balancing."""
        by_step = [sum(m.work() if balanced else m.unbalanced for m in plan.microbatches) for plan in self.plans]
        return np.stack(by_step, axis=1)

    def fills(self, module: int) -> np.ndarray:
        """Compute the used share of every row of a module, float64 `[rows of all these steps]`."""
        fills = []
        for microbatch in (m for plan in self.plans for m in plan.microbatches):
            of_module = microbatch.module == module  # [parts]: a sample's text, or one of its items
            useful = self.loader.index.useful(microbatch.samples)[of_module]
            rows = microbatch.rows[module] * microbatch.topology.ranks
            fills.append(np.bincount(microbatch.row[of_module], useful, rows) / microbatch.shape.lengths[module])
        return np.concatenate(fills)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in these folders. Raises UserError where one is no run, or is given twice."""
    folders = [RunFolder(path.resolve()) for path in paths]
    for k, folder in enumerate(folders):
        if folder in folders[:k]:
            raise UserError(f"{paths[k]} is given twice; give each run once")
    names = [folder.path.name for folder in folders]
    return [
        Run(
            name=names[k] if names.count(names[k]) == 1 else str(folder.path),
            folder=folder,
            config=folder.read_config(),
            metrics=read_metrics(folder.metrics),
            lives=read_launches(folder.history),
            colour=k,
        )
        for k, folder in enumerate(folders)
    ]


def plan_again(run: Run) -> Planned:
    """Plan the last steps of a run again, or its first steps where it has done none.

    Raises UserError where its history, its length index or its data files are gone.
    """
    last = max(run.metrics.steps, 1)
    life = launch_of_step(run.folder.history, last - 1, run.folder.due)
    if life is None:
        raise UserError(
            "there is no history.jsonl that tells how its steps were made: it has not started yet, or is old"
        )
    if not run.metrics.steps:
        last = min(life.first + PLANNED_STEPS, max(life.config.training.steps, life.first + 1))
    loader = loader_of(life, run.folder)
    first = max(life.first, last - PLANNED_STEPS)
    return Planned(life, loader, first, [loader.plan(step) for step in range(first, last)])
