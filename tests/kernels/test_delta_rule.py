"""The kernels of the gated delta rule compute what a loop over tokens computes, but for operands of 2 bytes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.config import DeltaNetConfig, MeshConfig
from mmjax.kernels import delta_chunk, delta_rule
from mmjax.kernels.delta_chunk import Paths
from mmjax.models import gated_delta_net
from mmjax.models.gated_delta_net import describe_delta_rule, gated_delta_rule
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh

LENGTH = 150
# Of the largest value, where operands and results have 8 bits: the largest error, and the root of the
# mean square, of decays and betas and of all else.
LARGEST_ERROR = 0.02
MEAN_ERRORS = {"d_g": 0.003, "d_beta": 0.003}
MEAN_ERROR = 0.0012


@pytest.fixture
def kernels(monkeypatch):
    """Let the kernels run as JAX operations."""
    monkeypatch.setattr(gated_delta_net, "_kernel_reason", lambda *_: None)


# Behind the end of a trunk, that is given: branch 2 of sample 0, its trunk again, and two branches of
# that; then samples with none, with a long one and with short ones.
PATHS = [2, 0, 3, 4, 32, 65, 66, 64, 67, 96, 97, 98]


def draw(
    seed: int, rows: int = 1, heads=(1, 2), widths=(32, 64), branched: bool = False
) -> list[Any]:
    """Draw q, k, v, g, beta, paths and the first states: keys that repeat, and decays as large as -300."""
    rng = np.random.default_rng(seed)
    (key_heads, value_heads), (key_width, value_width) = heads, widths
    q, k = rng.normal(size=(2, rows, LENGTH, key_heads, key_width))
    v = rng.normal(size=(rows, LENGTH, value_heads, value_width))
    g = -np.exp(rng.normal(-2, 2, (rows, LENGTH, value_heads)))
    beta = 1 / (1 + np.exp(-rng.normal(0, 2, (rows, LENGTH, value_heads))))
    k[:, 20:60] = k[:, 20:21]
    beta[:, 20:50] = 1
    g[:, 25:45] = 0
    g[:, [10, 30, 90, 91]] = -300
    parts = np.array(PATHS if branched else range(5))
    cuts = np.sort(rng.choice(np.arange(1, LENGTH), len(parts) - 1, replace=False))
    path = parts[np.searchsorted(cuts, np.arange(LENGTH), side="right")]
    path = np.tile(path, (rows, 1)).astype(np.int32)
    states = 0.2 * rng.normal(size=(1 + branched, rows, value_heads, key_width, value_width))
    return [
        *(x.astype(np.float32) for x in (q, k, v, g, beta)),
        path,
        tuple(states.astype(np.float32)),
    ]


def exact(q, k, v, g, beta, path, states):
    """Compute the rule one token after the other."""
    normalized = lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    group = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(normalized(x), group, axis=2) for x in (q, k))
    before = jnp.concatenate([path[:, :1], path[:, :-1]], 1)
    where = lambda condition, x, y: jnp.where(condition[:, None, None, None], x, y)  # noqa: E731

    def step(states, token):
        q, k, v, g, beta, path, before = token
        trunk = where(path // 32 == before // 32, states[-1], 0)
        is_branch = path % 32 > 0 if len(states) > 1 else path != path
        state = where(path == before, states[0], where(is_branch, trunk, 0))
        if len(states) > 1:  # the trunk goes on behind its branches
            state = where((path != before) & ~is_branch, trunk, state)
        state *= jnp.exp(g)[..., None, None]
        change = beta[..., None] * (v - jnp.einsum("bmk,bmkv->bmv", k, state))
        state += k[..., None] * change[..., None, :]
        after = (state, where(is_branch, trunk, state))[: len(states)]
        return after, jnp.einsum("bmk,bmkv->bmv", q, state)

    tokens = q * q.shape[-1] ** -0.5, k, v, g, beta, path, before
    states, out = jax.lax.scan(step, states, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(out, 0, 1), states


def with_gradients(rule, arrays, dtype):
    """Compute outputs, the last states, and gradients of all but the paths."""
    *inputs, path, states = arrays
    rng = np.random.default_rng(1)
    weights = (
        rng.normal(size=inputs[2].shape),
        0.1 * rng.normal(size=(len(states), *states[0].shape)),
    )

    def total(*inputs):
        q, k, v, g, beta, states = inputs
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        branched = {"branched": True} if len(states) > 1 and rule is not exact else {}
        out, last = rule(q, k, v, g, beta, jnp.asarray(path), states, **branched)
        return jnp.sum(out * weights[0]) + jnp.sum(jnp.stack(last) * weights[1]), (out, last)

    inputs = jax.tree.map(jnp.asarray, (*inputs, states))
    gradients, results = jax.jit(jax.grad(total, range(6), has_aux=True))(*inputs)
    stacked = (np.stack(x) if isinstance(x, tuple) else x for x in (*results, *gradients))
    return [np.asarray(x, np.float64) for x in stacked]


def errors(arrays) -> dict[str, tuple[float, float]]:
    """Return the largest and the mean error over the largest value, of every result and gradient."""
    # The inputs that the kernels read: of 8 bits.
    arrays = [
        *(np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) for x in arrays[:3]),
        *arrays[3:],
    ]
    found = with_gradients(gated_delta_rule, arrays, jnp.bfloat16)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x if x.dtype == np.int32 else x.astype(np.float64), arrays)
        wanted = with_gradients(exact, wide, jnp.float64)
    names = ("out", "states", "d_q", "d_k", "d_v", "d_g", "d_beta", "d_states")
    return {
        name: (np.abs(x - y).max() / np.abs(y).max(), np.sqrt(np.mean((x - y) ** 2)) / np.abs(y).max())
        for name, x, y in zip(names, found, wanted, strict=True)
    }  # fmt: skip


@pytest.mark.default_cases("branches-0")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("branched", [False, True], ids=["samples", "branches"])
def test_outputs_states_and_gradients_are_those_of_a_loop_over_tokens(kernels, branched, seed):
    wide = {"rows": 2, "heads": (1, 3), "widths": (128, 128)} if seed % 2 else {}
    found = errors(draw(seed, **wide, branched=branched))
    for name, (largest, mean) in found.items():
        assert largest <= LARGEST_ERROR, (name, found)
        assert mean <= MEAN_ERRORS.get(name, MEAN_ERROR), (name, found)


def without_trunk(g, paths, branched):
    decays = delta_chunk.decays_of(g, paths, branched)
    return decays._replace(reads=(decays.reads[0], 0 * decays.reads[1]))


FAULTS = {
    "samples": ("_paths", lambda path, extra: Paths(jnp.pad(0 * path, ((0, 0), (0, extra))), jnp.zeros((1, 3), int))),
    "decay": ("carried", lambda factors, states: states[0]),
    "inverse": ("inverse_of", lambda system: jnp.eye(64) - system),
    "trunk": ("decays_of", without_trunk),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_leak_over_a_border_a_lost_decay_a_wrong_inverse_and_a_lost_trunk_are_caught(
    kernels, monkeypatch, fault
):
    monkeypatch.setattr(delta_rule, *FAULTS[fault])
    found = errors(draw(0, branched=fault == "trunk"))
    assert found["out"][0] > 4 * LARGEST_ERROR


@pytest.mark.parametrize("cosine", [0.0, 0.9, 1.0])
def test_the_inverse_is_exact_to_16_bits_for_keys_that_repeat(cosine):
    rng = np.random.default_rng(0)
    k = rng.normal(size=(delta_chunk.CHUNK, 128)) / 128**0.5
    k = np.sqrt(1 - cosine) * k + np.sqrt(cosine) * rng.normal(size=128) / 128**0.5
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    system = np.tril(k @ k.T, -1)
    wanted = np.linalg.inv(np.eye(len(k)) + system)
    inverse = jax.jit(delta_chunk.inverse_of)(jnp.asarray(system, jnp.float32))
    np.testing.assert_allclose(inverse, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())


def test_another_samples_content_changes_not_one_bit(kernels):
    *inputs, _, (state,) = draw(2)
    states = (jnp.asarray(state),)
    sample = np.repeat([[0, 1, 2]], [70, 50, 30], axis=1).astype(np.int32)
    among = (sample == 1)[..., None]

    def outputs_and_gradients(q, k, v, g, beta):
        def total(q, k, v, g, beta):
            out, _ = gated_delta_rule(q, k, v, g, beta, jnp.asarray(sample), states)
            return jnp.sum(jnp.where(among[..., None], 0, out).astype(jnp.float32)), out

        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
        program = jax.jit(jax.grad(total, range(5), has_aux=True))
        gradients, out = program(q, k, v, jnp.asarray(g), jnp.asarray(beta))
        return [np.asarray(x.astype(jnp.float32)) for x in (*gradients, out)]

    q, k, v, g, beta = inputs
    others = [np.where(among[..., None], 50 * x, x) for x in (q, k, v)]
    others += [np.where(among, -300, g), np.where(among, 1 - beta, beta)]
    for first, second in zip(
        outputs_and_gradients(*inputs), outputs_and_gradients(*others), strict=True
    ):
        np.testing.assert_array_equal(first[sample != 1], second[sample != 1])


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}])
def test_devices_compute_their_own_rows_and_heads(kernels, sizes):
    inputs = draw(0, rows=2, heads=(2, 4), widths=(16, 16), branched=True)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
    arrays = q, k, v, *jax.tree.map(jnp.asarray, inputs[3:])

    def total(*arrays):
        out, states = gated_delta_rule(*arrays, branched=True)
        return jnp.sum(jnp.cos(out.astype(jnp.float32))) + sum(map(jnp.sum, states)), (out, states)

    program = partial(jax.grad, total, (0, 1, 2, 3, 4, 6), has_aux=True)
    alone = jax.jit(program())(*arrays)
    layout = MeshConfig(**sizes)
    mesh = make_mesh(layout, jax.devices()[: math.prod(sizes.values())])
    with activations_on(mesh, ShardingRules.of(layout)):
        shared = jax.jit(program())(*arrays)
    for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(shared), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_a_run_says_what_computes_the_rule_and_why_not_the_kernels(monkeypatch):
    net = DeltaNetConfig((0,), key_heads=2, value_heads=4, key_width=128, value_width=128)
    assert describe_delta_rule(4096, net, jnp.dtype(jnp.bfloat16)) == "XLA (platform cpu)"
    monkeypatch.setattr(gated_delta_net, "platform", lambda: "cuda")
    assert describe_delta_rule(4096, net, jnp.dtype(jnp.bfloat16)) == "Triton"
    assert describe_delta_rule(4096, net, jnp.dtype(jnp.float32)) == "XLA (numbers in float32)"
    assert describe_delta_rule(1, net, jnp.dtype(jnp.bfloat16)) == "XLA (rows of 1 tokens)"
    odd = DeltaNetConfig((0,), key_heads=2, value_heads=4, key_width=96, value_width=128)
    assert (
        describe_delta_rule(4096, odd, jnp.dtype(jnp.bfloat16))
        == "XLA (heads of 96 and 128 channels)"
    )
