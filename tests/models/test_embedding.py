"""A table's gradient is the float32 sum over its tokens, repeatable, wherever the table and the tokens lie."""

from __future__ import annotations

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import MeshConfig
from mmjax.models.embedding import look_up, sum_by_index
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh, sharding

VOCAB, WIDTH, ROWS, LENGTH = 520, 40, 8, 128  # no other dimension has this width
MESHES = {
    "data=8": MeshConfig(8),
    "fsdp=8": MeshConfig(1, fsdp=8),
    "data=2 x fsdp=2 x tensor=2": MeshConfig(2, fsdp=2, tensor=2),
}


def drawn(dtype=jnp.float32, vocab: int = VOCAB, rows: int = ROWS):
    """A table, tokens of which some are rare, one is every second and one never comes, and a gradient."""
    rng = np.random.default_rng(0)
    token = np.where(
        rng.random((rows, LENGTH)) < 0.5, 3, rng.integers(0, vocab - 1, (rows, LENGTH))
    )
    d_x = jnp.asarray(rng.normal(size=(rows, LENGTH, WIDTH)), dtype)
    return (
        jnp.asarray(rng.normal(size=(vocab, WIDTH)), jnp.float32),
        jnp.asarray(token, jnp.int32),
        d_x,
    )


def dense_gradient(token, d_x, vocab: int = VOCAB) -> np.ndarray:
    one_hot = np.asarray(token).ravel()[:, None] == np.arange(vocab)
    return one_hot.T.astype(np.float64) @ np.asarray(d_x, np.float64).reshape(-1, WIDTH)


def both_passes(table, token, d_x):
    x, backward = jax.vjp(lambda table: look_up(table, ("vocab", "embed"), token, d_x.dtype), table)
    return x, backward(d_x)[0]


def compiled_on(mesh_config: MeshConfig, table, token, d_x):
    """The compiled program of both passes with table and tokens in their shards, and its arguments."""
    mesh, rules = make_mesh(mesh_config, jax.devices()), ShardingRules.of(mesh_config)
    axes = ("vocab", "embed"), ("rows", "length"), ("rows", "length", "width")
    at = [
        sharding(mesh, rules, x.shape, of) for x, of in zip((table, token, d_x), axes, strict=True)
    ]
    args = [jax.device_put(x, place) for x, place in zip((table, token, d_x), at, strict=True)]
    with activations_on(mesh, rules):
        return jax.jit(both_passes, out_shardings=(at[2], at[0])).lower(*args).compile(), args


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gradient_is_the_dense_float32_one_and_the_same_bits_again(dtype):
    table, token, d_x = drawn(dtype)
    run = jax.jit(both_passes)
    x, found = run(table, token, d_x)
    np.testing.assert_array_equal(x, table.astype(dtype)[token])
    assert found.dtype == jnp.float32
    wanted = dense_gradient(token, d_x)
    assert np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()
    np.testing.assert_array_equal(found, run(table, token, d_x)[1])


def test_no_program_adds_by_scattering():
    table, token, d_x = drawn()
    assert "scatter" not in jax.jit(both_passes).lower(table, token, d_x).as_text()


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_on_a_mesh_it_is_that_of_one_device_and_nobody_has_the_table_or_the_tokens_of_all(mesh):
    table, token, d_x = drawn()
    program, args = compiled_on(mesh, table, token, d_x)
    x, found = program(*args)
    np.testing.assert_array_equal(x, table[token])
    wanted = jax.jit(both_passes)(table, token, d_x)[1]
    if mesh.data == 1:
        # Sorted over all ranks, tokens are added in the order of one device.
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())
    # The whole width is there of a device's own tokens, and of the table only where its columns are
    # not cut.
    own = ROWS // (mesh.data * mesh.fsdp) * LENGTH
    shapes = [
        [int(n) for n in dims.split(",")]
        for dims in re.findall(r"f32\[([\d,]+)\]", program.as_text())
    ]
    vectors = max(prod(shape) // WIDTH for shape in shapes if WIDTH in shape)
    assert vectors == (own if mesh.fsdp > 1 else VOCAB)


def test_what_does_not_divide_stays_whole():
    table, token, d_x = drawn(vocab=41, rows=3)
    program, args = compiled_on(MESHES["data=2 x fsdp=2 x tensor=2"], table, token, d_x)
    x, found = program(*args)
    np.testing.assert_array_equal(x, table[token])
    np.testing.assert_allclose(found, dense_gradient(token, d_x, 41), atol=1e-4)


def test_indices_outside_the_table_are_left_out():
    index = jnp.asarray([-3, 5, 0, 2, 0, 9])
    sums = sum_by_index(jnp.ones((6, 2), jnp.bfloat16), index, 4)
    np.testing.assert_array_equal(sums, np.array([2, 0, 1, 0])[:, None] * np.ones(2))
    assert not sum_by_index(jnp.ones((2, 2)), jnp.asarray([7, 8]), 4).any()
