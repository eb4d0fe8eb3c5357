"""Measure how full planned steps are, how equal their ranks, and what they send, for `fill` and `planning`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mmjax.balance.parts import LLM, dist_ratio
from mmjax.balance.waits import Prices, Waits
from mmjax.data.plan.length_index import LengthIndex
from mmjax.data.plan.placement import room_and_use, waits_of
from mmjax.data.plan.step_plan import StepPlan


class StepFigures(NamedTuple):
    """Figures of each step: positions used and those that all ranks compute, int64 `[steps, modules]`, and others.

    dist_ratio: OmniBal eq. 2 over ranks, `[steps, modules]`. wire_share: tokens that are sent in
    all steps, padding included, as a part of all that encoders make.
    """

    used: np.ndarray
    room: np.ndarray
    dist_ratio: np.ndarray
    waits: list[Waits]
    wire_share: float


def measure_steps(plans: Sequence[StepPlan], prices: Prices, index: LengthIndex) -> StepFigures:
    """Measure planned steps, with attention at these prices."""
    counts = [[room_and_use(m, index) for m in plan.microbatches] for plan in plans]
    room, used = np.stack([np.sum(of_step, axis=0) for of_step in counts], axis=1)
    microbatches = [m for plan in plans for m in plan.microbatches]
    sent = sum(
        m.topology.ranks * (m.topology.peers - 1) * sum(m.shape.widths) for m in microbatches
    )
    encoded = sum(index.tokens(m.samples)[m.module != LLM].sum() for m in microbatches)
    return StepFigures(
        used=used,
        room=room,
        dist_ratio=np.array([dist_ratio(positions_per_rank(plan)) for plan in plans]),
        waits=[waits_of(plan.microbatches, prices, index) for plan in plans],
        wire_share=sent / max(encoded, 1),
    )


def positions_per_rank(plan: StepPlan) -> np.ndarray:
    """Count positions of each module on each rank, int64 `[modules, ranks]`: no padding of rows."""
    first = plan.microbatches[0]
    positions = np.zeros((len(first.rows), first.topology.ranks), np.int64)
    for m in plan.microbatches:
        np.add.at(positions, (m.module, m.rank()), m.length)
    return positions
