"""One global batch gives one loss and one gradient, whatever devices and microbatches it is spread over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import (
    MESHES,
    Trained,
    gradients,
    load_steps,
    make_executor,
    merged,
    one_shape,
    paths,
    scattered,
    state_with,
    stderr_of,
    tiny_config,
    train,
    weight,
    without,
    worst_leaf,
)

from mmjax.batch import Microbatch
from mmjax.config import Muon
from mmjax.data.plan.placement import ONE_RANK, Topology
from mmjax.runtime.device_batch import ProcessReport, put_report
from mmjax.runtime.devices import mesh_topology
from mmjax.runtime.executor import Executor
from mmjax.runtime.stage_program import Sums
from mmjax.runtime.state import hyperparameters

CONFIG = one_shape(tiny_config())
OF_GRADIENT, OF_LOSS, OF_TRAINING = 1e-5, 1e-5, 1e-4

Steps = list[tuple[Microbatch, ...]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Callable[[Topology], Steps]:
    """The first steps, in microbatches, as they are planned for these ranks."""
    return cache(lambda topology: load_steps(CONFIG, tmp_path_factory.mktemp("data"), 10, topology))


@pytest.fixture(scope="module")
def microbatches(loaded) -> Steps:
    return loaded(ONE_RANK)


@pytest.fixture(scope="module")
def steps(microbatches) -> Steps:
    return [(merged(batches),) for batches in microbatches]


@pytest.fixture(scope="module")
def parameters() -> Any:
    return scattered(make_executor(CONFIG, MESHES["one device"]))


@dataclass
class OnMesh:
    """What a mesh makes of the first step's rows, and of ten updates."""

    executor: Executor
    first: Sums
    trained: Trained
    warnings: str


@pytest.fixture(scope="module")
def on(loaded, steps, parameters) -> Callable[[str], OnMesh]:
    """One device gets the rows of all microbatches in one."""

    @cache
    def run(mesh: str) -> OnMesh:
        executor = make_executor(CONFIG, MESHES[mesh])
        planned = (
            steps if mesh == "one device" else loaded(mesh_topology(executor.mesh, MESHES[mesh]))
        )
        with stderr_of() as written:
            first = gradients(executor, state_with(executor, parameters), planned[0])
            trained = train(CONFIG, executor, state_with(executor, parameters), planned)
        return OnMesh(executor, first, trained, "".join(written))

    return run


def loss(accumulated: Sums) -> float:
    return float(accumulated.losses.loss.sum() / accumulated.losses.weight.sum())


def assert_same(found: Sums, wanted: Sums) -> None:
    assert loss(found) == pytest.approx(loss(wanted), rel=OF_LOSS)
    assert worst_leaf(found.gradients, wanted.gradients) < (OF_GRADIENT, "")


ALL_AXES = "fsdp=2 x context=2 x tensor=2, encoders=data"  # rows over fsdp as they are over data
OTHERS = list(MESHES)[1:]


@pytest.mark.default_cases(ALL_AXES)
@pytest.mark.parametrize("mesh", OTHERS)
def test_loss_and_every_gradient_are_those_of_one_device(on, mesh):
    assert_same(on(mesh).first, on("one device").first)


@pytest.mark.default_cases(ALL_AXES)
@pytest.mark.parametrize("mesh", OTHERS)
def test_ten_updates_give_the_losses_of_one_device(on, mesh):
    found, wanted = on(mesh).trained, on("one device").trained
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=OF_TRAINING)
    np.testing.assert_allclose(found.gradient_norms, wanted.gradient_norms, rtol=10 * OF_TRAINING)
    assert wanted.losses[-3:].mean() < 0.9 * wanted.losses[0]


@pytest.mark.default_cases(ALL_AXES)
@pytest.mark.parametrize("mesh", OTHERS)
def test_no_array_is_replicated_to_move_it_between_shardings(on, mesh):
    assert "rematerialization" not in on(mesh).warnings


def test_the_rows_of_these_batches_do_not_divide_by_the_ranks_and_hold_every_modality(
    steps, loaded
):
    rows = {name: len(items.item) for name, items in steps[0][0].items.items()} | {
        "llm": len(steps[0][0].text.token)
    }
    assert all(count % 8 for count in rows.values()), rows
    assert all((slots >= 0).any() for slots in steps[0][0].text.slots.values())
    for ranks in (2, 8):
        batches = loaded(Topology(ranks, ranks, ranks))[0]
        assert {len(x) % ranks for x in jax.tree.leaves(batches)} == {0}
        assert weight(batches) == weight(steps[0])
        assert all(any((b.text.slots[e] >= 0).any() for b in batches) for e in ("vision", "audio"))


def test_four_microbatches_give_the_gradients_and_losses_of_their_rows_in_one(
    on, microbatches, parameters
):
    one = on("one device")
    assert_same(
        gradients(one.executor, state_with(one.executor, parameters), microbatches[0]), one.first
    )
    trained = train(CONFIG, one.executor, state_with(one.executor, parameters), microbatches)
    np.testing.assert_allclose(trained.losses, one.trained.losses, rtol=OF_TRAINING)


def test_a_microbatch_without_images_or_audio_is_only_a_part_of_its_step(
    on, microbatches, parameters
):
    executor = on("one device").executor
    first, second, *rest = microbatches[0]
    some_empty = [*rest, without(first, ("vision",)), without(second, ("vision", "audio"))]
    state = state_with(executor, parameters)
    assert_same(
        gradients(executor, state, some_empty), gradients(executor, state, [merged(some_empty)])
    )


@pytest.mark.parametrize("missing", [("vision",), ("audio",), ("vision", "audio")], ids="+".join)
def test_a_step_without_items_trains_the_rest_on_all_axes(on, loaded, steps, parameters, missing):
    executor = on(ALL_AXES).executor
    planned = loaded(mesh_topology(executor.mesh, MESHES[ALL_AXES]))[0]
    batches, one = [without(b, missing) for b in planned], without(steps[0][0], missing)
    assert weight([one]) == weight(batches) > 0
    found = gradients(executor, state_with(executor, parameters), batches)
    assert_same(
        found,
        gradients(
            on("one device").executor, state_with(on("one device").executor, parameters), [one]
        ),
    )
    for name, gradient in paths(found.gradients).items():
        empty = any(
            f"{kind}.{encoder}." in name
            for kind in ("encoders", "connectors")
            for encoder in missing
        )
        assert np.any(gradient) != empty, name


def test_adamw_decays_the_matrices_of_an_encoder_that_saw_nothing_and_leaves_its_norms(
    on, loaded, parameters
):
    executor = on(ALL_AXES).executor
    planned = loaded(mesh_topology(executor.mesh, MESHES[ALL_AXES]))[0]
    batches = [without(b, ("vision",)) for b in planned]
    hyper = hyperparameters(CONFIG, 5)
    accumulated = gradients(executor, state_with(executor, parameters), batches)
    accumulated = jax.device_put(
        accumulated, jax.tree.map(lambda x: x.sharding, executor.zeros()[0])
    )
    reports = put_report(ProcessReport(), executor.mesh)
    unreadable = executor.merge_unreadable(reports.unreadable)
    (state,) = state_with(executor, parameters).stages
    state, _, _ = executor.update_whole(
        state, accumulated, hyper, {"llm": np.float32(1)}, reports, unreadable
    )
    rate, decay = hyper["learning_rate/vision"], hyper["weight_decay/vision"]
    before, after = (
        paths(tree["encoders"]["vision"]) for tree in (parameters, jax.device_get(state.trainable))
    )
    for name, p in before.items():
        kept = 1 - rate * decay if name.endswith("weight") else np.float32(1)
        np.testing.assert_allclose(after[name], p * kept, rtol=1e-6, err_msg=name)


@pytest.mark.exhaustive
def test_ten_updates_of_muon_give_the_losses_of_one_device(on, loaded, steps, parameters):
    config = replace(CONFIG, optimizer=Muon())
    losses = {}
    for mesh, planned in (("one device", steps), ("fsdp=4 x tensor=2", loaded(Topology(4, 4, 4)))):
        executor = make_executor(config, MESHES[mesh])
        # The gradient does not know the optimizer: compiled already.
        executor.programs[0].forward_backward = on(mesh).executor.programs[0].forward_backward
        losses[mesh] = train(config, executor, state_with(executor, parameters), planned).losses
    np.testing.assert_allclose(losses["fsdp=4 x tensor=2"], losses["one device"], rtol=OF_TRAINING)
