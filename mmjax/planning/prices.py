"""Prices of a row's positions and of the pairs that attend in it, by which rows are packed and ranks balanced."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from mmjax.balance.waits import Prices
from mmjax.config import ModelConfig
from mmjax.planning.flops import executed
from mmjax.planning.hardware import SHEET, Rates


def pair_costs(
    model: ModelConfig,
    rates: Rates = SHEET,
    frozen: Set[str] = frozenset(),
    reference: bool = False,
) -> Prices:
    """Compute seconds per row position of each tower with its connector, and per attending pair.

    Dense attention has no pairs: it computes those of whole rows, whatever they hold. rates:
    default: those assumed of GPUs, at a data sheet's FLOP/s of 1.
    """
    shapes = {name: tower.shortest_row for name, tower in model.towers.items()}

    def seconds(name: str, length: int, pairs: float) -> float:
        shape = {tower: (1, step) for tower, step in shapes.items()} | {name: (1, length)}
        flops = executed(
            model,
            shape,
            frozen,
            pairs=dict.fromkeys(shapes, 0.0) | {name: pairs},
            reference=reference,
        )
        return sum(rates.seconds(f.total, f.attention, f.float8) for f in flops.values())

    many = 1e6  # pairs, so that rounding of the others does not matter
    costs = []
    for name, step in shapes.items():
        none = seconds(name, step, 0.0)
        # By a hundred steps more, as FLOPs of few positions are rounded.
        position = (seconds(name, 101 * step, 0.0) - none) / (100 * step)
        costs.append((position, (seconds(name, step, many) - none) / many))
    return Prices._make(np.array(costs).T)


def relative_cost(
    model: ModelConfig, length: int = 128, frozen: Set[str] = frozenset(), reference: bool = False
) -> np.ndarray:
    """Count executed FLOPs per additional row position of each tower with its connector, `[towers]`.

    float64. Attention makes it grow with the row: this is the cost at rows of about `length`
    positions.
    """
    # The other modules run on the shortest row that they can have.
    short = {name: (1, tower.shortest_row) for name, tower in model.towers.items()}
    costs = []
    for name, (_, step) in short.items():
        # Rows must be whole steps, so the lengths are h and 3 h for a multiple h of the step near
        # length / 2.
        half = max(1, length // (2 * step)) * step
        # The derivative of a quadratic f at 2h is (f(3h) - f(h)) / 2h, exactly. The other modules
        # run as well, because they decide what needs a gradient, and cancel.
        low, high = (
            sum(
                f.total
                for f in executed(
                    model, {**short, name: (1, n)}, frozen, reference=reference
                ).values()
            )
            for n in (half, 3 * half)
        )
        costs.append((high - low) / (2 * half))
    return np.array(costs)
