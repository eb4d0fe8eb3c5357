"""The state is born in its shards, and stays in them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_run import MESHES, make_executor, paths, stderr_of, tiny_config

from mmjax.batch import Microbatch, TextBatch
from mmjax.config import MeshConfig, Muon
from mmjax.parallel.sharding import make_mesh, replicated
from mmjax.runtime.executor import Executor

CONFIG = tiny_config()


@pytest.fixture(scope="module")
def fsdp() -> Executor:
    return make_executor(CONFIG, MESHES["fsdp=8"])


@pytest.fixture(scope="module")
def born(fsdp) -> Any:
    return fsdp.states[0].random_parameters().lower(jax.random.key(0)).compile()


def bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def vectors(executor: Executor) -> set[str]:
    """Parameters with at most one logical axis: norms and biases, which stay whole under FSDP."""
    axes = jax.tree.leaves_with_path(executor.model.axes, is_leaf=lambda x: isinstance(x, tuple))
    return {
        jax.tree_util.keystr(p, simple=True, separator=".") for p, names in axes if len(names) < 2
    }


def per_device(abstract: Any, shardings: Any, skip: set[str]) -> tuple[int, int]:
    """(bytes on one device, bytes of all) of the leaves that do not end in a path of `skip`, nor are scalars."""
    mine = total = 0
    for (name, leaf), sharding in zip(
        paths(abstract).items(), jax.tree.leaves(shardings), strict=True
    ):
        if leaf.shape and not any(name.endswith(v) for v in skip):
            mine += math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            total += bytes_of(leaf)
    return mine, total


@pytest.mark.parametrize(
    "config", [CONFIG, replace(CONFIG, optimizer=Muon())], ids=["adamw", "muon"]
)
def test_fsdp_leaves_each_device_an_eighth_of_parameters_and_moments(config):
    executor = make_executor(config, MESHES["fsdp=8"])
    shardings, abstract = executor.states[0].shardings, executor.states[0].abstract
    mine, total = per_device(abstract._asdict(), shardings._asdict(), vectors(executor))
    parameters = per_device(abstract.trainable, shardings.trainable, vectors(executor))[1]
    # AdamW has two moments of everything, Muon one of its matrices.
    assert total == 3 * parameters if config is CONFIG else 2 * parameters <= total < 3 * parameters
    assert mine <= 1.05 * total / 8


def test_a_parameter_is_cut_along_every_axis_that_has_a_mesh_axis():
    mesh = make_executor(CONFIG, MESHES["data=2 x fsdp=2 x tensor=2"])
    whole = {
        name
        for (name, leaf), s in zip(
            paths(mesh.states[0].abstract.trainable).items(),
            jax.tree.leaves(mesh.states[0].shardings.trainable),
            strict=True,
        )
        if math.prod(s.shard_shape(leaf.shape)) == math.prod(leaf.shape)
    }
    assert whole <= vectors(mesh)


def test_initialisation_needs_less_than_half_of_all_parameters_on_a_device(fsdp, born):
    """What one device holds at any time, outputs and temporaries, of AdamW's whole state: 3 x 1/8 and the vectors."""
    every_parameter = bytes_of(fsdp.model.abstract)
    parameters = born.memory_analysis()
    moments = (
        fsdp.states[0]
        .init_optimizer.lower(fsdp.states[0].abstract.trainable)
        .compile()
        .memory_analysis()
    )
    at_birth = parameters.output_size_in_bytes + parameters.temp_size_in_bytes
    at_start = (
        parameters.output_size_in_bytes + moments.output_size_in_bytes + moments.temp_size_in_bytes
    )
    assert parameters.output_size_in_bytes > every_parameter / 8
    assert moments.output_size_in_bytes > 2 * every_parameter / 8
    assert max(at_birth, at_start) < 0.5 * every_parameter


def test_initialisation_gathers_nothing(fsdp, born):
    assert "all-gather" not in born.as_text()
    assert (
        "all-gather"
        not in fsdp.states[0]
        .init_optimizer.lower(fsdp.states[0].abstract.trainable)
        .compile()
        .as_text()
    )
    gathering = jax.jit(lambda x: x * 2, out_shardings=replicated(fsdp.mesh)).lower(
        jax.ShapeDtypeStruct(
            (8, 8), jnp.float32, sharding=NamedSharding(fsdp.mesh, PartitionSpec("fsdp"))
        )
    )
    assert "all-gather" in gathering.compile().as_text()


def test_parameters_do_not_depend_on_the_mesh_they_are_born_on(fsdp, born):
    trainable, _ = born(jax.random.key(0))
    one = (
        make_executor(CONFIG, MESHES["one device"])
        .states[0]
        .random_parameters()(jax.random.key(0))[0]
    )
    for name, leaf in paths(jax.device_get(one)).items():
        np.testing.assert_allclose(paths(trainable)[name], leaf, rtol=1e-6, atol=1e-7, err_msg=name)
    assert paths(jax.tree.map(lambda x: x.sharding, trainable)) == paths(
        fsdp.states[0].shardings.trainable
    )


def test_a_vocabulary_that_tensor_parallelism_does_not_divide_is_whole_and_replicates_nothing_else():
    model = CONFIG.model
    llm = replace(model.llm, layers=1, vocab=model.llm.vocab - 1)
    executor = make_executor(
        replace(CONFIG, model=replace(model, llm=llm, encoders={})), MESHES["fsdp=4 x tensor=2"]
    )
    assert llm.vocab % 2
    row = np.zeros((8, 16), np.int32)
    (batch,) = executor.put(
        Microbatch(TextBatch(row, row, row.astype(np.float32), *[row] * 9, {}, {}), {})
    )
    state = executor.init(jax.random.key(0))
    with stderr_of() as written:
        arguments = state.trainable, {}, executor.zeros()[0], batch, {"llm": np.float32(1)}
        executor.programs[0].forward_backward.lower(*arguments).compile()
    assert "rematerialization" not in written[0]


def test_the_warning_that_must_be_absent_is_seen_where_it_belongs():
    mesh = make_mesh(MeshConfig(1, fsdp=4, tensor=2), jax.devices())
    on = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    table = jax.ShapeDtypeStruct((43, 32), jnp.float32, sharding=on(None, "fsdp"))
    with stderr_of() as written:
        jax.jit(lambda x: jax.lax.with_sharding_constraint(x, on("tensor", None)) * 2).lower(
            table
        ).compile()
    assert "Involuntary full rematerialization" in written[0]
