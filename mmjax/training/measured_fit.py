"""Remat policies by memory that was measured: OmniBal's four steps (section 4.3, A.1.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from mmjax.config import Remat
from mmjax.planning.fit import Fit, Policies
from mmjax.planning.remat import Option, choose

Measure = Callable[[Policies], float | None]  # bytes of the fullest device with these; None: it is out of memory

LEANEST: Remat = "full"
TRIES = 8
BACK_OFF = 0.02  # of the room, at least, after a try that did not fit


def measured_fit(fitted: Fit, free: Mapping[str, int], measure: Measure) -> Fit:
    """The fit with the fastest policies that a measurement, and not only a prediction, found to fit.

    free: layers of the towers whose policies may be chosen; the others keep theirs. First everything is computed again;
    then, tower by tower and policy by policy, half of a tower's layers are not; the differences are what a layer keeps;
    by these the policies are chosen and tried, with less room after each try that does not fit. If none of TRIES fits,
    or not even computing everything again does, that is the fit.
    """
    lean = {**fitted.policies, **{tower: (LEANEST,) * layers for tower, layers in free.items()}}
    base, room = measure(lean), fitted.room.device
    least = replace(fitted, policies=lean, measured=np.inf if base is None else base)
    if not (free and least.fits):
        return least
    options = {tower: _options(fitted, lean, tower, base, measure) for tower in free}
    limit = room
    for _ in range(TRIES):
        chosen = choose(free, options, limit - base)
        if chosen is None:
            break
        found = measure(tried := lean | chosen)
        if found is not None and found <= room:
            return replace(fitted, policies=tried, measured=found)
        limit -= max(BACK_OFF * room, 0.0 if found is None else found - room)
    return least


def _options(
    fitted: Fit, lean: dict[str, tuple[Remat, ...]], tower: str, base: float, measure: Measure
) -> dict[Remat, Option]:
    """What a layer of a tower keeps more than computing everything again, by policy; without those that never fit."""
    layers = len(lean[tower])
    some = max(1, layers // 2)
    options = {LEANEST: Option(0.0, 0.0, fitted.again[tower][LEANEST])}
    for policy, seconds in fitted.again[tower].items():
        if policy in (LEANEST, "offload"):
            continue
        found = measure(lean | {tower: (LEANEST,) * (layers - some) + (policy,) * some})
        if found is not None:
            options[policy] = Option(max(0.0, (found - base) / some), 0.0, seconds)
    return options
