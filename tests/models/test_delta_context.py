"""Gated delta nets over rows that devices share compute what one device does, and exchange no more for longer rows."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed import assert_trees_close, build, pack, random_sample, token_losses
from test_gated_delta_net import hybrid

from mmjax.config import DeltaNetConfig, MeshConfig
from mmjax.kernels.masks import encoder_mask
from mmjax.models import delta_context, gated_delta_net
from mmjax.models.gated_delta_net import GatedDeltaNet
from mmjax.models.layers import Context
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh, rows_sharding
from mmjax.runtime.state import parameter_shardings

LENGTH = 64
MESHES = {
    "context=2": MeshConfig(1, context=2),
    "context=4": MeshConfig(1, context=4),
    "context=8": MeshConfig(1, context=8),
    "data=2 x context=2 x tensor=2": MeshConfig(2, context=2, tensor=2),
    "fsdp=2 x context=4": MeshConfig(1, fsdp=2, context=4),
    "fsdp=2 x context=2 x tensor=2": MeshConfig(1, fsdp=2, context=2, tensor=2),
}


def random_batch(seed: int):
    """Two rows of samples whose borders lie anywhere on the devices, one longer than a device's part of any mesh."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation([1, 2, 9, int(rng.integers(20, 40))]), rng.permutation([33, 5, 17])
    rows = [[random_sample(rng, (int(n),)) for n in row] for row in lengths]
    return pack(rows, {"llm": LENGTH}, encoders=())


def on_mesh(function, model, params, batch, layout: MeshConfig):
    count = layout.data * layout.fsdp * layout.context * layout.tensor
    mesh, rules = make_mesh(layout, jax.devices()[:count]), ShardingRules.of(layout)
    placed = (
        jax.device_put(params, parameter_shardings(model, mesh, rules)),
        jax.device_put(batch, rows_sharding(mesh)),
    )

    def program(params, batch):
        with activations_on(mesh, rules):
            return function(params, batch)

    return jax.jit(program)(*placed)


def losses_and_gradients(mesh: str, seed: int = 0):
    """Return loss and gradients on one device, and on a mesh."""
    # With this epsilon norms enlarge rounding little, as in `test_gated_delta_net`.
    config = hybrid(layers=3)
    config = replace(config, llm=replace(config.llm, norm_eps=1e-2))
    model, params = build(config)
    function = jax.value_and_grad(lambda p, batch: token_losses(model, p, batch).sum())
    batch = random_batch(seed)
    alone = jax.jit(function)(params, batch)
    return alone, on_mesh(function, model, params, batch, MESHES[mesh])


@pytest.mark.default_cases("fsdp=2 x context=2 x tensor=2")
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_every_gradient_are_those_of_one_device(mesh):
    for seed in range(2):
        alone, shared = losses_and_gradients(mesh, seed)
        np.testing.assert_allclose(shared[0], alone[0], rtol=1e-5)
        assert_trees_close(jax.device_get(shared[1]), jax.device_get(alone[1]), 1e-5)


NET = DeltaNetConfig((0,), key_heads=2, value_heads=4, key_width=16, value_width=16)


def layer_outputs(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what a layer with slow decays makes of a row on one device, and on eight."""
    layer = GatedDeltaNet(NET, 32, 1e-6, "silu", nnx.Rngs(0))
    layer.a_log[...] = jnp.full(4, -5.0)
    x = jax.random.normal(jax.random.key(1), (1, LENGTH, 32))
    layout = MeshConfig(1, context=8)
    mesh, rules = make_mesh(layout, jax.devices()), ShardingRules.of(layout)

    def outputs(x, sample):
        return layer(x, Context(encoder_mask(sample)))[0]

    def shared(x, sample):
        with activations_on(mesh, rules):
            return outputs(x, sample)

    sample = jnp.asarray(sample, jnp.int32)[None]
    return tuple(np.asarray(jax.jit(f)(x, sample)) for f in (outputs, shared))


# Samples that begin with a device's part, in it, and after padding that begins and ends elsewhere.
ROW = np.repeat([0, 1, -1, 2, 3], [8, 21, 6, 13, 16])


def test_a_samples_state_reaches_all_devices_that_have_a_part_of_it_and_no_other():
    alone, shared = layer_outputs(ROW)
    np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


@pytest.mark.parametrize("fault", ["state", "border", "convolution"])
def test_a_lost_state_a_leak_over_a_border_and_a_lost_neighbour_are_caught(fault, monkeypatch):
    compose, extend, receive = (
        getattr(delta_context, name)
        for name in ("_compose", "_extend_over_devices", "_tokens_before")
    )

    def without_state(*maps):
        own, last = compose(*maps)
        return jax.tree.map(jnp.zeros_like, own), last

    def of_one_sample(path):
        path, ends = extend(path)
        return path, ends._replace(previous=ends.first)

    def without_neighbour(arrays, reach):
        *inputs, path = receive(arrays, reach)
        return [*(0 * x for x in inputs), path]

    faults = {
        "state": ("_compose", without_state),
        "border": ("_extend_over_devices", of_one_sample),
        "convolution": ("_tokens_before", without_neighbour),
    }
    monkeypatch.setattr(delta_context, *faults[fault])
    alone, shared = layer_outputs(ROW)
    assert np.abs(shared - alone).max() > 1e-3 * np.abs(alone).max()


def exchanged(length: int, branched: bool) -> dict[str, int]:
    """Count the bytes that collectives of one layer's forward and backward pass send, by kind."""
    layer = GatedDeltaNet(NET, 32, 1e-6, "silu", nnx.Rngs(0))
    graph, params = nnx.split(layer)
    layout = MeshConfig(1, context=4)
    mesh, rules = make_mesh(layout, jax.devices()[:4]), ShardingRules.of(layout)

    def total(params, x, sample):
        with activations_on(mesh, rules):
            # One array serves: paths are read, and not made, in the layer.
            context = Context(encoder_mask(sample), path=sample if branched else None)
            out, _ = nnx.merge(graph, params)(x, context)
            return jnp.sum(out * out)

    shape = jax.ShapeDtypeStruct((1, length, 32), jnp.float32)
    sample = jax.ShapeDtypeStruct((1, length), jnp.int32)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context"))
    program = jax.jit(jax.grad(total, (0, 1)), in_shardings=(None, spec, spec))
    text = program.lower(params, shape, sample).compile().as_text()
    sent: dict[str, int] = {}
    pattern = r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("
    for shapes, kind in re.findall(pattern, text):
        for sizes in re.findall(r"\w\d+\[([\d,]*)\]", shapes):
            sent[kind] = sent.get(kind, 0) + int(np.prod([int(n) for n in sizes.split(",") if n]))
    return sent


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("branched", [False, True])
def test_what_devices_exchange_does_not_grow_with_the_row(branched):
    short, long = (exchanged(length, branched) for length in (8192, 65536))
    assert short["all-gather"] > 0
    assert short == long


def test_a_prompts_state_and_last_inputs_are_those_of_one_device():
    layer = GatedDeltaNet(NET, 32, 1e-6, "silu", nnx.Rngs(0))
    layer.a_log[...] = jnp.full(4, -5.0)
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, 32))
    sample = jnp.where(jnp.arange(LENGTH) < jnp.array([[50], [3]]), 0, -1).astype(jnp.int32)
    mesh = make_mesh(MeshConfig(1, context=8), jax.devices())

    def states(x, sample):
        return layer(x, Context(encoder_mask(sample)))[1]

    def shared(x, sample):
        with activations_on(mesh, ShardingRules()):
            return states(x, sample)

    wanted, found = (jax.jit(f)(x, sample) for f in (states, shared))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


@pytest.mark.exhaustive
def test_kernels_compute_each_devices_part(monkeypatch):
    monkeypatch.setattr(gated_delta_net, "_kernel_reason", lambda *_: None)
    layer = GatedDeltaNet(NET, 32, 1e-6, "silu", nnx.Rngs(0))
    layer.a_log[...] = jnp.full(4, -5.0)
    x = jax.random.normal(jax.random.key(1), (1, 256, 32)).astype(jnp.bfloat16)
    sample = jnp.asarray(np.repeat(ROW, 4), jnp.int32)[None]
    mesh = make_mesh(MeshConfig(1, context=2, tensor=2), jax.devices()[:4])

    def outputs(x, sample):
        return layer(x, Context(encoder_mask(sample)))[0].astype(jnp.float32)

    def shared(x, sample):
        with activations_on(mesh, ShardingRules()):
            return outputs(x, sample)

    def passes(function):
        total = lambda x: jnp.sum(jnp.sin(function(x, sample)))  # noqa: E731
        return jax.jit(lambda x: (function(x, sample), jax.grad(total)(x)))(x)

    for found, wanted in zip(passes(shared), passes(outputs), strict=True):
        found, wanted = (np.asarray(y, np.float32) for y in (found, wanted))
        assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()
