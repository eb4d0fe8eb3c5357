"""MMScale's four settings: what is frozen stays to the bit, what is trained learns, no product is needless."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from tiny_run import MESHES, gradients, load_steps, make_executor, one_shape, paths, weights

from mmjax.config import Config
from mmjax.config.loading import load
from mmjax.config.model import frozen_modules, with_changes
from mmjax.models.model import module_of
from mmjax.planning.flops import executed, model_flops
from mmjax.planning.work import row_work
from mmjax.runtime.state import hyperparameters

PROJECTORS = {"vision.connector", "picture.connector"}
SETTINGS = {
    "projectors": PROJECTORS,
    "encoder": PROJECTORS | {"vision"},
    "llm": PROJECTORS | {"llm"},
    "generator": PROJECTORS | {"picture"},
}


def setting(trained: str, llm: int, vision: int, picture: int) -> Config:
    """tiny_draw in this setting, or all trained, with so many layers, which keep everything."""
    dropped = "model.generators.picture.flow.condition_dropout=0.5"
    words = [dropped] if trained == "all" else [dropped, f"trained={trained}"]
    config = load("tiny_draw" if trained == "all" else "mmscale", [*words, "data.workers=0"])
    layers = {"llm": llm, "vision": vision, "picture": picture}
    changes = {tower: {"layers": count, "remat": "none"} for tower, count in layers.items()}
    return one_shape(replace(config, model=with_changes(config.model, changes)))


@pytest.fixture(scope="module")
def microbatches(tmp_path_factory):
    """The microbatches of the first two steps, which do not depend on what is trained."""
    return load_steps(setting("all", 1, 1, 1), tmp_path_factory.mktemp("index"), 2)


@pytest.mark.parametrize("base", ["tiny_draw", "mllm_9b"])
def test_each_setting_trains_every_projector_and_one_module_more(base):
    for trained, parts in SETTINGS.items():
        model = load("mmscale", [f"trained={trained}", f"base={base}"]).model
        everything = {"llm", "vision", "picture"} | PROJECTORS
        assert frozen_modules(model) == everything - parts


@pytest.mark.default_cases("projectors")
@pytest.mark.parametrize("trained", SETTINGS)
def test_what_is_frozen_stays_to_the_bit_and_every_parameter_that_is_not_has_a_gradient(
    trained, microbatches
):
    config = setting(trained, 1, 1, 2)
    executor = make_executor(config, MESHES["one device"])
    state = executor.init(jax.random.key(0))
    before = jax.device_get(state)
    sums = gradients(executor, state, microbatches[0])
    assert {module_of(tuple(name.split("."))) for name in paths(sums.gradients)} == SETTINGS[
        trained
    ]
    assert [
        name for name, leaf in paths(sums.gradients).items() if not np.abs(leaf).max() > 0
    ] == []
    accumulated = executor.zeros()
    for number, batches in enumerate(microbatches):
        put = [executor.put(batch) for batch in batches]
        hyper = hyperparameters(config, number)
        noise = np.array([0, number], np.uint32)
        state, accumulated, _ = executor.step(state, accumulated, put, hyper, noise=noise)
    after = jax.device_get(state)
    assert after.stages[0].step == 2
    for name, leaf in paths(before.frozen).items():
        assert leaf.tobytes() == paths(after.frozen)[name].tobytes(), name
    assert [
        name
        for name, leaf in paths(before.trainable).items()
        if (leaf == paths(after.trainable)[name]).all()
    ] == []


def traced_products(jaxpr) -> int:
    """Multiply-adds of all matrix products in a jaxpr."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        inside = (getattr(inner, "jaxpr", inner) for inner in equation.params.values())
        products = sum(traced_products(inner) for inner in inside if hasattr(inner, "eqns"))
        total += products * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


def step_program(config: Config, batch):
    """The arguments of a step's gradient program, and its executor."""
    executor = make_executor(config, MESHES["one device"], accumulates=False)
    params = jax.eval_shape(executor.states[0].random_parameters(), jax.random.key(0))
    return executor, (*params, None, batch, weights([batch]), np.zeros(2, np.uint32))


def shape_of(batch):
    return {
        "llm": batch.text.token.shape,
        **{name: items.item.shape for name, items in batch.items.items()},
    }


@pytest.mark.default_cases("projectors")
@pytest.mark.parametrize("trained", ["all", *SETTINGS])
def test_the_products_of_a_step_are_those_that_its_gradients_need(trained, microbatches):
    """Within 2 %: a block of a diffusion transformer attends the conditions of two images, where one is needed."""
    config = setting(trained, 4, 2, 4)
    batch = microbatches[0][0]
    executor, arguments = step_program(config, batch)
    found = 2 * traced_products(
        jax.make_jaxpr(executor.programs[0].add_gradients)(*arguments).jaxpr
    )
    needed = model_flops(
        config.model, row_work(config.model, shape_of(batch)), frozen_modules(config.model)
    )
    assert found == pytest.approx(sum(flops.total for flops in needed.values()), rel=0.02)


@pytest.mark.default_cases("projectors")
@pytest.mark.parametrize("trained", ["all", *SETTINGS])
def test_the_compiled_step_executes_what_is_planned(trained, microbatches):
    # XLA counts a scan's body once
    config = setting(trained, 1, 1, 1 if trained in ("all", "generator") else 2)
    batch = microbatches[0][0]
    executor, arguments = step_program(config, batch)
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    lowered = executor.programs[0].forward_backward.lower(*arguments)
    found = lowered.compile(compiler_options=quick).cost_analysis()["flops"]
    planned = executed(config.model, shape_of(batch), frozen_modules(config.model))
    assert found == pytest.approx(sum(flops.total for flops in planned.values()), rel=0.02)
