"""Moments of two bytes and one: without bias, the same on every mesh and in every stack of layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mmjax.runtime.moments import (
    FORMATS,
    decode_rows,
    encode_rows,
    random_bits,
    round_to_bfloat16,
    row_scales,
    store_moments,
)

PATH = ("llm", "layers", "runs", "2:5", "up")
MATRICES = {PATH, *(("llm", "layers", "runs", str(i), "up") for i in range(2, 5))}


def stacked(x) -> dict:
    return {"llm": {"layers": {"runs": {"2:5": {"up": x, "norm": x[..., 0]}}}}}


def single(x) -> dict:
    return {
        "llm": {
            "layers": {
                "runs": {str(i): {"up": x[i - 2], "norm": x[i - 2, ..., 0]} for i in range(2, 5)}
            }
        }
    }


def gradients(step: int, shape=(3, 16, 24)) -> np.ndarray:
    """Rows of very different sizes, elements of different ones, some of them zero."""
    rng = np.random.default_rng(step)
    sizes = np.random.default_rng(99)
    sizes = 10.0 ** (sizes.uniform(-5, 0, (*shape[:-1], 1)) + sizes.uniform(-1.5, 0, shape))
    return (rng.normal(size=shape) * sizes * (rng.random(shape) > 0.2)).astype(np.float32)


def adam(dtype: str) -> optax.GradientTransformation:
    return store_moments(optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8), dtype, MATRICES)


def run(dtype: str, tree, steps: int = 4, shardings=None):
    """Directions of the last update and the state behind it."""
    inner = adam(dtype)
    update = jax.jit(inner.update)
    state = jax.jit(inner.init)(tree(gradients(0)))
    for step in range(steps):
        arrays = tree(gradients(step))
        directions, state = update(
            jax.device_put(arrays, shardings) if shardings else arrays, state
        )
    return jax.device_get((directions, state))


@pytest.mark.parametrize("name", ["mu", "nu"])
def test_int8_moments_begin_as_the_codes_of_zeros_which_nothing_computes(name):
    inner, parameters = adam("int8"), stacked(gradients(0))
    moment = getattr(inner.init(parameters), name)
    (codes,) = (x for x in jax.tree.leaves(moment.codes) if x.ndim == 3)
    (scales,) = jax.tree.leaves(moment.scales)
    noise = random_bits(PATH, codes.shape, jnp.uint32(0)) & 0xFFFF
    np.testing.assert_array_equal(
        codes, encode_rows(jnp.zeros(codes.shape), scales, noise, FORMATS[name])
    )
    assert not decode_rows(codes, scales, FORMATS[name]).any()
    # Of a 7B model XLA would compute them for minutes, while it compiles.
    primitives = {
        equation.primitive.name for equation in jax.make_jaxpr(inner.init)(parameters).eqns
    }
    assert primitives == {"broadcast_in_dim"}


def test_float32_is_optaxs_own_transformation():
    inner = optax.scale_by_adam()
    assert store_moments(inner, "float32", MATRICES) is inner


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("int8", 1)])
def test_matrices_take_their_bytes_and_vectors_stay_float32(dtype, size):
    _, state = run(dtype, stacked, steps=1)
    for moment in (state.mu, state.nu):
        codes = moment.codes if dtype == "int8" else moment
        layers = codes["llm"]["layers"]["runs"]["2:5"]
        assert layers["up"].dtype.itemsize == size
        assert layers["norm"].dtype == np.float32
    if dtype == "int8":
        assert state.nu.scales["llm"]["layers"]["runs"]["2:5"]["up"].shape == (3, 16, 1)


@pytest.mark.parametrize("name", ["mu", "nu"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounding_is_to_a_neighbour_and_without_bias(dtype, name):
    x = jnp.asarray(gradients(5, (8, 64)))
    x = jnp.square(x) if name == "nu" else x
    scale, form = row_scales(x), FORMATS[name]

    def stored(count):
        bits = random_bits(("a", "b"), x.shape, count) >> 16
        if dtype == "bfloat16":
            return round_to_bfloat16(x, bits).astype(jnp.float32)
        return decode_rows(encode_rows(x, scale, bits, form), scale, form)

    draws = np.asarray(jax.jit(jax.vmap(stored))(jnp.arange(4000, dtype=jnp.uint32)), np.float64)
    size, scale = np.abs(np.asarray(x, np.float64)), np.asarray(scale, np.float64)
    # 8 bits, the first of which is not stored
    gap = 2.0 ** (np.floor(np.log2(np.maximum(size, 1e-30))) - 7)
    if dtype == "int8":
        code = np.floor(form.largest * (size / scale) ** (1 / form.power) + 1e-6)
        gap = scale * ((code + 1) ** form.power - code**form.power) / form.largest**form.power
    assert np.all(np.abs(draws - x) <= 1.001 * gap)
    # The smallest code of squares is 1: no mean is divided by nothing.
    floor = scale * (form.smallest / form.largest) ** form.power * (dtype == "int8")
    assert np.all(np.abs(draws) >= 0.999 * floor)
    error = np.abs(draws.mean(0) - x)
    # 5 standard deviations; to nearest it is up to 0.5
    assert np.all((error <= 0.04 * gap) | (size <= floor))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_directions_stay_near_those_of_float32(dtype):
    exact, stored = (
        run(d, stacked, 12)[0]["llm"]["layers"]["runs"]["2:5"] for d in ("float32", dtype)
    )
    np.testing.assert_array_equal(exact["norm"], stored["norm"])
    difference = np.abs(exact["up"] - stored["up"])
    assert difference.mean() < (0.02 if dtype == "bfloat16" else 0.1) * np.abs(exact["up"]).mean()
    assert difference.max() < 2  # Adam's directions are at most about 1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_layer_in_a_stack_is_rounded_as_it_is_alone(dtype):
    together, apart = run(dtype, stacked), run(dtype, single)
    layers = lambda leaves: [x for x in leaves if x.ndim]  # noqa: E731
    for i in range(3):
        stack = jax.tree.map(lambda x, i=i: x[i] if x.ndim else x, together)
        for a, b in zip(
            layers(jax.tree.leaves(stack)),
            layers(
                x
                for p, x in jax.tree.leaves_with_path(apart)
                if f"'{i + 2}'" in jax.tree_util.keystr(p)
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", [(None, "fsdp"), (None, None, "fsdp"), (None, "fsdp", "tensor")])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_every_mesh_rounds_alike(dtype, spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    shardings = {"llm": {"layers": {"runs": {"2:5": {"up": place(*spec), "norm": place()}}}}}
    jax.tree.map(
        np.testing.assert_array_equal, run(dtype, stacked), run(dtype, stacked, shardings=shardings)
    )


def test_bits_differ_by_update_parameter_layer_and_element_and_are_even():
    draw = lambda path, count: np.asarray(random_bits(path, (3, 64, 64), jnp.uint32(count)))  # noqa: E731
    bits = draw(PATH, 1)
    other = [draw(PATH, 2), draw((*PATH[:-1], "down"), 1), draw((*PATH[:3], "3:6", "up"), 1)]
    for different in other:
        assert np.mean(bits == different) < 1e-3
    # Layers 3 and 4 have the same bits in both stacks.
    np.testing.assert_array_equal(bits[1:], other[2][:2])
    assert np.unique(bits).size > 0.99 * bits.size
    for half in (bits & 0xFFFF, bits >> 16):
        assert abs(half.mean() / 65535 - 0.5) < 0.01
        counts = np.bincount((half >> 12).ravel(), minlength=16)
        assert np.ptp(counts) < 0.2 * counts.mean()
