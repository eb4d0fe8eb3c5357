"""A run that fits computes as little again as it can; one that does not is told with what it needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from mmjax.config import AdamW, ModelConfig
from mmjax.config.loading import load
from mmjax.planning.hardware import Rates
from mmjax.planning.memory import DeviceBatch, ModelSharding, SavedBytes
from mmjax.planning.remat import MemoryLimit, MemoryPlan, plan_memory
from mmjax.planning.step_time import LayerTimes, Speed
from mmjax.planning.work import row_work

MODEL = load("omni_10b").model
SPEED = Speed(Rates(600e12, 2.7e12, 50e9))
ONE_NODE = ModelSharding(64)
SHAPES = [
    {"llm": (1, 4096), "vision": (1, 8192), "audio": (1, 4096)},
    {"llm": (1, 8192), "vision": (1, 2048), "audio": (1, 8192)},
]


def layer(policy_bytes: dict[str, float], positions: int, host: float = 0) -> dict[str, SavedBytes]:
    kept = {policy: SavedBytes(n * positions) for policy, n in policy_bytes.items()}
    return kept | {"offload": SavedBytes(kept["full"].device, host * positions)}


def kept_of(model: ModelConfig, shape: dict) -> dict[str, dict[str, SavedBytes]]:
    """By position of a layer, of no real model: what is chosen must hold for any."""
    widths = {"llm": model.llm.width, **{name: e.width for name, e in model.encoders.items()}}
    per = {"none": 120, "products": 40, "attention_mlp": 6, "attention": 4, "full": 2}
    return {
        name: layer({p: n * widths[name] for p, n in per.items()}, work.positions, 30 * widths[name])
        for name, work in row_work(model, shape).items()
    }


def fitted(
    gigabytes: float, shapes=SHAPES, model: ModelConfig = MODEL, host: float = 0, sharding=ONE_NODE
) -> MemoryPlan:
    batches = [DeviceBatch(shape, {"vision": 64, "audio": 64}, 8) for shape in shapes]
    kept = [kept_of(model, shape) for shape in shapes]
    return plan_memory(model, batches, kept, sharding, 2, AdamW(), SPEED, MemoryLimit(gigabytes * 1e9, host * 1e9))


def test_with_room_for_everything_nothing_is_computed_again():
    found = fitted(np.inf)
    assert found.fits
    assert {policy for own in found.policies.values() for policy in own} == {"none"}
    assert found.seconds == found.lower_bound == 0


def test_less_memory_is_never_exceeded_and_costs_more_time():
    needed = fitted(np.inf).device / 1e9
    seconds = []
    for share in (0.9, 0.6, 0.4, 0.3):
        found = fitted(share * needed)
        assert found.fits
        assert found.device <= share * needed * 1e9
        assert found.lower_bound <= found.seconds <= 1.1 * found.lower_bound
        seconds.append(found.seconds)
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_every_shape_fits_not_only_the_fullest():
    needed = fitted(np.inf).device / 1e9
    together = fitted(0.4 * needed)
    for shape in SHAPES:
        alone = fitted(0.4 * needed, [shape], together.applied(MODEL))
        assert alone.policies == together.policies
        assert alone.fits


def test_given_policies_are_kept_and_the_others_chosen_around_them():
    model = replace(MODEL, llm=replace(MODEL.llm, remat="none"))
    found = fitted(0.5 * fitted(np.inf).device / 1e9, model=model)
    assert set(found.policies["llm"]) == {"none"}
    assert "none" not in found.policies["vision"]


def test_what_does_not_fit_keeps_least_and_says_how_much_that_is():
    found = fitted(1)
    assert not found.fits
    assert found.device > 1e9
    assert {policy for own in found.policies.values() for policy in own} == {"full"}
    assert found.lower_bound == np.inf


def test_activations_go_to_the_host_only_where_it_has_room_and_links_are_fast():
    tight = 0.3 * fitted(np.inf).device / 1e9
    slow = fitted(tight, host=1000)
    assert "offload" not in Counter(p for own in slow.policies.values() for p in own)
    shapes = [DeviceBatch(shape, {"vision": 64, "audio": 64}, 8) for shape in SHAPES]
    kept = [kept_of(MODEL, shape) for shape in SHAPES]
    fast = Speed(Rates(600e12, 2.7e12, 5e12))
    for host, used in ((1000, True), (0, False)):
        found = plan_memory(
            MODEL, shapes, kept, ModelSharding(64), 2, AdamW(), fast, MemoryLimit(tight * 1e9, host * 1e9)
        )
        assert ("offload" in {p for own in found.policies.values() for p in own}) == used


def test_the_loss_is_made_in_parts_where_its_logits_would_take_the_room_of_more_than_they_cost():
    model = replace(MODEL, llm=replace(MODEL.llm, vocab=2**18))
    shapes = [DeviceBatch(shape, {"vision": 64, "audio": 64}, 8) for shape in SHAPES]
    kept = [kept_of(model, shape) for shape in SHAPES]

    def found(gigabytes: float, choices: tuple[int, ...]) -> MemoryPlan:
        return plan_memory(model, shapes, kept, ONE_NODE, 2, AdamW(), SPEED, MemoryLimit(gigabytes * 1e9), choices)

    rich = found(np.inf, (1, 2, 4, 8))
    assert rich.loss_chunks == 1
    room = 0.25 * rich.device / 1e9
    whole, parts = found(room, (1,)), found(room, (1, 2, 4, 8))
    assert parts.loss_chunks > 1
    assert parts.fits
    assert parts.seconds < whole.seconds
    assert parts.fixed["transient"] < whole.fixed["transient"]
    assert found(room, (parts.loss_chunks,)) == parts


def test_measured_times_decide_where_there_are_any():
    measured = {"none": 3.0, "products": 2.5, "attention_mlp": 3.5, "attention": 3.6, "full": 4.0}
    speed = Speed(SPEED.rates, {"vision": LayerTimes(1, {1024: measured})})
    shapes = [DeviceBatch(shape, {"vision": 64, "audio": 64}, 8) for shape in SHAPES]
    kept = [kept_of(MODEL, shape) for shape in SHAPES]

    def found(gigabytes: float) -> MemoryPlan:
        return plan_memory(MODEL, shapes, kept, ONE_NODE, 2, AdamW(), speed, MemoryLimit(gigabytes * 1e9))

    rich = found(np.inf)
    assert set(rich.policies["vision"]) == {"products"}
    assert set(rich.policies["llm"]) == {"none"}
    length = np.mean([shape["vision"][1] for shape in SHAPES])
    rows = SHAPES[0]["vision"][0]
    assert rich.seconds == pytest.approx(-0.5 * rows * length / 1024 * MODEL.encoders["vision"].layers)
    tight = found(0.3 * rich.device / 1e9)
    assert tight.fits
    assert tight.lower_bound <= tight.seconds


def test_tensor_parallelism_cuts_what_is_kept_inside_a_layer_but_not_between_layers():
    whole, halved = (fitted(np.inf, SHAPES[:1], sharding=sharding) for sharding in (ONE_NODE, ModelSharding(64, llm=2)))
    assert halved.activations["vision"] == whole.activations["vision"]
    # Without remat: inputs of attention and MLP, before and after their norms.
    between = 4 * 2 / 120
    assert halved.activations["llm"] == pytest.approx((between + (1 - between) / 2) * whole.activations["llm"])


def test_sequence_parallelism_cuts_all_that_is_kept():
    sharding = ModelSharding(64, llm=2, sequence_parallel="on")
    whole, halved = (fitted(np.inf, SHAPES[:1], sharding=s) for s in (ONE_NODE, sharding))
    assert halved.activations["llm"] == pytest.approx(whole.activations["llm"] / 2)


def test_the_policies_of_a_fit_become_the_models():
    found = fitted(0.4 * fitted(np.inf).device / 1e9)
    model = found.applied(MODEL)
    assert {"llm": model.llm.remat, **{n: e.remat for n, e in model.encoders.items()}} == {
        name: own[0] if len(set(own)) == 1 else own for name, own in found.policies.items()
    }
