"""Policies by measured memory: OmniBal's four steps end at a fit that was measured to fit."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from one_shape import plan_of, with_settings
from tiny_run import tiny_config

from mmjax.autotune.compile_run import compiled_bytes
from mmjax.autotune.memory_plan import TRIES, choose_by_measurement
from mmjax.planning.memory import DeviceBatch, saved_bytes_per_layer
from mmjax.planning.remat import MemoryLimit, RunPlan

pytestmark = pytest.mark.exhaustive

LAYERS = 6
FREE = {"llm": LAYERS, "vision": 2, "audio": 3}
SHAPE = {"llm": (2, 64), "vision": (2, 64), "audio": (2, 64)}
BATCH = DeviceBatch(SHAPE, {"vision": 8, "audio": 8})


def config():
    made = tiny_config()
    return replace(made, model=replace(made.model, llm=replace(made.model.llm, layers=LAYERS)))


def fitted(room: float) -> RunPlan:
    return plan_of(with_settings(config()), [SHAPE], widths=BATCH.widths, gigabytes=room / 1e9)


def predicted(policies) -> float:
    """What a device would hold if it kept exactly as much as was predicted, and everything else were free."""
    kept = {
        name: saved_bytes_per_layer(config().model, name, shape, "float32")
        for name, shape in SHAPE.items()
    }
    return sum(kept[tower][policy].device for tower, own in policies.items() for policy in own)


LEAN = {tower: ("full",) * layers for tower, layers in FREE.items()}
RICH = {tower: ("none",) * layers for tower, layers in FREE.items()}
HALF = (predicted(LEAN) + predicted(RICH)) / 2


def test_the_compilers_own_figure_is_what_fits():
    said = []

    def measure(policies) -> float:
        made = config()
        model = fitted(np.inf).with_policies(policies, 0.0).applied(made.model)
        said.append(compiled_bytes(replace(made, model=model), BATCH, jax.devices()[:1]))
        return said[-1]

    lean, rich = measure(LEAN), measure({**LEAN, "llm": RICH["llm"]})
    assert lean < rich
    room = (lean + rich) / 2
    found = choose_by_measurement(
        replace(fitted(np.inf), limit=MemoryLimit(room)), {"llm": LAYERS}, measure
    )
    assert found.measured in said
    assert found.fits
    assert lean < found.measured <= room


def test_with_measurements_as_predicted_the_fit_is_the_predicted_one():
    calls = []
    free = replace(fitted(np.inf), limit=MemoryLimit(HALF))
    found = choose_by_measurement(
        free, FREE, lambda policies: calls.append(policies) or predicted(policies)
    )
    assert found.fits
    assert found.measured > 0.8 * HALF
    assert calls[0] == LEAN
    assert len(calls) == 1 + 4 * len(FREE) + 1


def test_out_of_memory_backs_off_until_a_try_fits():
    def measure(policies) -> float | None:
        bytes_ = predicted(policies)
        return None if bytes_ > 0.9 * HALF else bytes_

    found = choose_by_measurement(replace(fitted(np.inf), limit=MemoryLimit(HALF)), FREE, measure)
    assert found.fits
    assert predicted(LEAN) < found.measured <= 0.9 * HALF


def test_if_no_try_fits_everything_is_computed_again():
    calls = []

    def measure(policies) -> float | None:
        calls.append(policies)
        mixed = len(calls) > 1 + 4 * len(FREE)
        return None if mixed else predicted(policies)

    found = choose_by_measurement(replace(fitted(np.inf), limit=MemoryLimit(HALF)), FREE, measure)
    assert found.policies == LEAN
    assert found.fits
    assert len(calls) == 1 + 4 * len(FREE) + TRIES


@pytest.mark.parametrize("base", [None, 2e9])
def test_what_does_not_even_fit_with_everything_computed_again_is_found_at_once(base):
    found = choose_by_measurement(
        replace(fitted(np.inf), limit=MemoryLimit(1e9)), FREE, lambda policies: base
    )
    assert not found.fits


def test_given_policies_stay():
    given = replace(fitted(np.inf), limit=MemoryLimit(HALF))
    found = choose_by_measurement(given, {"llm": LAYERS}, predicted)
    assert found.policies["vision"] == given.policies["vision"]
