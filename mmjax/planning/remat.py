"""Which layers recompute what: the least time to compute again that the memory allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from mmjax.config import Remat


class Option(NamedTuple):
    """What a remat policy costs for one layer. With several compiled shapes, bytes are of each."""

    device: float | tuple[float, ...]  # bytes kept
    host: float | tuple[float, ...]  # bytes offloaded
    seconds: float  # to compute again, or to bring back, what is not kept; below 0 where that is faster


Options = Mapping[Remat, Option]


def choose(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> dict[str, tuple[Remat, ...]] | None:
    """A policy for each layer of each tower, with the least sum of seconds that keeps to the bytes; None: nothing does.

    Exact: a multiple-choice knapsack over the kinds of layers, as an integer program (OmniBal 4.3 goes layer by layer).
    layers: how many each tower has; the layers of a tower are alike. In a tower, policies that keep least come first:
    where backward begins, at its end and with memory at its fullest, there is then nothing to compute again beside it.
    """
    choices, chosen = _solve(layers, options, device, host, whole=True)
    if chosen is None:
        return None
    plan: dict[str, tuple[Remat, ...]] = {}
    for name in layers:
        own = [i for i, (tower, _) in enumerate(choices) if tower == name]
        least_first = sorted(own, key=lambda i: np.sum(options[name][choices[i][1]].device))
        plan[name] = tuple(choices[i][1] for i in least_first for _ in range(round(chosen[i])))
    return plan


def least_seconds(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float] = np.inf,
) -> float | None:
    """What no mix goes below: the same if layers could be divided; None where nothing fits."""
    choices, chosen = _solve(layers, options, device, host, whole=False)
    if chosen is None:
        return None
    return float(sum(n * options[tower][policy].seconds for (tower, policy), n in zip(choices, chosen, strict=True)))


def _solve(
    layers: Mapping[str, int],
    options: Mapping[str, Options],
    device: float | Sequence[float],
    host: float | Sequence[float],
    whole: bool,
) -> tuple[list[tuple[str, Remat]], np.ndarray | None]:
    """(tower, policy), and how many layers get each; whole numbers or not."""
    choices = [(tower, policy) for tower in layers for policy in options[tower]]
    if not choices:
        return [], np.zeros(0)
    costs = np.array([np.hstack(options[tower][policy]) for tower, policy in choices], float)
    limits = np.hstack([device, host])
    unit = np.maximum(np.abs(costs).max(0), 1e-300)  # the solver's tolerances are absolute
    of_tower = np.array([[tower == name for tower, _ in choices] for name in layers], float)
    counts = np.array(list(layers.values()), float)
    solved = milp(
        costs[:, -1] / unit[-1],
        integrality=np.full(len(choices), int(whole)),
        bounds=Bounds(0, of_tower.T @ counts),
        constraints=[
            LinearConstraint(of_tower, counts, counts),
            LinearConstraint((costs[:, :-1] / unit[:-1]).T, -np.inf, limits / unit[:-1]),
        ],
        options={"mip_rel_gap": 0},
    )
    return choices, solved.x
