"""Define what a step's microbatches may hold: rows of every module, their lengths, and how many samples fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmjax.balance.budgets import Budgets
from mmjax.balance.waits import Prices
from mmjax.config import Config
from mmjax.config.model import frozen_modules
from mmjax.planning.prices import pair_costs, relative_cost

Lengths = tuple[int, ...]  # of every module, the LLM first

# Raised whenever the same config and data get other samples or rows than before.
PLANNER = 12
# Older ones whose runs can go on, for their budgets say how their steps are packed and their rows
# filled. before attention was levelled; before `post` compared itself with `llm`
OLDER_PLANNERS = frozenset({10, 11})
# fields that no start decides anew
OF_START = ("position_flops", "position_seconds", "pair_seconds", "planner")


@dataclass(frozen=True)
class Budget:
    """Decided before step 0, and stored with the run: with the seed, it says which samples each step has."""

    rows: Lengths  # per microbatch
    # of a row of every module; a microbatch of such rows holds every sample that is used
    lengths: Lengths
    samples_per_step: float  # mean
    longest: int  # a sample of more LLM tokens is not used
    minimum: Lengths = ()  # grouping isf: what a group must reach in one module (Q')
    notes: tuple[str, ...] = ()
    # What a position of each module's rows executes, and what it and a pair take by assumed rates.
    # No start reads them anew, for versions of JAX count elementwise operations otherwise. Empty:
    # of a run that began before they were stored; without seconds its rows are not levelled.
    position_flops: tuple[float, ...] = ()
    position_seconds: tuple[float, ...] = ()
    pair_seconds: tuple[float, ...] = ()
    # number of the planner that the run began with, if its steps have other samples by a later one
    planner: int = 10

    def of_start(self) -> dict[str, Any]:
        """Return what a run keeps of its beginning, whatever is counted and assumed by now."""
        return {name: getattr(self, name) for name in OF_START}

    @property
    def prices(self) -> Prices | None:
        """Return the prices by which rows are levelled; None where they are not."""
        if not self.pair_seconds:
            return None
        return Prices(np.array(self.position_seconds), np.array(self.pair_seconds))

    def room(self) -> Budgets:
        """Return the room of one microbatch."""
        return Budgets(
            rows=np.array(self.rows),
            length=np.array(self.lengths),
            samples_per_step=self.samples_per_step,
            prices=self.prices,
            all_weights=self.planner < 11,
        )


def position_flops(config: Config) -> np.ndarray:
    """Count the FLOPs that one more position of each module's rows executes, float64 `[M]`."""
    return relative_cost(
        config.model, frozen=frozen_modules(config.model), reference=config.loss.repeats_forward
    )


def prices_of(config: Config, budget: Budget) -> Prices:
    """Return the prices of a run; those that are assumed now where it has none."""
    return budget.prices or assumed_prices(config)


def assumed_prices(config: Config) -> Prices:
    """Return the prices that assumed rates give."""
    return pair_costs(
        config.model, frozen=frozen_modules(config.model), reference=config.loss.repeats_forward
    )
