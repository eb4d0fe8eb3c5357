"""Tensor parallelism with tokens divided between layers: the loss and gradients of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed import assert_trees_close, build, pack, random_sample, tiny, token_losses

from mmjax.config import LoraConfig, MeshConfig
from mmjax.models.model import merge, partition
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh, sharding

HEADS = 8  # which eight devices divide
LORA = LoraConfig(("llm.*", "vision.connector.mlp.up"), rank=2, alpha=1.0)
NOISE = np.array([7, 3], np.uint32)


def config_of(case):
    """Towers of every kind whose heads eight devices divide, and one change."""
    config = tiny(
        tied=False, vocab=24, encoders=() if case in ("llm", "odd rows") else ("vision", "audio")
    )
    encoders = {
        name: replace(encoder, width=64, heads=HEADS) for name, encoder in config.encoders.items()
    }
    llm = replace(config.llm, heads=HEADS, kv_heads=HEADS)
    match case:  # "all": no change, "llm": no encoders
        case "adapters":
            config = replace(config, lora={"some": LORA})
        case "frozen":
            llm = replace(llm, frozen=True)
        case "dropout":
            llm = replace(llm, dropout=0.2)
            encoders["vision"] = replace(encoders["vision"], dropout=0.2)
        case "biases":
            llm = replace(
                llm,
                biases=("query", "key", "value", "output", "up", "down", "gate"),
                qk_norm="head",
            )
        case "none" | "products" | "attention_mlp" | "full":
            llm = replace(llm, layers=3, remat=case)
            encoders = {name: replace(encoder, remat=case) for name, encoder in encoders.items()}
    return replace(config, llm=llm, encoders=encoders)


def batch_of(case, ranks):
    """Two rows of two samples for each rank, whose lengths eight devices divide; nothing is exchanged."""
    rng = np.random.default_rng(0)
    encoders = config_of(case).encoders
    layouts = ([2, (2, 3), 4, ("audio", 11), 3], [5, (1, 4)]) if encoders else ([19], [7])
    lengths = {"llm": 45 if case == "odd rows" else 48, "vision": 32, "audio": 64}
    rows = [
        [[random_sample(rng, layout) for layout in layouts] for _ in range(2)] for _ in range(ranks)
    ]
    packs = [pack(of_rank, lengths, encoders=encoders) for of_rank in rows]
    batch = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *packs)
    send = {name: jnp.zeros((ranks, 1, 0), jnp.int32) for name in batch.text.send}
    return batch._replace(text=batch.text._replace(send=send))


def loss_and_gradients(case, mesh=None, ranks=1):
    """The loss, and the gradients of what is trained; on one device without a mesh."""
    model, params = build(config_of(case))
    batch = batch_of(case, ranks)
    noise = NOISE if case == "dropout" else None
    if mesh is None:
        run = lambda trainable, frozen: token_losses(  # noqa: E731
            model, merge(trainable, frozen), batch, noise
        ).sum()
        return jax.jit(jax.value_and_grad(run))(*partition(params, model.frozen))
    on = make_mesh(mesh, jax.devices()[: ranks * mesh.tensor])
    rules = ShardingRules.of(mesh)
    shardings = jax.tree.map(lambda x, axes: sharding(on, rules, x.shape, axes), params, model.axes)

    def loss(trainable, frozen, batch):
        with activations_on(on, rules):
            return token_losses(model, merge(trainable, frozen), batch, noise).sum()

    program = jax.jit(jax.value_and_grad(loss))
    arguments = *partition(jax.device_put(params, shardings), model.frozen), batch
    sends = str(jax.make_jaxpr(program)(*arguments)).count("ppermute")
    assert bool(sends) == (mesh.sequence_parallel == "overlap" and case != "odd rows")
    return program(*arguments)


on_one_device = cache(loss_and_gradients)


def assert_equal(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    assert_trees_close(got[1], expected[1])


@pytest.mark.default_cases("llm-overlap-4")
@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("way", ["off", "on", "overlap"])
@pytest.mark.parametrize("case", ["llm", "all"])
def test_loss_and_every_gradient_are_those_of_one_device(case, way, tensor):
    found = loss_and_gradients(case, MeshConfig(1, tensor=tensor, sequence_parallel=way))
    assert_equal(found, on_one_device(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["on", "overlap"])
@pytest.mark.parametrize(
    "case", ["adapters", "frozen", "dropout", "biases", "none", "products", "attention_mlp", "full"]
)
def test_so_they_are_whatever_is_trained_dropped_and_computed_again_with_shards_of_parameters(
    case, way
):
    found = loss_and_gradients(
        case, MeshConfig(2, fsdp=2, tensor=2, sequence_parallel=way), ranks=4
    )
    assert_equal(found, on_one_device(case, ranks=4))


@pytest.mark.exhaustive
def test_encoders_whose_rows_lie_on_the_tensor_axis_divide_no_tokens():
    mesh = MeshConfig(2, fsdp=2, tensor=2, encoders="data", sequence_parallel="overlap")
    assert_equal(loss_and_gradients("all", mesh, ranks=4), on_one_device("all", ranks=4))


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["on", "overlap"])
def test_rows_that_the_tensor_axis_does_not_divide_are_whole_between_layers(way):
    found = loss_and_gradients("odd rows", MeshConfig(1, tensor=2, sequence_parallel=way))
    assert_equal(found, on_one_device("odd rows"))
