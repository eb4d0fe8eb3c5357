"""Every image of a packed row is as if it were alone: its latents, its time and its condition, and no one else's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from image_rows import rows_of_images

from mmjax.config import DiffusionTransformerConfig, MeshConfig, Remat
from mmjax.models import diffusion_transformer
from mmjax.models.diffusion_transformer import DiffusionTransformer, ImageBlocks
from mmjax.models.layer_stacks import plan_stacks
from mmjax.parallel.sharding import ShardingRules, activations_on, encoding, make_mesh, sharding

CONFIG = DiffusionTransformerConfig(
    2, 24, 2, 40, condition_width=7, min_patches=6, queries=3, micro_conditions=True
)
ROWS = [[(2, 4), (3, 3), (1, 6), (5, 7)], [(4, 2), (2, 3)]]
LENGTH = 64


def build(config=CONFIG, dtype=jnp.float32, remat="none", seed=0):
    """The graph of the transformer and its parameters, the same for any policy; none of them zero."""
    plan = plan_stacks(config.layers, remat)
    module = nnx.eval_shape(
        lambda: DiffusionTransformer(config, plan, jnp.dtype(dtype), nnx.Rngs(0))
    )
    graph, state = nnx.split(module)
    rng = np.random.default_rng(seed)

    def born(leaf):
        spread = 0.2 if leaf.ndim < 2 else leaf.shape[-2] ** -0.5
        return jnp.asarray(spread * rng.normal(size=leaf.shape), jnp.float32)

    return graph, jax.tree.map(born, state)


def inputs(config=CONFIG, rows=ROWS, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    items = rows_of_images(rows, length)
    images = config.max_images(length)
    latents = rng.normal(size=(len(rows), length, config.patch_values)).astype(np.float32)
    time = rng.uniform(size=(len(rows), images)).astype(np.float32)
    condition = rng.normal(
        size=(len(rows), images * config.queries, config.condition_width)
    ).astype(np.float32)
    return jax.tree.map(jnp.asarray, (latents, items, time, condition))


@partial(jax.jit, static_argnums=0)
def velocity(graph, state, *given):
    return nnx.merge(graph, state)(*given)


@partial(jax.jit, static_argnums=0)
def gradients(graph, state, *given):
    return jax.grad(
        lambda state: jnp.sum(jnp.sin(nnx.merge(graph, state)(*given).astype(jnp.float32)))
    )(state)


def alone(config, given, row, number):
    """The inputs of one image in a row of its own, and where it lies in its row."""
    latents, items, time, condition = given
    here = np.flatnonzero(np.asarray(items.item)[row] == number)
    tokens = slice(number * config.queries, (number + 1) * config.queries)
    single = inputs(config, [[ROWS[row][number]]], LENGTH, seed=9)
    latents = single[0].at[0, : len(here)].set(latents[row, here])
    time = single[2].at[0, 0].set(time[row, number])
    return (
        latents,
        single[1],
        time,
        single[3].at[0, : config.queries].set(condition[row, tokens]),
    ), here


def largest_difference(config=CONFIG):
    """How far images in packed rows are from each alone."""
    graph, state = build(config)
    given = inputs(config)
    together = np.asarray(velocity(graph, state, *given))
    differences = []
    for row, sizes in enumerate(ROWS):
        for number in range(len(sizes)):
            single, here = alone(config, given, row, number)
            wanted = np.asarray(velocity(graph, state, *single))[0, : len(here)]
            differences.append(
                np.abs(together[row, here] - wanted).max() / max(1, np.abs(wanted).max())
            )
    return max(differences)


@pytest.mark.default_cases("blockwise")
@pytest.mark.parametrize("backend", ["dense", "blockwise", "flash"])
def test_images_in_a_row_are_each_as_if_alone(backend):
    assert largest_difference(replace(CONFIG, attention=backend)) < 1e-5


def test_images_with_less_text_than_others_see_only_what_they_have():
    config = replace(CONFIG, queries=2, text_tokens=3)
    graph, state = build(config)
    latents, items, time, condition = inputs(replace(CONFIG, queries=5))
    by_image = condition.reshape(len(ROWS), -1, 5, config.condition_width)
    # every other image has its queries alone
    lacking = by_image.at[:, ::2, :3].set(0).reshape(condition.shape)
    some, none = (
        np.asarray(velocity(graph, state, latents, items, time, c)) for c in (lacking, condition)
    )
    queries = by_image[:, :, 3:].reshape(len(ROWS), -1, config.condition_width)
    bare = build(replace(config, text_tokens=0))[0]
    alone = np.asarray(velocity(bare, state, latents, items, time, queries))
    even = (np.asarray(items.item) % 2 == 0)[..., None]
    np.testing.assert_allclose(some * even, alone * even, atol=1e-5)
    np.testing.assert_allclose(some * ~even, none * ~even, atol=1e-5)
    assert np.abs(some - none)[np.broadcast_to(even, some.shape)].max() > 1e-2


def spoil_self_attention(monkeypatch):
    monkeypatch.setattr(
        diffusion_transformer,
        "encoder_mask",
        lambda item: original_mask(jnp.where(item < 0, item, item // 2)),
    )


def spoil_blocks(monkeypatch):
    """The second image of a block takes its neighbour's time and condition."""
    make = ImageBlocks.of

    def first_only(*args):
        blocks = make(*args)
        return blocks._replace(last=jnp.zeros_like(blocks.last))

    monkeypatch.setattr(ImageBlocks, "of", first_only)


def spoil_time(monkeypatch):
    spread = ImageBlocks.spread
    shifted = lambda self, x, length: spread(self, jnp.roll(x, 1, axis=1), length)  # noqa: E731
    monkeypatch.setattr(ImageBlocks, "spread", shifted)


def spoil_condition(monkeypatch):
    attend = ImageBlocks.attend
    shifted = lambda self, q, k, v, given: attend(self, q, jnp.roll(k, 1, axis=1), v, given)  # noqa: E731
    monkeypatch.setattr(ImageBlocks, "attend", shifted)


original_mask = diffusion_transformer.encoder_mask


@pytest.mark.default_cases("spoil_blocks")
@pytest.mark.parametrize("spoil", [spoil_self_attention, spoil_blocks, spoil_time, spoil_condition])
def test_a_leak_between_images_would_be_seen(spoil, monkeypatch):
    velocity.clear_cache()
    spoil(monkeypatch)
    try:
        assert largest_difference() > 1e-3
    finally:
        velocity.clear_cache()


def test_an_image_depends_on_all_of_its_own_and_on_nothing_else():
    graph, state = build()
    latents, items, time, condition = inputs()
    before = np.asarray(velocity(graph, state, latents, items, time, condition))
    item = np.asarray(items.item)
    changes = {
        "latents": (latents.at[0, 8].add(1), items, time, condition),
        "time": (latents, items, time.at[0, 1].add(0.1), condition),
        "condition": (latents, items, time, condition.at[0, 3].add(1)),
    }
    for name, changed in changes.items():
        difference = np.abs(np.asarray(velocity(graph, state, *changed)) - before).max(-1)
        assert (difference[0][item[0] == 1] > 1e-6).all(), name
        difference[0][item[0] == 1] = 0
        assert not difference.any(), name
    assert not before[item < 0].any()


@pytest.mark.default_cases("full")
@pytest.mark.parametrize("policy", [p for p in get_args(Remat) if p not in ("none", "offload")])
def test_what_is_recomputed_gives_the_same_gradients(policy):
    given = inputs()
    wanted, found = (gradients(*build(remat=remat), *given) for remat in ("none", policy))
    for (path, a), b in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(
            b, a, rtol=0, atol=1e-5 * max(1, np.abs(a).max()), err_msg=str(path)
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["off", "on", "overlap"])
def test_on_a_mesh_with_tensor_parallelism_it_is_that_of_one_device(way):
    graph, state = build()
    given = inputs()
    mesh_config = MeshConfig(fsdp=2, tensor=2, sequence_parallel=way)
    mesh, rules = make_mesh(mesh_config, jax.devices()[:4]), ShardingRules.of(mesh_config)
    layout = lambda x: sharding(mesh, rules, x.shape, x.get_metadata("axes"))  # noqa: E731
    is_parameter = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    shardings = jax.tree.map(layout, state, is_leaf=is_parameter)
    placed = jax.tree.map(
        lambda x, where: x.replace(jax.device_put(x[...], where)),
        state,
        shardings,
        is_leaf=is_parameter,
    )

    def loss(state, *given):
        with activations_on(mesh, rules), encoding():
            velocity = nnx.merge(graph, state)(*given)
        return jnp.sum(jnp.sin(velocity)), velocity

    found, output = jax.jit(jax.grad(loss, has_aux=True))(placed, *given)
    np.testing.assert_allclose(output, velocity(graph, state, *given), rtol=0, atol=1e-5)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(gradients(graph, state, *given)),
        jax.tree.leaves(found),
        strict=True,
    ):
        np.testing.assert_allclose(
            b, a, rtol=0, atol=1e-5 * max(1, np.abs(a).max()), err_msg=str(path)
        )


def test_bfloat16_is_close_to_float32():
    given = inputs()
    wanted, found = (
        np.asarray(velocity(*build(dtype=t), *given), np.float32)
        for t in (jnp.float32, jnp.bfloat16)
    )
    assert np.abs(found - wanted).mean() < 0.03 * np.abs(wanted).mean()


def test_a_row_too_short_for_an_image_is_refused():
    with pytest.raises(ValueError, match="rows of 5 positions have 0 images of 3 condition tokens"):
        velocity(*build(), *inputs(rows=[[]], length=5))


def test_rows_may_be_missing():
    graph, state = build()
    assert velocity(graph, state, *(jax.tree.map(lambda x: x[:0], inputs()))).shape == (
        0,
        LENGTH,
        CONFIG.patch_values,
    )


def test_blocks_give_every_position_its_own_image():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = [(1, int(rng.integers(5, 17))) for _ in range(int(rng.integers(0, 6)))]
        items = rows_of_images([sizes], 80)
        blocks = ImageBlocks.of(jnp.asarray(items.item), 5, 16, jnp.dtype(jnp.float32))
        vectors = jnp.arange(1.0, 17.0)[None, :, None]
        found = np.asarray(blocks.spread(vectors, 80))[0, :, 0]
        valid = items.item[0] >= 0
        np.testing.assert_array_equal(found[valid], 1 + items.item[0][valid])
