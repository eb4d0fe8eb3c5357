"""Choose remat policies by measured memory: OmniBal's four steps (section 4.3, A.1.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from mmjax.config import Remat
from mmjax.planning.fit import MemoryPlan, Policies
from mmjax.planning.remat import Option, choose_policies

Measure = Callable[[Policies], float | None]  # bytes of the fullest device under these policies; None: out of memory

LEANEST: Remat = "full"
TRIES = 8
BACK_OFF = 0.02  # smallest reduction of the budget, as a share of the memory, after a try that did not fit


def choose_by_measurement(fitted: MemoryPlan, free: Mapping[str, int], measure: Measure) -> MemoryPlan:
    """Choose the fastest policies that a measurement, and not only the memory model, shows to fit.

    free: layers of the towers whose policies may be chosen; the others keep theirs. First everything is recomputed;
    then, tower by tower and policy by policy, half of a tower's layers get that policy: the difference is what a layer
    saves. The policies chosen by these are tried, with a smaller budget after each try that does not fit. If none of
    TRIES fits, or not even recomputing everything does, everything is recomputed.
    """
    lean = {**fitted.policies, **{tower: (LEANEST,) * layers for tower, layers in free.items()}}
    base = measure(lean)
    leanest = replace(fitted, policies=lean, measured=np.inf if base is None else base)
    if not (free and leanest.fits):
        return leanest
    options = {tower: _options(fitted, lean, tower, base, measure) for tower in free}
    available = budget = fitted.room.device
    # Measured differences are not quite additive, so a choice may use more than its options add up to. The budget then
    # shrinks by that excess, by a fixed share where the excess is unknown.
    for _ in range(TRIES):
        chosen = choose_policies(free, options, budget - base)
        if chosen is None:
            break
        policies = lean | chosen
        used = measure(policies)
        if used is not None and used <= available:
            return replace(fitted, policies=policies, measured=used)
        budget -= max(BACK_OFF * available, 0.0 if used is None else used - available)
    return leanest


def _options(
    fitted: MemoryPlan, lean: dict[str, tuple[Remat, ...]], tower: str, base: float, measure: Measure
) -> dict[Remat, Option]:
    """Measure the bytes that a layer saves beyond LEANEST under each policy; policies out of memory are left out."""
    layers = len(lean[tower])
    half = max(1, layers // 2)
    options = {LEANEST: Option(0.0, 0.0, fitted.again[tower][LEANEST])}
    for policy, seconds in fitted.again[tower].items():
        if policy in (LEANEST, "offload"):
            continue
        used = measure(lean | {tower: (LEANEST,) * (layers - half) + (policy,) * half})
        if used is not None:
            options[policy] = Option(max(0.0, (used - base) / half), 0.0, seconds)
    return options
