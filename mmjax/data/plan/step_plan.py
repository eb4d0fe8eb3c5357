"""The step plan: which samples form step n, and where each of their parts lies.

A pure function of (config, seed, index, step, layout): every process and every worker computes the same plan, and
resuming needs the step number alone. Which samples a step has does not depend on the layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.config import Config
from mmjax.data.plan.budget import Budget, make_budget
from mmjax.data.plan.data_change import WHOLE_RUN, Segment
from mmjax.data.plan.grouping import StepGrouper
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import ONE_RANK, MicrobatchPlan, Placer, Topology
from mmjax.data.plan.row_shapes import RankLayout, lay_out, make_placer

# Raised whenever the same config and data get other samples or rows than before: older runs then can't go on.
PLANNER = 6


@dataclass(frozen=True)
class StepPlan:
    """One optimizer update, before anything is loaded."""

    step: int
    microbatches: tuple[MicrobatchPlan, ...]

    def samples(self) -> np.ndarray:
        """Return the ids of all samples of the step."""
        return np.concatenate([m.samples for m in self.microbatches])

    def digest(self) -> int:
        """Compute a 63-bit hash that processes compare before they update."""
        digest = hashlib.sha256()
        for m in self.microbatches:
            for a in (m.samples, m.module, m.row, m.offset, np.array(m.shape.lengths + m.shape.widths)):
                digest.update(np.ascontiguousarray(a, np.int64).tobytes())
        return int.from_bytes(digest.digest()[:8], "little") >> 1


@dataclass(frozen=True)
class StepPlanner:
    """Plans steps for one layout."""

    grouper: StepGrouper
    placer: Placer

    def plan(self, step: int) -> StepPlan:
        """Plan step `step`."""
        return StepPlan(step, tuple(m for group in self.grouper.step(step) for m in self.placer.place(group)))

    def plan_once(self, samples: np.ndarray) -> list[MicrobatchPlan]:
        """Plan microbatches that hold exactly these samples, each once (packed; for evaluation)."""
        groups = [group for step in self.grouper.steps_of(samples) for group in step]
        return [m for group in groups for m in self.placer.place(group)]


def make_planner(
    index: LengthIndex,
    config: Config,
    weights: Sequence[float],
    topology: Topology = ONE_RANK,
    budget: Budget | None = None,
    max_steps: int | None = None,
    segment: Segment = WHOLE_RUN,
) -> tuple[StepPlanner, RankLayout]:
    """Make the planner of a mixture of sources on these ranks, and the layout that it plans for.

    budget: that of the run, default: made from the index and the config. max_steps: as in `lay_out`. Raises UserError
    like `make_budget`.
    """
    budget = make_budget(index, config, weights) if budget is None else budget
    grouper = StepGrouper(
        index,
        config.batch,
        weights,
        config.seed,
        budget,
        first=segment.first,
        due=segment.read_due(),
        epochs_before=segment.epochs,
    )
    layout = lay_out(grouper, config, topology, max_steps=max_steps)
    return StepPlanner(grouper, make_placer(grouper, config, layout)), layout
