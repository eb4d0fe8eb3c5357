"""Windowed vision layers: windows are contiguous in the layers, and the kernel visits little beyond them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax.batch import PADDING, ROW, ItemBatch, MaskSpec
from mmjax.config import ConnectorConfig, MeshConfig, VisionConfig
from mmjax.data.media.patches import item_input
from mmjax.kernels.flash_attention import BlockPlan
from mmjax.kernels.masks import encoder_mask
from mmjax.kernels.tiles import Tiles, tiles_for
from mmjax.kernels.window_attention import WindowPlan
from mmjax.models.layer_stacks import plan_stacks
from mmjax.models.layers import Context
from mmjax.models.rope import rotation_2d
from mmjax.models.vision_encoder import VisionEncoder
from mmjax.parallel.sharding import ShardingRules, activations_on, make_mesh, rows_sharding

TOWER = VisionConfig(
    layers=3, width=16, heads=2, mlp_width=8, patch=2, window=8, windowed=(0, 2), attention="flash",
    connector=ConnectorConfig(merge=2),
)  # fmt: skip
Grids = list[tuple[int, int]]  # rows and columns of the patches of a row's images


def build(config: VisionConfig, dtype: str = "float32") -> VisionEncoder:
    return VisionEncoder(config, plan_stacks(config.layers, "none"), jnp.dtype(dtype), nnx.Rngs(0))


def pack_images(config: VisionConfig, length: int, rows: list[Grids]) -> ItemBatch:
    """Pack rows of random images."""
    rng = np.random.default_rng(0)
    values = np.zeros((len(rows), length, 12), np.uint8)
    item = np.full((len(rows), length), PADDING, np.int32)
    coordinates = np.zeros((len(rows), length, 3), np.int32)
    for row, grids in enumerate(rows):
        at = 0
        for number, grid in enumerate(grids):
            image = item_input(
                config, rng.integers(0, 256, (2 * grid[0], 2 * grid[1], 3), np.uint8)
            )
            span = slice(at, at + len(image.valid))
            values[row, span] = image.values
            item[row, span] = np.where(image.valid, number, PADDING)
            coordinates[row, span] = image.coordinates
            at = span.stop
    offset = np.broadcast_to(np.arange(length, dtype=np.int32), item.shape)
    return jax.tree.map(jnp.asarray, ItemBatch(values, item, coordinates, item, offset))


def encode(encoder: VisionEncoder, items: ItemBatch) -> jax.Array:
    x = encoder.layers(encoder.embedded(items), encoder.context(items))
    return jnp.where(items.item[..., None] >= 0, encoder.restored(x, items), 0)


def encode_in_merge_order(encoder: VisionEncoder, items: ItemBatch) -> jax.Array:
    """Compute the same with patches left where they are, and windows found by their coordinates alone."""
    patch = jnp.maximum(items.coordinates[..., ROW:], 0)
    row, column = jnp.moveaxis(patch // encoder.config.window, -1, 0)
    mask = encoder_mask(items.item)
    window_mask = mask._replace(span=1 + row * 1000 + column, sees=jnp.zeros_like(row))
    context = Context(
        mask, rotation_2d(patch, 8, encoder.config.positions.theta), window_mask=window_mask
    )
    x = encoder.layers(encoder.embed(items, encoder.dtype), context)
    return jnp.where(items.item[..., None] >= 0, x, 0)


ROWS = [[(13, 10), (3, 5), (8, 8), (1, 17)], [(6, 6), (18, 4)]]


@pytest.mark.default_cases("4-False")
@pytest.mark.parametrize(("window", "class_token"), [(4, False), (6, True)])
def test_outputs_and_gradients_are_those_of_patches_in_merge_order(window, class_token):
    encoder = build(replace(TOWER, window=window, attention="dense", class_token=class_token))
    items = pack_images(encoder.config, 320, ROWS)
    graph, params = nnx.split(encoder)

    def of(function):
        def loss(params):
            x = function(nnx.merge(graph, params), items)
            return jnp.sum(jnp.sin(x)), x

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    found, wanted = of(encode), of(encode_in_merge_order)
    assert np.abs(wanted[1]).max() > 1
    for ours, theirs in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * max(1, np.abs(theirs).max()))


def test_windows_and_merge_groups_are_contiguous_in_the_layers():
    encoder = build(replace(TOWER, window=4))
    items = jax.tree.map(np.asarray, pack_images(encoder.config, 320, ROWS))
    span = np.asarray(jax.jit(encoder.context)(items).window_mask.span)
    order = np.asarray(jax.jit(encoder.origin)(items)[1])
    assert (np.sort(order) == items.offset).all()
    np.testing.assert_array_equal(order.reshape(2, -1, 4) % 4, np.tile(np.arange(4), (2, 80, 1)))
    assert (np.diff(span) >= 0).all()
    for row, places in enumerate(order):
        window = np.column_stack([items.item[row], items.coordinates[row] // 4])[places]
        pairs = np.column_stack([span[row], window])[window[:, 0] >= 0]
        # Every number is one window's, and the reverse.
        assert (
            len(np.unique(pairs, axis=0))
            == len(np.unique(pairs[:, 0]))
            == len(np.unique(pairs[:, 1:], axis=0))
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_on_several_devices_need_no_communication(dtype):
    """By lists, and in bfloat16, which other programs round elsewhere, by the kernel of windows."""
    encoder = build(replace(TOWER, window=4), dtype)
    items = pack_images(encoder.config, 64, [[(5, 6)], [(3, 2), (4, 4)]])
    weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64, 16)), dtype)

    def gradient(x, items):
        out, pull_back = jax.vjp(
            lambda x: encoder.restored(encoder.layers(x, encoder.context(items)), items), x
        )
        return out, *pull_back(weight)

    x = jax.jit(encoder.embedded)(items)
    wanted = jax.jit(gradient)(x, items)
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[:2])
    with activations_on(mesh, ShardingRules()):
        arguments = jax.device_put((x, items), rows_sharding(mesh))
        program = jax.jit(gradient).lower(*arguments).compile()
    for ours, theirs in zip(program(*arguments), wanted, strict=True):
        ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
        largest = np.abs(theirs).max() if dtype == "bfloat16" else 0.0
        np.testing.assert_allclose(ours, theirs, atol=max(1e-5, 0.02 * largest))
    text = program.as_text()
    assert not [
        name
        for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        if name in text
    ]


def random_grids(rng: np.random.Generator, length: int) -> Grids:
    """Draw images of 256 to 6,400 patches, up to twice as wide as high or the reverse, until the next does not fit."""
    grids = []
    room = length
    while True:
        patches = np.exp(rng.uniform(np.log(256), np.log(6400)))
        height = 2 * round((patches * np.exp(rng.uniform(-0.69, 0.69))) ** 0.5 / 2)
        width = 2 * round(patches / height / 2)
        if not 256 <= height * width <= 6400:
            continue
        room -= height * width
        if room < 0:
            return grids
        grids.append((height, width))


def visited(mask: MaskSpec, plan: BlockPlan | WindowPlan, tiles: Tiles) -> tuple[int, int]:
    """Count the pairs that an encoder's mask allows, and those in the blocks that the forward kernel visits."""
    if isinstance(plan, WindowPlan):
        # those that begin before the padding behind a row's images
        end = np.max(
            np.where(np.asarray(mask.sample) >= 0, np.arange(1, 1 + mask.pos.shape[1]), 0), 1
        )
        blocks = int(((np.diff(plan.start) > 0) & (plan.start[:, :-1] < end[:, None])).sum())
    else:
        blocks = int(plan.forward.count[..., 1].sum())
    row = np.broadcast_to(np.arange(len(mask.sample))[:, None], mask.sample.shape)
    tokens = np.stack([row, mask.sample, mask.span])[:, np.asarray(mask.sample) >= 0]
    sizes = np.unique(tokens, axis=1, return_counts=True)[1]
    return (sizes.astype(np.int64) ** 2).sum(), blocks * tiles.q * tiles.k


@pytest.mark.default_cases("bfloat16-16384", "float32-16384")
@pytest.mark.parametrize("length", [16_384, 32_768])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_most_pairs_in_the_blocks_that_windowed_layers_visit_are_allowed(length, dtype):
    """By the kernel of windows, and in float32 by lists."""
    rng = np.random.default_rng(0)
    encoder = build(TOWER, dtype)
    items = pack_images(TOWER, length, [random_grids(rng, length) for _ in range(4)])
    context = jax.jit(encoder.context)(items)
    by_lists = dtype == "float32"
    assert isinstance(context.window_plan, BlockPlan if by_lists else WindowPlan)
    tiles = tiles_for(8, length, 64 if by_lists else 128, 4 if by_lists else 2).forward
    block = 32 if by_lists else 64
    near, near_visited = visited(
        context.window_mask, context.window_plan, Tiles(block, block, 0, 0)
    )
    full, full_visited = visited(context.mask, context.plan, tiles)
    # Were no window cut by a border between blocks, each block of 64 patches would visit itself
    # alone.
    valid = np.asarray(context.mask.sample) >= 0
    bound = near / (64 * valid.sum())
    print(
        f"{length}: windows {near / near_visited:.3f} of {bound:.3f}, whole images {full / full_visited:.3f}"
    )
    assert 0.8 <= near / near_visited <= (1 if by_lists else bound)
    # Blocks of 128 queries hold more of other images than those of 32, and are faster all the same.
    assert full / full_visited >= (0.93 if by_lists else 0.88)


@pytest.mark.parametrize("windowed", [(0, 2), (0, 1, 2)])
def test_the_kernel_of_windows_gives_what_dense_attention_gives(windowed):
    """In scans over layers with and without windows, and over those with windows alone; images cut into odd windows."""
    config = replace(TOWER, windowed=windowed)
    items = pack_images(config, 384, [[(14, 10), (6, 6), (8, 8), (2, 17)], [(18, 12)]])

    def gradients(attention: str) -> list[np.ndarray]:
        encoder = build(replace(config, attention=attention), "bfloat16")
        graph, params = nnx.split(encoder)

        def loss(params):
            x = encode(nnx.merge(graph, params), items).astype(jnp.float32)
            return jnp.sum(jnp.sin(x)), x

        found, out = jax.jit(jax.grad(loss, has_aux=True))(params)
        return [np.asarray(x, np.float32) for x in (out, *jax.tree.leaves(found))]

    for ours, theirs in zip(gradients("flash"), gradients("dense"), strict=True):
        assert np.abs(ours - theirs).max() <= 0.03 * max(np.abs(theirs).max(), 1)


def test_windows_longer_than_a_block_and_float32_are_attended_by_lists():
    items = pack_images(TOWER, 320, ROWS)
    for changes, dtype in (
        ({"window": 10}, "bfloat16"),
        ({}, "float32"),
        ({"class_token": True}, "bfloat16"),
    ):
        encoder = build(replace(TOWER, **changes), dtype)
        assert isinstance(encoder.context(items).window_plan, BlockPlan), (changes, dtype)
