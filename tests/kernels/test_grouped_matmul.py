"""Products of groups of rows, interpreted, are those of `jax.lax.ragged_dot`, and so are their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.kernels.grouped_matmul import GroupTiles, grouped_matmul, list_pairs

TILES = GroupTiles(rows=16, columns=16, inner=16, interpret=True)


@pytest.mark.default_cases("sizes0", "sizes1")
@pytest.mark.parametrize(
    "sizes", [(5, 0, 16, 30, 1), (0, 0, 64, 0, 0), (16, 16, 16, 16, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)]
)
def test_products_and_gradients_are_those_of_ragged_dot(sizes):
    rng = np.random.default_rng(0)
    rows, inner, columns = 64, 20, 33
    x, direction = (rng.standard_normal((rows, n)).astype(np.float32) for n in (inner, columns))
    weight = rng.standard_normal((len(sizes), inner, columns)).astype(np.float32)
    inside = (np.arange(rows) < sum(sizes))[:, None]

    def loss(product, x, weight):
        out = jnp.where(inside, product(jnp.where(inside, x, 0), weight, jnp.array(sizes)), 0)
        return (out * direction).sum(), out

    def results(product):
        (_, out), gradients = jax.jit(jax.value_and_grad(lambda *a: loss(product, *a), (0, 1), has_aux=True))(x, weight)
        return out, *gradients

    found = results(lambda *a: grouped_matmul(*a, TILES))
    for one, other in zip(found, results(jax.lax.ragged_dot), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_every_row_of_a_group_is_in_one_pair_and_no_other():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, 12, 6) * rng.integers(0, 2, 6)
        rows = int(sizes.sum() + rng.integers(0, 9))
        visited = np.full(rows, -1)
        for group, tile, start, stop in zip(*map(np.asarray, list_pairs(jnp.asarray(sizes), rows, 4)), strict=True):
            for row in range(max(start, 4 * tile), min(stop, 4 * tile + 4)):
                assert visited[row] == -1
                visited[row] = group
        np.testing.assert_array_equal(visited[: sizes.sum()], np.repeat(np.arange(6), sizes))
        np.testing.assert_array_equal(visited[sizes.sum() :], -1)
