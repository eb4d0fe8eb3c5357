"""The kernel of products of groups of rows, interpreted, against `ragged_dot`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.kernels.grouped_matmul import Visits, grouped_matmul


def test_tiles_hold_every_row_once_and_only_rows_of_their_group():
    visits = Visits.of(jnp.asarray([3, 5]), 9, 4)
    assert [list(map(int, x)) for x in visits] == [
        [0, 1, 1, 2, 2],
        [0, 3, 7, 8, 12],
        [3, 7, 8, 9, 9],
    ]
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.multinomial(rng.integers(1, 200), rng.dirichlet(np.full(6, 0.4)))
        rows = sizes.sum() + rng.integers(0, 9)
        owner = np.append(np.repeat(np.arange(6), sizes), np.full(rows - sizes.sum(), 6))
        seen = [
            (row, group)
            for group, start, end in zip(*Visits.of(jnp.asarray(sizes), int(rows), 16), strict=True)
            for row in range(start, end)
        ]
        assert [row for row, _ in sorted(seen)] == list(range(rows))
        assert all(owner[row] == group for row, group in seen)


@pytest.mark.parametrize("sizes", [[40, 0, 130, 20], [0, 0, 0, 200], [0, 0, 0, 0]])
def test_products_and_gradients_are_those_of_ragged_dot_in_float32(sizes):
    rng = np.random.default_rng(0)
    x, weights, d_out = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((207, 64), (4, 64, 96), (207, 96))
    )
    sizes = jnp.asarray(sizes, jnp.int32)

    def with_gradients(multiply):
        out, backward = jax.vjp(lambda x, w: multiply(x, w, sizes), x, weights)
        return out, *backward(d_out)

    exact = with_gradients(jax.lax.ragged_dot)
    kernel = with_gradients(lambda x, w, sizes: grouped_matmul(x, w, sizes, True))
    for found, expected in zip(kernel, exact, strict=True):
        np.testing.assert_allclose(
            found, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(jnp.abs(expected).max()))
        )
    assert not np.asarray(kernel[0])[int(sizes.sum()) :].any()
