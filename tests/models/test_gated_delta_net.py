"""Gated delta nets over packed rows: in every sample what transformers' layer computes of the sample alone."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from packed import assert_trees_close, build, pack, random_sample, tiny, token_losses
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from mmjax.config import DeltaNetConfig, LoraConfig, MeshConfig
from mmjax.config.compatibility import Features, check_conflicts
from mmjax.config.ranges import check_section
from mmjax.config.validation import check_layout
from mmjax.cost.table import parameters
from mmjax.data.loading.text_rows import BatchLayout, empty_text, row_view, write_sample
from mmjax.data.sample import Sample, Text
from mmjax.errors import UserError
from mmjax.kernels.masks import encoder_mask
from mmjax.models import gated_delta_net
from mmjax.models.gated_delta_net import GatedDeltaNet, gated_delta_rule
from mmjax.models.kv_cache import KVCacheView
from mmjax.models.layer_stacks import plan_stacks, unstack_layers
from mmjax.models.layers import Context
from mmjax.models.model import Model
from mmjax.models.stack_scan import LayerStack
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh, rows_sharding
from mmjax.runtime.state import parameter_shardings

WIDTH, EPS = 32, 1e-6


def layer_pair(
    config: DeltaNetConfig, rng: np.random.Generator
) -> tuple[GatedDeltaNet, Qwen3_5GatedDeltaNet]:
    """Make one layer here and there, its decays and gates wider than they are at first."""
    there = Qwen3_5GatedDeltaNet(
        Qwen3_5TextConfig(
            hidden_size=WIDTH, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=EPS,
            linear_num_key_heads=config.key_heads, linear_num_value_heads=config.value_heads,
            linear_key_head_dim=config.key_width, linear_value_head_dim=config.value_width,
            linear_conv_kernel_dim=config.taps,
        ),
        0,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in there.named_parameters():
            drawn = rng.normal(size=parameter.shape)
            if name == "A_log":
                drawn = np.log(rng.uniform(0.01, 16, parameter.shape))
            elif name == "norm.weight":
                drawn = 1 + 0.2 * drawn
            elif parameter.ndim > 1:
                drawn *= 1.5 * parameter[0].numel() ** -0.5
            parameter.copy_(torch.tensor(drawn))
    here = GatedDeltaNet(config, WIDTH, EPS, "silu", nnx.Rngs(0))
    nnx.update(
        here,
        nnx.State(as_ours(config, {n: p.detach().numpy() for n, p in there.named_parameters()})),
    )
    return here, there


def as_ours(config: DeltaNetConfig, tensors: dict[str, np.ndarray]) -> dict:
    """Give parameters, or their gradients, of the layer there the names and shapes of ours."""
    keys = config.key_heads * config.key_width
    query, key, value = np.split(tensors["in_proj_qkv.weight"].T, [keys, 2 * keys], axis=1)
    filters = np.split(tensors["conv1d.weight"][:, 0].T, [keys, 2 * keys], axis=1)
    linears = {
        name: tensors[f"in_proj_{x}.weight"].T
        for name, x in (("gate", "z"), ("beta", "b"), ("decay", "a"))
    }
    linears |= {"query": query, "key": key, "value": value, "output": tensors["out_proj.weight"].T}
    linears |= {
        f"{name}_filter": x for name, x in zip(("query", "key", "value"), filters, strict=True)
    }
    ours = {name: {"weight": jnp.asarray(x)} for name, x in linears.items()}
    return ours | {
        "a_log": jnp.asarray(tensors["A_log"]),
        "dt_bias": jnp.asarray(tensors["dt_bias"]),
        "norm": {"scale": jnp.asarray(tensors["norm.weight"])},
    }


def packed_row(rng: np.random.Generator) -> np.ndarray:
    """Draw a row of samples, with borders anywhere in its chunks, and padding before, between and behind them."""
    parts = [*rng.permutation([1, 2, 63, 64, 65, int(rng.integers(3, 150))])]
    ids = []
    for number, length in enumerate(parts):
        ids += [-1] * int(rng.integers(0, 3)) + [number] * int(length)
    return np.array([ids + [-1] * int(rng.integers(0, 90))], np.int32)


def compare(config: DeltaNetConfig, seed: int) -> None:
    """Hold outputs of packed samples equal to 2e-5 of the largest, and all gradients to 1e-4."""
    rng = np.random.default_rng(seed)
    here, there = layer_pair(config, rng)
    sample = packed_row(rng)
    x, weight = (rng.normal(size=(*sample.shape, WIDTH)).astype(np.float32) for _ in range(2))
    graph, params = nnx.split(here)

    def loss(params, x):
        out, _ = nnx.merge(graph, params)(x, Context(encoder_mask(jnp.asarray(sample))))
        return jnp.sum(jnp.where((sample >= 0)[..., None], out * weight, 0)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    wanted, d_x = np.zeros_like(x), np.zeros_like(x)
    for number in range(sample.max() + 1):
        given = torch.tensor(x[sample == number][None], requires_grad=True)
        alone = there(given)
        (alone * torch.tensor(weight[sample == number][None])).sum().backward()
        wanted[sample == number], d_x[sample == number] = alone.detach()[0], given.grad[0]
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    assert not np.asarray(out)[sample < 0].any()
    assert not np.asarray(gradients[1])[sample < 0].any()
    assert_trees_close(gradients[1], d_x, 1e-4)
    theirs = as_ours(config, {name: p.grad.numpy() for name, p in there.named_parameters()})
    assert_trees_close(nnx.to_pure_dict(gradients[0]), theirs, 1e-4)


SMALL = DeltaNetConfig((0,), key_heads=2, value_heads=4, key_width=16, value_width=24)


@pytest.mark.default_cases("1")
@pytest.mark.parametrize("seed", range(8))
def test_a_packed_sample_gives_what_it_gives_alone_in_transformers(seed):
    wide = DeltaNetConfig((0,), key_heads=1, value_heads=3, key_width=64, value_width=32, taps=3)
    compare(wide if seed % 2 else SMALL, seed)


@pytest.mark.parametrize("function", ["gated_delta_rule", "causal_convolution"])
def test_a_state_or_a_convolution_that_reaches_into_the_next_sample_is_caught(
    function, monkeypatch
):
    whole = getattr(gated_delta_net, function)
    at = 5 if function == "gated_delta_rule" else 2  # the place of `path` among the arguments

    def leaking(*args, **options):
        return whole(*args[:at], jnp.zeros_like(args[at]), *args[at + 1 :], **options)

    monkeypatch.setattr(gated_delta_net, function, leaking)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(SMALL, 0)


def token_loop(q, k, v, g, beta, sample):
    """Compute the delta rule one token after the other in float64."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    normalized = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    group = v.shape[2] // k.shape[2]
    q, k = (np.repeat(normalized(x), group, axis=2) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    out = np.zeros_like(v)
    for row in range(len(v)):
        state = np.zeros((*k.shape[2:], v.shape[-1]))
        for t in range(v.shape[1]):
            state = state * (
                np.exp(g[row, t])[:, None, None] * (t == 0 or sample[row, t] == sample[row, t - 1])
            )
            change = beta[row, t][:, None] * (v[row, t] - np.einsum("hk,hkv->hv", k[row, t], state))
            state = state + k[row, t][..., None] * change[:, None]
            out[row, t] = np.einsum("hk,hkv->hv", q[row, t], state)
    return out, state


@pytest.mark.parametrize("keys", ["random", "repeated"])
def test_chunks_give_what_a_loop_over_tokens_gives_in_float64(keys):
    rng = np.random.default_rng(0)
    length = 200
    q, k = rng.normal(size=(2, 1, length, 2, 16))
    v = rng.normal(size=(1, length, 4, 8))
    g = -np.exp(rng.normal(0, 2, (1, length, 4)))
    # as large as decays may be: differences of sums over a chunk would lose the small ones
    g[:, ::20] = -300
    beta = 1 / (1 + np.exp(-rng.normal(0, 2, (1, length, 4))))
    sample = np.searchsorted([1, 64, 65, 127, 140], np.arange(length), side="right")[None].astype(
        np.int32
    )
    if keys == "repeated":
        k[:] = k[:, :1]
        g, beta = 0 * g - 1e-3, 0 * beta + 0.99
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)]
    out, (state,) = jax.jit(gated_delta_rule)(*arrays, jnp.asarray(sample))
    wanted, last = token_loop(*arrays, sample)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(state[0], last, rtol=0, atol=1e-5 * np.abs(last).max())


def test_another_samples_content_changes_not_one_bit():
    rng = np.random.default_rng(1)
    here, _ = layer_pair(SMALL, rng)
    sample = np.repeat([0, 1, 2], [70, 50, 30])[None].astype(np.int32)
    x = rng.normal(size=(1, 150, WIDTH)).astype(np.float32)
    context = Context(encoder_mask(jnp.asarray(sample)))
    apply = jax.jit(lambda x: here(x, context)[0])
    louder = np.where((sample == 1)[..., None], 50 * x, x)
    first, second = (np.asarray(apply(x))[sample != 1] for x in (x, louder))
    np.testing.assert_array_equal(first, second)


def test_tokens_one_by_one_behind_a_padded_prompt_give_what_the_whole_gives():
    rng = np.random.default_rng(2)
    here, _ = layer_pair(SMALL, rng)
    x = rng.normal(size=(2, 80, WIDTH)).astype(np.float32)
    lengths = np.array([71, 2])
    whole, _ = jax.jit(lambda x: here(x, Context(encoder_mask(jnp.zeros((2, 80), jnp.int32)))))(x)
    sample = np.where(np.arange(75) < lengths[:, None], 0, -1).astype(np.int32)
    _, state = jax.jit(lambda x: here(x, Context(encoder_mask(jnp.asarray(sample)))))(x[:, :75])
    context = Context(encoder_mask(jnp.zeros((2, 1), jnp.int32)))
    step = jax.jit(
        lambda x, state: here(x, context, KVCacheView(state, context.mask, jnp.int32(0)))
    )
    for t in range(4):
        out, state = step(x[np.arange(2), lengths + t][:, None], state)
        wanted = np.asarray(whole)[np.arange(2), lengths + t]
        np.testing.assert_allclose(out[:, 0], wanted, rtol=0, atol=1e-5 * np.abs(whole).max())


# ------------------------------------------------------------------------------------------------
# in a decoder


def test_layers_of_several_kinds_are_one_scan_over_their_periods():
    kinds = [False, False, True] * 3
    assert plan_stacks(9, "none", (), kinds) == (LayerStack(0, 9, "none", 3),)
    assert list(LayerStack(0, 9, "none", 3).parts) == ["0:9:3", "1:9:3", "2:9:3"]
    # A cut inside a period, and what is left of one at the end.
    stacks = plan_stacks(9, "none", (2,), kinds)
    assert [(s.start, s.stop, s.period) for s in stacks] == [(0, 2, 1), (2, 8, 3), (8, 9, 1)]
    assert [
        layer for s in stacks for part in s.parts.values() for layer in part if s.period == 1
    ] == [0, 1, 8]


def hybrid(layers=6, **own):
    """A decoder of text with a gated delta net in two of three layers, and gated attention."""
    config = tiny(layers=layers, encoders=(), **own)
    net = replace(SMALL, layers=tuple(i for i in range(layers) if i % 3 < 2), value_width=8)
    llm = replace(config.llm, delta_net=net, attention_gate=True, rotary_width=4, qk_norm="head")
    return replace(config, llm=llm)


def test_adapters_stand_beside_the_projections_of_both_kinds_of_layers():
    config = replace(hybrid(), lora={"all": LoraConfig(("llm.*",), 2)})
    leaves = jax.tree.leaves_with_path(
        unstack_layers(Model.build(config, jnp.float32).abstract, shape_of_layer)
    )
    found = {".".join(key.key for key in path): leaf.shape for path, leaf in leaves}
    adapters = {name: shape for name, shape in found.items() if ".lora." in name}
    names = {".".join(name.split(".")[3:-2]) for name in adapters}
    linears = ("query", "key", "value", "gate", "beta", "decay", "output")
    attention = ("query", "key", "value", "output")
    wanted = {
        *(f"delta_net.{name}" for name in linears),
        *(f"attention.{name}" for name in attention),
    }
    assert names == wanted | {"mlp.gate", "mlp.up", "mlp.down"}
    assert "llm.layers.2.attention.query.lora.a" in adapters
    assert "llm.layers.2.delta_net.query.lora.a" not in adapters
    assert sum(map(math.prod, adapters.values())) == parameters(config)["llm.lora"]


def shape_of_layer(leaf, _):
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)


def test_what_does_not_read_samples_in_order_is_refused_in_one_line():
    model = hybrid()
    with pytest.raises(UserError, match=r"mesh.tensor=4 does not divide model.llm.kv_heads=2"):
        check_layout("mesh", MeshConfig(tensor=4), model)
    more = replace(model, llm=replace(model.llm, kv_heads=4))
    with pytest.raises(
        UserError, match=r"mesh.tensor=4 does not divide model.llm.delta_net.key_heads=2"
    ):
        check_layout("mesh", MeshConfig(tensor=4), more)
    with pytest.raises(
        UserError,
        match=r"model\.llm\.items=isolated: a gated delta net reads a sample's tokens in order",
    ):
        check_conflicts(Features(replace(model, llm=replace(model.llm, items="isolated"))))
    net = replace(model.llm.delta_net, layers=(0, 9))
    with pytest.raises(
        UserError, match=r"model.llm.delta_net.layers names layer \[9\], there are 0 to 5"
    ):
        check_section(replace(model, llm=replace(model.llm, delta_net=net)), "model")
    arrays = BatchLayout.of(model)

    def write(arrays: BatchLayout, *branches: int) -> None:
        text = [Text(np.ones(3, np.int32), np.zeros(3, np.float32), branch) for branch in branches]
        row = row_view(empty_text((1, 3 * len(text)), arrays, {}), 0, slice(0, 3 * len(text)))
        write_sample(row, Sample(tuple(text)), arrays, [], 0)

    write(arrays, 0, 1)  # in order
    with pytest.raises(ValueError, match="it has tokens behind its branch 1"):
        write(arrays, 0, 1, 2)
    branched = BatchLayout.of(model, branches=True)
    write(branched, 0, 1, 0, 2)
    for apart in ((0, 1, 2, 1), (1, 0, 1)):
        with pytest.raises(ValueError, match="its branch 1 goes on behind other tokens"):
            write(branched, *apart)


def batch_of(rng):
    rows = [[random_sample(rng, (n,)) for n in lengths] for lengths in ((9, 1, 14), (20, 5))]
    return pack(rows, {"llm": 32}, encoders=())


def loss_and_gradient(config, cuts=None):
    model, params = build(config, cuts)
    batch = batch_of(np.random.default_rng(0))
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: token_losses(model, p, batch).sum()))(
        params
    )
    return loss, unstack_layers(gradient)


@pytest.mark.exhaustive
def test_stacks_and_remat_change_nothing():
    wanted = loss_and_gradient(hybrid())
    remat = ("none", "full", "full", "full", "full", "products")
    found = loss_and_gradient(hybrid(remat=remat), {"llm": (1,)})
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    # Gradients of random layers over each other enlarge rounding, by the norms of short keys above
    # all.
    assert_trees_close(found[1], wanted[1], 1e-4)


@pytest.mark.default_cases("off")
@pytest.mark.parametrize("sequence_parallel", ["off", "on"])
def test_on_a_mesh_with_tensor_parallelism_it_is_that_of_one_device(sequence_parallel):
    config = hybrid(layers=3)
    # An early token of a sample has an output near 0, whose norm enlarges rounding: with an epsilon
    # of 1e-6, the last bit of the parameters moves gradients of one device by up to 8e-5 of the
    # largest; with this one, by up to 6e-6.
    config = replace(config, llm=replace(config.llm, norm_eps=1e-2))
    model, params = build(config)
    batch = batch_of(np.random.default_rng(0))
    function = jax.value_and_grad(lambda p, batch: token_losses(model, p, batch).sum())
    wanted = jax.jit(function)(params, batch)
    mesh_config = MeshConfig(data=1, fsdp=2, tensor=2, sequence_parallel=sequence_parallel)
    mesh, rules = make_mesh(mesh_config, jax.devices()[:4]), ShardingRules.of(mesh_config)
    placed = (
        jax.device_put(params, parameter_shardings(model, mesh, rules)),
        jax.device_put(batch, rows_sharding(mesh)),
    )

    def on_mesh(params, batch):
        with activations_on(mesh, rules):
            return function(params, batch)

    found = jax.jit(on_mesh)(*placed)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    assert_trees_close(jax.device_get(found[1]), jax.device_get(wanted[1]), 2e-5)
