"""The pairs that attention is costed by are those of the blocks that the kernel visits."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.batch import MaskSpec
from mmjax.config.loading import load
from mmjax.kernels.masks import block_pairs, encoder_mask, pad_mask
from mmjax.kernels.tiles import KernelTiles, Tiles
from mmjax.planning import work
from mmjax.planning.flops import executed, recompute_flops
from mmjax.planning.hardware import parse_cluster
from mmjax.planning.work import resolve_attention, row_work, visited_pairs

TILES = KernelTiles(Tiles(16, 8, 4, 1), Tiles(16, 8, 4, 1), Tiles(8, 8, 4, 1))
LENGTH = 100
ROWS = 3
MODEL = load("omni_10b").model


def packed(seed: int, largest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fill rows with parts of random lengths, one behind the other: row, offset and length of each."""
    rng = np.random.default_rng(seed)
    parts = []
    for row in range(ROWS):
        at = 0
        while (n := int(rng.integers(1, largest))) + at <= LENGTH:
            parts.append((row, at, n))
            at += n
    return tuple(np.array(parts)[rng.permutation(len(parts))].T)


def numbers(row: np.ndarray, offset: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Number the parts by where they lie, and write that at their positions: int32 `[ROWS, LENGTH]`, -1 = padding."""
    number = np.full((ROWS, LENGTH), -1, np.int32)
    for k, (r, at, n) in enumerate(sorted(zip(row, offset, length, strict=True))):
        number[r, at : at + n] = k
    return number


def live(mask: MaskSpec) -> np.ndarray:
    """Count the pairs in the blocks of a mask that hold any, by row."""
    mask = pad_mask(mask, -(-LENGTH // 16) * 16)
    return np.asarray(block_pairs(mask, mask, 16, 8)[1]).sum((1, 2)) * 16 * 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(work, "tiles_for", lambda width, length, max_block: TILES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("window", "chunked"), [(0, False), (5, False), (30, False), (5, True), (30, True)]
)
def test_packed_samples_are_counted_by_the_blocks_that_hold_a_pair(seed, window, chunked):
    parts = packed(seed, 60)
    sample = jnp.asarray(numbers(*parts))
    ones = jnp.ones_like(sample)
    pos = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), sample.shape)
    windowed = tuple(range(MODEL.llm.layers)) if window else ()
    llm = replace(MODEL.llm, window=window, windowed=windowed, chunked=chunked)
    begin = jnp.argmax(sample[:, None] == sample[..., None], axis=-1)
    reach = ones * llm.reach(pos - begin) if window else None
    near = MaskSpec(sample, pos, 0 * ones, ones, ones, reach)
    np.testing.assert_array_equal(visited_pairs(llm, *parts, ROWS, LENGTH), live(near))


def test_the_last_device_of_a_row_in_order_attends_most_of_one_long_sample():
    llm = replace(MODEL.llm, windowed=(), attention="flash")
    zero, length = np.zeros(1, np.int64), np.array([1024])
    by_part = visited_pairs(llm, zero, zero, length, 1, 1024, parts=4)
    assert by_part.sum() == visited_pairs(llm, zero, zero, length, 1, 1024)
    np.testing.assert_allclose(by_part / by_part.mean(), np.array([1, 3, 5, 7]) / 4, atol=0.02)
    # Four samples of a quarter each are even.
    short = visited_pairs(
        llm, zero.repeat(4), 256 * np.arange(4), np.full(4, 256), 1, 1024, parts=4
    )
    assert len(set(short)) == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [0, 2, 4])
def test_items_and_their_windows_are_counted_by_the_blocks_that_hold_a_pair(seed, window):
    row, offset, length = packed(seed, 60)
    vision = replace(MODEL.encoders["vision"], window=window, windowed=())
    expected = live(encoder_mask(jnp.asarray(numbers(row, offset, length))))
    if window:  # half of the layers: windows of as many patches lie side by side
        vision = replace(vision, windowed=tuple(range(0, vision.layers, 2)))
        pieces = [
            (r, at + i, min(window**2, n - i))
            for r, at, n in zip(row, offset, length, strict=True)
            for i in range(0, n, window**2)
        ]
        expected = (expected + live(encoder_mask(jnp.asarray(numbers(*np.array(pieces).T))))) / 2
    np.testing.assert_array_equal(
        visited_pairs(vision, row, offset, length, ROWS, LENGTH), expected
    )


@pytest.mark.parametrize("chunk", [6, 50])
def test_the_chunks_of_clips_are_counted_by_the_blocks_that_hold_a_pair(chunk):
    row, offset, length = packed(0, 60)
    audio = replace(MODEL.encoders["audio"], chunk=2 * chunk, attention="flash")
    pieces = [
        (r, at + i, min(chunk, n - i))
        for r, at, n in zip(row, offset, length, strict=True)
        for i in range(0, n, chunk)
    ]
    expected = live(encoder_mask(jnp.asarray(numbers(*np.array(pieces).T))))
    # Frames are twice as many as positions.
    np.testing.assert_array_equal(
        visited_pairs(audio, row, 2 * offset, 2 * length, ROWS, 2 * LENGTH), expected
    )


def test_a_row_of_unknown_contents_counts_all_blocks_that_may_be_visited():
    llm = replace(MODEL.llm, attention="flash")
    model = replace(MODEL, llm=llm, encoders={})
    # Of 7 blocks of 16 queries the first visits 2 of 8 keys, the next 4, up to the 13 of the row.
    assert (
        row_work(model, {"llm": (2, LENGTH)})["llm"].pairs
        == 2 * (2 + 4 + 6 + 8 + 10 + 12 + 13) * 16 * 8
    )
    assert row_work(model, {"llm": (2, LENGTH)}, {"llm": 5.0})["llm"].pairs == 5.0


def test_what_auto_is_depends_on_the_device():
    for name, backend in (("h200", "flash"), ("v5p", "blockwise")):
        resolved = resolve_attention(MODEL, parse_cluster(name).device.rates("bfloat16"))
        assert {resolved.llm.attention, *(e.attention for e in resolved.encoders.values())} == {
            backend
        }
    dense = replace(MODEL, llm=replace(MODEL.llm, attention="dense"))
    assert (
        resolve_attention(dense, parse_cluster("h200").device.rates("bfloat16")).llm.attention
        == "dense"
    )


def test_the_kernel_computes_narrow_heads_as_wide_as_its_products_and_scores_three_times():
    llm = replace(MODEL.llm, attention="flash", heads=4, kv_heads=4, head_width=80, remat="full")
    model = replace(MODEL, llm=llm, encoders={})
    (flops,) = executed(model, {"llm": (1, 96)}, frozenset(), pairs={"llm": 1000.0}).values()
    # multiply-adds of one product of all heads, 80 channels as 128
    products = llm.layers * 4 * 128 * 1000
    # Two products forward, and again for remat=full; 7 backward: scores and gradients of weights in
    # two kernels.
    assert flops.attention == 2 * products * (2 + 2 + 7)
    few, many = (
        row_work(model, {"llm": (1, 96)}, {"llm": pairs})["llm"] for pairs in (1.0, 1000.0)
    )
    products = 2 * 2 * 4 * 128 * 999
    for policy, times in (("attention", 0), ("full", 1)):
        more = recompute_flops(model, "llm", many, policy) - recompute_flops(
            model, "llm", few, policy
        )
        assert times * products <= more < times * 1.1 * products + 1
