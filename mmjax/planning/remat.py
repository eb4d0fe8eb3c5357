"""Choose each layer's remat policy: the least recomputation that the memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from mmjax.config import Remat


class Option(NamedTuple):
    """Cost of a remat policy for one layer. With several compiled shapes, bytes are tuples, one entry per shape."""

    device: float | tuple[float, ...]  # bytes saved
    host: float | tuple[float, ...]  # bytes offloaded
    seconds: float  # to recompute, or to load from the host, what is not saved; below 0 where that is faster


Options = Mapping[Remat, Option]


def choose_policies(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> dict[str, tuple[Remat, ...]] | None:
    """Find a policy for each layer that minimises the seconds within the memory; None where nothing fits.

    Exact: a multiple-choice knapsack over the kinds of layers, as an integer program (OmniBal 4.3 goes layer by layer).
    layers: their number in each tower, where all layers cost the same. In a tower, policies that save least come first:
    backward starts at the tower's end, with memory at its peak, where there should be no recomputation on top.
    """
    choices, counts = _solve(layers, options, device, host, integral=True)
    if counts is None:
        return None
    plan: dict[str, tuple[Remat, ...]] = {}
    for name in layers:
        chosen = [(policy, n) for (tower, policy), n in zip(choices, counts, strict=True) if tower == name]
        chosen.sort(key=lambda pair: np.sum(options[name][pair[0]].device))
        plan[name] = tuple(policy for policy, n in chosen for _ in range(round(n)))
    return plan


def least_seconds(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> float | None:
    """Compute a lower bound on the seconds, the optimum with divisible layers; None where nothing fits."""
    choices, counts = _solve(layers, options, device, host, integral=False)
    if counts is None:
        return None
    return float(sum(n * options[tower][policy].seconds for (tower, policy), n in zip(choices, counts, strict=True)))


def _solve(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float],
    integral: bool,
) -> tuple[list[tuple[str, Remat]], np.ndarray | None]:
    """Solve for the number of layers of each (tower, policy), integers or not; None where nothing fits."""
    choices = [(tower, policy) for tower in layers for policy in options[tower]]
    if not choices:
        return [], np.zeros(0)
    # A row per choice: device bytes of every shape, host bytes of every shape, seconds.
    costs = np.array([np.hstack(options[tower][policy]) for tower, policy in choices], float)
    limits = np.hstack([device, host])
    unit = np.maximum(np.abs(costs).max(0), 1e-300)  # the solver's tolerances are absolute
    in_tower = np.array([[tower == name for tower, _ in choices] for name in layers], float)
    counts = np.array(list(layers.values()), float)
    # Every layer gets one policy, and the bytes of every shape stay below its limits.
    solution = milp(
        costs[:, -1] / unit[-1],
        integrality=np.full(len(choices), int(integral)),
        bounds=Bounds(0, in_tower.T @ counts),
        constraints=[
            LinearConstraint(in_tower, counts, counts),
            LinearConstraint((costs[:, :-1] / unit[:-1]).T, -np.inf, limits / unit[:-1]),
        ],
        options={"mip_rel_gap": 0},
    )
    return choices, solution.x
