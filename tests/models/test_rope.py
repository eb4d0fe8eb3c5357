import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.models.rope import rotate, rotation_2d


def random_array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def scores(q, k, q_rotation, k_rotation):
    return jnp.einsum("btnh,bsnh->bts", rotate(q, q_rotation), rotate(k, k_rotation))


def test_2d_rotary_scores_depend_on_both_distances_apart():
    q, k = random_array(1, 1, 1, 8), random_array(1, 1, 1, 8, seed=1)
    at = {
        yx: rotation_2d(jnp.asarray([[yx]]), 8, 100.0)
        for yx in ((0, 0), (2, 1), (5, 4), (7, 5), (1, 2))
    }
    same = scores(q, k, at[2, 1], at[0, 0]), scores(q, k, at[7, 5], at[5, 4])
    np.testing.assert_allclose(*same, atol=1e-5)
    assert abs(float((same[0] - scores(q, k, at[1, 2], at[0, 0])).sum())) > 1e-3


def test_rotation_refuses_heads_that_do_not_split_into_pairs():
    with pytest.raises(ValueError, match="head of 6 channels"):
        rotation_2d(jnp.zeros((1, 1, 2), int), 6, 100.0)
