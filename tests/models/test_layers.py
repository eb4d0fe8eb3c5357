import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from mmjax.config import LoraConfig
from mmjax.models import layers
from mmjax.models.layers import ACTIVATIONS, MLP, LayerNorm, RMSNorm
from mmjax.models.linear import Linear
from mmjax.models.lora import LowRank


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


def kept_bytes(function, *args) -> int:
    """Bytes of what a function keeps for its gradient beside its arguments."""

    def residuals(*args):
        known = {id(x) for x in jax.tree.leaves(args)}
        return [x for x in jax.tree.leaves(jax.vjp(function, *args)[1]) if id(x) not in known]

    return sum(x.size * x.dtype.itemsize for x in jax.eval_shape(residuals, *args))


def split_module(module):
    """Return a module as a function of its parameters and its input, and the parameters."""
    graph, params = nnx.split(module)
    return lambda params, x: nnx.merge(graph, params)(x), params


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_keeps_the_outputs_of_its_first_products_and_has_the_gradients_of_its_formula(
    activation, gated
):
    function, params = split_module(MLP(8, 12, 8, activation, nnx.Rngs(0), gated=gated))
    x, act = random_array(2, 3, 8), ACTIVATIONS[activation]

    def formula(params, x):
        gate, up, down = (
            params[name]["weight"][...] if name in params else None
            for name in ("gate", "up", "down")
        )
        return (act(x @ gate) * (x @ up) if gated else act(x @ up)) @ down

    def gradients(function):
        return jax.tree.leaves(
            jax.jit(jax.grad(lambda *args: (function(*args) ** 2).sum(), (0, 1)))(params, x)
        )

    for found, wanted in zip(gradients(function), gradients(formula), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())
    assert kept_bytes(function, params, x.astype(jnp.bfloat16)) == (1 + gated) * 2 * 3 * 12 * 2


@pytest.mark.parametrize(
    "module",
    [RMSNorm(8, 1e-6), LayerNorm(8, 1e-6), Linear(8, 4, ("embed", "mlp"), nnx.Rngs(0), bias=True)],
    ids=["rms", "layer", "linear"],
)
def test_a_norm_or_a_product_keeps_nothing_but_its_input(module):
    function, params = split_module(module)
    assert kept_bytes(function, params, random_array(2, 3, 8, dtype=jnp.bfloat16)) == 0


def test_a_clipped_product_passes_gradients_of_values_at_its_bounds_as_pytorch_does():
    linear = Linear(3, 2, ("embed", "mlp"), nnx.Rngs(0), clipped=True)
    linear.weight[...] = jnp.array([[1.0, 2.0], [0.5, -1.0], [0.0, 1.0]])
    limits = {"input_min": -1.0, "input_max": 2.0, "output_min": -1.5, "output_max": 2.0}
    for name, limit in limits.items():
        getattr(linear.bounds, name)[...] = limit
    x = np.array([[2.0, 0.0, -1.0], [2.5, -1.0, 0.0], [0.5, 0.5, -3.0]], np.float32)
    wanted = torch.tensor(x, requires_grad=True)
    weight = torch.tensor(np.asarray(linear.weight[...]), requires_grad=True)
    y = (wanted.clamp(-1, 2) @ weight).clamp(-1.5, 2)
    (y**3).sum().backward()
    function, params = split_module(linear)
    x = jnp.asarray(x)
    gradients = jax.grad(lambda params, x: (function(params, x) ** 3).sum(), (0, 1))(params, x)
    np.testing.assert_array_equal(function(params, x), y.detach())
    np.testing.assert_array_equal(gradients[1], wanted.grad)
    np.testing.assert_array_equal(gradients[0]["weight"][...], weight.grad)
    assert not any(bound[...] for bound in gradients[0]["bounds"].values())
    # what was within bounds, a byte for each output, beside its input
    assert kept_bytes(function, params, x.astype(jnp.bfloat16)) == 3 * 2


@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_a_norm_has_the_gradients_of_its_formula(norm):
    function, params = split_module(norm(8, 1e-6))
    params = jax.tree.map(lambda p: p + random_array(8, seed=1), params)
    x = random_array(2, 3, 8)

    def formula(params, x):
        centred = x - x.mean(-1, keepdims=True) if norm is LayerNorm else x
        y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * params["scale"][...]
        return y + params["bias"][...] if norm is LayerNorm else y

    def gradients(function):
        return jax.tree.leaves(
            jax.jit(jax.grad(lambda *args: (function(*args) ** 3).sum(), (0, 1)))(params, x)
        )

    for found, wanted in zip(gradients(function), gradients(formula), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_an_mlp_padded_for_a_gpu_has_the_outputs_and_gradients_of_one_that_is_not(
    gated, clipped, monkeypatch
):
    biases = ("gate", "up", "down")
    mlp = MLP(16, 36, 16, "silu", nnx.Rngs(0), gated=gated, biases=biases, clipped=clipped)
    for linear in (mlp.up, mlp.down) if clipped else ():
        for n, bound in enumerate(("input_min", "output_min", "output_max")):
            getattr(linear.bounds, bound)[...] = 0.1 + 0.3 * n
    mlp.up.bias[...] += 0.5
    for linear in (mlp.up, mlp.down):
        inputs, outputs = linear.weight.shape
        a, b = (jax.random.normal(jax.random.key(2), s) / 4 for s in ((inputs, 3), (3, outputs)))
        linear.lora = LowRank(a, b, linear, LoraConfig(("*",), rank=3, alpha=3.0, dora=gated))
    x = jax.random.normal(jax.random.key(1), (5, 16))

    def results() -> tuple[nnx.State, jax.Array, jax.Array]:
        loss = lambda mlp, x: (mlp(x) ** 2).sum()  # noqa: E731
        return mlp(x), *nnx.grad(loss, argnums=(0, 1))(mlp, x)

    expected = results()
    assert layers.hidden_padding(36) == 0
    monkeypatch.setattr(layers, "platform", lambda: "cuda")
    assert [layers.hidden_padding(width) for width in (36, 3420, 3424)] == [92, 36, 0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), results(), expected
    )
