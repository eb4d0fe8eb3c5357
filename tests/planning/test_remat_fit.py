"""A run that fits computes as little again as it can; one that does not is told with what it needs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from one_shape import plan_of, with_settings

from mmjax.config import AdamW, Config, ModelConfig
from mmjax.config.loading import load
from mmjax.planning.hardware import Rates
from mmjax.planning.remat import RunPlan
from mmjax.planning.speed import LayerTimes, Speed

CONFIG = replace(with_settings(load("omni_10b"), "bfloat16"), optimizer=AdamW())
MODEL = CONFIG.model
SPEED = Speed(Rates(600e12, 2.7e12, 50e9))
SHAPES = [
    {"llm": (1, 4096), "vision": (1, 8192), "audio": (1, 4096)},
    {"llm": (1, 8192), "vision": (1, 2048), "audio": (1, 8192)},
]


def fitted(
    gigabytes: float,
    shapes=SHAPES,
    model: ModelConfig = MODEL,
    host: float = 0,
    speed: Speed = SPEED,
    config: Config = CONFIG,
    **mesh: int,
) -> RunPlan:
    """The plan on 64 devices that share all parameters."""
    sizes = {"fsdp": 64 // mesh.get("tensor", 1)} | mesh
    return plan_of(
        replace(config, model=model),
        shapes,
        sizes,
        widths={"vision": 64, "audio": 64},
        peers=8,
        gigabytes=gigabytes,
        host=host,
        speed=speed,
    )


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
    fast = Speed(Rates(600e12, 2.7e12, 5e12))
    for host, used in ((1000, True), (0, False)):
        found = fitted(tight, host=host, speed=fast)
        assert ("offload" in {p for own in found.policies.values() for p in own}) == used


def test_the_loss_is_made_in_parts_where_its_logits_would_take_the_room_of_more_than_they_cost():
    model = replace(MODEL, llm=replace(MODEL.llm, vocab=2**18))

    def found(gigabytes: float, chunks: int) -> RunPlan:
        return fitted(
            gigabytes, model=model, config=with_settings(CONFIG, "bfloat16", chunks=chunks)
        )

    rich = found(np.inf, 0)
    assert rich.loss_chunks == 1
    room = 0.25 * rich.device / 1e9
    whole, parts = found(room, 1), found(room, 0)
    assert parts.loss_chunks > 1
    assert parts.fits
    assert parts.seconds < whole.seconds
    assert parts.fullest.fixed["transient"] < whole.fullest.fixed["transient"]
    assert found(room, parts.loss_chunks) == parts


def test_measured_times_decide_where_there_are_any():
    measured = {"none": 3.0, "products": 2.5, "attention_mlp": 3.5, "attention": 3.6, "full": 4.0}
    speed = Speed(SPEED.rates, {"vision": LayerTimes(1, {1024: measured})})
    rich = fitted(np.inf, speed=speed)
    assert set(rich.policies["vision"]) == {"products"}
    assert set(rich.policies["llm"]) == {"none"}
    length = np.mean([shape["vision"][1] for shape in SHAPES])
    rows = SHAPES[0]["vision"][0]
    assert rich.seconds == pytest.approx(
        -0.5 * rows * length / 1024 * MODEL.encoders["vision"].layers
    )
    tight = fitted(0.3 * rich.device / 1e9, speed=speed)
    assert tight.fits
    assert tight.lower_bound <= tight.seconds


def activations(plan: RunPlan, tower: str) -> float:
    return plan.fullest.activations[tower]


def test_tensor_parallelism_cuts_what_is_kept_inside_a_layer_but_not_between_layers():
    whole, divided = (fitted(np.inf, SHAPES[:1], **mesh) for mesh in ({}, {"tensor": 2}))
    ratio = activations(divided, "llm") / activations(whole, "llm")
    assert 0.5 < ratio < 0.75
    # Without remat: inputs of attention and MLP, before and after their norms.
    between = (
        4 * 2 * MODEL.llm.width * SHAPES[0]["llm"][1] * MODEL.llm.layers / activations(whole, "llm")
    )
    assert ratio == pytest.approx(between + (1 - between) / 2)


def test_sequence_parallelism_cuts_all_that_is_kept():
    mesh = replace(CONFIG.mesh, sequence_parallel="on")
    whole = fitted(np.inf, SHAPES[:1])
    halved = fitted(np.inf, SHAPES[:1], config=replace(CONFIG, mesh=mesh), tensor=2)
    assert activations(halved, "llm") == pytest.approx(activations(whole, "llm") / 2)


def test_the_policies_of_a_fit_become_the_models():
    found = fitted(0.4 * fitted(np.inf).device / 1e9)
    model = found.applied(MODEL)
    assert {"llm": model.llm.remat, **{n: e.remat for n, e in model.encoders.items()}} == {
        name: own[0] if len(set(own)) == 1 else own for name, own in found.policies.items()
    }
