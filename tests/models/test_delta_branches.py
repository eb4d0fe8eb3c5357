"""A branch gets from a gated delta net what it gets alone behind its prompt, on one device and on several."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

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


@partial(jax.jit, static_argnames=("graph", "devices"))
def outcome(graph, params, x, weight, context: Context, devices: int = 1):
    """Return outputs, and the gradients of their weighted sum by the parameters and `x`; devices: that share rows."""
    mesh = make_mesh(MeshConfig(1, context=devices), jax.devices()[:devices])

    def total(params, x):
        with activations_on(mesh, ShardingRules()):
            out, _ = nnx.merge(graph, params)(x, context)
        return jnp.sum(out * weight), out

    gradients, out = jax.grad(total, (0, 1), has_aux=True)(params, x)
    return out, gradients


class Row(NamedTuple):
    """A layer, what it reads, and weights of its outputs."""

    graph: nnx.GraphDef
    params: nnx.State
    x: np.ndarray
    weight: np.ndarray
    sample: np.ndarray
    branch: np.ndarray


def random_row(seed: int) -> Row:
    layer = GatedDeltaNet(NET, WIDTH, 1e-6, "silu", nnx.Rngs(seed))
    layer.a_log[...] = jnp.full(4, -3.0)  # slow decays, so that much of a prompt is left
    x, weight = np.random.default_rng(seed).normal(size=(2, 1, LENGTH, WIDTH)).astype(np.float32)
    sample, branch = draw_row(seed)
    return Row(*nnx.split(layer), x, weight * (sample >= 0)[:, None], sample, branch)


def packed(row: Row, devices: int = 1):
    kind = np.where(row.branch > 0, 1 << (FIRST_BRANCH_BIT - 1 + row.branch), 1)
    sample, kind = (jnp.asarray(y, jnp.int32)[None] for y in (row.sample, kind))
    context = Context(encoder_mask(sample), path=paths_of(sample, kind))
    out, gradients = outcome(row.graph, row.params, row.x, row.weight, context, devices)
    return np.asarray(out), gradients


def alone(row: Row):
    """Compute each branch of each sample in a row of its own, behind what precedes it of the trunk."""
    outputs, total = np.zeros_like(row.x), None
    for number, branch in sorted({*zip(row.sample.tolist(), row.branch.tolist(), strict=True)}):
        if number < 0:
            continue
        counted = (row.sample == number) & (row.branch == branch)
        trunk = (row.sample == number) & (row.branch == 0)
        columns = np.flatnonzero(counted | (trunk & (np.arange(LENGTH) < counted.argmax())))
        place = np.resize(columns, LENGTH)  # what is behind them is padding
        valid = np.arange(LENGTH) < len(columns)
        counted = counted[place] & valid
        context = Context(encoder_mask(jnp.asarray(np.where(valid, 0, -1), jnp.int32)[None]))
        weight = row.weight[:, place] * counted[:, None]
        out, (d_params, d_x) = outcome(row.graph, row.params, row.x[:, place], weight, context)
        outputs[0, place[counted]] = np.asarray(out)[0, counted]
        d_row = jnp.zeros_like(d_x).at[:, columns].add(d_x[:, : len(columns)])
        gradients = d_params, d_row
        total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
    return outputs, total


def difference(row: Row, found, expected) -> float:
    """Return the largest difference of outputs and of gradients over the largest value of each."""
    valid = row.sample >= 0
    pairs = [(found[0][0, valid], expected[0][0, valid])]
    pairs += zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("seed", range(4))
def test_outputs_and_gradients_are_those_of_each_branch_alone(seed):
    row = random_row(seed)
    assert difference(row, packed(row), alone(row)) < 1e-5


@pytest.mark.default_cases("4")
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_that_share_a_row_compute_what_one_does(devices):
    for seed in range(3):
        row = random_row(seed)
        assert difference(row, packed(row, devices), packed(row)) < 1e-5


def error_of_fault(monkeypatch, devices: int = 1) -> float:
    """Return how far off a row with the planted fault is, and take the fault out."""
    row = random_row(1)
    jax.clear_caches()
    found = packed(row, devices)
    monkeypatch.undo()
    jax.clear_caches()
    return difference(row, found, packed(row, devices))


@pytest.mark.default_cases("sibling")
@pytest.mark.parametrize("fault", ["state", "convolution", "sibling"])
def test_a_lost_state_and_a_leak_through_a_branch_are_caught(fault, monkeypatch):
    if fault == "convolution":  # the first tokens of a branch read no token of the trunk
        monkeypatch.setattr(
            short_convolution,
            "token_before",
            lambda path: jnp.where(path == jnp.roll(path, 1, 1), token_before(path), -1),
        )
    else:
        # Without its trunk a branch begins with nothing; as its own trunk it goes on from a sibling.
        changed = {"state": lambda path: path * 0 - 3, "sibling": lambda path: path}[fault]
        monkeypatch.setattr(gated_delta_net, "trunk_of", changed)
    assert error_of_fault(monkeypatch) > 1e-3


@pytest.mark.exhaustive
def test_a_trunk_lost_between_devices_is_caught(monkeypatch):
    compose = delta_context._compose

    def without_trunk(*maps):
        (state, trunk), last = compose(*maps)
        return (state, 0 * trunk), last

    monkeypatch.setattr(delta_context, "_compose", without_trunk)
    assert error_of_fault(monkeypatch, devices=4) > 1e-3
