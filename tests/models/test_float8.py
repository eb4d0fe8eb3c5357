"""Products in FP8 are those of rounded operands, and what does not share a product's largest values rounds alike."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tiny_run import (
    gradients,
    load_steps,
    make_executor,
    scattered,
    state_with,
    tiny_config,
    worst_leaf,
)

from mmjax.config import DeltaNetConfig, ExpertsConfig, MeshConfig
from mmjax.data.plan.placement import Topology
from mmjax.models.float8 import float8_products, scale_of
from mmjax.models.linear import Linear
from mmjax.models.model import Model
from mmjax.models.quantization import dequantize, quantize
from mmjax.parallel.sharding import make_mesh

TYPES = {"x": (ml_dtypes.float8_e4m3fn, 448.0), "gradient": (ml_dtypes.float8_e5m2, 57_344.0)}


def rounded(x, kind="x"):
    """Values in float64 that a float8 type holds, times the least power of two with which none overflows."""
    dtype, largest = TYPES[kind]
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / largest))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def operands(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (2, 24, 32), (32, 48), (32, 16), (2, 24, 48), (2, 24, 16)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def test_products_and_their_gradients_are_those_of_operands_rounded_by_their_largest_values():
    x, w, v, d_y, d_z = operands()
    outputs, backward = jax.vjp(float8_products, x, w, v)
    d_x, d_w, d_v = backward((d_y, d_z))
    for got, weight in zip(outputs, (w, v), strict=True):
        np.testing.assert_allclose(got, rounded(x) @ rounded(weight), rtol=1e-5, atol=1e-5)
    g, h = rounded(d_y, "gradient"), rounded(d_z, "gradient")
    np.testing.assert_allclose(d_x, g @ rounded(w).T + h @ rounded(v).T, rtol=1e-5, atol=1e-5)
    flat = rounded(x).reshape(-1, 32)
    np.testing.assert_allclose(d_w, flat.T @ g.reshape(-1, 48), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(d_v, flat.T @ h.reshape(-1, 16), rtol=1e-5, atol=1e-4)
    error = np.linalg.norm(outputs[0] - x @ w) / np.linalg.norm(x @ w)
    assert 0.01 < error < 0.06


@pytest.mark.parametrize("largest", [448.0, 449.0, 1e-30, 1.0, 3e38, 0.0])
def test_a_scale_is_the_least_power_of_two_with_which_the_largest_value_fits(largest):
    scale = float(scale_of(jnp.asarray([0.0, -largest], jnp.float32), jnp.float8_e4m3fn))
    assert np.log2(scale) == round(np.log2(scale))
    assert largest <= 448 * scale
    assert largest > 448 * scale / 2 or scale == 2.0**-63


def test_a_larger_value_elsewhere_in_a_row_changes_no_other_products():
    x, w, *_ = operands()
    (before,), (after,) = float8_products(x, w), float8_products(x.at[0, 3].multiply(16), w)
    # Values that are 2^-15 of the largest, or less, lose their low bits.
    others = np.delete(np.asarray(before[0]), 3, 0), np.delete(np.asarray(after[0]), 3, 0)
    np.testing.assert_allclose(*others, atol=1e-3)
    assert np.mean(others[0] == others[1]) > 0.9


def test_parts_of_the_rows_with_weights_of_their_own_share_one_scale():
    x, w, _, d_y, _ = operands()
    (whole,), backward = jax.vjp(float8_products, x, w)
    (parts,), backward_of_parts = jax.vjp(float8_products, x, jnp.stack([w, w]))
    np.testing.assert_array_equal(parts, whole)
    (d_x, d_w), (d_x_of_parts, d_parts) = backward((d_y,)), backward_of_parts((d_y,))
    np.testing.assert_array_equal(d_x_of_parts, d_x)
    np.testing.assert_allclose(d_parts.sum(0), d_w, rtol=1e-5, atol=1e-5)


def test_nothing_is_kept_for_the_gradient_of_frozen_weights():
    x, w, *_ = operands()
    program = str(jax.make_jaxpr(jax.grad(lambda x: float8_products(x, w)[0].sum()))(x))
    assert program.count("dot_general") == 2  # forward, and the gradient of x


def linears(model: Model, name: str) -> dict[str, bool]:
    """Whether each linear layer below stored layers of the LLM multiplies in FP8, by its path."""
    layers = model.module({}).llm.layers.runs[name]
    return {
        ".".join(map(str, path)): x.float8
        for path, x in nnx.iter_modules(layers)
        if isinstance(x, Linear)
    }


def test_linear_layers_of_all_layers_but_the_first_and_the_last_multiply_in_float8():
    llm = replace(
        tiny_config().model.llm,
        layers=4,
        fp8="linears",
        delta_net=DeltaNetConfig(
            layers=(0, 1), key_heads=2, value_heads=2, key_width=8, value_width=8
        ),
        experts=ExpertsConfig(layers=(2,), count=4, per_token=2, width=16, shared_width=16),
    )
    model = Model.build(replace(tiny_config().model, llm=llm, encoders={}), jnp.float32)
    assert not any((linears(model, "0") | linears(model, "3")).values())
    delta, sparse = linears(model, "1"), linears(model, "2")
    assert {name for name, float8 in delta.items() if not float8} == {
        "delta_net.beta",
        "delta_net.decay",
    }
    assert {name for name, float8 in sparse.items() if not float8} == {"experts.shared_gate"}
    assert sparse["attention.query"]
    assert sparse["experts.shared.up"]


def test_operands_that_are_cut_over_devices_round_by_the_largest_value_of_all():
    x, w, _, d_y, _ = operands()
    mesh = make_mesh(MeshConfig(2, fsdp=2), jax.devices()[:4])
    outputs, backward = jax.vjp(float8_products, x, w)
    cut = [
        jax.device_put(a, NamedSharding(mesh, PartitionSpec(axis)))
        for a, axis in ((x, "data"), (w, "fsdp"))
    ]
    outputs_of_cut, backward_of_cut = jax.vjp(jax.jit(float8_products), *cut)
    pairs = zip(
        (*outputs_of_cut, *backward_of_cut((d_y,))), (*outputs, *backward((d_y,))), strict=True
    )
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
def test_ranks_round_by_the_largest_values_of_all(tmp_path):
    base = tiny_config()
    config = replace(
        base, model=replace(base.model, llm=replace(base.model.llm, layers=3, fp8="linears"))
    )
    one, many = make_executor(config, MeshConfig(1)), make_executor(config, MeshConfig(2, fsdp=2))
    parameters = scattered(one)
    (batches,), (divided,) = (load_steps(config, tmp_path, 1, Topology(n, n, n)) for n in (1, 4))
    expected = gradients(one, state_with(one, parameters), batches)
    found = gradients(many, state_with(many, parameters), divided)
    worst, name = worst_leaf(found.gradients, expected.gradients)
    assert worst < 1e-3, name  # a sum in another order rounds now and then to the other neighbour
    assert found.losses.loss == pytest.approx(expected.losses.loss, rel=1e-5)


def test_weights_stored_in_fp8_are_multiplied_as_products_in_fp8_round_them():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(40, 64)), jnp.bfloat16)
    for scale in (
        1.0,
        3e-3,
        447.9 / 448,
        450.0,
    ):  # 450: its largest is rounded down to a scale less
        weight = jnp.asarray(rng.normal(size=(64, 48)), jnp.float32)
        weight *= scale / jnp.abs(weight).max()
        stored = dequantize(quantize(weight, "fp8"), x.dtype)
        for found, wanted in zip(passes(x, stored), passes(x, weight), strict=True):
            np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def passes(x, weight):
    """Return the product of activations and a frozen weight, and the gradient of the activations."""
    (out,), backward = jax.vjp(lambda x: float8_products(x, weight), x)
    return np.asarray(out), np.asarray(backward((out,))[0])
