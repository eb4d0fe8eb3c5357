"""Say what makes ranks wait less where no placing can: one sample that takes longer than a rank's share of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mmjax.balance.lpt import lpt
from mmjax.balance.parts import LLM
from mmjax.balance.waits import Prices
from mmjax.data.plan.grouping import StepGrouper

WAITING = 0.1  # of a step: from there on it is said what would help, and below it something does
_LARGER = (2, 4, 8, 16, 32)
_SAMPLES = 65_536  # of the run, at most, by which it is estimated


def waiting_advice(
    grouper: StepGrouper, prices: Prices, ranks: int, names: Sequence[str], context: int = 1
) -> str:
    """Say in one line for how long ranks wait at least and what would help; "" where that is not worth a word.

    names: of the modules, the LLM's first. context: `mesh.context` of the run.
    """
    if ranks < 2:
        return ""
    microbatches = grouper.batch.microbatches
    samples = _some_samples(grouper)
    seconds = grouper.index.parts(samples).pairs_by_sample(len(names)) * prices.pair
    # Rows of a microbatch, of which each rank has an equal part.
    budget = grouper.budget
    of_rows = float(prices.position @ np.multiply(budget.rows, budget.lengths)) / ranks
    per_step = budget.samples_per_step

    def wait(microbatches: int, samples_per_step: float, context: int, longer: int = 1) -> float:
        return _least_wait(
            seconds,
            of_rows * longer,
            ranks // context,
            context,
            microbatches,
            round(samples_per_step),
        )

    share = wait(microbatches, per_step, 1)
    if share < WAITING:
        return ""
    module, sample = np.unravel_index(np.argmax(seconds.T), seconds.T.shape)
    positions = int(grouper.index.totals[samples[sample], module])
    what = f"{positions:,} {'tokens' if module == LLM else f'positions of {names[module]}'}"
    line = f"one sample of {what} outweighs a rank's share: ranks wait {share:.0%}"
    remedies = {
        "batch.microbatches={}, with as many samples in each": (
            lambda k: wait(k * microbatches, k * per_step, 1),
            microbatches,
        ),
        "mesh.context={}": (
            lambda k: wait(microbatches, per_step, k) if ranks % k == 0 else 1.0,
            context,
        ),
        "{} samples a rank": (lambda k: wait(microbatches, k * per_step, 1, k), per_step / ranks),
    }
    helpful = []
    for remedy, (waits, unit) in remedies.items():
        for k in _LARGER:
            if (remaining := waits(k)) < WAITING:
                helpful.append(f"{remedy.format(math.ceil(k * unit))}: {remaining:.0%}")
                break
    return (
        f"{line}; {', '.join(helpful)}"
        if helpful
        else f"{line}; leave out such samples with data.max_tokens"
    )


def _some_samples(grouper: StepGrouper) -> np.ndarray:
    """Return samples of the run's first steps, more where a step has few."""
    steps = int(np.clip(_SAMPLES / grouper.budget.samples_per_step, 1, 64))
    groups = [
        group
        for step in range(grouper.first, grouper.first + steps)
        for group in grouper.step(step)
    ]
    return np.concatenate([group.samples for group in groups])


def _least_wait(
    seconds: np.ndarray, of_rows: float, ranks: int, context: int, microbatches: int, per_step: int
) -> float:
    """Estimate the share that ranks wait if each phase's attention were dealt alone, and like with like; mean of steps.

    seconds: float64 `[n, M]`, of samples one after the other. of_rows: of a rank's rows in a
    microbatch. context: each rank is so many of the devices that `of_rows` is of, and takes as long
    for a sample by that factor.
    """
    waiting = total = 0.0
    columns = ranks * microbatches
    starts = range(0, max(1, len(seconds) - per_step + 1), per_step)
    for begin in list(starts)[:8]:
        step = seconds[np.arange(begin, begin + per_step) % len(seconds)] / context
        total += of_rows * microbatches
        for phase in step.T:
            load = np.zeros(columns)
            lpt(phase, np.argsort(-phase, kind="stable"), np.zeros(len(phase), np.int32), load)
            fullest = float((-np.sort(-load)).reshape(microbatches, ranks).max(1).sum())
            waiting += fullest - load.sum() / ranks
            total += fullest
    return waiting / total


def ranks_without_rows(grouper: StepGrouper, ranks: int, names: Sequence[str]) -> list[str]:
    """Say for each module of which some ranks have no row how many samples a rank would do.

    That is where a row must hold a sample so long that fewer rows hold all of a step.
    """
    budget = grouper.budget
    # All rows are as long, so that a rank's row takes as many samples as one of those that there
    # are.
    return [
        f"{ranks - rows} of {ranks} ranks have no {'text' if k == LLM else name}; "
        f"{math.ceil(budget.samples_per_step / budget.rows[k])} samples a rank would do"
        for k, (name, rows) in enumerate(zip(names, budget.rows, strict=True))
        if rows < ranks <= grouper.batch.rows[name]
    ]
