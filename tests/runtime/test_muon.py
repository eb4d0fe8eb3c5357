"""Muon on a mesh: whole layers on single devices by all-to-alls, with the directions of one device."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import MESHES, make_executor, tiny_config

from mmjax.config import Muon
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh, sharding
from mmjax.planning.stage_time import MUON_ITERATIONS
from mmjax.runtime.device_batch import ProcessReport, put_report
from mmjax.runtime.muon import ITERATIONS, newton_schulz, orthogonalize
from mmjax.runtime.state import hyperparameters


def matrices(layers: int, rows: int, columns: int) -> jax.Array:
    """Gradients of low rank in noise, of norm 1: their singular values span a factor of some hundred."""
    rng = np.random.default_rng(layers)
    few = rng.normal(size=(layers, rows, 4)) @ rng.normal(size=(layers, 4, columns))
    x = few + 0.1 * rng.normal(size=(layers, rows, columns))
    return jnp.asarray(x / np.linalg.norm(x, axis=(1, 2), keepdims=True), jnp.float32)


def reference(x: jax.Array) -> jax.Array:
    """The iteration of Jordan's own code, where every operation is rounded to bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x.astype(jnp.bfloat16)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24)])
def test_the_iteration_is_optaxs_and_in_bfloat16_it_is_rounded_less_than_the_reference(shape):
    x = matrices(1, *shape)[0]
    theirs = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)  # without momentum
    wanted, _ = theirs.update(x, theirs.init(x))
    np.testing.assert_allclose(newton_schulz(x), wanted, atol=2e-6)
    rounded = newton_schulz(x.astype(jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    error = lambda found: (  # noqa: E731
        np.linalg.norm(found.astype(jnp.float32) - wanted) / np.linalg.norm(wanted)
    )
    assert error(rounded) < min(
        0.1, error(reference(x) if shape[0] <= shape[1] else reference(x.T).T)
    )
    assert ITERATIONS == MUON_ITERATIONS


@pytest.mark.covering(1)
@pytest.mark.parametrize("layers", [1, 3, 9])
@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4 x tensor=2", "data=2 x fsdp=2 x tensor=2"])
@pytest.mark.parametrize("axes", [("embed", "mlp"), ("heads", "embed")])
def test_every_mesh_gives_the_directions_of_one_device(mesh, axes, layers):
    x = matrices(layers, 16, 24)
    on = make_mesh(MESHES[mesh], jax.devices())
    rules = ShardingRules()
    place = sharding(on, rules, x.shape, axes)

    def directions(x: jax.Array) -> jax.Array:
        with activations_on(on, rules):
            return orthogonalize(x, axes)

    found = jax.jit(directions, out_shardings=place)(jax.device_put(x, place))
    np.testing.assert_allclose(found, jax.jit(lambda x: orthogonalize(x, axes))(x), atol=1e-5)


def test_under_fsdp_a_device_receives_its_shards_twice_and_no_whole_matrix():
    config = replace(tiny_config(), optimizer=Muon())
    config = replace(config, model=replace(config.model, llm=replace(config.model.llm, layers=8)))
    executor = make_executor(config, MESHES["fsdp=8"])
    struct = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
    state = jax.tree.map(struct, executor.states[0].abstract, executor.states[0].shardings)
    reports = put_report(ProcessReport(), executor.mesh)
    hyper = hyperparameters(config, 0)
    text = (
        executor.update_whole.lower(
            state,
            executor.zeros()[0],
            hyper,
            {"llm": np.float32(1)},
            reports,
            executor.merge_unreadable(reports.unreadable),
        )
        .compile()
        .as_text()
    )
    received = {"all-to-all": 0, "all-gather": 0, "all-reduce": 0}
    for shapes, kind in re.findall(rf" = (.*?) ({'|'.join(received)})(?:-start)?\(", text):
        received[kind] += sum(
            math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", shapes)
        )
    axes = jax.tree.leaves_with_path(
        executor.model.axes["llm"]["layers"], is_leaf=lambda x: isinstance(x, tuple)
    )
    stacks = jax.tree.leaves(executor.states[0].abstract.trainable["llm"]["layers"])
    matrices = sum(x.size for x, (_, names) in zip(stacks, axes, strict=True) if len(names) == 2)
    others = (
        sum(x.size for x in jax.tree.leaves(executor.states[0].abstract.trainable) if x.ndim > 1)
        - matrices
    )
    # 8 layers of the LLM are one for each device; a tower of 2 layers, or a connector, is padded to
    # 8.
    assert 2 * matrices / 8 <= received["all-to-all"] <= 2 * (matrices / 8 + others)
    assert received["all-gather"] + received["all-reduce"] < 0.05 * received["all-to-all"]
