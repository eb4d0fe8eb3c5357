import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.models.layers import MLP, LayerNorm, Linear, RMSNorm


def random_array(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_linear_is_born_with_variance_one_over_fan_in_and_computes_in_the_inputs_dtype():
    layer = Linear(64, 256, ("embed", "mlp"), nnx.Rngs(0), bias=True)
    assert layer.weight[...].dtype == jnp.float32
    assert abs(float(layer.weight[...].std()) - 1 / 8) < 0.005
    assert layer(random_array(2, 64, dtype=jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_scale_every_position_alike(norm):
    x = 100 * random_array(3, 5, 32) + 7
    out = np.asarray(norm(32, 1e-6)(x))
    np.testing.assert_allclose((out**2).mean(-1), 1, atol=1e-4)
    if norm is LayerNorm:
        np.testing.assert_allclose(out.mean(-1), 0, atol=1e-5)


def test_a_gated_mlp_is_its_formula():
    layer, x = MLP(8, 12, 8, "silu", nnx.Rngs(0), gated=True), random_array(2, 3, 8)
    gate, up, down = (part.weight[...] for part in (layer.gate, layer.up, layer.down))
    np.testing.assert_allclose(layer(x), (jax.nn.silu(x @ gate) * (x @ up)) @ down, atol=1e-5)
