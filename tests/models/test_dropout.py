"""What is dropped depends on the sample, the step and the place in the model, and on nothing else."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from packed import (
    assert_trees_close,
    build,
    cut_tower,
    losses_of_logits,
    pack,
    random_sample,
    stage_outputs,
    tiny,
    token_losses,
)
from transformers.integrations.neftune import neftune_post_forward_hook

from mmjax.config import LoraConfig
from mmjax.models.dropout import ATTENTION, MLP_SITE, disturb, drop, tower_dropout
from mmjax.models.layer_stacks import stack_layers, unstack_layers
from mmjax.models.model import Model
from mmjax.parallel.sharding import ShardingRules, activations_on, constrain

LENGTHS = {"llm": 48, "vision": 64, "audio": 64}
NOISE = np.array([7, 3], np.uint32)  # seed, step


def dropping(rate=0.3, towers=("llm", "vision", "audio"), **options):
    """The tiny model's config with dropout in these towers and in adapters, and noise on the LLM's embeddings."""
    config = tiny(**options)
    in_llm = "llm" in towers
    llm = replace(config.llm, dropout=rate * in_llm, neftune_alpha=10 * rate * in_llm)
    encoders = {
        name: replace(c, dropout=rate * (name in towers)) for name, c in config.encoders.items()
    }
    patterns = tuple(f"{name}.layers.*" for name in towers if name in {"llm", *encoders})
    adapters = {"layers": LoraConfig(patterns, rank=2, dropout=rate)}
    return replace(config, llm=llm, encoders=encoders, lora=adapters)


def samples():
    rng = np.random.default_rng(0)
    layouts = [
        [2, (2, 3), 3, ("audio", 5), 2],
        [6],
        [1, ("audio", 9), (3, 3), (1, 2), 4],
        [(2, 2), 2, ("audio", 2), 1],
    ]
    return [random_sample(rng, layout) for layout in layouts]


@partial(jax.jit, static_argnames=("tower", "site", "rate"))
def dropped(x, owner, offset, noise, tower="llm", layer=0, site=ATTENTION, rate=0.5):
    return drop(x, tower_dropout(noise, tower, rate, owner, offset)._replace(layer=layer), site)


def mask(noise=NOISE, owner=5, offset=0, length=256, width=32, **place):
    """Which of the values of a sample's positions from `offset` on stay, bool [length, width]."""
    ids = np.full((1, length), owner, np.int32), offset + np.arange(length, dtype=np.int32)[None]
    return (
        np.asarray(dropped(np.ones((1, length, width), np.float32), *ids, noise, **place))[0] != 0
    )


# --------------------------------------------------------------------------------------------------
# the mask


@settings(max_examples=25)
@given(st.permutations(range(48)), st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
def test_a_positions_mask_moves_with_it(order, owner, step):
    """Positions of two samples and padding anywhere in two rows keep the masks that they have in order in one."""
    owners = np.repeat(np.array([owner, owner // 2 + 1, -1], np.int32), 16)
    offsets = np.tile(np.arange(16, dtype=np.int32), 3)
    noise, order = np.array([1, step], np.uint32), np.array(order)

    def masks(owner, offset):
        return np.asarray(
            dropped(np.ones((*owner.shape, 8), np.float32), owner, offset, noise, layer=1)
        ).reshape(48, 8)

    in_order = masks(owners[None], offsets[None])
    moved = masks(owners[order].reshape(2, 24), offsets[order].reshape(2, 24))
    np.testing.assert_array_equal(moved, in_order[order])


@pytest.mark.parametrize(
    "other",
    [
        {"noise": np.array([8, 3], np.uint32)},
        {"noise": np.array([7, 4], np.uint32)},
        {"noise": NOISE[::-1]},
        {"tower": "vision"},
        {"owner": 6},
        {"owner": 5 + 2**16},
        {"offset": 256},
        {"layer": 1},
        {"site": MLP_SITE},
    ],
    ids=[
        "seed",
        "step",
        "seed for step",
        "tower",
        "sample",
        "far sample",
        "offset",
        "layer",
        "site",
    ],
)
def test_masks_of_other_seeds_steps_towers_samples_offsets_layers_and_sites_are_independent(other):
    one, two = mask(), mask(**other)
    sigma = 0.5 * one.size**-0.5
    assert abs((one == two).mean() - 0.5) < 4 * sigma


def test_masks_of_neighbouring_positions_are_independent():
    kept = mask()
    sigma = 0.5 * kept[1:].size ** -0.5
    assert abs((kept[1:] == kept[:-1]).mean() - 0.5) < 4 * sigma


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_the_rate_is_what_was_asked_for_and_the_mean_is_preserved(rate):
    values, width = 1024, 64
    ids = np.zeros((1, values), np.int32), np.arange(values, dtype=np.int32)[None]
    left = np.asarray(
        dropped(np.full((1, values, width), 3, np.float32), *ids, NOISE, rate=rate), np.float64
    )[0]
    np.testing.assert_allclose(np.unique(left), [0, 3 / (1 - rate)], rtol=1e-6)
    sigma = (rate * (1 - rate) / left.size) ** 0.5
    assert abs((left != 0).mean() - (1 - rate)) < 4 * sigma
    assert abs(left.mean() - 3) < 4 * 3 * sigma / (1 - rate)
    channel_sigma = (rate / (1 - rate) / values) ** 0.5
    assert abs(left.mean(0) - 3).max() < 5 * 3 * channel_sigma


def test_half_precision_is_scaled_in_single_precision_and_given_back_as_it_was():
    ids = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int32)
    x = jnp.full((1, 1, 64), 2.7, jnp.bfloat16)
    left = dropped(x, *ids, NOISE, rate=0.1)
    assert left.dtype == jnp.bfloat16
    expected = (x[0, 0, 0].astype(jnp.float32) / 0.9).astype(jnp.bfloat16)
    assert set(np.unique(left).tolist()) == {0.0, float(expected)}


# --------------------------------------------------------------------------------------------------
# the model


@pytest.fixture(scope="module")
def everywhere():
    """A model that drops in every tower, its parameters and its compiled logits."""
    model, params = build(dropping())
    return model, params, jax.jit(model.logits)


SAMPLES, IDS = samples(), [40, 7, 2**20, 0]


def packed(*rows):
    """Rows of samples by their number, with their ids; always two rows."""
    rows = [*rows, *[()] * (2 - len(rows))]
    return pack(
        [[SAMPLES[i] for i in row] for row in rows],
        LENGTHS,
        owners=[[IDS[i] for i in row] for row in rows],
    )


def test_a_sample_drops_the_same_wherever_and_with_whomever_it_is_packed(everywhere):
    _, params, logits = everywhere
    together = packed((0, 1), (2, 3))
    got = logits(params, together, NOISE)
    for number, owner in enumerate(IDS):
        mine = np.asarray(together.text.owner) == owner
        for other in (packed((number,)), packed((), ((number + 1) % 4, number))):
            there = np.asarray(other.text.owner) == owner
            expected = logits(params, other, NOISE)[there]
            np.testing.assert_allclose(got[mine], expected, atol=1e-5, rtol=1e-5)


def test_every_step_run_and_sample_drops_other_values(everywhere):
    _, params, logits = everywhere
    batch = packed((2,))
    same = logits(params, batch, NOISE)
    np.testing.assert_array_equal(logits(params, batch, NOISE.copy()), same)
    others = [logits(params, batch, np.array(noise, np.uint32)) for noise in ((7, 4), (8, 3))]
    renamed = batch.items | {
        n: b._replace(owner=b.owner + (b.owner >= 0)) for n, b in batch.items.items()
    }
    others += [
        logits(params, batch._replace(items=batch.items | {n: renamed[n]}), NOISE) for n in renamed
    ]
    owner = batch.text.owner
    others.append(
        logits(params, batch._replace(text=batch.text._replace(owner=owner + (owner >= 0))), NOISE)
    )
    for other in others:
        assert np.abs(np.asarray(other - same)[np.asarray(owner) >= 0]).max() > 0.01


def test_the_items_of_a_sample_drop_different_values(everywhere):
    """Two equal images and two equal clips of one sample: without dropout, their tokens would be equal."""
    model, params, _ = everywhere
    rng = np.random.default_rng(0)
    image, clip = random_sample(rng, [(2, 2), ("audio", 4)])
    batch = pack([[[image, clip, image, clip]]], {"llm": 16, "vision": 8, "audio": 8})
    for tokens in jax.jit(model.encode)(params, batch.items, NOISE).values():
        first, second = np.asarray(tokens).reshape(2, -1)
        assert np.abs(first - second).max() > 0.1


DEEP = {"layers": 3, "vision_layers": 3, "encoders": ("vision",)}


def gradient_of(logits, text):
    """The function of parameters that gives per-token losses and the gradients of their sum, by numbered layers."""

    @jax.jit
    def run(params, noise):
        def loss(params):
            losses = losses_of_logits(logits(params, noise), text)
            return losses.sum(), losses

        return jax.grad(loss, has_aux=True)(params)

    def by_layers(params):
        gradients, losses = run(params, NOISE)
        return losses, unstack_layers(gradients)

    return by_layers


@pytest.fixture(scope="module")
def whole():
    """(numbered parameters, a batch, its losses and gradients) of one run of three layers."""
    model, params = build(dropping(**DEEP))
    rng = np.random.default_rng(3)
    rows = [
        [random_sample(rng, [2, (2, 3), 4]), random_sample(rng, [5])],
        [random_sample(rng, [1, (3, 3), (1, 2), 3])],
    ]
    batch = pack(rows, {"llm": 24, "vision": 24}, encoders=("vision",))
    run = gradient_of(lambda p, noise: model.logits(p, batch, noise), batch.text)
    return unstack_layers(params), batch, run(params)


def assert_same(got, expected):
    assert_trees_close(got[0], expected[0], 1e-6)
    assert_trees_close(got[1], expected[1], 3e-6)  # sums over positions, in another order


def test_run_borders_and_recomputation_change_nothing(whole):
    numbered, batch, expected = whole
    model = Model.build(
        dropping(**DEEP, remat=("full", "attention", "attention")), jnp.float32, {"vision": (2,)}
    )
    run = gradient_of(lambda p, noise: model.logits(p, batch, noise), batch.text)
    assert_same(run(stack_layers(numbered, model.runs)), expected)


@pytest.mark.exhaustive
def test_stages_drop_what_the_whole_tower_drops(whole):
    numbered, batch, expected = whole
    cuts = {"llm": (2,), "vision": (1,)}
    model = Model.build(dropping(**DEEP, remat="full"), jnp.float32, cuts)

    def staged(params, noise):
        x = {}
        for tower in ("vision", "llm"):
            for stage in cut_tower(model, tower, cuts[tower]):
                x = stage_outputs(stage, stage.select(params), x, batch, noise)
        return x["logits"]

    assert_same(gradient_of(staged, batch.text)(stack_layers(numbered, model.runs)), expected)


def program(config, noise):
    """The jaxpr of a gradient as text, without the addresses of functions in it."""
    model, params = build(config, {"llm": (1,)})
    batch = pack([SAMPLES], {"llm": 64, "vision": 64, "audio": 64})
    made = jax.make_jaxpr(jax.grad(lambda p: token_losses(model, p, batch, noise).sum()))(params)
    return re.sub("0x[0-9a-f]+", "", str(made))


@pytest.mark.exhaustive
def test_a_rate_of_zero_leaves_the_program_as_it_is_without_noise():
    options = {"layers": 3, "remat": "full"}
    without = dropping(rate=0.0, **options)
    plain = program(without, None)
    assert program(without, NOISE) == plain
    assert program(dropping(**options), None) == plain
    assert program(dropping(**options), NOISE) != plain


def test_embeddings_get_transformers_noise_of_their_samples_own_length():
    """NEFTune's: as large and as even as the hook's of transformers, where a sample is alone in its row."""
    tokens, width, alpha = 100, 64, 5.0
    sample = random_sample(np.random.default_rng(0), [tokens])
    text = pack([[sample] * 2], {"llm": 256}, encoders=()).text
    zeros = jnp.zeros((1, 256, width))
    found = np.asarray(disturb(zeros, NOISE, alpha, text))[0]
    one, two = (found[text.owner[0] == owner] for owner in (0, 1))
    layer = torch.nn.Embedding(1, width).train()
    layer.neftune_noise_alpha = alpha
    theirs = neftune_post_forward_hook(layer, None, torch.zeros(1, tokens, width)).numpy()
    assert not np.array_equal(one, two)
    for ours in (one, two):
        assert abs(ours).max() == pytest.approx(abs(theirs).max(), rel=0.01)
        assert ours.std() == pytest.approx(theirs.std(), rel=0.03)
        assert abs(ours.mean()) < 4 * ours.std() / ours.size**0.5


def test_a_model_knows_whether_it_drops_anything():
    noisy = tiny()
    assert Model.build(
        replace(noisy, llm=replace(noisy.llm, neftune_alpha=5.0)), jnp.float32
    ).is_random
    assert Model.build(dropping(towers=("audio",)), jnp.float32).is_random
    adapted = replace(noisy, lora={"llm": LoraConfig(("llm.*.query",), dropout=0.1)})
    assert Model.build(adapted, jnp.float32).is_random
    assert not Model.build(tiny(), jnp.float32).is_random


def test_a_frozen_tower_drops_as_any_other():
    config = dropping()
    encoders = {name: replace(c, frozen=True) for name, c in config.encoders.items()}
    assert program(replace(config, encoders=encoders), NOISE) == program(config, NOISE)


# --------------------------------------------------------------------------------------------------
# the mesh


def test_on_a_mesh_every_device_makes_its_own_keys_and_drops_the_same():
    devices = np.array(jax.devices()).reshape(2, 2, 1, 1, 2)
    mesh = Mesh(
        devices, ("data", "fsdp", "expert", "tensor", "context"), axis_types=(AxisType.Auto,) * 5
    )
    owner = np.tile(np.arange(8, dtype=np.int32)[:, None], 16)
    offset = np.tile(np.arange(16, dtype=np.int32), (8, 1))
    x = np.random.default_rng(0).normal(size=(8, 16, 4)).astype(np.float32)

    @jax.jit
    def on_mesh(x, owner, offset, noise):
        with activations_on(mesh, ShardingRules()):
            return drop(
                constrain(x, "rows", "length", "width"),
                tower_dropout(noise, "llm", 0.5, owner, offset),
                MLP_SITE,
            )

    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "context"))
    arrays = jax.device_put((x, owner, offset), where)
    program = on_mesh.lower(*arrays, NOISE).compile().as_text()
    assert not re.search(r" (all-gather|all-reduce|all-to-all|collective-permute)", program)
    got = on_mesh(*arrays, NOISE)
    assert got.sharding.is_equivalent_to(where, 3)
    np.testing.assert_array_equal(got, dropped(x, owner, offset, NOISE, site=MLP_SITE))
