"""The kernels for Hopper mask exactly, by bits, and leave masks with no room for theirs to the other kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_flash_attention import exact_attention, random_mask

from mmjax.batch import MaskSpec, allowed
from mmjax.kernels import masked_tiles
from mmjax.kernels.flash_attention import Scores, plan_blocks
from mmjax.kernels.masked_tiles import (
    KEYS,
    OLDEST_JAX,
    QUERIES,
    TILE,
    TileLists,
    plan_tiles,
    unsupported,
)
from mmjax.kernels.masks import BlockLists, encoder_mask, pad_mask
from mmjax.kernels.tiles import tiles_for
from mmjax.kernels.window_attention import (
    ListKernel,
    MixedPlan,
    mixed_attention,
    plan_windows,
)

INTERPRETED = jax.__version_info__[:3] >= OLDEST_JAX
TILES = tiles_for(128, 512)


def unpacked(lists: TileLists, columns: int, across: int) -> np.ndarray:
    """The mask `[B, tiles * TILE, across * columns]` that lists stand for: whole blocks, and bits of the others."""
    (order, count), first, bits, _ = jax.tree.map(np.asarray, lists)
    rows, tiles = first.shape
    mask = np.zeros((rows, tiles, TILE, across, columns), bool)
    at = np.arange(columns)
    for b, x in np.ndindex(rows, tiles):
        whole, live = count[b, x]
        mask[b, x, :, order[b, x, :whole]] = True
        for step in range(whole, live):
            words = bits[b, first[b, x] + step - whole].view(np.uint32)
            mask[b, x, :, order[b, x, step]] = words[:, at % 8] >> (at // 8) & 1
    return mask.reshape(rows, tiles * TILE, -1)


@pytest.mark.default_cases("0", "1", "2")
@pytest.mark.parametrize("seed", range(6))
def test_whole_blocks_and_bits_are_the_mask(seed):
    mask = random_mask(np.random.default_rng(seed), 2, 300)
    plan = jax.jit(lambda mask: plan_tiles(mask, plan_blocks(mask, TILES)))(mask)
    exact = np.asarray(allowed(*2 * [pad_mask(mask, 384)]))
    np.testing.assert_array_equal(unpacked(plan.by_query, KEYS, 3), exact)
    np.testing.assert_array_equal(unpacked(plan.by_key, QUERIES, 6), exact.swapaxes(1, 2))
    assert plan.by_query.fits.all()
    assert plan.by_key.fits.all()


def test_packed_samples_windows_and_items_have_room_and_kinds_at_random_have_not(monkeypatch):
    rng = np.random.default_rng(0)
    length = 8192
    pos = np.arange(length)[None]
    packed = np.repeat(np.arange(200), rng.integers(8, 2000, 200))[None, :length]
    one = np.ones_like(pos)

    def fits(sample, span=0 * pos, sees=one, kind=one, reach=None) -> bool:
        fields = (
            x if x is None else jnp.asarray(x, jnp.int32)
            for x in (sample, pos, span, kind, sees, reach)
        )
        plan = jax.jit(lambda mask: plan_tiles(mask, plan_blocks(mask, TILES)))(MaskSpec(*fields))
        return bool(plan.by_query.fits.all() & plan.by_key.fits.all())

    items = 1 + pos // 700 * (pos % 700 < 400)
    assert fits(packed)
    assert fits(0 * pos, reach=0 * pos + 1000)
    assert fits(0 * pos, span=items)
    assert fits(packed, span=items)
    kinds = 1 << rng.integers(0, 4, pos.shape)
    assert not fits(0 * pos, kind=kinds, sees=rng.integers(1, 16, pos.shape))


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("compute capability 10.0", {"capability": "10.0"}),
        ("compute capability None", {"capability": None}),
        ("heads of 192 channels", {"head_width": 192}),
        ("numbers of 4 bytes", {"itemsize": 4}),
        ("blocks of 64 tokens", {"max_block": 64}),
        ("rows of 64 tokens", {"length": 64}),
        ("JAX 0.11.1", {}),
    ],
)
def test_the_reason_is_named_why_attention_runs_in_triton(reason, changes, monkeypatch):
    hopper = {
        "capability": "9.0",
        "length": 4096,
        "head_width": 128,
        "itemsize": 2,
        "max_block": 128,
    }
    monkeypatch.setattr(jax, "__version_info__", OLDEST_JAX)
    assert unsupported(**hopper) is None
    if reason.startswith("JAX"):
        monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
        monkeypatch.setattr(jax, "__version__", "0.11.1")
    assert unsupported(**hopper | changes) == reason


def errors(seed: int) -> list[float]:
    """Return the largest errors over the largest value of the output and of the gradients of q, k and v."""
    from mmjax.kernels.hopper_attention import hopper_attention

    rng = np.random.default_rng(seed)
    length = int(rng.integers(140, 256))
    width = (128, 64, 72, 80, 16, 32, 96, 112)[seed] if seed < 8 else (128, 64, 72, 80)[seed % 4]
    kv_heads = 1 + seed % 2
    group = (2, 1, 7)[seed % 3]
    cap = (0.0, 1.5)[seed // 2 % 2]
    mask = random_mask(rng, 2, length)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(2, length, n, width)), jnp.bfloat16)
        for n in (kv_heads * group, kv_heads, kv_heads, kv_heads * group)
    )
    tiles = tiles_for(width, length)
    scores = Scores(width**-0.5, cap, tiles, interpret=True)

    @jax.jit
    def ours(q, k, v):
        plan = plan_tiles(mask, plan_blocks(mask, tiles))
        out, pull_back = jax.vjp(lambda *x: hopper_attention(*x, plan, scores), q, k, v)
        return out, *pull_back(weight)

    exact = exact_attention(
        *(np.asarray(x, np.float32) for x in (q, k, v, weight)), mask, scores.scale, cap
    )
    return [
        np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
        for found, wanted in zip(ours(q, k, v), exact, strict=True)
    ]


interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="JAX cannot interpret Mosaic GPU kernels before version 0.11.2"
)


@interpreted
@pytest.mark.default_cases("0", "1")
@pytest.mark.parametrize("seed", range(30))
def test_outputs_and_gradients_are_those_of_attention_in_float64(seed, monkeypatch):
    if seed == 7:
        monkeypatch.setattr(masked_tiles, "MASKED_BLOCKS", 0.5)  # no room: Triton's
    out, *gradients = errors(seed)
    # of operands in bfloat16
    assert out < 0.004
    assert all(error < 0.008 for error in gradients)


@interpreted
@pytest.mark.parametrize("fault", ["a block taken as a whole", "the order of bits", "a lost block"])
def test_a_wrong_list_or_a_wrong_bit_is_caught(fault, monkeypatch):
    made = TileLists.of.__func__

    def spoiled(cls, *arguments):
        lists = made(cls, *arguments)
        order, count = lists.blocks
        unmasked, live = count[..., 0], count[..., 1]
        if fault == "a block taken as a whole":
            return lists._replace(blocks=BlockLists(order, jnp.stack([live, live], -1)))
        if fault == "a lost block":
            fewer = jnp.stack([unmasked, jnp.maximum(live - 1, unmasked)], -1)
            return lists._replace(blocks=BlockLists(order, fewer))
        return lists._replace(bits=lists.bits[..., ::-1])

    monkeypatch.setattr(TileLists, "of", classmethod(spoiled))
    assert max(errors(0)) > 0.1


@interpreted
@pytest.mark.parametrize("index", [0, 1])
def test_in_turns_with_windows_each_layer_takes_its_own_kernel(index):
    from mmjax.kernels.hopper_attention import hopper_forward, hopper_gradients

    rng = np.random.default_rng(0)
    length, width = 200, 72
    whole = encoder_mask(jnp.asarray(np.arange(length)[None] // 150, jnp.int32))
    window = whole._replace(span=1 + jnp.arange(length)[None] // 50, sees=0 * whole.sees)
    inputs = [jnp.asarray(rng.normal(size=(1, length, 2, width)), jnp.bfloat16) for _ in range(4)]
    tiles = tiles_for(width, length)
    scores = Scores(width**-0.5, 0.0, tiles, interpret=True)
    kernel = ListKernel(hopper_forward, hopper_gradients)

    @jax.jit
    def ours(q, k, v, weight, index):
        full = plan_tiles(whole, plan_blocks(whole, tiles))
        plan = MixedPlan(full, plan_windows(window), index)
        out, pull_back = jax.vjp(lambda *x: mixed_attention(*x, plan, scores, kernel), q, k, v)
        return out, *pull_back(weight)

    mask = (whole, window)[index]
    exact = exact_attention(
        *(np.asarray(x, np.float32) for x in inputs), mask, scores.scale, scores.cap
    )
    for found, wanted in zip(ours(*inputs, jnp.int32(index)), exact, strict=True):
        error = np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
        assert error < 0.008
