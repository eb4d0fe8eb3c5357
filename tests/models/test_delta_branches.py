"""A branch gets from a gated delta net what it gets alone behind its prompt, on one device and on several."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.batch import FIRST_BRANCH_BIT
from mmjax.config import DeltaNetConfig, MeshConfig
from mmjax.kernels.masks import encoder_mask
from mmjax.kernels.token_paths import paths_of, token_before
from mmjax.models import delta_context, gated_delta_net, short_convolution
from mmjax.models.gated_delta_net import GatedDeltaNet
from mmjax.models.layers import Context
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh

NET = DeltaNetConfig((0,), key_heads=2, value_heads=4, key_width=16, value_width=16)
WIDTH, LENGTH = 32, 512


def draw_row(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw samples with up to three branches, some behind more of their trunk, and the branch of each token."""
    rng = np.random.default_rng(seed)
    sample, branch = [], []

    def add(number: int, of: int, count: int) -> None:
        sample.extend([number] * count)
        branch.extend([of] * count)

    for number in range(9):
        add(number, 0, int(rng.integers(1, 70)))
        for of in range(1, 1 + int(rng.integers(0, 4))):
            add(number, of, int(rng.integers(1, 80)))
            add(number, 0, int(rng.integers(1, 9)) * (rng.random() < 0.3))
        add(-1, 0, 5 * (rng.random() < 0.3))
    return np.array(sample[:LENGTH]), np.array(branch[:LENGTH])


def outcome(layer: GatedDeltaNet, x, weight, context: Context):
    """Return outputs, and the gradients of their weighted sum by the parameters and `x`."""
    graph, params = nnx.split(layer)

    def total(params, x):
        out, _ = nnx.merge(graph, params)(x, context)
        return jnp.sum(out * weight), out

    gradients, out = jax.jit(jax.grad(total, (0, 1), has_aux=True))(params, x)
    return out, gradients


def layer_and_inputs(seed: int):
    layer = GatedDeltaNet(NET, WIDTH, 1e-6, "silu", nnx.Rngs(seed))
    layer.a_log[...] = jnp.full(4, -3.0)  # slow decays, so that much of a prompt is left
    rng = np.random.default_rng(seed)
    return layer, *rng.normal(size=(2, 1, LENGTH, WIDTH)).astype(np.float32)


def packed(layer, x, weight, sample, branch):
    kind = np.where(branch > 0, 1 << (FIRST_BRANCH_BIT - 1 + branch), 1)
    sample, kind = (jnp.asarray(y, jnp.int32)[None] for y in (sample, kind))
    context = Context(encoder_mask(sample), path=paths_of(sample, kind))
    return outcome(layer, x, weight * np.asarray(sample >= 0)[..., None], context)


def alone(layer, x, weight, sample, branch):
    """Compute each branch of each sample in a row of its own, behind what precedes it of the trunk."""
    wanted, total = np.zeros_like(x), None
    for number, of in sorted({*zip(sample.tolist(), branch.tolist(), strict=True)}):
        own = (sample == number) & (branch == of)
        if number < 0:
            continue
        trunk = (sample == number) & (branch == 0)
        columns = np.flatnonzero(own | (trunk & (np.arange(LENGTH) < own.argmax())))
        place = np.zeros(LENGTH, int)
        place[: len(columns)] = columns
        valid = jnp.asarray(np.where(np.arange(LENGTH) < len(columns), 0, -1), jnp.int32)[None]
        counted = own[place] & np.asarray(valid[0] >= 0)
        context = Context(encoder_mask(valid))
        out, (d_params, d_x) = outcome(
            layer, x[:, place], weight[:, place] * counted[None, :, None], context
        )
        wanted[0, place[counted]] = np.asarray(out)[0, counted]
        gradients = d_params, jnp.zeros_like(d_x).at[:, columns].add(d_x[:, : len(columns)])
        total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
    return wanted, total


def difference(found, wanted, valid) -> float:
    """Return the largest difference of outputs and of gradients over the largest value of each."""
    pairs = [(np.asarray(found[0])[0, valid], wanted[0][0, valid])]
    pairs += zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(4))
def test_outputs_and_gradients_are_those_of_each_branch_alone(seed):
    arrays = *layer_and_inputs(seed), *draw_row(seed)
    assert difference(packed(*arrays), alone(*arrays), arrays[3] >= 0) < 1e-5


@pytest.mark.default_cases("4")
@pytest.mark.parametrize("context", [2, 4, 8])
def test_devices_that_share_a_row_compute_what_one_does(context):
    for seed in range(3):
        arrays = *layer_and_inputs(seed), *draw_row(seed)
        mesh = make_mesh(MeshConfig(1, context=context), jax.devices()[:context])
        with activations_on(mesh, ShardingRules()):
            shared = packed(*arrays)
        out, gradients = packed(*arrays)
        wanted = np.asarray(out), gradients
        assert difference(shared, wanted, arrays[3] >= 0) < 1e-5


@pytest.mark.parametrize("fault", ["state", "convolution", "sibling"])
def test_a_lost_state_and_a_leak_through_a_branch_are_caught(fault, monkeypatch):
    arrays = *layer_and_inputs(1), *draw_row(1)
    if fault == "convolution":  # the first tokens of a branch read no token of the trunk
        monkeypatch.setattr(
            short_convolution,
            "token_before",
            lambda path: jnp.where(path == jnp.roll(path, 1, 1), token_before(path), -1),
        )
    else:
        # Without its trunk every branch begins with nothing; as one sample it goes on from the one before.
        changed = {"state": lambda path: path * 0 - 3, "sibling": lambda path: path}[fault]
        monkeypatch.setattr(gated_delta_net, "trunk_of", changed)
    assert faulty(arrays, monkeypatch) > 1e-3


def faulty(arrays, monkeypatch) -> float:
    """Return how far off a row with the fault is that was planted, which this takes out again."""
    jax.clear_caches()
    found = packed(*arrays)
    monkeypatch.undo()
    jax.clear_caches()
    out, gradients = packed(*arrays)
    return difference(found, (np.asarray(out), gradients), arrays[3] >= 0)


def test_a_lost_trunk_between_devices_is_caught(monkeypatch):
    arrays = *layer_and_inputs(1), *draw_row(1)
    compose = delta_context._compose

    def without_trunk(*maps):
        (own, trunk), last = compose(*maps)
        return (own, 0 * trunk), last

    monkeypatch.setattr(delta_context, "_compose", without_trunk)
    mesh = make_mesh(MeshConfig(1, context=8), jax.devices())
    with activations_on(mesh, ShardingRules()):
        assert faulty(arrays, monkeypatch) > 1e-3
