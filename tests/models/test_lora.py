"""Adapters beside linear layers: nothing at the start, then exactly a change of the weights, whatever the runs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from packed import assert_trees_close, build, pack, random_sample, tiny

from mmjax.config import AdamW, LoraConfig, MeshConfig, Muon
from mmjax.config.model import lora_scale
from mmjax.models.dropout import drop_inputs, dropping, tower_dropout
from mmjax.models.layer_stacks import key_names, unstack_layers
from mmjax.models.linear import Linear
from mmjax.models.lora import LowRank
from mmjax.models.model import Model, merge, parameter_group, partition
from mmjax.models.quantization import QuantizedMatrix, dequantize
from mmjax.parallel.sharding import ShardingRules, make_mesh
from mmjax.runtime.state import make_optimizer, parameter_shardings

ATTENTION = LoraConfig(("llm.*.attention.query", "*.value"), rank=3, alpha=5.0)
REST = LoraConfig(("*.mlp.down", "vision.connector.mlp.up"), rank=5, scaling="sqrt_rank")


def adapted(**changes):
    return replace(tiny(**changes), lora={"attention": ATTENTION, "rest": REST})


def batch(seed=0):
    rng = np.random.default_rng(seed)
    layout = [5, (4, 3), 4, ("audio", 14), 6]
    samples = [random_sample(rng, layout) for _ in range(2)]
    return pack([samples], {"llm": 96, "vision": 96, "audio": 96})


def leaves(params):
    return {key_names(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def folded(params):
    """Parameters without adapters whose weights hold them."""
    out = {}
    for key, value in params.items():
        if key == "lora":
            continue
        out[key] = folded(value) if isinstance(value, dict) else value
    if "lora" in params:
        a, b = params["lora"]["a"], params["lora"]["b"]
        of = ATTENTION if a.shape[-1] == ATTENTION.rank else REST
        out["weight"] = params["weight"] + lora_scale(of) * a @ b
    return out


def test_a_model_with_adapters_is_born_with_the_weights_and_logits_of_the_model_without():
    plain, model = Model.build(tiny(), jnp.float32), Model.build(adapted(), jnp.float32)
    without, with_ = plain.init(jax.random.key(1)), model.init(jax.random.key(1))
    own = leaves(without)
    for path, leaf in leaves(with_).items():
        if "lora" in path:
            assert (np.abs(leaf).max() == 0) == (path[-1] == "b")
        else:
            np.testing.assert_array_equal(leaf, own.pop(path))
    assert not own
    given = batch()
    np.testing.assert_array_equal(
        jax.jit(model.logits)(with_, given), jax.jit(plain.logits)(without, given)
    )


@pytest.mark.default_cases("products")
@pytest.mark.parametrize("remat", ["none", "products", "full"])
def test_adapters_compute_what_their_product_added_to_the_weights_does(remat):
    model, params = build(adapted(remat=remat))
    plain = Model.build(tiny(remat=remat), jnp.float32)
    given = batch()
    loss = lambda m: lambda p: jnp.square(m.logits(p, given)).mean()  # noqa: E731
    found, wanted = (jax.jit(jax.value_and_grad(loss(m))) for m in (model, plain))
    (value, gradients), (same, theirs) = found(params), wanted(folded(params))
    np.testing.assert_allclose(value, same, rtol=1e-5)
    own, changes = leaves(gradients), leaves(theirs)
    for path, leaf in leaves(params).items():
        if path[-2] == "lora" and path[-1] == "a":
            of, weight = (
                ATTENTION if leaf.shape[-1] == ATTENTION.rank else REST,
                changes[(*path[:-2], "weight")],
            )
            b = leaves(params)[(*path[:-1], "b")]
            assert_trees_close(own[path], lora_scale(of) * weight @ jnp.swapaxes(b, -1, -2), 1e-4)
            assert_trees_close(
                own[(*path[:-1], "b")], lora_scale(of) * jnp.swapaxes(leaf, -1, -2) @ weight, 1e-4
            )


def test_dora_computes_and_trains_what_pefts_layer_does():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    weight, bias, a, b, x, change = draw(8, 6), draw(6), draw(8, 3), draw(3, 6), draw(5, 8), draw(6)
    theirs = torch.nn.Sequential(torch.nn.Linear(8, 6))
    config = peft.LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=["0"])
    wrapped = peft.get_peft_model(theirs, config)
    layer = wrapped.base_model.model[0]
    lora = LoraConfig(("*",), rank=3, alpha=5.0, dora=True)
    linear = Linear(8, 6, ("embed", "mlp"), nnx.Rngs(0), bias=True)
    linear.weight[...], linear.bias[...] = jnp.asarray(weight), jnp.asarray(bias)
    linear.lora = LowRank(jnp.asarray(a), jnp.asarray(b), linear, lora)
    linear.lora.magnitude[...] = jnp.asarray(change)
    lengths = torch.tensor(np.linalg.norm(weight, axis=0) + change)
    tensors = {
        "weight": (layer.base_layer.weight, weight.T),
        "bias": (layer.base_layer.bias, bias),
        "a": (layer.lora_A.default.weight, a.T),
        "b": (layer.lora_B.default.weight, b.T),
        "magnitude": (layer.lora_magnitude_vector.default.weight, lengths.numpy()),
    }
    with torch.no_grad():
        for tensor, value in tensors.values():
            tensor.copy_(torch.tensor(np.ascontiguousarray(value)))
    given = torch.tensor(x, requires_grad=True)
    wanted = wrapped(given)
    wanted.square().sum().backward()
    np.testing.assert_allclose(linear(jnp.asarray(x)), wanted.detach(), rtol=1e-5, atol=1e-5)
    graph, state = nnx.split(linear)
    loss = lambda state, x: jnp.square(nnx.merge(graph, state)(x)).sum()  # noqa: E731
    gradients, d_x = jax.grad(loss, (0, 1))(state, jnp.asarray(x))
    np.testing.assert_allclose(d_x, given.grad, rtol=1e-5, atol=1e-3)
    for name in ("a", "b", "magnitude"):
        found = np.asarray(gradients["lora"][name].get_value())
        theirs = tensors[name][0].grad.numpy()
        np.testing.assert_allclose(found.T, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_inputs_that_are_dropped_train_an_adapter_as_pefts_layer_does():
    """The adapter alone reads what is left of the inputs; with PEFT's mask replaced by the one drawn here."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    weight, a, b, x = draw(8, 6), draw(8, 3), draw(3, 6), draw(2, 5, 8)
    config = peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.4, target_modules=["0"])
    wrapped = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False)), config)
    layer = wrapped.base_model.model[0]
    tensors = layer.base_layer.weight, layer.lora_A.default.weight, layer.lora_B.default.weight
    with torch.no_grad():
        for tensor, value in zip(tensors, (weight, a, b), strict=True):
            tensor.copy_(torch.tensor(np.ascontiguousarray(value.T)))
    places = jnp.zeros((2, 5), jnp.int32), jnp.arange(10).reshape(2, 5)
    dropout = tower_dropout(np.array([7, 3], np.uint32), "llm", 0.0, *places)
    dropout = dropout._replace(layer=jnp.asarray(5))
    stay = np.asarray(drop_inputs(jnp.ones_like(x), dropout.key, dropout.layer, 0.4, "name"))
    assert {*np.unique(stay).tolist()} == {0.0, np.float32(1 / 0.6).item()}
    layer.lora_dropout["default"].forward = lambda x: x * torch.tensor(stay)
    linear = Linear(8, 6, ("embed", "mlp"), nnx.Rngs(0))
    linear.weight[...] = jnp.asarray(weight)
    lora = LoraConfig(("*",), rank=3, alpha=5.0, dropout=0.4)
    linear.lora = LowRank(jnp.asarray(a), jnp.asarray(b), linear, lora, "name")
    graph, state = nnx.split(linear)

    def outputs(state, x):
        with dropping(dropout):
            return nnx.merge(graph, state)(x)

    given = torch.tensor(x, requires_grad=True)
    wanted = wrapped(given)
    wanted.square().sum().backward()
    np.testing.assert_allclose(outputs(state, jnp.asarray(x)), wanted.detach(), atol=1e-5)
    loss = lambda *given: jnp.square(outputs(*given)).sum()  # noqa: E731
    gradients, d_x = jax.grad(loss, (0, 1))(state, jnp.asarray(x))
    for found, theirs in (
        (d_x, given.grad),
        (gradients["lora"]["a"].get_value().T, tensors[1].grad),
        (gradients["lora"]["b"].get_value().T, tensors[2].grad),
    ):
        np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())
    del layer.lora_dropout["default"].forward
    np.testing.assert_allclose(linear(jnp.asarray(x)), wrapped.eval()(given).detach(), atol=1e-5)


def test_dora_beside_quantised_and_fp8_weights_has_lengths_of_what_these_are():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    lora = LoraConfig(("*",), rank=3, dora=True)
    linear = Linear(64, 32, ("embed", "mlp"), nnx.Rngs(0))
    linear.lora = LowRank(draw(64, 3), draw(3, 32), linear, lora)
    linear.lora.magnitude[...] = draw(32)
    x = draw(5, 64)
    plain = linear(x)
    linear.float8 = True
    assert np.abs(linear(x) - plain).max() < 0.1 * np.abs(plain).max()
    linear.float8 = False
    linear.weight = QuantizedMatrix(linear.weight[...], linear.axes, "int8")
    found = linear(x)
    w = dequantize(linear.weight[...], jnp.float32)
    new = w + lora_scale(lora) * linear.lora.a[...] @ linear.lora.b[...]
    lengths = jnp.linalg.norm(w, axis=0) + linear.lora.magnitude[...]
    wanted = x @ (new * lengths / jnp.linalg.norm(new, axis=0))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_adapters_do_not_depend_on_runs_and_are_stored_layer_by_layer():
    whole, cut = (
        Model.build(adapted(layers=4), jnp.float32, cuts) for cuts in (None, {"llm": (1, 3)})
    )
    one, other = (unstack_layers(m.init(jax.random.key(2))) for m in (whole, cut))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    a = [one["llm"]["layers"][str(i)]["attention"]["query"]["lora"]["a"] for i in range(4)]
    assert len({x.tobytes() for x in map(np.asarray, a)}) == 4
    assert np.abs(a[0]).max() <= 32**-0.5


def test_adapters_are_trainable_where_their_module_is_frozen_and_groups_of_their_own():
    model = Model.build(
        replace(tiny(), lora={"one": LoraConfig(("llm.*", "vision.connector.*"))}), jnp.float32
    )
    assert model.frozen == {"llm", "vision.connector"}
    trainable, frozen = partition(model.abstract, model.frozen)
    assert {parameter_group(path) for path in leaves(trainable)} == {
        "llm.lora", "vision", "vision.connector.lora", "audio", "audio.connector",
    }  # fmt: skip
    assert {parameter_group(path) for path in leaves(frozen)} == {"llm", "vision.connector"}
    assert merge(trainable, frozen) == model.abstract
    beside = replace(model.config, lora={"one": LoraConfig(("llm.*",), base="trained")})
    assert Model.build(beside, jnp.float32).frozen == set()


def test_an_encoder_may_be_called_lora():
    model = Model.build(replace(tiny(), encoders={"lora": tiny().encoders["vision"]}), jnp.float32)
    assert partition(model.abstract, {"lora"})[0].keys() == {"llm", "connectors"}
    assert {parameter_group(path) for path in leaves(model.abstract)} == {
        "llm",
        "lora",
        "lora.connector",
    }


def test_adapters_lie_on_the_mesh_like_the_weights_beside_them():
    model = Model.build(adapted(), jnp.float32)
    mesh = make_mesh(MeshConfig(1, fsdp=2, tensor=2), jax.devices()[:4])
    where = leaves(parameter_shardings(model, mesh, ShardingRules()))
    query = ("llm", "layers", "runs", "0:2", "attention", "query")
    spec = lambda *path: tuple(where[(*query, *path)].spec)  # noqa: E731
    assert spec("weight") == (None, ("fsdp", "expert", "context"), "tensor")
    assert spec("lora", "a") == (None, ("fsdp", "expert", "context"), None)
    assert spec("lora", "b") == (None, None, "tensor")


@pytest.mark.parametrize("config", [AdamW(), Muon()], ids=["adamw", "muon"])
def test_adapters_follow_adam_in_a_group_of_their_own_also_under_muon(config):
    model = Model.build(adapted(), jnp.float32)
    optimizer = make_optimizer(config, model.axes)
    groups = {optimizer.group_of(path) for path in leaves(model.abstract) if "lora" in path}
    ending = "/other" if isinstance(config, Muon) else ""
    assert groups == {
        f"{m}.lora{ending}"
        for m in ("llm", "vision", "audio", "vision.connector", "audio.connector")
    }
