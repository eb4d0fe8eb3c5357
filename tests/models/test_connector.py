import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.config import ConnectorConfig
from mmjax.models.multimodal import Connector


def connector(merge, grid, axes):
    return Connector(ConnectorConfig(merge, 16, position_grid=grid), 8, 12, axes, 1e-6, nnx.Rngs(0))


def random_rows(length, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(1, length, 8)), jnp.float32)


def test_merged_image_tokens_carry_their_row_and_column():
    with_positions, coordinates = connector(2, 4, (1, 2)), np.zeros((1, 8, 3), np.int32)
    coordinates[0, 4:] = (0, 2, 6)
    x = jnp.tile(random_rows(4), (1, 2, 1))
    out = with_positions(x, jnp.zeros((1, 8), jnp.int32), jnp.asarray(coordinates))
    y, x_table = (with_positions.positions[name].weight[...] for name in ("y", "x"))
    np.testing.assert_allclose(
        out[0, 1] - out[0, 0], y[1] + x_table[3] - y[0] - x_table[0], atol=1e-5
    )


def test_merged_audio_tokens_carry_their_time():
    with_positions = connector(2, 8, (0,))
    time = jnp.stack([jnp.arange(8), jnp.zeros(8, int), jnp.zeros(8, int)], -1)[None]
    out = with_positions(jnp.tile(random_rows(2), (1, 4, 1)), jnp.zeros((1, 8), jnp.int32), time)
    table = with_positions.positions["t"].weight[...]
    np.testing.assert_allclose(out[0] - out[0, :1], table[:4] - table[:1], atol=1e-5)


def test_padded_members_of_a_group_count_as_zeros():
    plain, item = connector(2, 0, (1, 2)), jnp.asarray([[0, 0, -1, -1]])
    x, coordinates = random_rows(4), jnp.zeros((1, 4, 3), jnp.int32)
    loud = x.at[:, 2:].multiply(100.0)
    np.testing.assert_array_equal(plain(x, item, coordinates), plain(loud, item, coordinates))
    assert not nnx.state(plain.positions)


def test_a_row_that_does_not_divide_into_groups_is_refused():
    with pytest.raises(ValueError, match="6 positions do not divide into groups of 4"):
        connector(2, 0, (1, 2))(
            random_rows(6), jnp.zeros((1, 6), jnp.int32), jnp.zeros((1, 6, 3), jnp.int32)
        )
